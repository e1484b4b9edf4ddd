"""A Mamba-3 layer; the port clamped the positive decay rate and only then negated it, so that no state decayed.

Source: fla-org/flash-linear-attention#1012: the rate is negated before it is limited to at most minus the floor.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from transformer_parity.pair import Implementation

SOURCE = "fla-org/flash-linear-attention#1012"
VERIFIED = True
KIND = "bug"
NAME = "order"
BLOCKS = ("A",)
STAGE = "forward"

DIM, HEADS, HEAD, STATE, FLOOR = 7, 3, 5, 4, 1e-4
INNER = HEADS * HEAD
SPLITS = np.cumsum([INNER, INNER, STATE, STATE, HEADS])


class Original(Implementation):
    def init_weights(self, seed):
        rng = np.random.default_rng(seed)
        weights = {
            "in_proj.weight": rng.normal(0, DIM**-0.5, (2 * INNER + 2 * STATE + 2 * HEADS, DIM)),
            "dt_bias": np.log(np.expm1(np.exp(rng.uniform(np.log(0.001), np.log(0.1), HEADS)))),
            **{"D": np.ones(HEADS), "norm.weight": np.ones(INNER)},
            "out_proj.weight": rng.normal(0, INNER**-0.5, (DIM, INNER)),
        }
        return {name: value.astype(np.float32) for name, value in weights.items()}

    def inputs(self, seed):
        return {"x": np.random.default_rng(seed).normal(size=(2, 13, DIM)).astype(np.float32)}

    def load(self, weights, dtype):
        self.w = {name: torch.from_numpy(value) for name, value in weights.items()}

    @torch.no_grad()
    def forward(self, inputs, tap):
        w, softplus, silu = self.w, nn.functional.softplus, nn.functional.silu
        x = tap("in_proj", torch.from_numpy(inputs["x"]) @ w["in_proj.weight"].T)
        z, x, b, c, dt, a = x.tensor_split(SPLITS.tolist(), -1)
        x = x.unflatten(-1, (HEADS, HEAD))
        dt = tap("dt", softplus(dt + w["dt_bias"]))
        a = tap("A", (-softplus(a)).clamp(max=-FLOOR))
        decay, states, ys = (dt * a).exp(), torch.zeros(len(x), HEADS, HEAD, STATE, dtype=x.dtype), []
        for t in range(x.shape[1]):
            update = torch.einsum("bh,bhp,bn->bhpn", dt[:, t], x[:, t], b[:, t])
            states = states * decay[:, t, :, None, None] + update
            ys.append(torch.einsum("bhpn,bn->bhp", states, c[:, t]))
        y = (tap("scan", torch.stack(ys, 1)) + w["D"][:, None] * x).flatten(-2)
        y = tap("norm", nn.functional.rms_norm(y * silu(z), (INNER,), w["norm.weight"], 1e-5))
        return {"hidden_states": tap("out_proj", y @ w["out_proj.weight"].T).numpy()}


class Port(Implementation):
    def load(self, weights, dtype):
        self.w = {name: jnp.asarray(value) for name, value in weights.items()}

    def rate(self, a):
        return -jnp.minimum(jax.nn.softplus(a), -FLOOR)

    def forward(self, inputs, tap):
        w = self.w
        x = tap("in_proj", jnp.asarray(inputs["x"]) @ w["in_proj.weight"].T)
        z, x, b, c, dt, a = jnp.split(x, SPLITS, -1)
        x = x.reshape(*x.shape[:2], HEADS, HEAD)
        dt = tap("dt", jax.nn.softplus(dt + w["dt_bias"]))
        a = tap("A", self.rate(a))

        def step(state, xs):
            x_t, b_t, c_t, dt_t, a_t = xs
            update = (dt_t[..., None] * x_t)[..., None] * b_t[:, None, None]
            state = jnp.exp(dt_t * a_t)[..., None, None] * state + update
            return state, (state * c_t[:, None, None]).sum(-1)

        time_major = [jnp.moveaxis(value, 1, 0) for value in (x, b, c, dt, a)]
        y = jax.lax.scan(step, jnp.zeros((len(x), HEADS, HEAD, STATE), x.dtype), time_major)[1]
        y = tap("scan", jnp.moveaxis(y, 0, 1)) + w["D"][:, None] * x
        y = y.reshape(z.shape) * jax.nn.silu(z)
        y = tap("norm", y * jax.lax.rsqrt(jnp.mean(y**2, -1, keepdims=True) + 1e-5) * w["norm.weight"])
        return {"hidden_states": np.asarray(tap("out_proj", y @ w["out_proj.weight"].T))}


class Fixed(Port):
    def rate(self, a):
        return jnp.minimum(-jax.nn.softplus(a), -FLOOR)
