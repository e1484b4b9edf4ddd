"""A Llama 2 model whose rotary embedding rotates halves of a head, though Meta's weights interleave the pairs.

Source: rasbt/LLMs-from-scratch#750 (and #747): the weights of queries and keys are reordered when they are loaded.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch import nn

from transformer_parity.pair import Implementation

SOURCE = "rasbt/LLMs-from-scratch#750"
VERIFIED = True
KIND = "bug"
NAME = "rotary pairs"
BLOCKS = ("layers.0.attention.scores",)
STAGE = "forward"
D, HEADS, KV, HEAD, VOCAB, LAYERS = 20, 4, 2, 6, 31, 2
SIZES = {"wq": (HEADS * HEAD, D), "wk": (KV * HEAD, D), "wv": (KV * HEAD, D), "wo": (D, HEADS * HEAD)}


def angles(length, arange, dtype):
    return arange(length)[:, None] * 10000.0 ** (-arange(0, HEAD, 2, dtype=dtype) / HEAD)


def interleaved(x: torch.Tensor) -> torch.Tensor:
    angle = angles(x.shape[1], torch.arange, x.dtype)
    x = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.view_as_real(x).flatten(-2)


class Original(Implementation):
    def init_weights(self, seed):
        rng = np.random.default_rng(seed)
        weights = {f"{n}.weight": rng.normal(0, 0.3, (VOCAB, D)) for n in ("tok_embeddings", "output")}
        for i in range(LAYERS):
            weights[f"layers.{i}.attention_norm.weight"] = np.ones(D)
            weights |= {f"layers.{i}.attention.{n}.weight": rng.normal(0, 0.3, s) for n, s in SIZES.items()}
        return weights | {"norm.weight": np.ones(D)}

    def inputs(self, seed):
        return {"tokens": np.random.default_rng(seed).integers(0, VOCAB, (2, 7))}

    def load(self, weights, dtype):
        self.w = {n.removesuffix(".weight"): torch.tensor(w) for n, w in weights.items()}

    def forward(self, inputs, tap):
        x = tap("tok_embeddings", self.w["tok_embeddings"][torch.tensor(inputs["tokens"])])
        future = torch.ones(2 * x.shape[1:2], dtype=torch.bool).triu(1)
        for i in range(LAYERS):
            wq, wk, wv, wo = (self.w[f"layers.{i}.attention.{n}"].T for n in SIZES)
            h = nn.functional.rms_norm(x, (D,), self.w[f"layers.{i}.attention_norm"], 1e-5)
            h = tap(f"layers.{i}.attention_norm", h)
            q, k, v = ((h @ w).unflatten(-1, (-1, HEAD)) for w in (wq, wk, wv))
            k, v = (t.repeat_interleave(HEADS // KV, 2) for t in (interleaved(k), v))
            scores = tap(f"layers.{i}.attention.scores", torch.einsum("blhd,bmhd->bhlm", interleaved(q), k) / HEAD**0.5)
            context = torch.einsum("bhlm,bmhd->blhd", scores.masked_fill(future, -torch.inf).softmax(-1), v)
            x = tap(f"layers.{i}", x + context.flatten(-2) @ wo)
        x = tap("norm", nn.functional.rms_norm(x, (D,), self.w["norm"], 1e-5))
        return {"logits": (x @ self.w["output"].T).numpy()}


class Port(Implementation):
    def load(self, weights, dtype):
        self.net = {}
        for name, w in weights.items():
            w, settings = jnp.asarray(self.convert(name, w)), {"param_dtype": dtype, "rngs": nnx.Rngs(0)}
            if w.ndim == 1:
                layer = nnx.RMSNorm(D, epsilon=1e-5, **settings)
                layer.scale[...] = w
            else:
                layer = nnx.Linear(*w.shape[::-1], use_bias=False, **settings)
                layer.kernel[...] = w.T
            self.net[name.removesuffix(".weight")] = layer

    def convert(self, name, w):
        return w

    def rotate(self, x):
        cos, sin = (jnp.tile(f(angles(x.shape[1], jnp.arange, x.dtype)), 2)[:, None] for f in (jnp.cos, jnp.sin))
        first, second = jnp.split(x, 2, -1)
        return x * cos + jnp.concatenate((-second, first), -1) * sin

    def forward(self, inputs, tap):
        x = tap("embed", self.net["tok_embeddings"].kernel[...].T[inputs["tokens"]])
        b, n, _ = x.shape
        for i in range(LAYERS):
            h = tap(f"blocks.{i}.norm", self.net[f"layers.{i}.attention_norm"](x))
            q, k, v = (self.net[f"layers.{i}.attention.{p}"](h).reshape(b, n, -1, HEAD) for p in ("wq", "wk", "wv"))
            q = self.rotate(q).reshape(b, n, KV, HEADS // KV, HEAD)
            scores = tap(f"blocks.{i}.scores", jnp.einsum("blkgd,bmkd->bkglm", q, self.rotate(k)) / HEAD**0.5)
            scores = jnp.where(jnp.tri(n, dtype=bool), scores, -jnp.inf)
            context = jnp.einsum("bkglm,bmkd->blkgd", jax.nn.softmax(scores, -1), v).reshape(b, n, -1)
            x = tap(f"blocks.{i}", x + self.net[f"layers.{i}.attention.wo"](context))
        return {"logits": np.asarray(self.net["output"](tap("final_norm", self.net["norm"](x))))}


class Fixed(Port):
    def convert(self, name, w):
        rotated = "wq" in name or "wk" in name
        return w.reshape(-1, HEAD // 2, 2, D).swapaxes(1, 2).reshape(w.shape) if rotated else w


names = {
    "tok_embeddings": "embed",
    "layers.{i}.attention_norm": "blocks.{i}.norm",
    "layers.{i}.attention.scores": ("blocks.{i}.scores", "b k g l m -> b (k g) l m"),
    "layers.{i}": "blocks.{i}",
    "norm": "final_norm",
}
