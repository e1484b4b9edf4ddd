"""The ``gradients`` stage: compares the loss for one batch and its gradients at all taps and for all parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from transformer_parity.engine.comparison import Arrays
from transformer_parity.engine.findings import Finding
from transformer_parity.engine.outputs import FILES, TAPS, Outputs
from transformer_parity.engine.tensors import Tensors
from transformer_parity.engine.tolerances import EPS, POLICY, by_baseline, finite
from transformer_parity.transformer.cases.case import GRADIENTS, Case
from transformer_parity.transformer.ports.protocol import LoadedPort, Placement
from transformer_parity.transformer.stages.activations import hidden
from transformer_parity.transformer.stages.stage import PathTensors, Way
from transformer_parity.transformer.stages.training_stage import LOSS, WHOLE, TrainingStage, training_error

AT = "at "  # prefix of the gradients at taps; gradients of parameters have the prefix "of "


class GradientStage(TrainingStage):
    """Compares the loss and the gradients in backward-pass order, so that the first difference locates the bug."""

    name = component = GRADIENTS
    perturbed_baselines = 4  # with only one run, 10% of correct implementations would exceed the tolerance
    reproduces = 1e-10
    optional: ClassVar[Mapping[str, str]] = {"at *": "gradients at taps"}

    def run(self, case: Case, loaded: LoadedPort, outputs: Outputs) -> Iterator[Way]:
        """Yield a single run: the backward pass for one batch."""
        yield TAPS, lambda: gradients(loaded, case.inputs)
        outputs.hidden = hidden(case, loaded)

    def tolerances(self, truth: Arrays, baseline: Arrays, placement: Placement) -> dict[str, float]:
        """Return the tolerance for each gradient. In float32, a tolerance depends on the reference's error."""
        own = {name: training_error(name, baseline, truth) for name in truth if name in baseline}
        whole = own.get(WHOLE, 0.0)
        return {name: tolerance(name, placement.dtype, own.get(name, 0.0), whole) for name in truth}

    def compare(self, shown: PathTensors) -> Iterator[Finding]:
        """Compare the gradients, and also the concatenation of all parameter gradients."""
        return super().compare(replace(shown, tensors=_with_whole(shown.tensors, shown.expected.tensors)))

    def due(self, shown: PathTensors) -> list[str]:
        """Return the names of the tensors to compare.

        If golden files omit the gradient of a parameter, the concatenated gradient can't be compared.
        """
        names = super().due(shown)
        return [name for name in names if name in shown.tensors or name != WHOLE or shown.path != FILES]

    def not_offered(self, due: list[str], shown: PathTensors) -> tuple[list[str], list[str]]:
        """Exclude the gradients at undeclared taps. If the port returns no gradients at taps, exclude all of them."""
        if any(name.startswith(AT) for name in shown.tensors):
            unseen = {f"{AT}{tap}" for tap in shown.outputs.hidden} - shown.tensors.keys()
            due = [name for name in due if name not in unseen]
        return super().not_offered(due, shown)

    def left_out(
        self, case: Case, tensors: Collection[str], hidden: Sequence[str]
    ) -> Iterator[tuple[tuple[str, ...], str]]:
        """If the port doesn't report some taps, yield the names of the gradients at these taps and the reason."""
        if hidden and any(name.startswith(AT) for name in tensors):
            yield tuple(f"{AT}{tap}" for tap in hidden), "gradients at these taps are not reported"
        yield from super().left_out(case, tensors, hidden)


def gradients(loaded: Any, inputs: Arrays) -> Tensors:
    """Return the loss and the gradients in the order of the backward pass."""
    found = loaded.gradients(inputs)
    if not found.parameters:
        raise ValueError("gradients must contain one array per parameter: got none")
    whole = np.concatenate([np.ravel(found.parameters[name]) for name in sorted(found.parameters)])
    return {
        LOSS: np.asarray(found.loss),
        WHOLE: whole,
        **{f"{AT}{name}": found.taps[name] for name in reversed(found.taps)},
        **{f"of {name}": found.parameters[name] for name in reversed(found.parameters)},
    }


def tolerance(name: str, dtype: str, baseline: float, whole: float) -> float:
    """Return the maximum allowed error of a tensor.

    Args:
        name: Name of the tensor.
        dtype: Working dtype.
        baseline: Error of the float32 NumPy reference for this tensor.
        whole: Error of the float32 NumPy reference for the concatenated gradient.
    """
    rule = POLICY[GRADIENTS][dtype]
    kind = {LOSS: "loss", WHOLE: "whole"}.get(name, "tensor")
    if dtype == "float64":
        return rule[kind]
    own = max(finite(baseline, name), finite(whole, WHOLE) if kind == "tensor" else 0.0)
    return by_baseline(rule, own, EPS[dtype])


def _with_whole(tensors: Tensors, expected: Tensors) -> Tensors:
    """Recompute the concatenated gradient from the parameters' gradients, or remove it if any of them is missing."""
    names = sorted(name for name in expected if name.startswith("of "))
    if any(name not in tensors for name in names):
        return {name: value for name, value in tensors.items() if name != WHOLE}
    return {**tensors, WHOLE: np.concatenate([np.ravel(tensors[name]) for name in names])}
