"""Create failure reports, which identify the block that introduces a difference and describe the cause.

A diagnosis consists of the following steps. The name in parentheses is the module or function that performs the step.
If step 2 finds an error, steps 3 to 5 are skipped. If step 3 finds a change, step 4 is skipped.

1. Select the first failure of each stage (``investigate`` for a port, ``files`` for tensors from files). Omit a
   stage if its failure may be a consequence of a failure in a different stage.
2. If there is a port to run, test whether it modifies its inputs, returns random results, keeps state between calls, or
   differs from the reference only if it runs without taps (``investigate``, ``evidence.properties``). For ports and
   files, test whether the tensors have only float32 precision (``evidence.properties``).
3. Search for a change to the NumPy reference that reproduces every tensor, in this case and in the other cases of the
   model (``diagnosis.diagnose``). Run the reference with each change, and cache the results (``candidates.trials``):
   - Try each bug and each convention (``candidates``), and settings derived from the tensors (``measured.step``).
   - For searches, try different search parameters (``measured.search_parameters``).
   - Try each bug in only some model parts, such as one layer (``candidates.places``).
   - For training, try a different learning rate in each step (``measured.schedule``) or a different optimizer setting
     (``measured.optimizer``).
   - Try combinations of two or three bugs (``candidates.several``).
   - For activations, search again without one type of tap. If this fails, search again and compare only the output.
4. Describe the difference in statements, sorted by the strength of their evidence (``evidence``, ``statements``).
   Report NaN or infinity and swapped names, and list the tensors and cases that differ. Compare the results with the
   port's own ``forward`` (``own_forward``). If this reveals nothing, describe the error of the first training step
   (``measured.step``).
5. Replay the case and find the block that introduces the difference (``evidence.blame``). If step 3 found no
   change, use ``statements`` to describe the error of this block. Save the inputs of the block (``reproduce``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from transformer_parity.engine.comparison import NAMES, Arrays
from transformer_parity.engine.findings import AGREES, DIVERGES, FAILED, IMPRECISE, ROUND_TRIP, Finding, Kept
from transformer_parity.engine.localization import Blame, Evidence
from transformer_parity.engine.outputs import FAST, OUTPUT
from transformer_parity.engine.tensors import given
from transformer_parity.transformer.bugs.bug import Bug
from transformer_parity.transformer.cases.case import ACTIVATIONS, DECODE, GRADIENTS, STEPS, Case
from transformer_parity.transformer.compare.runner import call_before, tensors
from transformer_parity.transformer.diagnose import reproduce
from transformer_parity.transformer.diagnose.candidates.candidate import candidates
from transformer_parity.transformer.diagnose.candidates.trials import TRUTH, Trials, observed
from transformer_parity.transformer.diagnose.diagnosis import (
    EXACT,
    LIKELY,
    UNKNOWN,
    Diagnosis,
    diagnose,
    reproducing_output,
)
from transformer_parity.transformer.diagnose.evidence.blame import REPLAYED, Subject, blame, explained_by
from transformer_parity.transformer.diagnose.evidence.differing import Differing
from transformer_parity.transformer.diagnose.evidence.exchanged import exchanged, returned_in_words
from transformer_parity.transformer.diagnose.evidence.properties import (
    has_random_loss,
    is_random,
    lacking,
    of_path,
    only_float32,
    rounding,
)
from transformer_parity.transformer.diagnose.measured.step import first_step_in_words
from transformer_parity.transformer.diagnose.own_forward import beside_forward
from transformer_parity.transformer.diagnose.statements import (
    IN_PORT,
    if_it_is_meant,
    of_error,
    of_names,
    of_operand,
    of_place,
    of_rounding,
    of_tensors,
    with_first,
    within_stage,
)
from transformer_parity.transformer.ports.protocol import AnyPort, LoadedPort, Placements
from transformer_parity.transformer.stages.registry import STAGES


@dataclass(frozen=True)
class FailureReport:
    """The report on one failing case.

    Attributes:
        backend: Name of the port.
        dtype: Working dtype.
        case: Name of the case.
        stage: Name of the stage to which the case belongs.
        blame: The blocks that introduce or inherit the difference; None if the case can't be replayed.
        diagnosis: The cause of the difference; None if the case agrees with the reference, so that the report shows
            only the attention weights.
        view: Data about the case for the HTML page; None if the page doesn't show the case.
        directory: Directory with the inputs of the first wrong block; None if they were not saved.
    """

    backend: str
    dtype: str
    case: str
    stage: str
    blame: Blame | None
    diagnosis: Diagnosis | None
    view: dict[str, Any] | None = None
    directory: Path | None = None

    @property
    def relative_directory(self) -> Path | None:
        """``directory``, as a relative path if it is inside the working directory."""
        if self.directory is None or not self.directory.is_relative_to(Path.cwd()):
            return self.directory
        return self.directory.relative_to(Path.cwd())

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis and the description of its case as a dict of built-in Python types."""
        found = self.diagnosis.to_dict() if self.diagnosis else {}
        return {
            "backend": self.backend,
            "dtype": self.dtype,
            "case": self.case,
            "stage": self.stage,
            "directory": None if self.directory is None else str(self.relative_directory),
            **found,
        }


