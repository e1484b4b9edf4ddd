"""A small VQ-VAE, ported from PyTorch to JAX: the codebook loss was computed after the straight-through step.

Source: andylolu2/jax-vqvae-gpt#2: the fix computes both losses of the quantizer before the straight-through estimator.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn
from torch.nn.functional import mse_loss

from transformer_parity.pair import Implementation

SOURCE = "andylolu2/jax-vqvae-gpt#2"
VERIFIED = True
KIND = "bug"
NAME = "order"
BLOCKS = ()
STAGE = "gradients"
BETA = 0.25


class Original(Implementation):
    def __init__(self):
        encoder = nn.Sequential(nn.Linear(7, 13), nn.ReLU(), nn.Linear(13, 5))
        self.m = nn.ModuleDict({"encoder": encoder, "codebook": nn.Embedding(11, 5), "decoder": nn.Linear(5, 7)})

    def init_weights(self, seed):
        rng = np.random.default_rng(seed)
        shapes = {name: value.shape for name, value in self.m.state_dict().items()}
        weights = {name: rng.normal(0, shape[-1] ** -0.5, shape) for name, shape in shapes.items()}
        return weights | {name: np.zeros(shape) for name, shape in shapes.items() if name.endswith("bias")}

    def inputs(self, seed):
        walk = np.random.default_rng(seed).normal(0, 0.6, (3, 6, 7)).cumsum(1)
        return {"frames": walk - walk.mean(1, keepdims=True)}

    def load(self, weights, dtype):
        self.m.to(getattr(torch, dtype)).eval()
        self.m.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})

    def apply(self, x, tap=lambda name, value: value):
        z, table = tap("encoder", self.m["encoder"](x)), self.m["codebook"].weight
        distances = (z**2).sum(-1, keepdim=True) - 2 * z @ table.T + (table**2).sum(-1)
        codes = tap("distances", distances).argmin(-1)
        quantized = self.m["codebook"](codes)
        loss = mse_loss(quantized, z.detach()) + BETA * mse_loss(z, quantized.detach())
        y = tap("decoder", self.m["decoder"](tap("quantized", z + (quantized - z).detach())))
        return y, codes, mse_loss(y, x) + loss

    def forward(self, inputs, tap):
        y, codes, _ = self.apply(torch.tensor(inputs["frames"]), tap)
        return {"reconstruction": y.detach().numpy(), "codes": codes.numpy()}

    def gradients(self, inputs):
        self.m.zero_grad()
        loss = self.apply(torch.tensor(inputs["frames"]))[2]
        loss.backward()
        return {name: p.grad.numpy() for name, p in self.m.named_parameters()} | {"loss": loss.detach().numpy()}


class Port(Implementation):
    def load(self, weights, dtype):
        self.params = {name: jnp.asarray(value) for name, value in weights.items()}

    def vq_loss(self, z, quantized, straight_through):
        stop = jax.lax.stop_gradient
        return jnp.mean((straight_through - stop(z)) ** 2) + BETA * jnp.mean((stop(straight_through) - z) ** 2)

    def apply(self, p, x, tap=lambda name, value: value):
        h = jax.nn.relu(x @ p["encoder.0.weight"].T + p["encoder.0.bias"])
        z = tap("encoder", h @ p["encoder.2.weight"].T + p["encoder.2.bias"])
        table = p["codebook.weight"]
        distances = (z**2).sum(-1, keepdims=True) - 2 * z @ table.T + (table**2).sum(-1)
        codes = tap("distances", distances).argmin(-1)
        quantized = table[codes]
        straight_through = tap("quantized", z + jax.lax.stop_gradient(quantized - z))
        y = tap("decoder", straight_through @ p["decoder.weight"].T + p["decoder.bias"])
        return y, codes, jnp.mean((y - x) ** 2) + self.vq_loss(z, quantized, straight_through)

    def forward(self, inputs, tap):
        y, codes, _ = self.apply(self.params, jnp.asarray(inputs["frames"]), tap)
        return {"reconstruction": np.asarray(y), "codes": np.asarray(codes)}

    def gradients(self, inputs):
        x = jnp.asarray(inputs["frames"])
        loss, grads = jax.value_and_grad(lambda params: self.apply(params, x)[2])(self.params)
        return {name: np.asarray(g) for name, g in grads.items()} | {"loss": np.asarray(loss)}


class Fixed(Port):
    def vq_loss(self, z, quantized, straight_through):
        return super().vq_loss(z, quantized, quantized)
