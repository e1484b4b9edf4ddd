"""A Gemma model in NumPy whose norms multiply by the weight instead of by one plus the weight.

Source: ggml-org/llama.cpp#5631: the conversion adds 1 to the weights of all norms of Gemma.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from transformer_parity.pair import Implementation

SOURCE = "ggml-org/llama.cpp#5631"
VERIFIED = True
KIND = "bug"
NAME = "norm"
BLOCKS = ("layers.0.input_layernorm",)
STAGE = "forward"
D, HEADS, HEAD, VOCAB, LAYERS = 14, 3, 5, 33, 2


class GemmaNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(D))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm = GemmaNorm()
        sizes = {"q": (D, HEADS * HEAD), "k": (D, HEAD), "v": (D, HEAD), "o": (HEADS * HEAD, D)}
        self.self_attn = nn.ModuleDict({f"{n}_proj": nn.Linear(*s, bias=False) for n, s in sizes.items()})

    def forward(self, h):
        q, k, v = (self.self_attn[f"{n}_proj"](h).unflatten(-1, (-1, HEAD)).transpose(1, 2) for n in "qkv")
        context = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.self_attn["o_proj"](context.transpose(1, 2).flatten(-2))


def gemma() -> nn.ModuleDict:
    layers = nn.ModuleList(Layer() for _ in range(LAYERS))
    return nn.ModuleDict({"embed_tokens": nn.Embedding(VOCAB, D), "layers": layers, "norm": GemmaNorm()})


class Original(Implementation):
    def init_weights(self, seed):
        torch.manual_seed(seed)
        return {name: value.numpy() for name, value in gemma().state_dict().items()}

    def inputs(self, seed):
        return {"tokens": np.random.default_rng(seed).integers(0, VOCAB, (2, 9))}

    def load(self, weights, dtype):
        self.model = gemma().to(getattr(torch, dtype)).eval()
        self.model.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})

    @torch.no_grad()
    def forward(self, inputs, tap):
        x = tap("embed_tokens", self.model["embed_tokens"](torch.tensor(inputs["tokens"])) * D**0.5)
        for i, layer in enumerate(self.model["layers"]):
            h = tap(f"layers.{i}.input_layernorm", layer.input_layernorm(x))
            x = x + tap(f"layers.{i}.self_attn", layer(h))
        return {"logits": (tap("norm", self.model["norm"](x)) @ self.model["embed_tokens"].weight.T).numpy()}


class Port(Implementation):
    offset = 0

    def load(self, weights, dtype):
        self.w = {n.removesuffix(".weight"): w + self.offset if "norm" in n else w.T for n, w in weights.items()}

    def norm(self, name, x):
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-6) * self.w[name]

    def attention(self, own, h):
        q, k, v = (np.swapaxes((h @ self.w[f"{own}.{n}_proj"]).reshape(*h.shape[:2], -1, HEAD), 1, 2) for n in "qkv")
        scores = np.where(np.tri(h.shape[1], dtype=bool), q @ np.swapaxes(k, -1, -2) / HEAD**0.5, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        context = scores / scores.sum(-1, keepdims=True) @ v
        return np.swapaxes(context, 1, 2).reshape(*h.shape[:2], -1) @ self.w[f"{own}.o_proj"]

    def forward(self, inputs, tap):
        x = tap("embed_tokens", self.w["embed_tokens"].T[inputs["tokens"]] * D**0.5)
        for i in range(LAYERS):
            h = tap(f"layers.{i}.input_layernorm", self.norm(f"layers.{i}.input_layernorm", x))
            x = x + tap(f"layers.{i}.self_attn", self.attention(f"layers.{i}.self_attn", h))
        return {"logits": tap("norm", self.norm("norm", x)) @ self.w["embed_tokens"]}


class Fixed(Port):
    offset = 1
