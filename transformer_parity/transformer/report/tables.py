"""From findings to tables, a verdict and an exit code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from transformer_parity.engine.findings import AGREES, DIVERGES, FAILED, IMPRECISE, SKIPPED, Finding
from transformer_parity.engine.outputs import OUTPUT
from transformer_parity.engine.system.errors import printable
from transformer_parity.engine.tolerances import POLICY
from transformer_parity.engine.verdict import WORDS, Verdict, worst
from transformer_parity.transformer.cases.case import SENTENCES
from transformer_parity.transformer.ports.compile_clock import Spent

STYLES = {SKIPPED: "dim", AGREES: "green", IMPRECISE: "yellow", DIVERGES: "bold red", FAILED: "bold magenta"}


_FLOAT32 = POLICY["float32"]
_GRADIENTS, _STEPS = POLICY["gradients"]["float64"], POLICY["steps"]
TITLES = {
    "float64": f"float64: semantics. Taps within {POLICY['float64']['tap']:.0e} of the reference, scores of searches "
    f"within {POLICY['decode']['float64']['score']:.0e}, the loss within {_GRADIENTS['loss']:.0e}, its gradient within "
    f"{_GRADIENTS['whole']:.0e}, one tensor of that within {_GRADIENTS['tensor']:.0e}, twenty optimizer steps within "
    f"{_STEPS['float64']['loss']:.0e}.",
    "float32": f"float32: precision. Within {_FLOAT32['ratio']:.0f} times the reference's own float32 error, plus "
    f"{_FLOAT32['floor_in_eps']:.0f} eps; of five optimizer steps, the losses within "
    f"{_STEPS['float32']['loss']:.0e} and the tensors within {_STEPS['float32']['tensor']:.0e}.",
    "bfloat16": f"bfloat16: a smoke test. Within {POLICY['bfloat16']['tap']:.0e}; real mistakes can hide in it.",
}


def print_line(console: Console, word: str, style: str, said: str) -> None:
    """Print a word and a message of a port or a file: one line, however long, so that it can forge no other."""
    console.print(Text(word, style) + Text(printable(said), "default"), soft_wrap=True)


def print_summary(console: Console, findings: Sequence[Finding], backends: Sequence[str]) -> None:
    """Print one table per dtype: by component and backend, the error that uses most of its tolerance, and how much."""
    for dtype in dict.fromkeys(finding.dtype for finding in findings if finding.dtype):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("component", no_wrap=True)
        for backend in backends:
            table.add_column(backend, no_wrap=True, justify="right")
        table.add_column("largest share of its tolerance", overflow="fold")
        of_dtype = [finding for finding in findings if finding.dtype == dtype]
        for component in dict.fromkeys(finding.component for finding in of_dtype):
            row = [finding for finding in of_dtype if finding.component == component]
            cells = [_cell([finding for finding in row if finding.backend == backend]) for backend in backends]
            largest = worst(row)
            whose = f"{largest.backend}: " if len(backends) > 1 else ""
            table.add_row(Text(component), *cells, Text(f"{whose}{_place(largest)}"))
        _print_table(console, TITLES[dtype], table)


def print_depth(console: Console, findings: Sequence[Finding], backends: Sequence[str]) -> None:
    """Print how the error on real sentences grows through the model, block by block."""
    taps = [finding for finding in findings if finding.component == SENTENCES and finding.path == "taps"]
    taps = [finding for finding in taps if finding.dtype != "bfloat16" and finding.tap != OUTPUT]
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in taps:
        groups.setdefault((_block(finding.tap), finding.dtype, finding.backend), []).append(finding)
    columns = [(dtype, backend) for dtype in dict.fromkeys(finding.dtype for finding in taps) for backend in backends]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("block", no_wrap=True)
    for dtype, backend in columns:
        table.add_column(f"{backend}\n{dtype}", justify="right", no_wrap=True)
    for block in dict.fromkeys(block for block, _, _ in groups):
        table.add_row(Text(block), *(_cell(groups.get((block, *column), []), share=False) for column in columns))
    if taps:
        _print_table(console, "Real sentences, block by block: the error that uses most of its tolerance.", table)


def print_profile(console: Console, spent: Mapping[str, Spent], comparing: float) -> None:
    """Print the processor seconds of each port's process by what they went into, and those of this process."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("", *spent):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for part in dict.fromkeys(part for port in spent.values() for part in port.parts):
        table.add_row(part, *(f"{port.parts[part]:.1f}" if part in port.parts else "" for port in spent.values()))
    table.add_row("together", *(f"{port.cpu_seconds:.1f}" for port in spent.values()))
    _print_table(console, f"Processor seconds; the reference and comparing took {comparing:.1f} beside them.", table)


