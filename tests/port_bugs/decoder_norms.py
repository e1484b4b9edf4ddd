"""A decoder layer of MLX's Transformer that normalizes the cross-attention with the first norm instead of the second.

Source: ml-explore/mlx#1636 (fixed by #1637): the residual after the cross-attention goes through the layer's own norm.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as mnn
import numpy as np
import torch
from torch import nn

from transformer_parity.pair import Implementation

SOURCE = "ml-explore/mlx#1636"
VERIFIED = True
KIND = "bug"
NAME = "unused weights"
BLOCKS = ("norm2",)
STAGE = "forward"
D, HEADS, FFN = 12, 3, 19


class Original(Implementation):
    def layer(self):
        return nn.TransformerDecoderLayer(D, HEADS, FFN, dropout=0.1, batch_first=True)

    def init_weights(self, seed):
        torch.manual_seed(seed)
        return {name: value.numpy() for name, value in self.layer().state_dict().items()}

    def inputs(self, seed):
        rng = np.random.default_rng(seed)
        valid = np.arange(7) < rng.permutation([7, 4])[:, None]
        return {"target": rng.normal(size=(2, 5, D)), "memory": rng.normal(size=(2, 7, D)), "valid": valid}

    def load(self, weights, dtype):
        self.model = self.layer().to(getattr(torch, dtype)).eval()
        self.model.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})

    @torch.no_grad()
    def forward(self, inputs, tap):
        m, x, memory = self.model, torch.tensor(inputs["target"]), torch.tensor(inputs["memory"])
        future, pad = torch.ones(5, 5, dtype=torch.bool).triu(1), torch.tensor(~inputs["valid"])
        h = tap("self_attn", m.self_attn(x, x, x, attn_mask=future, need_weights=False)[0])
        x = tap("norm1", m.norm1(x + h))
        h = tap("multihead_attn", m.multihead_attn(x, memory, memory, key_padding_mask=pad, need_weights=False)[0])
        x = tap("norm2", m.norm2(x + h))
        h = tap("linear1", m.linear1(x).relu())
        return {"output": tap("norm3", m.norm3(x + m.linear2(h))).numpy()}


class Port(Implementation):
    dtypes = ("float32",)
    second = "ln1"

    def load(self, weights, dtype):
        w = {name: mx.array(value) for name, value in weights.items()}
        self.net = {f"ln{i}": mnn.LayerNorm(D) for i in (1, 2, 3)} | {
            n: mnn.Linear(1, 1) for n in ("linear1", "linear2")
        }
        for name, layer in self.net.items():
            layer.weight, layer.bias = (w[f"{name.replace('ln', 'norm')}.{kind}"] for kind in ("weight", "bias"))
        for name in ("self_attn", "multihead_attn"):
            self.net[name] = mnn.MultiHeadAttention(D, HEADS, bias=True)
            parts = mx.split(w[f"{name}.in_proj_weight"], 3), mx.split(w[f"{name}.in_proj_bias"], 3)
            parts = [*zip(*parts, strict=True), (w[f"{name}.out_proj.weight"], w[f"{name}.out_proj.bias"])]
            for part, (weight, bias) in zip(("query", "key", "value", "out"), parts, strict=True):
                self.net[name][f"{part}_proj"].weight, self.net[name][f"{part}_proj"].bias = weight, bias

    def forward(self, inputs, tap):
        net, x, memory = self.net, mx.array(inputs["target"]), mx.array(inputs["memory"])
        causal, valid = mx.tri(5).astype(mx.bool_), mx.array(inputs["valid"])[:, None, None]
        x = tap("ln1", net["ln1"](x + tap("attention", net["self_attn"](x, x, x, mask=causal))))
        h = tap("cross_attention", net["multihead_attn"](x, memory, memory, mask=valid))
        x = tap("ln2", net[self.second](x + h))
        h = tap("hidden", mnn.relu(net["linear1"](x)))
        return {"output": np.array(tap("ln3", net["ln3"](x + net["linear2"](h))))}


class Fixed(Port):
    second = "ln2"


names = {
    "self_attn": "attention",
    "norm{i}": "ln{i}",
    "multihead_attn": "cross_attention",
    "linear1": "hidden",
}
