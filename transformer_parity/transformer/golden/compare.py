"""Compare two directories of golden vectors.

Directory A defines the task: config, weights, inputs, and cases. The NumPy reference recomputes every case, and the
tensors in both directories are compared with the recomputed tensors. Errors in A are therefore also detected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from numpy import ndarray

from transformer_parity.engine.findings import AGREES, SKIPPED, Finding
from transformer_parity.engine.outputs import FILES, Outputs
from transformer_parity.engine.verdict import Coverage
from transformer_parity.transformer.cases.case import Case, in_stages
from transformer_parity.transformer.compare.comparator import Comparator
from transformer_parity.transformer.compare.reference import Reference
from transformer_parity.transformer.diagnose.files import investigate_files
from transformer_parity.transformer.diagnose.investigate import FailureReport
from transformer_parity.transformer.golden import vectors
from transformer_parity.transformer.golden.copies import copies_in_words, find_copies
from transformer_parity.transformer.golden.evidence import gaps
from transformer_parity.transformer.golden.vectors import DTYPES, GoldenDirectory
from transformer_parity.transformer.ports.protocol import Placements
from transformer_parity.transformer.stages.decode import TOKENS
from transformer_parity.transformer.stages.registry import STAGES
from transformer_spec.checks import some

Progress = Callable[[str], None]
COPIED = "the bytes are equal to A's, so they were copied, not computed"


def outputs(case: Case, dtype: str, directory: GoldenDirectory) -> Outputs:
    """Return a directory's tensors for a case, in the same form as the outputs of a port.

    Args:
        case: The case.
        dtype: Working dtype.
        directory: Golden vectors that include the case.
    """
    found = Outputs(case.name, dtype, {FILES: directory.tensors(case, dtype)})
    if (tokens := found.paths[FILES].get(TOKENS)) is not None and tokens.dtype.name != "int64":
        found.problems.append((FILES, TOKENS, f"dtype must be int64: got {tokens.dtype.name}"))
    for entry in directory.left_out:
        if entry.covers(case.name, dtype):
            found.absent += [(name, entry.reason) for name in entry.tensors]
    return found


@dataclass(frozen=True)
class DirectoryPair:
    """Two directories, each with golden vectors of the same model.

    Attributes:
        name: Name of the model; empty if there is only one model.
        truth: Directory A, which defines the task.
        candidate: Directory B, which is compared with the reference.
        stages: Names of the requested stages.
    """

    name: str
    truth: GoldenDirectory
    candidate: GoldenDirectory
    stages: Sequence[str] = tuple(STAGES)

    @property
    def backend(self) -> str:
        """The name of B in reports: its producer, prefixed with the model's name if there are multiple models."""
        return f"{self.name}/{self.candidate.producer}" if self.name else self.candidate.producer

    @cached_property
    def cases(self) -> list[Case]:
        """The cases of A in the requested stages."""
        return in_stages(self.truth.cases, self.stages)

    @cached_property
    def copied(self) -> dict[tuple[str, str], list[str]]:
        """A dict that maps each pair of case and dtype to the names of B's tensors that are copies of A's tensors."""
        return find_copies(self.truth, self.candidate, self.cases)

    @property
    def asked(self) -> Coverage:
        """The comparisons that a complete check requires: A's cases in the requested stages, in each dtype of B."""
        dtypes = self.candidate.dtypes
        planned = Counter((case.stage, d) for case in self.cases for d in dtypes if self.truth.holds(case, d))
        held = tuple(dict.fromkeys(case.stage for case in self.cases))
        unproven = [copies_in_words(self.copied)] if self.copied else []
        unproven += gaps(self.truth, self.candidate, self.cases)
        return Coverage(self.backend, held or tuple(self.stages), planned=planned, unproven=unproven)

    @property
    def not_tested(self) -> list[str]:
        """Descriptions of the dtypes that B lacks and of the stages that were not requested."""
        label = f"{self.backend}: "
        left = [f"{label}{dtype} (not in B)" for dtype in self.truth.dtypes if dtype not in self.candidate.dtypes]
        held = dict.fromkeys(case.stage for case in self.truth.cases)
        return left + [f"{label}{name} (not in --stage)" for name in held if name not in self.stages]


