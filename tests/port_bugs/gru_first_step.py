"""A keyword spotter with two GRU layers; the port left out the hidden bias of the new gate at the first time step.

Source: ml-explore/mlx#3252: without a hidden state, the GRU now adds the reset gate times the hidden bias, as it does
for a hidden state of zeros.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as mnn
import numpy as np
import torch
from torch import nn

from transformer_parity.pair import Implementation

SOURCE = "ml-explore/mlx#3252"
VERIFIED = True
KIND = "bug"
NAME = "offset"
BLOCKS = ("encoder.0",)
STAGE = "forward"

MELS, HIDDEN, WORDS = 7, 5, 4
names = {"encoder.{i}": ("gru_layers.{i}", "l b h -> b l h"), "last": "pooled", "head": "logits"}


def build():
    layers = [nn.GRU(size, HIDDEN, batch_first=True) for size in (MELS, HIDDEN)]
    return nn.ModuleDict({"encoder": nn.ModuleList(layers), "head": nn.Linear(HIDDEN, WORDS)})


class Original(Implementation):
    def init_weights(self, seed):
        rng = np.random.default_rng(seed)
        weights = {name: rng.uniform(-0.6, 0.6, value.shape) for name, value in build().state_dict().items()}
        return {name: (value * ("weight" in name)).astype(np.float32) for name, value in weights.items()}

    def inputs(self, seed):
        lengths = np.array([9, 4, 6])
        mels = np.random.default_rng(seed).normal(-4.0, 2.0, (3, 9, MELS)).astype(np.float32)
        return {"mels": mels * (np.arange(9) < lengths[:, None])[..., None], "lengths": lengths}

    def load(self, weights, dtype):
        self.model = build().to(getattr(torch, dtype))
        self.model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})

    @torch.no_grad()
    def forward(self, inputs, tap):
        x = torch.from_numpy(inputs["mels"])
        for i, layer in enumerate(self.model["encoder"]):
            x = tap(f"encoder.{i}", layer(x)[0])
        x = tap("last", x[torch.arange(len(x)), torch.from_numpy(inputs["lengths"]) - 1])
        return {"logits": tap("head", self.model["head"](x)).numpy()}


class GRU(mnn.Module):
    def __init__(self, w_ih, w_hh, b_ih, b_hh):
        super().__init__()
        self.Wx, self.Wh, self.bhn = w_ih, w_hh, b_hh[-HIDDEN:]
        self.b = b_ih + mx.concatenate([b_hh[:-HIDDEN], 0 * b_hh[-HIDDEN:]])

    def __call__(self, x, hidden=None):
        states = []
        for gates in x @ self.Wx.T + self.b:
            r, z, n = mx.split(gates, 3, axis=-1)
            if hidden is None:
                hidden = (1 - mx.sigmoid(z)) * mx.tanh(n)
            else:
                h_r, h_z, h_n = mx.split(hidden @ self.Wh.T, 3, axis=-1)
                n, z = mx.tanh(n + mx.sigmoid(r + h_r) * (h_n + self.bhn)), mx.sigmoid(z + h_z)
                hidden = (1 - z) * n + z * hidden
            states.append(hidden)
        return mx.stack(states)


class Port(Implementation):
    dtypes = ("float32",)

    def load(self, weights, dtype):
        mx.set_default_device(mx.cpu)
        self.weights = {name: mx.array(value) for name, value in weights.items()}
        parts = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
        self.layers = [GRU(*(self.weights[f"encoder.{i}.{part}"] for part in parts)) for i in range(2)]

    def initial_state(self, x):
        return None

    def forward(self, inputs, tap):
        w, lengths = self.weights, mx.array(inputs["lengths"])
        x = mx.array(inputs["mels"].swapaxes(0, 1))
        for i, layer in enumerate(self.layers):
            x = tap(f"gru_layers.{i}", layer(x, self.initial_state(x)))
        x = tap("pooled", x[lengths - 1, mx.arange(len(lengths))])
        return {"logits": np.array(tap("logits", x @ w["head.weight"].T + w["head.bias"]))}


class Fixed(Port):
    def initial_state(self, x):
        return mx.zeros((x.shape[1], HIDDEN), x.dtype)
