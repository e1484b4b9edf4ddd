"""A decoder with rotary positions, ported from PyTorch to MLX: each cached step came one position too late.

Source: microsoft/onnxruntime-genai#2354: the length of the past already included the token to be processed, so that the
cache kept an unwritten slot after the prompt; with the fix, it includes only the tokens in the cache.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn
import numpy as np
import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from transformer_parity.pair import Implementation

SOURCE = "microsoft/onnxruntime-genai#2354"
VERIFIED = True
KIND = "bug"
NAME = "shifted"
BLOCKS = ()
STAGE = "decode"
VOCAB, D, HEADS, HEAD_DIM, CACHE = 29, 10, 2, 6, 32
names = {
    "embed_tokens": "embed",
    "q_rotated": "queries",
    "k_rotated": "keys",
    "context": ("attention", "b l (h d) -> b h l d"),
    "lm_head": "logits",
}


class Decoding(Implementation):
    def past(self, length):
        return length - 1

    def forward(self, inputs, tap):
        return {"logits": self.apply(inputs["ids"], None, 0, tap)[0]}

    def next_logits(self, inputs, prefix):
        return self.next_logits_cached(inputs, prefix, None)[0]

    def next_logits_cached(self, inputs, prefix, cache):
        ids = np.concatenate([inputs["ids"], prefix], 1)
        past = self.past(ids.shape[1]) if cache else 0
        logits, cache = self.apply(ids[:, -1:] if cache else ids, cache, past)
        return logits[:, -1], cache


class Original(Decoding):
    def init_weights(self, seed):
        rng = np.random.default_rng(seed)
        shapes = {"embed_tokens": (VOCAB, D), "o_proj": (D, HEADS * HEAD_DIM), "lm_head": (VOCAB, D)}
        shapes |= {f"{kind}_proj": (HEADS * HEAD_DIM, D) for kind in "qkv"}
        weights = {f"{name}.weight": rng.normal(0, 1.5 * shape[1] ** -0.5, shape) for name, shape in shapes.items()}
        return weights | {"norm.weight": np.ones(D)}

    def inputs(self, seed):
        return {"ids": np.random.default_rng(seed).integers(0, VOCAB, (2, 5))}

    def load(self, weights, dtype):
        self.w = {name.removesuffix(".weight"): torch.tensor(value) for name, value in weights.items()}

    def rotate(self, x, start):
        frequencies = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2, dtype=x.dtype) / HEAD_DIM)
        angles = (torch.arange(start, start + x.shape[2])[:, None] * frequencies).repeat(1, 2)
        a, b = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-b, a], -1) * angles.sin()

    def apply(self, ids, cache, past, tap=lambda name, value: value):
        x = tap("embed_tokens", self.w["embed_tokens"][torch.tensor(ids)])
        h = rms_norm(x, (D,), self.w["norm"], 1e-6)
        q, k, v = ((h @ self.w[f"{i}_proj"].T).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for i in "qkv")
        q, k = tap("q_rotated", self.rotate(q, past)), tap("k_rotated", self.rotate(k, past))
        if cache:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        context = tap("context", scaled_dot_product_attention(q, k, v, is_causal=cache is None))
        x = x + context.transpose(1, 2).flatten(2) @ self.w["o_proj"].T
        return tap("lm_head", x @ self.w["lm_head"].T).numpy(), (k, v)


class Port(Decoding):
    dtypes = ("float32",)

    def load(self, weights, dtype):
        self.w = {name.removesuffix(".weight"): mx.array(value) for name, value in weights.items()}
        self.rope = mlx.nn.RoPE(HEAD_DIM, traditional=False, base=10000.0)

    def apply(self, ids, cache, past, tap=lambda name, value: value):
        keys, values = cache or [mx.zeros((len(ids), HEADS, CACHE, HEAD_DIM)) for _ in range(2)]
        x = tap("embed", self.w["embed_tokens"][mx.array(ids)])
        h = mx.fast.rms_norm(x, self.w["norm"], 1e-6)
        q, k, v = ((h @ self.w[f"{i}_proj"].T).reshape(*ids.shape, HEADS, -1).swapaxes(1, 2) for i in "qkv")
        end = past + ids.shape[1]
        keys[:, :, past:end], values[:, :, past:end] = tap("keys", self.rope(k, offset=past)), v
        q, k, v = tap("queries", self.rope(q, offset=past)), keys[:, :, :end], values[:, :, :end]
        mask = mx.arange(end) <= mx.arange(past, end)[:, None]
        context = mx.fast.scaled_dot_product_attention(q, k, v, scale=HEAD_DIM**-0.5, mask=mask)
        context = tap("attention", context.swapaxes(1, 2).reshape(*ids.shape, -1))
        logits = tap("logits", (x + context @ self.w["o_proj"].T) @ self.w["lm_head"].T)
        return np.array(logits), (keys, values)

    def past(self, length):
        return length


class Fixed(Port):
    def past(self, length):
        return length - 1
