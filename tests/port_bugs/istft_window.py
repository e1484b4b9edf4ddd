"""A vocoder that ends in an inverse short-time Fourier transform; the port divided by the windows, not their squares.

Source: Blaizzy/mlx-audio#859: the overlapping frames, which are windowed twice, are divided by the sum of the squared
windows, as in PyTorch. Before, the audio was 2.5 dB too quiet.
"""

from __future__ import annotations

import flax.linen as fnn
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from transformer_parity.pair import Implementation

SOURCE = "Blaizzy/mlx-audio#859"
VERIFIED = True
KIND = "bug"
NAME = "factor"
BLOCKS = ("waveform",)
STAGE = "forward"

MELS, WIDTH, WINDOW, HOP = 7, 6, 12, 3
BINS = WINDOW // 2 + 1
SHAPES = {"conv_pre": (WIDTH, MELS, 5), "conv_post": (2 * BINS, WIDTH, 3)}


class Original(Implementation):
    def init_weights(self, seed):
        rng = np.random.default_rng(seed)
        weights = {f"{name}.weight": rng.normal(0, 0.2, shape) for name, shape in SHAPES.items()}
        weights |= {f"{name}.bias": np.zeros(shape[0]) for name, shape in SHAPES.items()}
        return {name: value.astype(np.float32) for name, value in weights.items()}

    def inputs(self, seed):
        return {"mels": np.random.default_rng(seed).normal(-1.0, 1.5, (2, MELS, 11)).astype(np.float32)}

    def load(self, weights, dtype):
        self.layers = nn.ModuleDict({n: nn.Conv1d(s[1], s[0], s[2], padding="same") for n, s in SHAPES.items()})
        self.layers.to(getattr(torch, dtype))
        self.layers.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})

    @torch.no_grad()
    def forward(self, inputs, tap):
        x = tap("conv_pre", self.layers["conv_pre"](torch.from_numpy(inputs["mels"])))
        x = tap("conv_post", self.layers["conv_post"](nn.functional.leaky_relu(x, 0.1)))
        magnitude, phase = tap("magnitude", x[:, :BINS].exp()), tap("phase", x[:, BINS:].sin())
        window = torch.hann_window(WINDOW, dtype=x.dtype)
        audio = torch.istft(torch.polar(magnitude, phase), WINDOW, HOP, window=window)
        return {"waveform": tap("waveform", audio).numpy()}


class Head(fnn.Module):
    @fnn.compact
    def __call__(self, mels, tap):
        def convolve(name, x, channels, size):
            x = fnn.Conv(channels, (size,), name=name)(x.swapaxes(1, 2))
            return tap(name, x.swapaxes(1, 2))

        x = fnn.leaky_relu(convolve("conv_pre", mels, WIDTH, 5), 0.1)
        x = convolve("conv_post", x, 2 * BINS, 3)
        return tap("magnitude", jnp.exp(x[:, :BINS])), tap("phase", jnp.sin(x[:, BINS:]))


def overlap_add(frames):
    batch, count, _ = frames.shape
    signal = jnp.zeros((batch, (count - 1) * HOP + WINDOW), frames.dtype)
    positions = np.arange(count)[:, None] * HOP + np.arange(WINDOW)
    return signal.at[:, positions].add(frames)[:, WINDOW // 2 : -(WINDOW // 2)]


class Port(Implementation):
    def load(self, weights, dtype):
        w = {name: jnp.asarray(value.T) for name, value in weights.items()}
        self.params = {name: {"kernel": w[f"{name}.weight"], "bias": w[f"{name}.bias"]} for name in SHAPES}

    def envelope(self, window):
        return window

    def forward(self, inputs, tap):
        magnitude, phase = Head().apply({"params": self.params}, jnp.asarray(inputs["mels"]), tap)
        window = jnp.asarray(0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW), magnitude.dtype)
        spectrum = (magnitude * jnp.exp(1j * phase)).swapaxes(1, 2)
        frames = jnp.fft.irfft(spectrum, WINDOW) * window
        weight = overlap_add(jnp.broadcast_to(self.envelope(window), frames.shape))
        return {"waveform": np.asarray(tap("waveform", overlap_add(frames) / weight))}


class Fixed(Port):
    def envelope(self, window):
        return window**2
