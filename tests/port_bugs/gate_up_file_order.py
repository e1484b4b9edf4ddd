"""Two gated feed-forward blocks, ported from PyTorch to Keras: gate and up were read from the file in the wrong order.

Source: nntrainer/nntrainer#4194: the weight file is read in the order in which layers are created, and it holds up
before gate; the fix creates the up projection first.
"""

from __future__ import annotations

import keras
import numpy as np
import torch
from torch import nn

from transformer_parity.pair import Implementation

SOURCE = "nntrainer/nntrainer#4194"
VERIFIED = True
KIND = "bug"
NAME = "swapped weights"
BLOCKS = ("layers.0.gate", "layers.0.up")
STAGE = "forward"
LAYERS, VOCAB, D, HIDDEN = 2, 19, 9, 14
names = {
    "layers.{i}.norm": "block{i}/norm",
    "layers.{i}.gate": "block{i}/gate",
    "layers.{i}.up": "block{i}/up",
    "layers.{i}.act": "block{i}/swiglu",
    "layers.{i}.down": "block{i}/down",
}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(D, eps=1e-5)
        self.gate_proj, self.up_proj = nn.Linear(D, HIDDEN, bias=False), nn.Linear(D, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, D, bias=False)

    def forward(self, x, name, tap):
        h = tap(f"{name}.norm", self.norm(x))
        gate, up = tap(f"{name}.gate", self.gate_proj(h)), tap(f"{name}.up", self.up_proj(h))
        return x + tap(f"{name}.down", self.down_proj(tap(f"{name}.act", nn.functional.silu(gate) * up)))


class Original(Implementation):
    def __init__(self):
        self.model = nn.ModuleDict({"embed": nn.Embedding(VOCAB, D), "layers": nn.ModuleList([Layer(), Layer()])})

    def init_weights(self, seed):
        rng = np.random.default_rng(seed)
        shapes = {name: value.shape for name, value in self.model.state_dict().items()}
        return {name: np.ones(s) if len(s) == 1 else rng.normal(0, s[1] ** -0.5, s) for name, s in shapes.items()}

    def inputs(self, seed):
        return {"ids": np.random.default_rng(seed).integers(0, VOCAB, (3, 5))}

    def load(self, weights, dtype):
        self.model.to(getattr(torch, dtype)).eval()
        self.model.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})

    def forward(self, inputs, tap):
        with torch.no_grad():
            x = self.model["embed"](torch.tensor(inputs["ids"]))
            for i, layer in enumerate(self.model["layers"]):
                x = layer(x, f"layers.{i}", tap)
        return {"hidden": x.numpy()}


class Port(Implementation):
    order = ("norm", "gate", "up", "down")

    def load(self, weights, dtype):
        file = [weights["embed.weight"]]
        for i in range(LAYERS):
            file.append(weights[f"layers.{i}.norm.weight"])
            file += [weights[f"layers.{i}.{kind}_proj.weight"].T for kind in ("up", "gate", "down")]
        self.embed = keras.layers.Embedding(VOCAB, D, weights=[file.pop(0)], dtype=dtype)
        self.blocks = [{name: self.layer(name, file.pop(0), dtype) for name in self.order} for _ in range(LAYERS)]

    def layer(self, name, value, dtype):
        dense = keras.layers.Dense(value.shape[-1], use_bias=False, dtype=dtype)
        layer = keras.layers.RMSNormalization(epsilon=1e-5, dtype=dtype) if name == "norm" else dense
        layer.build((None, None, len(value)))
        layer.set_weights([value])
        return layer

    def forward(self, inputs, tap):
        x = self.embed(inputs["ids"])
        for i, block in enumerate(self.blocks):
            h = tap(f"block{i}/norm", block["norm"](x))
            gate, up = tap(f"block{i}/gate", block["gate"](h)), tap(f"block{i}/up", block["up"](h))
            x = x + tap(f"block{i}/down", block["down"](tap(f"block{i}/swiglu", keras.ops.silu(gate) * up)))
        return {"hidden": keras.ops.convert_to_numpy(x)}


class Fixed(Port):
    order = ("norm", "up", "gate", "down")