@dataclass(frozen=True)
class Investigation:
    """Settings for creating failure reports on one port.

    Attributes:
        port: The port.
        setting: Dtypes, device, and precision with which to run the port.
        reference: Name from which the port can be loaded: a backend, or ``module:class``.
        directory: Directory in which to save the inputs of a wrong block, or None to save nothing.
        progress: Callback that receives a description of the next step.
        suspect: A candidate to try in addition to the known bugs and conventions.
        view: Function that converts the evidence to the data that the HTML page shows.
    """

    port: AnyPort
    setting: Placements
    reference: str
    directory: Path | None = None
    progress: Callable[[str], None] = lambda text: None
    suspect: Bug | None = None
    view: Callable[[Evidence, Subject], dict[str, Any]] | None = None

    def failures(self, findings: Sequence[Finding], kept: Kept, cases: Sequence[Case]) -> Iterator[FailureReport]:
        """Yield a report on the first failure of each stage. Failures of cases that run the full model come first.

        Gradients, steps, and searches depend on activations, so their failures are reported only if activations agree
        with the reference. Failures in float32 are reported only if there are no failures in float64.

        Args:
            findings: All findings about this port.
            kept: The tensors of the port in failing cases.
            cases: The cases that were compared.
        """
        known = {case.name: case for case in cases}
        compared = {f.case for f in findings if f.verdict in (AGREES, DIVERGES) and f.dtype == "float64"}
        for finding in first_failures(findings, known):
            if finding.verdict == FAILED:  # the finding contains the exception's error message
                continue
            case = known[finding.case]
            self.progress(f"diagnosing {finding.dtype} {case.name}")
            others = [
                (other, kept.get((name, "float64")))
                for name, other in known.items()
                if name in compared - {case.name} and shared(other) == shared(case) and not other.is_long
            ]
            # All known bugs also affect short sequences, so no known bug explains a failure that occurs only in
            # long cases.
            hypothetical = (
                [] if case.is_long else candidates(case.config, case.stage, forward_agrees=forward_agrees(findings))
            )
            about = [f for f in findings if f.dtype == finding.dtype and f.stage == case.stage]
            shown = kept.get((case.name, finding.dtype), {})
            yield self._report(case, [finding, *about], shown, others, hypothetical)

    def _report(
        self,
        case: Case,
        findings: Sequence[Finding],
        shown: Arrays,
        others: Sequence[tuple[Case, Arrays | None]],
        hypothetical: Sequence[Bug],
    ) -> FailureReport:
        finding = findings[0]
        dtype = finding.dtype
        unknown = Diagnosis(f"unknown: {finding.detail}" if finding.detail else "unknown", UNKNOWN)
        report = FailureReport(self.port.name, dtype, case.name, case.stage, None, unknown)
        if finding.tap in case.inputs:  # the finding is about an input that the port modified
            return replace(
                report, diagnosis=Diagnosis(f"{finding.tap}: {finding.detail}; copy the array first", LIKELY)
            )
        if random := self._randomness(case, dtype):
            return replace(report, diagnosis=Diagnosis(random, LIKELY))
        if state := self._kept_state(case, shown, dtype):
            return replace(report, diagnosis=Diagnosis(state, LIKELY))
        forward = case.stage == ACTIVATIONS
        if finding.path == FAST and forward:
            with suppress(Exception):
                return replace(report, diagnosis=self._without_taps(case, finding, others, hypothetical))
            return report
        if not shown:
            return report
        known = [*hypothetical, *([self.suspect] if self.suspect else [])]
        found, differing = unknown, None
        if dtype == "float64":
            truth = observed(TRUTH, case) or {}
            if precision := only_float32(case, shown, truth):
                return replace(report, diagnosis=Diagnosis(precision, LIKELY))
            differing = Differing.of(case, findings, shown, truth)
            found = self._explained(case, findings, shown, others, known, differing)
        promised = partial(of_names, detail=finding.detail if finding.tap == NAMES else "")
        if case.stage not in REPLAYED:
            return replace(report, diagnosis=promised(found))
        subject = Subject.of(case, self.port.name, dtype)
        evidence = self._blame(subject)
        if found.confidence == EXACT and forward and len(evidence.blame.introduced) > 1:
            weights = case.load_weights()
            alike = [one.load(case.config, weights) for one in reproducing_output(case, shown, known)]
            evidence = explained_by(evidence, alike, subject)
        if evidence.blame.introduced and not found.candidates:
            errors = [*of_rounding(evidence, case), *of_operand(evidence, case)]
            errors += self._measurements(case, evidence) if forward else []
            errors += of_error(evidence, case)
            found = of_place(found, evidence, case, errors, differing, findings, others)
        report = replace(report, blame=evidence.blame, diagnosis=promised(found), directory=self._saved(evidence, case))
        return replace(report, view=self.view(evidence, subject)) if self.view and case.is_forward else report

    def _explained(
        self,
        case: Case,
        findings: Sequence[Finding],
        shown: Arrays,
        others: Sequence[tuple[Case, Arrays | None]],
        known: Sequence[Bug],
        differing: Differing,
    ) -> Diagnosis:
        """Return a diagnosis with the candidates that reproduce every float64 tensor, or with other evidence."""
        finding = findings[0]
        found = if_it_is_meant(diagnose(case, shown, self.port.name, self.progress, known, others), IN_PORT)
        if finding.tap != NAMES and not Trials.of(case, shown).differing(TRUTH):
            found = Diagnosis(
                f"unknown: only {finding.tap} differs, and by less than any known bug would cause", UNKNOWN
            )
        if found.confidence == EXACT:
            return within_stage(found, case)
        if finding.tap == ROUND_TRIP and (exported := self._exported(case, finding.dtype)):
            return replace(found, sentence=exported, confidence=LIKELY)
        beside_forward = partial(self._beside_forward, shown=[(case, shown), *others])
        return of_tensors(found, differing, findings, others, beside_forward)

    def _beside_forward(self, found: Diagnosis, shown: Sequence[tuple[Case, Arrays | None]]) -> Diagnosis:
        """Add evidence from the port's ``forward`` or, if there is none, from its first training step."""
        with suppress(Exception):  # the port may fail in a rerun, but the rest of the report is still valid
            if statement := beside_forward(self.port, self.setting.placement("float64"), shown):
                return with_first(found, [statement])
        with suppress(Exception):  # a rate can't be measured if weights are missing or infinite
            case, tensors = shown[0]
            if statement := first_step_in_words(case, tensors or {}):
                return with_first(found, [statement])
        return found

    def _without_taps(
        self,
        case: Case,
        finding: Finding,
        others: Sequence[tuple[Case, Arrays | None]],
        known: Sequence[Bug],
    ) -> Diagnosis:
        """Return a diagnosis for outputs that are wrong only if the port runs without taps.

        The diagnosis contains the candidates that reproduce these outputs. If there are none, it states how the outputs
        differ from the outputs of a run with taps.
        """
        sentence = of_path(self._loaded(case, finding.dtype), case, finding.tolerance)
        if finding.dtype != "float64":
            return Diagnosis(sentence, LIKELY)
        with suppress(Exception):  # if another case raises an exception, report only ``sentence``
            runs: list[tuple[Case, Arrays]] = []
            for one in (case, *(other for other, _ in others)):
                inputs = given(one.inputs, "float64")
                runs.append((one, {OUTPUT: self._loaded(one, "float64").run(one.block, inputs, taps=False).output}))
            (_, shown), *rest = runs
            found = diagnose(case, shown, self.port.name, self.progress, known, rest)
            if found.confidence == EXACT:
                names = tuple(f"{name}, without taps only" for name in found.candidates)
                return replace(found, sentence=f"without taps, {found.sentence}", candidates=names, config={})
        return Diagnosis(sentence, LIKELY)

    def _exported(self, case: Case, dtype: str) -> str:
        """Report how the exported weights are wrong, for example swapped, or return "" if no pattern is recognized."""
        with suppress(Exception):  # if the port can't be loaded, there are no weights to compare
            right = given(case.load_weights(), dtype)
            back = self._loaded(case, dtype).export()
            names = exchanged(back, right, "exported weight", lambda name: not np.array_equal(back[name], right[name]))
            return names or returned_in_words(back, right, case.config)
        return ""

    def _randomness(self, case: Case, dtype: str) -> str:
        """Report that two calls on the same input return different results.

        Return "" if the two results agree with each other, or if the calls fail.
        """
        with suppress(Exception):
            if case.is_forward:
                return is_random(self._loaded(case, dtype), case)
            if case.stage == GRADIENTS:
                return has_random_loss([tensors(self._loaded(case, dtype), case) for _ in range(2)])
        return ""

    def _kept_state(self, case: Case, shown: Arrays, dtype: str) -> str:
        """Report that a failing port keeps state between calls.

        Return "" unless the port agrees with the reference in this case immediately after it is reloaded.
        """
        if dtype != "float64" or STAGES[case.stage].trains:
            return ""
        with suppress(Exception):
            loaded = self.port.load(case.config, given(case.load_weights(), dtype), self.setting.placement(dtype))
            alone = Trials.of(case, {name: x for name, x in tensors(loaded, case).items() if name in shown})
            attempt = alone.run(TRUTH)
            if alone.names and attempt and attempt.is_exact and (usual := Trials.of(case, shown).run(TRUTH)):
                earlier = ", ".join(f"{one.stage} of {one.name}" for one in case.before)
                after = f"other calls, such as {earlier}" if earlier else "other calls"
                kept = f"{case.name} agrees on a newly loaded model, but differs after {after}"
                return "" if usual.is_exact else f"{kept}: your port keeps state from one call to the next"
        return ""

    def _measurements(self, case: Case, evidence: Evidence) -> list[str]:
        """Rerun the port. Report whether the error is only rounding, and which expected properties the port lacks."""
        placement = self.setting.placement(evidence.blame.dtype)
        rounded, noise = "", 0.0
        with suppress(Exception):  # ports may reject modified weights
            rounded, noise = rounding(case, self.port, placement)
        return [*filter(None, [rounded]), *lacking(case, self.port, placement, noise)]

    def _blame(self, subject: Subject) -> Evidence:
        return blame(self._loaded(subject.case, subject.dtype), subject)

    def _loaded(self, case: Case, dtype: str) -> LoadedPort:
        """Load the port, and make the calls that must precede the run of the case."""
        placement = self.setting.placement(dtype)
        loaded = self.port.load(case.config, given(case.load_weights(), dtype), placement)
        call_before(case, loaded, self.port, placement)
        return loaded

    def _saved(self, evidence: Evidence, case: Case) -> Path | None:
        """Save the inputs of the first block that introduces a difference, and return the directory with the inputs."""
        if self.directory is None or not evidence.blame.introduced:
            return None
        self.progress("saving the inputs of the first wrong block")
        with suppress(Exception):  # if saving fails, the rest of the report is still valid
            return reproduce.save(evidence, case, self.reference, self.directory)
        return None


