"""The toy model in Keras."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers, ops

from transformer_parity.pair import Implementation
from transformer_parity.pairs.templates.header import BLOCKS, EPSILON, HIDDEN, TOKENS, WIDTH


class RoleBlock(layers.Layer):
    """Attention and a feed-forward network."""

    def __init__(self, name):
        super().__init__(name=name)
        self.norm1 = layers.LayerNormalization(epsilon=EPSILON, name=f"{name}.norm1")
        self.norm2 = layers.LayerNormalization(epsilon=EPSILON, name=f"{name}.norm2")
        self.qkv, self.out = layers.Dense(3 * WIDTH, name=f"{name}.qkv"), layers.Dense(WIDTH, name=f"{name}.out")
        self.up, self.down = layers.Dense(HIDDEN, name=f"{name}.up"), layers.Dense(WIDTH, name=f"{name}.down")

    def call(self, x, may_attend, tap):
        """Return the output of the block."""
        q, k, v = ops.split(self.qkv(self.norm1(x)), 3, -1)
        scores = ops.where(may_attend, q @ ops.swapaxes(k, 1, 2) / WIDTH**0.5, -1e9)
        x = x + tap(f"{self.name}.attention", self.out(ops.softmax(scores) @ v))
        h = self.up(self.norm2(x))  # ops.gelu rounds its constants to float32 if Keras runs on TensorFlow
        h = 0.5 * h * (1.0 + ops.tanh((2.0 / np.pi) ** 0.5 * (h + 0.044715 * h**3)))
        return x + tap(f"{self.name}.mlp", self.down(h))


class RoleModel(keras.Model):
    """A toy model; replace it with yours."""

    def __init__(self):
        super().__init__()
        self.embed = layers.Embedding(TOKENS, WIDTH, name="embed")
        self.blocks = [RoleBlock(f"blocks.{i}") for i in range(BLOCKS)]
        self.norm = layers.LayerNormalization(epsilon=EPSILON, name="norm")
        self.head = layers.Dense(TOKENS, name="head")

    def call(self, ids, mask, tap):
        """Return the logits."""
        places = ops.arange(ids.shape[1])
        may_attend = mask[:, None] & (places[:, None] >= places)
        x = tap("embed", self.embed(ids))
        for block in self.blocks:
            x = block(x, may_attend, tap=tap)
        return self.head(tap("norm", self.norm(x)))


class Role(Implementation):
    """One of the two implementations."""

    def load(self, weights, dtype):
        """Build the model in inference mode, with these weights."""
        keras.config.set_dtype_policy(dtype)
        self.model = RoleModel()
        # The first call creates the variables.
        self.model(ops.ones((1, 1), "int32"), ops.ones((1, 1), bool), tap=lambda name, value: value)
        canonical = {"embeddings": "embedding", "gamma": "scale", "beta": "bias"}
        for variable in self.model.variables:
            layer, kind = variable.path.split("/")[-2:]
            variable.assign(weights[f"{layer}.{canonical.get(kind, kind)}"])

    def forward(self, inputs, tap):
        """Run the model, and return its outputs by name."""
        return {"logits": self.model(ops.array(inputs["ids"]), ops.array(inputs["mask"]), tap=tap)}
