"""What the backward pass reads of the forward pass: what its taps showed, or what it can be computed from again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy import ndarray

from reference_numpy.decoder import DecoderLayer
from reference_numpy.encoder import EncoderLayer
from reference_numpy.functional import dropout
from transformer_spec.taps import Recorder, Tap, within


@dataclass(frozen=True)
class Trace:
    """What a forward pass left of one module: the values at its taps, and the tap that takes their gradients.

    Args:
        seen: What a Recorder saw of the whole model.
        note: Receives each named gradient, of taps and of parameters, and returns the gradient to go on with.
        path: Of the module, ending with a dot.
    """

    seen: Mapping[str, ndarray]
    note: Tap
    path: str = ""

    def __getitem__(self, name: str) -> ndarray:
        """Return the value at a tap."""
        return self.seen[self.path + name]

    def within(self, prefix: str) -> Trace:
        """Return the trace of a sub-module."""
        return Trace(self.seen, within(self.note, prefix), f"{self.path}{prefix}.")

    def of_layer(self, i: int, layer: EncoderLayer | DecoderLayer, *inputs: ndarray) -> Trace:
        """Return the trace of a layer; what only its inputs were kept of runs again."""
        trace = self.within(f"layers.{i}")
        if isinstance(self.seen, LayerInputs):
            return replace(trace, seen=self.seen.run_again(trace.path.removesuffix("."), layer, *inputs))
        return trace

    def dropout(self, name: str, x: ndarray, rate: float) -> ndarray:
        """Thin out ``x`` as the forward pass did behind a tap; a gradient goes back through the same elements."""
        keep = self.seen.get(f"{self.path}{name}_keep")
        return x if keep is None else dropout(x, keep, rate)


class Activations(Recorder):
    """A tap that keeps what the backward pass reads, which is everything but scores and logits."""

    def __call__(self, name: str, value: Any) -> Any:
        """Keep the value if it will be read, and return it."""
        return super().__call__(name, value) if self.reads(name) else value

    def reads(self, name: str) -> bool:
        """Return whether the backward pass reads what a tap showed."""
        return name != "logits" and not name.endswith(".scores")


class LayerInputs(Recorder):
    """A tap that keeps what each layer reads, from which the rest of a layer is computed again (Chen et al., 2016).

    Of the generator that draws a layer's dropout, it keeps the copy that was made as the layer began.

    Args:
        masks: What the layers of each stack are called with.
        rng: What draws the dropout of the forward pass; None without dropout.
    """

    def __init__(self, masks: Mapping[str, Sequence[ndarray]], rng: np.random.Generator | None = None) -> None:
        super().__init__("*_embedding.*", "*coder.layers.*.output", "*coder.output")
        self.masks = masks
        self.rng = rng
        self.generators: dict[str, np.random.Generator] = {}  # by the path of the layer

    def __call__(self, name: str, value: Any) -> Any:
        """Keep the value if a layer reads it, and return it."""
        layer = ".".join(name.split(".")[:3])  # a layer shows something before it drops anything
        if self.rng is not None and layer not in self.generators:
            self.generators[layer] = copy.deepcopy(self.rng)
        return super().__call__(name, value)

    def reads(self, name: str) -> bool:
        """Return whether the backward pass reads what a tap showed, before it runs a layer again."""
        return any(pattern.fullmatch(name) for pattern in self.patterns)

    def run_again(self, path: str, layer: Callable[..., ndarray], *inputs: ndarray) -> Recorder:
        """Return what the taps of a layer showed, dropout included."""
        masks, rng = self.masks[path.partition(".")[0]], copy.deepcopy(self.generators.get(path))
        seen = Activations()
        layer(*inputs, *masks, tap=within(seen, path), rng=rng)
        return seen
