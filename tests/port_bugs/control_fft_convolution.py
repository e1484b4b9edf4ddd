"""A control: a gated layer with a long causal convolution (S4D), once computed directly, once by Fourier transforms.

Source: none; the port is correct.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from transformer_parity.pair import Implementation

SOURCE = ""
VERIFIED = True
KIND = "control"
NAME = ""
BLOCKS = ()
STAGE = "forward"

DIM, STATE, LENGTH = 5, 4, 23


class Original(Implementation):
    def init_weights(self, seed):
        rng = np.random.default_rng(seed)
        weights = {
            "in_proj.weight": rng.normal(0, DIM**-0.5, (2 * DIM, DIM)),
            "in_proj.bias": np.zeros(2 * DIM),
            "kernel.log_dt": rng.uniform(np.log(0.01), np.log(0.3), DIM),
            "kernel.A_log": np.log(np.tile(np.arange(1, STATE + 1), (DIM, 1))),
            "kernel.C": rng.normal(size=(DIM, STATE)),
            "D": np.ones(DIM),
            "norm.weight": np.ones(DIM),
            "norm.bias": np.zeros(DIM),
            "out_proj.weight": rng.normal(0, DIM**-0.5, (DIM, DIM)),
        }
        return {name: value.astype(np.float32) for name, value in weights.items()}

    def inputs(self, seed):
        return {"x": np.random.default_rng(seed).normal(size=(3, LENGTH, DIM)).astype(np.float32)}

    def load(self, weights, dtype):
        self.w = {name: torch.from_numpy(value) for name, value in weights.items()}

    @torch.no_grad()
    def forward(self, inputs, tap):
        w, residual = self.w, torch.from_numpy(inputs["x"])
        x = nn.functional.layer_norm(residual, (DIM,), w["norm.weight"], w["norm.bias"])
        gate, x = tap("in_proj", nn.functional.linear(x, w["in_proj.weight"], w["in_proj.bias"])).chunk(2, -1)
        steps = -w["kernel.A_log"].exp() * w["kernel.log_dt"].exp()[:, None]
        powers = (steps[..., None] * torch.arange(LENGTH, dtype=x.dtype)).exp()
        kernel = (w["kernel.C"] * (steps.exp() - 1) / -w["kernel.A_log"].exp())[..., None] * powers
        kernel = tap("kernel", kernel.sum(1))
        y = nn.functional.pad(x.mT, (LENGTH - 1, 0))
        y = nn.functional.conv1d(y, kernel.flip(-1)[:, None], groups=DIM) + w["D"][:, None] * x.mT
        y = tap("conv", y.mT) * nn.functional.silu(gate)
        return {"x": tap("out_proj", residual + y @ w["out_proj.weight"].T).numpy()}


class Port(Implementation):
    def load(self, weights, dtype):
        self.w = {name: jnp.asarray(value) for name, value in weights.items()}

    def forward(self, inputs, tap):
        w, residual = self.w, jnp.asarray(inputs["x"])
        x = residual - residual.mean(-1, keepdims=True)
        x = x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5) * w["norm.weight"] + w["norm.bias"]
        gate, x = jnp.split(tap("in_proj", x @ w["in_proj.weight"].T + w["in_proj.bias"]), 2, -1)
        a = -jnp.exp(w["kernel.A_log"])
        steps = a * jnp.exp(w["kernel.log_dt"])[:, None]
        powers = jnp.exp(steps[..., None] * np.arange(LENGTH))
        kernel = tap("kernel", jnp.einsum("dn,dnl->dl", w["kernel.C"] * jnp.expm1(steps) / a, powers))
        spectrum = jnp.fft.rfft(x, 2 * LENGTH, axis=1) * jnp.fft.rfft(kernel, 2 * LENGTH, axis=1).T
        y = jnp.fft.irfft(spectrum, 2 * LENGTH, axis=1)[:, :LENGTH] + w["D"] * x
        y = tap("conv", y) * jax.nn.silu(gate)
        return {"x": np.asarray(tap("out_proj", residual + y @ w["out_proj.weight"].T))}
