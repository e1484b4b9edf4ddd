"""Control: a language model with padding, ported from PyTorch to JAX, whose loss sees the vocabulary in chunks.

Source: meta-pytorch/torchtune#1390: the cross-entropy is computed in chunks, so that the logits never exist all at
once; here, the chunks are parts of the vocabulary, with a running maximum and sum.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from transformer_parity.pair import Implementation

SOURCE = "meta-pytorch/torchtune#1390"
VERIFIED = True
KIND = "control"
NAME = ""
BLOCKS = ()
STAGE = "gradients"
VOCAB, D, HIDDEN, CHUNK, PAD = 27, 8, 13, 9, 0


class Original(Implementation):
    def __init__(self):
        layers = {"embed": nn.Embedding(VOCAB, D), "rnn": nn.RNN(D, HIDDEN, batch_first=True)}
        self.model = nn.ModuleDict(layers | {"norm": nn.LayerNorm(HIDDEN), "lm_head": nn.Linear(HIDDEN, VOCAB)})

    def init_weights(self, seed):
        torch.manual_seed(seed)
        weights = {name: value.numpy() for name, value in Original().model.state_dict().items()}
        return weights | {"lm_head.weight": 3 * weights["lm_head.weight"]}

    def inputs(self, seed):
        ids = np.random.default_rng(seed).integers(1, VOCAB, (3, 8))
        return {"ids": np.where(np.arange(8) < np.array([[6], [8], [3]]), ids, PAD)}

    def load(self, weights, dtype):
        self.model.to(getattr(torch, dtype)).eval()
        self.model.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})

    def losses(self, inputs, tap=lambda name, value: value):
        ids, m = torch.tensor(inputs["ids"]), self.model
        states = tap("rnn", m["rnn"](tap("embed", m["embed"](ids[:, :-1])))[0])
        logits = tap("lm_head", m["lm_head"](tap("norm", m["norm"](states))))
        return nn.functional.cross_entropy(logits.mT, ids[:, 1:], ignore_index=PAD, reduction="none")

    def forward(self, inputs, tap):
        return {"losses": self.losses(inputs, tap).detach().numpy()}

    def gradients(self, inputs):
        self.model.zero_grad()
        loss = self.losses(inputs).sum() / float((inputs["ids"][:, 1:] != PAD).sum())
        loss.backward()
        return {name: p.grad.numpy() for name, p in self.model.named_parameters()} | {"loss": loss.detach().numpy()}


class Port(Implementation):
    def load(self, weights, dtype):
        self.w = {name: jnp.asarray(value) for name, value in weights.items()}

    def losses(self, w, ids):
        def step(state, x):
            x = x @ w["rnn.weight_ih_l0"].T + w["rnn.bias_ih_l0"] + w["rnn.bias_hh_l0"]
            state = jnp.tanh(x + state @ w["rnn.weight_hh_l0"].T)
            return state, state

        x = w["embed.weight"][ids[:, :-1]].swapaxes(0, 1)
        h = jax.lax.scan(step, jnp.zeros((len(ids), HIDDEN), x.dtype), x)[1].swapaxes(0, 1)
        h = (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-5)
        h = h * w["norm.weight"] + w["norm.bias"]
        target = jnp.einsum("bld,bld->bl", h, w["lm_head.weight"][ids[:, 1:]]) + w["lm_head.bias"][ids[:, 1:]]

        @jax.checkpoint
        def chunk(carry, part):
            largest, total = carry
            logits = h @ part[0].T + part[1]
            new = jnp.maximum(largest, jax.lax.stop_gradient(logits.max(-1)))
            return (new, total * jnp.exp(largest - new) + jnp.exp(logits - new[..., None]).sum(-1)), None

        parts = w["lm_head.weight"].reshape(-1, CHUNK, HIDDEN), w["lm_head.bias"].reshape(-1, CHUNK)
        (largest, total), _ = jax.lax.scan(chunk, (jnp.full_like(target, -1e30), jnp.zeros_like(target)), parts)
        return jnp.where(ids[:, 1:] == PAD, 0, largest + jnp.log(total) - target)

    def forward(self, inputs, tap):
        return {"losses": np.asarray(self.losses(self.w, jnp.asarray(inputs["ids"])))}

    def gradients(self, inputs):
        ids = jnp.asarray(inputs["ids"])
        mean = jax.value_and_grad(lambda w: self.losses(w, ids).sum() / (ids[:, 1:] != PAD).sum())
        loss, grads = mean(self.w)
        return {name: np.asarray(g) for name, g in grads.items()} | {"loss": np.asarray(loss)}
