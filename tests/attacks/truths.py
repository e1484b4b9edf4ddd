"""More attacks through golden vectors: B has computed some tensors, and copied the others from A."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from attacks.attack import INCOMPLETE, TOLERATED
from attacks.folders import FOLDERS as FOLDERS  # to which those below are added
from attacks.folders import OUTPUT, PADDED, Edit, vectors
from attacks.vectors import Vectors, rounded

FIRST = ("source_embedding.output", "loss", "step 1 loss", "scores")


def merged(is_own: Callable[[str, int], bool]) -> Edit:
    """Return what replaces tensors of B by A's, but for those of which ``is_own(name, index)``."""

    def edit(a: Vectors, b: Vectors) -> None:
        for theirs, mine in zip(a.outputs(), b.outputs(), strict=True):
            mine.update({name: x for i, (name, x) in enumerate(theirs.items()) if not is_own(name, i)})

    return edit


def copied(name: str, what: str, is_own: Callable[[str, int], bool]) -> None:
    """Add an attack in which B holds tensors of A."""
    vectors(name, what, merged(is_own), expected=INCOMPLETE)


copied(
    "FirstTensorsOwn", "B has computed the first tensor of each case, and all others are A's.", lambda n, i: n in FIRST
)
copied(
    "LogitsOwn", "B has computed the logits, and all other tensors are A's own.", lambda n, i: n in ("logits", OUTPUT)
)
copied("EverySecondOwn", "B has computed every second tensor, and the others are A's own.", lambda n, i: i % 2 == 0)
copied(
    "AllButGradients",
    "B has computed everything but gradients, which are A's own.",
    lambda n, i: n[:3] not in ("of ", "at "),
)
copied(
    "AllButSteps", "B has computed everything but optimizer steps, which are A's own.", lambda n, i: n[:5] != "step "
)
copied(
    "AllButSearches",
    "B has computed everything but searches, which are A's own.",
    lambda n, i: n not in ("tokens", "scores"),
)
vectors(
    "CopiedLogits",
    "The logits of one case of B are A's own.",
    lambda a, b: b.outputs(PADDED, "float64")[0].update({OUTPUT: a.outputs(PADDED, "float64")[0][OUTPUT]}),
    expected=INCOMPLETE,
)
vectors(
    "CopiedButOneNumber",
    "The logits of one case of B are A's own, with one number changed in its last bit.",
    lambda a, b: b.outputs(PADDED, "float64")[0].update(
        {OUTPUT: _one_rounded(a.outputs(PADDED, "float64")[0][OUTPUT])}
    ),
    expected=INCOMPLETE,
)
vectors(
    "EmbeddingsLikeA",
    "The embeddings of B have the bits of A's, as those of every program do that multiplies once and adds once.",
    lambda a, b: [
        mine.update({name: theirs[name] for name in theirs if name.endswith("_embedding.output") and name[:3] != "at "})
        for theirs, mine in zip(a.outputs(), b.outputs(), strict=True)
    ],
    expected=TOLERATED,
)


def _one_rounded(array: np.ndarray) -> np.ndarray:
    found = array.copy()
    found.flat[0] = rounded(found.flat[:1])[0]
    return found
