"""Functions that run ports on cases. Cases with the same model share a loaded port."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from numpy import ndarray

from transformer_parity.engine.outputs import LOAD, MissingAbilityError, Outputs
from transformer_parity.engine.tensors import Tensors, digest, given, plain
from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.ports.exceptions import described
from transformer_parity.transformer.ports.package import PackagePort
from transformer_parity.transformer.ports.protocol import AnyPort, LoadedPort, Placement
from transformer_parity.transformer.stages.registry import STAGES


def run_cases(
    cases: Iterable[Case], port: AnyPort, placements: Sequence[Placement], progress: Callable[[str], None]
) -> Iterator[Outputs]:
    """Run every case on a port in every dtype. Cases with the same config and weights share a loaded model.

    Args:
        cases: The cases to run.
        port: The port.
        placements: One placement for each dtype.
        progress: Callback that receives a description of the next run.
    """
    groups: dict[tuple[Any, ...], list[Case]] = {}
    for case in cases:
        # Each training case loads a separate model, because training changes the weights.
        groups.setdefault((case.model, STAGES[case.stage].trains and case.name), []).append(case)
    for same_model in groups.values():
        weights: Mapping[str, ndarray] = {}
        for placement in placements:
            if due := [case for case in same_model if placement.dtype in case.dtypes]:
                weights = weights or same_model[0].load_weights()
                yield from _run_group(due, port, weights, placement, progress)


def _run_group(
    cases: Sequence[Case],
    port: AnyPort,
    weights: Mapping[str, ndarray],
    placement: Placement,
    progress: Callable[[str], None],
) -> Iterator[Outputs]:
    loaded: LoadedPort | None = None
    skips: list[tuple[str, str]] = []  # reasons why the port can't be loaded
    failures: list[tuple[str, str]] = []
    for case in cases:
        outputs = Outputs(case.name, placement.dtype)
        if why := why_left_out(case, port):
            outputs.skipped.append(("run", why))
            yield outputs
            continue
        progress(f"{placement.dtype} {case.name}")
        if loaded is None and not skips and not failures:
            try:
                loaded = _variant(port, case).load(case.config, given(weights, placement.dtype), placement)
                _export(loaded, outputs)
            except MissingAbilityError as missing:
                skips.append(("run", str(missing)))
            except Exception as error:
                failures.append(("run", described(error)))
        outputs.skipped += skips
        outputs.failures += failures
        if loaded is not None and not failures:
            call_before(case, loaded, port, placement)
            run_case(case, loaded, outputs)
        yield outputs


def _variant(port: AnyPort, case: Case) -> AnyPort:
    """Return the variant of a port that runs a case. If ``case.formulas`` is set, packages don't use ``fast.py``."""
    return replace(port, fast=False) if case.formulas and isinstance(port, PackagePort) else port


def why_left_out(case: Case, port: object) -> str:
    """Return the reason that the port's ``left_out`` gives for skipping a case, or an empty string if there is none.

    A reason also applies to the variants of a case, whose names start with the case's name and a slash.
    """
    declared: Mapping[str, str] = getattr(port, "left_out", {})
    return next((str(why) for name, why in declared.items() if f"{case.name}/".startswith(f"{name}/")), "")


def call_before(case: Case, loaded: LoadedPort, port: AnyPort, placement: Placement) -> None:
    """Make the calls that precede a case. A call whose model differs from the case's model runs on a second model.

    The results of these calls are not compared here, because each call is also a separate case.
    """
    for earlier in case.before:
        with suppress(Exception):
            model = loaded
            if earlier.model != case.model:
                model = port.load(earlier.config, given(earlier.load_weights(), placement.dtype), placement)
            run_case(earlier, model, Outputs(earlier.name, placement.dtype))


def _export(loaded: LoadedPort, outputs: Outputs) -> None:
    try:
        outputs.weights = {name: digest(array, outputs.dtype) for name, array in plain(loaded.export()).items()}
    except MissingAbilityError as missing:
        outputs.skipped.append((LOAD, str(missing)))


def run_case(case: Case, loaded: LoadedPort, outputs: Outputs) -> None:
    """Run one case on a loaded model and add its tensors to ``outputs``."""
    inputs = given(case.inputs, outputs.dtype)
    for path, run in STAGES[case.stage].run(replace(case, inputs=inputs), loaded, outputs):
        outputs.attempt(path, run, described)
    for name, array in given(case.inputs, outputs.dtype).items():
        if array.tobytes() != inputs[name].tobytes():
            outputs.problems.append(("run", name, "the port modifies its input array"))


def tensors(loaded: Any, case: Case) -> Tensors:
    """Return all float64 tensors that a model computes for a case, in the format that the diagnosis uses."""
    stage = STAGES[case.stage]
    return stage.diagnosed(case, stage.tensors(case, loaded))
