"""The ``activations`` stage: compares all intermediate values of a forward pass in the order of computation."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
from numpy import ndarray

from transformer_parity.engine.comparison import Arrays, tolerances
from transformer_parity.engine.outputs import FAST, OUTPUT, TAPS, Outputs
from transformer_parity.engine.tensors import Tensors
from transformer_parity.transformer.cases.case import ACTIVATIONS, Case
from transformer_parity.transformer.ports.protocol import LoadedPort, Placement
from transformer_parity.transformer.stages.stage import PathTensors, Stage, Way
from transformer_spec.names import tap_shapes


class ActivationStage(Stage):
    """A stage that compares the value at every tap, and the output of a normal run, which has no taps."""

    name = ACTIVATIONS
    component = "full model"
    is_ordered = True
    reproduces = 1e-12

    def run(self, case: Case, loaded: LoadedPort, outputs: Outputs) -> Iterator[Way]:
        """Yield a run with all taps and a run without taps."""
        yield TAPS, lambda: _shown(case, loaded)
        outputs.hidden = hidden(case, loaded)
        if case.fast and TAPS in outputs.paths:
            yield FAST, lambda: {OUTPUT: loaded.run(case.block, case.inputs, taps=False).output}

    def tolerances(self, truth: Arrays, baseline: Arrays, placement: Placement) -> dict[str, float]:
        """Return the tolerance of each tap. In float32, a tolerance depends on the reference's error at that tap."""
        return tolerances(truth, baseline, *placement)

    def problem(self, name: str, actual: ndarray, expected: ndarray, dtype: str) -> str:
        """Return an error message if a tensor is invalid, else an empty string.

        Ports must report scores before the mask sets some of them to -inf.
        """
        if name.endswith("scores") and actual.dtype.kind == "f" and np.isneginf(actual).any():
            return "scores must be finite: report them before the mask is added"
        return super().problem(name, actual, expected, dtype)

    def due(self, shown: PathTensors) -> list[str]:
        """Return the names of the tensors to compare. A run without taps returns only the output."""
        return [OUTPUT] if shown.path == FAST else super().due(shown)

    def not_offered(self, due: list[str], shown: PathTensors) -> tuple[list[str], list[str]]:
        """Exclude the taps that the port doesn't declare."""
        unseen = {*shown.outputs.hidden} - shown.tensors.keys()
        rest = [name for name in due if name not in unseen]
        missing = len(due) - len(rest)
        return rest, [f"{missing} of {len(due) - 1} taps are not reported"] if missing else []

    def left_out(
        self, case: Case, tensors: Collection[str], hidden: Sequence[str]
    ) -> Iterator[tuple[tuple[str, ...], str]]:
        """If the port doesn't report some taps, yield their names and the reason."""
        if hidden:
            yield tuple(hidden), "these taps are not reported"


def hidden(case: Case, loaded: LoadedPort) -> tuple[str, ...]:
    """Return the taps that a port doesn't declare."""
    return tuple(tap for tap in tap_shapes(case.config, 1, 1, 1) if not loaded.shows(tap))


def _shown(case: Case, loaded: LoadedPort) -> Tensors:
    result = loaded.run(case.block, case.inputs, taps=True)
    return {**result.taps, OUTPUT: result.output}
