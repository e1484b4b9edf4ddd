"""A correct port to JAX that computes attention over chunks of keys with a running maximum, like flash attention.

Source: Milakov and Gimelshein, arXiv:1805.02867: the softmax is rescaled whenever a chunk has a larger maximum.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from transformer_parity.pair import Implementation

SOURCE = "arXiv:1805.02867"
VERIFIED = False
KIND = "control"
NAME = ""
BLOCKS = ()
STAGE = "forward"
D, HEADS, FFN, LENGTH, CHUNK = 15, 3, 23, 11, 4


def encoder() -> nn.Module:
    sizes = {"in_proj": (D, 3 * D), "out_proj": (D, D), "linear1": (D, FFN), "linear2": (FFN, D)}
    norms = {n: nn.LayerNorm(D) for n in ("norm1", "norm2")}
    return nn.ModuleDict({n: nn.Linear(*s) for n, s in sizes.items()} | norms)


class Original(Implementation):
    def init_weights(self, seed):
        torch.manual_seed(seed)
        return {name: value.numpy() for name, value in encoder().state_dict().items()}

    def inputs(self, seed):
        rng = np.random.default_rng(seed)
        return {"x": 3 * rng.normal(size=(3, LENGTH, D)), "lengths": rng.permutation([LENGTH, 6, 2])}

    def load(self, weights, dtype):
        self.model = encoder().to(getattr(torch, dtype)).eval()
        self.model.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})

    @torch.no_grad()
    def forward(self, inputs, tap):
        m, x = self.model, torch.tensor(inputs["x"])
        valid = torch.arange(LENGTH) < torch.tensor(inputs["lengths"])[:, None]
        qkv = tap("qkv", m["in_proj"](tap("norm1", m["norm1"](x))))
        q, k, v = qkv.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.mT / (D // HEADS) ** 0.5).masked_fill(~valid[:, None, None], -torch.inf)
        context = tap("context", (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))
        x = tap("attention", x + m["out_proj"](context))
        h = tap("hidden", m["linear1"](tap("norm2", m["norm2"](x))).relu())
        return {"output": tap("output", x + m["linear2"](h)).numpy()}


class Port(Implementation):
    def load(self, weights, dtype):
        self.w = {name: jnp.asarray(value) for name, value in weights.items()}

    def linear(self, name, x):
        return x @ self.w[f"{name}.weight"].T + self.w[f"{name}.bias"]

    def norm(self, name, x):
        x = jax.nn.standardize(x, epsilon=1e-5)
        return x * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def attention(self, q, k, v, valid):
        pad = -LENGTH % CHUNK
        k, v = (jnp.pad(t, ((0, 0), (0, pad), (0, 0), (0, 0))) for t in (k, v))
        valid = jnp.pad(valid, ((0, 0), (0, pad)))
        chunks = [t.reshape(t.shape[0], -1, CHUNK, *t.shape[2:]).swapaxes(0, 1) for t in (k, v, valid)]

        def step(carry, chunk):
            total, denominator, maximum = carry
            k, v, valid = chunk
            scores = jnp.einsum("blhd,bmhd->blhm", q, k) / (D // HEADS) ** 0.5
            scores = jnp.where(valid[:, None, None], scores, -jnp.inf)
            new = jnp.maximum(maximum, scores.max(-1))
            weights, rescale = jnp.exp(scores - new[..., None]), jnp.exp(maximum - new)
            total = total * rescale[..., None] + jnp.einsum("blhm,bmhd->blhd", weights, v)
            return (total, denominator * rescale + weights.sum(-1), new), None

        start = jnp.zeros_like(q), jnp.zeros_like(q[..., 0]), jnp.full_like(q[..., 0], -jnp.inf)
        (total, denominator, _), _ = jax.lax.scan(step, start, tuple(chunks))
        return total / denominator[..., None]

    def forward(self, inputs, tap):
        x, valid = jnp.asarray(inputs["x"]), jnp.arange(LENGTH) < inputs["lengths"][:, None]
        qkv = tap("qkv", self.linear("in_proj", tap("norm1", self.norm("norm1", x))))
        q, k, v = jnp.moveaxis(qkv.reshape(*x.shape[:2], 3, HEADS, -1), 2, 0)
        context = tap("context", self.attention(q, k, v, valid).reshape(x.shape))
        x = tap("attention", x + self.linear("out_proj", context))
        h = tap("hidden", jax.nn.relu(self.linear("linear1", tap("norm2", self.norm("norm2", x)))))
        return {"output": np.asarray(tap("output", x + self.linear("linear2", h)))}
