"""The colors and the style of all plots, and a function that writes a plot to a file."""

from __future__ import annotations

import io
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformer_parity.engine.system.errors import UsageError
from transformer_parity.engine.system.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")
DPI = 150

# The palette of Okabe and Ito (2008), whose colors can be distinguished in print and by people with color blindness.
BLUE, VERMILION = "#0072b2", "#d55e00"
GREEN = "#008a5f"  # darker than the palette's green, which has a contrast of only 3.4 to 1 on white
GRAY = "#767676"
GOOD, BAD = BLUE, VERMILION
BACKENDS = {"numpy": GRAY, "torch": VERMILION, "jax": BLUE, "tf": GREEN}
OTHERS = "#8fbfdf"  # implementations outside this project
ALLOWED, FORBIDDEN = "#4a90c8", "#e9edf2"  # query-key pairs in the plot of a mask
ZERO, PLUS, MINUS = "#fafaf8", "#004682", "#be4b00"  # the values 0, 1, and -1 in a heat map

# Colors of HTML pages in light and dark mode. The contrast of text on the page and on panels is at least 4.5 to 1, and
# the contrast of marks is at least 3 to 1.
PAGE = {
    "page": ("#fdfdfb", "#16181b"),
    "panel": ("#f4f4f0", "#1f2226"),
    "line": ("#dcdcd6", "#34383d"),
    "ink": ("#1c1e21", "#e6e6e1"),
    "soft": ("#5c6066", "#a0a4a9"),
    "good": ("#00684a", "#74cfa2"),
    "bad": ("#a83a00", "#ff9d66"),
    "open": ("#74428f", "#c9a9e6"),
    "zero": (ZERO, "#22262a"),
    "plus": (PLUS, "#6cb6ee"),
    "minus": (MINUS, "#ff8c42"),
    "numpy": (GRAY, "#9aa0a6"),
    "torch": (VERMILION, "#f0803c"),
    "jax": (BLUE, "#56b4e9"),
    "tf": (GREEN, "#3fc79a"),
    "other": ("#b0568f", "#dd8fc2"),
}

# The same data must produce the same file on every machine, so text is drawn as shapes, and SVG IDs use a fixed salt.
STYLE: dict[Any, Any] = {"font.family": "DejaVu Sans", "font.size": 9, "axes.titlesize": 10, "svg.hashsalt": "parity"}
OPEN_STYLE = {**STYLE, "axes.spines.top": False, "axes.spines.right": False}  # style of plots with curves or bars


def page_colors() -> str:
    """Return a page's colors in light and dark mode as CSS variables."""
    light, dark = ("".join(f"--{name}:{pair[i]};" for name, pair in PAGE.items()) for i in range(2))
    return f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"


def destination(out: str, picture: str) -> Path:
    """Return the path of the file to write.

    Args:
        out: A .png or .svg file, or a directory.
        picture: The file name without a suffix, used if ``out`` is a directory.

    Raises:
        UsageError: If ``out`` is a file name with an unsupported suffix.
    """
    path = Path(out)
    kind = path.suffix.lower().removeprefix(".")
    if out.endswith(("/", os.sep)) or path.is_dir() or not kind:
        return path / f"{picture}.png"
    if kind not in FORMATS:
        raise UsageError(f"--out must be a directory, or a file name that ends in .png or .svg: got {out}")
    return path


def write(figure: Figure, path: Path) -> None:
    """Write a figure to a file atomically.

    Raises:
        OSError: If the file can't be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = path.suffix.lower().removeprefix(".")
    metadata = {"Date": None} if kind == "svg" else None  # without a date, the same figure produces the same file
    picture = io.BytesIO()  # draw into memory, so that a process that is killed while drawing leaves no partial file
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        figure.savefig(picture, format=kind, dpi=DPI, metadata=metadata)
    with replacing(path) as temporary:
        temporary.write_bytes(picture.getvalue())
    if any("missing from font" in str(warning.message) for warning in caught):
        print("note: the font does not contain some of the characters, which are shown as boxes", file=sys.stderr)
