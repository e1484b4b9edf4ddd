"""A correct port to PyTorch that decodes with a preallocated cache of keys and values, whereas JAX recomputes
everything.

Source: huggingface/transformers#27931: keys and values are written to their places in a buffer of fixed length.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from transformer_parity.pair import Implementation

SOURCE = "huggingface/transformers#27931"
VERIFIED = True
KIND = "control"
NAME = ""
BLOCKS = ()
STAGE = "decode"
D, HEADS, FFN, VOCAB, LONGEST, LAYERS = 12, 4, 21, 31, 14, 2
SIZES = {"attn": (D, 3 * D), "proj": (D, D), "fc": (D, FFN), "out": (FFN, D)}


class Original(Implementation):
    def init_weights(self, seed):
        rng = np.random.default_rng(seed)
        weights = {"wte": rng.normal(0, 0.5, (VOCAB, D)), "wpe": rng.normal(0, 0.5, (LONGEST, D))}
        for i in range(LAYERS):
            for name, size in SIZES.items():
                weights[f"h_{i}/{name}/kernel"] = rng.normal(0, 0.4, size)
                weights[f"h_{i}/{name}/bias"] = np.zeros(size[1])
        return weights

    def inputs(self, seed):
        rng = np.random.default_rng(seed)
        return {"prompt": rng.integers(0, VOCAB, (3, 6)), "lengths": rng.permutation([6, 4, 1])}

    def load(self, weights, dtype):
        self.w = {name: jnp.asarray(value) for name, value in weights.items()}

    def dense(self, name, x):
        return x @ self.w[f"{name}/kernel"] + self.w[f"{name}/bias"]

    def logits(self, tokens, start):
        """Return the logits [B, L, V] of left-padded tokens [B, L] whose rows begin at start [B]."""
        index = jnp.arange(tokens.shape[1])
        x = self.w["wte"][tokens] + self.w["wpe"][jnp.maximum(index - start[:, None], 0)]
        mask = (index >= start[:, None])[:, None] & jnp.tri(len(index), dtype=bool) | jnp.eye(len(index), dtype=bool)
        for i in range(LAYERS):
            qkv = self.dense(f"h_{i}/attn", jax.nn.standardize(x)).reshape(*x.shape[:2], 3, HEADS, -1)
            scores = jnp.einsum("blhd,bmhd->bhlm", qkv[:, :, 0], qkv[:, :, 1]) / (D // HEADS) ** 0.5
            weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -jnp.inf), -1)
            context = jnp.einsum("bhlm,bmhd->blhd", weights, qkv[:, :, 2])
            x = x + self.dense(f"h_{i}/proj", context.reshape(x.shape))
            x = x + self.dense(f"h_{i}/out", jax.nn.gelu(self.dense(f"h_{i}/fc", jax.nn.standardize(x))))
        return jax.nn.standardize(x) @ self.w["wte"].T

    def forward(self, inputs, tap):
        tokens, start = padded(inputs)
        return {"logits": np.asarray(self.logits(tokens, start) * (np.arange(6) >= start[:, None])[..., None])}

    def next_logits(self, inputs, prefix):
        tokens, start = padded(inputs)
        return np.asarray(self.logits(np.concatenate((tokens, prefix), 1), start)[:, -1])

    def next_logits_cached(self, inputs, prefix, cache):
        return self.next_logits(inputs, prefix), None


def padded(inputs):
    start = 6 - inputs["lengths"]
    return np.where(np.arange(6) < start[:, None], 0, inputs["prompt"]), start


class Port(Implementation):
    def load(self, weights, dtype):
        self.w = {name: torch.tensor(value) for name, value in weights.items()}

    def dense(self, name, x):
        return nn.functional.linear(x, self.w[f"{name}/kernel"].T, self.w[f"{name}/bias"])

    def run(self, tokens, start, cache, position):
        tokens, start = torch.tensor(tokens), torch.tensor(start)[:, None]
        index = position + torch.arange(tokens.shape[1])
        x = self.w["wte"][tokens] + self.w["wpe"][(index - start).clamp(min=0)]
        keys = torch.arange(LONGEST)
        mask = (keys >= start)[:, None] & (keys <= index[:, None]) | (keys == index[:, None])
        for i in range(LAYERS):
            qkv = self.dense(f"h_{i}/attn", nn.functional.layer_norm(x, (D,))).unflatten(-1, (3, HEADS, -1))
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            cache[i, 0][:, :, index], cache[i, 1][:, :, index] = k, v
            context = nn.functional.scaled_dot_product_attention(q, *cache[i], mask[:, None])
            x = x + self.dense(f"h_{i}/proj", context.transpose(1, 2).flatten(-2))
            h = self.dense(f"h_{i}/fc", nn.functional.layer_norm(x, (D,)))
            x = x + self.dense(f"h_{i}/out", nn.functional.gelu(h, approximate="tanh"))
        return (nn.functional.layer_norm(x, (D,)) @ self.w["wte"].T).numpy()

    def empty(self, rows):
        return self.w["wte"].new_zeros(LAYERS, 2, rows, HEADS, LONGEST, D // HEADS)

    def forward(self, inputs, tap):
        tokens, start = padded(inputs)
        return {"logits": self.run(tokens, start, self.empty(3), 0) * (np.arange(6) >= start[:, None])[..., None]}

    def next_logits(self, inputs, prefix):
        tokens, start = padded(inputs)
        return self.run(np.concatenate((tokens, prefix), 1), start, self.empty(3), 0)[:, -1]

    def next_logits_cached(self, inputs, prefix, cache):
        tokens, start = padded(inputs)
        if cache is None:
            cache = self.empty(3)
            return self.run(tokens, start, cache, 0)[:, -1], cache
        return self.run(prefix[:, -1:], start, cache, 5 + prefix.shape[1])[:, -1], cache
