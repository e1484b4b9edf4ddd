"""Blame: at which tensor a difference starts, and which tensors only inherit it.

Behind the first mistake all numbers are wrong, so that a comparison with the reference's says nothing about any block
but the first. A block is therefore run again from right inputs, or the reference is run from the port's:

- A port whose taps go on with what they are given runs once more, with the reference's value behind every tap: each
  tap then shows what the port computes from right inputs only.
- Where a port only shows its taps, or there are only files, the reference runs with the port's value behind every tap:
  where it computes what the port did, the port's block is right, and its input was not.

Backwards it is always the second: the reference goes on from the port's own gradient at each tap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy import ndarray

from reference_numpy.backward import transformer_backward
from reference_numpy.backward_functions import cross_entropy_backward
from transformer_parity.engine.outputs import OUTPUT
from transformer_parity.engine.tensors import given as rounded
from transformer_parity.engine.tensors import relative_error
from transformer_parity.engine.tolerances import POLICY, tolerance
from transformer_parity.transformer.cases.case import ACTIVATIONS, GRADIENTS, Case
from transformer_parity.transformer.ports.package import LoadedPackage
from transformer_parity.transformer.ports.protocol import LoadedPort, Placement
from transformer_parity.transformer.ports.registry import PORTS
from transformer_parity.transformer.ports.user import LoadedPlugin
from transformer_parity.transformer.stages.gradients import gradients
from transformer_parity.transformer.stages.training import LOSS, WHOLE, training_error
from transformer_spec.taps import Recorder

INTRODUCED, INHERITED, FINE = "introduced", "inherited", "fine"
Arrays = Mapping[str, ndarray]


@dataclass(frozen=True)
class Mark:
    """The errors of one tensor.

    Attributes:
        name: A tap; backwards, the gradient ``at`` a tap or ``of`` a parameter.
        free: The error in the port's own run.
        alone: The error that this block makes by itself, from right inputs; infinite where that cannot be told.
        tolerance: The largest error allowed.
        verdict: Introduced here, inherited from an earlier tensor, or fine.
    """

    name: str
    free: float
    alone: float
    tolerance: float
    verdict: str


@dataclass(frozen=True)
class Blame:
    """Where the differences of one case start.

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

    to_dict = asdict  # the fields as plain values


@dataclass(frozen=True)
class Evidence:
    """The tensors that a blame is computed from.

    Attributes:
        actual: Of the port's own run.
        expected: Of the reference's own run.
        alone: At each place, the port's tensor from given inputs; from its own where only the reference is replayed.
        wanted: What it should be there.
    """

    blame: Blame
    actual: Arrays
    expected: Arrays
    alone: Arrays
    wanted: Arrays


@dataclass(frozen=True)
class Subject:
    """What is run again: a case of one port in one dtype, and the reference of the same weights.

    Attributes:
        case: A full model's case of the stage ``activations`` or ``gradients``.
        backend: The port's name.
        dtype: The working dtype.
        inputs: What it is run on.
        truth: The reference in float64.
        same_dtype: The reference in float32, where that is the working dtype: its own rounding is the baseline.
    """

    case: Case
    backend: str
    dtype: str
    inputs: Arrays
    truth: LoadedPackage
    same_dtype: LoadedPackage | None = None

    @classmethod
    def of(cls, case: Case, backend: str, dtype: str) -> Subject:
        """Load the reference with the weights of a case."""
        weights, load = rounded(case.load_weights(), dtype), PORTS["numpy"].load
        truth = load(case.config, weights, Placement("float64"))
        same_dtype = load(case.config, weights, Placement("float32")) if dtype == "float32" else None
        return cls(case, backend, dtype, rounded(case.inputs, dtype), truth, same_dtype)

    def of_truth(self, given: Arrays | None = None) -> dict[str, ndarray]:
        """Return what the reference computes, from given values behind its taps if there are any."""
        return _shown(self.truth.run(self.case.block, self.inputs, taps=True, given=given))

    def of_port(self, loaded: LoadedPort, given: Arrays | None = None) -> dict[str, ndarray]:
        """Return what the port computes, likewise."""
        return _shown(loaded.run(self.case.block, self.inputs, taps=True, given=given))

    def baseline(self, given: Arrays, wanted: Arrays) -> dict[str, float]:
        """Return the reference's own error in float32 at each tap, from the same given values."""
        if self.same_dtype is None:
            return {}
        rounded = _shown(self.same_dtype.run(self.case.block, self.inputs, taps=True, given=given))
        return {name: relative_error(rounded[name], value) for name, value in wanted.items()}

    def found(self, replayed: str, marks: tuple[Mark, ...]) -> Blame:
        """Return a blame of this case."""
        return Blame(self.backend, self.dtype, self.case.name, self.case.stage, replayed, marks)


