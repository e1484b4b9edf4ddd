"""The result of a check as one plain dict, from which every report is made.

``docs/result.schema.json`` describes the dict.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from transformer_parity.engine.findings import AGREES, SKIPPED, Finding
from transformer_parity.engine.outputs import TAPS
from transformer_parity.engine.report.result import by_case, compared, plain, tap_row
from transformer_parity.engine.verdict import Coverage, Verdict
from transformer_parity.transformer.cases.case import ACTIVATIONS, SENTENCES, Case
from transformer_parity.transformer.diagnose.investigate import FailureReport
from transformer_parity.transformer.ports.compile_clock import Spent
from transformer_parity.transformer.ports.protocol import Placements

FORMAT = 4
MAIN_CASE = "full/padded"
WHOLE_MODELS = ("full model", "presets", SENTENCES)  # components
Rows = Sequence[Mapping[str, Any]]


@dataclass(kw_only=True)
class CheckResult:
    """A run of ``parity check``: what was asked for, and what came of it.

    Attributes:
        setting: How the ports were run.
        findings: Every comparison.
        ports: The names of the ports that were asked for.
        asked: What had to be compared of each.
        environment: Versions and switches, by backend.
        machine: What it ran on.
        cases: What was run, for the fingerprint.
        weights: The file of a model of the user's own.
        text: The user's own two files of sentences; none for the shipped ones.
        not_tested: What was not asked for, and how to ask for it.
        failure_reports: Where differences were introduced, and what explains them.
        audits: ``{backend, weights: [{name, verdict, detail}]}`` each.
        seconds: How long it took.
        spent: What each port's process took of it, by backend.
        cpu_seconds: What this process took of all cores.
    """

    setting: Placements
    findings: Sequence[Finding] = ()
    ports: Sequence[str] = ()
    asked: Sequence[Coverage] = ()
    environment: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    cases: Sequence[Case] = ()
    weights: Path | None = None
    text: Sequence[Path] = ()
    not_tested: Sequence[str] = ()
    failure_reports: Sequence[FailureReport] = ()
    audits: Rows = ()
    seconds: float = 0.0
    spent: Mapping[str, Spent] = field(default_factory=dict)
    cpu_seconds: float = 0.0

    @cached_property
    def verdict(self) -> Verdict:
        """What the run ends with."""
        return Verdict.of(self.findings, self.asked)


def build(run: CheckResult) -> dict[str, Any]:
    """Return all that is known of a comparison, as plain values that JSON can hold."""
    texts = [str(path) for path in run.text or ("shipped",)]
    content = {
        "format": FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **compared(run.findings, run.verdict),
        "backends": list(run.ports),
        "setting": asdict(run.setting),
        "weights": None if run.weights is None else str(run.weights),
        "text": texts,
        "not_tested": run.not_tested,
        "machine": run.machine,
        "environment": run.environment,
        "fingerprint": _fingerprint(run, texts),
        "time": {
            "seconds": run.seconds,
            "cpu_seconds": run.cpu_seconds,
            "ports": {name: asdict(port) for name, port in run.spent.items()},
        },
        "cases": by_case(run.findings, ACTIVATIONS),
        "sentences": [finding.to_dict() for finding in run.findings if finding.component == SENTENCES],
        "taps": _taps(run.findings),
        "blames": [report.blame.to_dict() for report in run.failure_reports if report.blame],
        "diagnoses": [report.to_dict() for report in run.failure_reports if report.diagnosis],
        "audits": run.audits,
        "views": [report.view for report in run.failure_reports if report.view],
    }
    return plain(content)


def _taps(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """Return the taps of the main case, of real sentences, and of every whole model that failed."""
    taps = [finding for finding in findings if finding.component in WHOLE_MODELS and finding.path == TAPS]
    taps = [finding for finding in taps if finding.verdict != SKIPPED]
    names = list(dict.fromkeys(finding.case for finding in taps))
    shown = {finding.case for finding in taps if finding.component == SENTENCES or finding.verdict != AGREES}
    shown |= {MAIN_CASE} if MAIN_CASE in names or shown else set(names[:1])
    return [tap_row(finding) for finding in taps if finding.case in shown]


def _fingerprint(run: CheckResult, texts: Sequence[str]) -> dict[str, Any]:
    """Return what has to be equal to get the same numbers again, and one hash over it."""
    versions = {backend: described.get("version", "") for backend, described in run.environment.items()}
    switches = {
        backend: {name: value for name, value in described.items() if name != "version"}
        for backend, described in run.environment.items()
    }
    weights = None if run.weights is None else _hash([run.weights.read_bytes()])
    content = plain(
        {
            "config": _configs(run.cases),
            "versions": {**run.machine, **versions},
            "settings": {
                **asdict(run.setting),
                **{"weights": weights, "text": texts, "inputs": _hash(_input_bytes(run.cases))},
                **switches,
            },
        }
    )
    return {**content, "sha256": _hash([json.dumps(content, sort_keys=True, allow_nan=False).encode()])}


def _configs(cases: Iterable[Case]) -> list[dict[str, Any]]:
    """Return each config that a whole model was run with, and the cases that have it; the main case's first."""
    configs: dict[str, dict[str, Any]] = {}
    whole = [case for case in cases if not case.block]
    for case in sorted(whole, key=lambda case: case.name != MAIN_CASE):
        fields = case.config.to_dict()
        configs.setdefault(json.dumps(fields), {"cases": [], "fields": fields})["cases"].append(case.name)
    return list(configs.values())


def _input_bytes(cases: Iterable[Case]) -> Iterable[bytes]:
    for case in cases:
        yield f"{case.name} {case.seed}".encode()
        for name, array in case.inputs.items():
            yield f"{name} {array.dtype.name} {array.shape}".encode()
            yield array.tobytes()


def _hash(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
