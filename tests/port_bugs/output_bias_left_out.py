"""A language-model head with extra tokens, ported from PyTorch to Keras: the bias of the output layer was left out.

Source: huggingface/transformers#26870: in the TensorFlow port of IDEFICS, the decoupled output layer only multiplied by
its weight, whereas the original layer also adds its bias; the port was corrected during review.
"""

from __future__ import annotations

import keras
import numpy as np
import torch
from torch import nn

from transformer_parity.pair import Implementation

SOURCE = "huggingface/transformers#26870"
VERIFIED = True
KIND = "bug"
NAME = "unused weights"
BLOCKS = ("lm_head.regular", "lm_head")
STAGE = "forward"
VOCAB, EXTRA, D, HIDDEN, IMAGE = 21, 2, 8, 13, 21


class Decoupled(nn.Linear):
    def __init__(self):
        super().__init__(D, VOCAB)
        self.additional_fc = nn.Linear(D, EXTRA, bias=False)


class Original(Implementation):
    def __init__(self):
        m = self.model = nn.Module()
        m.embed_tokens, m.norm, m.lm_head = nn.Embedding(VOCAB + EXTRA, D), nn.LayerNorm(D), Decoupled()
        m.fc1, m.fc2 = nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D)

    def init_weights(self, seed):
        rng = np.random.default_rng(seed)
        weights = {name: rng.normal(0, 0.4, value.shape) for name, value in self.model.state_dict().items()}
        zeros = {name: np.zeros(len(weights[name])) for name in weights if name.endswith("bias")}
        return weights | zeros | {"norm.weight": np.ones(D)}

    def inputs(self, seed):
        ids = np.random.default_rng(seed).integers(0, VOCAB, (2, 6))
        ids[:, 1:3] = IMAGE, IMAGE + 1
        return {"ids": ids}

    def load(self, weights, dtype):
        self.model.to(getattr(torch, dtype)).eval()
        self.model.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})

    @torch.no_grad()
    def forward(self, inputs, tap):
        m = self.model
        x = tap("embed_tokens", m.embed_tokens(torch.tensor(inputs["ids"])))
        x = x + tap("fc2", m.fc2(tap("fc1", m.fc1(x)).relu()))
        x = tap("norm", m.norm(x))
        regular, extra = tap("lm_head.regular", m.lm_head(x)), tap("lm_head.extra", m.lm_head.additional_fc(x))
        return {"logits": tap("lm_head", torch.cat([regular, extra], -1)).numpy()}


class DecoupledDense(keras.layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=(D, VOCAB), name="kernel")
        self.bias = self.add_weight(shape=(VOCAB,), name="bias")
        self.additional_fc = keras.layers.Dense(EXTRA, use_bias=False, dtype=self.dtype)
        self.additional_fc.build(shape)

    def call(self, x):
        return keras.ops.concatenate([keras.ops.matmul(x, self.kernel), self.additional_fc(x)], -1)


class BiasedDecoupledDense(DecoupledDense):
    def call(self, x):
        return super().call(x) + keras.ops.pad(self.bias, [[0, EXTRA]])


class Port(Implementation):
    head = DecoupledDense

    def load(self, weights, dtype):
        w = {name: value.T if value.ndim == 2 and "embed" not in name else value for name, value in weights.items()}
        self.embed = keras.layers.Embedding(VOCAB + EXTRA, D, dtype=dtype)
        self.fc1 = keras.layers.Dense(HIDDEN, activation="relu", dtype=dtype)
        self.fc2, self.lm_head = keras.layers.Dense(D, dtype=dtype), self.head(dtype=dtype)
        self.norm = keras.layers.LayerNormalization(epsilon=1e-5, dtype=dtype)
        names = {"embed": ["embed_tokens.weight"]} | {n: [f"{n}.weight", f"{n}.bias"] for n in ("fc1", "fc2", "norm")}
        names["lm_head"] = ["lm_head.weight", "lm_head.bias", "lm_head.additional_fc.weight"]
        for layer, keys in names.items():
            getattr(self, layer).build((None, None, HIDDEN if layer == "fc2" else D))
            getattr(self, layer).set_weights([w[key] for key in keys])

    def forward(self, inputs, tap):
        x = self.embed(inputs["ids"])
        x = tap("norm", self.norm(x + self.fc2(self.fc1(x))))
        return {"logits": keras.ops.convert_to_numpy(tap("lm_head", self.lm_head(x)))}


class Fixed(Port):
    head = BiasedDecoupledDense
