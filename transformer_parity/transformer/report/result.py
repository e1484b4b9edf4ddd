"""The result of a check, and its conversion to a dict from which all reports are generated."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from transformer_parity.engine.findings import AGREES, SKIPPED, Finding
from transformer_parity.engine.outputs import TAPS
from transformer_parity.engine.report.envelope import envelope
from transformer_parity.engine.report.result import by_case, compared, plain, tap_row
from transformer_parity.engine.verdict import Coverage, Verdict
from transformer_parity.transformer.cases.case import ACTIVATIONS, SENTENCES, Case
from transformer_parity.transformer.check.checked_port import CheckedPort
from transformer_parity.transformer.diagnose.investigate import FailureReport
from transformer_parity.transformer.ports.compile_clock import Spent
from transformer_parity.transformer.ports.protocol import Placements

MAIN_CASE = "full/padded"
WHOLE_MODELS = ("full model", "presets", SENTENCES)  # components whose cases run the entire model


@dataclass(kw_only=True)
class CheckResult:
    """The result of ``parity check`` or ``parity check-distributed``.

    Attributes:
        command: ``check`` or ``check-distributed``.
        setting: The dtypes, device, and precision in which the ports ran.
        ports: The ports with their findings and diagnoses.
        asked: The comparisons that were requested, one entry per port.
        reference: Package versions and settings of the reference.
        machine: A description of the machine.
        cases: The cases, which are part of the fingerprint.
        weights: The user's weight file; None if the weights were generated.
        text: The user's two text files; empty if the included sentences were used.
        not_tested: Descriptions of the comparisons that were not requested, with the options that request them.
        seconds: The duration of the check in seconds.
        cpu_seconds: The CPU time of this process in seconds, summed over all cores.
    """

    command: str = "check"
    setting: Placements
    ports: Sequence[CheckedPort] = ()
    asked: Sequence[Coverage] = ()
    reference: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    cases: Sequence[Case] = ()
    weights: Path | None = None
    text: Sequence[Path] = ()
    not_tested: Sequence[str] = ()
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    @cached_property
    def verdict(self) -> Verdict:
        """The verdict on all ports."""
        return Verdict.of(self.findings, self.asked)

    @cached_property
    def findings(self) -> list[Finding]:
        """All findings, port by port."""
        return [finding for port in self.ports for finding in port.findings]

    @property
    def names(self) -> list[str]:
        """The names of the ports."""
        return [port.label for port in self.ports]

    @property
    def environment(self) -> dict[str, Mapping[str, str]]:
        """A dict from the name of each port or backend to its package versions and settings."""
        return {"numpy": self.reference, **{port.label: port.environment for port in self.ports if port.environment}}

    @property
    def failure_reports(self) -> list[FailureReport]:
        """The failure reports of all ports: the blocks that introduced differences, and the diagnoses."""
        return [report for port in self.ports for report in port.failure_reports]

    @property
    def spent(self) -> dict[str, Spent]:
        """A dict from each port to the time that its process used."""
        return {port.label: port.spent for port in self.ports if port.spent}


def build(result: CheckResult) -> dict[str, Any]:
    """Return the full result of a check as built-in Python types, in the envelope that all commands use."""
    texts = [str(path) for path in result.text or ("shipped",)]
    content = {
        **compared(result.findings, result.verdict),
        "backends": result.names,
        "setting": asdict(result.setting),
        "weights": None if result.weights is None else str(result.weights),
        "text": texts,
        "not_tested": result.not_tested,
        "fingerprint": _fingerprint(result, texts),
        "time": {
            "cpu_seconds": result.cpu_seconds,
            "ports": {name: asdict(port) for name, port in result.spent.items()},
        },
        "cases": by_case(result.findings, ACTIVATIONS),
        "sentences": [finding.to_dict() for finding in result.findings if finding.component == SENTENCES],
        "taps": _taps(result.findings),
        "blames": [report.blame.to_dict() for report in result.failure_reports if report.blame],
        "diagnoses": [report.to_dict() for report in result.failure_reports if report.diagnosis],
        "audits": [
            {"backend": port.label, "weights": [fate.to_dict() for fate in port.audit]}
            for port in result.ports
            if port.audit
        ],
        "views": [report.view for report in result.failure_reports if report.view],
    }
    return envelope(
        result.command,
        content,
        exit_code=result.verdict.exit_code,
        environment=result.environment,
        seconds=result.seconds,
    )


def _taps(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """Return the tap errors in the main case, the sentence cases, and all failing cases that run the full model."""
    taps = [finding for finding in findings if finding.component in WHOLE_MODELS and finding.path == TAPS]
    taps = [finding for finding in taps if finding.verdict != SKIPPED]
    names = list(dict.fromkeys(finding.case for finding in taps))
    shown = {finding.case for finding in taps if finding.component == SENTENCES or finding.verdict != AGREES}
    shown |= {MAIN_CASE} if MAIN_CASE in names or shown else set(names[:1])
    return [tap_row(finding) for finding in taps if finding.case in shown]


def _fingerprint(result: CheckResult, texts: Sequence[str]) -> dict[str, Any]:
    """Return all configs, versions, and settings that affect the results, with a hash of this information."""
    versions = {backend: described.get("version", "") for backend, described in result.environment.items()}
    switches = {
        backend: {name: value for name, value in described.items() if name != "version"}
        for backend, described in result.environment.items()
    }
    weights = None if result.weights is None else _hash([result.weights.read_bytes()])
    content = plain(
        {
            "config": _configs(result.cases),
            "versions": {**result.machine, **versions},
            "settings": {
                **asdict(result.setting),
                **{"weights": weights, "text": texts, "inputs": _hash(_input_bytes(result.cases))},
                **switches,
            },
        }
    )
    return {**content, "sha256": _hash([json.dumps(content, sort_keys=True, allow_nan=False).encode()])}


def _configs(cases: Iterable[Case]) -> list[dict[str, Any]]:
    """Return the configs of all cases that run the full model, with the case names. The main case comes first."""
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
