"""A speaker segmentation model with a bidirectional LSTM; the port read ONNX gates in the order of PyTorch.

Source: CrispStrobe/CrispASR#106: the runtime now takes the gates of the ONNX initializers as input, output, forget, and
cell instead of input, forget, cell, and output.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from transformer_parity.pair import Implementation

SOURCE = "CrispStrobe/CrispASR#106"
VERIFIED = True
KIND = "bug"
NAME = "order"
BLOCKS = ("lstm.forward", "lstm.backward")
STAGE = "forward"

FEATURES, HIDDEN, SPEAKERS = 7, 5, 3


class Original(Implementation):
    def init_weights(self, seed):
        rng = np.random.default_rng(seed)
        shapes = {
            "onnx::LSTM_W": (2, 4 * HIDDEN, FEATURES),
            "onnx::LSTM_R": (2, 4 * HIDDEN, HIDDEN),
            "onnx::LSTM_B": (2, 8 * HIDDEN),
            "classifier.weight": (SPEAKERS, 2 * HIDDEN),
            "classifier.bias": (SPEAKERS,),
        }
        return {name: rng.uniform(-0.5, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}

    def inputs(self, seed):
        return {"features": np.random.default_rng(seed).normal(size=(2, 11, FEATURES)).astype(np.float32)}

    def load(self, weights, dtype):
        self.lstm = nn.LSTM(FEATURES, HIDDEN, batch_first=True, bidirectional=True)
        self.classifier = nn.Linear(2 * HIDDEN, SPEAKERS).to(getattr(torch, dtype))
        state = {}
        for direction, suffix in enumerate(("", "_reverse")):
            w, r = weights["onnx::LSTM_W"][direction], weights["onnx::LSTM_R"][direction]
            parts = (w, r, *np.split(weights["onnx::LSTM_B"][direction], 2))
            for name, value in zip(("weight_ih", "weight_hh", "bias_ih", "bias_hh"), parts, strict=True):
                i, o, f, g = np.split(value, 4)
                state[f"{name}_l0{suffix}"] = torch.from_numpy(np.concatenate([i, f, g, o]))
        self.lstm.to(getattr(torch, dtype)).load_state_dict(state)
        state = {name: torch.from_numpy(weights[f"classifier.{name}"]) for name in ("weight", "bias")}
        self.classifier.load_state_dict(state)

    @torch.no_grad()
    def forward(self, inputs, tap):
        forward, backward = self.lstm(torch.from_numpy(inputs["features"]))[0].split(HIDDEN, -1)
        x = torch.cat([tap("lstm.forward", forward), tap("lstm.backward", backward)], -1)
        x = tap("classifier", self.classifier(x))
        return {"activations": tap("activation", x.log_softmax(-1)).numpy()}


class Port(Implementation):
    def load(self, weights, dtype):
        self.weights = {name: jnp.asarray(value) for name, value in weights.items()}

    def gates(self, x):
        return jnp.split(x, 4, -1)

    def lstm(self, x, direction):
        w, r, b = (self.weights[f"onnx::LSTM_{name}"][direction] for name in "WRB")
        bias = b.reshape(2, -1).sum(0)

        def step(state, x_t):
            h, c = state
            i, f, g, o = self.gates(x_t @ w.T + h @ r.T + bias)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros((x.shape[0], HIDDEN), x.dtype)
        return jax.lax.scan(step, (zeros, zeros), x.swapaxes(0, 1), reverse=direction == 1)[1].swapaxes(0, 1)

    def forward(self, inputs, tap):
        x, w = jnp.asarray(inputs["features"]), self.weights
        x = jnp.concatenate([tap("lstm.forward", self.lstm(x, 0)), tap("lstm.backward", self.lstm(x, 1))], -1)
        x = tap("classifier", x @ w["classifier.weight"].T + w["classifier.bias"])
        return {"activations": np.asarray(tap("activation", jax.nn.log_softmax(x)))}


class Fixed(Port):
    def gates(self, x):
        i, o, f, g = jnp.split(x, 4, -1)
        return i, f, g, o
