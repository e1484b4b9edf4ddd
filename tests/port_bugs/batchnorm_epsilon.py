"""A small MobileNet; the port kept PyTorch's epsilon of batch normalization instead of Keras's.

Source: gzuidhof/nn-transfer#3: a transfer of the weights now makes up for the two default values, 1e-3 and 1e-5.
"""

from __future__ import annotations

import keras
import numpy as np
import torch
from torch import nn

from transformer_parity.pair import Implementation

SOURCE = "gzuidhof/nn-transfer#3"
VERIFIED = True
KIND = "bug"
NAME = "epsilon"
BLOCKS = ("bn_1",)
STAGE = "forward"

names = {name: (port, "b c h w -> b h w c") for name, port in (("conv_{i}", "{i}.conv"), ("bn_{i}", "{i}.norm"))}
names |= {"pool": "pooled", "predictions": "classifier"}
SHAPES = {"conv_1": (3, 3, 3, 6), "conv_2": (3, 3, 6, 1), "conv_3": (1, 1, 6, 9)}
CHANNELS = {1: 6, 2: 6, 3: 9}
PARTS = ("gamma", "beta", "moving_mean", "moving_variance")


class Original(Implementation):
    def init_weights(self, seed):
        rng = np.random.default_rng(seed)
        weights = {f"{n}/kernel": rng.normal(0, np.prod(s[:3]) ** -0.5, s) for n, s in SHAPES.items()}
        for i, channels in CHANNELS.items():
            weights[f"bn_{i}/gamma"], weights[f"bn_{i}/beta"] = np.ones(channels), np.zeros(channels)
            weights[f"bn_{i}/moving_mean"] = rng.normal(0, 0.2, channels)
            weights[f"bn_{i}/moving_variance"] = rng.gamma(2.0, 0.3, channels)
        weights |= {"predictions/kernel": rng.normal(0, 0.3, (9, 5)), "predictions/bias": np.zeros(5)}
        return {name: value.astype(np.float32) for name, value in weights.items()}

    def inputs(self, seed):
        pixels = np.random.default_rng(seed).integers(0, 256, (2, 11, 9, 3))
        return {"image": (pixels / 127.5 - 1).astype(np.float32)}

    def load(self, weights, dtype):
        settings = {"padding": "same", "use_bias": False, "dtype": dtype}
        self.layers = {
            "conv_1": keras.layers.Conv2D(6, 3, **settings),
            "conv_2": keras.layers.DepthwiseConv2D(3, **settings),
            "conv_3": keras.layers.Conv2D(9, 1, **settings),
            **{f"bn_{i}": keras.layers.BatchNormalization(dtype=dtype) for i in CHANNELS},
            "predictions": keras.layers.Dense(5, dtype=dtype),
        }
        for name, layer in self.layers.items():
            values = [value for key, value in weights.items() if key.startswith(f"{name}/")]
            layer.build((None, values[0].shape[0]) if values[0].ndim == 2 else (None, 11, 9, values[0].shape[-2:][0]))
            layer.set_weights(values)

    def forward(self, inputs, tap):
        x = keras.ops.convert_to_tensor(inputs["image"])
        for i in CHANNELS:
            x = tap(f"conv_{i}", self.layers[f"conv_{i}"](x))
            x = keras.ops.relu6(tap(f"bn_{i}", self.layers[f"bn_{i}"](x, training=False)))
        x = tap("pool", keras.ops.mean(x, axis=(1, 2)))
        return {"logits": keras.ops.convert_to_numpy(tap("predictions", self.layers["predictions"](x)))}


class Port(Implementation):
    epsilon = 1e-5

    def load(self, weights, dtype):
        w = {name: torch.from_numpy(np.array(value)) for name, value in weights.items()}
        self.kernels = [w[f"{name}/kernel"].permute(3, 2, 0, 1) for name in SHAPES]
        self.kernels[1] = self.kernels[1].transpose(0, 1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels, eps=self.epsilon) for channels in CHANNELS.values()).eval()
        for i, norm in enumerate(self.norms, 1):
            state = zip(("weight", "bias", "running_mean", "running_var"), PARTS, strict=True)
            norm.to(getattr(torch, dtype)).load_state_dict({k: w[f"bn_{i}/{v}"] for k, v in state}, strict=False)
        self.kernel, self.bias = w["predictions/kernel"].T, w["predictions/bias"]

    @torch.no_grad()
    def forward(self, inputs, tap):
        x = torch.from_numpy(inputs["image"]).permute(0, 3, 1, 2)
        for i, (kernel, norm) in enumerate(zip(self.kernels, self.norms, strict=True), 1):
            groups = x.shape[1] // kernel.shape[1]
            x = tap(f"{i}.conv", nn.functional.conv2d(x, kernel, padding="same", groups=groups))
            x = nn.functional.relu6(tap(f"{i}.norm", norm(x)))
        x = tap("pooled", x.mean((2, 3)))
        return {"logits": tap("classifier", nn.functional.linear(x, self.kernel, self.bias)).numpy()}


class Fixed(Port):
    epsilon = 1e-3
