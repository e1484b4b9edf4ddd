"""Compare the results of all processes in a run with the results of the same run on one device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy import ndarray

from transformer_parity.engine.findings import AGREES, Finding
from transformer_parity.engine.tolerances import EPS, POLICY, finite
from transformer_parity.engine.verdict import Author
from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.distributed.cases import DISTRIBUTED, Probe
from transformer_parity.transformer.distributed.rows import rows_problem
from transformer_parity.transformer.distributed.signatures import LATER, ONE_SHARD, Contributions, divisions, explain
from transformer_parity.transformer.distributed.updates import known_bug
from transformer_parity.transformer.distributed.worker import Held, Place, Seen, Snapshot
from transformer_parity.transformer.stages import gradients, steps
from transformer_parity.transformer.stages.training_stage import LOSS, WHOLE, training_error
from transformer_spec.names import parameter_shapes
from transformer_spec.parallel_plan import Plan, fsdp_axis, tensor_axis

RESUMED = "resumed"  # name of a run that resumes from a snapshot
COUNTED = ("tokens", "number of the step")  # integers, so they must be identical in every precision
# Names of findings that are not about an individual tensor.
REPLICAS, DIVIDED, NAMES, ROWS = "replicas", "sharding", "names", "rows of each process"


@dataclass(frozen=True)
class DeviceRun:
    """A run on multiple devices.

    Attributes:
        probe: Model, settings, and batches.
        plan: The parallelism plan.
        start: Snapshot from which the run resumes; None to start at the first step.
        origin: Phrase that names the framework and the plan that created the snapshot.
        named: True if the user requested the plan. An unsupported plan is then a failure, not a skip.
        resumes: True if the run will resume from a snapshot, even if ``start`` isn't set yet.
    """

    probe: Probe
    plan: Plan
    start: Snapshot | None = None
    origin: str = ""
    named: bool = True
    resumes: bool = False

    @property
    def case(self) -> Case:
        """The case that represents this run in findings."""
        inputs = dict(zip(("source_ids", "target_ids", "labels"), self.probe.batch(0), strict=True))
        name = f"{DISTRIBUTED}/{self.plan}/{RESUMED if self.resumes or self.start else self.probe.name}"
        common: dict[str, Any] = {"dtypes": (self.probe.dtype,), "stage": DISTRIBUTED, "settings": self.probe.settings}
        return Case(name, str(self.plan), self.probe.config, "", inputs, **common)


def findings(
    backend: str, run: DeviceRun, seen: Sequence[Seen], expected: Seen, baseline: Seen | None = None
) -> list[Finding]:
    """Return the findings from all comparisons of a run.

    Args:
        backend: Name of the backend or port that trained.
        run: The run.
        seen: Results of each process.
        expected: Results on one device from the reference or, if the run uses dropout, from the framework itself.
        baseline: Results on one device, in the same precision as the run; None if this precision is float64.
    """
    author = run.case.author(backend, run.probe.dtype)
    if refused := next((one.refused for one in seen if one.refused), ""):
        return [(author.failed if run.named else author.skipped)("run", refused)]
    found = [*_tensors(author, run, seen, expected, baseline), *_held(author, run, seen)]
    failing = next((i for i, finding in enumerate(found) if finding.verdict != AGREES), None)
    if failing is not None and baseline is None and found[failing].tap not in (NAMES, REPLICAS, DIVIDED, ROWS):
        finding, wanted = found[failing], tensors(expected)
        furthest = max(seen, key=lambda one: _distance(finding.tap, tensors(one), wanted))
        why = explain(furthest, expected, _ways(run, furthest), run.plan)
        if why.endswith(LATER) and not (draws(run.probe) or run.start):
            known = known_bug(run.probe, run.plan, furthest, expected)
            why += f", as with this bug: {known}" if known else ""
        if why.endswith(ONE_SHARD) and _are_of_own_parts(seen, expected, run.plan):
            why = why.replace(ONE_SHARD, "each device uses the norm of its own shard")
        begun = f"started by {run.origin}" if run.origin else ""
        said = [finding.detail or f"error {finding.error:.1e}", why, begun]
        found[failing] = replace(finding, detail="; ".join(filter(None, said)))
    return found


def _are_of_own_parts(seen: Sequence[Seen], expected: Seen, plan: Plan) -> bool:
    """Return True if each process returns the norm of only its shard of the gradient.

    In this case, the squared norms of all processes add up to the squared norm of the full gradient.
    """
    squares = sum(one.norms[0] ** 2 for one in seen)
    return math.isclose(squares, plan.data * expected.norms[0] ** 2, rel_tol=1e-9)


def draws(probe: Probe) -> bool:
    """Return True if a run uses dropout. The reference can't provide the expected results of such a run."""
    rates = probe.config.dropout
    return any((rates.embedding, rates.residual, rates.attention, rates.feed_forward))


