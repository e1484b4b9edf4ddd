"""Print failure reports and weight audits in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.text import Text

from transformer_parity.engine.findings import DIVERGES, IMPRECISE, ROUND_TRIP, Finding
from transformer_parity.engine.localization import Blame
from transformer_parity.engine.processes.provenance import described_elsewhere
from transformer_parity.engine.report.tables import print_line
from transformer_parity.engine.report.tree import print_blame
from transformer_parity.engine.system.errors import printable
from transformer_parity.transformer.cases.case import ACTIVATIONS, GRADIENTS, STEPS
from transformer_parity.transformer.diagnose.diagnosis import EXACT, LIKELY
from transformer_parity.transformer.diagnose.investigate import FailureReport
from transformer_parity.transformer.diagnose.reproduce import snippet
from transformer_parity.transformer.diagnose.weight_audit import WRONG, Fate, summary
from transformer_parity.transformer.stages.registry import STAGES

STYLES = {EXACT: "bold", LIKELY: "default"}
SHOWN = 12  # maximum number of wrong weights to print


def print_audit(console: Console, backend: str, fates: Sequence[Fate]) -> None:
    """Print how many weights of a port are used correctly, and list the weights that are not."""
    wrong = [fate for fate in fates if fate.verdict in WRONG]
    console.print(Text(f"{backend}, {summary(fates)}", "bold red" if wrong else "bold"))
    for fate in wrong[:SHOWN]:
        print_line(console, f"  {fate.verdict:10}", "bold red", f" {fate.name}: {fate.detail}")
    if len(wrong) > SHOWN:
        console.print(f"  ... and {len(wrong) - SHOWN} more")
    console.print()


def print_files_elsewhere(console: Console, backend: str, environment: Mapping[str, str]) -> None:
    """Print the modules of this project that were imported from a different location than the installed package."""
    for line in described_elsewhere(environment):
        print_line(console, "LOCAL COPY:", "", f" {backend}: {line}")


def print_failure_report(console: Console, report: FailureReport) -> None:
    """Print the block in which the difference starts, the diagnosis, and Python code that reruns this block."""
    if report.diagnosis is None:
        return
    console.print()
    if report.blame is not None:
        print_blame(console, report.blame)
    else:
        console.print(Text(f"{report.backend} {report.dtype} {report.case}", "bold"))
    if between := gap(report.blame):
        console.print(between)
    diagnosis = report.diagnosis
    sentence = Text(printable(diagnosis.sentence), STYLES.get(diagnosis.confidence, "default"))
    console.print(Text("DIAGNOSIS ", "bold") + sentence, soft_wrap=True)
    for statement in diagnosis.signatures:
        console.print(Text(f"          {printable(statement)}", "dim"), soft_wrap=True)
    if (directory := report.relative_directory) is not None:
        console.print(Text("To rerun only this block:", "bold"))
        console.print(Text(snippet(directory)), soft_wrap=True)  # lines are not wrapped, so that users can copy them


def print_undiagnosed(console: Console, findings: Sequence[Finding], reports: Sequence[FailureReport]) -> None:
    """Print the stages that also failed but are not diagnosed because the diagnosed stage affects them."""
    for backend in dict.fromkeys(report.backend for report in reports):
        about = [one for one in findings if one.backend == backend and one.verdict in (DIVERGES, IMPRECISE)]
        failed = {one.stage for one in about if one.tap != ROUND_TRIP}
        diagnosed = {report.stage for report in reports if report.backend == backend}
        first = next((stage for stage in (ACTIVATIONS, GRADIENTS) if stage in diagnosed), "")
        follow = {ACTIVATIONS: set(STAGES), GRADIENTS: {STEPS}}.get(first, set())
        if rest := [stage for stage in STAGES if stage in (failed & follow) - diagnosed]:
            what = first if first in failed else "exported weights"
            said = (
                f"{backend} also differs in {', '.join(rest)}. Fix its {what} first, then rerun to diagnose the rest."
            )
            console.print(f"\n{said}", soft_wrap=True, markup=False, highlight=False)


def gap(blame: Blame | None) -> str:
    """If the port reports too few taps to locate a difference precisely, return a hint to report more taps.

    Otherwise, return an empty string.
    """
    if blame is None or not blame.introduced or blame.stage != ACTIVATIONS or blame.replayed == "nothing":
        return ""
    names = [mark.name for mark in blame.marks]
    first = blame.introduced[0]
    parts = first.split(".")
    siblings = [name for name in names if name.split(".")[:4] == parts[:4]]
    if len(siblings) > 1 or len(parts) < 4 or first.endswith("_norm.output"):
        return ""
    before = names[names.index(first) - 1] if names.index(first) else "the input"
    return f"The difference starts between {before} and {first}. To narrow it down, report more taps in between."
