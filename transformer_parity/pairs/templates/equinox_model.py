"""The toy model in JAX with Equinox."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp

from transformer_parity.pair import Implementation
from transformer_parity.pairs.templates.header import BLOCKS, EPSILON, HIDDEN, TOKENS, WIDTH


class RoleBlock(eqx.Module):
    """Attention and a feed-forward network."""

    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm
    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        self.norm1, self.norm2 = eqx.nn.LayerNorm(WIDTH, EPSILON), eqx.nn.LayerNorm(WIDTH, EPSILON)
        self.qkv, self.out = eqx.nn.Linear(WIDTH, 3 * WIDTH, key=key), eqx.nn.Linear(WIDTH, WIDTH, key=key)
        self.up, self.down = eqx.nn.Linear(WIDTH, HIDDEN, key=key), eqx.nn.Linear(HIDDEN, WIDTH, key=key)

    def __call__(self, x, may_attend, tap, name):
        """Return the output of the block."""
        q, k, v = jnp.split(role_each(self.qkv, role_each(self.norm1, x)), 3, -1)
        scores = jnp.where(may_attend, q @ k.mT / WIDTH**0.5, -1e9)
        x = x + tap(f"{name}.attention", role_each(self.out, jax.nn.softmax(scores) @ v))
        hidden = jax.nn.gelu(role_each(self.up, role_each(self.norm2, x)), approximate=True)
        return x + tap(f"{name}.mlp", role_each(self.down, hidden))


def role_each(layer, x):
    """Apply a layer to every token. Taps must stay outside of jax.vmap, inside which values can't be read."""
    return jax.vmap(jax.vmap(layer))(x)


class RoleModel(eqx.Module):
    """A toy model; replace it with yours."""

    embed: eqx.nn.Embedding
    blocks: list[RoleBlock]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key):
        self.embed = eqx.nn.Embedding(TOKENS, WIDTH, key=key)
        self.blocks = [RoleBlock(key) for _ in range(BLOCKS)]
        self.norm, self.head = eqx.nn.LayerNorm(WIDTH, EPSILON), eqx.nn.Linear(WIDTH, TOKENS, key=key)

    def __call__(self, ids, mask, tap):
        """Return the logits."""
        places = jnp.arange(ids.shape[1])
        may_attend = mask[:, None] & (places[:, None] >= places)
        x = tap("embed", role_each(self.embed, ids))
        for i, block in enumerate(self.blocks):
            x = block(x, may_attend, tap, f"blocks.{i}")
        return role_each(self.head, tap("norm", role_each(self.norm, x)))


class Role(Implementation):
    """One of the two implementations."""

    def load(self, weights, dtype):
        """Build the model in inference mode, with these weights."""
        state = {}  # the names and layouts of the weights in Equinox, where kernels are [out, in]
        for name, array in weights.items():
            module, _, kind = name.rpartition(".")
            state[f"{module}.{'bias' if kind == 'bias' else 'weight'}"] = jnp.asarray(
                array.T if kind == "kernel" else array
            )
        self.model = jax.tree_util.tree_map_with_path(
            lambda path, _: state[jax.tree_util.keystr(path, simple=True, separator=".")],
            eqx.filter_eval_shape(RoleModel, jax.random.key(0)),  # without initial values
        )

    def forward(self, inputs, tap):
        """Run the model, and return its outputs by name."""
        return {"logits": self.model(jnp.asarray(inputs["ids"]), jnp.asarray(inputs["mask"]), tap)}
