"""A small vision transformer, ported from JAX to PyTorch: patches were flattened across the channels of the image.

Source: gupta-abhay/pytorch-vit#7: the unfolded image was viewed as patches while the axis of the channels still came
first, so that a token mixed several places; the fix moves that axis to the end.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from transformer_parity.pair import Implementation

SOURCE = "gupta-abhay/pytorch-vit#7"
VERIFIED = True
KIND = "bug"
NAME = "transposed"
BLOCKS = ("embedding",)
STAGE = "forward"
P, C, D, HEADS, TOKENS, CLASSES = 3, 3, 10, 2, 6, 5
names = {
    "embedding": "patch_embed",
    "posembed_input": "pos_drop",
    "LayerNorm_0": "blocks.0.norm1",
    "attention": "blocks.0.attn",
    "encoder_norm": "norm",
    "head": "head",
}


def layer_norm(x, w, name):
    centered = x - x.mean(-1, keepdims=True)
    x = centered / jnp.sqrt((centered**2).mean(-1, keepdims=True) + 1e-6)
    return x * w[f"{name}/scale"] + w[f"{name}/bias"]


class Original(Implementation):
    def init_weights(self, seed):
        rng = np.random.default_rng(seed)
        shapes = {"embedding/kernel": (P, P, C, D), "cls": (1, 1, D), "posembed_input": (1, TOKENS + 1, D)}
        shapes |= {f"attention/{name}/kernel": (D, HEADS, D // HEADS) for name in ("query", "key", "value")}
        shapes |= {"attention/out/kernel": (HEADS, D // HEADS, D), "head/kernel": (D, CLASSES)}
        weights = {name: rng.normal(0, 0.3, shape) for name, shape in shapes.items()}
        weights |= {f"{name}/scale": np.ones(D) for name in ("LayerNorm_0", "encoder_norm")}
        weights |= {f"attention/{name}/bias": np.zeros((HEADS, D // HEADS)) for name in ("query", "key", "value")}
        zeros = ("embedding", "LayerNorm_0", "attention/out", "encoder_norm")
        return weights | {f"{name}/bias": np.zeros(D) for name in zeros} | {"head/bias": np.zeros(CLASSES)}

    def inputs(self, seed):
        return {"image": np.random.default_rng(seed).integers(0, 256, (2, 6, 9, C)) / 127.5 - 1}

    def load(self, weights, dtype):
        self.w = {name: jnp.asarray(value) for name, value in weights.items()}

    def forward(self, inputs, tap):
        w, image = self.w, jnp.asarray(inputs["image"])
        layout = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(image, w["embedding/kernel"], (P, P), "VALID", dimension_numbers=layout)
        x = tap("embedding", x.reshape(len(image), TOKENS, D) + w["embedding/bias"])
        x = jnp.concatenate([jnp.tile(w["cls"], (len(image), 1, 1)), x], 1)
        x = tap("posembed_input", x + w["posembed_input"])
        h = tap("LayerNorm_0", layer_norm(x, w, "LayerNorm_0"))
        q, k, v = (
            jnp.einsum("bld,dhe->bhle", h, w[f"attention/{i}/kernel"]) + w[f"attention/{i}/bias"][:, None]
            for i in ("query", "key", "value")
        )
        h = jax.nn.softmax(q @ k.swapaxes(2, 3) / (D // HEADS) ** 0.5) @ v
        h = jnp.einsum("bhle,hed->bld", h, w["attention/out/kernel"]) + w["attention/out/bias"]
        x = tap("encoder_norm", layer_norm(x + tap("attention", h), w, "encoder_norm"))
        return {"logits": np.asarray(tap("head", x[:, 0] @ w["head/kernel"] + w["head/bias"]))}


class Port(Implementation):
    def load(self, weights, dtype):
        t = {name: torch.tensor(value) for name, value in weights.items()}
        self.model = nn.Module()
        m, self.cls, self.pos = self.model, t["cls"], t["posembed_input"]
        m.proj, m.norm1, m.attn = nn.Linear(P * P * C, D), nn.LayerNorm(D, 1e-6), nn.MultiheadAttention(D, HEADS)
        m.norm, m.head, m.attn.batch_first = nn.LayerNorm(D, 1e-6), nn.Linear(D, CLASSES), True
        qkv = ("query", "key", "value")
        state = {"proj.weight": t["embedding/kernel"].permute(3, 2, 0, 1).flatten(1), "proj.bias": t["embedding/bias"]}
        state["attn.in_proj_weight"] = torch.cat([t[f"attention/{i}/kernel"].flatten(1).T for i in qkv])
        state["attn.in_proj_bias"] = torch.cat([t[f"attention/{i}/bias"].flatten() for i in qkv])
        state["attn.out_proj.weight"] = t["attention/out/kernel"].flatten(0, 1).T
        state |= {"attn.out_proj.bias": t["attention/out/bias"], "head.weight": t["head/kernel"].T}
        for ours, theirs in {"norm1": "LayerNorm_0", "norm": "encoder_norm"}.items():
            state |= {f"{ours}.weight": t[f"{theirs}/scale"], f"{ours}.bias": t[f"{theirs}/bias"]}
        m.load_state_dict(state | {"head.bias": t["head/bias"]}, assign=True)
        m.eval()

    def patches(self, unfolded):
        return unfolded.contiguous()

    @torch.no_grad()
    def forward(self, inputs, tap):
        m, x = self.model, torch.tensor(inputs["image"]).permute(0, 3, 1, 2)
        x = self.patches(x.unfold(2, P, P).unfold(3, P, P)).view(len(x), TOKENS, P * P * C)
        x = torch.cat([self.cls.expand(len(x), -1, -1), tap("patch_embed", m.proj(x))], 1)
        x = tap("pos_drop", x + self.pos)
        h = tap("blocks.0.norm1", m.norm1(x))
        x = tap("norm", m.norm(x + tap("blocks.0.attn", m.attn(h, h, h, need_weights=False)[0])))
        return {"logits": tap("head", m.head(x[:, 0])).numpy()}


class Fixed(Port):
    def patches(self, unfolded):
        return unfolded.permute(0, 2, 3, 1, 4, 5).contiguous()
