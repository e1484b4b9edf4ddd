"""Blame: find the tap of the forward pass, or the gradient of the backward pass, that introduces a difference.

For the forward pass, individual blocks of the port or of the reference are rerun (see ``engine.localization``). For the
backward pass, only the reference is rerun, starting from the port's gradient at each tap.
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

# Keys are missing if a query's attention weights add up to less than the reference's sum minus this value.
HIDDEN = 1e-6
REPLAYED = (ACTIVATIONS, GRADIENTS)  # stages whose blocks can be rerun


@dataclass(frozen=True)
class Subject:
    """A case to rerun, and the reference with the same weights.

    Attributes:
        case: A case in the ``activations`` or ``gradients`` stage.
        backend: Name of the port.
        dtype: Working dtype.
        inputs: Inputs of the case, in the working dtype.
        truth: The reference in float64.
        same_dtype: The reference in float32, whose rounding error is the baseline; None if the working dtype is
            float64.
        own: The port's tensors. At positions that a correct model doesn't read, reruns use these values as inputs.
        unread: Tensors that ``run`` copies to its results at positions that a correct model doesn't read. If the caller
            passes ``run`` a value for a tap, ``run`` copies this value instead.
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
        """Load the reference with the weights of a case. Return a ``Subject`` with the case and this reference."""
        weights, load = rounded(case.load_weights(), dtype), DEFINITION.load
        truth = load(case.config, weights, Placement("float64"))
        same_dtype = load(case.config, weights, Placement("float32")) if dtype == "float32" else None
        return cls(case, backend, dtype, rounded(case.inputs, dtype), truth, same_dtype)

    @property
    def replay(self) -> Replay:
        """The functions that rerun the reference and that return the tolerance of each tap."""
        return Replay(
            about=Blame(self.backend, self.dtype, self.case.name, self.case.stage),
            truth=partial(self.run, self.truth),
            rounded=None if self.same_dtype is None else partial(self.run, self.same_dtype),
            tolerance=lambda name, baseline: tolerance(name, self.dtype, baseline),
            distance=distance,
        )

    def run(self, loaded: LoadedPort, given: Arrays) -> Tensors:
        """Return the tensors of a run in which the given values replace the values of some taps.

        At positions that a correct model doesn't read, such as padding, the run uses the values in ``own``, because an
        incorrect port may read these positions. The result contains the given values at these positions.
        """
        fed = Read.of(self.case, given).combine(given, self.own)
        result = loaded.run(self.case.block, self.inputs, taps=True, given=fed)
        tensors = {**result.taps, OUTPUT: result.output}
        return Read.of(self.case, tensors).combine(tensors, {**self.unread, **given})

    def with_own(self, own: Arrays, truth: Arrays) -> Subject:
        """Return a copy of this object with new values of the attributes ``own`` and ``unread``.

        ``own`` contains the port's tensors. ``truth`` contains the reference's tensors, and becomes ``unread``.
        """
        return replace(self, own={name: _harmless(name, value) for name, value in own.items()}, unread=truth)


def blame(loaded: LoadedPort, subject: Subject) -> Evidence:
    """Determine which taps or gradients of a case introduce a difference, and which only inherit a difference.

    Args:
        loaded: The port.
        subject: The case and the reference.

    Raises:
        ValueError: If the stage of the case can't be replayed.
    """
    if subject.case.stage not in REPLAYED:
        raise ValueError(f"stage must be activations or gradients to replay blocks: got {subject.case.stage}")
    if STAGES[subject.case.stage].has_loss:
        return _replay_backward(gradients(loaded, subject.inputs), subject)
    is_ours = not isinstance(
        loaded, LoadedPlugin
    )  # a test verifies that our packages continue the computation with the value that a tap returns
    own, truth = subject.run(loaded, {}), subject.run(subject.truth, {})
    subject, read = subject.with_own(own, truth), Read.of(subject.case, truth)

    def rerun(given: Arrays) -> Tensors:
        return read.combine(subject.run(loaded, given) if given else own, truth)

    return _without_hidden_keys(subject.replay.blocks_of_port(rerun, None if is_ours else partial(_goes_on, rerun)))


def _harmless(name: str, value: ndarray) -> ndarray:
    """Replace NaN and infinity in a tensor with zeros, except -inf in scores, which masks a key."""
    hides = np.isneginf(value) & name.endswith(".scores")
    return np.where(np.isfinite(value) | hides, value, 0.0)


def _without_hidden_keys(evidence: Evidence) -> Evidence:
    """Mark differences in attention outputs (``context``) as inherited if the attention weights don't add up to one.

    The sum is too small if the port pads its keys and doesn't record the weights of the added keys. A rerun can't
    replace these weights with the correct weights. Therefore, the attention output is still wrong in the rerun, even if
    an earlier block introduced the difference.
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
    """Rerun blocks of the reference, and return the evidence for float64 tensors that were read from files."""
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
    """Mark a difference as inherited if a variant of the reference shows that an earlier block introduced it.

    The difference is inherited if it also occurs in a normal run of the variant, but disappears in a run in which each
    block of the variant receives correct inputs.
    """
    subject = replace(subject, unread=evidence.expected)
    return without_consequences(evidence, (partial(subject.run, variant) for variant in variants), distance)


def _goes_on(rerun: Rerun, actual: Arrays, given: Arrays) -> bool:
    """Return whether a port continues its computation with the value that each tap returns."""
    for name, value in given.items():
        found = rerun({name: 1.5 * np.asarray(value, np.float64) + 0.25})
        if all(same_bits(found[other], actual[other]) for other in actual):
            return False
    return True


def _replay_backward(actual: Arrays, subject: Subject) -> Evidence:
    """Rerun the reference's backward pass on the port's gradients at the taps, and return the evidence."""
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
    wanted[WHOLE] = everything[WHOLE]  # scale for the errors of gradients that must be zero
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
    if given:  # later gradients depend on the port's values at padding positions, and these values are unknown
        first = evidence.blame.introduced[0]
        marks = tuple(mark for mark in marks if mark.verdict == FINE or mark.name == first)
    else:  # without gradients at taps, a single wrong gradient or a wrong loss may have caused all differences
        marks = tuple(replace(mark, verdict=INHERITED) if mark.verdict == INTRODUCED else mark for mark in marks)
    return replace(evidence, blame=replace(evidence.blame, marks=marks))


def distance(name: str, actual: Arrays, expected: Arrays) -> float:
    """Return the relative error of a tensor, or infinity if the shapes or the positions of non-finite values differ."""
    return apart(name, actual, expected, training_error)
