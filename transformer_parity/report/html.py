"""The result as one page for people: self-contained, for a screen of any size, in light and dark, and for paper."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from numpy import ndarray

from transformer_parity.compare.verdict import AGREES, DIVERGES, FAILED, IMPRECISE, SKIPPED
from transformer_parity.diagnose.blame import FINE, INHERITED, INTRODUCED, Mark
from transformer_parity.report.result import MAIN_CASE
from transformer_parity.report.tree import WAYS, Node, first_places, nodes
from transformer_parity.system.files import write_text

Result = Mapping[str, Any]
VERDICTS = {AGREES: "Agree", DIVERGES: "Diverge", IMPRECISE: "Imprecise", FAILED: "Incomplete"}
# Upper ends of the steps of a logarithmic scale: shares of the tolerance. Up to 1 it is kept.
STEPS = (0.0, 0.01, 0.1, 1.0, 10.0, 1e3, 1e6, math.inf)
STEP_NAMES = ("exact", "≤ 1 %", "≤ 10 %", "≤ 100 %", "≤ 10 times", "≤ 1,000", "≤ 1,000,000", "more")
MATRICES = 6  # cases of which every tap is shown
FOLDED_LENGTH = 3  # of lists, before the rest is folded
WIDTH, HEIGHT = 960, 300  # of the plot; its margins:
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 34
# Of the maps, on white: reference and port from 0 to 1; their difference from -1 to 1 (Okabe and Ito, 2008).
WHITE, BLUE, ORANGE = np.array([250, 250, 248]), np.array([0, 70, 130]), np.array([190, 75, 0])
VISIBLE = 1e-3  # the smallest difference that a map is stretched to show


@dataclass(frozen=True)
class Cell:
    """One number of the matrix."""

    error: str
    share: str
    verdict: str
    step: int
    blame: str  # introduced or inherited, where that is known; empty otherwise


@dataclass
class Row:
    """A tap, and what each column says of it; None where a column has no such tap."""

    tap: str
    block: str
    cells: list[Cell | None]

    @property
    def fails(self) -> bool:
        """Whether any column is over its tolerance."""
        return any(cell is not None and cell.verdict != AGREES for cell in self.cells)


@dataclass(frozen=True)
class Line:
    """One curve of the plot: of one backend in one dtype."""

    backend: int
    dtype: str
    name: str
    path: str
    marks: list[tuple[float, float, str]]  # x, y, and what was introduced there


@dataclass
class Plot:
    """The error along the depth."""

    lines: list[Line]
    decades: list[tuple[float, str]]  # y, label
    blocks: list[tuple[float, str]]  # x, label
    tolerances: list[tuple[str, str]] = field(default_factory=list)  # path, label


@dataclass
class Matrix:
    """Every tap of one case."""

    case: str
    columns: list[tuple[str, str]]  # backend, dtype
    rows: list[Row]
    plot: Plot

    @property
    def failing(self) -> int:
        """How many rows fail."""
        return sum(row.fails for row in self.rows)


def write_html(path: Path, result: Result) -> None:
    """Write a result (see ``result.build``), atomically."""
    write_text(path, html(result))


def html(result: Result) -> str:
    """Return the page."""
    environment = Environment(
        loader=PackageLoader("transformer_parity.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {"number": number, "share": share, "breakable": breakable}
    matrices, trees = _matrices(result), _trees(result)
    return environment.get_template("report.html").render(
        result=result,
        verdict=VERDICTS[result["verdict"]],
        counts=_counts(result),
        ports=_ports(result),
        trees=trees[0],
        more_trees=trees[1],
        matrices=matrices[:MATRICES],
        more_matrices=[matrix.case for matrix in matrices[MATRICES:]],
        attention=_attention(result),
        skips=_skips(result),
        configs=_configs(result),
        steps=list(enumerate(STEP_NAMES)),
        folded=FOLDED_LENGTH,
        size=(WIDTH, HEIGHT),
        frame=(LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM),
    )


def number(value: float | str) -> str:
    """Write an error; a string is an infinite one, or NaN."""
    value = float(value)
    if value == 0.0:
        return "exact"
    return f"{value:.1e}" if math.isfinite(value) else str(value)


def share(value: float | str) -> str:
    """Write a share of the tolerance: a percentage of what is kept, a multiple of what is not."""
    value = float(value)
    if not math.isfinite(value):
        return "beyond any tolerance"
    if value > 1.0:
        return f"{value:.2g} times its tolerance" if value < 1e3 else f"{value:.0e} times its tolerance"
    return f"{100.0 * value:.2g} % of its tolerance" if value >= 0.001 or not value else "<0.1 % of its tolerance"


def breakable(name: str) -> Markup:
    """Allow a line to end behind the dots of a name, and nowhere else."""
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
    """Return, for each port: what became of it, and what it is thought to do."""
    names = list(dict.fromkeys([row["backend"] for row in result["summary"]])) or list(result["backends"])
    ports = []
    for name in names:
        rows = [row for row in result["summary"] if row["backend"] == name]
        worst = [row["worst"] for row in rows if row["verdict"] not in (SKIPPED, FAILED)]
        ports.append(
            {
                "name": name,
                "verdicts": [
                    (verdict, count)
                    for verdict in (DIVERGES, IMPRECISE, FAILED, AGREES, SKIPPED)
                    if (count := sum(row["verdict"] == verdict for row in result["cases"] if row["backend"] == name))
                ],
                "comparisons": sum(row["comparisons"] for row in rows),
                "worst": max(worst, key=lambda finding: float(finding["share"]), default=None),
                "problems": [row["worst"]["detail"] for row in rows if row["verdict"] == FAILED],
                "diagnoses": _diagnoses([entry for entry in result["diagnoses"] if entry["backend"] == name]),
                "version": result["environment"].get(name, {}).get("version", ""),
            }
        )
    return ports


def _diagnoses(entries: Iterable[Result]) -> list[dict[str, Any]]:
    """Take together what says the same of several cases."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for entry in _main_first(entries):
        key = tuple(entry["hypotheses"]) or (entry["sentence"],)
        group = found.setdefault(key, {"folder": None, **entry, "places": []})
        group["places"].append(f"{entry['dtype']} {entry['case']}")
    return list(found.values())


