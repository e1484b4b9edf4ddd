"""A small model in two formulations, and ports of it with one difference each, for tests of ``parity pair``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from transformer_parity.pair import Implementation

WIDTH, HIDDEN, CLASSES = 7, 11, 5


class Original(Implementation):
    """A layer norm and a gated network, computed row by row."""

    def init_weights(self, seed: int) -> Any:
        rng = np.random.default_rng(seed)
        sizes = {"gate": (HIDDEN, WIDTH), "up": (HIDDEN, WIDTH), "head": (CLASSES, HIDDEN)}
        found = {f"{name}.weight": rng.normal(0.0, 0.5, size) for name, size in sizes.items()}
        return {"norm.weight": np.ones(WIDTH), "norm.bias": np.zeros(WIDTH), **found, "head.bias": np.zeros(CLASSES)}

    def inputs(self, seed: int) -> Any:
        return {"x": np.random.default_rng(100 + seed).normal(size=(3, 4, WIDTH))}

    def load(self, weights: Any, dtype: str) -> None:
        self.weights, self.dtype = weights, dtype

    def forward(self, inputs: Any, tap: Any) -> Any:
        w = self.weights
        rows = []
        for row in inputs["x"].reshape(-1, WIDTH):
            centered = row - row.mean()
            scale = np.sqrt((centered**2).mean() + self.dtype_of(1e-5))
            rows.append(centered / scale * w["norm.weight"] + w["norm.bias"])
        x = tap("norm", np.stack(rows).reshape(inputs["x"].shape))
        gate = tap("gate", np.einsum("hw,blw->blh", w["gate.weight"], x))
        up = tap("up", np.einsum("hw,blw->blh", w["up.weight"], x))
        hidden = tap("hidden", gate / (1.0 + np.exp(-gate)) * up)
        return {"logits": np.einsum("ch,blh->blc", w["head.weight"], hidden) + w["head.bias"]}

    def gradients(self, inputs: Any) -> Any:
        """Return the gradients of half the sum of all logits squared with respect to the head."""
        seen: dict[str, Any] = {}
        logits = self.forward(inputs, lambda name, value: seen.setdefault(name, value))["logits"]
        hidden = list(seen.values())[3].reshape(*logits.shape[:2], HIDDEN)
        weight = np.einsum("blc,blh->ch", logits, hidden)
        return {"loss": 0.5 * (logits**2).sum(), "head.weight": weight, "head.bias": logits.sum((0, 1))}

    def dtype_of(self, value: float) -> Any:
        return np.dtype("float32" if self.dtype == "bfloat16" else self.dtype).type(value)


class Port(Implementation):
    """The same model with other algorithms. Subclasses change one thing."""

    epsilon = 1e-5

    def load(self, weights: Any, dtype: str) -> None:
        self.weights = {name: np.ascontiguousarray(value.T) for name, value in weights.items()}
        self.dtype = dtype

    def forward(self, inputs: Any, tap: Any) -> Any:
        w, x = self.weights, inputs["x"]
        mean = x.mean(-1, keepdims=True)
        variance = ((x - mean) ** 2).mean(-1, keepdims=True)
        epsilon = variance.dtype.type(self.epsilon)
        x = tap("norm", (x - mean) * (1.0 / np.sqrt(variance + epsilon)) * w["norm.weight"] + w["norm.bias"])
        gate, up = tap("gate", x @ w["gate.weight"]), tap("up", x @ w["up.weight"])
        hidden = tap("hidden", self.activation(gate) * up)
        return {"logits": self.head(hidden)}

    def activation(self, gate: Any) -> Any:
        return gate * (0.5 + 0.5 * np.tanh(0.5 * gate))

    def head(self, hidden: Any) -> Any:
        return hidden @ self.weights["head.weight"] + self.weights["head.bias"]

    gradients = Original.gradients


class Epsilon(Port):
    epsilon = 1e-6


class Activation(Port):
    def activation(self, gate: Any) -> Any:
        return 0.5 * gate * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (gate + 0.044715 * gate**3)))


class SwappedWeights(Port):
    def load(self, weights: Any, dtype: str) -> None:
        super().load({**weights, "gate.weight": weights["up.weight"], "up.weight": weights["gate.weight"]}, dtype)


class RaisesInLoad(Port):
    def load(self, weights: Any, dtype: str) -> None:
        super().load({"head": weights["missing"]}, dtype)


class HeadTwiceAsLarge(Port):
    def head(self, hidden: Any) -> Any:
        return 2.0 * super().head(hidden)


class UnknownCause(Port):
    def activation(self, gate: Any) -> Any:
        return np.sin(gate) + gate**2 / (1.0 + gate**2)


class RoundedConstant(Port):
    """Multiplies by a constant that is rounded to float32, even in float64."""

    def load(self, weights: Any, dtype: str) -> None:
        third = float(np.float32(1.0 / 3.0))
        super().load(
            {**weights, "norm.weight": weights["norm.weight"] * type(weights["norm.weight"][0])(3.0 * third)}, dtype
        )


class OnePassVariance(Port):
    """Computes the variance as the difference of two means, which have larger rounding errors."""

    def forward(self, inputs: Any, tap: Any) -> Any:
        shift = inputs["x"].dtype.type(2.0)  # the error grows with the mean
        x = inputs["x"] + shift
        mean = x.mean(-1, keepdims=True)
        variance = (x**2).mean(-1, keepdims=True) - mean**2
        normal = (x - mean) / np.sqrt(variance + variance.dtype.type(1e-5))
        x = tap("norm", normal * self.weights["norm.weight"] + self.weights["norm.bias"])
        gate, up = tap("gate", x @ self.weights["gate.weight"]), tap("up", x @ self.weights["up.weight"])
        return {"logits": self.head(tap("hidden", self.activation(gate) * up))}


class OnePassVarianceFloat32(OnePassVariance):
    dtypes = ("float32",)


class Scalar(Original):
    """Also returns a single number."""

    def inputs(self, seed: int) -> Any:
        return {**super().inputs(seed), "mask": np.arange(4) < np.array([[4], [2], [1]])}

    def forward(self, inputs: Any, tap: Any) -> Any:
        found = super().forward(inputs, tap)
        return {**found, "loss": (found["logits"] ** 2).mean()}


class ScalarPort(Port):
    def forward(self, inputs: Any, tap: Any) -> Any:
        found = super().forward(inputs, tap)
        return {**found, "loss": (found["logits"] ** 2).mean()}


class WrongScalar(ScalarPort):
    def forward(self, inputs: Any, tap: Any) -> Any:
        found = super().forward(inputs, tap)
        return {**found, "loss": 1.01 * found["loss"]}


class WithNaN(Scalar):
    def forward(self, inputs: Any, tap: Any) -> Any:
        found = super().forward(inputs, tap)
        return {**found, "parts": np.where(np.arange(CLASSES) < 1, np.nan, found["logits"])}


class OtherAxes(Port):
    """Shows a tap with its last two axes exchanged."""

    def forward(self, inputs: Any, tap: Any) -> Any:
        def moved(name: str, value: Any) -> Any:
            return tap(name, value.swapaxes(1, 2)).swapaxes(1, 2) if name == "gate" else tap(name, value)

        return super().forward(inputs, moved)


class OtherAxesOfWrongValues(OtherAxes):
    """Also adds a constant to the values of this tap."""

    def load(self, weights: Any, dtype: str) -> None:
        super().load({**weights, "gate.weight": weights["gate.weight"] + 0.01}, dtype)


class WithoutBias(Port):
    def head(self, hidden: Any) -> Any:
        return hidden @ self.weights["head.weight"]


class InFloat16(Port):
    """Rounds an intermediate value to float16, so that only precision is lost."""

    def activation(self, gate: Any) -> Any:
        return super().activation(gate.astype(np.float16).astype(gate.dtype))


class Float32Only(Port):
    dtypes = ("float32",)


class EpsilonFloat32(Epsilon):
    dtypes = ("float32",)


class InFloat16Float32(InFloat16):
    dtypes = ("float32",)


class Random(Port):
    def activation(self, gate: Any) -> Any:
        return super().activation(gate) * np.random.default_rng().uniform(0.9, 1.1, gate.shape)


class OverBatch(Port):
    """Subtracts the mean of the batch, like a batch norm in training mode."""

    def head(self, hidden: Any) -> Any:
        return super().head(hidden - 0.1 * hidden.mean(0, keepdims=True))


class LooksAhead(Port):
    def head(self, hidden: Any) -> Any:
        return super().head(hidden) + 0.1 * np.roll(super().head(hidden), -1, axis=1)


class ForgetsLoss(Port):
    def gradients(self, inputs: Any) -> Any:
        found = Original.gradients(self, inputs)  # type: ignore[arg-type]
        return {name: value / len(inputs["x"]) if name != "loss" else value for name, value in found.items()}


class WithoutGradients(Port):
    gradients = Implementation.gradients  # type: ignore[assignment]


class Raises(Port):
    def forward(self, inputs: Any, tap: Any) -> Any:
        raise RuntimeError("the kernel doesn't exist")


class IgnoresTaps(Epsilon):
    """Calls taps, but doesn't continue with their results."""

    def forward(self, inputs: Any, tap: Any) -> Any:
        return super().forward(inputs, lambda name, value: (tap(name, value), value)[1])


