"""Values of the forward pass that the backward pass reads, either recorded at taps or recomputed."""

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
    """The values at the taps of one module in a forward pass, and the callback for their gradients.

    Args:
        seen: ``Recorder`` with the values of the full model.
        note: Callback for the gradients at taps and parameters. Its return value replaces the gradient.
        path: Path of the module, ending with a dot.
    """

    seen: Mapping[str, ndarray]
    note: Tap
    path: str = ""

    def __getitem__(self, name: str) -> ndarray:
        """Return the value at a tap."""
        return self.seen[self.path + name]

    def within(self, prefix: str) -> Trace:
        """Return the trace of a submodule."""
        return Trace(self.seen, within(self.note, prefix), f"{self.path}{prefix}.")

    def of_layer(self, i: int, layer: EncoderLayer | DecoderLayer, *inputs: ndarray) -> Trace:
        """Return the trace of layer i. If only the layer's inputs were stored, recompute the layer."""
        trace = self.within(f"layers.{i}")
        if isinstance(self.seen, LayerInputs):
            return replace(trace, seen=self.seen.run_again(trace.path.removesuffix("."), layer, *inputs))
        return trace

    def dropout(self, name: str, x: ndarray, rate: float) -> ndarray:
        """Apply the same dropout mask that the forward pass applied after a tap. ``x`` may be a value or a gradient."""
        keep = self.seen.get(f"{self.path}{name}_keep")
        return x if keep is None else dropout(x, keep, rate)


class Activations(Recorder):
    """A tap that stores the values that the backward pass reads: all except the scores and logits."""

    def __call__(self, name: str, value: Any) -> Any:
        """Return the value, and store it if the backward pass reads it."""
        return super().__call__(name, value) if self.reads(name) else value

    def reads(self, name: str) -> bool:
        """Return whether the backward pass reads the value of a tap."""
        return name != "logits" and not name.endswith(".scores")


class LayerInputs(Recorder):
    """A tap that stores only the layer inputs, from which the backward pass recomputes the layers (Chen et al., 2016).

    Before each layer, the tap also copies the random generator, so that the recomputed layer uses the same dropout
    masks.

    Args:
        masks: Attention masks that are passed to each layer, keyed by stack (``encoder`` or ``decoder``).
        rng: Random generator for dropout in the forward pass. None if there is no dropout.
    """

    def __init__(self, masks: Mapping[str, Sequence[ndarray]], rng: np.random.Generator | None = None) -> None:
        super().__init__(
            *("*_embedding.*", "*coder.relative_bias.output"),
            *("*coder.layers.*.output", "*coder.output", "*coder.output_keep"),
        )
        self.masks = masks
        self.rng = rng
        self.generators: dict[str, np.random.Generator] = {}  # copied generators, keyed by the path of the layer

    def __call__(self, name: str, value: Any) -> Any:
        """Return the value, and store it if a layer reads it."""
        layer = ".".join(name.split(".")[:3])  # every layer calls a tap before it applies dropout
        if self.rng is not None and layer not in self.generators:
            self.generators[layer] = copy.deepcopy(self.rng)
        return super().__call__(name, value)

    def reads(self, name: str) -> bool:
        """Return whether the value of a tap is stored, instead of being recomputed by ``run_again``."""
        return any(pattern.fullmatch(name) for pattern in self.patterns)

    def run_again(self, path: str, layer: Callable[..., ndarray], *inputs: ndarray) -> Recorder:
        """Recompute a layer, including its dropout, and return the values at its taps."""
        stack, rng = path.partition(".")[0], copy.deepcopy(self.generators.get(path))
        seen, bias = Activations(), self.get(f"{stack}.relative_bias.output")
        layer(*inputs, *self.masks[stack], tap=within(seen, path), rng=rng, bias=bias)
        return seen