def _ways(run: DeviceRun, seen: Seen) -> list[Contributions]:
    """For each possible division of the rows, return the contributions of the shards to the first gradient."""
    probe, start = run.probe, run.start
    if draws(probe):
        return []
    weights, step = (probe.weights(), 0) if start is None else (start.weights, seen.first)
    rows = divisions(len(probe.lengths), probe.settings.accumulation_steps, run.plan.shards)
    return [Contributions.of(probe, weights, step, each) for each in rows]


def tensors(seen: Seen) -> dict[str, ndarray]:
    """Return the results of a process as a dict from names to tensors, in the order in which an error propagates."""
    numbers: dict[str, ndarray] = {}
    reported: dict[str, Sequence[float]] = {
        LOSS: seen.losses,
        "tokens": seen.tokens,
        "norm of the gradient": seen.norms,
    }
    for i in range(len(seen.losses)):
        numbers |= {
            f"step {seen.first + i + 1} {what}": np.asarray(found[i]) for what, found in reported.items() if found
        }
    whole = [np.ravel(seen.gradient[name]) for name in sorted(seen.gradient)]
    found = {
        WHOLE: np.concatenate(whole) if whole else np.zeros(0),
        **{f"of {name}": seen.gradient[name] for name in reversed([*seen.gradient])},
        **numbers,
    }
    for step, snapshot in seen.snapshots.items():
        # Exclude key biases, because their gradient is rounding noise.
        weights = {name: array for name, array in snapshot.weights.items() if not name.endswith("key_proj.bias")}
        if (state := snapshot.state) is not None:
            for what, arrays in (("first moment", state.first_moment), ("second moment", state.second_moment)):
                found |= {f"step {step} {what} {name}": array for name, array in arrays.items()}
            found[f"step {step} number of the step"] = np.asarray(state.step)
        found |= {f"step {step} weight {name}": array for name, array in weights.items()}
    return found


def _tensors(
    author: Author, run: DeviceRun, seen: Sequence[Seen], expected: Seen, one_device: Seen | None
) -> Iterator[Finding]:
    """Compare each tensor with its expected value. The error of a tensor is its largest error in any process."""
    wanted, of_all = tensors(expected), [tensors(one) for one in seen]
    rounded = None if one_device is None else tensors(one_device)
    baseline = {} if rounded is None else {name: _distance(name, rounded, wanted) for name in wanted}
    for process, found in enumerate(of_all):
        if found.keys() != wanted.keys():
            absent = sorted(found.keys() ^ wanted.keys())
            got = f"{len(found)}, in which {absent[0]} is missing or unexpected"
            problem = f"process {process} must return {len(wanted)} tensors: got {got}"
            yield author.compared("run", NAMES, math.inf, 0.0, problem=problem)
            return
    for name in wanted:
        errors = [_distance(name, found, wanted) for found in of_all]
        worst = errors.index(max(errors))
        detail = f"error {errors[worst]:.1e} in process {worst}, {min(errors):.1e} in another process"
        tolerance = _tolerance(name, run, baseline)
        apart = max(errors) > tolerance >= min(errors)
        yield author.compared("run", name, errors[worst], tolerance, detail=detail if apart else "")


def _tolerance(name: str, run: DeviceRun, baseline: Mapping[str, float]) -> float:
    """Return the tolerance for a tensor. Except in float64, it depends on the errors of the same run on one device."""
    if not baseline or name.endswith(COUNTED):
        return _usual_tolerance(name, "float64", 0.0, 0.0)
    if not run.probe.settings.mixed_bfloat16:
        return _usual_tolerance(name, "float32", baseline[name], baseline[WHOLE])
    rule = POLICY["distributed"]["mixed_bfloat16"]
    # A tensor that is linear in the gradient has the same relative error as the gradient. A tensor that depends on the
    # square of the gradient has twice this error.
    of_gradients = 2.0 if " second moment " in name else float(" moment " in name or name.startswith("of "))
    own = finite(max(baseline[name], of_gradients * baseline[WHOLE]), name)
    # Tensor parallelism rounds each of N partial sums and then their total, whereas one device rounds only the total.
    # If the N + 1 errors are independent, their sum is larger than one of them by a factor of the square root of N + 1.
    roundings = run.plan.tensor + 1 if run.plan.tensor > 1 else 1
    return rule["ratio"] * math.sqrt(roundings) * own + rule["floor_in_eps"] * EPS["bfloat16"]


def _usual_tolerance(name: str, dtype: str, baseline: float, whole: float) -> float:
    """Return the tolerance for a tensor in a check on one device."""
    if name.startswith("step "):
        return steps.tolerance(name, dtype)
    return gradients.tolerance(name, dtype, baseline, whole)


