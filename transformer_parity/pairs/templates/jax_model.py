"""The toy model in JAX with Flax NNX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_parity.pair import Implementation
from transformer_parity.pairs.templates.header import BLOCKS, EPSILON, HIDDEN, TOKENS, WIDTH


class RoleBlock(nnx.Module):
    """Attention and a feed-forward network."""

    def __init__(self, rngs):
        self.norm1, self.norm2 = (nnx.LayerNorm(WIDTH, epsilon=EPSILON, rngs=rngs) for _ in range(2))
        self.qkv, self.out = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x, may_attend, tap, name):
        """Return the output of the block."""
        q, k, v = jnp.split(self.qkv(self.norm1(x)), 3, -1)
        scores = jnp.where(may_attend, q @ k.mT / WIDTH**0.5, -1e9)
        x = x + tap(f"{name}.attention", self.out(jax.nn.softmax(scores) @ v))
        return x + tap(f"{name}.mlp", self.down(jax.nn.gelu(self.up(self.norm2(x)), approximate=True)))


class RoleModel(nnx.Module):
    """A toy model; replace it with yours."""

    def __init__(self, dtype, rngs):
        self.embed = nnx.Embed(TOKENS, WIDTH, dtype=dtype, rngs=rngs)  # without dtype, it returns float32
        self.blocks = nnx.List([RoleBlock(rngs) for _ in range(BLOCKS)])
        self.norm, self.head = nnx.LayerNorm(WIDTH, epsilon=EPSILON, rngs=rngs), nnx.Linear(WIDTH, TOKENS, rngs=rngs)

    def __call__(self, ids, mask, tap):
        """Return the logits."""
        places = jnp.arange(ids.shape[1])
        may_attend = mask[:, None] & (places[:, None] >= places)
        x = tap("embed", self.embed(ids))
        for i, block in enumerate(self.blocks):
            x = block(x, may_attend, tap, f"blocks.{i}")
        return self.head(tap("norm", self.norm(x)))


class Role(Implementation):
    """One of the two implementations."""

    def load(self, weights, dtype):
        """Build the model in inference mode, with these weights."""
        self.model = nnx.eval_shape(lambda: RoleModel(dtype, nnx.Rngs(0)))  # without initial values
        for path, parameter in nnx.iter_graph(self.model):
            if isinstance(parameter, nnx.Param):
                parameter.set_value(jnp.asarray(weights[".".join(map(str, path))]))

    def forward(self, inputs, tap):
        """Run the model, and return its outputs by name."""
        return {"logits": self.model(jnp.asarray(inputs["ids"]), jnp.asarray(inputs["mask"]), tap)}