def shared(case: Case) -> tuple[object, ...]:
    """Return the properties that two cases must share for the same candidate to apply to both cases."""
    fields = {name: value for name, value in case.config.to_dict().items() if not name.endswith("vocab_size")}
    return fields, case.block, case.stage


def first_failures(findings: Sequence[Finding], cases: Mapping[str, Case]) -> list[Finding]:
    """Return the first failure of each stage in float64, or in float32 if there are no failures in float64.

    If the ``activations`` stage fails, return only the first failure of this stage, because this failure may cause the
    failures of other stages. Omit the ``steps`` stage if the ``gradients`` stage fails. Also omit the ``steps`` stage
    if the ``decode`` stage fails and only the tokens in the ``steps`` stage are wrong. These tokens are the results of
    searches that run between two training steps.
    """
    failures = [f for f in findings if f.verdict in (DIVERGES, IMPRECISE, FAILED) and f.case in cases]
    for dtype in ("float64", "float32"):
        first: dict[str, Finding] = {}
        # Cases that run the full model come first, because a replay can locate the wrong block in these cases.
        for finding in sorted(failures, key=lambda f: (f.verdict == FAILED, cases[f.case].block != "")):
            if finding.dtype == dtype:
                first.setdefault(cases[finding.case].stage, finding)
        if ACTIVATIONS in first:
            return [first[ACTIVATIONS]]
        in_steps = [f.tap for f in failures if f.dtype == dtype and cases[f.case].stage == STEPS]
        if GRADIENTS in first or (DECODE in first and all(tap.endswith(" tokens") for tap in in_steps)):
            first.pop(STEPS, None)
        if first:
            return [first[name] for name in STAGES if name in first]
    return []


def forward_agrees(findings: Sequence[Finding]) -> bool:
    """Return whether activations were compared in float64 and all of them agree with the reference."""
    verdicts = {f.verdict for f in findings if f.stage == ACTIVATIONS and f.dtype == "float64"}
    return AGREES in verdicts and verdicts.isdisjoint((DIVERGES, IMPRECISE, FAILED))
