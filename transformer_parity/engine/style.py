"""The palette and style of every plot, and how one is written to a file."""

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

# Okabe and Ito (2008): distinct for every kind of colour vision, on white and in print.
BLUE, VERMILION = "#0072b2", "#d55e00"
GREEN = "#008a5f"  # their green, darker: as it is it has a contrast of 3.4 to 1 on white
GREY = "#767676"
GOOD, BAD = BLUE, VERMILION
BACKENDS = {"numpy": GREY, "torch": VERMILION, "jax": BLUE, "tf": GREEN}
OTHERS = "#8fbfdf"  # implementations that are not ours
ALLOWED, FORBIDDEN = "#4a90c8", "#e9edf2"  # pairs of a mask
ZERO, PLUS, MINUS = "#fafaf8", "#004682", "#be4b00"  # ends of the scale of a map from -1 to 1

# The same roles on a page, in light and dark: text at 4.5 to 1 on the page and on a panel, marks at 3 to 1.
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
    "numpy": (GREY, "#9aa0a6"),
    "torch": (VERMILION, "#f0803c"),
    "jax": (BLUE, "#56b4e9"),
    "tf": (GREEN, "#3fc79a"),
    "other": ("#b0568f", "#dd8fc2"),
}

# The same picture on every machine: text as shapes, ids from a fixed salt.
STYLE: dict[Any, Any] = {"font.family": "DejaVu Sans", "font.size": 9, "axes.titlesize": 10, "svg.hashsalt": "parity"}
OPEN_STYLE = {**STYLE, "axes.spines.top": False, "axes.spines.right": False}  # for curves and bars


def page_colours() -> str:
    """Return the colours of a page as CSS variables, in light and dark."""
    light, dark = ("".join(f"--{name}:{pair[i]};" for name, pair in PAGE.items()) for i in range(2))
    return f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"


def destination(out: str, picture: str) -> Path:
    """Return the file to write: ``out``, or a file named after the picture if ``out`` is a folder.

    Raises:
        UsageError: The name ends in no known format.
    """
    path = Path(out)
    kind = path.suffix.lower().removeprefix(".")
    if out.endswith(("/", os.sep)) or path.is_dir() or not kind:
        return path / f"{picture}.png"
    if kind not in FORMATS:
        raise UsageError(f"--out must be a folder or end in .png or .svg: got {out}")
    return path


def write(figure: Figure, path: Path) -> None:
    """Write a picture to a file, whole or not at all.

    Raises:
        OSError: The file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = path.suffix.lower().removeprefix(".")
    metadata = {"Date": None} if kind == "svg" else None  # no date: the same picture is the same file
    picture = io.BytesIO()  # drawing takes its time, in which a kill would leave half a file
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        figure.savefig(picture, format=kind, dpi=DPI, metadata=metadata)
    with replacing(path) as temporary:
        temporary.write_bytes(picture.getvalue())
    if any("missing from font" in str(warning.message) for warning in caught):
        print("note: the font lacks some of the characters; boxes stand for them", file=sys.stderr)
