"""The result of a comparison as one plain dict, from which every report is made; and how reports are written.

``docs/result.schema.json`` describes the dict.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from transformer_parity.cases.case import ACTIVATIONS, DECODE, GRADIENTS, SENTENCES, STEPS, Case
from transformer_parity.compare.findings import (
    AGREES,
    SKIPPED,
    Finding,
    Setting,
    exit_code,
    is_near_tie,
    overall,
    worst,
)
from transformer_parity.diagnose.blame import Blame
from transformer_parity.ports.compile_clock import Spent
from transformer_parity.report.tables import summarise
from transformer_parity.system.files import write_atomically

FORMAT = 2
MAIN_CASE = "full/padded"
WHOLE_MODELS = ("full model", "presets", SENTENCES)  # components
STAGES = {"gradients": GRADIENTS, "optimizer steps": STEPS, "decoding": DECODE}  # by component; all others: activations
Rows = Sequence[Mapping[str, Any]]


def build(
    findings: Sequence[Finding],
    ports: Sequence[str],
    setting: Setting,
    environment: Mapping[str, Mapping[str, str]],
    machine: Mapping[str, Any],
    *,
    cases: Sequence[Case] = (),
    weights: Path | None = None,
    text: Sequence[Path] = (),
    not_tested: Sequence[str] = (),
    blames: Iterable[Blame] = (),
    diagnoses: Rows = (),
    audits: Rows = (),
    attention: Rows = (),
    seconds: float = 0.0,
    spent: Mapping[str, Spent] | None = None,
) -> dict[str, Any]:
    """Return all that is known of a comparison, as plain values that JSON can hold.

    Args:
        findings: Every comparison made.
        ports: The names of the ports that were asked for.
        setting: How they were run.
        environment: Versions and switches, by backend.
        machine: What it ran on.
        cases: What was run, for the fingerprint.
        weights: The file of a model of the user's own.
        text: The user's own two files of sentences; none for the shipped ones.
        not_tested: What was left out, and how to ask for it.
        blames: Where differences were introduced.
        diagnoses: ``{backend, dtype, case, stage, **Diagnosis.to_dict()}`` each.
        audits: ``{backend, weights: [{name, verdict, detail}]}`` each.
        attention: What ``investigate.attention_maps`` returns.
        seconds: How long it took.
        spent: What each port's process took of it, by backend.
    """
    skips = [finding for finding in findings if finding.verdict == SKIPPED]
    failures = [finding for finding in findings if finding.verdict not in (AGREES, SKIPPED)]
    texts = [str(path) for path in text or ("shipped",)]
    content = {
        "format": FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "verdict": overall(findings),
        "exit_code": exit_code(findings),
        "backends": list(ports),
        "setting": asdict(setting),
        "weights": None if weights is None else str(weights),
        "text": texts,
        "not_tested": not_tested,
        "machine": machine,
        "environment": environment,
        "fingerprint": _fingerprint(setting, environment, machine, cases, weights, texts),
        "time": {"seconds": seconds, "ports": {name: asdict(port) for name, port in (spent or {}).items()}},
        "comparisons": len(findings) - len(skips),
        "skipped": len(skips),
        "summary": summarise(findings),
        "cases": _by_case(findings),
        "near_ties": [finding.to_dict() for finding in findings if is_near_tie(finding)],
        "failures": [finding.to_dict() for finding in failures],
        "skips": [finding.to_dict() for finding in skips],
        "sentences": [finding.to_dict() for finding in findings if finding.component == SENTENCES],
        "taps": _taps(findings),
        "blames": [blame.to_dict() for blame in blames],
        "diagnoses": diagnoses,
        "audits": audits,
        "attention": attention,
    }
    return plain(content)


def plain(value: Any) -> Any:
    """Return lists, dicts and numbers for any sequence, mapping and array; what is not finite becomes a string.

    JSON has no number for an infinite error, nor for NaN.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, ndarray | np.generic):
        return plain(value.tolist())
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Write the result for machines, atomically."""
    write_atomically(path, json.dumps(result, indent=1, allow_nan=False) + "\n")


def _taps(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """Return the taps of the main case, of real sentences, and of every whole model that failed."""
    taps = [finding for finding in findings if finding.component in WHOLE_MODELS and finding.path == "taps"]
    taps = [finding for finding in taps if finding.verdict != SKIPPED]
    names = list(dict.fromkeys(finding.case for finding in taps))
    shown = {finding.case for finding in taps if finding.component == SENTENCES or finding.verdict != AGREES}
    shown |= {MAIN_CASE} if MAIN_CASE in names or shown else set(names[:1])
    keys = ("backend", "dtype", "case", "path", "tap", "error", "tolerance", "share", "verdict")
    return [{key: finding.to_dict()[key] for key in keys} for finding in taps if finding.case in shown]


def _by_case(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """Return what became of each case in each dtype: its verdict, and the first finding that failed or was skipped."""
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.backend, finding.dtype, finding.case), []).append(finding)
    rows = []
    for (backend, dtype, case), group in groups.items():
        # The round trip of the weights stands beside the first case of a model.
        component = next((finding.component for finding in group if finding.component != "weights"), "weights")
        compared = [finding for finding in group if finding.verdict != SKIPPED]
        failing = [finding for finding in compared if finding.verdict != AGREES]
        shown = failing[0] if failing else worst(compared or group)
        rows.append(
            {
                "backend": backend,
                "dtype": dtype,
                "case": case,
                "stage": STAGES.get(component, ACTIVATIONS),
                "verdict": worst(group).verdict,
                "comparisons": len(compared),
                "failed": len(failing),
                "skips": [finding.detail for finding in group if finding.verdict == SKIPPED],
                "finding": shown.to_dict(),
            }
        )
    return rows


def _fingerprint(
    setting: Setting,
    environment: Mapping[str, Mapping[str, str]],
    machine: Mapping[str, Any],
    cases: Sequence[Case],
    weights: Path | None,
    texts: Sequence[str],
) -> dict[str, Any]:
    """Return what has to be equal to get the same numbers again, and one hash over it."""
    versions = {**machine, **{backend: described.get("version", "") for backend, described in environment.items()}}
    switches = {
        backend: {name: value for name, value in described.items() if name != "version"}
        for backend, described in environment.items()
    }
    content = plain(
        {
            "config": _configs(cases),
            "versions": versions,
            "settings": {
                **asdict(setting),
                **{"weights": None if weights is None else _hash([weights.read_bytes()]), "text": texts},
                "inputs": _hash(_input_bytes(cases)),
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
