"""Find the tensors at which a difference starts, by rerunning each block on the original's values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from transformer_parity.engine.comparison import Arrays
from transformer_parity.engine.localization import (
    FINE,
    INHERITED,
    INTRODUCED,
    NOTHING,
    PORT,
    REFERENCE,
    Blame,
    Evidence,
    Mark,
    Replay,
    Rerun,
    same_bits,
)
from transformer_parity.engine.outputs import is_output
from transformer_parity.engine.tensors import Tensors
from transformer_parity.engine.tolerances import POLICY, by_baseline
from transformer_parity.pairs.compare.difference import difference
from transformer_parity.pairs.compare.stages import FORWARD, GRADIENTS, Runs, plain_name
from transformer_parity.pairs.compare.truth import ALL_EPS, Tolerances, Truth
from transformer_parity.pairs.contract.arrays import is_float
from transformer_parity.pairs.run.side import RunError

MOST_MATCHES = 12  # number of matched taps that are examined
Distance = Callable[[str, Arrays, Arrays], float]


@dataclass(frozen=True)
class Wrong:
    """The tensors that differ in one batch of a stage, in one dtype.

    Attributes:
        stage: The stage.
        dtype: The working dtype.
        batch: The number of the batch.
        names: The names of the tensors, in the order of computation.
        is_math: Whether rounding can't explain a difference.
    """

    stage: str
    dtype: str
    batch: int
    names: list[str]
    is_math: bool


@dataclass(frozen=True)
class Located:
    """The tensors at which the differences of one stage start.

    Attributes:
        stage: The stage.
        dtype: The working dtype.
        batch: The number of the batch.
        names: The names of the tensors, in the order of computation.
        evidence: The tensors of the replay; None if no blocks were rerun.
    """

    stage: str
    dtype: str
    batch: int
    names: list[str]
    evidence: Evidence | None = None

    @property
    def blame(self) -> Blame | None:
        """The errors of all tensors of the replay."""
        return None if self.evidence is None else self.evidence.blame


def introduced(located: Iterable[Located]) -> list[str]:
    """Return the names of all tensors at which differences start. Tensors of the forward pass come first."""
    ordered = sorted(located, key=lambda entry: entry.stage != FORWARD)
    return list(dict.fromkeys(plain_name(name) for entry in ordered for name in entry.names))


def first_wrong(stage: str, dtype: str, batch: int, wrong: list[str]) -> Located:
    """Return the first wrong tensor of a stage whose blocks can't be rerun.

    In a backward pass, the last weights come first, so all wrong gradients are listed in reverse order.
    """
    return Located(stage, dtype, batch, wrong[::-1] if stage == GRADIENTS else wrong[:1])


def locate(truth: Truth, runs: Runs, first: Wrong, tolerances: Tolerances) -> Located:
    """Rerun each block of a forward pass on the original's values.

    Args:
        truth: The original.
        runs: The runs of both implementations.
        first: The tensors that differ in a normal run.
        tolerances: The largest accepted errors.
    """
    dtype, batch, wrong = first.dtype, first.batch, first.names
    rule = POLICY["pair"]["rounded"]

    def tolerance(name: str, own: float) -> float:
        allowed = tolerances.limit(name)
        return allowed if dtype == truth.dtype else max(allowed, by_baseline(rule, own, ALL_EPS[dtype]))

    def distance(name: str, actual: Arrays, expected: Arrays) -> float:
        if name not in actual or name not in expected:
            return float("inf")
        return difference(actual[name], expected[name], tolerances.scale(name))

    def port(given: Arrays) -> Tensors:
        return runs.forward(truth.of_port(runs.port, dtype), batch, given)

    def exact(given: Arrays) -> Tensors:
        return runs.forward(truth.exact(dtype), batch, given)

    narrow = None if dtype == truth.dtype else lambda given: runs.forward(truth.model(dtype), batch, given)
    about = Blame(runs.port.name, dtype, f"seed {batch}", FORWARD)
    replay = Replay(about, exact, narrow, tolerance, distance)
    try:
        evidence = replay.blocks_of_port(port, lambda _, given: _goes_on(port, exact, given))
        if evidence.blame.replayed == PORT and (false := _false_matches(runs, evidence, port, distance)):
            for name in false:
                del runs.names.proposed[name]
            evidence = replay.blocks_of_port(port)
        if evidence.blame.replayed == REFERENCE and not _goes_on(exact, exact, _without_outputs(exact({}))):
            evidence = _not_replayed(evidence, wrong)
    except RunError:
        return first_wrong(FORWARD, dtype, batch, wrong)
    marks = [mark for mark in evidence.blame.marks if mark.verdict == INTRODUCED and mark.name in evidence.expected]
    # An error below a rounding error of float32 is only a lack of precision, so larger errors are more relevant.
    large = [mark for mark in marks if not mark.isolated <= max(mark.tolerance, ALL_EPS["float32"])]
    return Located(FORWARD, dtype, batch, [mark.name for mark in large or marks] or wrong[:1], evidence)


def _false_matches(runs: Runs, evidence: Evidence, port: Rerun, distance: Distance) -> list[str]:
    """Return matched taps that don't correspond, such as an embedding before and after scaling.

    The original's value at such a tap is wrong for later blocks of the port. If the port is rerun without this value,
    later blocks become correct.
    """
    allowed = {mark.name: mark.tolerance for mark in evidence.blame.marks}
    wrong, given = evidence.blame.introduced, _without_outputs(evidence.expected)
    found = []
    for name in [name for name in wrong if name in runs.names.proposed][:MOST_MATCHES]:
        try:
            isolated = port({key: value for key, value in given.items() if key != name})
        except RunError:
            continue
        right = {key for key in allowed if distance(key, isolated, evidence.expected) <= allowed[key]}
        if ({*wrong} - {name}) & right and {*allowed} - {*wrong} <= right:
            found.append(name)
    return found


def _without_outputs(tensors: Arrays) -> Tensors:
    return {name: value for name, value in tensors.items() if not is_output(name)}


def _goes_on(rerun: Rerun, exact: Rerun, given: Arrays) -> bool:
    """Return whether an implementation computes all later values from the values that taps return.

    The values at all taps are changed. Every tensor that then changes in the original must also change here.
    """
    if not given:
        return False
    rng = np.random.default_rng(0)
    changed = {
        name: value * (1.0 + 0.1 * rng.uniform(-1.0, 1.0, value.shape)) if is_float(value) else value
        for name, value in given.items()
    }
    found = [(run(given), run(changed)) for run in (exact, rerun)]
    moves = [{name for name in before if not same_bits(before[name], after[name])} for before, after in found]
    return bool(moves[1]) and moves[0] <= moves[1]


def _not_replayed(evidence: Evidence, wrong: list[str]) -> Evidence:
    """Mark the first wrong tensor, because neither implementation continues with the values that taps return."""
    first = set(wrong[:1])

    def verdict(mark: Mark) -> str:
        return INTRODUCED if mark.name in first else INHERITED if mark.free > mark.tolerance else FINE

    marks = tuple(replace(mark, verdict=verdict(mark)) for mark in evidence.blame.marks)
    return replace(evidence, blame=replace(evidence.blame, replayed=NOTHING, marks=marks))
