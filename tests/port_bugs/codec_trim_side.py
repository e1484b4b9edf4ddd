"""The decoder of a neural audio codec; the port cut the surplus samples of its causal upsampling from the left.

Source: Blaizzy/mlx-audio#391: the transposed convolutions now drop the samples after the signal, which depend on the
last frame only.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from transformer_parity.pair import Implementation

SOURCE = "Blaizzy/mlx-audio#391"
VERIFIED = True
KIND = "bug"
NAME = "shifted"
BLOCKS = ("upsample.0.trim",)
STAGE = "forward"

BOOKS, ENTRIES, STRIDES, WIDTHS = 3, 17, (3, 2), (6, 5, 4)
names = {"quantizer": "latents", "upsample.{i}.trim": "decoder.blocks.{i}", "post": "decoder.out"}


class Original(Implementation):
    def init_weights(self, seed):
        rng = np.random.default_rng(seed)
        weights = {f"quantizer.layers.{i}.embed": rng.normal(size=(ENTRIES, WIDTHS[0])) for i in range(BOOKS)}
        for i, stride in enumerate(STRIDES):
            weights[f"upsample.{i}.weight_g"] = rng.uniform(0.5, 1.5, (WIDTHS[i], 1, 1))
            weights[f"upsample.{i}.weight_v"] = rng.normal(size=(*WIDTHS[i : i + 2], 2 * stride))
            weights[f"upsample.{i}.bias"] = rng.normal(0, 0.1, WIDTHS[i + 1])
        weights |= {"post.weight": rng.normal(0, 0.3, (1, WIDTHS[-1], 5)), "post.bias": np.zeros(1)}
        return {name: value.astype(np.float32) for name, value in weights.items()}

    def inputs(self, seed):
        return {"codes": np.random.default_rng(seed).integers(0, ENTRIES, (2, BOOKS, 7))}

    def load(self, weights, dtype):
        self.w = {name: torch.from_numpy(value) for name, value in weights.items()}
        self.upsample = []
        for i, stride in enumerate(STRIDES):
            layer = nn.ConvTranspose1d(*WIDTHS[i : i + 2], 2 * stride, stride, dtype=getattr(torch, dtype))
            layer = nn.utils.parametrizations.weight_norm(layer)
            state = [self.w[f"upsample.{i}.{name}"] for name in ("bias", "weight_g", "weight_v")]
            layer.load_state_dict(dict(zip(layer.state_dict(), state, strict=True)))
            self.upsample.append(layer)

    @torch.no_grad()
    def forward(self, inputs, tap):
        codes = torch.from_numpy(inputs["codes"])
        x = tap("quantizer", sum(self.w[f"quantizer.layers.{i}.embed"][codes[:, i]] for i in range(BOOKS)).mT)
        for i, (layer, stride) in enumerate(zip(self.upsample, STRIDES, strict=True)):
            x = tap(f"upsample.{i}", layer(nn.functional.elu(x)))
            x = tap(f"upsample.{i}.trim", x[..., :-stride])
        x = nn.functional.pad(nn.functional.elu(x), (4, 0))
        return {"audio": tap("post", nn.functional.conv1d(x, self.w["post.weight"], self.w["post.bias"])).numpy()}


def with_arrays(layer, weight, bias):
    return eqx.tree_at(lambda m: (m.weight, m.bias), layer, (jnp.asarray(weight), jnp.asarray(bias[:, None])))


class Port(Implementation):
    def load(self, weights, dtype):
        key, self.upsample = jax.random.key(0), []
        self.codebooks = jnp.stack([weights[f"quantizer.layers.{i}.embed"] for i in range(BOOKS)])
        for i, stride in enumerate(STRIDES):
            g, v, bias = (weights[f"upsample.{i}.{part}"] for part in ("weight_g", "weight_v", "bias"))
            weight = g * v / np.sqrt((v**2).sum((1, 2), keepdims=True))
            layer = eqx.nn.ConvTranspose1d(*WIDTHS[i : i + 2], 2 * stride, stride, key=key)
            self.upsample.append(with_arrays(layer, weight.swapaxes(0, 1)[..., ::-1], bias))
        layer = eqx.nn.Conv1d(WIDTHS[-1], 1, 5, padding=((4, 0),), key=key)
        self.post = with_arrays(layer, weights["post.weight"], weights["post.bias"])

    def trim(self, x, stride):
        return x[..., stride:]

    def forward(self, inputs, tap):
        latents = jax.vmap(lambda book, codes: book[codes], (0, 1), 1)(self.codebooks, jnp.asarray(inputs["codes"]))
        x = tap("latents", latents.sum(1).swapaxes(1, 2))
        for i, (layer, stride) in enumerate(zip(self.upsample, STRIDES, strict=True)):
            x = tap(f"decoder.blocks.{i}", self.trim(jax.vmap(layer)(jax.nn.elu(x)), stride))
        return {"audio": np.asarray(tap("decoder.out", jax.vmap(self.post)(jax.nn.elu(x))))}


class Fixed(Port):
    def trim(self, x, stride):
        return x[..., :-stride]
