"""Blame: at which tensor of a case a difference starts, forwards by its taps and backwards by its gradients.

In the forward pass, blocks of the port or of the reference are rerun (see ``engine.localization``). In the backward
pass, only the reference is rerun: it continues from the port's gradient at each tap.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy import ndarray

from reference_numpy.backward import transformer_backward
from reference_numpy.training import cross_entropy_backward
from transformer_parity.engine.comparison import Arrays
from transformer_parity.engine.localization import (
    FINE,
    INHERITED,
    INTRODUCED,
    NOTHING,
    REFERENCE,
    Blame,
    Evidence,
    Replay,
    Rerun,
    apart,
    same_bits,
    without_consequences,
)
from transformer_parity.engine.outputs import OUTPUT
from transformer_parity.engine.tensors import Tensors
from transformer_parity.engine.tensors import given as rounded
from transformer_parity.engine.tolerances import POLICY, tolerance
from transformer_parity.transformer.cases.case import ACTIVATIONS, GRADIENTS, Case
from transformer_parity.transformer.ports.package import LoadedPackage
from transformer_parity.transformer.ports.protocol import LoadedPort, Placement
from transformer_parity.transformer.ports.registry import DEFINITION
from transformer_parity.transformer.ports.user import LoadedPlugin
from transformer_parity.transformer.stages.gradients import AT, gradients
from transformer_parity.transformer.stages.padding import Read
from transformer_parity.transformer.stages.registry import STAGES
from transformer_parity.transformer.stages.training_stage import LOSS, WHOLE, training_error
from transformer_spec.taps import Recorder

HIDDEN = 1e-6  # smallest weight of hidden keys: the weights of a query add up to one
REPLAYED = (ACTIVATIONS, GRADIENTS)  # stages whose blocks can be rerun


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
        own: The port's tensors.
        unread: The values that a run returns at positions that nothing reads, for tensors that are not given.
    """

    case: Case
    backend: str
    dtype: str
    inputs: Arrays
    truth: LoadedPackage
    same_dtype: LoadedPackage | None = None
    own: Arrays = field(default_factory=dict)
    unread: Arrays = field(default_factory=dict)

    @classmethod
    def of(cls, case: Case, backend: str, dtype: str) -> Subject:
        """Load the reference with the weights of a case."""
        weights, load = rounded(case.load_weights(), dtype), DEFINITION.load
        truth = load(case.config, weights, Placement("float64"))
        same_dtype = load(case.config, weights, Placement("float32")) if dtype == "float32" else None
        return cls(case, backend, dtype, rounded(case.inputs, dtype), truth, same_dtype)

    @property
    def replay(self) -> Replay:
        """The runs of the reference, and the tolerances of the taps."""
        return Replay(
            about=Blame(self.backend, self.dtype, self.case.name, self.case.stage),
            truth=partial(self.run, self.truth),
            rounded=None if self.same_dtype is None else partial(self.run, self.same_dtype),
            tolerance=lambda name, baseline: tolerance(name, self.dtype, baseline),
            distance=distance,
        )

    def run(self, loaded: LoadedPort, given: Arrays) -> Tensors:
        """Return the tensors of a run that continues with given values at some taps.

        Where nothing reads a value, such as at padding, the run continues with the port's value, because a wrong port
        may read it. There, the given value is returned.
        """
        fed = Read.of(self.case, given).combine(given, self.own)
        result = loaded.run(self.case.block, self.inputs, taps=True, given=fed)
        tensors = {**result.taps, OUTPUT: result.output}
        return Read.of(self.case, tensors).combine(tensors, {**self.unread, **given})

    def with_own(self, own: Arrays, truth: Arrays) -> Subject:
        """Return the subject with the tensors of the port, and of the reference for positions that nothing reads."""
        return replace(self, own={name: _harmless(name, value) for name, value in own.items()}, unread=truth)


def blame(loaded: LoadedPort, subject: Subject) -> Evidence:
    """Return for every tap of a case, or for every gradient, whether its difference was introduced there.

    Args:
        loaded: The port.
        subject: What it is run on, and the reference.

    Raises:
        ValueError: There is nothing to replay in such a case.
    """
    if subject.case.stage not in REPLAYED:
        raise ValueError(f"blocks can be replayed for activations and gradients: got {subject.case.stage}")
    if STAGES[subject.case.stage].has_loss:
        return _replay_backward(gradients(loaded, subject.inputs), subject)
    is_ours = not isinstance(
        loaded, LoadedPlugin
    )  # our packages continue with the value that a tap returns; a test shows it
    own, truth = subject.run(loaded, {}), subject.run(subject.truth, {})
    subject, read = subject.with_own(own, truth), Read.of(subject.case, truth)

    def rerun(given: Arrays) -> Tensors:
        return read.combine(subject.run(loaded, given) if given else own, truth)

    return _without_hidden_keys(subject.replay.blocks_of_port(rerun, None if is_ours else partial(_goes_on, rerun)))


