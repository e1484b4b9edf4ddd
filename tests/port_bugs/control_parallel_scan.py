"""A control: a gated linear recurrence, once as a loop over time, once as a parallel associative scan, with gradients.

Source: none; the port is correct.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from transformer_parity.pair import Implementation

SOURCE = ""
VERIFIED = True
KIND = "control"
NAME = ""
BLOCKS = ()
STAGE = "forward"

DIM, WIDTH, LENGTH = 5, 7, 19
LAYERS = {"gate": (DIM, WIDTH), "value": (DIM, WIDTH), "output": (WIDTH, DIM)}


class Original(Implementation):
    def init_weights(self, seed):
        rng = np.random.default_rng(seed)
        weights = {f"{name}.weight": rng.normal(0, s[0] ** -0.5, s[::-1]) for name, s in LAYERS.items()}
        weights |= {f"{name}.bias": np.zeros(s[1]) for name, s in LAYERS.items()}
        weights["a_param"] = rng.uniform(-1.0, 2.0, WIDTH)
        return {name: value.astype(np.float32) for name, value in weights.items()}

    def inputs(self, seed):
        starts = np.arange(LENGTH) % np.array([[8], [LENGTH]]) == 0
        return {"x": np.random.default_rng(seed).normal(size=(2, LENGTH, DIM)).astype(np.float32), "starts": starts}

    def load(self, weights, dtype):
        self.model = nn.ModuleDict({name: nn.Linear(*sizes) for name, sizes in LAYERS.items()})
        self.model.register_parameter("a_param", nn.Parameter(torch.zeros(WIDTH)))
        self.model.to(getattr(torch, dtype))
        self.model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})

    def run(self, inputs):
        x, starts = torch.from_numpy(inputs["x"]), torch.from_numpy(inputs["starts"])
        gate = self.model["gate"](x).sigmoid()
        decay = (-8 * gate * nn.functional.softplus(self.model.a_param)).exp() * ~starts[..., None]
        value = self.model["value"](x) * (1 - decay**2).sqrt()
        states = [value[:, 0]]
        for t in range(1, LENGTH):
            states.append(decay[:, t] * states[-1] + value[:, t])
        return self.model["output"](torch.stack(states, 1))

    @torch.no_grad()
    def forward(self, inputs, tap):
        return {"y": self.run(inputs).numpy()}

    def gradients(self, inputs):
        self.model.zero_grad()
        loss = (self.run(inputs) ** 2).mean()
        loss.backward()
        return {name: p.grad.numpy() for name, p in self.model.named_parameters()} | {"loss": loss.detach().numpy()}


class Recurrence(eqx.Module):
    gate: eqx.nn.Linear
    value: eqx.nn.Linear
    output: eqx.nn.Linear
    a_param: jax.Array

    def __call__(self, x, starts):
        gate = jax.nn.sigmoid(jax.vmap(self.gate)(x))
        decay = jnp.exp(-8 * gate * jax.nn.softplus(self.a_param)) * ~starts[:, None]
        value = jax.vmap(self.value)(x) * jnp.sqrt(1 - decay**2)

        def combine(left, right):
            return left[0] * right[0], left[1] * right[0] + right[1]

        return jax.vmap(self.output)(jax.lax.associative_scan(combine, (decay, value))[1])


class Port(Implementation):
    def load(self, weights, dtype):
        layers = []
        for name, sizes in LAYERS.items():
            layer = eqx.nn.Linear(*sizes, key=jax.random.key(0))
            arrays = tuple(jnp.asarray(weights[f"{name}.{part}"]) for part in ("weight", "bias"))
            layers.append(eqx.tree_at(lambda m: (m.weight, m.bias), layer, arrays))
        self.model = Recurrence(*layers, jnp.asarray(weights["a_param"]))

    def forward(self, inputs, tap):
        return {"y": np.asarray(jax.vmap(self.model)(jnp.asarray(inputs["x"]), jnp.asarray(inputs["starts"])))}

    def gradients(self, inputs):
        x, starts = jnp.asarray(inputs["x"]), jnp.asarray(inputs["starts"])
        loss, g = eqx.filter_value_and_grad(lambda m: jnp.mean(jax.vmap(m)(x, starts) ** 2))(self.model)
        grads = {f"{n}.{part}": getattr(getattr(g, n), part) for n in LAYERS for part in ("weight", "bias")}
        return {name: np.asarray(value) for name, value in {**grads, "a_param": g.a_param, "loss": loss}.items()}
