"""Run a port on the cases of a folder of golden vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from reference_numpy.config import IMPLEMENTATIONS, DropoutRates, TransformerConfig
from reference_numpy.names import tap_shapes
from transformer_parity.cases.case import ACTIVATIONS, DECODE, GRADIENTS, STEPS, Case
from transformer_parity.cases.standard import model_cases
from transformer_parity.compare.outputs import SCORES, Tensors, run
from transformer_parity.golden.format import LeftOut
from transformer_parity.ports.package import PackagePort
from transformer_parity.ports.protocol import LoadedPort, MissingAbilityError, Placement
from transformer_parity.ports.user import PluginPort
from transformer_parity.system.machine import describe_machine

PRESETS = ("paper_base", "paper_learned", *IMPLEMENTATIONS)  # the others differ from these in sizes and rates
NO_DROPOUT = DropoutRates(embedding=0.0, residual=0.0)
OPTIONAL = {  # what a port need not show
    GRADIENTS: {"at *": "gradients at taps are not shown"},
    STEPS: {"* norm of the gradient": "norms of the gradient are not shown", "* moment *": "moments are not shown"},
}


def words(entry: LeftOut) -> str:
    what = " ".join(part for part in (entry.dtype, entry.case) if part != "*") or "everything"
    if entry.tensors != ("*",):
        what += f", {entry.tensors[0] if len(entry.tensors) == 1 else f'{len(entry.tensors)} tensors'}"
    return f"{what}: {entry.reason}"


def golden_cases(config: TransformerConfig) -> list[Case]:
    """Return the cases, without dropout in their config, and with nothing among the inputs that has no part in it."""
    cases = model_cases(config.replace(dropout=NO_DROPOUT))
    return [
        replace(case, inputs={"source_ids": case.inputs["source_ids"]}) if case.stage == DECODE else case
        for case in cases
    ]


def describe(port: PackagePort | PluginPort, dtypes: Sequence[str], device: str) -> dict[str, Any]:
    """Return who computes, after making sure that it can do so here."""
    if isinstance(port, PluginPort):
        return {"name": port.name, "versions": port.describe(), "machine": describe_machine()}
    package = port.import_package()
    for dtype in dtypes:
        package.runtime.check_placement(dtype, device)
    return {"name": port.name, "device": device, "versions": package.describe(), "machine": describe_machine()}


def compute(
    port: PackagePort | PluginPort,
    cases: Sequence[Case],
    dtypes: Sequence[str],
    device: str,
    advance: Callable[[str], None],
) -> tuple[list[tuple[Case, dict[str, Tensors]]], list[LeftOut]]:
    """Run all cases; return the tensors of each by dtype, and what the port does not offer."""
    weights = cases[0].load_weights()
    without = port.kind.left_out if isinstance(port, PluginPort) else {}
    left_out = [LeftOut(case.name, without[case.name]) for case in cases if case.name in without]
    computed: dict[str, dict[str, Tensors]] = {case.name: {} for case in cases}
    for dtype in dtypes:
        loaded: LoadedPort | None = None
        for case in cases:
            if dtype not in case.dtypes or case.name in without:
                continue
            advance(f"{dtype} {case.name}")
            try:
                if loaded is None or case.stage == STEPS:  # which have a model of their own: training changes it
                    loaded = port.load(case.config, weights, Placement(dtype, device))
                tensors = run(case, loaded, dtype)
                left_out += [LeftOut(case.name, why, names) for names, why in _hidden(case, loaded, tensors)]
                computed[case.name][dtype] = tensors
            except MissingAbilityError as error:
                left_out.append(LeftOut(case.name, str(error), dtype=dtype))
            except Exception as error:
                raise RuntimeError(f"{port.name}, {dtype} {case.name}: {type(error).__name__}: {error}") from error
            if case.stage == STEPS:
                loaded = None
    return [(case, computed[case.name]) for case in cases if computed[case.name]], list(dict.fromkeys(left_out))


def _hidden(case: Case, loaded: LoadedPort, tensors: Tensors) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the names of what a port does not promise to show, and why."""
    unseen = [tap for tap in tap_shapes(case.config, 1, 1, 1) if not loaded.shows(tap)]
    if case.stage == ACTIVATIONS and unseen:
        yield tuple(unseen), "these taps are not shown"
    if case.stage == GRADIENTS and unseen and any(name.startswith("at ") for name in tensors):
        yield tuple(f"at {tap}" for tap in unseen), "gradients at these taps are not shown"
    if case.stage == DECODE and SCORES not in tensors:
        yield (SCORES,), "scores are not shown"
    for pattern, why in OPTIONAL.get(case.stage, {}).items():
        if not any(fnmatchcase(name, pattern) for name in tensors):
            yield (pattern,), why
