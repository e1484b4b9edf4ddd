"""The directives ``numbers``, ``heat-map``, and ``curve``, which show the values computed in an example.

::

    ```{numbers} attention
    :taps: scores weights context
    ```

The directives read the values from ``docs/examples/*.json``. ``docs/examples/compute.py`` writes these files, and a
test recomputes the values. The build fails if an example or a tap doesn't exist.
"""

from __future__ import annotations

import json
from functools import cache
from html import escape
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from docutils import nodes
from docutils.parsers.rst import directives
from numpy import ndarray
from panes import TITLES
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import OptionSpec

DIRECTORY = Path(__file__).parents[1] / "examples"
TALL, WIDE = 16, 34  # height and width of a cell of a heat map, in pixels


@cache
def example(name: str) -> dict[str, Any]:
    """Return the stored results of an example.

    Raises:
        ExtensionError: If the example doesn't exist.
    """
    try:
        return json.loads((DIRECTORY / f"{name}.json").read_text("utf-8"))
    except FileNotFoundError:
        raise ExtensionError(f"there is no example {name!r} in {DIRECTORY}") from None


def values(name: str, tap: str) -> dict[str, ndarray]:
    """Return the value that each backend computes at a tap of an example.

    Raises:
        ExtensionError: If the example has no such tap.
    """
    by = example(name)["values"]
    if any(tap not in found for found in by.values()):
        raise ExtensionError(f"the example {name!r} has no tap {tap!r}: it has {', '.join(by['numpy'])}")
    return {backend: np.array(found[tap]) for backend, found in by.items()}


def furthest_apart(name: str, taps: list[str]) -> dict[str, float]:
    """Return the largest absolute difference between each backend and NumPy at any of the given taps."""
    found: dict[str, float] = {}
    for tap in taps:
        by = values(name, tap)
        for backend, array in by.items():
            difference = np.abs(array.astype(float) - by["numpy"].astype(float))
            found[backend] = max(found.get(backend, 0.0), float(difference.max(initial=0.0)))
    return found


def agreement(name: str, taps: list[str]) -> str:
    """Return a sentence with each framework's version and its largest difference from NumPy."""
    apart = furthest_apart(name, taps)
    versions = example(name)["versions"]
    said = [
        f"{TITLES[backend]} {versions[backend].partition(',')[0]}: {error:.1e}"
        if error
        else f"{TITLES[backend]}: bitwise identical"
        for backend, error in apart.items()
        if backend != "numpy"
    ]
    return f"Largest difference from NumPy {versions['numpy']} in float64: {'; '.join(said)}."


def cell(value: Any, largest: float, digits: int) -> str:
    """Return one table cell whose background color depends on its value."""
    if isinstance(value, bool | np.bool_):
        return f'<td class="{"plus" if value else "none"}" style="--v:{int(value)}">{"yes" if value else "no"}</td>'
    if isinstance(value, int | np.integer):
        return f"<td>{value}</td>"
    shown = f"{value:.{digits}f}".replace("-", "\u2212")
    sign = "plus" if value >= 0 else "minus"
    return f'<td class="{sign}" style="--v:{abs(value) / largest if largest else 0:.2f}">{shown}</td>'


def matrix(array: ndarray, digits: int, largest: float) -> str:
    """Return a matrix as an HTML table."""
    rows = ("".join(cell(value, largest, digits) for value in row) for row in np.atleast_2d(array))
    return f"<table><tbody>{''.join(f'<tr>{row}</tr>' for row in rows)}</tbody></table>"


def figure(tap: str, array: ndarray, title: str, digits: int) -> str:
    """Return the value at a tap as an HTML figure with one table, or with one table per head."""
    array = array[0] if array.ndim > 2 and array.shape[0] == 1 else array
    array = array[0] if array.ndim > 2 and array.shape[0] == 1 else array
    largest = float(np.abs(array).max(initial=0)) if array.dtype == float else 1.0
    heads = array if array.ndim == 3 else array[None]
    tables = "".join(matrix(head, digits, largest) for head in heads)
    sizes = " \u00d7 ".join(map(str, array.shape))
    label = f"<code>{escape(tap)}</code> {escape(title)} <span>[{sizes}]</span>"
    return (
        f'<figure><figcaption>{label}</figcaption><div class="matrices" tabindex="0" role="group" '
        f'aria-label="{escape(tap, quote=True)}">{tables}</div></figure>'
    )


def words(argument: str) -> list[str]:
    """Split the value of an option at commas and line breaks, and return the parts, such as the names of taps."""
    return [part.strip() for part in argument.replace("\n", ",").split(",") if part.strip()]


