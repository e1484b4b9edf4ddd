"""Run a port on the cases that a set of golden vectors contains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from transformer_parity.engine.outputs import LOAD, Outputs
from transformer_parity.engine.system.machine import describe_machine
from transformer_parity.engine.tensors import Tensors
from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.cases.for_ports import port_cases
from transformer_parity.transformer.compare.runner import run_cases, why_left_out
from transformer_parity.transformer.golden.vectors import LeftOut
from transformer_parity.transformer.ports.package import PackagePort
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.ports.user import PluginPort
from transformer_parity.transformer.stages.decode import TOKENS
from transformer_parity.transformer.stages.registry import STAGES
from transformer_parity.transformer.stages.training_stage import WHOLE
from transformer_spec.config import DropoutRates, TransformerConfig
from transformer_spec.presets import IMPLEMENTATIONS

Progress = Callable[[str], None]
PRESETS = ("paper_base", "paper_learned", *IMPLEMENTATIONS)  # other presets differ only in sizes and dropout rates
NO_DROPOUT = DropoutRates(embedding=0.0, residual=0.0)


def words(entry: LeftOut) -> str:
    """Return one line that describes which tensors are omitted and why."""
    what = " ".join(part for part in (entry.dtype, entry.case) if part != "*") or "everything"
    if entry.tensors != ("*",):
        what += f", {entry.tensors[0] if len(entry.tensors) == 1 else f'{len(entry.tensors)} tensors'}"
    return f"{what}: {entry.reason}"


def golden_cases(config: TransformerConfig) -> list[Case]:
    """Return the cases to write. Their configs have no dropout, and searches have only source IDs as inputs.

    Golden vectors don't record the calls that precede a case. Therefore, a case with such calls is omitted if an
    earlier case has the same model and shapes. Otherwise, the case is included without these calls. The cases with the
    large vocabulary and the longest sentence are omitted because of their size. Gradient cases with large logits are
    omitted because a saturated softmax returns bitwise identical results in all programs.
    """
    config = config.replace(dropout=NO_DROPOUT)
    found: dict[object, Case] = {}
    for case in port_cases(config):
        inputs = {"source_ids": case.inputs["source_ids"]} if case.search is not None else case.inputs
        alike = (case.stage, case.model, case.search, *(array.shape for array in inputs.values()))
        if case.is_long or case.magnitude == "loud":
            continue
        if case.config == config and not (case.before and alike in found):
            key = alike if alike not in found else case.name
            found[key] = replace(case, inputs=inputs, fast=False, before=())
    return list(found.values())


def describe(port: PackagePort | PluginPort, dtypes: Sequence[str], device: str) -> dict[str, Any]:
    """Check that the port can run on this machine, and return a description of the port and the machine."""
    if isinstance(port, PluginPort):
        return {"name": port.name, "versions": port.describe(), "machine": describe_machine()}
    package = port.import_package()
    for dtype in dtypes:
        package.runtime.check_placement(dtype, device)
    return {"name": port.name, "device": device, "versions": package.describe(), "machine": describe_machine()}


def compute(
    port: PackagePort | PluginPort, cases: Sequence[Case], dtypes: Sequence[str], device: str, advance: Progress
) -> tuple[list[tuple[Case, dict[str, Tensors]]], list[LeftOut]]:
    """Run all cases. Return the tensors of each case, keyed by dtype, and an entry for each tensor or case to omit.

    Raises:
        RuntimeError: If the port raises an exception in a case or modifies the inputs of the case.
        TypeError: If the tokens of a search aren't integers.
    """
    known = {case.name: case for case in cases}
    left_out: list[LeftOut] = []
    computed: dict[str, dict[str, Tensors]] = {case.name: {} for case in cases}
    for outputs in run_cases(cases, port, [Placement(dtype, device) for dtype in dtypes], advance):
        case = known[outputs.case]
        if unable := [why for _, why in outputs.failures if why.startswith(NotImplementedError.__name__)]:
            left_out.append(LeftOut(case.name, unable[0], dtype=outputs.dtype))
            continue
        if tensors := _tensors(port.name, case, outputs):
            computed[case.name][outputs.dtype] = tensors
            missing = STAGES[case.stage].left_out(case, tensors, outputs.hidden)
            left_out += [LeftOut(case.name, why, names) for names, why in missing]
        dtype = "*" if why_left_out(case, port) else outputs.dtype
        left_out += [LeftOut(case.name, why, dtype=dtype) for path, why in outputs.skipped if path != LOAD]
    return [(case, computed[case.name]) for case in cases if computed[case.name]], list(dict.fromkeys(left_out))


def _tensors(port: str, case: Case, outputs: Outputs) -> Tensors:
    """Return the tensors that the files store for a case, in the order in which they are computed."""
    problems = [why for _, why in outputs.failures] + [f"{name}: {why}" for _, name, why in outputs.problems]
    if problems:
        raise RuntimeError(f"{port}, {outputs.dtype} {case.name}: {problems[0]}")
    tensors = outputs.paths.get(STAGES[case.stage].path, {})
    if TOKENS in tensors:
        if tensors[TOKENS].dtype.kind not in "iu":
            raise TypeError(f"{port}: tokens must be integers: got {tensors[TOKENS].dtype}")
        tensors = {**tensors, TOKENS: tensors[TOKENS].astype(np.int64)}
    # Don't store the concatenation of all gradients, because the individual gradients contain the same values.
    return {name: value for name, value in tensors.items() if name != WHOLE}
