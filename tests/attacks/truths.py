"""More attacks through golden vectors: B contains copies of A's tensors, or A is a model that reveals no bug."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy import ndarray

from attacks.directories import DIRECTORIES as DIRECTORIES  # this module adds its attacks to the list
from attacks.directories import EASIEST, FULL, LATER, OUTPUT, PADDED, Edit, vectors
from attacks.vectors import Vectors, made, rounded
from attacks.words import INCOMPLETE, TOLERATED
from transformer_parity.transformer.cases.case import Case

FIRST = ("source_embedding.output", "loss", "step 1 loss", "scores")


def merged(is_own: Callable[[str, int], bool]) -> Edit:
    """Return a function that replaces tensors of B by A's unless ``is_own(name, index)`` is true."""

    def edit(a: Vectors, b: Vectors) -> None:
        for theirs, mine in zip(a.outputs(), b.outputs(), strict=True):
            mine.update({name: x for i, (name, x) in enumerate(theirs.items()) if not is_own(name, i)})

    return edit


def copied(name: str, what: str, is_own: Callable[[str, int], bool]) -> None:
    """Add an attack in which B contains tensors of A."""
    vectors(name, what, merged(is_own), expected=INCOMPLETE)


copied(
    "FirstTensorsOwn",
    "B's program computed the first tensor of each case. All other tensors are copies of A's.",
    lambda n, i: n in FIRST,
)
copied(
    "LogitsOwn",
    "B's program computed the logits. All other tensors are copies of A's.",
    lambda n, i: n in ("logits", OUTPUT),
)
copied(
    "EverySecondOwn",
    "B's program computed every second tensor. The other tensors are copies of A's.",
    lambda n, i: i % 2 == 0,
)
copied(
    "AllButGradients",
    "B's gradients are copies of A's. B's program computed everything else.",
    lambda n, i: n[:3] not in ("of ", "at "),
)
copied(
    "AllButSteps",
    "B's optimizer steps are copies of A's. B's program computed everything else.",
    lambda n, i: n[:5] != "step ",
)
copied(
    "AllButSearches",
    "B's searches are copies of A's. B's program computed everything else.",
    lambda n, i: n not in ("tokens", "scores"),
)
vectors(
    "CopiedLogits",
    "The logits of one case in B are a copy of A's.",
    lambda a, b: b.outputs(PADDED, "float64")[0].update({OUTPUT: a.outputs(PADDED, "float64")[0][OUTPUT]}),
    expected=INCOMPLETE,
)
vectors(
    "CopiedButOneNumber",
    "The logits of one case in B are a copy of A's, except for the last bit of one number.",
    lambda a, b: b.outputs(PADDED, "float64")[0].update(
        {OUTPUT: _one_rounded(a.outputs(PADDED, "float64")[0][OUTPUT])}
    ),
    expected=INCOMPLETE,
)
vectors(
    "EmbeddingsLikeA",
    "B's embeddings are bitwise identical to A's. One multiplication and one addition round the same everywhere.",
    lambda a, b: [
        mine.update({name: theirs[name] for name in theirs if name.endswith("_embedding.output") and name[:3] != "at "})
        for theirs, mine in zip(a.outputs(), b.outputs(), strict=True)
    ],
    expected=TOLERATED,
)


def _one_rounded(array: ndarray) -> ndarray:
    found = array.copy()
    found.flat[0] = rounded(found.flat[:1])[0]
    return found


def nothing_shows(name: str, what: str, *kept: str, **changes: Any) -> None:
    """Add an attack in which the reference computed A, but the model or its inputs reveal no bug."""

    def edit(a: Vectors, b: Vectors) -> None:
        for side in (a, b):
            vars(side).update(vars(made(**changes)))
            side.keep(*kept or [case["name"] for case in side.manifest["cases"]])
        b.alter(rounded)

    vectors(name, what, edit, expected=INCOMPLETE)


