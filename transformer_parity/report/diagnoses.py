"""What an failure_report found, and what became of the weights: printed for people, and as rows for machines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.syntax import Syntax
from rich.text import Text

from transformer_parity.cases.case import ACTIVATIONS
from transformer_parity.diagnose.diagnosis import EXACT, LIKELY
from transformer_parity.diagnose.investigate import FailureReport
from transformer_parity.diagnose.reproduce import snippet
from transformer_parity.diagnose.weight_audit import WRONG, Fate, summary
from transformer_parity.report.tree import print_blame

STYLES = {EXACT: "bold", LIKELY: "default"}
SHOWN = 12  # weights


def print_audit(console: Console, backend: str, fates: Sequence[Fate]) -> None:
    """Print what became of the weights of a port, before any number."""
    wrong = [fate for fate in fates if fate.verdict in WRONG]
    console.print(Text(f"{backend}, {summary(fates)}", "bold red" if wrong else "bold"))
    for fate in wrong[:SHOWN]:
        console.print(Text(f"  {fate.verdict:10}", "bold red") + Text(f" {fate.name}: {fate.detail}", "default"))
    if len(wrong) > SHOWN:
        console.print(f"  ... and {len(wrong) - SHOWN} more")
    console.print()


def print_failure_report(console: Console, failure_report: FailureReport) -> None:
    """Print which block is guilty, what the port does, and how to run the block alone."""
    if failure_report.diagnosis is None:
        return
    console.print()
    if failure_report.blame is not None:
        print_blame(console, failure_report.blame)
    else:
        console.print(Text(f"{failure_report.backend} {failure_report.dtype} {failure_report.case}", "bold"))
    if failure_report.blame is not None and (between := gap(failure_report)):
        console.print(between)
    diagnosis = failure_report.diagnosis
    console.print(Text("DIAGNOSIS ", "bold") + Text(diagnosis.sentence, STYLES.get(diagnosis.confidence, "default")))
    said = diagnosis.sentence
    for words in diagnosis.signatures:
        if words not in said:
            console.print(Text(f"          {words}", "dim"))
    if failure_report.folder is not None:
        console.print(Text("To run the guilty block alone:", "bold"))
        console.print(Syntax(snippet(_relative(failure_report.folder)), "python", background_color="default"))


def gap(failure_report: FailureReport) -> str:
    """Say between which two places a mistake is, where the port shows so few taps that it may be in a hidden one."""
    blame = failure_report.blame
    if blame is None or not blame.introduced or blame.stage != ACTIVATIONS or blame.replayed == "nothing":
        return ""
    names = [mark.name for mark in blame.marks]
    guilty = blame.introduced[0]
    parts = guilty.split(".")
    siblings = [name for name in names if name.split(".")[:4] == parts[:4]]
    if len(siblings) > 1 or len(parts) < 4 or guilty.endswith("_norm.output"):
        return ""
    before = names[names.index(guilty) - 1] if names.index(guilty) else "the input"
    return f"It lies between {before} and {guilty}: show more taps in between to narrow it down."


def to_row(failure_report: FailureReport) -> dict[str, Any]:
    """Return the diagnosis of an failure_report as plain values."""
    found = failure_report.diagnosis.to_dict() if failure_report.diagnosis else {}
    return {
        "backend": failure_report.backend,
        "dtype": failure_report.dtype,
        "case": failure_report.case,
        "stage": failure_report.stage,
        "folder": None if failure_report.folder is None else str(_relative(failure_report.folder)),
        **found,
    }


def _relative(folder: Path) -> Path:
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
