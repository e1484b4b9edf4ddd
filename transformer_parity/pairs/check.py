"""Compare a port with the implementation that the user trusts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from numpy import ndarray

from transformer_parity.engine.findings import AGREES, DIVERGES, Finding, failure
from transformer_parity.engine.localization import FINE, INHERITED, Mark
from transformer_parity.engine.outputs import TAPS
from transformer_parity.engine.tensors import Tensors
from transformer_parity.engine.verdict import Author, Coverage
from transformer_parity.pairs.compare.conditions import (
    fingerprints,
    fixed_constants,
    unusable,
    warnings,
    without_constants,
)
from transformer_parity.pairs.compare.decisions import follow, near_ties
from transformer_parity.pairs.compare.difference import difference
from transformer_parity.pairs.compare.fresh import ignored, without_effect
from transformer_parity.pairs.compare.names import listed, propose, resolve, with_axes
from transformer_parity.pairs.compare.rounding import GROSS, correlations
from transformer_parity.pairs.compare.stages import FORWARD, GRADIENTS, NEEDS, OUTPUT, Runs
from transformer_parity.pairs.compare.tensors import Compared, compare_tensors
from transformer_parity.pairs.compare.truth import ALL_EPS, NoTruthError, Tolerances, Truth
from transformer_parity.pairs.contract.arrays import NARROW, cast, rounded
from transformer_parity.pairs.diagnose.causes import diagnose
from transformer_parity.pairs.diagnose.locate import Wrong, first_wrong, locate
from transformer_parity.pairs.result import PairResult, RecordedPair, Settings
from transformer_parity.pairs.run.messages import Import, Ran
from transformer_parity.pairs.run.side import RunError, Side, two_sides

PATIENCE = 20.0  # seconds after which no further weights are tried
FEW = 8  # number of values whose errors don't correlate by chance
EXACT = 1e-8  # tolerance in float64 above which the original seems to compute in float32
Progress = Callable[[str], None]


def compare_pair(
    original: Import,
    port: Import,
    settings: Settings = Settings(),  # noqa: B008  it is frozen
    names: Mapping[str, Any] | None = None,
    progress: Progress = lambda text: None,
) -> PairResult:
    """Run two implementations in separate processes, and compare them.

    Args:
        original: The implementation that you trust.
        port: The other implementation.
        settings: The dtypes, stages, and batches to compare, and how to run the processes.
        names: The port's name of each of the original's taps, for taps with different names or axes. None to use the
            names that ``original`` imports.
        progress: Callback that receives a description of the next run.
    """
    started = time.monotonic()
    result = PairResult(str(original.source), str(port.source))
    try:
        with two_sides(original, port, settings.interpreters, settings.timeout) as (trusted, other):
            _Comparison(trusted, other, result, progress).run(settings, names)
    except (NoTruthError, OSError, RunError) as error:
        side = result.original if isinstance(error, NoTruthError) else getattr(error, "side", "")
        result.findings.append(failure(side or result.port, str(error)))
    except KeyboardInterrupt:
        result.findings.append(failure(result.port, "interrupted before everything was compared"))
    result.seconds = time.monotonic() - started
    return result


class _Comparison:
    """The steps of a comparison, which fill a ``PairResult``."""

    def __init__(self, original: Side, port: Side, result: PairResult, progress: Progress) -> None:
        self.original, self.port, self.result, self.progress = original, port, result, progress
        self.tolerances: dict[tuple[str, str], Tolerances] = {}
        self.wrong: list[Wrong] = []
        self.agrees: dict[tuple[str, str], bool] = {}

    def run(self, settings: Settings, names: Mapping[str, Any] | None) -> None:
        """Compare everything, and locate and name the differences."""
        for side in (self.original, self.port):
            self.progress(f"importing {side.name}")
            side.start()
            self.result.versions[side.name] = side.versions
        if self.original.imported.code == self.port.imported.code:
            raise RunError(f"{self.original.name} and {self.port.name} run the same code, so nothing is compared")
        self.progress("creating weights and inputs")
        weights, fixed = self.original.new("init_weights", 0), self.original.imported.fixed_weights
        if kept := fixed_constants(weights, fixed):
            self.result.notes.append(
                f"the constant weights {listed(kept)} are fixed, so a port that ignores them may agree"
            )
        weights, self.result.replaced = without_constants(weights, fixed)
        dtypes = self._dtypes(settings.dtypes)
        batches = [self.original.new("inputs", seed) for seed in range(settings.seeds)]
        for dtype in ("float32", *(name for name in NARROW if name in dtypes)):  # every dtype can represent the inputs
            batches = [cast(rounded(batch, dtype), "float32") for batch in batches]
        self.result.notes += warnings(batches)
        self.runs = Runs(batches, self.result.names, self.port)
        self.truth = Truth(self.original, weights, batches, self.runs.run)
        stages = self._stages(settings.stages)
        planned = {(stage, dtype): settings.seeds for stage in stages for dtype in dtypes}
        self.result.asked = [Coverage(self.port.name, stages, dtypes, pairs=True, planned=planned, tells_rounding=True)]
        self._note_limits(dtypes)
        self._prepare(self.original.imported.names if names is None else names, dtypes)
        for stage in stages:
            for dtype in dtypes:
                self.progress(f"comparing {stage} in {dtype}")
                self.result.findings += self._compare(stage, dtype)
        self._locate(stages)
        self._record(dtypes[:1])
        if self.result.verdict.verdict == AGREES:
            self._change_weights(stages, "float64" if "float64" in dtypes else dtypes[0])

    def _change_weights(self, stages: Sequence[str], dtype: str) -> None:
        """Check that the port's results follow the original's if the weights change."""
        self.progress("changing the weights")
        found = [ignored(self.truth, self.runs, stage, dtype, self.tolerances[stage, dtype]) for stage in stages]
        self.result.asked = [replace(self.result.asked[0], unproven=[why for why, _ in found if why])]
        if not any(moves for _, moves in found):
            self.result.notes.append(
                f"the results of {self.original.name} didn't change when all weights changed by up to 1.6%"
            )
            return
        self.progress("changing one weight at a time")
        unused, untried = without_effect(self.truth, stages, time.monotonic() + PATIENCE)
        if unused:
            self.result.notes.append(
                f"changes of the weights {listed(unused)} affect no result, so they aren't compared"
            )
        if untried:
            self.result.notes.append(f"{untried} weights weren't tested for an effect on the results, to save time")

    def _dtypes(self, asked: Sequence[str] | None) -> list[str]:
        """Return the dtypes that are compared. Float64 is compared only if both implementations support it."""
        offered = self.port.imported.dtypes
        if missing := [name for name in asked or () if name not in offered]:
            raise RunError(f"{self.port.name} doesn't run in {', '.join(missing)}: its dtypes are {', '.join(offered)}")
        if unknown := [name for name in offered if name not in ALL_EPS]:
            raise RunError(f"{self.port.name}.dtypes must be some of {', '.join(ALL_EPS)}: got {', '.join(unknown)}")
        found = [name for name in offered if asked is None or name in asked]
        if "float64" in found and "float64" not in self.original.imported.dtypes:
            found.remove("float64")
            self.result.not_tested.append(f"float64: {self.original.name} doesn't run in float64")
        return sorted(found, key=ALL_EPS.__getitem__)  # float64 comes first, because it tells whether the math agrees

    def _stages(self, asked: Sequence[str] | None) -> list[str]:
        """Return the stages that are compared. A stage that the user requested is not left out silently."""
        found = []
        for stage, method in NEEDS.items():
            without = [side.name for side in (self.original, self.port) if not side.has(method)]
            if not without and (asked is None or stage in asked):
                found.append(stage)
            elif asked is not None and stage in asked:
                found.append(stage)
                author = Author(self.port.name, dtype="float32", case="", component=stage, stage=stage)
                self.result.findings.append(author.skipped(TAPS, f"{' and '.join(without)} must define {method}()"))
            elif len(without) < 2:
                why = f"{without[0]} doesn't define {method}()" if without else "not requested"
                self.result.not_tested.append(f"{stage}: {why}")
        return found

    def _note_limits(self, dtypes: Sequence[str]) -> None:
        """Explain what the comparison can't show without float64."""
        if self.truth.dtype != "float64":
            self.result.notes.append(
                f"{self.original.name} doesn't run in float64, so its own rounding errors limit the precision of the "
                "comparison: a bug with a smaller effect can't be seen"
            )
        elif "float64" not in dtypes:
            self.result.notes.append(
                f"{self.port.name} was not compared in float64, so a bug with an effect below the rounding errors of "
                f"{' and '.join(dtypes) or 'its dtypes'} can't be seen"
            )

    def _prepare(self, given: Mapping[str, Any], dtypes: Sequence[str]) -> None:
        """Run both implementations once, check that the original is usable, and match the taps."""
        self.progress(f"running {self.original.name} in {self.truth.dtype}")
        runs = self.truth.first_runs()
        self.result.taps = list(runs[0].taps)
        first, results = runs[0], [fingerprints(ran.outputs) for ran in runs]
        same = [name for name in results[0] if len({found[name] for found in results}) < 2 <= len(results)]
        self.result.notes += [f"output {name!r} is the same for all inputs" for name in same]
        wrong = [name for name, value in {**first.taps, **first.outputs}.items() if np.isnan(value).any()]
        if wrong:
            self.result.notes.append(f"{self.original.name} computes NaN in {self.truth.dtype}: {listed(wrong)}")
        if not dtypes:
            return
        theirs = self._first_run(dtypes)
        if theirs is None:
            return
        shared = [
            name
            for name in first.taps
            if name in theirs.taps and name not in first.captured and name not in theirs.captured
        ]
        try:
            found = resolve(given, [*first.taps], [*theirs.taps], shared)
        except ValueError as error:
            raise RunError(str(error)) from error
        self.result.notes += with_axes(found, first.taps, theirs.taps)
        used = {place.name for place in found.declared.values()}
        found.proposed = propose(
            {name: value for name, value in first.taps.items() if name not in found.declared},
            {name: value for name, value in theirs.taps.items() if name not in used},
        )
        self.result.names = self.runs.names = found

    def _first_run(self, dtypes: Sequence[str]) -> Ran | None:
        """Return the port's result in the first dtype in which it runs. Every comparison reports the exceptions."""
        for dtype in dtypes:
            with suppress(RunError):
                return self.truth.of_port(self.port, dtype).forward(self.truth.batches[0])
        return None

    def _compare(self, stage: str, dtype: str) -> Iterator[Finding]:
        """Yield the findings of a stage in a dtype."""
        authors = [
            Author(self.port.name, dtype, f"seed {batch}", stage, stage) for batch in range(len(self.truth.batches))
        ]
        if not self.original.has(NEEDS[stage]) or not self.port.has(NEEDS[stage]):
            return
        try:
            tolerances = self.truth.tolerances(stage, dtype)
        except (NoTruthError, RunError) as error:
            yield authors[0].failed(TAPS, f"{self.original.name} in {dtype}: {error}")
            return
        is_proven = self.agrees.get((stage, "float64"), False)
        if is_proven and dtype == "float32":
            tolerances = tolerances.if_float64_agrees()
        self.tolerances[stage, dtype] = tolerances
        results = [name for name in tolerances.allowed if stage != FORWARD or name.startswith(OUTPUT)]
        most = max((tolerances.allowed[name] for name in results if name not in tolerances.zeros), default=0.0)
        if dtype == "float64" == self.truth.dtype and most > EXACT:
            self.result.notes.append(
                f"the rounding errors of {self.original.name} in float64 are as large as in a narrower dtype, so an "
                f"error of {stage} below {most:.0e} can't be seen"
            )
        seen: list[dict[str, Any]] = []
        compared: list[Compared] = []
        port = self.truth.of_port(self.port, dtype)
        for batch, author in enumerate(authors):
            try:
                expected = self.truth.tensors(stage, batch, dtype)
                actual = self.runs.run(stage, port, batch)
                again = self.runs.run(stage, port, batch) if batch == 0 else {}
                ties = near_ties(self.truth, self.runs, stage, batch, dtype, actual, expected)
                if ties and stage == FORWARD:
                    expected = follow(self.truth, self.runs, batch, dtype, actual, ties)
                declared = self.result.names if stage == FORWARD else None
                found = list(compare_tensors(author, tolerances, actual, expected, declared, ties))
                shown = {name: x for name, x in expected.items() if stage != GRADIENTS or name in self.truth.weights}
                seen.append(fingerprints(shown) if stage != FORWARD else {})
            except RunError as error:
                yield author.failed(TAPS, str(error))
                return
            compared += found
            changed = [
                name
                for name, value in actual.items()
                if batch == 0
                and name in expected
                and name not in ties
                and not _is_same(value, again.get(name), tolerances.limit(name))
            ]
            for name in changed[:1]:
                compared.append(Compared(author, name, math.inf, 0.0, "the values change from call to call"))
        if stage != FORWARD and (why := unusable(seen)):
            yield authors[0].failed(TAPS, f"nothing can be concluded from {self.original.name}.{NEEDS[stage]}(): {why}")
        findings = self._judge(stage, compared, authors, expected)
        yield from findings
        wrong = [entry for entry in compared if entry.is_wrong]
        self.agrees[stage, dtype] = not wrong
        if wrong:
            own = [entry.name for entry in wrong if entry.author is wrong[0].author and entry.name in expected]
            is_math = any(finding.verdict == DIVERGES for finding in findings)
            self.wrong.append(Wrong(stage, dtype, authors.index(wrong[0].author), own, is_math))
        for text in self.runs.modified:
            yield authors[0].compared(TAPS, "inputs", math.inf, 0.0, problem=text)
        self.runs.modified.clear()

    def _judge(
        self, stage: str, compared: Sequence[Compared], authors: Sequence[Author], expected: Tensors
    ) -> list[Finding]:
        """Return the findings, after measuring which of the errors come from rounding."""
        is_proven = self.agrees.get((stage, "float64"), False)
        known = [_known_correlation(entry, is_proven) for entry in compared]
        measured: dict[tuple[Author, str], float] = {}
        for batch, author in enumerate(authors):
            unknown = zip(compared, known, strict=True)
            names = list(dict.fromkeys(x.name for x, value in unknown if value is None and x.author is author))
            if names:
                found = correlations(self.truth, self.runs, stage, batch, author.dtype, names)
                measured |= {(author, name): value for name, value in found.items()}
        for name in [name for name, value in expected.items() if value.size < FEW]:  # these may correlate by chance
            places = [place for place in measured if place[1] == name]
            measured |= dict.fromkeys(places, min((measured[place] for place in places), default=math.inf))
        return [
            entry.finding(measured[entry.author, entry.name] if value is None else value)
            for entry, value in zip(compared, known, strict=True)
        ]

    def _locate(self, stages: Sequence[str]) -> None:
        """Find the tensors at which differences start, and name the cause of the first difference.

        Differences of later stages may be consequences, so only the first stage with differences is examined.
        """
        ordered = sorted(self.wrong, key=lambda entry: (stages.index(entry.stage), not entry.is_math))
        for first in ordered[:1]:
            self.progress(f"locating the difference in {first.stage}")
            located = first_wrong(first.stage, first.dtype, first.batch, first.names)
            self.result.located.append(located)
            try:
                if first.stage == FORWARD:
                    allowed = self.tolerances[first.stage, first.dtype]
                    located = locate(self.truth, self.runs, first, allowed)
                    self.result.located[:] = [located]
                self.progress("looking for the cause")
                self.result.named = diagnose(self.truth, self.runs, located)
            except Exception as error:  # the verdict must not be lost
                self.result.notes.append(f"the cause was not found: {type(error).__name__}: {error}")

    def _record(self, dtypes: Sequence[str]) -> None:
        """Keep the tensors of the batch that was examined, or of the first batch if nothing differs."""
        for located in self.result.located:
            if located.evidence is not None:
                evidence = located.evidence
                self.result.recorded = RecordedPair(
                    located.dtype, dict(evidence.expected), dict(evidence.actual), evidence.blame.marks
                )
                return
        for dtype in dtypes:
            if (allowed := self.tolerances.get((FORWARD, dtype))) is None:
                continue
            expected = self.truth.tensors(FORWARD, 0, dtype)
            with suppress(RunError):
                actual = self.runs.run(FORWARD, self.truth.of_port(self.port, dtype), 0)
                errors = {
                    name: difference(actual[name], value, allowed.scale(name))
                    for name, value in expected.items()
                    if name in actual
                }
                marks = [
                    Mark(name, error, error, allowed.limit(name), FINE if error <= allowed.limit(name) else INHERITED)
                    for name, error in errors.items()
                ]
                self.result.recorded = RecordedPair(dtype, expected, actual, tuple(marks))
                for mark in marks if not self.result.located else ():
                    if mark.verdict != FINE:  # a tap that was matched by its values, but doesn't correspond
                        self.result.names.proposed.pop(mark.name, None)


def _known_correlation(entry: Compared, is_proven: bool) -> float | None:
    """Return the correlation of an error if it need not be measured: 0 for rounding errors, and infinity for others.

    Args:
        entry: The comparison of a tensor.
        is_proven: Whether the port agrees in float64.
    """
    if entry.problem or not entry.is_wrong:
        return math.inf
    if entry.is_small:
        return 0.0
    if entry.error > GROSS and entry.author.dtype not in NARROW:
        return None if is_proven else math.inf
    return 0.0 if is_proven else None


def _is_same(value: ndarray, again: ndarray | None, limit: float) -> bool:
    return again is not None and difference(again, value) <= limit
