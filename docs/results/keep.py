"""Store the results that the site and the README show, from the JSON output of the commands.

parity check --json check.json && python docs/results/keep.py conformance check.json COMMIT
parity selftest --json selftest.json && python docs/results/keep.py selftest selftest.json COMMIT
python docs/results/keep.py mutation numpy.json torch.json jax.json tf.json COMMIT    (of transformer_bench.mutation)
python docs/results/keep.py devices torch.json jax.json tf.json COMMIT    (of parity check-distributed)
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections import Counter
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformer_parity.engine.system.machine import describe_machine

LIBRARIES = {"numpy": "numpy", "torch": "torch", "jax": "jax", "tf": "tensorflow"}
CHECK = "check of the packages"  # every survivor in this column needs a reason
DIRECTORY = Path(__file__).parent


def conformance(report: dict[str, Any]) -> dict[str, Any]:
    """Return the verdict and the comparison of each component that comes closest to its tolerance."""
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
            **{name: row["worst"][name] for name in ("case", "tap", "error", "tolerance", "ratio")},
        }
        for row in report["summary"]
    ]


def devices(*reports: dict[str, Any]) -> dict[str, Any]:
    """Return the comparison of each framework and plan closest to its tolerance, from check-distributed reports."""
    return {
        **{name: reports[0][name] for name in ("date", "machine")},
        "cases": sum(len({row["case"] for row in report["cases"] if row["case"]}) for report in reports),
        "comparisons": sum(report["comparisons"] for report in reports),
        "versions": {name: found["version"] for one in reports for name, found in one["environment"].items()},
        "summary": [row for report in reports for row in worst(report)],
    }


def selftest(report: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of bugs that were injected, caught, located and named, by part."""
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
    """Return the number of trials with each outcome."""
    nameable = [trial for trial in trials if trial["named"] is not None]
    return {
        "injected": len(trials),
        "caught": sum(trial["caught"] for trial in trials),
        "located": sum(trial["located"] for trial in trials),
        "named": sum(bool(trial["named"]) for trial in nameable),
        "nameable": len(nameable),
    }


def mutation(*reports: dict[str, Any]) -> dict[str, Any]:
    """Return the number of caught mutants of each package, and the reason for each survivor."""
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
    """Return the survivors of a column, grouped by their reasons in mutation-reasons.toml.

    Raises:
        SystemExit: If a survivor of the check has no reason.
    """
    reasons = tomllib.loads((DIRECTORY / "mutation-reasons.toml").read_text("utf-8"))
    known = {
        mutant: (kind, reason["why"])
        for kind in ("equivalent", "missed")
        for reason in reasons[kind]
        for mutant in reason["mutants"]
    }
    survivors = [one for one in found["survivors"] if one["cases"]]
    equivalent: Counter[str] = Counter()
    missed, unexamined = [], 0
    for one in survivors:
        place, change = f"{one['package']}.{one['module']}.{one['where']}", f"{one['old']} -> {one['new']}"
        kind, why = known.get(f"{place} {one['kind']}: {change}", ("", ""))
        if kind == "equivalent":
            equivalent[why] += 1
        elif kind == "missed":
            missed.append({"place": place, "kind": one["kind"], "change": change, "why": why})
        elif column == CHECK:
            raise SystemExit(
                f"mutation-reasons.toml has no reason for {place} {one['kind']}: {change}. Add a reason or a case"
            )
        else:
            unexamined += 1
    return {
        "not run": len(found["survivors"]) - len(survivors),
        "equivalent": [{"why": why, "count": count} for why, count in equivalent.most_common()],
        "missed": missed,
        "unexamined": unexamined,
    }


def read(path: str) -> dict[str, Any]:
    """Return the JSON output of a command with the entries of ``result`` at the top level."""
    document = json.loads(Path(path).read_text("utf-8"))
    return {**document, **document.get("result", {})}


KINDS = {"conformance": conformance, "devices": devices, "mutation": mutation, "selftest": selftest}


def main(kind: str, *paths: str, commit: str) -> None:
    """Write the results to keep."""
    kept = {"commit": commit, **KINDS[kind](*map(read, paths))}
    (DIRECTORY / f"{kind}.json").write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    print("Run tests/test_readme.py to compare docs/how-to/install.md with these figures; it prints expected lines")


if __name__ == "__main__":
    main(*sys.argv[1:-1], commit=sys.argv[-1])
