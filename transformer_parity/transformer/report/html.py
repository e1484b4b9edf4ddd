"""Write the result of a check as one self-contained HTML page.

The page supports screens of any size, light and dark mode, and printing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from transformer_parity.engine.findings import AGREES, DIVERGES, FAILED, IMPRECISE, SKIPPED
from transformer_parity.engine.localization import FINE, INHERITED, INTRODUCED, Mark
from transformer_parity.engine.report.matrix import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    STEP_NAMES,
    TOP,
    WIDTH,
    matrices,
    number,
    percent,
    percentage,
)
from transformer_parity.engine.report.page import environment, parts
from transformer_parity.engine.report.tree import WAYS, Node, first_places, nodes
from transformer_parity.engine.system.files import write_text
from transformer_parity.transformer.report.result import MAIN_CASE

Result = Mapping[str, Any]
SEVERITY = (FAILED, DIVERGES, IMPRECISE, AGREES, SKIPPED)  # from worst to best
MATRICES = 6  # maximum number of cases for which the page contains a table of all taps
FOLDED_LENGTH = 3  # number of list entries shown before the rest is collapsed


def write_html(path: Path, result: Result) -> None:
    """Write the HTML page for a result that ``result.build`` returned. The file is written atomically."""
    write_text(path, html(result))


def html(document: Result) -> str:
    """Return the HTML page for a result that is wrapped in its envelope."""
    result = {**document, **document["result"]}
    templates = environment("transformer_parity.transformer.report")
    templates.filters |= {"number": number, "percentage": percentage, "percent": percent, "breakable": breakable}
    found, trees = matrices(result, MAIN_CASE), _trees(result)
    return templates.get_template("report.html").render(
        **parts(result["views"]),
        result=result,
        verdict=result["verdict"].capitalize(),
        counts=_counts(result),
        ports=_ports(result),
        trees=trees[0],
        more_trees=trees[1],
        matrices=found[:MATRICES],
        more_matrices=[matrix.case for matrix in found[MATRICES:]],
        components=_components(result),
        skips=_skips(result),
        configs=_configs(result),
        steps=list(enumerate(STEP_NAMES)),
        folded=FOLDED_LENGTH,
        size=(WIDTH, HEIGHT),
        frame=(LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM),
    )


def breakable(name: str) -> Markup:
    """Return a name as HTML that allows line breaks only after dots."""
    return Markup(".<wbr>").join(name.split("."))


def _counts(result: Result) -> list[tuple[str, str]]:
    cases = len({row["case"] for row in result["cases"] if row["case"]})
    counted = [
        (len(result["backends"]), "port"),
        (cases, "case"),
        (result["comparisons"], "comparison"),
        (len(result["failures"]), "failure"),
        (result["skipped"], "skip"),
        (len(result["near_ties"]), "near-tie"),
    ]
    return [(f"{count:,}", noun if count == 1 else f"{noun}s") for count, noun in counted]


def _ports(result: Result) -> list[dict[str, Any]]:
    """Return each port's verdicts, worst errors, and diagnoses."""
    names = list(dict.fromkeys([row["backend"] for row in result["summary"]])) or list(result["backends"])
    ports = []
    for name in names:
        rows = [row for row in result["summary"] if row["backend"] == name]
        worst = [row["worst"] for row in rows if row["verdict"] not in (SKIPPED, FAILED)]
        ports.append(
            {
                "name": name,
                "verdicts": _verdicts(row for row in result["cases"] if row["backend"] == name and row["case"]),
                "comparisons": sum(row["comparisons"] for row in result["cases"] if row["backend"] == name),
                "worst": max(worst, key=lambda finding: float(finding["ratio"]), default=None),
                "problems": [row["worst"]["detail"] for row in rows if row["verdict"] == FAILED],
                "diagnoses": _diagnoses([entry for entry in result["diagnoses"] if entry["backend"] == name]),
                "version": result["environment"].get(name, {}).get("version", ""),
            }
        )
    return ports


