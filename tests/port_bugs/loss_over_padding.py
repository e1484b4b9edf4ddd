"""A token tagger, ported from PyTorch to Flax NNX: the mean of the loss also counted the padded tokens.

Source: tracel-ai/burn#5568: padded targets were left out of the sum of the cross-entropy, but not out of its
denominator, with and without label smoothing; the fix divides by the number of targets that aren't padding.
"""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch import nn

from transformer_parity.pair import Implementation

SOURCE = "tracel-ai/burn#5568"
VERIFIED = True
KIND = "bug"
NAME = "factor"
BLOCKS = ()
STAGE = "gradients"
VOCAB, TAGS, D, HIDDEN, PAD = 23, 6, 10, 15, 0


class Original(Implementation):
    def __init__(self):
        layers = {"embed": nn.Embedding(VOCAB, D, PAD), "norm": nn.LayerNorm(D), "fc": nn.Linear(D, HIDDEN)}
        self.model = nn.ModuleDict(layers | {"gelu": nn.GELU(), "out": nn.Linear(HIDDEN, TAGS)})

    def init_weights(self, seed):
        rng = np.random.default_rng(seed)
        weights = {name: rng.normal(0, 0.3, value.shape) for name, value in self.model.state_dict().items()}
        return weights | {name: np.zeros(len(weights[name])) for name in weights if name.endswith("bias")}

    def inputs(self, seed):
        rng = np.random.default_rng(seed)
        ids, tags = rng.integers(1, VOCAB, (3, 8)), rng.integers(1, TAGS, (3, 8))
        real = np.arange(8) < np.array([[8], [5], [2]])
        return {"ids": ids * real, "tags": tags * real}

    def load(self, weights, dtype):
        self.model.to(getattr(torch, dtype)).eval()
        self.model.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})

    def apply(self, inputs, tap=lambda name, value: value):
        x = torch.tensor(inputs["ids"])
        for name, layer in self.model.items():
            x = tap(name, layer(x))
        return x

    def forward(self, inputs, tap):
        return {"logits": self.apply(inputs, tap).detach().numpy()}

    def gradients(self, inputs):
        self.model.zero_grad()
        tags = torch.tensor(inputs["tags"])
        loss = nn.CrossEntropyLoss(ignore_index=PAD, label_smoothing=0.1)(self.apply(inputs).mT, tags)
        loss.backward()
        return {name: p.grad.numpy() for name, p in self.model.named_parameters()} | {"loss": loss.detach().numpy()}


class Port(Implementation):
    def place(self, name):
        kinds = {"embed.weight": "embedding", "norm.weight": "scale"}
        return self.layers.index(name.split(".")[0]), kinds.get(name, "bias" if name.endswith("bias") else "kernel")

    def load(self, weights, dtype):
        self.layers, self.names = ["embed", "norm", "fc", "gelu", "out"], list(weights)
        options = {"param_dtype": getattr(jnp, dtype), "rngs": nnx.Rngs(0)}
        embed, norm = nnx.Embed(VOCAB, D, **options), nnx.LayerNorm(D, epsilon=1e-5, **options)
        fc, out = nnx.Linear(D, HIDDEN, **options), nnx.Linear(HIDDEN, TAGS, **options)
        self.model = nnx.Sequential(embed, norm, fc, partial(nnx.gelu, approximate=False), out)
        for name, value in weights.items():
            layer, kind = self.place(name)
            getattr(self.model.layers[layer], kind)[...] = jnp.asarray(value.T if kind == "kernel" else value)

    def forward(self, inputs, tap):
        return {"logits": np.asarray(self.model(jnp.asarray(inputs["ids"])))}

    def count(self, real):
        return real.size

    def loss(self, model, ids, tags):
        log_probs = nnx.log_softmax(model(ids))
        targets = 0.9 * nnx.one_hot(tags, TAGS, dtype=log_probs.dtype) + 0.1 / TAGS
        real = tags != PAD
        return (-(targets * log_probs).sum(-1) * real).sum() / self.count(real)

    def gradients(self, inputs):
        ids, tags = jnp.asarray(inputs["ids"]), jnp.asarray(inputs["tags"])
        loss, grads = nnx.value_and_grad(self.loss)(self.model, ids, tags)
        result = {"loss": np.asarray(loss)}
        for name in self.names:
            layer, kind = self.place(name)
            value = np.asarray(grads["layers"][layer][kind][...])
            result[name] = value.T if kind == "kernel" else value
        return result


class Fixed(Port):
    def count(self, real):
        return real.sum()
