"""A control: a Keras convolutional network; the port multiplies matrices of patches, with folded normalization.

Source: none; the port is correct.
"""

from __future__ import annotations

import keras
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

HEIGHT, WIDTH, CLASSES = 9, 11, 4
SIZES = ((3, 6), (6, 5))
PARTS = ("gamma", "beta", "moving_mean", "moving_variance")
names = {"bn_{i}": ("block_{i}", "b c h w -> b h w c"), "pool": "pool"}


class Original(Implementation):
    def init_weights(self, seed):
        rng, weights = np.random.default_rng(seed), {}
        for i, (inputs, outputs) in enumerate(SIZES):
            weights[f"conv_{i}/kernel"] = rng.normal(0, (9 * inputs) ** -0.5, (3, 3, inputs, outputs))
            weights[f"conv_{i}/bias"] = np.zeros(outputs)
            values = np.ones(outputs), np.zeros(outputs), rng.normal(size=outputs), rng.gamma(3.0, 0.3, outputs)
            weights |= {f"bn_{i}/{part}": value for part, value in zip(PARTS, values, strict=True)}
        weights |= {"dense/kernel": rng.normal(0, 0.4, (SIZES[-1][1], CLASSES)), "dense/bias": np.zeros(CLASSES)}
        return {name: value.astype(np.float32) for name, value in weights.items()}

    def inputs(self, seed):
        pixels = np.random.default_rng(seed).integers(0, 256, (2, HEIGHT, WIDTH, 3))
        return {"image": (pixels / 255).astype(np.float32)}

    def load(self, weights, dtype):
        self.layers = {"dense": keras.layers.Dense(CLASSES, activation="softmax", dtype=dtype)}
        self.layers["dense"].build((None, SIZES[-1][1]))
        for i, (inputs, outputs) in enumerate(SIZES):
            self.layers[f"conv_{i}"] = keras.layers.Conv2D(outputs, 3, padding="same", dtype=dtype)
            self.layers[f"conv_{i}"].build((None, HEIGHT, WIDTH, inputs))
            self.layers[f"bn_{i}"] = keras.layers.BatchNormalization(dtype=dtype)
            self.layers[f"bn_{i}"].build((None, HEIGHT, WIDTH, outputs))
        for name, layer in self.layers.items():
            layer.set_weights([value for key, value in weights.items() if key.startswith(f"{name}/")])

    def forward(self, inputs, tap):
        x = keras.ops.convert_to_tensor(inputs["image"])
        for i in range(len(SIZES)):
            x = tap(f"conv_{i}", self.layers[f"conv_{i}"](x))
            x = keras.ops.relu(tap(f"bn_{i}", self.layers[f"bn_{i}"](x, training=False)))
        x = tap("pool", keras.ops.max(x, axis=(1, 2)))
        return {"probabilities": keras.ops.convert_to_numpy(tap("dense", self.layers["dense"](x)))}


class Port(Implementation):
    def load(self, weights, dtype):
        w = {name: torch.from_numpy(np.array(value)) for name, value in weights.items()}
        self.folded, self.kernel, self.bias = [], w["dense/kernel"], w["dense/bias"]
        for i in range(len(SIZES)):
            gamma, beta, mean, variance = (w[f"bn_{i}/{part}"] for part in PARTS)
            scale = gamma / (variance + 1e-3).sqrt()
            matrix = (w[f"conv_{i}/kernel"] * scale).permute(3, 2, 0, 1).flatten(1)
            self.folded.append((matrix, beta + (w[f"conv_{i}/bias"] - mean) * scale))

    @torch.no_grad()
    def forward(self, inputs, tap):
        x = torch.from_numpy(inputs["image"]).permute(0, 3, 1, 2)
        for i, (matrix, bias) in enumerate(self.folded):
            patches = nn.functional.unfold(x, 3, padding=1)
            x = (matrix @ patches + bias[:, None]).unflatten(-1, (HEIGHT, WIDTH))
            x = tap(f"block_{i}", x).relu()
        x = tap("pool", x.amax((2, 3)))
        return {"probabilities": (x @ self.kernel + self.bias).softmax(-1).numpy()}