def blame(loaded: LoadedPort, subject: Subject) -> Evidence:
    """Return for every tap of a case, or for every gradient, whether its difference was introduced there.

    Args:
        loaded: The port.
        subject: What it is run on, and the reference.

    Raises:
        ValueError: There is nothing to replay in such a case.
    """
    if subject.case.stage == ACTIVATIONS:
        return _forward(loaded, subject)
    if subject.case.stage == GRADIENTS:
        return _replay_backward(gradients(loaded, subject.inputs), subject)
    raise ValueError(f"blocks can be replayed for activations and gradients: got {subject.case.stage}")


def blame_files(case: Case, actual: Arrays, truth: LoadedPackage, backend: str) -> Evidence:
    """Return the same for float64 tensors from files."""
    subject = Subject(case, backend, "float64", case.inputs, truth)
    if case.stage == GRADIENTS:
        return _replay_backward(actual, subject)
    expected = {name: value for name, value in subject.of_truth().items() if name in actual}
    return _replay_reference(actual, expected, subject)


def without_consequences(evidence: Evidence, variants: Iterable[LoadedPackage], subject: Subject) -> Evidence:
    """Return the evidence with fewer places of introduction, where a variant of the reference explains them.

    Where a tap of the port shows another value than its name stands for, what follows is run from a wrong input, and
    seems to introduce a difference too. A variant that computes all that the port does at such a place, and introduces
    nothing there, shows that it inherits.

    Args:
        evidence: Of the port.
        variants: References with a known mistake, which reproduce the output of the port.
        subject: What was run.
    """
    given = {name: value for name, value in evidence.expected.items() if name != OUTPUT}
    best: Blame | None = None
    for variant in variants:
        free = subject.of_port(variant)
        alone = subject.of_port(variant, given)
        marks = tuple(
            replace(mark, verdict=INHERITED)
            if mark.verdict == INTRODUCED
            and distance(mark.name, alone, evidence.expected) <= mark.tolerance
            and distance(mark.name, free, evidence.actual) <= mark.tolerance
            else mark
            for mark in evidence.blame.marks
        )
        found = replace(evidence.blame, marks=marks)
        if found.introduced and len(found.introduced) < len((best or evidence.blame).introduced):
            best = found
    return evidence if best is None else replace(evidence, blame=best)


def _shown(result: Any) -> dict[str, ndarray]:
    return {**result.taps, OUTPUT: result.output}


def _forward(loaded: LoadedPort, subject: Subject) -> Evidence:
    """Run the port again from the reference's values, or else the reference from the port's."""
    actual = subject.of_port(loaded)
    expected = {name: value for name, value in subject.of_truth().items() if name in actual}
    given = {name: value for name, value in expected.items() if name != OUTPUT}
    try:
        alone = subject.of_port(loaded, given)
    except Exception:  # what was given may not fit behind a mistake of shape
        alone = {}
    changed = any(not _same_bits(alone[name], actual[name]) for name in actual if name in alone)
    other_way = _replay_reference(actual, expected, subject)
    if not changed:
        return other_way
    baseline = subject.baseline(given, expected)
    evidence = Evidence(other_way.blame, actual, expected, alone, expected)
    marks = _marks(expected, evidence, lambda name: tolerance(name, subject.dtype, baseline.get(name, 0.0)))
    found = subject.found("port", marks)
    if found.introduced != other_way.blame.introduced and not _goes_on(loaded, subject, actual, given):
        return other_way
    return replace(evidence, blame=found)


