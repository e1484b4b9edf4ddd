"""Convert findings to built-in Python types, with the same keys in every command's result."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy import ndarray

from transformer_parity.engine.findings import AGREES, SKIPPED, Finding
from transformer_parity.engine.verdict import Verdict, worst

TAP_KEYS = ("backend", "dtype", "case", "path", "tap", "error", "tolerance", "ratio", "verdict")


def compared(findings: Sequence[Finding], verdict: Verdict) -> dict[str, Any]:
    """Return the numbers of comparisons and skips, a summary, and lists of all failures, skips, and near-ties."""
    skips = [finding for finding in findings if finding.verdict == SKIPPED]
    failures = [finding for finding in findings if finding.verdict not in (AGREES, SKIPPED)]
    return {
        "missing": verdict.missing,
        "comparisons": len(findings) - len(skips),
        "skipped": len(skips),
        "summary": summarize(findings),
        "near_ties": [finding.to_dict() for finding in findings if finding.is_near_tie],
        "failures": [finding.to_dict() for finding in failures],
        "skips": [finding.to_dict() for finding in skips],
    }


def summarize(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return the worst finding for each backend, dtype, and component."""
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


def by_case(findings: Iterable[Finding], usual: str) -> list[dict[str, Any]]:
    """Return the result of each case in each dtype: the verdict, and the first finding that failed.

    If nothing failed, the result contains the finding with the largest ratio of error to tolerance.

    Args:
        findings: All findings.
        usual: The stage to use for findings about an implementation as a whole.
    """
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.backend, finding.dtype, finding.case), []).append(finding)
    rows = []
    for (backend, dtype, case), group in groups.items():
        compared = [finding for finding in group if finding.verdict != SKIPPED]
        failing = [finding for finding in compared if finding.verdict != AGREES]
        shown = failing[0] if failing else worst(compared or group)
        rows.append(
            {
                "backend": backend,
                "dtype": dtype,
                "case": case,
                "stage": group[0].stage or usual,
                "verdict": worst(group).verdict,
                "comparisons": len(compared),
                "failed": len(failing),
                "skips": [finding.detail for finding in group if finding.verdict == SKIPPED],
                "finding": shown.to_dict(),
            }
        )
    return rows


def tap_row(finding: Finding) -> dict[str, Any]:
    """Return the fields that identify the tensor of a finding, and the finding's error, tolerance, and verdict."""
    return {key: value for key, value in finding.to_dict().items() if key in TAP_KEYS}


def plain(value: Any) -> Any:
    """Convert sequences, mappings, and arrays to lists, dicts, and numbers.

    Infinity and NaN are converted to strings, because JSON doesn't support them.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, ndarray | np.generic):
        return plain(value.tolist())
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
