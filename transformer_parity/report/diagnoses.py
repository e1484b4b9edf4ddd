"""What an inquiry found, and what became of the weights: printed for people, and as rows for machines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.syntax import Syntax
from rich.text import Text

from transformer_parity.cases.case import ACTIVATIONS
from transformer_parity.diagnose.diagnosis import EXACT, LIKELY
from transformer_parity.diagnose.investigate import Inquiry
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


def print_inquiry(console: Console, inquiry: Inquiry) -> None:
    """Print which block is guilty, what the port does, and how to run the block alone."""
    if inquiry.diagnosis is None:
        return
    console.print()
    if inquiry.blame is not None:
        print_blame(console, inquiry.blame)
    else:
        console.print(Text(f"{inquiry.backend} {inquiry.dtype} {inquiry.case}", "bold"))
    if inquiry.blame is not None and (between := gap(inquiry)):
        console.print(between)
    diagnosis = inquiry.diagnosis
    console.print(Text("DIAGNOSIS ", "bold") + Text(diagnosis.sentence, STYLES.get(diagnosis.confidence, "default")))
    said = diagnosis.sentence
    for words in diagnosis.signatures:
        if words not in said:
            console.print(Text(f"          {words}", "dim"))
    if inquiry.folder is not None:
        console.print(Text("To run the guilty block alone:", "bold"))
        console.print(Syntax(snippet(_relative(inquiry.folder)), "python", background_color="default"))


def gap(inquiry: Inquiry) -> str:
    """Say between which two places a mistake is, where the port shows so few taps that it may be in a hidden one."""
    blame = inquiry.blame
    if blame is None or not blame.introduced or blame.rung != ACTIVATIONS or blame.replayed == "nothing":
        return ""
    names = [mark.name for mark in blame.marks]
    guilty = blame.introduced[0]
    parts = guilty.split(".")
    siblings = [name for name in names if name.split(".")[:4] == parts[:4]]
    if len(siblings) > 1 or len(parts) < 4 or guilty.endswith("_norm.output"):
        return ""
    before = names[names.index(guilty) - 1] if names.index(guilty) else "the input"
    return f"It lies between {before} and {guilty}: show more taps in between to narrow it down."


def to_row(inquiry: Inquiry) -> dict[str, Any]:
    """Return the diagnosis of an inquiry as plain values."""
    found = inquiry.diagnosis.to_dict() if inquiry.diagnosis else {}
    return {
        "backend": inquiry.backend,
        "dtype": inquiry.dtype,
        "case": inquiry.case,
        "rung": inquiry.rung,
        "folder": None if inquiry.folder is None else str(_relative(inquiry.folder)),
        **found,
    }


def _relative(folder: Path) -> Path:
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
