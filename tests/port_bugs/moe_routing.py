"""A mixture of experts in JAX whose weights of the chosen experts are not divided by their sum.

Source: pytorch/torchtitan#1419 (and issue #1448): the scores of the top k experts are normalized to the sum 1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from transformer_parity.pair import Implementation

SOURCE = "pytorch/torchtitan#1419"
VERIFIED = True
KIND = "bug"
NAME = ""
BLOCKS = ("layers.0.mlp.weights",)
STAGE = "forward"
D, FFN, EXPERTS, K, LAYERS = 9, 15, 6, 2, 2


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, EXPERTS, bias=False)
        sizes = {"gate_proj": (D, FFN), "up_proj": (D, FFN), "down_proj": (FFN, D)}
        experts = [{n: nn.Linear(*s, bias=False) for n, s in sizes.items()} for _ in range(EXPERTS)]
        self.experts = nn.ModuleList(nn.ModuleDict(expert) for expert in experts)

    def forward(self, x, tap):
        scores = tap("mlp.gate", self.gate(x)).sigmoid()
        weights, chosen = scores.topk(K, -1)
        weights = tap("mlp.weights", weights / weights.sum(-1, keepdim=True))
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = (chosen == e).nonzero(as_tuple=True)
            h = nn.functional.silu(expert["gate_proj"](x[token])) * expert["up_proj"](x[token])
            y.index_add_(0, token, expert["down_proj"](h) * weights[token, slot, None])
        return tap("mlp", y)


def stack() -> nn.Module:
    layers = (nn.ModuleDict({"norm": nn.RMSNorm(D, eps=1e-6), "mlp": Moe()}) for _ in range(LAYERS))
    return nn.ModuleDict({"layers": nn.ModuleList(layers)})


class Original(Implementation):
    def init_weights(self, seed):
        torch.manual_seed(seed)
        return {name: value.numpy() for name, value in stack().state_dict().items()}

    def inputs(self, seed):
        return {"x": np.random.default_rng(seed).normal(size=(2, 5, D))}

    def load(self, weights, dtype):
        self.model = stack().to(getattr(torch, dtype)).eval()
        self.model.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})

    @torch.no_grad()
    def forward(self, inputs, tap):
        x = torch.tensor(inputs["x"]).flatten(0, 1)
        for i, layer in enumerate(self.model["layers"]):
            h = tap(f"layers.{i}.norm", layer["norm"](x))
            x = x + layer["mlp"](h, lambda n, v, i=i: tap(f"layers.{i}.{n}", v))
        return {"hidden": x.reshape(inputs["x"].shape).numpy()}


class Port(Implementation):
    def load(self, weights, dtype):
        self.params = []
        for i in range(LAYERS):
            w = {n.removeprefix(f"layers.{i}."): jnp.asarray(v) for n, v in weights.items()}
            params = {"norm": w["norm.weight"], "router": w["mlp.gate.weight"].T}
            for n in ("gate", "up", "down"):
                params[n] = jnp.stack([w[f"mlp.experts.{e}.{n}_proj.weight"].T for e in range(EXPERTS)])
            self.params.append(params)

    def normalize(self, weights):
        return weights

    def forward(self, inputs, tap):
        x = jnp.asarray(inputs["x"])
        for i, p in enumerate(self.params):
            h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * p["norm"]
            logits = tap(f"block_{i}/router", tap(f"block_{i}/norm", h) @ p["router"])
            weights, chosen = jax.lax.top_k(jax.nn.sigmoid(logits), K)
            weights = tap(f"block_{i}/weights", self.normalize(weights))
            gate, up, down = (p[n][chosen] for n in ("gate", "up", "down"))
            hidden = jax.nn.silu(jnp.einsum("bld,blkdf->blkf", h, gate)) * jnp.einsum("bld,blkdf->blkf", h, up)
            x = x + tap(f"block_{i}/moe", jnp.einsum("blkf,blkfd,blk->bld", hidden, down, weights))
        return {"hidden": np.asarray(x)}


class Fixed(Port):
    def normalize(self, weights):
        return weights / weights.sum(-1, keepdims=True)


names = {
    "layers.{i}.norm": ("block_{i}/norm", "b l d -> (b l) d"),
    "layers.{i}.mlp.gate": ("block_{i}/router", "b l e -> (b l) e"),
    "layers.{i}.mlp.weights": ("block_{i}/weights", "b l k -> (b l) k"),
    "layers.{i}.mlp": ("block_{i}/moe", "b l d -> (b l) d"),
}
