"""Control: a mixture of experts, ported from PyTorch to MLX, that computes only the chosen experts of each token.

Source: ml-explore/mlx-lm#952: it describes how the MLX layer multiplies each token with the gathered weights of its
experts; the original computes all experts and weights them, with 0 for those that weren't chosen.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import torch
from torch import nn

from transformer_parity.pair import Implementation

SOURCE = "ml-explore/mlx-lm#952"
VERIFIED = True
KIND = "control"
NAME = ""
BLOCKS = ()
STAGE = "forward"
EXPERTS, TOP, D, HIDDEN = 5, 2, 8, 11
names = {
    "post_attention_layernorm": "ffn_norm",
    "moe.gate": "router",
    "moe.experts": "switch_mlp",
    "hidden": "residual",
}


class Original(Implementation):
    def __init__(self):
        self.norm, self.gate = nn.RMSNorm(D, eps=1e-5), nn.Linear(D, EXPERTS, bias=False)
        sizes = {"w1": (D, HIDDEN), "w2": (HIDDEN, D), "w3": (D, HIDDEN)}
        dicts = [nn.ModuleDict({n: nn.Linear(*s, bias=False) for n, s in sizes.items()}) for _ in range(EXPERTS)]
        self.experts = nn.ModuleList(dicts)
        self.model = nn.ModuleDict({"norm": self.norm, "gate": self.gate, "experts": self.experts})

    def init_weights(self, seed):
        rng = np.random.default_rng(seed)
        shapes = {name: value.shape for name, value in self.model.state_dict().items()}
        return {name: np.ones(s) if len(s) == 1 else rng.normal(0, s[1] ** -0.5, s) for name, s in shapes.items()}

    def inputs(self, seed):
        return {"hidden": np.random.default_rng(seed).standard_t(3, (2, 7, D))}

    def load(self, weights, dtype):
        self.model.to(getattr(torch, dtype)).eval()
        self.model.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})

    @torch.no_grad()
    def forward(self, inputs, tap):
        x = torch.tensor(inputs["hidden"])
        h = tap("post_attention_layernorm", self.norm(x))
        logits = tap("moe.gate", self.gate(h))
        top, chosen = logits.topk(TOP)
        shares = torch.zeros_like(logits).scatter(-1, chosen, top.softmax(-1))
        y = [e["w2"](nn.functional.silu(e["w1"](h)) * e["w3"](h)) for e in self.experts]
        y = tap("moe.experts", (torch.stack(y, -1) * shares[..., None, :]).sum(-1))
        return {"hidden": tap("hidden", x + y).numpy(), "expert": chosen[..., 0].numpy()}


class Port(Implementation):
    dtypes = ("float32",)

    def load(self, weights, dtype):
        self.norm, self.gate = mx.array(weights["norm.weight"]), mx.array(weights["gate.weight"])
        stacks = {n: [weights[f"experts.{i}.{n}.weight"].T for i in range(EXPERTS)] for n in ("w1", "w2", "w3")}
        self.experts = {name: mx.array(np.stack(stack)) for name, stack in stacks.items()}

    def forward(self, inputs, tap):
        x = mx.array(inputs["hidden"])
        h = tap("ffn_norm", mx.fast.rms_norm(x, self.norm, 1e-5))
        logits = tap("router", h @ self.gate.T)
        chosen = mx.argpartition(-logits, TOP - 1)[..., :TOP]
        shares = mx.softmax(mx.take_along_axis(logits, chosen, -1), -1)
        h = h[..., None, None, :]
        gate, up = (mx.gather_mm(h, self.experts[name], rhs_indices=chosen) for name in ("w1", "w3"))
        y = mx.gather_mm(gate * mx.sigmoid(gate) * up, self.experts["w2"], rhs_indices=chosen).squeeze(-2)
        y = tap("switch_mlp", (y * shares[..., None]).sum(-2))
        return {"hidden": np.array(tap("residual", x + y)), "expert": np.array(logits.argmax(-1)).astype(np.int64)}
