"""Audit how a port uses each weight, without inspecting the port's code.

The audit perturbs one weight at a time, then reloads and reruns the port. The first tensor that changes shows where the
port uses this weight. The audit doesn't depend on the names or layouts of the parameters inside the port.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass

import numpy as np
from numpy import ndarray

from transformer_parity.engine.outputs import OUTPUT
from transformer_parity.engine.signatures import SAME
from transformer_parity.engine.tensors import given
from transformer_parity.transformer.bugs.bug import Bug
from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.diagnose.candidates.candidate import Candidate
from transformer_parity.transformer.diagnose.evidence.blame import distance
from transformer_parity.transformer.diagnose.evidence.properties import CALLS
from transformer_parity.transformer.ports.protocol import AnyPort, LoadedPort, Placement

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
CHANGED = {"float64": 1e-11, "float32": 1e-5}  # larger relative changes are not rounding errors
Weights = Mapping[str, ndarray]


@dataclass(frozen=True)
class Fate:
    """The result of the audit for one weight.

    Attributes:
        name: Canonical name of the weight. If the audit can't measure weights, this is the name of the input
            that the port modified, or ``two calls`` if two calls return different results.
        verdict: One of the following:

            - ``used``: The port uses the weight in the correct operation.
            - ``misplaced``: The port uses the weight in a different operation than the reference.
            - ``transposed``: The port uses the transposed weight.
            - ``replaced``: The port uses a different weight instead.
            - ``initial``: The port uses zeros or ones instead.
            - ``unused``: The weight has no effect.
            - ``random``: The results change with every load or every call.
            - ``hidden``: In the port and in the reference, the weight has no effect on any compared tensor. For
              example, a key bias has no effect on the logits.
            - ``overwritten``: The port modifies this input.

        detail: Description of the tensor that the weight affects, or of the value that the port uses instead.
        instead: Name of the weight that the port uses instead, ``zero``, or ``one``. For a transposed weight, this is
            the weight's own name. Empty otherwise.
    """

    name: str
    verdict: str
    detail: str = ""
    instead: str = ""

    to_dict = asdict  # returns the fields as built-in Python types


class _OverwrittenError(Exception):
    """Raised if the port modifies its inputs."""


def audit(
    port: AnyPort, case: Case, placement: Placement, progress: Callable[[str], None] = lambda text: None
) -> list[Fate]:
    """Determine where and how a port uses each weight.

    Args:
        port: The port to audit.
        case: A case that runs the full model.
        placement: The dtype and device with which to run the port.
        progress: Callback that receives the name of the next weight.
    """
    try:
        return _audit(port, case, placement, progress)
    except _OverwrittenError as error:
        return [Fate(str(error), OVERWRITTEN, "forward() modifies its input; copy the array first")]


def _audit(port: AnyPort, case: Case, placement: Placement, progress: Callable[[str], None]) -> list[Fate]:
    weights = dict(case.load_weights())

    def run(changed: Weights) -> dict[str, ndarray]:
        return _shown(port.load(case.config, changed, placement), case)

    def run_reference(changed: Weights) -> dict[str, ndarray]:
        """Run each block of the reference on the port's taps, so that an error in one block doesn't affect others."""
        found = _shown(Candidate(()).load(case.config, changed), case, taps)
        return {name: value for name, value in found.items() if name in usual}

    loaded = port.load(case.config, weights, placement)
    usual = _shown(loaded, case)
    changes = (first_change(usual, _shown(loaded, case), CHANGED[placement.dtype]) for _ in range(CALLS))
    if first := next(filter(None, changes), ""):
        found = (
            f"the results differ on the same input, first at {first}: dropout is enabled, or another operation is "
            "random"
        )
        return [Fate("two calls", RANDOM, found)]
    taps = {name: np.asarray(value, np.float64) for name, value in usual.items() if name != OUTPUT}
    expected = run_reference(weights)
    if first := first_change(usual, run(weights), CHANGED[placement.dtype]):
        reads = [
            name
            for name, weight in weights.items()
            if first_change(expected, run_reference({**weights, name: _disturbed(weight)}), CHANGED["float64"]) == first
        ]
        found = (
            "the value differs after every load, so the port does not set this weight from the given weights "
            f"(detected at {first})"
        )
        return [
            Fate(name, RANDOM, f"{found}{'' if len(reads) == 1 else '; other weights used there may be the cause'}")
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
            fates.append(
                Fate(name, USED, f"changing this weight affects {here}, but would have no effect in the reference")
            )
        else:
            fates.append(
                Fate(name, MISPLACED, f"changing this weight first affects {here}, but should first affect {there}")
            )
    return fates


def first_change(before: Mapping[str, ndarray], after: Mapping[str, ndarray], least: float) -> str:
    """Return the name of the first tensor whose relative change exceeds ``least``, or "" if there is none."""
    return next((name for name in before if not distance(name, after, before) <= least), "")


def summary(fates: Iterable[Fate]) -> str:
    """Return one line with the total number of weights and the number of weights with each verdict."""
    fates = list(fates)
    if fates and fates[0].verdict == OVERWRITTEN:
        return f"{fates[0].name} overwritten by forward(), so no weight can be audited"
    counts = {verdict: sum(fate.verdict == verdict for fate in fates) for verdict in (USED, HIDDEN, *WRONG)}
    words = {HIDDEN: "hidden (without effect on any compared tensor)"}
    said = [f"{count} {words.get(verdict, verdict)}" for verdict, count in counts.items() if count]
    return f"{len(fates)} weights: {', '.join(said)}"


def as_bug(fates: Iterable[Fate]) -> Bug | None:
    """Return a candidate with the replaced and transposed weights that the audit found, or None if it found none."""
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
    return Bug(f"the weights that the audit found ({words})", "", convert=convert)


def _shown(loaded: LoadedPort, case: Case, taps: Weights | None = None) -> dict[str, ndarray]:
    """Run a port on copies of the inputs, because it may overwrite them. Return all taps and the output.

    Raises:
        _OverwrittenError: If the port modifies an input. The message contains the name of the input.
    """
    inputs = given(case.inputs, "float64")
    try:
        with np.errstate(all="ignore"):  # a bug may cause overflow
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
    """Return the result of the audit for a weight that the port uses in the correct place.

    If this weight changes, the first tensor that changes is the same in the port and in the reference. ``tap`` is the
    name of this tensor, or empty if no compared tensor changes. The port may still transpose the weight.
    """
    weight = weights[name]
    if not tap:
        return Fate(name, HIDDEN, "changing this weight affects no compared tensor")
    square = weight.ndim == 2 and weight.shape[0] == weight.shape[1]
    if square and distance(tap, usual, expected) > SAME:
        turned = run_reference({**weights, name: np.ascontiguousarray(weight.T)})
        if distance(tap, usual, turned) <= SAME:
            return Fate(name, TRANSPOSED, f"detected at {tap}", name)
    return Fate(name, USED, tap)


def _fate_of_the_unused(
    name: str,
    weights: Weights,
    tap: str,
    usual: Mapping[str, ndarray],
    run_reference: Callable[[Weights], dict[str, ndarray]],
) -> Fate:
    """Return the result of the audit for a weight that has no effect.

    If the port uses a different weight, zeros, or ones instead of this weight, the result names the replacement.
    """
    for other, instead in _candidates(name, weights):
        if distance(tap, usual, run_reference(instead)) <= SAME:
            verdict = INITIAL if other in ("zero", "one") else REPLACED
            return Fate(name, verdict, f"the port uses {other} instead", other)
    return Fate(name, UNUSED, f"changing this weight has no effect, but should first affect {tap}")


def _candidates(name: str, weights: Weights) -> Iterator[tuple[str, Weights]]:
    """Yield the name of each possible replacement of a weight, and all weights of the model after the replacement."""
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
