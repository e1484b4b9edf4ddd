"""A small convolutional network, ported from PyTorch to Flax NNX: BatchNorm used the statistics of the batch.

Source: apache/tvm#17752: programs exported in evaluation mode were imported with BatchNorm in training mode; the fix
uses the running statistics.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch import nn

from transformer_parity.pair import Implementation

SOURCE = "apache/tvm#17752"
VERIFIED = True
KIND = "bug"
NAME = "training mode"
BLOCKS = ("bn1",)
STAGE = "forward"
names = {name: (name, "b h w c -> b c h w") for name in ("conv1", "bn1", "conv2", "bn2")} | {"pool": "mean", "fc": "fc"}


class Original(Implementation):
    def __init__(self):
        self.model = nn.Module()
        self.model.conv1, self.model.bn1 = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.model.conv2, self.model.bn2 = nn.Conv2d(6, 8, 3, 2, padding=1, bias=False), nn.BatchNorm2d(8)
        self.model.fc = nn.Linear(8, 5)

    def init_weights(self, seed):
        torch.manual_seed(seed)
        weights = {name: value.numpy() for name, value in Original().model.state_dict().items()}
        return weights | {f"bn{i}.num_batches_tracked": np.array(1200) for i in (1, 2)}

    def inputs(self, seed):
        pixels = np.random.default_rng(seed).integers(0, 256, (3, 3, 11, 9)) / 255
        mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
        return {"image": (pixels - mean[:, None, None]) / std[:, None, None]}

    def load(self, weights, dtype):
        self.model.to(getattr(torch, dtype)).eval()
        self.model.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})

    def forward(self, inputs, tap):
        m = self.model
        with torch.no_grad():
            x = tap("bn1", m.bn1(tap("conv1", m.conv1(torch.tensor(inputs["image"]))))).relu()
            x = tap("bn2", m.bn2(tap("conv2", m.conv2(x)))).relu()
            return {"scores": tap("fc", m.fc(tap("pool", x.mean((2, 3))))).numpy()}


class Net(nnx.Module):
    def __init__(self, dtype):
        options = {"param_dtype": dtype, "rngs": nnx.Rngs(0)}
        self.conv1 = nnx.Conv(3, 6, (3, 3), padding=1, use_bias=False, **options)
        self.conv2 = nnx.Conv(6, 8, (3, 3), 2, padding=1, use_bias=False, **options)
        self.bn1, self.bn2 = nnx.BatchNorm(6, **options), nnx.BatchNorm(8, **options)
        self.fc = nnx.Linear(8, 5, **options)


class Port(Implementation):
    kinds = {"weight": "scale", "bias": "bias", "running_mean": "mean", "running_var": "var"}

    def load(self, weights, dtype):
        self.model = Net(getattr(jnp, dtype))
        for name, value in weights.items():
            layer, kind = name.split(".")
            if value.ndim > 1:
                getattr(self.model, layer).kernel[...] = jnp.asarray(np.moveaxis(value, (0, 1), (-1, -2)))
            elif kind in self.kinds:
                getattr(getattr(self.model, layer), self.kinds[kind])[...] = jnp.asarray(value)

    def forward(self, inputs, tap):
        m, x = self.model, jnp.asarray(inputs["image"]).transpose(0, 2, 3, 1)
        x = nnx.relu(tap("bn1", m.bn1(tap("conv1", m.conv1(x)))))
        x = nnx.relu(tap("bn2", m.bn2(tap("conv2", m.conv2(x)))))
        return {"scores": np.asarray(tap("fc", m.fc(tap("mean", x.mean((1, 2))))))}


class Fixed(Port):
    def load(self, weights, dtype):
        super().load(weights, dtype)
        self.model.eval()
