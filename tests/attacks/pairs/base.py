"""A correct original and a correct port of a small model, from which the attacks through pairs are derived."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np

from transformer_parity.pair import Implementation

BASE = f"{__file__}:"
V, D, H = 7, 4, 5  # sizes of the vocabulary, the embeddings, and the hidden layer
SIZES = {"table": (V, D), "hidden.kernel": (D, H), "output.kernel": (H, V)}


class Attacker(Implementation):
    """Attributes of a class that attacks. A class has an expected verdict only if it is an attack.

    Attributes:
        other: The implementation with which it is compared, as ``FILE:CLASS``, or as a class of the same module.
        options: Further options of ``parity pair``.
        says: Text that the output must contain.
    """

    other = ""
    options = ""
    says = ""


class Original(Attacker):
    """An embedding, a hidden layer, the mean of all earlier positions, and logits."""

    other = f"{BASE}Port"

    def init_weights(self, seed):
        """Return random matrices, a bias of zeros, and a scale of ones."""
        rng = np.random.default_rng(seed)
        weights = {name: rng.normal(0.0, 0.8, shape) for name, shape in SIZES.items()}
        return weights | {"hidden.bias": np.zeros(H), "scale": np.ones(H)}

    def inputs(self, seed):
        """Return three sequences of different lengths."""
        ids = np.random.default_rng(seed).integers(0, V, (3, 6))
        return {"ids": ids, "mask": np.arange(6) < np.array([[6], [4], [2]])}

    def load(self, weights, dtype):
        """Store the weights."""
        self.w, self.dtype = weights, dtype

    def means(self, ids, mask, tap=lambda name, value: value):
        """Return the mean of the hidden values up to each position."""
        h = np.tanh(self.w["table"][ids] @ self.w["hidden.kernel"] + self.w["hidden.bias"]) * self.w["scale"]
        h = tap("hidden", h) * mask[..., None].astype(self.dtype)
        return tap("mean", h.cumsum(1) / mask.cumsum(1)[..., None].astype(self.dtype))

    def forward(self, inputs, tap):
        """Return the logits of every position, and the best token of the last one."""
        logits = self.means(inputs["ids"], inputs["mask"], tap) @ self.w["output.kernel"]
        return {"logits": logits, "best": logits[:, -1].argmax(-1)}

    def gradients(self, inputs):
        """Return the gradients of the mean square of the logits."""
        w, ids, mask = self.w, inputs["ids"], inputs["mask"][..., None].astype(self.dtype)
        x = w["table"][ids]
        t = np.tanh(x @ w["hidden.kernel"] + w["hidden.bias"])
        counts = mask.cumsum(1)
        mean = (t * w["scale"] * mask).cumsum(1) / counts
        logits = mean @ w["output.kernel"]
        g = logits * logits.dtype.type(2.0 / logits.size)
        found = {"loss": np.mean(logits**2), "output.kernel": np.einsum("blh,blv->hv", mean, g)}
        g = np.flip(np.flip(g @ w["output.kernel"].T / counts, 1).cumsum(1), 1) * mask
        found["scale"] = (g * t).sum((0, 1))
        g = g * w["scale"] * (1 - t**2)
        found |= {"hidden.bias": g.sum((0, 1)), "hidden.kernel": np.einsum("bld,blh->dh", x, g)}
        found["table"] = np.zeros_like(w["table"])
        np.add.at(found["table"], ids, g @ w["hidden.kernel"].T)
        return found

    def next_logits(self, inputs, prefix):
        """Return the logits that follow the inputs and a prefix."""
        ids, mask = inputs["ids"], inputs["mask"]
        ids = np.concatenate([ids, prefix], 1)
        mask = np.concatenate([mask, np.ones(prefix.shape, bool)], 1)
        return self.means(ids, mask)[:, -1] @ self.w["output.kernel"]

    def next_logits_cached(self, inputs, prefix, cache):
        """Return the same logits; the cache contains the sum and the number of the hidden values."""
        if cache is None:
            ids, mask, cache = inputs["ids"], inputs["mask"], (np.zeros(H, self.dtype), np.zeros(1, self.dtype))
        else:
            ids, mask = prefix[:, -1:], np.ones((len(prefix), 1), bool)
        w, mask = self.w, mask[..., None].astype(self.dtype)
        h = np.tanh(w["table"][ids] @ w["hidden.kernel"] + w["hidden.bias"]) * w["scale"] * mask
        total, count = cache[0] + h.sum(1), cache[1] + mask.sum(1)
        return total / count @ w["output.kernel"], (total, count)


class Port(Attacker):
    """The same model, which sums in a different order."""

    other = f"{BASE}Original"

    def load(self, weights, dtype):
        """Store the weights."""
        self.w, self.dtype = weights, dtype

    def hidden(self, ids):
        """Return the hidden values."""
        inner = np.einsum("...d,dh->...h", self.w["table"], self.w["hidden.kernel"])[ids]
        return self.w["scale"] * np.tanh(inner + self.w["hidden.bias"])

    def logits(self, inputs, tap=lambda name, value: value):
        """Return the logits of every position."""
        mask = inputs["mask"].astype(self.dtype)
        h = tap("hidden", self.hidden(inputs["ids"]))
        earlier = np.tril(np.ones((mask.shape[1],) * 2, self.dtype)) * mask[:, None]
        mean = tap("mean", (earlier / earlier.sum(-1, keepdims=True)) @ h)
        return np.einsum("blh,hv->blv", mean, self.w["output.kernel"])

    def forward(self, inputs, tap):
        """Return the logits of every position, and the best token of the last one."""
        logits = self.logits(inputs, tap)
        return {"logits": logits, "best": logits[:, -1].argmax(-1)}


class FullPort(Port):
    """A port that also supports gradients and decoding, with the original's code for the gradients."""

    gradients = Original.gradients

    def next_logits(self, inputs, prefix):
        """Return the logits that follow the inputs and a prefix."""
        mask = np.concatenate([inputs["mask"], np.ones(prefix.shape, bool)], 1)
        return self.logits({"ids": np.concatenate([inputs["ids"], prefix], 1), "mask": mask})[:, -1]

    def next_logits_cached(self, inputs, prefix, cache):
        """Return the same logits; the cache contains the hidden values of all positions."""
        if cache is None:
            cache = [h[keep] for h, keep in zip(self.hidden(inputs["ids"]), inputs["mask"], strict=True)]
        else:
            cache = [np.concatenate([h, self.hidden(ids)]) for h, ids in zip(cache, prefix[:, -1:], strict=True)]
        return np.stack([h.mean(0) for h in cache]) @ self.w["output.kernel"], cache