def _distance(name: str, found: dict[str, ndarray], wanted: dict[str, ndarray]) -> float:
    """Return the error of a tensor, or infinity if its shape is wrong or if it contains NaN or infinity."""
    if np.shape(found[name]) != np.shape(wanted[name]) or not np.isfinite(found[name]).all():
        return math.inf
    return training_error(name, found, wanted)


def _held(author: Author, run: DeviceRun, seen: Sequence[Seen]) -> Iterator[Finding]:
    """Check that all replicas of a parameter are identical, and that parameters are sharded as the plan specifies."""
    held, shapes = Holdings.of(seen), parameter_shapes(run.probe.config)
    problem = ""
    if apart := held.apart():
        problem = f"{len(apart)} of {len(shapes)} parameters differ between their replicas, starting with {apart[0]}"
    yield author.compared("run", REPLICAS, 0.0, 0.0, problem=problem)
    if seen[0].config is None:
        yield author.compared("run", DIVIDED, 0.0, 0.0, problem=held.not_divided(run.plan, shapes))
        return
    if seen[0].own_gradient:
        yield author.compared("run", ROWS, 0.0, 0.0, problem=rows_problem(run.probe, run.plan, seen))
    if sizes := [size for one in seen for size in one.sizes]:
        yield author.compared("run", DIVIDED, 0.0, 0.0, problem=_sizes_problem(sizes, run.plan, shapes))


def _sizes_problem(sizes: Sequence[int], plan: Plan, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return an error message if the parameter counts of the devices don't match the plan, else an empty string."""
    if len(sizes) != plan.devices:
        return f"parameters_per_device must return {plan.devices} numbers over all processes: got {len(sizes)}"
    every = sum(map(math.prod, shapes.values()))
    if sum(sizes) < plan.data * every:
        copies = f"{plan.data} copies of {every:,} parameter elements"
        return f"the devices must store {copies}: got {sum(sizes):,} elements in total"
    return _too_many(max(sizes), plan, shapes)


def _too_many(most: int, plan: Plan, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return an error message if a device stores too many parameter elements for the plan, else an empty string."""
    every = sum(map(math.prod, shapes.values()))
    due = sum(math.prod(shape) / _parts(name, shape, plan) for name, shape in shapes.items())
    if most <= (due + every) / 2:  # accept more elements than ``due``: some frameworks don't shard all parameters
        return ""
    return f"a device must store about {due / every:.0%} of all parameter elements: a device stores {most / every:.0%}"


@dataclass(frozen=True)
class Holdings:
    """The shards of each parameter on all devices. ``parts`` contains the device, position, and hash of each shard."""

    parts: Mapping[str, list[Held]]

    @classmethod
    def of(cls, seen: Iterable[Seen]) -> Holdings:
        """Collect the shards of all processes."""
        parts: dict[str, list[Held]] = {}
        for one in seen:
            for name, held in one.shards.items():
                parts.setdefault(name, []).extend(held)
        return cls(parts)

    def places(self, name: str) -> set[Place]:
        """Return the distinct positions of a parameter's shards."""
        return {place for _, place, _ in self.parts[name]}

    def apart(self) -> list[str]:
        """Return the names of the parameters for which two devices store different values of the same shard."""
        return [
            name
            for name, held in self.parts.items()
            if len({(place, digest) for _, place, digest in held}) > len(self.places(name))
        ]

    def not_divided(self, plan: Plan, shapes: Mapping[str, tuple[int, ...]]) -> str:
        """Return an error message if the shards don't match the plan, else an empty string."""
        devices = {device for held in self.parts.values() for device, _, _ in held}
        if self.parts.keys() != shapes.keys() or len(devices) != plan.devices:
            needed = f"{len(shapes)} parameters on {plan.devices} devices"
            return f"the run must have {needed}: got {len(self.parts)} parameters on {len(devices)} devices"
        for name, shape in shapes.items():
            places = self.places(name)
            if sum(map(_size, places)) != math.prod(shape):
                return f"the shards of {name} must add up to the full parameter: got shards of a different total size"
            if tensor_axis(name) is not None and len(places) < plan.tensor:
                return f"tensor={plan.tensor} must shard {name}: each device stores the full parameter"
        return _too_many(max(map(self._numbers, devices)), plan, shapes)

    def _numbers(self, device: int) -> int:
        return sum(_size(place) for held in self.parts.values() for on, place, _ in held if on == device)


def _size(place: Place) -> int:
    return math.prod(stop - start for start, stop in place)


def _parts(name: str, shape: tuple[int, ...], plan: Plan) -> int:
    """Return the number of shards into which a plan divides a parameter."""
    by_fsdp = plan.fsdp if fsdp_axis(name, shape, plan.fsdp) is not None else 1
    return by_fsdp * (plan.tensor if tensor_axis(name) is not None else 1)
