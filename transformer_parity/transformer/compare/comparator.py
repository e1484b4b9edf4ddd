"""The comparator, which compares the outputs of a case with the reference, tensor by tensor.

The outputs may come from a port in this process, a port in a different process, or a directory of golden vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from transformer_parity.engine.findings import AGREES, SKIPPED, Finding, Kept
from transformer_parity.engine.outputs import Outputs
from transformer_parity.engine.tensors import digest_problem
from transformer_parity.engine.tolerances import NotFiniteError
from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.compare.reference import Reference
from transformer_parity.transformer.compare.runner import run_cases
from transformer_parity.transformer.ports.protocol import AnyPort, Placements
from transformer_parity.transformer.stages.padding import Read
from transformer_parity.transformer.stages.registry import STAGES
from transformer_parity.transformer.stages.stage import PathTensors


def compare(
    cases: Iterable[Case],
    port: AnyPort,
    setting: Placements,
    progress: Callable[[str], None] = lambda text: None,
    kept: Kept | None = None,
) -> Iterator[Finding]:
    """Run every case on a port in every dtype, in this process, and yield the findings.

    Args:
        cases: The cases to run.
        port: The port.
        setting: Dtypes, device, and precision.
        progress: Callback that receives a description of the next run.
        kept: Dictionary that receives the tensors of each failing case.
    """
    by_name = {case.name: case for case in cases}
    placements = [setting.placement(dtype) for dtype in setting.dtypes]
    comparator = Comparator(port.name, setting, Reference())
    for outputs in run_cases(by_name.values(), port, placements, progress):
        yield from comparator.compare(by_name[outputs.case], outputs, kept)


class Comparator:
    """Compares one port's outputs with the reference's outputs.

    Args:
        backend: Name of the port.
        setting: Dtypes, device, and precision that the port was run with.
        reference: Object that computes the expected tensors.
    """

    def __init__(self, backend: str, setting: Placements, reference: Reference) -> None:
        self.backend = backend
        self.setting = setting
        self.reference = reference

    def compare(self, case: Case, outputs: Outputs, kept: Kept | None = None) -> Iterator[Finding]:
        """Yield the findings for one case in the order of computation.

        Args:
            case: The case that was run.
            outputs: The outputs of the port.
            kept: Dictionary that receives the tensors if a comparison fails.
        """
        for finding in self._findings(case, outputs):
            if kept is not None and finding.verdict not in (AGREES, SKIPPED):
                kept[case.name, outputs.dtype] = STAGES[case.stage].diagnosed(case, outputs.shown)
            yield finding

    def _findings(self, case: Case, outputs: Outputs) -> Iterator[Finding]:
        author = case.author(self.backend, outputs.dtype)
        if outputs.weights is not None:
            yield author.round_trip(digest_problem(outputs.weights, self.reference.digests(case, outputs.dtype)))
        yield from (author.skipped(path, why) for path, why in outputs.skipped)
        for path, name, problem in outputs.problems:
            yield author.compared(path, name, math.inf, 0.0, problem=problem)
        if outputs.paths:
            try:
                expected = self.reference.expected(case, self.setting.placement(outputs.dtype))
            except NotFiniteError as error:
                yield author.failed("run", str(error))
                return
            read = Read.of(case, expected.tensors)
            for path, shown in outputs.paths.items():
                outputs.paths[path] = tensors = read.combine(shown, expected.tensors)
                yield from STAGES[case.stage].compare(PathTensors(author, case, path, tensors, expected, outputs))
        yield from (author.failed(path, why) for path, why in outputs.failures)