class Numbers(SphinxDirective):
    """Show the values at taps of an example. The content can specify titles, as in ``scores: before the softmax``."""

    required_arguments = 1
    has_content = True
    option_spec: ClassVar[OptionSpec] = {"taps": words, "digits": directives.nonnegative_int}

    def run(self) -> list[nodes.Node]:
        """Return the tables and a sentence with the differences between the backends."""
        (name,) = self.arguments
        self.env.note_dependency(str(DIRECTORY / f"{name}.json"))
        titles = dict(line.split(": ", 1) for line in self.content)
        taps = self.options.get("taps") or list(titles) or list(example(name)["values"]["numpy"])
        digits = self.options.get("digits", 3)
        tables = [figure(tap, values(name, tap)["numpy"], titles.get(tap, ""), digits) for tap in taps]
        said = nodes.paragraph("", agreement(name, taps), classes=["agreement"])
        return [nodes.raw("", f'<div class="numbers">{"".join(tables)}</div>', format="html"), said]


class HeatMap(SphinxDirective):
    """Draw the value at a tap of an example as a heat map, in the colors of the page."""

    required_arguments = 2
    final_argument_whitespace = True
    option_spec: ClassVar[OptionSpec] = {"rows": directives.unchanged, "columns": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        """Return the drawing."""
        name, tap = self.arguments
        array = values(name, tap)["numpy"]
        array = array.reshape(array.shape[-2:])
        height, width = array.shape
        largest = float(np.abs(array).max())
        cells = "".join(
            f'<rect x="{70 + WIDE * j}" y="{24 + TALL * i}" width="{WIDE - 1}" height="{TALL - 1}" '
            f'fill="var(--{"plus" if value >= 0 else "minus"})" fill-opacity="{abs(value) / largest:.2f}">'
            f"<title>{i}, {j}: {value:.4f}</title></rect>"
            for i, row in enumerate(array)
            for j, value in enumerate(row)
        )
        rows, columns = self.options.get("rows", "row"), self.options.get("columns", "column")
        numbers = "".join(
            f'<text x="{64}" y="{36 + TALL * i}" text-anchor="end" font-size="11">{i}</text>' for i in range(height)
        )
        numbers += "".join(
            f'<text x="{70 + WIDE * j + WIDE / 2:.0f}" y="18" text-anchor="middle" font-size="11">{j}</text>'
            for j in range(width)
        )
        titles = f'<text x="0" y="{24 + TALL * height / 2:.0f}" font-size="12">{escape(rows)}</text>'
        titles += f'<text x="70" y="{40 + TALL * height}" font-size="12">{escape(columns)}</text>'
        said = escape(f"{tap} in the example {name}: {height} {rows}s by {width} {columns}s", quote=True)
        size = f'viewBox="0 0 {80 + WIDE * width} {48 + TALL * height}" width="{80 + WIDE * width}"'
        drawing = f'<svg role="img" aria-label="{said}" {size}>{titles}{numbers}{cells}</svg>'
        return [nodes.raw("", f'<div class="drawing">{drawing}</div>', format="html")]


class Curve(SphinxDirective):
    """Draw the value at a tap of an example, a vector, as a curve over 1, 2, 3, ..."""

    required_arguments = 2
    option_spec: ClassVar[OptionSpec] = {"x": directives.unchanged, "y": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        """Return the drawing."""
        name, tap = self.arguments
        array = values(name, tap)["numpy"].ravel()
        width, height, left, bottom = 420, 150, 56, 40
        top = float(array.max())
        places = [
            (left + width * i / (len(array) - 1), 10 + height * (1 - value / top)) for i, value in enumerate(array)
        ]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        dots = "".join(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="var(--plus)"><title>{i}: {value:.4f}</title></circle>'
            f'<text x="{x:.1f}" y="{height + 28}" text-anchor="middle" font-size="11">{i}</text>'
            for i, ((x, y), value) in enumerate(zip(places, array, strict=True), start=1)
        )
        axis = "var(--note)"
        frame = f'<path d="M{left} 10V{10 + height}H{left + width}" fill="none" stroke="{axis}"/>'
        scale = f'<text x="{left - 6}" y="15" text-anchor="end" font-size="11">{top:.3g}</text>'
        scale += f'<text x="{left - 6}" y="{14 + height}" text-anchor="end" font-size="11">0</text>'
        below = escape(self.options.get("x", ""))
        titles = f'<text x="{left + width}" y="{height + 46}" text-anchor="end" font-size="12">{below}</text>'
        titles += f'<text x="{left + 8}" y="12" font-size="12">{escape(self.options.get("y", tap))}</text>'
        size = f'viewBox="0 0 {left + width + 12} {height + bottom + 12}" width="{left + width + 12}"'
        drawn = f'<polyline points="{line}" fill="none" stroke="var(--plus)" stroke-width="2"/>'
        said = escape(f"{tap} in the example {name} over {self.options.get('x', 'its index')}", quote=True)
        drawing = f'<svg role="img" aria-label="{said}" {size}>{frame}{scale}{titles}{drawn}{dots}</svg>'
        return [nodes.raw("", f'<div class="drawing">{drawing}</div>', format="html")]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives."""
    app.add_directive("numbers", Numbers)
    app.add_directive("heat-map", HeatMap)
    app.add_directive("curve", Curve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