def with_ids(change: Callable[[ndarray, int], Any]) -> Callable[[Case], Case]:
    """Return a function that replaces IDs and labels of a case by ``change(ids, pad_id)``."""

    def altered(case: Case) -> Case:
        ids = {name: np.array(change(array, case.config.pad_id)) for name, array in case.inputs.items()}
        return replace(case, inputs=ids)

    return altered


def without_learning(case: Case) -> Case:
    """Set a learning rate that is too small to change any weight."""
    return case if case.settings is None else replace(case, settings=replace(case.settings, learning_rate_factor=1e-30))


def with_limit(case: Case) -> Case:
    """Limit a search to one token."""
    return case if case.search is None else replace(case, search=replace(case.search, max_length=1))


nothing_shows(
    "ZeroWeights",
    "All weights in A and B are zero, except for the embeddings.",
    weight=lambda name, x: x if name.endswith(".table") else 0 * x,
)
nothing_shows(
    "ZeroScales",
    "The layer norm scales in A and B are zero.",
    *FULL,
    weight=lambda name, x: 0 * x if name.endswith(".scale") else x,
)
nothing_shows(
    "TinyWeights",
    "The kernels in A and B are multiplied by 1e-30.",
    weight=lambda name, x: 1e-30 * x if x.ndim == 2 else x,
)
nothing_shows(
    "NoPadding",
    "No sentence in A and B is padded, so a padding mask has no effect.",
    change=with_ids(lambda ids, pad: np.where(ids == pad, 3, ids)),
)
nothing_shows(
    "OneSentenceForAll",
    "In A and B, all sentences in a batch are the same.",
    change=with_ids(lambda ids, pad: np.repeat(ids[1:2] if len(ids) > 1 else ids, len(ids), 0)),
)
nothing_shows(
    "OneTokenForAll",
    "All tokens in A and B are the same.",
    change=with_ids(lambda ids, pad: np.where(ids == pad, ids, 5)),
)
nothing_shows("NoLearning", "The learning rate in A and B is too small to change any weight.", change=without_learning)
vectors(
    "TruthOfTheEasiest",
    "A contains only the easiest case, which has no padding.",
    lambda a, b: (a.keep(EASIEST), a.manifest.update(left_out=LATER)),
    expected=INCOMPLETE,
)


def leave_padding_out(a: Vectors, b: Vectors) -> None:
    """Remove every forward pass and gradient with padding."""
    padded = [case["name"] for case in b.manifest["cases"] if (b.inputs(case["name"])["source_ids"] == 0).any()]
    kept = [case["name"] for case in b.manifest["cases"]]
    b.keep(*[name for name in kept if name not in padded or not name.startswith(("full/", "gradients/"))])
    b.manifest.update(left_out=LATER)


vectors(
    "PaddedLeftOut",
    "B declares every forward pass and gradient with padding as left out.",
    leave_padding_out,
    expected=INCOMPLETE,
)


def results_left_out(name: str, what: str, stage: str, kept: str) -> None:
    """Add an attack in which B contains only one tensor per case of a stage."""

    def edit(a: Vectors, b: Vectors) -> None:
        entries = []
        for case in [case["name"] for case in b.manifest["cases"] if case["stage"] == stage]:
            entries.append({**LATER[0], "case": case, "tensors": [n for n in b.outputs(case)[0] if n != kept]})
            b.drop(lambda tensor: tensor != kept, case)
        b.manifest.update(left_out=entries)

    vectors(name, what, edit, expected=INCOMPLETE)


EMBEDDING = "source_embedding.output"
results_left_out(
    "EmbeddingsOnly",
    "For activations, B contains only source embeddings and declares everything else as left out.",
    "activations",
    EMBEDDING,
)
results_left_out(
    "LossOnly", "For gradients, B contains only losses and declares everything else as left out.", "gradients", "loss"
)
results_left_out(
    "FirstLossOnly",
    "For optimizer steps, B contains only the first loss and declares everything else as left out.",
    "steps",
    "step 1 loss",
)
nothing_shows("OneTokenSearches", "All searches in A and B end after one token.", change=with_limit)
