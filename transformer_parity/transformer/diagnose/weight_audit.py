"""The weight audit: where each weight that a port was given is used, measured from the outside.

Each weight in turn is disturbed, and the port loaded and run again: where its numbers change first is where the weight
is used. No name or layout inside of the port has to be known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass

import numpy as np
from numpy import ndarray

from transformer_parity.engine.outputs import OUTPUT
from transformer_parity.engine.tensors import given
from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.diagnose.evidence.blame import distance
from transformer_parity.transformer.diagnose.evidence.closeness import SAME
from transformer_parity.transformer.diagnose.evidence.properties import CALLS
from transformer_parity.transformer.diagnose.hypotheses.hypothesis import Hypothesis
from transformer_parity.transformer.mistakes.mistake import Mistake
from transformer_parity.transformer.ports.protocol import Implementation, LoadedPort, Placement

USED, UNUSED, TRANSPOSED, MISPLACED, REPLACED, INITIAL, HIDDEN, RANDOM, OVERWRITTEN = (
    "used",
    "unused",
    "transposed",
    "misplaced",
    "replaced",
    "initial",
    "hidden",
    "random",
    "overwritten",
)
WRONG = (OVERWRITTEN, RANDOM, UNUSED, TRANSPOSED, MISPLACED, REPLACED, INITIAL)
CHANGED = {"float64": 1e-11, "float32": 1e-5}  # relative: more than rounding
Weights = Mapping[str, ndarray]


@dataclass(frozen=True)
class Fate:
    """Where one weight is used.

    Attributes:
        name: Its canonical name; or what was overwritten, or is random, where that leaves nothing to be measured.
        verdict: ``used`` where it belongs; ``unused``; ``transposed``; ``misplaced``, used somewhere else;
            ``replaced`` by another weight; left at its ``initial`` value; ``random``, another one at every load or
            call; ``hidden``: it changes nothing that the port shows, and would not in the reference either, as key
            biases change no logits; or ``overwritten``: no weight, but an input that the port writes to.
        detail: Where it is used, or what is in its place.
        instead: What is in its place: another weight, ``zero`` or ``one``; its own name if it is transposed.
    """

    name: str
    verdict: str
    detail: str = ""
    instead: str = ""

    to_dict = asdict  # the fields as plain values


class _OverwrittenError(Exception):
    """The port writes to its inputs."""


def audit(
    port: Implementation, case: Case, placement: Placement, progress: Callable[[str], None] = lambda text: None
) -> list[Fate]:
    """Return where every weight of a port is used.

    Args:
        port: What to audit.
        case: A full model, and what it is run on.
        placement: In which dtype, and where.
        progress: Receives the weight that is disturbed next.
    """
    try:
        return _audit(port, case, placement, progress)
    except _OverwrittenError as error:
        return [Fate(str(error), OVERWRITTEN, "forward() writes to its own input; copy the array first")]


def _audit(port: Implementation, case: Case, placement: Placement, progress: Callable[[str], None]) -> list[Fate]:
    weights = dict(case.load_weights())

    def run(changed: Weights) -> dict[str, ndarray]:
        return _shown(port.load(case.config, changed, placement), case)

    def run_reference(changed: Weights) -> dict[str, ndarray]:
        """Let the reference go on from what the port has at each tap, so that only one block is compared at a time."""
        found = _shown(Hypothesis(()).load(case.config, changed), case, taps)
        return {name: value for name, value in found.items() if name in usual}

    loaded = port.load(case.config, weights, placement)
    usual = _shown(loaded, case)
    changes = (first_change(usual, _shown(loaded, case), CHANGED[placement.dtype]) for _ in range(CALLS))
    if first := next(filter(None, changes), ""):
        found = f"differ on the same input, first at {first}: dropout is on, or something else is random"
        return [Fate("two calls", RANDOM, found)]
    taps = {name: np.asarray(value, np.float64) for name, value in usual.items() if name != OUTPUT}
    expected = run_reference(weights)
    if first := first_change(usual, run(weights), CHANGED[placement.dtype]):
        reads = [
            name
            for name, weight in weights.items()
            if first_change(expected, run_reference({**weights, name: _disturbed(weight)}), CHANGED["float64"]) == first
        ]
        found = f"it changes at every load: it is not set from the given weights, as {first} shows"
        return [
            Fate(name, RANDOM, f"{found}{'' if len(reads) == 1 else ' (it, or another that is read there)'}")
            for name in reads
        ]
    fates = []
    for name, weight in weights.items():
        progress(f"weight {name}")
        disturbed = {**weights, name: _disturbed(weight)}
        here = first_change(usual, run(disturbed), CHANGED[placement.dtype])
        there = first_change(expected, run_reference(disturbed), CHANGED["float64"])
        if here == there:
            fates.append(_fate_in_place(name, weights, here, usual, expected, run_reference))
        elif not here:
            fates.append(_fate_of_the_unused(name, weights, there, usual, run_reference))
        elif not there:
            fates.append(Fate(name, USED, f"it acts at {here}, and would change nothing in the reference"))
        else:
            fates.append(Fate(name, MISPLACED, f"it acts first at {here}, and should at {there}"))
    return fates


def first_change(before: Mapping[str, ndarray], after: Mapping[str, ndarray], least: float) -> str:
    """Return the first tensor that changes by more than ``least``, relative to itself; empty if none does."""
    return next((name for name in before if not distance(name, after, before) <= least), "")


def summary(fates: Iterable[Fate]) -> str:
    """Return one line: how many weights there are, and how many of them are wrong in which way."""
    fates = list(fates)
    if fates and fates[0].verdict == OVERWRITTEN:
        return f"{fates[0].name} overwritten: no weight can be measured"
    counts = {verdict: sum(fate.verdict == verdict for fate in fates) for verdict in (USED, HIDDEN, *WRONG)}
    words = {HIDDEN: "hidden (they change nothing that is shown)"}
    said = [f"{count} {words.get(verdict, verdict)}" for verdict, count in counts.items() if count]
    return f"{len(fates)} weights: {', '.join(said)}"


def as_mistake(fates: Iterable[Fate]) -> Mistake | None:
    """Return what stands in the place of weights, where that was found, as one hypothesis."""
    known = [fate for fate in fates if fate.instead]
    if not known:
        return None

    def convert(weights: Weights) -> Weights:
        changed = dict(weights)
        for fate in known:
            weight = weights[fate.name]
            if fate.instead in ("zero", "one"):
                changed[fate.name] = np.full_like(weight, float(fate.instead == "one"))
            else:
                changed[fate.name] = np.ascontiguousarray(
                    weight.T if fate.instead == fate.name else weights[fate.instead]
                )
        return changed

    words = ", ".join(f"{fate.name} {fate.verdict}" for fate in known[:3]) + (", ..." if len(known) > 3 else "")
    return Mistake(f"the weights as the audit found them ({words})", "", convert=convert)


def _shown(loaded: LoadedPort, case: Case, taps: Weights | None = None) -> dict[str, ndarray]:
    """Run on copies of the inputs: NumPy refuses to write to them, and a framework that shares memory may do so.

    Raises:
        _OverwrittenError: Its message is the name of an input.
    """
    inputs = given(case.inputs, "float64")
    try:
        with np.errstate(all="ignore"):  # what a mistake left may overflow
            result = loaded.run(case.block, inputs, taps=True, given=taps)
    except ValueError as error:
        if "read-only" not in str(error):
            raise
        raise _OverwrittenError(" or ".join(inputs)) from error
    for name, array in inputs.items():
        if not np.array_equal(array, case.inputs[name]):
            raise _OverwrittenError(name)
    return {**result.taps, OUTPUT: result.output}


def _disturbed(weight: ndarray) -> ndarray:
    noise = np.random.default_rng(weight.size).normal(size=weight.shape)
    return (weight + (0.1 * (np.abs(weight).max() or 1.0) * noise)).astype(weight.dtype)


def _fate_in_place(
    name: str,
    weights: Weights,
    tap: str,
    usual: Mapping[str, ndarray],
    expected: Mapping[str, ndarray],
    run_reference: Callable[[Weights], dict[str, ndarray]],
) -> Fate:
    """Return the fate of a weight that is used where it belongs: it may be transposed."""
    weight = weights[name]
    if not tap:
        return Fate(name, HIDDEN, "it changes nothing that is shown")
    square = weight.ndim == 2 and weight.shape[0] == weight.shape[1]
    if square and distance(tap, usual, expected) > SAME:
        turned = run_reference({**weights, name: np.ascontiguousarray(weight.T)})
        if distance(tap, usual, turned) <= SAME:
            return Fate(name, TRANSPOSED, f"as {tap} shows", name)
    return Fate(name, USED, tap)


def _fate_of_the_unused(
    name: str,
    weights: Weights,
    tap: str,
    usual: Mapping[str, ndarray],
    run_reference: Callable[[Weights], dict[str, ndarray]],
) -> Fate:
    """Find what is in the place of a weight that nothing depends on."""
    for other, instead in _candidates(name, weights):
        if distance(tap, usual, run_reference(instead)) <= SAME:
            verdict = INITIAL if other in ("zero", "one") else REPLACED
            return Fate(name, verdict, f"in its place is {other}", other)
    return Fate(name, UNUSED, f"a change of it changes nothing; it should act first at {tap}")


def _candidates(name: str, weights: Weights) -> Iterator[tuple[str, Weights]]:
    """Yield what may be in the place of a weight, and all weights as they would be then."""
    weight, kind = weights[name], name.rpartition(".")[2]
    if weight.ndim == 1:
        yield "zero", {**weights, name: np.zeros_like(weight)}
        yield "one", {**weights, name: np.ones_like(weight)}
    for other, value in weights.items():
        if other != name and other.rpartition(".")[2] == kind and value.shape == weight.shape:
            yield other, {**weights, name: value}
    stack, _, rest = name.partition(".layers.")
    layer = f"{stack}.layers.{rest.partition('.')[0]}."
    others = {f"{stack}.layers.{path.split('.')[2]}." for path in weights if path.startswith(f"{stack}.layers.")}
    for other in sorted(others - {layer}) if rest else ():
        taken = {path: weights[other + path.removeprefix(layer)] for path in weights if path.startswith(layer)}
        yield other + name.removeprefix(layer), {**weights, **taken}
