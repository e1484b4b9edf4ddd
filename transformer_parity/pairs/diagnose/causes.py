"""Name the cause of a difference, without knowledge of the model."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from numpy import ndarray

from transformer_parity.engine.localization import PORT
from transformer_parity.engine.outputs import is_output
from transformer_parity.engine.tensors import Tensors
from transformer_parity.engine.tolerances import POLICY
from transformer_parity.pairs.compare.difference import difference
from transformer_parity.pairs.compare.stages import CACHED, DECODE, FORWARD, NEEDS, Runs, plain_name
from transformer_parity.pairs.compare.truth import ALL_EPS, Truth
from transformer_parity.pairs.contract.arrays import is_float
from transformer_parity.pairs.diagnose.dependence import dependence
from transformer_parity.pairs.diagnose.formulas import EXACT
from transformer_parity.pairs.diagnose.locate import Located
from transformer_parity.pairs.diagnose.recognize import Recognized, recognize
from transformer_parity.pairs.diagnose.trials import WrongTensor, weight_trials
from transformer_parity.pairs.run.side import RunError, SideModel

FAR = {"float64": 1e-9}  # relative error above which an element is wrong
FAR_IN_EPS = 64.0  # the same in narrower dtypes, in units of eps
MOST_PLACES = 6  # number of further differences whose causes are looked for
MOST_NOISE = 1e-5  # largest noise of an original whose formulas are recognized
LEAST_VALUES = 8  # a tensor with fewer values shows no pattern
PATIENCE = 30.0  # seconds after which no further causes are tried


def diagnose(truth: Truth, runs: Runs, located: Located) -> list[Recognized]:
    """Return the recognized causes of a difference, starting with the most specific.

    Args:
        truth: The original.
        runs: The runs of both implementations.
        located: The tensors at which the difference starts.
    """
    if not located.names:
        return []
    deadline = time.monotonic() + PATIENCE
    subject = _subject(truth, runs, located)
    found: list[Recognized] = []
    ways: tuple[Callable[[], Iterator[Recognized]], ...] = (
        lambda: _random(subject),
        lambda: _by_values(truth, runs, located, subject),
        lambda: iter(()) if found else _by_scale(truth, runs, located, subject.name),
        lambda: _cached(truth, runs, located, subject.far),
        lambda: weight_trials(subject, deadline, repairs=not found),
        lambda: dependence(truth, runs, located) if located.stage == FORWARD else iter(()),
    )
    for way in ways:
        with suppress(KeyError, RunError, ValueError):  # the port may lack a tensor, or reject changed weights
            for one in way():
                if one.sentence not in [other.sentence for other in found]:
                    found.append(one)
                if one.kind == "randomness":
                    return [Recognized(one.kind, f"at {plain_name(subject.name)}, {one.sentence}")]
        if time.monotonic() > deadline:
            break
    named = [Recognized(one.kind, f"at {plain_name(subject.name)}, {one.sentence}") for one in found]
    return named + _elsewhere(truth, runs, located, subject, {one.kind for one in found}, deadline)


def _elsewhere(
    truth: Truth, runs: Runs, located: Located, subject: WrongTensor, kinds: set[str], deadline: float
) -> list[Recognized]:
    """Return the causes of the other differences, if the patterns in their values show them."""
    found = []
    for name in [name for name in located.names if name != subject.name][:MOST_PLACES]:
        if located.evidence is None or name not in located.evidence.isolated or time.monotonic() > deadline:
            break
        with suppress(KeyError, RunError, ValueError):
            for one in _by_values(truth, runs, located, replace(subject, name=name)):
                if one.kind not in kinds:
                    kinds.add(one.kind)
                    found.append(Recognized(one.kind, f"at {plain_name(name)}, {one.sentence}"))
    return found


def _by_scale(truth: Truth, runs: Runs, located: Located, name: str) -> Iterator[Recognized]:
    """Recognize a different epsilon of a norm whose input has no tap, from blocks with smaller inputs.

    A norm divides by ``sqrt(variance + epsilon)``. If its input is halved, the effect of epsilon quadruples.
    """
    evidence = located.evidence
    if evidence is None:
        return
    taps = {key: value for key, value in evidence.expected.items() if not is_output(key) and is_float(value)}
    before = [*taps][: [*taps].index(name) if name in taps else None]
    errors = []
    for scale in (1.0, 0.5, 0.25) if before else ():
        given = {key: scale * taps[key] for key in before}
        models = truth.exact(located.dtype), truth.of_port(runs.port, located.dtype)
        wanted, actual = (runs.forward(model, located.batch, given)[name] for model in models)
        errors.append(difference(actual, wanted) if is_float(wanted) else math.inf)
    growth = [larger / error for error, larger in itertools.pairwise(errors) if 0.0 < error < math.inf]
    if len(growth) == 2 and all(math.isclose(ratio, 4.0, rel_tol=0.05) for ratio in growth):
        yield Recognized(
            "epsilon",
            "halving the inputs of the block quadruples the error, which is typical of a different epsilon in a norm",
        )


def _cached(truth: Truth, runs: Runs, located: Located, far: float) -> Iterator[Recognized]:
    """Recognize that the port's logits depend on whether it uses a cache."""
    if located.stage != CACHED or not runs.port.has(NEEDS[DECODE]):
        return
    port = truth.of_port(runs.port, located.dtype)
    plain, cached = (runs.run(stage, port, located.batch).values() for stage in (DECODE, CACHED))
    for step, (wanted, actual) in enumerate(zip(plain, cached, strict=True)):
        if not difference(actual, wanted) <= far:
            yield Recognized("cache", f"the port's logits of step {step} differ from its own logits without a cache")
            return


