"""Gemma's gated feed-forward network in PyTorch with the exact GELU, where JAX computes the approximation with tanh.

Source: google/gemma_pytorch#37 (issue #33): the activation becomes the approximation of GELU with tanh.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from transformer_parity.pair import Implementation

SOURCE = "google/gemma_pytorch#37"
VERIFIED = True
KIND = "bug"
NAME = "activation"
BLOCKS = ("layer_0.mlp.gate",)
STAGE = "forward"
D, FFN, VOCAB, LAYERS = 12, 29, 41, 2


def rms_norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * (1 + scale)


class Original(Implementation):
    def init_weights(self, seed):
        rng = np.random.default_rng(seed)
        weights = {"embedder/input_embedding": rng.normal(0, 1, (VOCAB, D)), "final_norm/scale": np.zeros(D)}
        for i in range(LAYERS):
            weights[f"layer_{i}/pre_ffw_norm/scale"] = np.zeros(D)
            weights[f"layer_{i}/mlp/gating_einsum"] = rng.normal(0, D**-0.5, (2, D, FFN))
            weights[f"layer_{i}/mlp/linear"] = rng.normal(0, FFN**-0.5, (FFN, D))
        return weights

    def inputs(self, seed):
        return {"tokens": np.random.default_rng(seed).integers(0, VOCAB, (2, 7), dtype=np.int32)}

    def load(self, weights, dtype):
        self.params = {name: jnp.asarray(value) for name, value in weights.items()}

    def forward(self, inputs, tap):
        p = self.params
        x = tap("embedder", p["embedder/input_embedding"][inputs["tokens"]] * D**0.5)
        for i in range(LAYERS):
            h = tap(f"layer_{i}.pre_ffw_norm", rms_norm(x, p[f"layer_{i}/pre_ffw_norm/scale"]))
            gate, up = jnp.einsum("bld,cdf->cblf", h, p[f"layer_{i}/mlp/gating_einsum"])
            gate = tap(f"layer_{i}.mlp.gate", jax.nn.gelu(gate))
            up = tap(f"layer_{i}.mlp.up", up)
            x = tap(f"layer_{i}", x + gate * up @ p[f"layer_{i}/mlp/linear"])
        return {"hidden": np.asarray(tap("final_norm", rms_norm(x, p["final_norm/scale"])))}


class Port(Implementation):
    activation = nn.GELU()

    def load(self, weights, dtype):
        w = {name: torch.tensor(value) for name, value in weights.items()}
        self.embedding = nn.Embedding.from_pretrained(w["embedder/input_embedding"])
        self.norms, self.gate_up, self.down = [], [], []
        for i in range(LAYERS):
            self.norms.append(self.norm(w[f"layer_{i}/pre_ffw_norm/scale"]))
            self.gate_up.append(self.linear(torch.cat(tuple(w[f"layer_{i}/mlp/gating_einsum"]), -1)))
            self.down.append(self.linear(w[f"layer_{i}/mlp/linear"]))
        self.final_norm = self.norm(w["final_norm/scale"])

    def norm(self, scale):
        norm = nn.RMSNorm(D, eps=1e-6)
        norm.weight = nn.Parameter(1 + scale)
        return norm

    def linear(self, kernel):
        linear = nn.Linear(*kernel.shape, bias=False)
        linear.weight = nn.Parameter(kernel.T)
        return linear

    @torch.no_grad()
    def forward(self, inputs, tap):
        x = tap("model.embed_tokens", self.embedding(torch.tensor(inputs["tokens"])) * D**0.5)
        for i in range(LAYERS):
            own = f"model.layers.{i}"
            gate, up = self.gate_up[i](tap(f"{own}.norm", self.norms[i](x))).transpose(1, 2).chunk(2, 1)
            gate, up = tap(f"{own}.gate", self.activation(gate)), tap(f"{own}.up", up)
            x = tap(own, x + self.down[i]((gate * up).transpose(1, 2)))
        return {"hidden": tap("model.norm", self.final_norm(x)).numpy()}


class Fixed(Port):
    activation = nn.GELU(approximate="tanh")


names = {
    "embedder": "model.embed_tokens",
    "layer_{i}.pre_ffw_norm": "model.layers.{i}.norm",
    "layer_{i}.mlp.gate": ("model.layers.{i}.gate", "b f l -> b l f"),
    "layer_{i}.mlp.up": ("model.layers.{i}.up", "b f l -> b l f"),
    "layer_{i}": "model.layers.{i}",
    "final_norm": "model.norm",
}
