"""Print the result of a comparison of two implementations, or convert it to JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from rich.console import Console

from transformer_parity.engine.findings import DIVERGES, FAILED, SKIPPED
from transformer_parity.engine.localization import INTRODUCED, NOTHING, Mark
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
from transformer_parity.pairs.compare.names import listed
from transformer_parity.pairs.compare.stages import FORWARD, GRADIENTS, plain_name
from transformer_parity.pairs.diagnose.causes import far
from transformer_parity.pairs.diagnose.recognize import places
from transformer_parity.pairs.result import PairResult


def print_result(console: Console, result: PairResult) -> None:
    """Print the tables, the differences and their causes, the limits of the comparison, and the verdict."""
    verdict, findings = result.verdict, result.findings
    versions = [_versions(name, result) for name in (result.port, result.original)]
    if versions[0] == versions[1]:
        versions[0] = ""
    console.print(f"{result.port}{versions[0]} compared with {result.original}{versions[1]}\n")
    own = result.port
    if any(finding.verdict != FAILED for finding in findings):
        print_summary(console, [finding for finding in findings if finding.stage], [own])
    print_near_ties(console, findings)
    print_problems(console, findings, verdict)
    for blame in result.blames:
        if blame.introduced:
            marks = tuple(_shown(mark) for mark in blame.marks)
            print_blame(console, replace(blame, marks=marks), "original")
    for place in result.introduced[:1]:
        mine = result.names.all.get(place)
        other = f" ({mine.name} in the port)" if mine is not None and mine.name != place else ""
        of = "the gradient of " if result.located[0].stage == GRADIENTS else ""
        replay = result.located[0].blame
        limit = ", or before it, because no block could be rerun" if replay and replay.replayed == NOTHING else ""
        print_line(console, "STARTS AT", "bold red", f" {of}{place}{other}{limit}")
        is_shown = any(finding.tap == place and math.isinf(finding.error) for finding in findings)  # with its problem
        if not is_shown and not any(named.sentence.startswith(f"at {place},") for named in result.named):
            print_line(console, "CAUSE    ", "bold red", f" not recognized; {_advice(place, result)}")
    for named in result.named:
        print_line(console, "CAUSE    ", "bold red", f" {named.sentence}")
    print_skips(console, findings)
    if result.replaced:
        print_line(console, "NOTE     ", "", f" random values replaced the constant weights {listed(result.replaced)}")
    for note in result.notes:
        print_line(console, "NOTE     ", "", f" {note}")
    if result.names.proposed:
        print_line(
            console,
            "NOTE     ",
            "",
            f" taps matched by their values: {len(result.names.proposed)}; they help to locate a difference, but the "
            "verdict doesn't depend on them (--write-names FILE saves the matches)",
        )
    failed = [f" ({finding.detail})" for finding in findings if finding.verdict == FAILED]  # printed above
    missing = [_without(text, failed) for text in verdict.missing]
    print_coverage(console, replace(verdict, missing=tuple(missing)), result.not_tested)
    console.print(verdict_line(verdict, findings, [own], result.seconds, trusted=result.original), soft_wrap=True)


def _shown(mark: Mark) -> Mark:
    """Return a mark for the tree, in which the error of a wrong block is its error on correct inputs."""
    error = mark.isolated if mark.verdict == INTRODUCED else mark.free
    return replace(mark, name=plain_name(mark.name), free=error)


def _advice(place: str, result: PairResult) -> str:
    """Return where to look for the cause of a difference."""
    located = result.located[0]
    if located.stage != FORWARD:
        return "compare the code that computes this value"
    taps = [plain_name(mark.name) for blame in result.blames for mark in blame.marks]
    before = taps[taps.index(place) - 1] if place in taps[1:] else ""
    advice = f"compare the code between {before} and {place}, or add taps there" if before else "add taps before it"
    end = result.taps.index(place) if place in result.taps else len(result.taps)
    start = result.taps.index(before) + 1 if before in result.taps else 0
    if unmatched := [tap for tap in result.taps[start:end] if tap not in result.names.all]:
        advice += f"; taps there without a counterpart in the port: {listed(unmatched)}"
    name, evidence = located.names[0], located.evidence
    if result.verdict.verdict == DIVERGES and evidence and name in evidence.isolated and name in evidence.wanted:
        advice = "; ".join([*places(evidence.isolated[name], evidence.wanted[name], far(located.dtype)), advice])
    return advice


def _without(text: str, parts: Iterable[str]) -> str:
    for part in parts:
        text = text.replace(part, "")
    return text


def _versions(name: str, result: PairResult) -> str:
    versions = {key: value for key, value in result.versions.get(name, {}).items() if key != "python"}
    shown = ", ".join(f"{key} {value}" for key, value in versions.items() if key != "numpy" or len(versions) == 1)
    return f" ({shown})" if shown else ""


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
