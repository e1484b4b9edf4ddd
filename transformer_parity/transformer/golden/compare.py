"""Compare two folders of golden vectors.

A defines what is computed: config, weights, inputs and cases. The NumPy reference computes it again, and both folders
are compared with that: A is not taken on trust.
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
from transformer_parity.transformer.golden.vectors import DTYPES, GoldenFolder
from transformer_parity.transformer.ports.protocol import Placements
from transformer_parity.transformer.stages.decode import TOKENS
from transformer_parity.transformer.stages.registry import STAGES
from transformer_spec.checks import some

Progress = Callable[[str], None]
COPIED = "the bytes are A's own: nothing was computed"


def outputs(case: Case, dtype: str, folder: GoldenFolder) -> Outputs:
    """Return what a folder holds of a case, as the outputs of a port that runs.

    Args:
        case: The case.
        dtype: The working dtype.
        folder: Golden vectors that hold it.
    """
    found = Outputs(case.name, dtype, {FILES: folder.tensors(case, dtype)})
    if (tokens := found.paths[FILES].get(TOKENS)) is not None and tokens.dtype.name != "int64":
        found.problems.append((FILES, TOKENS, f"dtype must be int64: got {tokens.dtype.name}"))
    for entry in folder.left_out:
        if entry.covers(case.name, dtype):
            found.absent += [(name, entry.reason) for name in entry.tensors]
    return found


@dataclass(frozen=True)
class FolderPair:
    """Two folders about one model.

    Attributes:
        name: The name of the model, empty where there is only one.
        truth: A, which defines what is computed.
        candidate: B, which is compared.
        stages: What was asked for.
    """

    name: str
    truth: GoldenFolder
    candidate: GoldenFolder
    stages: Sequence[str] = tuple(STAGES)

    @property
    def backend(self) -> str:
        """The name under which B is listed: its producer, and the model where there are several."""
        return f"{self.name}/{self.candidate.producer}" if self.name else self.candidate.producer

    @cached_property
    def cases(self) -> list[Case]:
        """The cases of A in the stages that were asked for."""
        return in_stages(self.truth.cases, self.stages)

    @cached_property
    def copied(self) -> dict[tuple[str, str], list[str]]:
        """The names of the tensors of B that are copies of A's, by case and dtype."""
        return find_copies(self.truth, self.candidate, self.cases)

    @property
    def asked(self) -> Coverage:
        """What has to be compared: each stage of A, in the dtypes of B."""
        dtypes = self.candidate.dtypes
        planned = Counter((case.stage, d) for case in self.cases for d in dtypes if self.truth.holds(case, d))
        held = tuple(dict.fromkeys(case.stage for case in self.cases))
        unproven = [copies_in_words(self.copied)] if self.copied else []
        unproven += gaps(self.truth, self.candidate, self.cases)
        return Coverage(self.backend, held or tuple(self.stages), planned=planned, unproven=unproven)

    @property
    def not_tested(self) -> list[str]:
        """The dtypes that A holds and B does not, and the stages that were not asked for."""
        label = f"{self.backend}: "
        left = [f"{label}{dtype} (B holds none)" for dtype in self.truth.dtypes if dtype not in self.candidate.dtypes]
        held = dict.fromkeys(case.stage for case in self.truth.cases)
        return left + [f"{label}{name} (left out of --stage)" for name in held if name not in self.stages]


def read_pairs(truth: Path, candidate: Path, stages: Sequence[str] = tuple(STAGES)) -> list[FolderPair]:
    """Read both sides, one folder each or several of the same names.

    Raises:
        OSError: There are no golden vectors, or a file cannot be read.
        ValueError: A file is not as its manifest describes it, or the two sides are not about the same models.
    """
    ours, theirs = vectors.find(truth), vectors.find(candidate)
    if ours.keys() != theirs.keys():
        held = [", ".join(filter(None, found)) or "golden vectors of one model" for found in (ours, theirs)]
        raise ValueError(f"both must hold the same models: {truth} holds {held[0]}, and {candidate} holds {held[1]}")
    return [FolderPair(name, vectors.read(ours[name]), vectors.read(theirs[name]), tuple(stages)) for name in ours]


def compare_folders(pair: FolderPair, progress: Progress = lambda text: None) -> Iterator[Finding]:
    """Compare every tensor of B with what the reference computes from A's weights and inputs.

    Args:
        pair: The two folders.
        progress: Told what is about to be computed.

    Raises:
        ValueError: They are not about the same model and inputs.
    """
    truth, candidate = pair.truth, pair.candidate
    if problems := vectors.differences(truth, candidate):
        raise ValueError(f"{truth.path} and {candidate.path} are not about the same: {some(problems)}")
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
                    yield author.skipped(FILES, f"A leaves it out: {why}")
                else:
                    yield author.failed(FILES, "there is no such case in A")


def _compare_case(pair: FolderPair, case: Case, dtype: str, reference: Reference) -> Iterator[Finding]:
    truth, candidate = pair.truth, pair.candidate
    author = case.author(pair.backend, dtype)
    if not candidate.holds(case, dtype):
        if truth.holds(case, dtype) and dtype in candidate.dtypes:
            why = candidate.why_not(case, dtype)
            unsaid = "the case is missing, and is not declared as left out"
            yield author.skipped(FILES, why) if why else author.failed(FILES, unsaid)
        return
    setting = Placements((dtype,))
    if truth.holds(case, dtype):
        of_truth = Comparator("A", setting, reference).compare(case, outputs(case, dtype, truth))
        wrong = next((finding for finding in of_truth if finding.verdict not in (AGREES, SKIPPED)), None)
        if wrong is not None:
            what = wrong.detail or f"error {wrong.error:.1e}, tolerance {wrong.tolerance:.1e}"
            where = f"{wrong.tap}: " if wrong.tap else ""
            yield author.failed(FILES, f"A is not what the reference computes: {where}{what}")
            return
    of_candidate = outputs(case, dtype, candidate)
    if copied := pair.copied.get((case.name, dtype)):
        computed = {name: array for name, array in of_candidate.paths[FILES].items() if name not in copied}
        if not computed:
            yield author.skipped(FILES, COPIED)
            return
        of_candidate.paths[FILES] = computed
        of_candidate.absent += [(name, COPIED) for name in copied]
    if truth.holds(case, dtype):  # what A leaves out need not be in B
        of_candidate.absent += [(name, f"A leaves it out: {why}") for name, why in outputs(case, dtype, truth).absent]
    yield from Comparator(pair.backend, setting, reference).compare(case, of_candidate)


def investigate(pair: FolderPair, findings: Sequence[Finding]) -> list[FailureReport]:
    """Return where a difference was introduced and what explains it, by the tensors of B alone."""
    candidate, prefix = pair.candidate, f"{pair.name}/" if pair.name else ""

    def shown(case: Case) -> dict[str, ndarray]:
        tensors = candidate.tensors(case, "float64") if candidate.holds(case, "float64") else {}
        return STAGES[case.stage].diagnosed(case, tensors)

    own = [replace(finding, case=finding.case.removeprefix(prefix)) for finding in findings]
    whole = [finding for finding in own if finding.tap and finding.tap != "names"]
    return list(investigate_files(whole, candidate.cases, shown, pair.backend))
