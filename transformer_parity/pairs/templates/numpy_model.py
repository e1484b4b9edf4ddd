"""The toy model in NumPy."""

from __future__ import annotations

import numpy as np

from transformer_parity.pair import Implementation
from transformer_parity.pairs.templates.header import BLOCKS, EPSILON, WIDTH


class RoleModel:
    """A toy model; replace it with yours."""

    def __init__(self, weights):
        self.weights = weights

    def __call__(self, ids, mask, tap):
        """Return the logits."""
        places = np.arange(ids.shape[1])
        may_attend = mask[:, None] & (places[:, None] >= places)
        x = tap("embed", self.weights["embed.embedding"][ids])
        for name in [f"blocks.{i}" for i in range(BLOCKS)]:
            q, k, v = np.split(self.linear(f"{name}.qkv", self.norm(f"{name}.norm1", x)), 3, -1)
            scores = np.where(may_attend, q @ k.swapaxes(1, 2) / WIDTH**0.5, -1e9)
            exps = np.exp(scores - scores.max(-1, keepdims=True))
            x = x + tap(f"{name}.attention", self.linear(f"{name}.out", exps / exps.sum(-1, keepdims=True) @ v))
            h = self.linear(f"{name}.up", self.norm(f"{name}.norm2", x))
            h = 0.5 * h * (1.0 + np.tanh((2.0 / np.pi) ** 0.5 * (h + 0.044715 * h**3)))  # the tanh form of GELU
            x = x + tap(f"{name}.mlp", self.linear(f"{name}.down", h))
        return self.linear("head", tap("norm", self.norm("norm", x)))

    def linear(self, name, x):
        """Return x W + b."""
        return x @ self.weights[f"{name}.kernel"] + self.weights[f"{name}.bias"]

    def norm(self, name, x):
        """Return the layer norm of x."""
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON)
        return x * self.weights[f"{name}.scale"] + self.weights[f"{name}.bias"]


class Role(Implementation):
    """One of the two implementations."""

    def load(self, weights, dtype):
        """Build the model in inference mode, with these weights."""
        self.model = RoleModel(weights)

    def forward(self, inputs, tap):
        """Run the model, and return its outputs by name."""
        return {"logits": self.model(inputs["ids"], inputs["mask"], tap)}
