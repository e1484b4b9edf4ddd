"""Tokens along the axes of a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def label(axes: Axes, queries: Sequence[str], keys: Sequence[str]) -> None:
    """Write the tokens along the axes: an underscore begins a word, and a dollar sign is no formula."""
    shown = {token: token.replace("\u2581", "_").replace("$", r"\$") for token in (*queries, *keys)}
    along: dict[str, Any] = {"rotation": 90, "rotation_mode": "anchor", "ha": "right", "va": "center_baseline"}
    axes.set_xticks(range(len(keys)), [shown[key] for key in keys], **along)
    axes.set_yticks(range(len(queries)), [shown[query] for query in queries])
