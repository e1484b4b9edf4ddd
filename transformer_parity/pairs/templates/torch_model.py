"""The toy model in PyTorch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import gelu

from transformer_parity.pair import Implementation
from transformer_parity.pairs.templates.header import BLOCKS, EPSILON, HIDDEN, TOKENS, WIDTH


class RoleBlock(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, EPSILON), nn.LayerNorm(WIDTH, EPSILON)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x, may_attend, tap, name):
        """Return the output of the block."""
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        scores = (q @ k.mT / WIDTH**0.5).masked_fill(~may_attend, -1e9)
        x = x + tap(f"{name}.attention", self.out(scores.softmax(-1) @ v))
        return x + tap(f"{name}.mlp", self.down(gelu(self.up(self.norm2(x)), approximate="tanh")))


class RoleModel(nn.Module):
    """A toy model; replace it with yours."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(RoleBlock() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH, EPSILON), nn.Linear(WIDTH, TOKENS)

    def forward(self, ids, mask, tap):
        """Return the logits."""
        places = torch.arange(ids.shape[1])
        may_attend = mask[:, None] & (places[:, None] >= places)
        x = tap("embed", self.embed(ids))
        for i, block in enumerate(self.blocks):
            x = block(x, may_attend, tap, f"blocks.{i}")
        return self.head(tap("norm", self.norm(x)))


class Role(Implementation):
    """One of the two implementations."""

    def load(self, weights, dtype):
        """Build the model in inference mode, with these weights."""
        self.model = RoleModel().to(getattr(torch, dtype)).eval()
        state = {}  # the names and layouts of the weights in PyTorch, where kernels are [out, in]
        for name, array in weights.items():
            module, _, kind = name.rpartition(".")
            state[f"{module}.{'bias' if kind == 'bias' else 'weight'}"] = torch.tensor(
                array.T if kind == "kernel" else array
            )
        self.model.load_state_dict(state)

    def forward(self, inputs, tap):
        """Run the model, and return its outputs by name."""
        with torch.inference_mode():
            return {"logits": self.model(torch.tensor(inputs["ids"]), torch.tensor(inputs["mask"]), tap)}
