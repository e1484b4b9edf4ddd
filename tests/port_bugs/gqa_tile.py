"""Grouped-query attention in PyTorch that repeats all key heads in turn, though neighboring queries share a key head.

Source: ekzhang/jax-js#180: the heads of keys and values are repeated one by one, as JAX does, instead of tiled.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from transformer_parity.pair import Implementation

SOURCE = "ekzhang/jax-js#180"
VERIFIED = True
KIND = "bug"
NAME = "transposed"
BLOCKS = ("blocks.0.keys", "blocks.0.values")
STAGE = "forward"
D, HEADS, KV, HEAD, LAYERS = 13, 6, 3, 4, 2
SIZES = {"query": (D, HEADS * HEAD), "key": (D, KV * HEAD), "value": (D, KV * HEAD), "out": (HEADS * HEAD, D)}


class Block(nnx.Module):
    def __init__(self, rngs, dtype=jnp.float32):
        self.norm = nnx.LayerNorm(D, epsilon=1e-6, param_dtype=dtype, rngs=rngs)
        for name, size in SIZES.items():
            setattr(self, name, nnx.Linear(*size, param_dtype=dtype, rngs=rngs))

    def __call__(self, x, valid, tap):
        b, n, _ = x.shape
        h = tap("norm", self.norm(x))
        q, k, v = (f(h).reshape(b, n, -1, HEAD) for f in (self.query, self.key, self.value))
        k, v = tap("keys", jnp.repeat(k, HEADS // KV, 2)), tap("values", jnp.repeat(v, HEADS // KV, 2))
        scores = jnp.einsum("blhd,bmhd->bhlm", tap("queries", q), k) / HEAD**0.5
        scores = jnp.where(valid[:, None, None], scores, -jnp.inf)
        context = tap("context", jnp.einsum("bhlm,bmhd->blhd", jax.nn.softmax(scores, -1), v))
        return x + tap("out", self.out(context.reshape(b, n, -1)))


class Original(Implementation):
    def init_weights(self, seed):
        weights = {}
        for i in range(LAYERS):
            state = nnx.to_flat_state(nnx.state(Block(nnx.Rngs(2 * seed + i))))
            weights |= {"/".join((f"block_{i}", *path)): np.asarray(value[...]) for path, value in state}
        return weights

    def inputs(self, seed):
        rng = np.random.default_rng(seed)
        return {"x": rng.normal(size=(2, 7, D)), "lengths": rng.permutation([7, 5])}

    def load(self, weights, dtype):
        self.blocks = [Block(nnx.Rngs(0), dtype) for _ in range(LAYERS)]
        for name, value in weights.items():
            block, layer, kind = name.split("/")
            getattr(getattr(self.blocks[int(block[-1])], layer), kind)[...] = jnp.asarray(value)

    def forward(self, inputs, tap):
        x, valid = jnp.asarray(inputs["x"]), jnp.arange(7) < inputs["lengths"][:, None]
        for i, block in enumerate(self.blocks):
            x = block(x, valid, lambda n, v, i=i: tap(f"blocks.{i}.{n}", v))
        return {"hidden": np.asarray(x)}


class Port(Implementation):
    def load(self, weights, dtype):
        self.blocks = []
        for i in range(LAYERS):
            w = {n: torch.tensor(v) for n, v in weights.items() if n.startswith(f"block_{i}/")}
            block = torch.nn.ModuleDict({n: torch.nn.Linear(*size) for n, size in SIZES.items()})
            block["norm"] = torch.nn.LayerNorm(D, eps=1e-6)
            for name, layer in block.items():
                kernel, bias = w.get(f"block_{i}/{name}/kernel"), w[f"block_{i}/{name}/bias"]
                kernel = w[f"block_{i}/norm/scale"] if kernel is None else kernel.T
                layer.weight, layer.bias = torch.nn.Parameter(kernel), torch.nn.Parameter(bias)
            self.blocks.append(block)

    def repeat(self, x):
        return x.repeat(1, 1, HEADS // KV, 1)

    @torch.no_grad()
    def forward(self, inputs, tap):
        x, valid = torch.tensor(inputs["x"]), torch.arange(7) < torch.tensor(inputs["lengths"])[:, None]
        for i, block in enumerate(self.blocks):
            h = tap(f"blocks.{i}.norm", block["norm"](x))
            q, k, v = (block[n](h).unflatten(-1, (-1, HEAD)) for n in ("query", "key", "value"))
            k, v = tap(f"blocks.{i}.keys", self.repeat(k)), tap(f"blocks.{i}.values", self.repeat(v))
            q, k, v = (t.transpose(1, 2) for t in (tap(f"blocks.{i}.queries", q), k, v))
            context = torch.nn.functional.scaled_dot_product_attention(q, k, v, valid[:, None, None])
            context = tap(f"blocks.{i}.context", context.transpose(1, 2))
            x = x + tap(f"blocks.{i}.out", block["out"](context.flatten(-2)))
        return {"hidden": x.numpy()}


class Fixed(Port):
    def repeat(self, x):
        return x.repeat_interleave(HEADS // KV, 2)
