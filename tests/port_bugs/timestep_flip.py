"""A block of a diffusion U-Net; the port always put the sines of the time before the cosines and ignored the
configuration.

Source: huggingface/diffusers#1369: the Flax module of the time got the flag that puts the cosines first, as the PyTorch
module had.
"""

from __future__ import annotations

import flax.linen as fnn
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from transformer_parity.pair import Implementation

SOURCE = "huggingface/diffusers#1369"
VERIFIED = True
KIND = "bug"
NAME = "order"
BLOCKS = ("time_proj",)
STAGE = "forward"

names = {
    "time_embedding": "t_emb",
    "conv_in": ("conv_in", "b h w c -> b c h w"),
    "resnet.norm1": ("resnet/norm1", "b h w c -> b c h w"),
    "resnet.conv1": ("resnet/conv1", "b h w c -> b c h w"),
    "resnet": ("resnet/sum", "b h w c -> b c h w"),
}
WIDTH, TIME = 6, 10


def build():
    layers = {
        "linear_1": nn.Linear(TIME, 13),
        "linear_2": nn.Linear(13, 13),
        "conv_in": nn.Conv2d(4, WIDTH, 3, padding=1),
        "norm1": nn.GroupNorm(3, WIDTH),
        "conv1": nn.Conv2d(WIDTH, 4, 3, padding=1),
        "time_emb_proj": nn.Linear(13, 4),
    }
    return nn.ModuleDict(layers)


class Original(Implementation):
    def init_weights(self, seed):
        rng = np.random.default_rng(seed)
        weights = {"norm1.weight": np.ones(WIDTH)}
        for name, p in build().named_parameters():
            weights.setdefault(name, rng.normal(0, 0.3, p.shape) * ("weight" in name))
        return {name: value.astype(np.float32) for name, value in weights.items()}

    def inputs(self, seed):
        rng = np.random.default_rng(seed)
        return {"sample": rng.normal(size=(2, 4, 7, 5)).astype(np.float32), "timestep": rng.integers(1, 1000, 2)}

    def load(self, weights, dtype):
        self.model = build().to(getattr(torch, dtype))
        self.model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})

    @torch.no_grad()
    def forward(self, inputs, tap):
        m, sample, silu = self.model, torch.from_numpy(inputs["sample"]), nn.functional.silu
        frequencies = 10000 ** (-torch.arange(TIME // 2, dtype=sample.dtype) / (TIME // 2))
        angles = torch.from_numpy(inputs["timestep"])[:, None] * frequencies
        t = tap("time_proj", torch.cat([angles.cos(), angles.sin()], -1))
        t = tap("time_embedding", m["linear_2"](silu(m["linear_1"](t))))
        x = tap("conv_in", m["conv_in"](sample))
        y = tap("resnet.conv1", m["conv1"](silu(tap("resnet.norm1", m["norm1"](x)))))
        y = y + m["time_emb_proj"](silu(t))[:, :, None, None]
        return {"noise": tap("resnet", sample + y).numpy()}


class UNet(fnn.Module):
    flip_sin_to_cos: bool = False

    @fnn.compact
    def __call__(self, sample, timestep, tap):
        frequencies = 10000 ** (-jnp.arange(TIME // 2, dtype=sample.dtype) / (TIME // 2))
        angles = timestep[:, None] * frequencies
        parts = [jnp.cos(angles), jnp.sin(angles)] if self.flip_sin_to_cos else [jnp.sin(angles), jnp.cos(angles)]
        t = fnn.Dense(13, name="linear_1")(tap("time_proj", jnp.concatenate(parts, -1)))
        t = tap("t_emb", fnn.Dense(13, name="linear_2")(fnn.silu(t)))
        x = tap("conv_in", fnn.Conv(WIDTH, (3, 3), name="conv_in")(sample))
        y = tap("resnet/norm1", fnn.GroupNorm(3, epsilon=1e-5, name="norm1")(x))
        y = tap("resnet/conv1", fnn.Conv(4, (3, 3), name="conv1")(fnn.silu(y)))
        y = y + fnn.Dense(4, name="time_emb_proj")(fnn.silu(t))[:, None, None]
        return tap("resnet/sum", sample + y)


class Port(Implementation):
    model = UNet()

    def load(self, weights, dtype):
        self.params = {}
        for name, value in weights.items():
            layer, key = name.split(".")
            key = {"bias": "bias", "weight": "scale" if value.ndim == 1 else "kernel"}[key]
            axes = {1: (0,), 2: (1, 0), 4: (2, 3, 1, 0)}[value.ndim]
            self.params.setdefault(layer, {})[key] = jnp.asarray(value.transpose(axes))

    def forward(self, inputs, tap):
        sample = jnp.asarray(inputs["sample"].transpose(0, 2, 3, 1))
        noise = self.model.apply({"params": self.params}, sample, jnp.asarray(inputs["timestep"]), tap)
        return {"noise": np.asarray(noise).transpose(0, 3, 1, 2)}


class Fixed(Port):
    model = UNet(flip_sin_to_cos=True)