def _main_first(entries: Iterable[Result]) -> list[Any]:
    """Return what is about the main case first, float64 before other dtypes, as it stands otherwise."""
    return sorted(entries, key=lambda entry: (entry["case"] != MAIN_CASE, entry["dtype"] != "float64"))


def _trees(result: Result) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the first tree of each port, and all others."""
    first: dict[str, dict[str, Any]] = {}
    others = []
    for blame in _main_first(result["blames"]):
        tree = _tree(blame)
        if first.setdefault(blame["backend"], tree) is not tree:
            others.append(tree)
    return list(first.values()), others


def _tree(blame: Result) -> dict[str, Any]:
    marks = [
        Mark(**{**mark, **{key: float(mark[key]) for key in ("free", "alone", "tolerance")}}) for mark in blame["marks"]
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
    """Return a node with all that the page says of it; open where something is introduced first."""
    marks = list(node.marks())
    return {
        "name": node.name,
        "verdict": node.verdict,
        "mark": node.mark,
        "count": len(marks),
        "failing": sum(mark.verdict != FINE for mark in marks),
        "guilty": sum(mark.verdict == INTRODUCED for mark in marks),
        "is_open": any(mark.name in first for mark in marks),
        "others": first.get(node.mark.name, 0) if node.mark else 0,
        "parts": [_part(part, first) for part in node.parts],
    }


def _matrices(result: Result) -> list[Matrix]:
    """Return every tap of every case that has its taps in the result, the main case first."""
    blames = {
        (blame["backend"], blame["dtype"], blame["case"], mark["name"]): mark["verdict"]
        for blame in result["blames"]
        for mark in blame["marks"]
        if mark["verdict"] != FINE
    }
    cases: dict[str, list[Result]] = {}
    for entry in sorted(result["taps"], key=lambda entry: entry["case"] != MAIN_CASE):
        cases.setdefault(entry["case"], []).append(entry)
    return [_matrix(case, entries, blames) for case, entries in cases.items()]


def _matrix(case: str, entries: Sequence[Result], blames: Mapping[tuple[str, str, str, str], str]) -> Matrix:
    found = list(dict.fromkeys((entry["backend"], entry["dtype"]) for entry in entries))
    backends = [backend for backend, _ in found]
    columns = sorted(found, key=lambda column: backends.index(column[0]))
    rows: dict[str, Row] = {}
    for entry in entries:
        tap = entry["tap"]
        row = rows.setdefault(tap, Row(tap, _block(tap), [None] * len(columns)))
        blame = blames.get((entry["backend"], entry["dtype"], case, tap), "")
        cell = Cell(number(entry["error"]), share(entry["share"]), entry["verdict"], _step(entry["share"]), blame)
        row.cells[columns.index((entry["backend"], entry["dtype"]))] = cell
    return Matrix(case, columns, list(rows.values()), _plot(case, entries, columns, list(rows), blames))


def _step(value: float | str) -> int:
    """Return where a share stands on the scale; NaN stands beyond."""
    return next((i for i, end in enumerate(STEPS) if float(value) <= end), len(STEPS) - 1)


def _block(tap: str) -> str:
    path = tap.split(".")
    return ".".join(path[:3]) if path[1:2] == ["layers"] else path[0]


def _plot(
    case: str,
    entries: Sequence[Result],
    columns: Sequence[tuple[str, str]],
    taps: Sequence[str],
    blames: Mapping[tuple[str, str, str, str], str],
) -> Plot:
    """Lay the errors out over the taps, on a logarithmic axis; nothing and infinity stand at its ends."""
    positive = [float(entry[key]) for entry in entries for key in ("error", "tolerance")]
    exponents = [math.log10(value) for value in positive if 0.0 < value < math.inf]
    low, high = math.floor(min(exponents, default=-16.0)) - 1, math.ceil(max(exponents, default=0.0)) + 1

    def x(tap: str) -> float:
        return round(LEFT + 8 + (WIDTH - LEFT - RIGHT - 16) * taps.index(tap) / max(len(taps) - 1, 1), 1)

    def y(value: float) -> float:
        exponent = math.log10(value) if 0.0 < value < math.inf else (high if value else low)
        return round(HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (exponent - low) / (high - low), 1)

    def path(own: Sequence[Result], key: str) -> str:
        return "M" + "L".join(f"{x(entry['tap'])},{y(float(entry[key]))}" for entry in own)

    backends = list(dict.fromkeys(backend for backend, _ in columns))
    lines: list[Line] = []
    tolerances: dict[str, str] = {}
    for backend, dtype in columns:
        own = [entry for entry in entries if (entry["backend"], entry["dtype"]) == (backend, dtype)]
        marks = [
            (x(entry["tap"]), y(float(entry["error"])), entry["tap"])
            for entry in own
            if blames.get((backend, dtype, case, entry["tap"])) == INTRODUCED
        ]
        lines.append(Line(backends.index(backend) % 4, dtype, f"{backend} {dtype}", path(own, "error"), marks))
        tolerances.setdefault(dtype, path(own, "tolerance"))
    firsts: dict[str, str] = {}
    for tap in taps:
        firsts.setdefault(_block(tap), tap)
    blocks = [(x(tap), _label(block)) for block, tap in firsts.items()]
    every = max(1, (high - low) // 8)
    decades = [(y(10.0**exponent), f"1e{exponent}") for exponent in range(low + 1, high, every)]
    values = {float(entry["error"]) for entry in entries}
    decades += [(y(end), label) for end, label in ((0.0, "0"), (math.inf, "∞")) if end in values]
    return Plot(lines, decades, blocks, [(path, dtype) for dtype, path in tolerances.items()])


def _label(block: str) -> str:
    """Return what stands below a block: the stack at its first layer, then a number; nothing where it is no layer."""
    stack, _, layer = block.partition(".layers.")
    return f"{stack} {layer}" if layer == "0" else layer


def _attention(result: Result) -> list[dict[str, Any]]:
    """Return each attention layer's maps as pictures: of the reference, of the port, and of their difference."""
    layers = []
    for entry in result["attention"]:
        expected, actual = np.array(entry["expected"], float), np.array(entry["actual"], float)
        comparable = expected.shape == actual.shape
        difference = actual - expected if comparable else np.zeros_like(expected)
        largest = float(np.abs(difference).max(initial=0.0)) if comparable else math.nan
        scale = max(largest, VISIBLE) if math.isfinite(largest) else 1.0
        heads = [
            {
                "expected": picture(expected[head]),
                "actual": picture(actual[head]) if head < len(actual) else "",
                "difference": picture(difference[head] / scale) if comparable else "",
            }
            for head in range(len(expected))
        ]
        shapes = list(actual.shape), list(expected.shape)
        layers.append(
            {**entry, "heads": heads, "largest": largest, "scale": scale, "shapes": shapes, "size": expected.shape}
        )
    return layers


def picture(values: ndarray) -> str:
    """Return a map as a PNG in a data URI: one pixel per number; 0 is white, 1 blue, -1 orange, NaN black."""
    known = np.nan_to_num(np.clip(values, -1.0, 1.0))[..., None]
    colours = np.where(known >= 0, WHITE + known * (BLUE - WHITE), WHITE - known * (ORANGE - WHITE))
    colours = np.where(np.isnan(values)[..., None], 0, colours).round().astype(np.uint8)
    lines = b"".join(b"\0" + line.tobytes() for line in colours)

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">2I5B", values.shape[1], values.shape[0], 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _skips(result: Result) -> list[dict[str, Any]]:
    """Take the skips of one backend for one reason together."""
    groups: dict[tuple[str, str], list[str]] = {}
    for skip in result["skips"]:
        places = groups.setdefault((skip["backend"], skip["detail"]), [])
        places.append(f"{skip['dtype']} {skip['case']}".strip())
    return [
        {"backend": backend, "why": why, "places": list(dict.fromkeys(places))}
        for (backend, why), places in groups.items()
    ]


def _configs(result: Result) -> list[dict[str, Any]]:
    """Return the first config whole, and of each other one the fields that differ from it."""
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
