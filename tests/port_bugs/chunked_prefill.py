"""A GPT in JAX that reads a prompt in chunks, with a causal mask that hides the cache from all chunks but the first.

Source: hyprstream/hyprstream#1521: the mask of a chunk of several tokens is shifted by the length of the cache.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from transformer_parity.pair import Implementation

SOURCE = "hyprstream/hyprstream#1521"
VERIFIED = True
KIND = "bug"
NAME = "mask"
BLOCKS = ()
STAGE = "decode"
D, HEADS, VOCAB, ROWS, LAYERS, PROMPT, CHUNK = 15, 3, 27, 16, 2, 7, 3


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, D), nn.Embedding(ROWS, D)
        self.attn = nn.ModuleList(nn.Linear(D, 3 * D) for _ in range(LAYERS))
        self.proj = nn.ModuleList(nn.Linear(D, D) for _ in range(LAYERS))

    def forward(self, tokens, cache):
        start = cache[0].shape[-2] if cache else 0
        x, new = self.wte(tokens) + self.wpe.weight[start : start + tokens.shape[1]], []
        for attn, proj in zip(self.attn, self.proj, strict=True):
            q, *kv = attn(nn.functional.layer_norm(x, (D,))).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            new.append(torch.cat((cache[len(new)], torch.stack(kv)), -2) if cache else torch.stack(kv))
            mask = torch.ones(q.shape[-2], new[-1].shape[-2], dtype=torch.bool).tril(start)
            context = nn.functional.scaled_dot_product_attention(q, *new[-1], mask)
            x = x + proj(context.transpose(1, 2).flatten(-2))
        return nn.functional.layer_norm(x, (D,)) @ self.wte.weight.T, new


class Original(Implementation):
    def init_weights(self, seed):
        torch.manual_seed(seed)
        return {name: value.numpy() for name, value in Gpt().state_dict().items()}

    def inputs(self, seed):
        return {"prompt": np.random.default_rng(seed).integers(0, VOCAB, (2, PROMPT))}

    def load(self, weights, dtype):
        self.model = Gpt().to(getattr(torch, dtype)).eval()
        self.model.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})

    def run(self, tokens, cache):
        with torch.no_grad():
            logits, cache = self.model(torch.tensor(tokens), cache)
        return logits.numpy(), cache

    def forward(self, inputs, tap):
        return {"logits": self.run(inputs["prompt"], None)[0]}

    def next_logits(self, inputs, prefix):
        return self.run(np.concatenate((inputs["prompt"], prefix), 1), None)[0][:, -1]

    def next_logits_cached(self, inputs, prefix, cache):
        logits, cache = self.run(inputs["prompt"] if cache is None else prefix[:, -1:], cache)
        return logits[:, -1], cache


class Port(Original):
    def load(self, weights, dtype):
        self.w = {name: jnp.asarray(value) for name, value in weights.items()}

    def diagonal(self, length, start):
        return 0

    def run(self, tokens, cache):
        w, start = self.w, 0 if cache is None else cache[0].shape[-2]
        length, new = tokens.shape[1], []
        x = w["wte.weight"][tokens] + w["wpe.weight"][start : start + length]
        for i in range(LAYERS):
            qkv = self.norm(x) @ w[f"attn.{i}.weight"].T + w[f"attn.{i}.bias"]
            q, *kv = qkv.reshape(*x.shape[:2], 3, HEADS, -1).transpose(2, 0, 3, 1, 4)
            new.append(jnp.stack(kv) if cache is None else jnp.concatenate((cache[i], jnp.stack(kv)), -2))
            scores = jnp.einsum("bhld,bhmd->bhlm", q, new[i][0]) / (D // HEADS) ** 0.5
            if length > 1:
                mask = jnp.tril(jnp.ones((length, start + length), bool), self.diagonal(length, start))
                scores = jnp.where(mask, scores, -jnp.inf)
            context = jnp.einsum("bhlm,bhmd->blhd", jax.nn.softmax(scores, -1), new[i][1]).reshape(x.shape)
            x = x + context @ w[f"proj.{i}.weight"].T + w[f"proj.{i}.bias"]
        return np.asarray(self.norm(x) @ w["wte.weight"].T), new

    def norm(self, x):
        return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)

    def next_logits_cached(self, inputs, prefix, cache):
        tokens = inputs["prompt"] if cache is None else prefix[:, -1:]
        for start in range(0, tokens.shape[1], CHUNK):
            logits, cache = self.run(tokens[:, start : start + CHUNK], cache)
        return logits[:, -1], cache


class Fixed(Port):
    def diagonal(self, length, start):
        return start
