"""Tables generated from the committed results of checks, self-tests, mutation tests, and benchmarks."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from panes import ROOT, TITLES
from sphinx.errors import ExtensionError

RESULTS = ROOT / "docs" / "results"
TOLERANCES = ROOT / "transformer_parity" / "engine" / "tolerances.toml"
MIB = 2**20
PORTS = ("torch", "jax", "tf")
MACHINES = {"intel": "Intel Xeon", "amd": "AMD EPYC"}  # titles of the directories in benchmarks
ON_FOUR = tuple(f"| `{plan}`" for plan in ("data=4", "fsdp=4", "fsdp=2,tensor=2"))  # rows of the table in install.md
IMPLEMENTATIONS = {  # titles that the tables show for the names in the benchmark files
    "numpy": "**reference_numpy**",
    **{port: f"**transformer_{port}**" for port in PORTS},
    "torch compiled": "**transformer_torch**, compiled",
    "tf compiled": "**transformer_tf**, compiled",
    "torch.nn": "torch.nn.Transformer",
    "torch.nn compiled": "torch.nn.Transformer, compiled",
    "marian": "MarianMTModel",
    "flax nnx": "Flax NNX",
    "keras hub": "KerasHub",
    "keras hub XLA": "KerasHub, XLA",
    "matmuls": "matmuls only, NumPy",
}


def stamp(report: dict[str, Any], versions: dict[str, str]) -> str:
    """Return a sentence with the date, commit, versions, and machine of a measurement."""
    machine = report["machine"]
    commit = f", commit `{report['commit'][:10]}`" if "commit" in report else ""
    named = ", ".join(f"{TITLES.get(name, name)} {version}" for name, version in versions.items())
    processor = f"{machine['processor']}, " if "processor" in machine else ""
    where = f"{processor}{machine['platform']}, {machine['cpus']} CPUs, Python {machine['python']}"
    when = f"Measured on {report['date'][:10]}{commit}, transformer-parity {machine['transformer-parity']}"
    return f"{when}; {named}; {where}."


def read(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file with committed results.

    Raises:
        ExtensionError: If the file doesn't exist.
    """
    if not path.is_file():
        raise ExtensionError(f"there is no {path.relative_to(ROOT)}")
    return json.loads(path.read_text("utf-8"))


def speed(task: str) -> Iterator[str]:
    """Yield the lines of one Markdown table per processor, with the benchmark results of a task at both sizes."""
    for machine, title in MACHINES.items():
        sizes = ("small", "base")
        reports = {size: read(ROOT / "benchmarks" / machine / f"{task}-{size}.json") for size in sizes}
        columns = {
            size: {one["name"]: one for one in r["result"]["races"][0]["implementations"]}
            for size, r in reports.items()
        }
        header = "".join(f" {size}, ms | lowest to highest | MiB |" for size in reports)
        yield f"| {title} |{header}"
        yield "|---|" + "---:|---:|---:|" * len(reports)
        base = columns["base"]
        for name in sorted(base, key=lambda name: base[name].get("median_seconds") or 1e9):
            cells = "".join(f" {timed(columns[size].get(name))} |" for size in reports)
            yield f"| {IMPLEMENTATIONS[name]} |{cells}"
        versions = {one["name"]: one["environment"]["version"] for one in base.values() if one["name"] in TITLES}
        yield ""
        for size, report in reports.items():
            rounds = f"{report['result']['rounds']} rounds, {report['result']['threads']} threads"
            yield f"{size.capitalize()}: {rounds}. {stamp(report, versions)}"
            yield ""


def timed(one: dict[str, Any] | None) -> str:
    """Return table cells with an implementation's median time, range of times, and memory, or why it has no time."""
    if not one or one.get("median_seconds") is None:
        return f"{one['problem'] if one else 'not run'} | |"
    seconds = one["seconds"]
    spread = f"{1000 * min(seconds):,.0f} to {1000 * max(seconds):,.0f}"
    return f"{1000 * one['median_seconds']:,.0f} | {spread} | {one['peak_bytes'] / MIB:,.0f}"


def conformance(dtype: str) -> Iterator[str]:
    """Yield the lines of a Markdown table with the results of the last full check in one dtype."""
    summary = [row for row in read(RESULTS / "conformance.json")["summary"] if row["dtype"] == dtype]
    rows = {(row["component"], row["backend"]): row for row in summary}
    yield f"| component | {' | '.join(TITLES[port] for port in PORTS)} | closest to its tolerance |"
    yield "|---|" + "---:|" * len(PORTS) + "---|"
    for component in dict.fromkeys(component for component, _ in rows):
        cells = [rows[component, port] for port in PORTS]
        worst = max(cells, key=lambda row: row["ratio"])
        errors = " | ".join(map(shown_error, cells))
        where = f"{TITLES[worst['backend']]}: `{worst['case']}` `{worst['tap']}`" if worst["error"] else ""
        yield f"| {component} | {errors} | {where} |"


def verdict() -> Iterator[str]:
    """Yield sentences with the verdict, number of cases, duration, and environment of the last full check."""
    report = read(RESULTS / "conformance.json")
    size = f"{report['cases']:,} cases and " if "cases" in report else ""
    yield f"The verdict was **{report['verdict']}**, with {size}{report['comparisons']:,} comparisons."
    if "time" in report:
        compiling = ", ".join(
            f"{TITLES[name]} {spent['compiling']:.0f} s" for name, spent in report["time"]["ports"].items()
        )
        yield f"The check took {report['time']['seconds']:.0f} s. Compilation time in each port's process: {compiling}."
    yield stamp(report, report["versions"])