def _goes_on(loaded: LoadedPort, subject: Subject, actual: Arrays, given: Arrays) -> bool:
    """Whether a port goes on with what it is given at every tap: where it does not, later blocks get wrong inputs.

    Our own packages do; a test shows it.
    """
    if not isinstance(loaded, LoadedPlugin):
        return True
    for name, value in given.items():
        found = subject.of_port(loaded, {name: 1.5 * np.asarray(value, np.float64) + 0.25})
        if all(_same_bits(found[other], actual[other]) for other in actual):
            return False
    return True


def _replay_reference(actual: Arrays, expected: Arrays, subject: Subject) -> Evidence:
    """Let the reference go on from the port's values."""
    given = {
        name: np.asarray(value, np.float64)
        for name, value in actual.items()
        if name != OUTPUT and name in expected and value.shape == expected[name].shape
    }
    with np.errstate(all="ignore"):  # what a mistake left may overflow
        wanted = subject.of_truth(given)
        baseline = subject.baseline(given, {name: wanted[name] for name in expected})
    replayed = "reference" if given else "nothing"
    evidence = Evidence(subject.found(replayed, ()), actual, expected, actual, wanted)
    marks = _marks(expected, evidence, lambda name: tolerance(name, subject.dtype, baseline.get(name, 0.0)))
    return replace(evidence, blame=subject.found(replayed, marks))


def _replay_backward(actual: Arrays, subject: Subject) -> Evidence:
    """Let the reference's backward pass go on from the port's gradient at every tap."""
    truth, inputs = subject.truth, subject.inputs
    everything = gradients(truth, inputs)
    expected = {name: value for name, value in everything.items() if name in actual}
    model, recorded = truth.model, Recorder()
    source_ids, target_ids, labels = (inputs[name] for name in ("source_ids", "target_ids", "labels"))
    logits = model(source_ids, target_ids, tap=recorded)
    scale = 1 / max(int((labels != model.config.pad_id).sum()), 1)
    given = {
        name.removeprefix("at "): np.asarray(value, np.float64)
        for name, value in actual.items()
        if name.startswith("at ") and name in expected and value.shape == expected[name].shape
    }
    found = Recorder(replace=given, keep_computed=True)
    of_logits = cross_entropy_backward(logits, labels, model.config) * scale
    with np.errstate(all="ignore"):
        transformer_backward(model, source_ids, target_ids, of_logits, recorded, found)
    wanted = {name: found.get(name.partition(" ")[2], value) for name, value in expected.items()}
    names = [name for name in expected if name not in (LOSS, WHOLE)]
    wanted[WHOLE] = everything[WHOLE]  # the measure of what should be zero
    replayed = "reference" if given else "nothing"
    evidence = Evidence(subject.found(replayed, ()), actual, expected, actual, wanted)
    marks = _marks(names, evidence, lambda name: POLICY["gradients"]["float64"]["tensor"])
    if not given and sum(mark.verdict == INTRODUCED for mark in marks) > 1:  # all may follow from one, or from the loss
        marks = tuple(replace(mark, verdict=INHERITED) if mark.verdict == INTRODUCED else mark for mark in marks)
    return replace(evidence, blame=subject.found(replayed, marks))


def _marks(names: Iterable[str], evidence: Evidence, allowed: Callable[[str], float]) -> tuple[Mark, ...]:
    """Return a mark for every place, in the order of computation."""
    marks = []
    for name in names:
        limit = allowed(name)
        free = distance(name, evidence.actual, evidence.expected)
        alone = distance(name, evidence.alone, evidence.wanted)
        verdict = FINE if free <= limit else INHERITED
        if not alone <= limit:
            verdict = INTRODUCED
        marks.append(Mark(name, free, alone, limit, verdict))
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
    return training_error(name, actual, expected)


def _same_bits(first: ndarray, second: ndarray) -> bool:
    return first.shape == second.shape and first.tobytes() == second.tobytes()