def _verdicts(rows: Iterable[Result]) -> list[tuple[str, int]]:
    """Return the number of cases with each verdict. The verdict on a case is its worst verdict across all dtypes."""
    worst: dict[str, int] = {}
    for row in rows:
        worst[row["case"]] = min(worst.get(row["case"], len(SEVERITY)), SEVERITY.index(row["verdict"]))
    return [(verdict, count) for i, verdict in enumerate(SEVERITY) if (count := list(worst.values()).count(i))]


def _components(result: Result) -> dict[str, Any]:
    """Return the table that is also printed in the terminal: the worst finding for each component, dtype, and port."""
    rows = [row for row in result["summary"] if row["component"] and row["dtype"]]
    columns = list(dict.fromkeys((row["dtype"], row["backend"]) for row in rows))
    columns.sort(key=lambda column: [row["dtype"] for row in rows].index(column[0]))
    cells = {(row["component"], row["dtype"], row["backend"]): row for row in rows}
    return {
        "columns": columns,
        "rows": [
            (component, [cells.get((component, *column)) for column in columns])
            for component in dict.fromkeys(row["component"] for row in rows)
        ],
    }


def _diagnoses(entries: Iterable[Result]) -> list[dict[str, Any]]:
    """Return the diagnoses, with identical diagnoses of multiple cases merged into one."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for entry in _main_first(entries):
        key = tuple(entry["candidates"]) or (entry["sentence"],)
        group = found.setdefault(key, {"directory": None, **entry, "places": []})
        group["places"].append(f"{entry['dtype']} {entry['case']}")
    return list(found.values())


def _main_first(entries: Iterable[Result]) -> list[Any]:
    """Sort entries so that the main case comes first, and float64 comes before other dtypes."""
    return sorted(entries, key=lambda entry: (entry["case"] != MAIN_CASE, entry["dtype"] != "float64"))


def _trees(result: Result) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the trees that show where differences start, in two lists: the first tree of each port, and the rest."""
    first: dict[str, dict[str, Any]] = {}
    others = []
    for blame in _main_first(result["blames"]):
        tree = _tree(blame)
        if first.setdefault(blame["backend"], tree) is not tree:
            others.append(tree)
    return list(first.values()), others


def _tree(blame: Result) -> dict[str, Any]:
    marks = [
        Mark(**{**mark, **{key: float(mark[key]) for key in ("free", "isolated", "tolerance")}})
        for mark in blame["marks"]
    ]
    return {
        **{key: blame[key] for key in ("backend", "dtype", "case", "stage")},
        "way": WAYS[blame["replayed"]],
        "counts": [
            (verdict, sum(mark.verdict == verdict for mark in marks)) for verdict in (INTRODUCED, INHERITED, FINE)
        ],
        "parts": [_part(node, first_places(marks)) for node in nodes(marks)],
    }


def _part(node: Node, first: Mapping[str, int]) -> dict[str, Any]:
    """Return the content of a tree node. A node is expanded if it contains the first of several similar differences."""
    marks = list(node.marks())
    return {
        "name": node.name,
        "verdict": node.verdict,
        "mark": node.mark,
        "count": len(marks),
        "failing": sum(mark.verdict != FINE for mark in marks),
        "origin": sum(mark.verdict == INTRODUCED for mark in marks),
        "is_open": any(mark.name in first for mark in marks),
        "others": first.get(node.mark.name, 0) if node.mark else 0,
        "parts": [_part(part, first) for part in node.parts],
    }


def _skips(result: Result) -> list[dict[str, Any]]:
    """Group the skips by backend and reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for skip in result["skips"]:
        places = groups.setdefault((skip["backend"], skip["detail"]), [])
        places.append(f"{skip['dtype']} {skip['case']}".strip())
    return [
        {"backend": backend, "why": why, "places": list(dict.fromkeys(places))}
        for (backend, why), places in groups.items()
    ]


def _configs(result: Result) -> list[dict[str, Any]]:
    """Return all fields of the first config. For each other config, return the fields that differ from the first."""
    configs = result["fingerprint"]["config"]
    if not configs:
        return []
    first = configs[0]["fields"]
    return [
        {
            "cases": config["cases"],
            "fields": {key: value for key, value in config["fields"].items() if not i or value != first[key]},
        }
        for i, config in enumerate(configs)
    ]