class ImportsTorch(Port):
    """Imports a framework only when a model is created."""

    def load(self, weights: Any, dtype: str) -> None:
        import torch  # noqa: F401

        super().load(weights, dtype)


class Renamed(Epsilon):
    """Has different names and axes."""

    names = {"norm": ("ln", "l b w -> b l w"), "gate": "g", "up": "u", "hidden": ("h", "(b l) h -> b l h")}

    def forward(self, inputs: Any, tap: Any) -> Any:
        def renamed(name: str, value: Any) -> Any:
            if name == "norm":
                return tap("ln", value.swapaxes(0, 1)).swapaxes(0, 1)
            if name == "hidden":
                return tap("h", value.reshape(-1, HIDDEN)).reshape(value.shape)
            return tap(name[0], value)

        return super().forward(inputs, renamed)


class Router(Original):
    """Chooses one of five experts for each position."""

    gradients = Implementation.gradients  # type: ignore[assignment]

    def forward(self, inputs: Any, tap: Any) -> Any:
        logits = super().forward(inputs, tap)["logits"]
        chosen = tap("chosen", self.choose(logits))
        picked = np.take_along_axis(logits, chosen[..., None], -1)
        return {"picked": picked, "expert": chosen}

    def choose(self, logits: Any) -> Any:
        return logits.argmax(-1)


