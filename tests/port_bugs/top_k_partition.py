"""Control: a layer that keeps the best tokens, ported from Keras to JAX, with a partition instead of a sort.

Source: tillahoffmann/jax-mps#151: top_k partitions the values and then sorts only the chosen ones, instead of sorting
all values.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import keras
import numpy as np

from transformer_parity.pair import Implementation

SOURCE = "tillahoffmann/jax-mps#151"
VERIFIED = True
KIND = "control"
NAME = ""
BLOCKS = ()
STAGE = "forward"
D, HIDDEN, K, CLASSES = 6, 10, 4, 3
SIZES = {"project": (D, HIDDEN), "score": (HIDDEN, 1), "classify": (HIDDEN, CLASSES)}


class Original(Implementation):
    def init_weights(self, seed):
        rng = np.random.default_rng(seed)
        weights = {f"{name}/kernel": rng.normal(0, shape[0] ** -0.5, shape) for name, shape in SIZES.items()}
        return weights | {f"{name}/bias": np.zeros(shape[1]) for name, shape in SIZES.items()}

    def inputs(self, seed):
        tokens = np.random.default_rng(seed).normal(size=(3, 12, D)).cumsum(1) / 2
        return {"tokens": tokens, "lengths": np.array([12, 5, 9])}

    def load(self, weights, dtype):
        for name, (size, units) in SIZES.items():
            layer = keras.layers.Dense(units, activation="tanh" if name == "project" else None, dtype=dtype)
            layer.build((None, None, size))
            layer.set_weights([weights[f"{name}/kernel"], weights[f"{name}/bias"]])
            setattr(self, name, layer)

    def forward(self, inputs, tap):
        h = tap("project", self.project(inputs["tokens"]))
        scores = tap("score", self.score(h)[..., 0])
        real = np.arange(inputs["tokens"].shape[1]) < inputs["lengths"][:, None]
        order = keras.ops.flip(keras.ops.argsort(keras.ops.where(real, scores, -1e9)), -1)[:, :K]
        kept = tap("kept", keras.ops.take_along_axis(h, order[..., None], 1))
        shares = keras.ops.softmax(keras.ops.take_along_axis(scores, order, 1))
        pooled = tap("pooled", keras.ops.sum(kept * shares[..., None], 1))
        logits = tap("classify", self.classify(pooled))
        return {"logits": keras.ops.convert_to_numpy(logits), "tokens": keras.ops.convert_to_numpy(order)}


class Port(Implementation):
    def load(self, weights, dtype):
        self.w = {name: jnp.asarray(value) for name, value in weights.items()}

    def dense(self, x, name):
        return x @ self.w[f"{name}/kernel"] + self.w[f"{name}/bias"]

    def forward(self, inputs, tap):
        h = tap("project", jnp.tanh(self.dense(jnp.asarray(inputs["tokens"]), "project")))
        scores = tap("score", self.dense(h, "score")[..., 0])
        real = jnp.arange(h.shape[1]) < jnp.asarray(inputs["lengths"])[:, None]
        best = jnp.argpartition(jnp.where(real, -scores, jnp.inf), K - 1)[:, :K]
        values = jnp.take_along_axis(scores, best, 1)
        rank = jnp.argsort(-values)
        order, values = jnp.take_along_axis(best, rank, 1), jnp.take_along_axis(values, rank, 1)
        kept = tap("kept", jax.vmap(lambda row, index: row[index])(h, order))
        pooled = tap("pooled", jnp.einsum("bk,bkd->bd", jax.nn.softmax(values), kept))
        return {"logits": np.asarray(tap("classify", self.dense(pooled, "classify"))), "tokens": np.asarray(order)}
