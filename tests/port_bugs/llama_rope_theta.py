"""A Llama 3 model in MLX that rotates with the default base 10000 instead of the base of the configuration.

Source: lyogavin/airllm#369 (the same as ml-explore/mlx-lm#1023): the base is read from the configuration.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as mnn
import numpy as np
import torch
from torch import nn

from transformer_parity.pair import Implementation

SOURCE = "lyogavin/airllm#369"
VERIFIED = True
KIND = "bug"
NAME = "rotary base/angle"
BLOCKS = ()
STAGE = "forward"
CONFIG = {"rope_theta": 500000.0, "rms_norm_eps": 1e-5}
D, HEADS, KV, HEAD, VOCAB = 18, 3, 1, 8, 37


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        for name, size in (("q_proj", HEADS), ("k_proj", KV), ("v_proj", KV)):
            setattr(self, name, nn.Linear(D, size * HEAD, bias=False))
        self.o_proj = nn.Linear(HEADS * HEAD, D, bias=False)


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, D)
        self.self_attn = Attention()
        self.input_layernorm = nn.RMSNorm(D, eps=CONFIG["rms_norm_eps"])
        self.norm = nn.RMSNorm(D, eps=CONFIG["rms_norm_eps"])
        self.lm_head = nn.Linear(D, VOCAB, bias=False)


def rotate(x: torch.Tensor) -> torch.Tensor:
    frequencies = CONFIG["rope_theta"] ** (-torch.arange(0, HEAD, 2, dtype=x.dtype) / HEAD)
    angle = torch.outer(torch.arange(x.shape[-2], dtype=x.dtype), frequencies).repeat(1, 2)
    first, second = x.chunk(2, -1)
    return x * angle.cos() + torch.cat((-second, first), -1) * angle.sin()


class Original(Implementation):
    def init_weights(self, seed):
        torch.manual_seed(seed)
        return {name: value.numpy() for name, value in Llama().state_dict().items()}

    def inputs(self, seed):
        rng = np.random.default_rng(seed)
        tokens, lengths = rng.integers(3, VOCAB, (3, 13)), np.array([13, 9, 4])
        return {"tokens": np.where(np.arange(13) < lengths[:, None], tokens, 0)}

    def load(self, weights, dtype):
        self.model = Llama().to(getattr(torch, dtype)).eval()
        self.model.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})

    @torch.no_grad()
    def forward(self, inputs, tap):
        m, attn = self.model, self.model.self_attn
        x = tap("model.embed_tokens", m.embed_tokens(torch.tensor(inputs["tokens"])))
        h = tap("model.layers.0.input_layernorm", m.input_layernorm(x))
        q, k, v = (p(h).unflatten(-1, (-1, HEAD)).transpose(1, 2) for p in (attn.q_proj, attn.k_proj, attn.v_proj))
        q, k = tap("model.layers.0.self_attn.q", rotate(q)), tap("model.layers.0.self_attn.k", rotate(k))
        context = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = tap("model.layers.0", x + attn.o_proj(context.transpose(1, 2).flatten(-2)))
        return {"logits": m.lm_head(m.norm(x)).numpy()}


class Port(Implementation):
    dtypes = ("float32",)
    base = 10000.0

    def load(self, weights, dtype):
        self.net = {}
        for name, value in weights.items():
            out, *rest = value.shape
            layer = mnn.Linear(*rest, out, bias=False) if rest else mnn.RMSNorm(out, CONFIG["rms_norm_eps"])
            layer.weight = mx.array(value)
            self.net[name.removesuffix(".weight")] = layer
        self.rope = mnn.RoPE(HEAD, base=self.base)

    def forward(self, inputs, tap):
        x = self.net["embed_tokens"].weight[mx.array(inputs["tokens"])]
        h = self.net["input_layernorm"](x)
        q, k, v = (self.net[f"self_attn.{n}_proj"](h) for n in "qkv")
        q, k, v = (t.reshape(*t.shape[:2], -1, HEAD).transpose(0, 2, 1, 3) for t in (q, k, v))
        context = mx.fast.scaled_dot_product_attention(self.rope(q), self.rope(k), v, scale=HEAD**-0.5, mask="causal")
        x = x + self.net["self_attn.o_proj"](context.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1))
        return {"logits": np.array(self.net["lm_head"](self.net["norm"](x)))}


class Fixed(Port):
    base = CONFIG["rope_theta"]
