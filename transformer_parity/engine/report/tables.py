"""Print findings as tables in a terminal, and the verdict as the last line."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from transformer_parity.engine.findings import AGREES, DIVERGES, FAILED, IMPRECISE, SKIPPED, Finding
from transformer_parity.engine.outputs import CACHED, FAST, OUTPUT
from transformer_parity.engine.system.errors import printable
from transformer_parity.engine.verdict import WORDS, Verdict, worst

STYLES = {SKIPPED: "dim", AGREES: "green", IMPRECISE: "yellow", DIVERGES: "bold red", FAILED: "bold magenta"}


class Compiled(Protocol):
    """The CPU time of one implementation."""

    @property
    def compiling(self) -> float:
        """The seconds spent on compilation."""


def print_line(console: Console, word: str, style: str, said: str) -> None:
    """Print a label, followed by text from a port or a file, on a single line.

    Line breaks in the text are replaced with spaces, so that a port can't print lines that look like lines of the
    report.
    """
    console.print(Text(word, style) + Text(printable(said), "default"), soft_wrap=True)


def print_summary(
    console: Console, findings: Sequence[Finding], backends: Sequence[str], titles: Mapping[str, str] | None = None
) -> None:
    """Print one table per dtype. For each component and backend, show the error that is closest to its tolerance.

    Args:
        console: The console to print to.
        findings: All findings.
        backends: The backends, one per column.
        titles: The table titles, keyed by dtype; None to use the name of the dtype.
    """
    for dtype in dict.fromkeys(finding.dtype for finding in findings if finding.dtype):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("component", no_wrap=True)
        for backend in backends:
            table.add_column(backend, no_wrap=True, justify="right")
        table.add_column("closest to its tolerance", overflow="fold")
        of_dtype = [finding for finding in findings if finding.dtype == dtype]
        for component in dict.fromkeys(finding.component for finding in of_dtype):
            row = [finding for finding in of_dtype if finding.component == component]
            cells = [cell([finding for finding in row if finding.backend == backend]) for backend in backends]
            largest = worst(row)
            whose = f"{largest.backend}: " if len(backends) > 1 else ""
            table.add_row(Text(component), *cells, Text(f"{whose}{_place(largest)}"))
        print_table(console, (titles or {}).get(dtype, dtype), table)


def print_problems(console: Console, findings: Sequence[Finding], verdict: Verdict, limit: int = 8) -> None:
    """Print the first failing tap of each case. Cases and dtypes in which the same tap fails first share a line."""
    first: dict[tuple[str, str, str], Finding] = {}
    for finding in findings:
        if finding.verdict not in (AGREES, SKIPPED):
            first.setdefault((finding.backend, finding.dtype, finding.case), finding)
    alike: dict[tuple[str, ...], list[Finding]] = {}
    for finding in first.values():
        what = (finding.detail,) if finding.verdict == FAILED else (finding.component, finding.tap)
        alike.setdefault((finding.backend, finding.verdict, *what), []).append(finding)
    for finding, *others in list(alike.values())[:limit]:
        detail = finding.words
        where = " ".join(part for part in (finding.backend, finding.dtype, _place(finding)) if part)
        also = len({other.case for other in others} - {finding.case})
        detail += f" (and in {also} other case{'s' * (also > 1)})" if also else ""
        print_line(console, f"{WORDS[finding.verdict]:9}", STYLES[finding.verdict], f" {where}: {detail}")
    if verdict.doubt:
        console.print(verdict.doubt)
    if len(alike) > limit:
        console.print(f"... and {len(alike) - limit} more; use --json FILE to get all of them.")


def print_near_ties(console: Console, findings: Sequence[Finding]) -> None:
    """Print the near-ties, that is, searches whose result differs from the reference only because of rounding."""
    for finding in filter(lambda finding: finding.is_near_tie, findings):
        print_line(console, "NEAR-TIE ", "", f" {finding.backend} {finding.dtype} {finding.case}: {finding.detail}")


def print_skips(console: Console, findings: Sequence[Finding]) -> None:
    """Print the comparisons that were skipped because a port doesn't support them, one line per reason."""
    why: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        if finding.verdict == SKIPPED:
            why.setdefault((finding.backend, finding.detail), []).append(finding)
    for (backend, detail), group in why.items():
        cases = list(dict.fromkeys(finding.case for finding in group))
        where = ", ".join(cases) if len(cases) <= 3 else f"{cases[0]}, {cases[1]}, and {len(cases) - 2} more cases"
        said = detail if detail.startswith(f"{backend} ") else f"{backend}: {detail}"
        print_line(console, "SKIPPED  ", STYLES[SKIPPED], f" {said} ({where})")


