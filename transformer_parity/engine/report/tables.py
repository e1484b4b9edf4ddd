"""Findings as tables in a terminal, and the line that a comparison ends with."""

from __future__ import annotations

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
    """The time that one implementation took."""

    @property
    def compiling(self) -> float:
        """Seconds that went into compiling."""


def print_line(console: Console, word: str, style: str, said: str) -> None:
    """Print a word and a message of a port or a file: one line, however long, so that it can forge no other."""
    console.print(Text(word, style) + Text(printable(said), "default"), soft_wrap=True)


def print_summary(
    console: Console, findings: Sequence[Finding], backends: Sequence[str], titles: Mapping[str, str] | None = None
) -> None:
    """Print one table per dtype: by component and backend, the error that uses most of its tolerance, and how much.

    Args:
        console: Where to print.
        findings: Every comparison.
        backends: The columns.
        titles: The title of the table of each dtype; by default the name of the dtype.
    """
    for dtype in dict.fromkeys(finding.dtype for finding in findings if finding.dtype):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("component", no_wrap=True)
        for backend in backends:
            table.add_column(backend, no_wrap=True, justify="right")
        table.add_column("largest share of its tolerance", overflow="fold")
        of_dtype = [finding for finding in findings if finding.dtype == dtype]
        for component in dict.fromkeys(finding.component for finding in of_dtype):
            row = [finding for finding in of_dtype if finding.component == component]
            cells = [cell([finding for finding in row if finding.backend == backend]) for backend in backends]
            largest = worst(row)
            whose = f"{largest.backend}: " if len(backends) > 1 else ""
            table.add_row(Text(component), *cells, Text(f"{whose}{_place(largest)}"))
        print_table(console, (titles or {}).get(dtype, dtype), table)


def print_problems(console: Console, findings: Sequence[Finding], verdict: Verdict, limit: int = 8) -> None:
    """Print the first tap that failed in each case, once for all cases in which it is the same tap."""
    first: dict[tuple[str, str, str], Finding] = {}
    for finding in findings:
        if finding.verdict not in (AGREES, SKIPPED):
            first.setdefault((finding.backend, finding.dtype, finding.case), finding)
    alike: dict[tuple[str, ...], list[Finding]] = {}
    for finding in first.values():
        what = (finding.detail,) if finding.verdict == FAILED else (finding.dtype, finding.component, finding.tap)
        alike.setdefault((finding.backend, *what), []).append(finding)
    for finding, *others in list(alike.values())[:limit]:
        detail = finding.words
        where = " ".join(part for part in (finding.backend, finding.dtype, _place(finding)) if part)
        detail += f" (and in {len(others)} other case{'s' * (len(others) > 1)})" if others else ""
        print_line(console, f"{WORDS[finding.verdict]:9}", STYLES[finding.verdict], f" {where}: {detail}")
    if verdict.doubt:
        console.print(verdict.doubt)
    if len(alike) > limit:
        console.print(f"... and {len(alike) - limit} more; --json holds them all.")


def print_near_ties(console: Console, findings: Sequence[Finding]) -> None:
    """Print where a search returned something else than the reference, within rounding: no failure."""
    for finding in filter(lambda finding: finding.is_near_tie, findings):
        print_line(console, "NEAR-TIE ", "", f" {finding.backend} {finding.dtype} {finding.case}: {finding.detail}")


def print_skips(console: Console, findings: Sequence[Finding]) -> None:
    """Print what was not compared because a port does not offer it: once, with some of the cases."""
    why: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        if finding.verdict == SKIPPED:
            why.setdefault((finding.backend, finding.detail), []).append(finding)
    for (backend, detail), group in why.items():
        cases = list(dict.fromkeys(finding.case for finding in group))
        where = ", ".join(cases) if len(cases) <= 3 else f"{cases[0]}, {cases[1]} and {len(cases) - 2} more cases"
        said = detail if detail.startswith(f"{backend} ") else f"{backend}: {detail}"
        print_line(console, "SKIPPED  ", STYLES[SKIPPED], f" {said} ({where})")


def print_coverage(console: Console, verdict: Verdict, not_tested: Iterable[str]) -> None:
    """Print what was asked for and not compared, and what was not asked for."""
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
) -> Text:
    """Return the last line: one word, then what it stands on, and how much of the time was spent compiling."""
    skipped = [finding for finding in findings if finding.verdict == SKIPPED]
    cases = len({finding.case for finding in findings if finding.case})
    counted = ", ".join(
        f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"
        for number, word in ((len(backends), "port"), (cases, "case"), (len(findings) - len(skipped), "comparison"))
    )
    counted += f", {len(skipped)} skipped" if skipped else ""
    if verdict.verdict == AGREES:
        finding = worst(findings)
        counted += f"; the largest uses {_percent(finding.share)} of its tolerance ({finding.backend} {finding.dtype}"
        counted += f" {_place(finding)})"
        if near_ties := sum(finding.is_near_tie for finding in findings):
            counted += f"; {near_ties} searches with near-ties"
    else:
        failing = [finding for finding in findings if finding.verdict not in (AGREES, SKIPPED)]
        counted += f"; {len(failing):,} failed" if failing else ""
        counted += f"; {len(verdict.missing)} asked for and not compared" if verdict.missing else ""
    compiling = [f"{name} {port.compiling:.0f} s" for name, port in (spent or {}).items() if port.compiling]
    counted += f"; {seconds:.0f} s" + (f" (compiling: {', '.join(compiling)})" if compiling else "")
    return Text(verdict.word, STYLES[verdict.verdict]) + Text(f"  {counted}.", "default")


def print_table(console: Console, title: str, table: Table) -> None:
    """Print a table below its title."""
    console.print(Text(title, "bold"))
    console.print(table)
    console.print()


def cell(findings: Sequence[Finding], share: bool = True) -> Text:
    """Return the error that uses most of its tolerance, and unless told otherwise how much."""
    if not findings:
        return Text("-", "dim")
    finding = worst(findings)
    if finding.verdict in (FAILED, SKIPPED):
        return Text(WORDS[finding.verdict], STYLES[finding.verdict])
    error = "exact" if finding.error == 0.0 else f"{finding.error:.1e}"
    if share:
        error += f" {_percent(finding.share):>6} {WORDS[finding.verdict]}"
    return Text(error, STYLES[finding.verdict])


def _percent(share: float) -> str:
    percent = 100.0 * share
    if percent == 0.0 or percent >= 10.0:
        return f"{percent:.0f} %" if percent < 1000.0 else ">999 %"
    return f"{percent:.1f} %" if percent >= 0.1 else "<0.1 %"


def _place(finding: Finding) -> str:
    way = {FAST: " without taps", CACHED: " with a cache"}.get(finding.path, "")
    return f"{finding.case} {finding.tap}{way if finding.tap == OUTPUT or finding.path == CACHED else ''}".strip()