def shown_error(row: dict[str, Any]) -> str:
    """Return a table cell with an error, its tolerance, and the error as a percentage of the tolerance."""
    error, tolerance = (re.sub(r"e-0*", "e-", f"{row[name]:.0e}") for name in ("error", "tolerance"))
    percentage = "<0.1" if 100 * row["ratio"] < 0.1 else f"{100 * row['ratio']:.2g}"
    return f"{error} of {tolerance} ({percentage}%)" if row["error"] else "exact"


def short(tolerance: float) -> str:
    """Return a number in short scientific notation, such as 1e-5."""
    return f"{tolerance:.1e}".replace(".0e", "e").replace("e-0", "e-")


def tolerances() -> Iterator[str]:
    """Yield the lines of a Markdown table of the tolerances in ``tolerances.toml``."""
    policy = tomllib.loads(TOLERANCES.read_text("utf-8"))
    kinds = {
        "taps and logits": ("tap", ""),
        "loss": ("loss", "gradients"),
        "all gradients together": ("whole", "gradients"),
        "gradient of an individual tensor": ("tensor", "gradients"),
        "search scores": ("score", "decode"),
        "optimizer steps: loss": ("loss", "steps"),
        "optimizer steps: any other value": ("tensor", "steps"),
        "optimizer steps: learning rate": ("rate", "steps"),
    }
    yield from ("| compared | float64 | float32 | bfloat16 |", "|---|---:|---|---|")
    for title, (name, section) in kinds.items():
        by_dtype = policy[section] if section else policy
        own, coarse = by_dtype["float32"], by_dtype.get("bfloat16")
        single = "-"
        if name in own:
            single = short(own[name])
        elif "ratio" in own:
            single = f"{own['ratio']:g} \u00d7 the reference's own float32 error"
        half = "-"
        if coarse:
            half = f"{short(coarse['tap'])}; attention scores and weights {short(coarse['scores'])}"
        yield f"| {title} | {short(by_dtype['float64'][name])} | {single} | {half} |"


def selftest() -> Iterator[str]:
    """Yield the lines of a Markdown table with the results of the last self-test."""
    report = read(RESULTS / "selftest.json")
    yield stamp(report, report["versions"])
    yield ""
    yield from ("| part | injected | caught | located | identified |", "|---|---:|---:|---:|---:|")
    for row in [*report["parts"], {"part": "together", **report["together"]}]:
        named = f"{row['named']} of {row['nameable']}" if row["nameable"] else "none can be identified"
        yield f"| {row['part']} | {row['injected']} | {row['caught']} | {row['located']} | {named} |"


def closest() -> Iterator[str]:
    """Yield the lines of the table in docs/how-to/install.md, with the comparisons closest to their tolerances."""
    rows = read(RESULTS / "conformance.json")["summary"]
    yield f"| | {' | '.join(TITLES[port] for port in PORTS)} |"
    yield "|---|" + "---|" * len(PORTS)
    for dtype in ("float64", "float32"):
        of_dtype = [[row for row in rows if (row["backend"], row["dtype"]) == (port, dtype)] for port in PORTS]
        worst = (max(of_port, key=lambda row: row["ratio"]) for of_port in of_dtype)
        yield f"| {dtype} | {' | '.join(shown_error(row) for row in worst)} |"
    yield from (row for row in devices() if row.startswith(ON_FOUR))


def devices() -> Iterator[str]:
    """Yield the lines of a Markdown table with the float64 results of the last distributed check."""
    report = read(RESULTS / "devices.json")
    summary = [row for row in report["summary"] if row["dtype"] == "float64"]
    rows = {(row["component"], row["backend"]): row for row in summary}
    yield f"| plan | {' | '.join(TITLES[port] for port in PORTS)} |"
    yield "|---|" + "---|" * len(PORTS)
    for plan in dict.fromkeys(plan for plan, _ in rows):
        cells = [shown_error(rows[plan, port]) if (plan, port) in rows else "not supported" for port in PORTS]
        yield f"| `{plan}` | {' | '.join(cells)} |"
    yield ""
    yield stamp(report, report["versions"])


def mutation(part: str) -> Iterator[str]:
    """Yield the lines of Markdown tables with the ``scores`` or the ``survivors`` of the last mutation test."""
    report = read(RESULTS / "mutation.json")
    if part == "scores":
        counts = "caught by a difference | caught by an exception | not run | equivalent | missed | not examined"
        yield f"| package | cases | mutants | {counts} | score |"
        yield "|---|---|" + "---:|" * 8
        for package in report["packages"]:
            for column, found in package["columns"].items():
                different = found["caught"].get("difference", 0)
                raised = sum(found["caught"].values()) - different
                equivalent, missed = sum(one["count"] for one in found["equivalent"]), len(found["missed"])
                caught, unexamined = different + raised, found["unexamined"]
                score = f"{100 * caught / (caught + missed + unexamined):.1f}%"
                numbers = (different, raised, found["not run"], equivalent, missed, unexamined, score)
                cells = " | ".join([f"{package['run']:,} of {package['mutants']:,}", *map(str, numbers)])
                yield f"| {TITLES[package['package']]} | {column} | {cells} |"
        yield ""
        yield stamp(report, report["versions"])
        return
    for package in report["packages"]:
        for column, found in package["columns"].items():
            if found["unexamined"]:
                continue
            yield f"**{TITLES[package['package']]}, {column}**"
            yield ""
            yield from ("| missed | change | reason |", "|---|---|---|")
            for one in found["missed"]:
                change = one["change"].replace("|", "\\|").replace("\n", " ")
                yield f"| `{one['place']}` | `{change}` | {one['why']} |"
            yield from ("", "| reason why equivalent | mutants |", "|---|---:|")
            yield from (f"| {one['why']} | {one['count']} |" for one in found["equivalent"])
            yield ""
