"""The toy model in MLX."""

from __future__ import annotations

import mlx.core as mx
from mlx import nn

from transformer_parity.pair import Implementation
from transformer_parity.pairs.templates.header import BLOCKS, EPSILON, HIDDEN, TOKENS, WIDTH


class RoleBlock(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, EPSILON), nn.LayerNorm(WIDTH, EPSILON)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def __call__(self, x, may_attend, tap, name):
        """Return the output of the block."""
        q, k, v = mx.split(self.qkv(self.norm1(x)), 3, -1)
        scores = mx.where(may_attend, q @ k.swapaxes(1, 2) / WIDTH**0.5, -1e9)
        x = x + tap(f"{name}.attention", self.out(mx.softmax(scores, -1) @ v))
        return x + tap(f"{name}.mlp", self.down(nn.gelu_approx(self.up(self.norm2(x)))))


class RoleModel(nn.Module):
    """A toy model; replace it with yours."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = [RoleBlock() for _ in range(BLOCKS)]
        self.norm, self.head = nn.LayerNorm(WIDTH, EPSILON), nn.Linear(WIDTH, TOKENS)

    def __call__(self, ids, mask, tap):
        """Return the logits."""
        places = mx.arange(ids.shape[1])
        may_attend = mask[:, None] & (places[:, None] >= places)
        x = tap("embed", self.embed(ids))
        for i, block in enumerate(self.blocks):
            x = block(x, may_attend, tap, f"blocks.{i}")
        return self.head(tap("norm", self.norm(x)))


class Role(Implementation):
    """One of the two implementations."""

    dtypes = ("float32",)  # in float64, MLX still rounds some constants and results to float32

    def load(self, weights, dtype):
        """Build the model in inference mode, with these weights."""
        self.model = RoleModel()
        state = []  # the names and layouts of the weights in MLX, where kernels are [out, in]
        for name, array in weights.items():
            module, _, kind = name.rpartition(".")
            array = mx.array(array.T if kind == "kernel" else array)
            state.append((f"{module}.{'bias' if kind == 'bias' else 'weight'}", array))
        self.model.load_weights(state)

    def forward(self, inputs, tap):
        """Run the model, and return its outputs by name."""
        return {"logits": self.model(mx.array(inputs["ids"]), mx.array(inputs["mask"]), tap)}
