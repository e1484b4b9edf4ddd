"""The matrix of a case on the HTML page (taps by ports and dtypes), and the plot of its errors by depth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformer_parity.engine.findings import AGREES
from transformer_parity.engine.localization import FINE, INTRODUCED
from transformer_parity.engine.report.tree import block_of
from transformer_parity.engine.style import BACKENDS

Result = Mapping[str, Any]
# Upper bounds of the steps in a logarithmic color scale. The scale shows the ratio of the error to the tolerance. If
# the ratio is at most 1, the error is within the tolerance.
STEPS = (0.0, 0.01, 0.1, 1.0, 10.0, 1e3, 1e6, math.inf)
STEP_NAMES = ("exact", "≤ 1%", "≤ 10%", "≤ 100%", "≤ 10 times", "≤ 1,000", "≤ 1,000,000", "more")
WIDTH, HEIGHT = 960, 300  # size of the plot in pixels
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 34  # margins of the plot in pixels


@dataclass(frozen=True)
class Cell:
    """One value in the matrix."""

    error: str
    percentage: str
    verdict: str
    step: int
    blame: str  # "introduced" or "inherited"; empty if unknown


@dataclass
class TapRow:
    """A tap and its cells, one per column, with None for each port that doesn't have the tap."""

    tap: str
    block: str
    cells: list[Cell | None]

    @property
    def fails(self) -> bool:
        """Whether the error in any column is over its tolerance."""
        return any(cell is not None and cell.verdict != AGREES for cell in self.cells)


@dataclass(frozen=True)
class Curve:
    """A curve in the plot, for one backend in one dtype."""

    color: str
    dtype: str
    name: str
    path: str
    marks: list[tuple[float, float, str]]  # x, y, and name of each tap that introduces a difference


@dataclass
class Plot:
    """The plot of errors against the depth of the model."""

    lines: list[Curve]
    decades: list[tuple[float, str]]  # y, label
    blocks: list[tuple[float, str]]  # x, label
    tolerances: list[tuple[str, str]] = field(default_factory=list)  # path, label


@dataclass
class Matrix:
    """The errors of one case at every tap."""

    case: str
    columns: list[tuple[str, str]]  # backend, dtype
    rows: list[TapRow]
    plot: Plot

    @property
    def failing(self) -> int:
        """The number of failing rows."""
        return sum(row.fails for row in self.rows)


def matrices(result: Result, main: str) -> list[Matrix]:
    """Return the matrices of all cases whose taps are in the result, starting with the main case.

    Args:
        result: The result of a comparison as built-in Python types.
        main: The name of the main case.
    """
    blames = {
        (blame["backend"], blame["dtype"], blame["case"], mark["name"]): mark["verdict"]
        for blame in result["blames"]
        for mark in blame["marks"]
        if mark["verdict"] != FINE
    }
    cases: dict[str, list[Result]] = {}
    for entry in sorted(result["taps"], key=lambda entry: entry["case"] != main):
        cases.setdefault(entry["case"], []).append(entry)
    return [_matrix(case, entries, blames) for case, entries in cases.items()]


def _matrix(case: str, entries: Sequence[Result], blames: Mapping[tuple[str, str, str, str], str]) -> Matrix:
    found = list(dict.fromkeys((entry["backend"], entry["dtype"]) for entry in entries))
    backends = [backend for backend, _ in found]
    columns = sorted(found, key=lambda column: backends.index(column[0]))
    rows: dict[str, TapRow] = {}
    for entry in entries:
        tap = entry["tap"]
        row = rows.setdefault(tap, TapRow(tap, block_of(tap), [None] * len(columns)))
        blame = blames.get((entry["backend"], entry["dtype"], case, tap), "")
        cell = Cell(number(entry["error"]), percentage(entry["ratio"]), entry["verdict"], _step(entry["ratio"]), blame)
        row.cells[columns.index((entry["backend"], entry["dtype"]))] = cell
    return Matrix(case, columns, list(rows.values()), _plot(case, entries, columns, list(rows), blames))


def _step(value: float | str) -> int:
    """Return the index of the color-scale step for a ratio of error to tolerance. For NaN, return the last step."""
    return next((i for i, end in enumerate(STEPS) if float(value) <= end), len(STEPS) - 1)


def _plot(
    case: str,
    entries: Sequence[Result],
    columns: Sequence[tuple[str, str]],
    taps: Sequence[str],
    blames: Mapping[tuple[str, str, str, str], str],
) -> Plot:
    """Return the plot of the errors at the taps. The y-axis is logarithmic, with 0 and infinity at its ends."""
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

    lines: list[Curve] = []
    tolerances: dict[str, str] = {}
    for backend, dtype in columns:
        own = [entry for entry in entries if (entry["backend"], entry["dtype"]) == (backend, dtype)]
        marks = [
            (x(entry["tap"]), y(float(entry["error"])), entry["tap"])
            for entry in own
            if blames.get((backend, dtype, case, entry["tap"])) == INTRODUCED
        ]
        color = backend if backend in BACKENDS else "other"
        lines.append(Curve(color, dtype, f"{backend} {dtype}", path(own, "error"), marks))
        tolerances.setdefault(dtype, path(own, "tolerance"))
    firsts: dict[str, str] = {}
    for tap in taps:
        firsts.setdefault(block_of(tap), tap)
    blocks = [(x(tap), _label(block)) for block, tap in firsts.items()]
    every = max(1, (high - low) // 8)
    decades = [(y(10.0**exponent), f"1e{exponent}") for exponent in range(low + 1, high, every)]
    values = {float(entry["error"]) for entry in entries}
    decades += [(y(end), label) for end, label in ((0.0, "0"), (math.inf, "∞")) if end in values]
    return Plot(lines, decades, blocks, [(path, dtype) for dtype, path in tolerances.items()])


def _label(block: str) -> str:
    """Return the x-axis label of a block: the stack and layer number for layer 0, and only the number for other layers.

    The label of a block outside the layers is empty.
    """
    stack, _, layer = block.partition(".layers.")
    return f"{stack} {layer}" if layer == "0" else layer


def number(value: float | str) -> str:
    """Format an error. The value is a string if it is infinite or NaN, because JSON doesn't support such numbers."""
    value = float(value)
    if value == 0.0:
        return "exact"
    return f"{value:.1e}" if math.isfinite(value) else str(value)


def percentage(value: float | str) -> str:
    """Format the ratio of an error to its tolerance: as a percentage if it is at most 1, otherwise as a multiple."""
    value = float(value)
    if not math.isfinite(value):
        return "beyond any tolerance"
    if value > 1.0:
        return f"{value:.2g} times the tolerance" if value < 1e3 else f"{value:.0e} times the tolerance"
    return f"{100.0 * value:.2g}% of the tolerance" if value >= 0.001 or not value else "<0.1% of the tolerance"


def percent(value: float | str) -> str:
    """Format a fraction of the tolerance as a short percentage."""
    percent = 100.0 * float(value)
    if not percent < 1000.0:
        return ">999%"
    return f"{percent:.0f}%" if percent == 0.0 or percent >= 1.0 else "<1%"