def _harmless(name: str, value: ndarray) -> ndarray:
    """Return a tensor with zeros in place of NaN and infinity; scores keep -inf, because it masks a key."""
    hides = np.isneginf(value) & name.endswith(".scores")
    return np.where(np.isfinite(value) | hides, value, 0.0)


def _without_hidden_keys(evidence: Evidence) -> Evidence:
    """Return the evidence without contexts of wrong weights that don't add up to one.

    Then a port pads its keys further than it shows. A rerun has no correct weights for hidden keys, so that the context
    is wrong after a rerun too.
    """
    marks = []
    for mark in evidence.blame.marks:
        weights = f"{mark.name.removesuffix('.context')}.weights"
        if mark.verdict == INTRODUCED and mark.name.endswith(".context") and weights in evidence.blame.introduced:
            sums, right = evidence.actual[weights].sum(-1), evidence.expected[weights].sum(-1)
            if sums.shape == right.shape and (right - sums).max() > HIDDEN:
                mark = replace(mark, verdict=INHERITED)
        marks.append(mark)
    return replace(evidence, blame=replace(evidence.blame, marks=tuple(marks)))


def blame_files(case: Case, actual: Arrays, truth: LoadedPackage, backend: str) -> Evidence:
    """Return the same for float64 tensors from files."""
    subject = Subject(case, backend, "float64", case.inputs, truth)
    if STAGES[case.stage].has_loss:
        return _replay_backward(actual, subject)
    expected = subject.run(truth, {})
    subject = subject.with_own(actual, expected)
    actual = Read.of(case, expected).combine(actual, expected)
    return _without_hidden_keys(
        subject.replay.blocks_of_reference(actual, {name: expected[name] for name in expected if name in actual})
    )


def explained_by(evidence: Evidence, variants: Iterable[LoadedPackage], subject: Subject) -> Evidence:
    """Return the evidence without the places where a variant of the reference only inherits a difference."""
    subject = replace(subject, unread=evidence.expected)
    return without_consequences(evidence, (partial(subject.run, variant) for variant in variants), distance)


def _goes_on(rerun: Rerun, actual: Arrays, given: Arrays) -> bool:
    """Whether a port continues with the value that every tap returns."""
    for name, value in given.items():
        found = rerun({name: 1.5 * np.asarray(value, np.float64) + 0.25})
        if all(same_bits(found[other], actual[other]) for other in actual):
            return False
    return True


def _replay_backward(actual: Arrays, subject: Subject) -> Evidence:
    """Let the reference's backward pass go on from the port's gradient at every tap."""
    truth, inputs = subject.truth, subject.inputs
    everything = gradients(truth, inputs)
    actual = Read.of(subject.case, everything).combine(actual, everything)
    expected = {name: value for name, value in everything.items() if name in actual}
    model, recorded = truth.model, Recorder()
    source_ids, target_ids, labels = (inputs[name] for name in ("source_ids", "target_ids", "labels"))
    logits = model(source_ids, target_ids, tap=recorded)
    scale = 1 / max(int((labels != model.config.pad_id).sum()), 1)
    given = {
        name.removeprefix(AT): np.asarray(value, np.float64)
        for name, value in actual.items()
        if name.startswith(AT) and name in expected and value.shape == expected[name].shape
    }
    found = Recorder(replace=given, keep_computed=True)
    of_logits = cross_entropy_backward(logits, labels, model.config) * scale
    with np.errstate(all="ignore"):
        transformer_backward(model, source_ids, target_ids, of_logits, recorded, found)
    wanted = {name: found.get(name.partition(" ")[2], value) for name, value in expected.items()}
    wanted = Read.of(subject.case, everything).combine(wanted, actual)
    names = [name for name in expected if name not in (LOSS, WHOLE)]
    wanted[WHOLE] = everything[WHOLE]  # the measure of what should be zero
    replay = subject.replay
    evidence = replay.marked(
        Evidence(replay.about, actual, expected, actual, wanted),
        REFERENCE if given else NOTHING,
        names,
        lambda name: POLICY["gradients"]["float64"]["tensor"],
    )
    starts_at_padding = "logits" in given and np.any(given["logits"][labels == model.config.pad_id])
    if (given and not starts_at_padding) or len(evidence.blame.introduced) < 2:
        return evidence
    marks = evidence.blame.marks
    if given:  # such a gradient passes the port's values at padding, which are unknown: later gradients aren't judged
        first = evidence.blame.introduced[0]
        marks = tuple(mark for mark in marks if mark.verdict == FINE or mark.name == first)
    else:  # all may follow from one gradient, or from the loss
        marks = tuple(replace(mark, verdict=INHERITED) if mark.verdict == INTRODUCED else mark for mark in marks)
    return replace(evidence, blame=replace(evidence.blame, marks=marks))


def distance(name: str, actual: Arrays, expected: Arrays) -> float:
    """Return how far apart two tensors are; infinite where their shapes, or their NaNs, are not the same."""
    return apart(name, actual, expected, training_error)
