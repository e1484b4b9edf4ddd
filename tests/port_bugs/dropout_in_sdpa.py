"""A GPT-2 block, ported from JAX to PyTorch: dropout of the attention weights stayed active during inference.

Source: karpathy/nanoGPT#240: the fused attention function received the dropout rate in evaluation mode too; the fix
passes 0 unless the model is in training mode.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from transformer_parity.pair import Implementation

SOURCE = "karpathy/nanoGPT#240"
VERIFIED = True
KIND = "bug"
NAME = "randomness"
BLOCKS = ("h0/attn/heads",)
STAGE = "forward"
VOCAB, POSITIONS, D, HEADS = 31, 12, 10, 2


def layer_norm(x, w, name):
    centered = x - x.mean(-1, keepdims=True)
    return centered / jnp.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5) * w[f"{name}/g"] + w[f"{name}/b"]


class Original(Implementation):
    def init_weights(self, seed):
        rng = np.random.default_rng(seed)
        shapes = {"wte": (VOCAB, D), "wpe": (POSITIONS, D)}
        for name, (n, m) in {"attn/c_attn": (D, 3 * D), "attn/c_proj": (D, D), "mlp/c_fc": (D, 4 * D)}.items():
            shapes |= {f"h0/{name}/w": (1, n, m), f"h0/{name}/b": (m,)}
        shapes |= {"h0/mlp/c_proj/w": (1, 4 * D, D), "h0/mlp/c_proj/b": (D,)}
        shapes |= {f"{name}/{kind}": (D,) for name in ("h0/ln_1", "h0/ln_2", "ln_f") for kind in "gb"}
        weights = {name: rng.normal(0, 0.3, shape) for name, shape in shapes.items() if len(shape) > 1}
        return weights | {n: np.full(s, float(n.endswith("/g"))) for n, s in shapes.items() if len(s) == 1}

    def inputs(self, seed):
        return {"tokens": np.random.default_rng(seed).integers(0, VOCAB, (2, 9))}

    def load(self, weights, dtype):
        self.w = {name: jnp.asarray(value) for name, value in weights.items()}

    def dense(self, x, name):
        return x @ self.w[f"{name}/w"][0] + self.w[f"{name}/b"]

    def forward(self, inputs, tap):
        tokens = jnp.asarray(inputs["tokens"])
        x = tap("embed", self.w["wte"][tokens] + self.w["wpe"][: tokens.shape[1]])
        qkv = self.dense(tap("h0/ln_1", layer_norm(x, self.w, "h0/ln_1")), "h0/attn/c_attn")
        q, k, v = jnp.moveaxis(tap("h0/attn/c_attn", qkv).reshape(*tokens.shape, 3, HEADS, -1), 2, 0)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (D // HEADS) ** 0.5
        scores = jnp.where(jnp.tri(tokens.shape[1], dtype=bool), scores, -jnp.inf)
        heads = tap("h0/attn/heads", jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v))
        x = x + tap("h0/attn/c_proj", self.dense(heads.reshape(x.shape), "h0/attn/c_proj"))
        h = jax.nn.gelu(self.dense(layer_norm(x, self.w, "h0/ln_2"), "h0/mlp/c_fc"), approximate=True)
        x = x + tap("h0/mlp/c_proj", self.dense(h, "h0/mlp/c_proj"))
        return {"logits": np.asarray(tap("ln_f", layer_norm(x, self.w, "ln_f")) @ self.w["wte"].T)}


class Port(Implementation):
    dropout = 0.1

    def load(self, weights, dtype):
        names = {"ln_1": "h0/ln_1", "c_attn": "h0/attn/c_attn", "proj": "h0/attn/c_proj", "ln_2": "h0/ln_2"}
        names |= {"c_fc": "h0/mlp/c_fc", "mlp_proj": "h0/mlp/c_proj", "ln_f": "ln_f"}
        layers = {"wte": nn.Embedding(VOCAB, D), "wpe": nn.Embedding(POSITIONS, D), "c_attn": nn.Linear(D, 3 * D)}
        layers |= {"proj": nn.Linear(D, D), "c_fc": nn.Linear(D, 4 * D), "mlp_proj": nn.Linear(4 * D, D)}
        self.model = nn.ModuleDict(layers | {name: nn.LayerNorm(D) for name in ("ln_1", "ln_2", "ln_f")})
        state = {f"{name}.weight": weights[name] for name in ("wte", "wpe")}
        for ours, theirs in names.items():
            w = weights[f"{theirs}/g"] if "ln" in ours else weights[f"{theirs}/w"][0].T
            state |= {f"{ours}.weight": w, f"{ours}.bias": weights[f"{theirs}/b"]}
        self.model.load_state_dict({name: torch.tensor(value) for name, value in state.items()}, assign=True)
        self.model.eval()

    @torch.no_grad()
    def forward(self, inputs, tap):
        m, tokens = self.model, torch.tensor(inputs["tokens"])
        x = tap("embed", m["wte"](tokens) + m["wpe"](torch.arange(tokens.shape[1])))
        qkv = tap("h0/attn/c_attn", m["c_attn"](tap("h0/ln_1", m["ln_1"](x))))
        q, k, v = qkv.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        heads = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        heads = tap("h0/attn/heads", heads.transpose(1, 2))
        x = x + tap("h0/attn/c_proj", m["proj"](heads.flatten(2)))
        h = nn.functional.gelu(m["c_fc"](m["ln_2"](x)), approximate="tanh")
        x = x + tap("h0/mlp/c_proj", m["mlp_proj"](h))
        return {"logits": (tap("ln_f", m["ln_f"](x)) @ m["wte"].weight.T).numpy()}


class Fixed(Port):
    dropout = 0.0
