"""Print the result of a comparison of two implementations, or convert it to JSON."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich.console import Console

from transformer_parity.engine.findings import SKIPPED
from transformer_parity.engine.report.envelope import envelope
from transformer_parity.engine.report.result import compared, tap_row
from transformer_parity.engine.report.tables import (
    print_coverage,
    print_line,
    print_near_ties,
    print_problems,
    print_skips,
    print_summary,
    verdict_line,
)
from transformer_parity.engine.report.tree import print_blame
from transformer_parity.pairs.compare.stages import plain_name
from transformer_parity.pairs.result import PairResult

MOST_NAMES = 6  # number of weights that a line lists


def print_result(console: Console, result: PairResult) -> None:
    """Print the tables, the differences and their causes, the limits of the comparison, and the verdict."""
    verdict, findings = result.verdict, result.findings
    console.print(f"{_with_versions(result.port, result)} compared with {_with_versions(result.original, result)}\n")
    own = result.port
    print_summary(console, [finding for finding in findings if finding.stage], [own])
    print_near_ties(console, findings)
    print_problems(console, findings, verdict)
    for blame in result.blames:
        if blame.introduced:
            marks = tuple(replace(mark, name=plain_name(mark.name)) for mark in blame.marks)
            print_blame(console, replace(blame, marks=marks), "original")
    for place in result.introduced[:1]:
        mine = result.names.all.get(place)
        other = f" ({mine.name} in the port)" if mine is not None and mine.name != place else ""
        print_line(console, "STARTS AT", "bold red", f" {place}{other}")
        if not result.named:
            print_line(console, "CAUSE    ", "bold red", " not recognized; compare the code that computes this value")
    for named in result.named:
        print_line(console, "CAUSE    ", "bold red", f" {named.sentence}")
    print_skips(console, findings)
    if result.replaced:
        listed = ", ".join(result.replaced[:MOST_NAMES])
        more = f", and {len(result.replaced) - MOST_NAMES} more" if len(result.replaced) > MOST_NAMES else ""
        print_line(console, "NOTE     ", "", f" random values replaced the constant weights {listed}{more}")
    for note in result.notes:
        print_line(console, "NOTE     ", "", f" {note}")
    if result.names.proposed:
        print_line(
            console,
            "NOTE     ",
            "",
            f" {len(result.names.proposed)} taps were matched by their values; they help to locate a difference, but "
            "the verdict doesn't depend on them (--write-names FILE saves the matches)",
        )
    print_coverage(console, verdict, result.not_tested)
    console.print(verdict_line(verdict, findings, [own], result.seconds, trusted=result.original), soft_wrap=True)


def _with_versions(name: str, result: PairResult) -> str:
    versions = {key: value for key, value in result.versions.get(name, {}).items() if key != "python"}
    shown = ", ".join(f"{key} {value}" for key, value in versions.items() if key != "numpy" or len(versions) == 1)
    return f"{name} ({shown})" if shown else name


def document(result: PairResult, command: str = "pair") -> dict[str, Any]:
    """Return the result as built-in Python types that can be written as JSON."""
    verdict = result.verdict
    return envelope(
        command,
        {
            "original": result.original,
            "port": result.port,
            **compared(result.findings, verdict),
            "introduced": result.introduced,
            "named": [{"kind": named.kind, "sentence": named.sentence} for named in result.named],
            "tensors": [
                tap_row(finding) | {"stage": finding.stage, "problem": finding.detail}
                for finding in result.findings
                if finding.verdict != SKIPPED
            ],
            "blames": [blame.to_dict() for blame in result.blames],
            "names": result.names.written(),
            "proposed": sorted(result.names.proposed),
            "replaced_weights": result.replaced,
            "notes": result.notes,
            "not_tested": result.not_tested,
        },
        exit_code=verdict.exit_code,
        environment=result.versions,
        seconds=result.seconds,
        introduced=result.introduced,
    )