class TiedRouter(Router):
    """Has two experts with the same weights, so every choice between them is a near-tie."""

    def init_weights(self, seed: int) -> Any:
        found = super().init_weights(seed)
        found["head.weight"][1] = found["head.weight"][0] + 1e-9
        return {**found, "head.bias": np.array([-0.5, -0.5, 0.0, 0.2, 0.3])}


class RouterPort(Port):
    offset = 0

    def forward(self, inputs: Any, tap: Any) -> Any:
        logits = super().forward(inputs, tap)["logits"]
        chosen = tap("chosen", (np.argsort(logits, -1)[..., -1] + self.offset) % CLASSES)
        return {"picked": np.take_along_axis(logits, chosen[..., None], -1), "expert": chosen}


class WrongRouter(RouterPort):
    offset = 1


class WithUnusedWeight(Original):
    def init_weights(self, seed: int) -> Any:
        return {**super().init_weights(seed), "pooler.weight": np.random.default_rng(seed).normal(size=(3, 4))}


class Hidden(Implementation):
    """A norm and a network between two taps, with a language model's decoding."""

    epsilon, slope = 1e-4, 1.0

    def init_weights(self, seed: int) -> Any:
        rng = np.random.default_rng(seed)
        return {"embed": rng.normal(size=(CLASSES, WIDTH)), "head": rng.normal(size=(WIDTH, CLASSES))}

    def inputs(self, seed: int) -> Any:
        return {"ids": np.random.default_rng(seed).integers(0, CLASSES, (3, 4))}

    def load(self, weights: Any, dtype: str) -> None:
        self.weights = weights

    def logits(self, ids: Any, tap: Any) -> Any:
        x = tap("embed", self.weights["embed"][ids])
        x = x - x.mean(-1, keepdims=True)
        variance, epsilon = (x**2).mean(-1, keepdims=True), x.dtype.type(self.epsilon)
        x = x / np.sqrt(variance + epsilon)
        return np.tanh(x.dtype.type(self.slope) * x) @ self.weights["head"]

    def forward(self, inputs: Any, tap: Any) -> Any:
        return {"logits": self.logits(inputs["ids"], tap)}

    def next_logits(self, inputs: Any, prefix: Any) -> Any:
        return self.logits(np.concatenate([inputs["ids"], prefix], 1), lambda name, value: value).sum(1)

    def next_logits_cached(self, inputs: Any, prefix: Any, cache: Any) -> tuple[Any, Any]:
        new = inputs["ids"] if cache is None else prefix[:, -1:]
        total = self.logits(new, lambda name, value: value).sum(1) + (0.0 if cache is None else cache)
        return total, total