def _subject(truth: Truth, runs: Runs, located: Located) -> WrongTensor:
    """Return the tensor at which the difference starts, and functions that recompute it from weights."""
    dtype, batch, evidence = located.dtype, located.batch, located.evidence
    given: Tensors = {}
    if evidence is not None and evidence.blame.replayed == PORT:
        given = {key: value for key, value in evidence.expected.items() if not is_output(key)}

    def run(model: SideModel) -> Tensors:
        return runs.forward(model, batch, given) if given else runs.run(located.stage, model, batch)

    usual = run(truth.of_port(runs.port, dtype))
    present = [name for name in located.names if name in usual]
    name = next((name for name in present if usual[name].size >= LEAST_VALUES), (present or located.names)[0])

    def of(model: SideModel) -> ndarray:
        if name not in (found := run(model)):
            raise RunError(f"{model.side.name} doesn't return {plain_name(name)}")
        return found[name]

    def original(weights: Tensors) -> ndarray:
        return of(truth.original.model(weights, truth.dtype))

    def port(weights: Tensors) -> ndarray:
        return of(runs.port.model(weights, dtype))

    weights = dict(truth.exact(dtype).weights), dict(truth.model(dtype).weights)
    return WrongTensor(name, *weights, original, port, far(dtype))


def far(dtype: str) -> float:
    """Return the relative error above which an element is wrong."""
    return FAR.get(dtype, FAR_IN_EPS * ALL_EPS[dtype])


def _random(subject: WrongTensor) -> Iterator[Recognized]:
    first, second = subject.port(subject.port_weights), subject.port(subject.port_weights)
    if difference(second, first) > subject.far:
        yield Recognized(
            "randomness", "the port returns different values from call to call, as with dropout in training mode"
        )


def _by_values(truth: Truth, runs: Runs, located: Located, subject: WrongTensor) -> Iterator[Recognized]:
    """Yield the patterns in the values of the first wrong tensor."""
    name, evidence = subject.name, located.evidence
    if evidence is not None and name in evidence.isolated and name in evidence.wanted:
        actual, wanted = evidence.isolated[name], evidence.wanted[name]
    else:
        actual, wanted = subject.port(subject.port_weights), subject.original(subject.weights)
    earlier: Tensors = {}
    if located.stage == FORWARD:
        taps = truth.exact(located.dtype).forward(truth.batches[located.batch]).taps
        before = list(taps)[: list(taps).index(name)] if name in taps else list(taps)
        floats = {key: value for key, value in truth.batches[located.batch].items() if value.dtype.kind == "f"}
        earlier = {**floats, **{key: taps[key] for key in before}}
    yield from recognize(actual, wanted, earlier, subject.weights, subject.far, _exact(truth, located, name))


def _exact(truth: Truth, located: Located, name: str) -> float:
    """Return the relative tolerance for formulas. Some originals compute in float32 even if their dtype is float64."""
    with suppress(RunError):
        if truth.dtype == "float64":
            noise = truth.noise(located.stage).get(name, 0.0)
            return max(EXACT, min(POLICY["pair"]["float64"]["ratio"] * noise, MOST_NOISE))
    return EXACT