def print_problems(console: Console, findings: Sequence[Finding], verdict: Verdict, limit: int = 8) -> None:
    """Print, per backend and case, the first tap that failed: what comes later may only have inherited it."""
    first: dict[tuple[str, str, str], Finding] = {}
    for finding in findings:
        if finding.verdict not in (AGREES, SKIPPED):
            first.setdefault((finding.backend, finding.dtype, finding.case), finding)
    by_text: dict[tuple[str, str], list[Finding]] = {}  # an exception is the same in every case
    for finding in first.values():
        text = finding.detail if finding.verdict == FAILED else f"{finding.dtype} {finding.case}"
        by_text.setdefault((finding.backend, text), []).append(finding)
    for finding, *others in list(by_text.values())[:limit]:
        detail = finding.words
        where = " ".join(part for part in (finding.backend, finding.dtype, _place(finding)) if part)
        detail += f" (and in {len(others)} other case{'s' * (len(others) > 1)})" if others else ""
        print_line(console, f"{WORDS[finding.verdict]:9}", STYLES[finding.verdict], f" {where}: {detail}")
    if verdict.undecided:
        names = ", ".join(verdict.undecided)
        console.print(f"Whether {names} lost only precision is not known: compare in float64 too.")
    if len(by_text) > limit:
        console.print(f"... and {len(by_text) - limit} more; --json holds them all.")


def print_near_ties(console: Console, findings: Sequence[Finding]) -> None:
    """Print where a search returned something else than the reference, within rounding: no failure."""
    for finding in filter(lambda finding: finding.is_near_tie, findings):
        print_line(console, "NEAR-TIE ", "", f" {finding.backend} {finding.dtype} {finding.case}: {finding.detail}")


def print_skips(console: Console, findings: Sequence[Finding]) -> None:
    """Print what was not compared because a port does not offer it: once, with how often."""
    why: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        if finding.verdict == SKIPPED:
            why.setdefault((finding.backend, finding.detail), []).append(finding)
    for (backend, detail), group in why.items():
        where = ", ".join(dict.fromkeys(finding.case for finding in group))
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
    spent: Mapping[str, Spent] | None = None,
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


def summarise(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return, for machines, the worst finding of each backend, dtype and component."""
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.backend, finding.dtype, finding.component), []).append(finding)
    return [
        {
            "backend": backend,
            "dtype": dtype,
            "component": component,
            "comparisons": len(group),
            "verdict": worst(group).verdict,
            "worst": worst(group).to_dict(),
        }
        for (backend, dtype, component), group in groups.items()
    ]


def _print_table(console: Console, title: str, table: Table) -> None:
    console.print(Text(title, "bold"))
    console.print(table)
    console.print()


def _cell(findings: Sequence[Finding], share: bool = True) -> Text:
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
    way = {"fast": " without taps", "cached": " with a cache"}.get(finding.path, "")
    return f"{finding.case} {finding.tap}{way if finding.tap == OUTPUT or finding.path == 'cached' else ''}".strip()


def _block(tap: str) -> str:
    parts = tap.split(".")
    return ".".join(parts[:3]) if parts[1:2] == ["layers"] else parts[0]
