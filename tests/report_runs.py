"""A run with agreement, divergence, and failures, used to test reports."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from transformer_parity.engine.findings import AGREES, DIVERGES, IMPRECISE, SKIPPED, Finding
from transformer_parity.engine.localization import FINE, INHERITED, INTRODUCED, Blame, Mark
from transformer_parity.engine.outputs import OUTPUT
from transformer_parity.transformer.cases.case import tiny
from transformer_parity.transformer.cases.standard import standard_cases
from transformer_parity.transformer.check.checked_port import CheckedPort
from transformer_parity.transformer.check.messages import PortJob
from transformer_parity.transformer.diagnose.diagnosis import Diagnosis
from transformer_parity.transformer.diagnose.investigate import FailureReport
from transformer_parity.transformer.diagnose.weight_audit import Fate
from transformer_parity.transformer.explore.recording import Recorded, Recording
from transformer_parity.transformer.explore.view import view
from transformer_parity.transformer.ports.protocol import Placements
from transformer_parity.transformer.report.result import CheckResult, build
from transformer_spec.names import tap_shapes

TAPS = [*tap_shapes(tiny(), 4, 9, 7), OUTPUT]
GUILTY = "encoder.layers.0.self_attention.scores"
CASES = [case for case in standard_cases() if case.name in ("full/padded", "full/untied", "gradients/padded")]
MACHINE = {"transformer-parity": "0.1.0", "python": "3.11.7", "platform": "somewhere", "cpus": 2}
SETTING = Placements(("float64", "float32"))
ENVIRONMENT = {name: {"version": f"1.0 of {name}", "threads": "1"} for name in ("numpy", "torch", "jax")}
ACTIVE = ("", "activations")  # detail (empty) and stage
SIMPLE = Finding(
    "torch", "float64", "full model", "full/padded", "taps", "logits", 1e-15, 1e-12, AGREES, "", "activations"
)
NASTY = "<script>alert('&')</script> \x1b[31mred\x1b[0m"


def run_of(backend: str, dtype: str, case: str = "full/padded", guilty: str = "") -> list[Finding]:
    """Return the findings for a full model in which all values are wrong from the guilty tap onward."""
    tolerance = {"float64": 1e-12, "float32": 1e-6}[dtype]
    verdict = {"float64": DIVERGES, "float32": IMPRECISE}[dtype]
    findings = []
    for tap in TAPS:
        wrong = bool(guilty) and TAPS.index(tap) >= TAPS.index(guilty)
        error, said = (0.25, verdict) if wrong else (tolerance / 4, AGREES)
        findings.append(Finding(backend, dtype, "full model", case, "taps", tap, error, tolerance, said, *ACTIVE))
    return findings


def blame_of(guilty: set[str], dtype: str = "float64", names: list[str] = TAPS) -> Blame:
    marks, wrong = [], False
    for name in names:
        wrong = wrong or name in guilty
        verdict = INTRODUCED if name in guilty else INHERITED if wrong else FINE
        error = 0.0 if verdict == FINE else 0.25
        marks.append(Mark(name, error, error if name in guilty else 0.0, 1e-12, verdict))
    return Blame("torch", dtype, "full/padded", "activations", "port", tuple(marks))


def ports_of(findings: list[Finding], environment=ENVIRONMENT, reports=(), fates=()) -> list[CheckedPort]:
    """Return the ports with their findings. The first port also has the given audit results."""
    names = dict.fromkeys(["torch", "jax", *(finding.backend for finding in findings)])
    ports = [CheckedPort(PortJob(name, SETTING), label=name, environment=environment.get(name, {})) for name in names]
    for port in ports:
        port.findings = [finding for finding in findings if finding.backend == port.label]
        port.failure_reports = [report for report in reports if report.backend == port.label]
    ports[0].audit = tuple(fates)
    return ports


def result_of(findings: list[Finding], ports=None, **options) -> dict:
    ports = ports_of(findings) if ports is None else ports
    known = {"reference": ENVIRONMENT["numpy"], "machine": MACHINE, **options}
    return build(CheckResult(setting=SETTING, ports=ports, **known))


@pytest.fixture(scope="module")
def result():
    findings = [finding for dtype in ("float64", "float32") for finding in run_of("torch", dtype, guilty=GUILTY)]
    findings += run_of("torch", "float64", "full/untied", guilty="logits")
    findings += [finding for dtype in ("float64", "float32") for finding in run_of("jax", dtype)]
    findings += run_of("jax", "float64", "full/untied")
    infinite = replace(
        SIMPLE, component="gradients", stage="gradients", case="gradients/padded", error=math.inf, verdict=DIVERGES
    )
    findings += [
        Finding(
            "jax", "float64", "weights", "gradients/padded", "load", "round trip", 0.0, 0.0, AGREES, "", "gradients"
        ),
        replace(infinite, tap="of target_embedding.table", detail=NASTY),
        replace(infinite, backend="jax", error=1e-15, verdict=AGREES),
        replace(
            SIMPLE,
            backend="jax",
            component="decoding",
            stage="decode",
            case="decode/beam",
            verdict=SKIPPED,
            detail="no search",
        ),
    ]
    weights = np.array([[[[0.25, 0.75], [1.0, 0.0]]]])
    marks = [Mark(GUILTY, 0.25, 0.25, 1e-12, INTRODUCED)]
    recording = Recording("float64", {GUILTY: weights}, [Recorded("torch", marks, {GUILTY: weights[..., ::-1]})], {})
    shown = view(recording, "float64 full/padded", {"source": [["5", "6"]], "target": [["7"]]})
    place = ("torch", "float64", "full/padded", "activations")
    fates = [Fate("a.kernel", "transposed", NASTY), Fate("b", "used")]
    diagnosis = Diagnosis("torch does not scale the scores", "exact", ("scores not scaled",))
    reports = [
        FailureReport(*place, blame_of({GUILTY}), diagnosis, shown),
        FailureReport("torch", "float32", *place[2:], blame_of({GUILTY}, "float32"), None),
    ]
    ports = ports_of(findings, reports=reports, fates=fates)
    return result_of(findings, ports=ports, cases=CASES, not_tested=["gpu (use --device gpu)"])