def print_coverage(console: Console, verdict: Verdict, not_tested: Iterable[str]) -> None:
    """Print a line for each requested comparison that was not made, and for each entry of ``not_tested``."""
    for what in verdict.missing:
        print_line(console, "MISSING  ", STYLES[FAILED], f" {what}")
    for what in not_tested:
        print_line(console, "NOT TESTED:", "", f" {what}")


def verdict_line(
    verdict: Verdict,
    findings: Sequence[Finding],
    backends: Sequence[str],
    seconds: float,
    spent: Mapping[str, Compiled] | None = None,
    trusted: str = "",
) -> Text:
    """Return the last line of a report, which shows the verdict, the number of comparisons, and the time.

    Args:
        verdict: The verdict.
        findings: All findings.
        backends: The names of the ports.
        seconds: The duration of the comparison.
        spent: The CPU time of each port.
        trusted: The name of the implementation that the ports were compared with; empty for the NumPy reference.
    """
    skipped = [finding for finding in findings if finding.verdict == SKIPPED]
    cases = len({finding.case for finding in findings if finding.case})
    counted = ", ".join(
        f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"
        for number, word in ((len(backends), "port"), (cases, "case"), (len(findings) - len(skipped), "comparison"))
    )
    counted += f", {len(skipped)} skipped" if skipped else ""
    if verdict.verdict == AGREES:
        finding = worst(findings)
        counted += f"; the largest error is {_percent(finding.ratio)} of its tolerance ({finding.backend}"
        counted += f" {finding.dtype} {_place(finding)})"
        if near_ties := sum(finding.is_near_tie for finding in findings):
            counted += f"; {near_ties} search{'es' * (near_ties > 1)} with near-ties"
    else:
        failing = [finding for finding in findings if finding.verdict not in (AGREES, SKIPPED)]
        counted += f"; {len(failing):,} failed" if failing else ""
        counted += f"; {len(verdict.missing)} requested but not compared" if verdict.missing else ""
    compiling = [f"{name} {port.compiling:.0f} s" for name, port in (spent or {}).items() if port.compiling]
    counted += f"; {seconds:.0f} s" + (f" (compiling: {', '.join(compiling)})" if compiling else "")
    said = f"{verdict.word} with {trusted}" if trusted else verdict.word
    return Text(said, STYLES[verdict.verdict]) + Text(f"  {counted}.", "default")


def print_table(console: Console, title: str, table: Table) -> None:
    """Print a table below its title."""
    console.print(Text(title, "bold"))
    console.print(table)
    console.print()


def cell(findings: Sequence[Finding], percentage: bool = True) -> Text:
    """Return a table cell with the error that is closest to its tolerance.

    Args:
        findings: The findings of one component and backend.
        percentage: Whether to include the percentage of the tolerance and the verdict.
    """
    if not findings:
        return Text("-", "dim")
    finding = worst(findings)
    if finding.verdict in (FAILED, SKIPPED) or math.isinf(finding.error):
        return Text(WORDS[finding.verdict], STYLES[finding.verdict])
    error = "exact" if finding.error == 0.0 else f"{finding.error:.1e}"
    if percentage:
        error += f" {_percent(finding.ratio):>5} {WORDS[finding.verdict]}"
    return Text(error, STYLES[finding.verdict])


def _percent(ratio: float) -> str:
    percent = 100.0 * ratio
    if percent == 0.0 or percent >= 10.0:
        return f"{percent:.0f}%" if percent < 1000.0 else ">999%"
    return f"{percent:.1f}%" if percent >= 0.1 else "<0.1%"


def _place(finding: Finding) -> str:
    way = {FAST: " without taps", CACHED: " with a cache"}.get(finding.path, "")
    return f"{finding.case} {finding.tap}{way if finding.tap == OUTPUT or finding.path == CACHED else ''}".strip()
