"""A GPT-NeoX attention layer, ported from PyTorch to NumPy: the softmax was always computed in float32.

Source: huggingface/transformers#48459: the softmax was cast to float32 even in a float64 model, so its results had only
the precision of float32; the proposed fix never casts to a narrower type.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from transformer_parity.pair import Implementation

SOURCE = "huggingface/transformers#48459"
VERIFIED = True
KIND = "bug"
NAME = "narrower dtype"
BLOCKS = ("attention.probs",)
STAGE = "forward"
D, HEADS, HEAD_DIM, ROTARY = 18, 3, 6, 4


class Original(Implementation):
    def __init__(self):
        self.norm, self.qkv, self.dense = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        layers = {"input_layernorm": self.norm, "query_key_value": self.qkv, "dense": self.dense}
        self.model = nn.ModuleDict(layers)

    def init_weights(self, seed):
        rng = np.random.default_rng(seed)
        weights = {name: rng.normal(0, 0.3, value.shape) for name, value in self.model.state_dict().items()}
        constant = {"input_layernorm.weight": np.ones(D), "input_layernorm.bias": np.zeros(D)}
        return weights | constant | {"dense.bias": np.zeros(D), "query_key_value.bias": np.zeros(3 * D)}

    def inputs(self, seed):
        hidden = np.random.default_rng(seed).standard_t(4, (2, 7, D))
        return {"hidden": hidden, "mask": np.array([[1] * 7, [1] * 4 + [0] * 3])}

    def load(self, weights, dtype):
        self.model.to(getattr(torch, dtype)).eval()
        self.model.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})

    def rotate(self, x):
        frequencies = 10000.0 ** (-torch.arange(0, ROTARY, 2, dtype=x.dtype) / ROTARY)
        angles = (torch.arange(x.shape[2])[:, None] * frequencies).repeat(1, 2)
        a, b = x[..., :ROTARY].chunk(2, -1)
        turned = x[..., :ROTARY] * angles.cos() + torch.cat([-b, a], -1) * angles.sin()
        return torch.cat([turned, x[..., ROTARY:]], -1)

    @torch.no_grad()
    def forward(self, inputs, tap):
        x, mask = torch.tensor(inputs["hidden"]), torch.tensor(inputs["mask"]).bool()
        qkv = tap("query_key_value", self.qkv(tap("input_layernorm", self.norm(x))))
        q, k, v = qkv.unflatten(-1, (HEADS, 3 * HEAD_DIM)).transpose(1, 2).chunk(3, -1)
        scores = tap("attention.scores", self.rotate(q) @ self.rotate(k).mT * HEAD_DIM**-0.5)
        allowed = mask[:, None, None] & torch.ones(7, 7, dtype=torch.bool).tril()
        probs = scores.masked_fill(~allowed, -1e9).softmax(-1)
        context = tap("attention.context", tap("attention.probs", probs) @ v)
        return {"hidden": (x + tap("dense", self.dense(context.transpose(1, 2).flatten(2)))).numpy()}


class Port(Implementation):
    softmax_dtype = np.float32

    def load(self, weights, dtype):
        self.w = weights

    def rotate(self, x):
        angles = np.arange(x.shape[2])[:, None] * 10000.0 ** (-np.arange(0, ROTARY, 2) / ROTARY)
        cos, sin = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
        a, b, rest = np.split(x, [ROTARY // 2, ROTARY], -1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def forward(self, inputs, tap):
        w, x = self.w, inputs["hidden"]
        h = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        h = tap("input_layernorm", h * w["input_layernorm.weight"] + w["input_layernorm.bias"])
        qkv = tap("query_key_value", h @ w["query_key_value.weight"].T + w["query_key_value.bias"])
        q, k, v = np.split(qkv.reshape(*x.shape[:2], HEADS, -1).swapaxes(1, 2), 3, -1)
        scores = tap("attention.scores", self.rotate(q) @ self.rotate(k).swapaxes(2, 3) * HEAD_DIM**-0.5)
        allowed = inputs["mask"][:, None, None] * np.tri(x.shape[1]) > 0
        scores = np.where(allowed, scores, -1e9).astype(self.softmax_dtype or x.dtype)
        probs = np.exp(scores - scores.max(-1, keepdims=True))
        probs = tap("attention.probs", (probs / probs.sum(-1, keepdims=True)).astype(x.dtype))
        context = tap("attention.context", probs @ v).swapaxes(1, 2).reshape(x.shape)
        return {"hidden": x + tap("dense", context @ w["dense.weight"].T + w["dense.bias"])}


class Fixed(Port):
    softmax_dtype = None