def read_pairs(truth: Path, candidate: Path, stages: Sequence[str] = tuple(STAGES)) -> list[DirectoryPair]:
    """Read the golden vectors of one or more models from two directories, which must contain the same models.

    Raises:
        OSError: If a directory contains no golden vectors, or if a file can't be read.
        ValueError: If a file doesn't match its manifest, or if the directories don't contain the same models.
    """
    ours, theirs = vectors.find(truth), vectors.find(candidate)
    if ours.keys() != theirs.keys():
        held = [", ".join(filter(None, found)) or "golden vectors of one model" for found in (ours, theirs)]
        raise ValueError(
            f"both directories must contain the same models: got {held[0]} in {truth} and {held[1]} in {candidate}"
        )
    return [DirectoryPair(name, vectors.read(ours[name]), vectors.read(theirs[name]), tuple(stages)) for name in ours]


def compare_directories(pair: DirectoryPair, progress: Progress = lambda text: None) -> Iterator[Finding]:
    """Compare every tensor of B with the tensor that the reference computes from A's weights and inputs.

    Args:
        pair: The two directories.
        progress: Callback that receives a description of the next comparison.

    Raises:
        ValueError: If the two directories don't have the same model and inputs.
    """
    truth, candidate = pair.truth, pair.candidate
    if problems := vectors.differences(truth, candidate):
        raise ValueError(f"{truth.path} and {candidate.path} must define the same task, but differ in {some(problems)}")
    reference = Reference(ports=2)
    for case in pair.cases:
        for dtype in DTYPES:
            progress(f"{dtype} {case.name}")
            for finding in _compare_case(pair, case, dtype, reference):
                yield replace(finding, case=f"{pair.name}/{finding.case}") if pair.name else finding
    known = {case.name for case in truth.cases}
    for case in candidate.cases:
        if case.name not in known and case.stage in pair.stages:
            for dtype in case.dtypes:
                author = case.author(pair.backend, dtype)
                if why := truth.why_not(case, dtype):
                    yield author.skipped(FILES, f"A omits it: {why}")
                else:
                    yield author.failed(FILES, "A has no such case")


def _compare_case(pair: DirectoryPair, case: Case, dtype: str, reference: Reference) -> Iterator[Finding]:
    truth, candidate = pair.truth, pair.candidate
    author = case.author(pair.backend, dtype)
    if not candidate.holds(case, dtype):
        if truth.holds(case, dtype) and dtype in candidate.dtypes:
            why = candidate.why_not(case, dtype)
            unsaid = "the case is missing; compute it, or declare it in left_out"
            yield author.skipped(FILES, why) if why else author.failed(FILES, unsaid)
        return
    setting = Placements((dtype,))
    if truth.holds(case, dtype):
        of_truth = Comparator("A", setting, reference).compare(case, outputs(case, dtype, truth))
        wrong = next((finding for finding in of_truth if finding.verdict not in (AGREES, SKIPPED)), None)
        if wrong is not None:
            what = wrong.detail or f"error {wrong.error:.1e}, tolerance {wrong.tolerance:.1e}"
            where = f"{wrong.tap}: " if wrong.tap else ""
            yield author.failed(FILES, f"A differs from the reference, so B was not compared: {where}{what}")
            return
    of_candidate = outputs(case, dtype, candidate)
    if copied := pair.copied.get((case.name, dtype)):
        computed = {name: array for name, array in of_candidate.paths[FILES].items() if name not in copied}
        if not computed:
            yield author.skipped(FILES, COPIED)
            return
        of_candidate.paths[FILES] = computed
        of_candidate.absent += [(name, COPIED) for name in copied]
    if truth.holds(case, dtype):  # B doesn't have to contain tensors that A omits
        of_candidate.absent += [(name, f"A omits it: {why}") for name, why in outputs(case, dtype, truth).absent]
    yield from Comparator(pair.backend, setting, reference).compare(case, of_candidate)


def investigate(pair: DirectoryPair, findings: Sequence[Finding]) -> list[FailureReport]:
    """Return reports on where differences start and on their causes, based only on the tensors in B."""
    candidate, prefix = pair.candidate, f"{pair.name}/" if pair.name else ""

    def shown(case: Case) -> dict[str, ndarray]:
        tensors = candidate.tensors(case, "float64") if candidate.holds(case, "float64") else {}
        return STAGES[case.stage].diagnosed(case, tensors)

    own = [replace(finding, case=finding.case.removeprefix(prefix)) for finding in findings]
    whole = [finding for finding in own if finding.tap and finding.tap != "names"]
    return list(investigate_files(whole, candidate.cases, shown, pair.backend))
