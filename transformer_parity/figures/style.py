"""The palette and style of every plot, and how one is written to a file."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
from typing import TYPE_CHECKING

FORMATS = ("png", "svg")
DPI = 150


# The same picture on every machine: text as shapes, ids from a fixed salt.
STYLE: dict[Any, Any] = {"font.family": "DejaVu Sans", "font.size": 9, "axes.titlesize": 10, "svg.hashsalt": "parity"}


def destination(out: str, file_format: str | None, picture: str) -> Path:
    """Return the file to write.

    Raises:
        ValueError: It is to be of a kind that is not drawn here, or of two kinds.
    """
    path = Path(out)
    kind = path.suffix.lower().removeprefix(".")
    if out.endswith(("/", os.sep)) or path.is_dir() or not kind:
        return path / f"{picture}.{file_format or 'png'}"
    if kind not in FORMATS:
        raise ValueError(f"--out must be a folder or end in .png or .svg: got {out}")
    if file_format not in (None, kind):
        raise ValueError(f"--out {out} and --format {file_format} contradict each other")
    return path


def write(figure: Figure, path: Path) -> None:
    """Write a picture to a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    kind = path.suffix.lower().removeprefix(".")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            metadata = {"Date": None} if kind == "svg" else None  # no date: the same picture is the same file
            figure.savefig(temporary, format=kind, dpi=DPI, metadata=metadata)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if any("missing from font" in str(warning.message) for warning in caught):
        print("note: the font lacks some of the characters; boxes stand for them", file=sys.stderr)


def label(axes: Axes, queries: Sequence[str], keys: Sequence[str]) -> None:
    """Write the tokens along the axes: an underscore begins a word, and a dollar sign is no formula."""
    shown = {token: token.replace("\u2581", "_").replace("$", r"\$") for token in (*queries, *keys)}
    along: dict[str, Any] = {"rotation": 90, "rotation_mode": "anchor", "ha": "right", "va": "center_baseline"}
    axes.set_xticks(range(len(keys)), [shown[key] for key in keys], **along)
    axes.set_yticks(range(len(queries)), [shown[query] for query in queries])


# Told apart by everyone, on white and in print (Okabe and Ito, 2008).
GOOD, BAD, GREY = "#0072b2", "#d55e00", "#767676"
