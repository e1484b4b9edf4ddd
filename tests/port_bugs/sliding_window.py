"""Mistral's attention in Flax NNX with a window that is one key too wide.

Source: huggingface/transformers#29176: Flax and PyTorch read the window differently; PyTorch's was corrected in #26792.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch import nn

from transformer_parity.pair import Implementation

SOURCE = "huggingface/transformers#29176"
VERIFIED = True
KIND = "bug"
NAME = "mask"
BLOCKS = ("layers.0.self_attn.weights",)
STAGE = "forward"
D, HEADS, HEAD, VOCAB, WINDOW, LAYERS = 14, 3, 4, 43, 4, 2
SIZES = {f"{n}_proj": (D, HEADS * HEAD) for n in "qkv"} | {"o_proj": (HEADS * HEAD, D)}


def mistral() -> nn.ModuleDict:
    attention = [nn.ModuleDict({n: nn.Linear(*s, bias=False) for n, s in SIZES.items()}) for _ in range(LAYERS)]
    layers = nn.ModuleList(nn.ModuleDict({"self_attn": a}) for a in attention)
    return nn.ModuleDict({"embed_tokens": nn.Embedding(VOCAB, D), "layers": layers, "norm": nn.RMSNorm(D, eps=1e-5)})


class Original(Implementation):
    def init_weights(self, seed):
        torch.manual_seed(seed)
        return {f"model.{name}": value.numpy() for name, value in mistral().state_dict().items()}

    def inputs(self, seed):
        rng = np.random.default_rng(seed)
        valid = np.arange(11) >= rng.permutation([0, 2, 5])[:, None]
        tokens = np.where(valid, rng.integers(3, VOCAB, (3, 11)), 0)
        return {"input_ids": tokens, "attention_mask": valid.astype(np.int64)}

    def load(self, weights, dtype):
        self.model = mistral().to(getattr(torch, dtype)).eval()
        self.model.load_state_dict({n.removeprefix("model."): torch.tensor(w) for n, w in weights.items()})

    @torch.no_grad()
    def forward(self, inputs, tap):
        x = tap("embed_tokens", self.model["embed_tokens"](torch.tensor(inputs["input_ids"])))
        valid = torch.tensor(inputs["attention_mask"], dtype=torch.bool)
        near = torch.ones(11, 11, dtype=torch.bool).tril().triu(1 - WINDOW)
        mask = (near & valid[:, None] | torch.eye(11, dtype=torch.bool))[:, None]
        for i, layer in enumerate(self.model["layers"]):
            name, attn = f"layers.{i}.self_attn", layer["self_attn"]
            q, k, v = (attn[f"{n}_proj"](x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for n in "qkv")
            scores = tap(f"{name}.scores", q @ k.mT / HEAD**0.5)
            weights = tap(f"{name}.weights", scores.masked_fill(~mask, -torch.inf).softmax(-1))
            x = tap(f"layers.{i}", x + attn["o_proj"]((weights @ v).transpose(1, 2).flatten(-2)))
        return {"hidden": (self.model["norm"](x) * valid[..., None]).numpy()}


class Port(Implementation):
    window = WINDOW + 1

    def load(self, weights, dtype):
        self.net = {}
        for name, w in weights.items():
            settings = {"param_dtype": dtype, "rngs": nnx.Rngs(0)}
            if "norm" in name:
                layer = nnx.RMSNorm(D, epsilon=1e-5, **settings)
                layer.scale[...] = jnp.asarray(w)
            elif "embed" in name:
                layer = nnx.Embed(*w.shape, **settings)
                layer.embedding[...] = jnp.asarray(w)
            else:
                layer = nnx.Linear(*w.shape[::-1], use_bias=False, **settings)
                layer.kernel[...] = jnp.asarray(w.T)
            self.net[name.removeprefix("model.").removesuffix(".weight")] = layer

    def forward(self, inputs, tap):
        x, valid = self.net["embed_tokens"](jnp.asarray(inputs["input_ids"])), inputs["attention_mask"] == 1
        x, age = tap("embeddings", x), np.arange(11)[:, None] - np.arange(11)
        mask = (((age >= 0) & (age < self.window)) & valid[:, None] | (age == 0))[:, None]
        for i in range(LAYERS):
            q, k, v = (self.net[f"layers.{i}.self_attn.{n}_proj"](x).reshape(*x.shape[:2], HEADS, -1) for n in "qkv")
            scores = tap(f"layer_{i}.logits", jnp.einsum("blhd,bmhd->blmh", q, k) / HEAD**0.5)
            scores = jnp.where(mask.transpose(0, 2, 3, 1), scores, -jnp.inf)
            weights = tap(f"layer_{i}.probabilities", jax.nn.softmax(scores, 2))
            context = jnp.einsum("blmh,bmhd->blhd", weights, v).reshape(*x.shape[:2], -1)
            x = tap(f"layer_{i}", x + self.net[f"layers.{i}.self_attn.o_proj"](context))
        return {"hidden": np.asarray(self.net["norm"](x) * valid[..., None])}


class Fixed(Port):
    window = WINDOW


names = {
    "embed_tokens": "embeddings",
    "layers.{i}.self_attn.scores": ("layer_{i}.logits", "b l m h -> b h l m"),
    "layers.{i}.self_attn.weights": ("layer_{i}.probabilities", "b l m h -> b h l m"),
    "layers.{i}": "layer_{i}",
}
