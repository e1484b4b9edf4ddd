"""A sentence encoder of the RoBERTa family in NumPy that counts positions from 0 instead of from the padding id plus 1.

Source: sbryngelson/ANEForge#257: the positions of RoBERTa, XLM-R and CamemBERT start after the padding ID.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn

from transformer_parity.pair import Implementation

SOURCE = "sbryngelson/ANEForge#257"
VERIFIED = True
KIND = "bug"
NAME = "shifted"
BLOCKS = ("embeddings.position_embeddings",)
STAGE = "forward"
D, FFN, VOCAB, ROWS, PAD = 10, 17, 23, 16, 1


def roberta() -> nn.ModuleDict:
    tables = {"word": VOCAB, "position": ROWS, "token_type": 1}
    tables = {f"{n}_embeddings": nn.Embedding(s, D, padding_idx=PAD if s > 1 else None) for n, s in tables.items()}
    attention = nn.ModuleDict({n: nn.Linear(D, D) for n in ("query", "key", "value", "output")})
    layer = {"attention": attention, "intermediate": nn.Linear(D, FFN), "output": nn.Linear(FFN, D)}
    norms = {n: nn.LayerNorm(D, eps=1e-5) for n in ("attention_norm", "output_norm")}
    embeddings = nn.ModuleDict({**tables, "LayerNorm": nn.LayerNorm(D, eps=1e-5)})
    return nn.ModuleDict({"embeddings": embeddings, "layer": nn.ModuleDict({**layer, **norms})})


class Original(Implementation):
    def init_weights(self, seed):
        torch.manual_seed(seed)
        return {name: value.numpy() for name, value in roberta().state_dict().items()}

    def inputs(self, seed):
        rng = np.random.default_rng(seed)
        tokens, lengths = rng.integers(2, VOCAB, (3, 11)), rng.permutation([11, 8, 3])
        return {"input_ids": np.where(np.arange(11) < lengths[:, None], tokens, PAD)}

    def load(self, weights, dtype):
        self.model = roberta().to(getattr(torch, dtype)).eval()
        self.model.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})

    @torch.no_grad()
    def forward(self, inputs, tap):
        ids, emb, layer = torch.tensor(inputs["input_ids"]), self.model["embeddings"], self.model["layer"]
        mask = ids != PAD
        rows = tap("embeddings.position_embeddings", emb["position_embeddings"](mask.cumsum(1) * mask + PAD))
        x = emb["LayerNorm"](emb["word_embeddings"](ids) + rows + emb["token_type_embeddings"].weight[0])
        q, k, v = (
            layer["attention"][n](tap("embeddings", x) if n == "query" else x) for n in ("query", "key", "value")
        )
        scores = (q @ k.mT / D**0.5).masked_fill(~mask[:, None], -torch.inf)
        context = tap("layer.attention", layer["attention"]["output"](scores.softmax(-1) @ v))
        x = layer["attention_norm"](x + context)
        h = tap("layer.intermediate", nn.functional.gelu(layer["intermediate"](x)))
        x = tap("layer", layer["output_norm"](x + layer["output"](h)))
        pooled = tap("pooled", (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))
        return {"embedding": nn.functional.normalize(pooled, dim=-1).numpy()}


class Port(Implementation):
    def load(self, weights, dtype):
        self.w = weights

    def positions(self, mask):
        return np.broadcast_to(np.arange(mask.shape[1]), mask.shape)

    def linear(self, name, x):
        return x @ self.w[f"layer.{name}.weight"].T + self.w[f"layer.{name}.bias"]

    def norm(self, name, x):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def forward(self, inputs, tap):
        mask = inputs["input_ids"] != PAD
        word, position, kind = (self.w[f"embeddings.{n}_embeddings.weight"] for n in ("word", "position", "token_type"))
        rows = tap("embeddings.position_embeddings", position[self.positions(mask)])
        x = tap("embeddings", self.norm("embeddings.LayerNorm", word[inputs["input_ids"]] + rows + kind[0]))
        q, k, v = (self.linear(f"attention.{n}", x) for n in ("query", "key", "value"))
        weights = np.exp(q @ k.swapaxes(1, 2) / D**0.5) * mask[:, None]
        context = weights / weights.sum(-1, keepdims=True) @ v
        context = tap("layer.attention", self.linear("attention.output", context))
        x = self.norm("layer.attention_norm", x + context)
        h = self.linear("intermediate", x)
        h = tap("layer.intermediate", h * (1 + np.vectorize(math.erf)(h / 2**0.5)).astype(h.dtype) / 2)
        x = tap("layer", self.norm("layer.output_norm", x + self.linear("output", h)))
        count = mask.sum(1, keepdims=True).astype(x.dtype)
        pooled = tap("pooled", (x * mask[..., None]).sum(1) / count)
        return {"embedding": pooled / np.linalg.norm(pooled, axis=-1, keepdims=True)}


class Fixed(Port):
    def positions(self, mask):
        return np.cumsum(mask, 1) * mask + PAD
