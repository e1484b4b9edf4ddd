"""Blame: which block introduced a difference, and which only inherited it.

Behind the first mistake all numbers are wrong, so that a comparison with the reference's says nothing about any block
but the first. A block is judged by what it makes of right inputs, or the reference by what it makes of the port's:

- A port whose taps go on with what they are given is run once more, with the reference's value behind every tap: what
  it then shows at each tap, it has computed from nothing but right inputs.
- Where a port only shows its taps, or there are only files of it, the reference is run with the port's value behind
  every tap: where it computes what the port did, the port's block is right, and its input was not.

Backwards it is always the second: the reference goes on from the port's own gradient at each tap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy import ndarray

from reference_numpy.backward import cross_entropy_backward, transformer_backward
from reference_numpy.taps import Recorder
from transformer_parity.cases.case import ACTIVATIONS, GRADIENTS, Case
from transformer_parity.compare import training_outputs
from transformer_parity.compare.outputs import OUTPUT
from transformer_parity.compare.tolerances import POLICY, relative_error, tolerance
from transformer_parity.ports.package import LoadedPackage
from transformer_parity.ports.protocol import LoadedPort, Replay
from transformer_parity.ports.user import LoadedPlugin

INTRODUCED, INHERITED, FINE = "introduced", "inherited", "fine"
Arrays = Mapping[str, ndarray]


@dataclass(frozen=True)
class Mark:
    """What became of one tensor.

    Attributes:
        name: A tap; backwards, the gradient ``at`` a tap or ``of`` a parameter.
        free: The error in the port's own run.
        alone: The error that this block makes by itself, from right inputs; NaN where that cannot be told.
        tolerance: The largest error allowed.
        verdict: Introduced here, inherited from further up, or fine.
    """

    name: str
    free: float
    alone: float
    tolerance: float
    verdict: str


@dataclass(frozen=True)
class Blame:
    """Who is to blame for the differences in one case.

    Attributes:
        backend: The port.
        dtype: The working dtype.
        case: The name of the case.
        stage: Activations, or gradients.
        replayed: What was run again: ``port``, ``reference``, or ``nothing`` where no tap is shown.
        marks: In the order of computation.
    """

    backend: str
    dtype: str
    case: str
    stage: str
    replayed: str
    marks: tuple[Mark, ...]

    @property
    def introduced(self) -> list[str]:
        """The places where a difference was introduced, in the order of computation."""
        return [mark.name for mark in self.marks if mark.verdict == INTRODUCED]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Evidence:
    """The tensors that a blame stands on.

    Attributes:
        actual: What the port computed in its own run.
        expected: What the reference computed.
        alone: What the replayed side computed at each place from given inputs.
        wanted: What it should have been there; ``alone`` is the port's where ``replayed`` is ``port``.
    """

    blame: Blame
    actual: Arrays
    expected: Arrays
    alone: Arrays
    wanted: Arrays


def blame(
    case: Case,
    inputs: Arrays,
    loaded: LoadedPort,
    truth: LoadedPackage,
    same_dtype: LoadedPackage | None,
    backend: str,
    dtype: str,
) -> Evidence:
    """Say for every tap of a case, or for every gradient, whether its difference was introduced there.

    Args:
        case: A full model's case of the stage ``activations`` or ``gradients``.
        inputs: What it is run on.
        loaded: The port.
        truth: The reference in float64.
        same_dtype: The reference in float32, where that is the working dtype: its own rounding is the baseline.
        backend: The port's name.
        dtype: The working dtype.

    Raises:
        ValueError: There is nothing to replay in such a case.
    """
    if case.stage == ACTIVATIONS:
        return _forward(case, inputs, loaded, truth, same_dtype, backend, dtype)
    if case.stage == GRADIENTS:
        return _backward(case, inputs, loaded, truth, backend, dtype)
    raise ValueError(f"blocks can be replayed for activations and gradients: got {case.stage}")


def blame_files(case: Case, actual: Arrays, truth: LoadedPackage, backend: str) -> Evidence:
    """Say the same of float64 tensors that somebody wrote down; arguments as in ``blame``."""
    if case.stage == GRADIENTS:
        return _replay_backward(case, case.inputs, actual, truth, backend, "float64")
    exact = truth.run(case.block, case.inputs, taps=True)
    expected = {name: value for name, value in _seen(exact).items() if name in actual}
    return _replay_reference(case, case.inputs, actual, expected, truth, None, backend, "float64")


def _seen(result: Any) -> dict[str, ndarray]:
    return {**result.taps, OUTPUT: result.output}


def _forward(case, inputs, loaded, truth, same_dtype, backend, dtype):
    expected = _seen(truth.run(case.block, inputs, taps=True))
    actual = _seen(loaded.run(case.block, inputs, taps=True))
    expected = {name: value for name, value in expected.items() if name in actual}
    given = {name: value for name, value in expected.items() if name != OUTPUT}
    try:
        alone = _seen(loaded.run(case.block, inputs, taps=True, given=given))
    except Exception:  # what was given may not fit behind a mistake of shape
        alone = {}
    changed = any(not _same_bits(alone[name], actual[name]) for name in actual if name in alone)
    other_way = _replay_reference(case, inputs, actual, expected, truth, same_dtype, backend, dtype)
    if not changed:
        return other_way
    baseline = {}
    if same_dtype is not None:
        rounded = _seen(same_dtype.run(case.block, inputs, taps=True, given=given))
        baseline = {name: relative_error(rounded[name], value) for name, value in expected.items()}
    marks = _marks(
        expected, actual, expected, alone, expected, lambda name: tolerance(name, dtype, baseline.get(name, 0))
    )
    found = Blame(backend, dtype, case.name, case.stage, "port", marks)
    if found.introduced != other_way.blame.introduced and not _goes_on(case, inputs, loaded, actual, given):
        return other_way
    return Evidence(found, actual, expected, alone, expected)


def _goes_on(case: Case, inputs: Arrays, loaded: LoadedPort, actual: Arrays, given: Arrays) -> bool:
    """Whether a port goes on with what it is given at every tap: where it does not, later blocks get wrong inputs.

    Our own packages do, which a test of theirs shows.
    """
    if not isinstance(loaded, LoadedPlugin):
        return True
    for name, value in given.items():
        spoilt = {name: 1.5 * np.asarray(value, np.float64) + 0.25}
        found = _seen(loaded.run(case.block, inputs, taps=True, given=spoilt))
        if all(_same_bits(found[other], actual[other]) for other in actual):
            return False
    return True


def _replay_reference(case, inputs, actual, expected, truth, same_dtype, backend, dtype):
    """Let the reference go on from what the port had."""
    shown = [name for name in actual if name != OUTPUT]
    given = {
        name: np.asarray(actual[name], np.float64)
        for name in shown
        if name in expected and actual[name].shape == expected[name].shape
    }
    with np.errstate(all="ignore"):  # what a mistake left may overflow
        wanted = _seen(truth.run(case.block, inputs, taps=True, given=given))
        baseline = {}
        if same_dtype is not None:
            rounded = _seen(same_dtype.run(case.block, inputs, taps=True, given=given))
            baseline = {name: relative_error(rounded[name], wanted[name]) for name in expected}
    replayed = "reference" if given else "nothing"
    marks = _marks(expected, actual, expected, actual, wanted, partial(_tolerance, dtype=dtype, baseline=baseline))
    return Evidence(Blame(backend, dtype, case.name, case.stage, replayed, marks), actual, expected, actual, wanted)


def _backward(case, inputs, loaded, truth, backend, dtype):
    return _replay_backward(case, inputs, training_outputs.gradients(loaded, inputs), truth, backend, dtype)


def _replay_backward(case, inputs, actual, truth, backend, dtype):
    """Let the reference's backward pass go on from the port's gradient at every tap."""
    everything = training_outputs.gradients(truth, inputs)
    expected = {name: value for name, value in everything.items() if name in actual}
    model, seen = truth.model, Recorder()
    source_ids, target_ids, labels = (inputs[name] for name in ("source_ids", "target_ids", "labels"))
    logits = model(source_ids, target_ids, tap=seen)
    scale = 1 / max(int((labels != model.config.pad_id).sum()), 1)
    given = {
        name.removeprefix("at "): np.asarray(value, np.float64)
        for name, value in actual.items()
        if name.startswith("at ") and name in expected and value.shape == expected[name].shape
    }
    found = Replay(replace=given)
    of_logits = cross_entropy_backward(logits, labels, model.config) * scale
    with np.errstate(all="ignore"):
        transformer_backward(model, source_ids, target_ids, of_logits, seen, found)
    wanted = {name: found.get(name.partition(" ")[2], value) for name, value in expected.items()}
    names = {
        name: value for name, value in expected.items() if name not in (training_outputs.LOSS, training_outputs.WHOLE)
    }
    wanted[training_outputs.WHOLE] = everything[training_outputs.WHOLE]  # what is zero is measured by it
    marks = _marks(names, actual, expected, actual, wanted, lambda name: POLICY["gradients"]["float64"]["tensor"])
    replayed = "reference" if given else "nothing"
    return Evidence(Blame(backend, dtype, case.name, case.stage, replayed, marks), actual, expected, actual, wanted)


def _marks(
    names: Sequence[str] | Arrays, actual: Arrays, expected: Arrays, alone: Arrays, wanted: Arrays, allowed: Any
) -> tuple[Mark, ...]:
    """Judge every place, in the order of computation."""
    marks = []
    for name in names:
        limit = allowed(name)
        free, by_itself = distance(name, actual, expected), distance(name, alone, wanted)
        verdict = FINE if free <= limit else INHERITED
        if not by_itself <= limit:
            verdict = INTRODUCED
        marks.append(Mark(name, free, by_itself, limit, verdict))
    return tuple(marks)


def distance(name: str, actual: Arrays, expected: Arrays) -> float:
    """Return how far apart two tensors are; infinite where their shapes, or their NaNs, are not the same."""
    if name not in actual or name not in expected or actual[name].shape != expected[name].shape:
        return math.inf
    mine, theirs = (np.asarray(array[name], np.float64) for array in (actual, expected))
    finite = np.isfinite(theirs)
    if not np.array_equal(np.isfinite(mine), finite):
        return math.inf
    if not finite.all():
        return relative_error(mine[finite], theirs[finite])
    return training_outputs.training_error(name, actual, expected)


def _tolerance(name: str, dtype: str, baseline: Mapping[str, float]) -> float:
    return tolerance(name, dtype, baseline.get(name, 0.0))


def _same_bits(first: ndarray, second: ndarray) -> bool:
    return first.shape == second.shape and first.tobytes() == second.tobytes()
