"""The figures of a check and of a self-test that the site and the README show, taken from what the commands write.

parity check --json check.json && python docs/results/keep.py conformance check.json COMMIT
parity selftest --json selftest.json && python docs/results/keep.py selftest selftest.json COMMIT
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformer_parity.system.machine import describe_machine

LIBRARIES = {"numpy": "numpy", "torch": "torch", "jax": "jax", "tf": "tensorflow"}
FOLDER = Path(__file__).parent


def conformance(report: dict[str, Any]) -> dict[str, Any]:
    """Return the verdict, and the worst comparison of each component."""
    rows = [
        {
            **{name: row[name] for name in ("backend", "dtype", "component", "comparisons", "verdict")},
            **{name: row["worst"][name] for name in ("case", "tap", "error", "tolerance", "share")},
        }
        for row in report["summary"]
    ]
    return {
        **{name: report[name] for name in ("date", "verdict", "comparisons", "machine", "time")},
        "cases": len({row["case"] for row in report["cases"] if row["case"]}),
        "dtypes": report["setting"]["dtypes"],
        "versions": {name: found["version"] for name, found in report["environment"].items()},
        "summary": rows,
    }


def selftest(report: dict[str, Any]) -> dict[str, Any]:
    """Return how many mistakes of each part were planted, caught, located and named; of this environment."""
    by: dict[str, list[dict[str, Any]]] = {}
    for trial in report["trials"]:
        by.setdefault(trial["part"], []).append(trial)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": {name: version(package) for name, package in LIBRARIES.items()},
        "parts": [{"part": part, **counted(trials)} for part, trials in by.items()],
        "together": counted(report["trials"]),
    }


def counted(trials: list[dict[str, Any]]) -> dict[str, int]:
    """Return how many of some trials ended well."""
    nameable = [trial for trial in trials if trial["named"] is not None]
    return {
        "planted": len(trials),
        "caught": sum(trial["caught"] for trial in trials),
        "located": sum(trial["located"] for trial in trials),
        "named": sum(bool(trial["named"]) for trial in nameable),
        "nameable": len(nameable),
    }


KINDS = {"conformance": conformance, "selftest": selftest}


def main(kind: str, path: str, commit: str) -> None:
    """Write what is kept."""
    kept = {"commit": commit, **KINDS[kind](json.loads(Path(path).read_text("utf-8")))}
    (FOLDER / f"{kind}.json").write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    print("tests/test_readme.py compares README.md with these figures, and prints the lines that it should have")


if __name__ == "__main__":
    main(*sys.argv[1:])
