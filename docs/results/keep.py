"""The figures of checks and of a self-test that the site and the README show, taken from what the commands write.

parity check --json check.json && python docs/results/keep.py conformance check.json COMMIT
parity selftest --json selftest.json && python docs/results/keep.py selftest selftest.json COMMIT
python docs/results/keep.py mutation numpy.json torch.json jax.json tf.json COMMIT    (of transformer_bench.mutation)
python docs/results/keep.py devices torch.json jax.json tf.json COMMIT    (of parity check-distributed)
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections import Counter
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformer_parity.engine.system.machine import describe_machine

LIBRARIES = {"numpy": "numpy", "torch": "torch", "jax": "jax", "tf": "tensorflow"}
FOLDER = Path(__file__).parent


def conformance(report: dict[str, Any]) -> dict[str, Any]:
    """Return the verdict, and the worst comparison of each component."""
    return {
        **{name: report[name] for name in ("date", "verdict", "comparisons", "machine")},
        "time": {"seconds": report["seconds"], **report["time"]},
        "cases": len({row["case"] for row in report["cases"] if row["case"]}),
        "dtypes": report["setting"]["dtypes"],
        "versions": {name: found["version"] for name, found in report["environment"].items()},
        "summary": worst(report),
    }


def worst(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the comparison of each backend, dtype and component that comes closest to its tolerance."""
    return [
        {
            **{name: row[name] for name in ("backend", "dtype", "component", "comparisons", "verdict")},
            **{name: row["worst"][name] for name in ("case", "tap", "error", "tolerance", "share")},
        }
        for row in report["summary"]
    ]


def devices(*reports: dict[str, Any]) -> dict[str, Any]:
    """Return the worst comparison of each framework and plan, of reports of parity check-distributed."""
    return {
        **{name: reports[0][name] for name in ("date", "machine")},
        "cases": sum(len({row["case"] for row in report["cases"] if row["case"]}) for report in reports),
        "comparisons": sum(report["comparisons"] for report in reports),
        "versions": {name: found["version"] for one in reports for name, found in one["environment"].items()},
        "summary": [row for report in reports for row in worst(report)],
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


def mutation(*reports: dict[str, Any]) -> dict[str, Any]:
    """Return the number of mutants of each package that are caught, and the reason of each that survives."""
    packages = {name: found for report in reports for name, found in report["packages"].items()}
    return {
        **{name: reports[0][name] for name in ("date", "machine")},
        "versions": {name: version(LIBRARIES[name]) for name in packages},
        "packages": [
            {
                "package": name,
                **{count: found[count] for count in ("mutants", "run")},
                "columns": {
                    column: {"caught": one["caught"], **judged(column, one)} for column, one in found["columns"].items()
                },
            }
            for name, found in packages.items()
        ],
    }


def judged(column: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return the survivors of a column by their reasons in mutation-reasons.toml.

    Raises:
        SystemExit: A survivor has no reason.
    """
    reasons = tomllib.loads((FOLDER / "mutation-reasons.toml").read_text("utf-8"))["reason"]
    not_run = sum(mutant["cases"] == 0 for mutant in found["survivors"])
    kinds: dict[str, Counter[str]] = {"equivalent": Counter(), "missed": Counter()}
    missed = []
    for mutant in found["survivors"]:
        if mutant["cases"] == 0:
            continue
        place = f"{mutant['package']}.{mutant['module']}.{mutant['where']}"
        change = f"{mutant['old']} -> {mutant['new']}"
        for reason in reasons:
            if (
                column in reason.get("column", column)
                and re.search(reason.get("where", ""), place)
                and re.search(reason.get("change", ""), change)
                and reason.get("kind", mutant["kind"]) == mutant["kind"]
            ):
                break
        else:
            raise SystemExit(f"mutation-reasons.toml has no reason for {place} {mutant['kind']}: {change} ({column})")
        kind = "equivalent" if reason.get("equivalent", True) else "missed"
        kinds[kind][reason["why"]] += 1
        if kind == "missed":
            missed.append({"place": place, "kind": mutant["kind"], "change": change, "why": reason["why"]})
    equivalent = [{"why": why, "count": count} for why, count in kinds["equivalent"].most_common()]
    return {"not run": not_run, "equivalent": equivalent, "missed": missed}


def read(path: str) -> dict[str, Any]:
    """Return the result of a command, with what is particular to the command beside what all commands have."""
    document = json.loads(Path(path).read_text("utf-8"))
    return {**document, **document.get("result", {})}


KINDS = {"conformance": conformance, "devices": devices, "mutation": mutation, "selftest": selftest}


def main(kind: str, *paths: str, commit: str) -> None:
    """Write what is kept."""
    kept = {"commit": commit, **KINDS[kind](*map(read, paths))}
    (FOLDER / f"{kind}.json").write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    print("tests/test_readme.py compares README.md with these figures, and prints the lines that it should have")


if __name__ == "__main__":
    main(*sys.argv[1:-1], commit=sys.argv[-1])
