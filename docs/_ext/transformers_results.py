"""Tables generated from the committed results of the comparison with transformers 4.57."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from panes import TITLES
from results import RESULTS, read, stamp

JUDGES = {"flax": "Flax", "tf": "TensorFlow"}


def transformers(part: str) -> Iterator[str]:
    """Yield the lines of one part of the page, in Markdown: ``summary``, ``models``, or ``searches``."""
    report = read(RESULTS / "transformers.json")
    yield from PARTS[part](report)


def summary(report: dict[str, Any]) -> Iterator[str]:
    """Yield two paragraphs, with the totals and with the versions."""
    rows = report["models"]
    agreeing = [row for row in rows if row["verdict"] == "agrees"]
    exact = [row for row in rows if row["title"] not in ("T5", "MT5")]  # Flax rounds T5's norms to float32
    float64 = max(row["judges"]["flax float64"] for row in exact)
    float32 = max(error for row in rows for name, error in row["judges"].items() if name.endswith("float32"))
    allowed = max(
        row["judges"][name] / row["allowed"]["float32"] for row in rows for name in row["judges"] if "32" in name
    )
    searches = [one for row in rows for one in row["searches"]]
    total = sum(one["sentences"] for one in searches)
    equal = sum(one["equal"]["numpy"] for one in searches)
    cut = sum(one["cut"] for one in searches)
    yield (
        f"{len(agreeing)} of {len(rows)} models agree. The largest relative error of the logits is "
        f"{float64:.1e} in float64 (Flax without T5) and {float32:.1e} in float32 (Flax and TensorFlow). In float32, "
        f"the errors are at most {allowed:.0%} of the tolerance. {equal:,} of {total:,} translations are equal, and "
        f"the other {total - equal} reach the maximum length in `parity`"
        + (" (see below)." if cut == total - equal else ".")
    )
    yield ""
    titles = {"transformers 5": "transformers with PyTorch"}
    yield stamp(report, {titles.get(name, name): number for name, number in report["versions"].items()})


def models(report: dict[str, Any]) -> Iterator[str]:
    """Yield one table of the errors of the logits, relative to the NumPy reference in float64."""
    yield "| model | fields | Flax, float64 | Flax | TensorFlow | `parity`, float32 | tolerance, float32 | verdict |"
    yield "|---|---|---:|---:|---:|---:|---:|---|"
    for row in report["models"]:
        errors = [row["judges"].get(name) for name in ("flax float64", "flax float32", "tf float32")]
        cells = [*errors, max(row["backends"].values()), row["allowed"]["float32"]]
        shown = " | ".join("not supported" if error is None else f"{error:.1e}" for error in cells)
        fields = f"`{row['fields']}`" if row["fields"] else ""
        yield f"| {row['name'].partition(',')[0]} | {fields} | {shown} | {row['verdict']} |"


def searches(report: dict[str, Any]) -> Iterator[str]:
    """Yield one table of the searches of all models."""
    rows = [(row, one) for row in report["models"] for one in row["searches"]]
    columns = ("equal in NumPy (float64)", "equal in other backends (float32)", "equal without the change to Flax")
    yield f"| search | class | models | different translations | {' | '.join(columns)} |"
    yield "|---|---|---:|---:|---:|---|---:|"
    for name, judge in dict.fromkeys((one["name"], one["judge"]) for _, one in rows):
        chosen = [one for _, one in rows if (one["name"], one["judge"]) == (name, judge)]
        total = sum(one["sentences"] for one in chosen)
        equal = {backend: sum(one["equal"].get(backend, 0) for one in chosen) for backend in chosen[0]["equal"]}
        ports = ", ".join(f"{TITLES[backend]} {number}" for backend, number in equal.items() if backend != "numpy")
        own = [one for one in chosen if "original" in one]
        original = f"{sum(one['original'] for one in own)} of {sum(one['sentences'] for one in own)}" if own else ""
        yield (
            f"| {name} | {JUDGES[judge]} | {len(chosen)} | {sum(one['distinct'] for one in chosen)} | "
            f"{equal['numpy']} of {total} | {ports} | {original} |"
        )


PARTS = {"summary": summary, "models": models, "searches": searches}
