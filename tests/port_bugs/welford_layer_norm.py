"""Control: an encoder of audio frames, ported from PyTorch to NumPy, with the variance of LayerNorm in one pass.

Source: ELS-RD/kernl#36: a kernel computes mean and variance in a single pass by Welford's recurrence, instead of the
mean first and then the variance.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from transformer_parity.pair import Implementation

SOURCE = "ELS-RD/kernl#36"
VERIFIED = True
KIND = "control"
NAME = ""
BLOCKS = ()
STAGE = "forward"
MELS, D = 13, 17


class Original(Implementation):
    def __init__(self):
        layers = [nn.LayerNorm(MELS), nn.Linear(MELS, D), nn.SiLU(), nn.LayerNorm(D), nn.Linear(D, 6)]
        self.model = nn.Sequential(*layers)

    def init_weights(self, seed):
        torch.manual_seed(seed)
        return {name: value.numpy() for name, value in Original().model.state_dict().items()}

    def inputs(self, seed):
        rng = np.random.default_rng(seed)
        decibels = rng.normal(-45, 2, (3, 1, MELS)) + rng.normal(0, 3, (3, 9, MELS))
        return {"log_mel": decibels, "lengths": np.array([9, 4, 7])}

    def load(self, weights, dtype):
        self.model.to(getattr(torch, dtype)).eval()
        self.model.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})

    @torch.no_grad()
    def forward(self, inputs, tap):
        frames = self.model(torch.tensor(inputs["log_mel"]))
        lengths = torch.tensor(inputs["lengths"])[:, None]
        real = (torch.arange(frames.shape[1]) < lengths)[..., None]
        return {"frames": frames.numpy(), "pooled": ((frames * real).sum(1) / lengths).numpy()}


class Port(Implementation):
    def load(self, weights, dtype):
        self.w = weights

    def layer_norm(self, x, layer):
        mean, squares = np.zeros_like(x[..., 0]), np.zeros_like(x[..., 0])
        for n in range(x.shape[-1]):
            before = x[..., n] - mean
            mean += before / (n + 1)
            squares += before * (x[..., n] - mean)
        scale = 1 / np.sqrt(squares / x.shape[-1] + 1e-5)
        return (x - mean[..., None]) * scale[..., None] * self.w[f"{layer}.weight"] + self.w[f"{layer}.bias"]

    def forward(self, inputs, tap):
        w, lengths = self.w, inputs["lengths"]
        x = self.layer_norm(inputs["log_mel"], 0) @ w["1.weight"].T + w["1.bias"]
        frames = self.layer_norm(x / (1 + np.exp(-x)), 3) @ w["4.weight"].T + w["4.bias"]
        pooled = [row[:length].mean(0) for row, length in zip(frames, lengths, strict=True)]
        return {"frames": frames, "pooled": np.stack(pooled)}
