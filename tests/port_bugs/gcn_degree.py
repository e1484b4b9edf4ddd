"""A graph convolutional network; the port counted every edge once more when it computed the degrees of the nodes.

Source: alexOarga/haiku-geometric#5: the ones that were added to the weights of the edges before the sum can go.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from transformer_parity.pair import Implementation

SOURCE = "alexOarga/haiku-geometric#5"
VERIFIED = True
KIND = "bug"
NAME = ""
BLOCKS = ("convs.0.norm", "convs.0.propagate", "convs.0")
STAGE = "forward"

SIZES, NODES, GRAPHS = (5, 7, 3), 11, 2


class Original(Implementation):
    def init_weights(self, seed):
        rng = np.random.default_rng(seed)
        shapes = {f"convs.{i}.lin.weight": SIZES[i : i + 2][::-1] for i in range(2)}
        weights = {name: rng.normal(0, shape[1] ** -0.5, shape) for name, shape in shapes.items()}
        weights |= {f"convs.{i}.bias": np.zeros(SIZES[i + 1]) for i in range(2)}
        return {name: value.astype(np.float32) for name, value in weights.items()}

    def inputs(self, seed):
        rng = np.random.default_rng(seed)
        batch = np.array([0] * 5 + [1] * (NODES - 5))
        source, target = np.nonzero((batch[:, None] == batch) & (rng.random((NODES, NODES)) < 0.4))
        return {
            "x": rng.normal(size=(NODES, SIZES[0])).astype(np.float32),
            "edge_index": np.stack([source, target]),
            "edge_weight": rng.uniform(0.2, 1.0, len(source)).astype(np.float32),
            "batch": batch,
        }

    def load(self, weights, dtype):
        self.w = {name: torch.from_numpy(value) for name, value in weights.items()}

    def convolve(self, name, x, inputs, tap):
        loops = torch.arange(NODES)
        source, target = (torch.cat([torch.from_numpy(ends), loops]) for ends in inputs["edge_index"])
        weight = torch.cat([torch.from_numpy(inputs["edge_weight"]), torch.ones(NODES, dtype=x.dtype)])
        scale = torch.zeros(NODES, dtype=x.dtype).index_add(0, target, weight).rsqrt()
        norm = tap(f"{name}.norm", scale[source] * weight * scale[target])
        x = tap(f"{name}.lin", nn.functional.linear(x, self.w[f"{name}.lin.weight"]))
        x = tap(f"{name}.propagate", torch.zeros_like(x).index_add(0, target, norm[:, None] * x[source]))
        return tap(name, x + self.w[f"{name}.bias"])

    @torch.no_grad()
    def forward(self, inputs, tap):
        x = self.convolve("convs.0", torch.from_numpy(inputs["x"]), inputs, tap).relu()
        x = self.convolve("convs.1", x, inputs, tap)
        member = nn.functional.one_hot(torch.from_numpy(inputs["batch"]), GRAPHS).to(x.dtype)
        return {"logits": tap("pool", member.T @ x / member.sum(0)[:, None]).numpy()}


class GCNConv(eqx.Module):
    linear: eqx.nn.Linear
    bias: jax.Array

    def __call__(self, x, senders, receivers, edges, degrees):
        scale = jax.lax.rsqrt(degrees)
        messages = jax.vmap(self.linear)(x)[senders] * (scale[senders] * edges * scale[receivers])[:, None]
        return jax.ops.segment_sum(messages, receivers, NODES) + self.bias


class Port(Implementation):
    def load(self, weights, dtype):
        w = {name: jnp.asarray(value) for name, value in weights.items()}
        self.convs = []
        for i in range(2):
            linear = eqx.nn.Linear(*SIZES[i : i + 2], use_bias=False, key=jax.random.key(0))
            linear = eqx.tree_at(lambda m: m.weight, linear, w[f"convs.{i}.lin.weight"])
            self.convs.append(GCNConv(linear, w[f"convs.{i}.bias"]))

    def degrees(self, edges, receivers):
        return jax.ops.segment_sum(edges + jnp.ones_like(edges), receivers, NODES)

    def forward(self, inputs, tap):
        x, batch = jnp.asarray(inputs["x"]), jnp.asarray(inputs["batch"])
        senders, receivers = jnp.concatenate([inputs["edge_index"], np.tile(np.arange(NODES), (2, 1))], 1)
        edges = jnp.concatenate([inputs["edge_weight"], jnp.ones(NODES, x.dtype)])
        degrees = self.degrees(edges, receivers)
        for i, layer in enumerate(self.convs):
            x = tap(f"convs.{i}", layer(jax.nn.relu(x) if i else x, senders, receivers, edges, degrees))
        x = jax.ops.segment_sum(x, batch, GRAPHS) / jnp.bincount(batch, length=GRAPHS)[:, None]
        return {"logits": np.asarray(x)}


class Fixed(Port):
    def degrees(self, edges, receivers):
        return jax.ops.segment_sum(edges, receivers, NODES)
