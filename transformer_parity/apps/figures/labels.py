"""Token labels for the axes of a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def label(axes: Axes, queries: Sequence[str], keys: Sequence[str]) -> None:
    """Label the axes with tokens.

    SentencePiece's word marker is shown as an underscore. Dollar signs are escaped because Matplotlib would interpret
    them as the start of a formula.
    """
    shown = {token: token.replace("\u2581", "_").replace("$", r"\$") for token in (*queries, *keys)}
    along: dict[str, Any] = {"rotation": 90, "rotation_mode": "anchor", "ha": "right", "va": "center_baseline"}
    axes.set_xticks(range(len(keys)), [shown[key] for key in keys], **along)
    axes.set_yticks(range(len(queries)), [shown[query] for query in queries])
