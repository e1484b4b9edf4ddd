"""A correct port to MLX that attends with grouped keys in one fused operation, where PyTorch repeats the keys.

Source: ml-explore/mlx, `mx.fast.scaled_dot_product_attention`: fewer heads of keys than of queries need no repetition.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as mnn
import numpy as np
import torch
from torch import nn

from transformer_parity.pair import Implementation

SOURCE = "ml-explore/mlx (mx.fast.scaled_dot_product_attention)"
VERIFIED = True
KIND = "control"
NAME = ""
BLOCKS = ()
STAGE = "forward"
D, HEADS, KV, HEAD, VOCAB = 17, 6, 2, 5, 29


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D)
        self.norm, self.q_norm, self.k_norm = (nn.RMSNorm(size, eps=1e-6) for size in (D, HEAD, HEAD))
        self.q_proj, self.o_proj = nn.Linear(D, HEADS * HEAD), nn.Linear(HEADS * HEAD, D, bias=False)
        self.k_proj, self.v_proj = nn.Linear(D, KV * HEAD), nn.Linear(D, KV * HEAD)

    def forward(self, tokens, valid, tap):
        x = tap("embed", self.embed(tokens))
        h = tap("norm", self.norm(x))
        q, k, v = (p(h).unflatten(-1, (-1, HEAD)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = tap("q_norm", self.q_norm(q)), tap("k_norm", self.k_norm(k))
        k, v = (t.repeat_interleave(HEADS // KV, 1) for t in (k, v))
        mask = valid[:, None, None] & torch.ones(2 * valid.shape[1:], dtype=torch.bool).tril()
        weights = (q @ k.mT / HEAD**0.5).masked_fill(~mask, -torch.inf).softmax(-1)
        context = tap("context", (weights @ v).transpose(1, 2).flatten(-2))
        return tap("output", x + self.o_proj(context))


class Original(Implementation):
    def init_weights(self, seed):
        torch.manual_seed(seed)
        return {name: value.numpy() for name, value in Model().state_dict().items()}

    def inputs(self, seed):
        rng = np.random.default_rng(seed)
        valid = np.arange(9) < rng.permutation([9, 5])[:, None]
        return {"tokens": np.where(valid, rng.integers(1, VOCAB, (2, 9)), 0)}

    def load(self, weights, dtype):
        self.model = Model().to(getattr(torch, dtype)).eval()
        self.model.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})

    @torch.no_grad()
    def forward(self, inputs, tap):
        tokens = torch.tensor(inputs["tokens"])
        return {"hidden": self.model(tokens, tokens != 0, tap).numpy()}


class Port(Implementation):
    dtypes = ("float32",)

    def load(self, weights, dtype):
        w = {name: mx.array(value) for name, value in weights.items()}
        self.embed = mnn.Embedding(VOCAB, D)
        self.net = {n: mnn.RMSNorm(1, eps=1e-6) for n in ("norm", "q_norm", "k_norm")}
        self.net |= {f"{n}_proj": mnn.Linear(1, 1, bias=n != "o") for n in "qkvo"}
        for name, layer in [("embed", self.embed), *self.net.items()]:
            layer.weight = w[f"{name}.weight"]
            if f"{name}.bias" in w:
                layer.bias = w[f"{name}.bias"]

    def forward(self, inputs, tap):
        tokens = mx.array(inputs["tokens"])
        x = self.embed(tokens)
        h = self.net["norm"](x)
        q, k, v = (self.net[f"{n}_proj"](h).reshape(*tokens.shape, -1, HEAD).transpose(0, 2, 1, 3) for n in "qkv")
        q, k = self.net["q_norm"](q), self.net["k_norm"](k)
        mask = (tokens != 0)[:, None, None] & (mx.tri(tokens.shape[1]) > 0)
        context = mx.fast.scaled_dot_product_attention(q, k, v, scale=HEAD**-0.5, mask=mask)
        context = tap("context", context.transpose(0, 2, 1, 3).reshape(*tokens.shape, -1))
        return {"hidden": np.array(x + self.net["o_proj"](context))}