class HiddenEpsilon(Hidden):
    epsilon = 1e-5

    def load(self, weights: Any, dtype: str) -> None:
        self.weights = dict(weights)

    def forward(self, inputs: Any, tap: Any) -> Any:
        return {"logits": self.logits(inputs["ids"], tap)}


class HiddenSlope(HiddenEpsilon):
    epsilon, slope = 1e-4, 1.01


class HiddenCache(HiddenEpsilon):
    """Forgets the second token that it generated."""

    epsilon = Hidden.epsilon

    def next_logits_cached(self, inputs: Any, prefix: Any, cache: Any) -> tuple[Any, Any]:
        logits, total = super().next_logits_cached(inputs, prefix, cache)
        return (cache, cache) if prefix.shape[1] == 2 else (logits, total)


class Waves(Implementation):
    """A linear layer on sinusoids of high frequencies, whose sums are scaled by a single weight."""

    pi = math.pi

    def init_weights(self, seed: int) -> Any:
        return {"head": np.random.default_rng(seed).normal(size=(WIDTH, CLASSES)), "slope": np.array([0.25])}

    def inputs(self, seed: int) -> Any:
        return {"x": np.random.default_rng(seed).uniform(0.5, 1.0, (3, 4, 1))}

    def load(self, weights: Any, dtype: str) -> None:
        self.weights, self.slope = weights, weights["slope"]

    def forward(self, inputs: Any, tap: Any) -> Any:
        x = inputs["x"]
        waves = np.sin((2.0 * self.pi * 2.0 ** np.arange(WIDTH)).astype(x.dtype) * x)
        return {"logits": (self.slope * tap("waves", waves)) @ self.weights["head"]}


class WavesOfRoundedPi(Waves):
    pi = 3.1416

    def load(self, weights: Any, dtype: str) -> None:
        self.weights, self.slope = dict(weights), weights["slope"]


class WavesWithFixedSlope(Waves):
    def load(self, weights: Any, dtype: str) -> None:
        self.weights, self.slope = dict(weights), np.array([0.25], dtype)


class ScalarTap(Original):
    def forward(self, inputs: Any, tap: Any) -> Any:
        tap("mean", inputs["x"].mean())
        return super().forward(inputs, tap)


class ScalarTapPort(Port):
    def forward(self, inputs: Any, tap: Any) -> Any:
        tap("mean", inputs["x"].mean().reshape(1))
        return super().forward(inputs, tap)


class NormInFloat32(Hidden):
    """Computes the mean square of a norm in float32, even in float64."""

    kind: Any = np.float32

    def logits(self, ids: Any, tap: Any) -> Any:
        x = self.weights["embed"][ids]
        square = (x.astype(self.kind or x.dtype) ** 2).mean(-1, keepdims=True).astype(x.dtype)
        x = tap("norm", x / np.sqrt(square + x.dtype.type(self.epsilon)))
        return np.tanh(x) @ self.weights["head"]


class PreciseNorm(NormInFloat32):
    kind = None

    def load(self, weights: Any, dtype: str) -> None:
        self.weights = dict(weights)


class BiasOfChoice(Original):
    """Adds a bias to scores only to choose the largest one, as in some mixtures of experts."""

    def load(self, weights: Any, dtype: str) -> None:
        self.weights = weights

    def forward(self, inputs: Any, tap: Any) -> Any:
        scores = inputs["x"] @ self.weights["gate.weight"][:CLASSES].T
        chosen = (scores + self.weights["head.bias"]).argmax(-1)
        return {"score": np.take_along_axis(scores, chosen[..., None], -1)}


class BiasOfChoicePort(BiasOfChoice):
    def load(self, weights: Any, dtype: str) -> None:
        self.weights = dict(weights)
