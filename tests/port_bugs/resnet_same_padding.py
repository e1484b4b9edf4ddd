"""A residual network with a convolution of stride 2; the port padded only the bottom of the image for it.

Source: keras-team/keras#16363: weights of PyTorch gave other outputs at stride 2, until the images were padded on both
sides before a convolution without padding.
"""

from __future__ import annotations

import keras
import numpy as np
import torch
from torch import nn

from transformer_parity.pair import Implementation

SOURCE = "keras-team/keras#16363"
VERIFIED = True
KIND = "bug"
NAME = "padding"
BLOCKS = ("layer1.0.conv1",)
STAGE = "forward"

STEM, WIDTH, CLASSES = 5, 7, 6
TAPS = ("conv1", "bn1", "layer1.0.conv1", "layer1.0.bn1", "layer1.0.downsample", "layer1.0")
names = {name: (name, "b h w c -> b c h w") for name in TAPS}


def build():
    block = nn.ModuleDict({"conv1": nn.Conv2d(STEM, WIDTH, 3, stride=2, padding=1, bias=False)})
    block["bn1"], block["downsample"] = nn.BatchNorm2d(WIDTH), nn.Conv2d(STEM, WIDTH, 1, stride=2, bias=False)
    stem = {"conv1": nn.Conv2d(3, STEM, 3, padding=1, bias=False), "bn1": nn.BatchNorm2d(STEM)}
    return nn.ModuleDict({**stem, "layer1": nn.ModuleList([block]), "fc": nn.Linear(WIDTH, CLASSES)})


class Original(Implementation):
    def init_weights(self, seed):
        rng = np.random.default_rng(seed)
        weights = {name: value.numpy() for name, value in build().state_dict().items()}
        for name, value in weights.items():
            if value.ndim > 1:
                weights[name] = rng.normal(0, value[0].size ** -0.5, value.shape).astype(np.float32)
        return weights | {"fc.bias": np.zeros(CLASSES, np.float32)}

    def inputs(self, seed):
        image = np.random.default_rng(seed).random((2, 3, 10, 9))
        return {"image": ((image - 0.45) / 0.225).astype(np.float32)}

    def load(self, weights, dtype):
        self.model = build().to(getattr(torch, dtype)).eval()
        self.model.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in weights.items()})

    @torch.no_grad()
    def forward(self, inputs, tap):
        def layer(name, x):
            return tap(name, self.model.get_submodule(name)(x))

        x = layer("bn1", layer("conv1", torch.from_numpy(inputs["image"]))).relu()
        y = layer("layer1.0.bn1", layer("layer1.0.conv1", x))
        x = tap("layer1.0", (y + layer("layer1.0.downsample", x)).relu())
        return {"logits": tap("fc", self.model["fc"](x.mean((2, 3)))).numpy()}


class Port(Implementation):
    def load(self, weights, dtype):
        self.weights, self.dtype = weights, dtype

    def convolve(self, name, x, stride=1, pad=True):
        kernel = self.weights[f"{name}.weight"].transpose(2, 3, 1, 0)
        size, channels = kernel.shape[0], kernel.shape[-1]
        layer = keras.layers.Conv2D(channels, size, stride, padding="same", use_bias=False, dtype=self.dtype)
        layer.build(x.shape)
        layer.set_weights([kernel])
        return layer(x)

    def normalize(self, name, x):
        layer = keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5, dtype=self.dtype)
        layer.build(x.shape)
        parts = ("weight", "bias", "running_mean", "running_var")
        layer.set_weights([self.weights[f"{name}.{part}"] for part in parts])
        return layer(x, training=False)

    def forward(self, inputs, tap):
        x = tap("conv1", self.convolve("conv1", keras.ops.convert_to_tensor(inputs["image"].transpose(0, 2, 3, 1))))
        x = keras.ops.relu(tap("bn1", self.normalize("bn1", x)))
        y = tap("layer1.0.conv1", self.convolve("layer1.0.conv1", x, stride=2))
        y = tap("layer1.0.bn1", self.normalize("layer1.0.bn1", y))
        shortcut = tap("layer1.0.downsample", self.convolve("layer1.0.downsample", x, stride=2, pad=False))
        x = keras.ops.mean(tap("layer1.0", keras.ops.relu(y + shortcut)), axis=(1, 2))
        x = tap("fc", keras.ops.matmul(x, self.weights["fc.weight"].T) + self.weights["fc.bias"])
        return {"logits": keras.ops.convert_to_numpy(x)}


class Fixed(Port):
    def convolve(self, name, x, stride=1, pad=True):
        if stride == 1 or not pad:
            return super().convolve(name, x, stride)
        x = keras.layers.ZeroPadding2D(1, dtype=self.dtype)(x)
        return super().convolve(name, x, 1)[:, 1:-1:stride, 1:-1:stride]
