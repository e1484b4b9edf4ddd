"""More attacks through golden vectors: B has copied tensors from A, or A is a model on which nothing shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy import ndarray

from attacks.attack import INCOMPLETE, TOLERATED
from attacks.folders import EASIEST, FULL, LATER, OUTPUT, PADDED, Edit, vectors
from attacks.folders import FOLDERS as FOLDERS  # to which those below are added
from attacks.vectors import Vectors, made, rounded
from transformer_parity.transformer.cases.case import Case

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


def _one_rounded(array: ndarray) -> ndarray:
    found = array.copy()
    found.flat[0] = rounded(found.flat[:1])[0]
    return found


def nothing_shows(name: str, what: str, *kept: str, **changes: Any) -> None:
    """Add an attack in which the reference has computed A, so that only its inputs prove nothing."""

    def edit(a: Vectors, b: Vectors) -> None:
        for side in (a, b):
            vars(side).update(vars(made(**changes)))
            side.keep(*kept or [case["name"] for case in side.manifest["cases"]])
        b.alter(rounded)

    vectors(name, what, edit, expected=INCOMPLETE)


def with_ids(change: Callable[[ndarray, int], Any]) -> Callable[[Case], Case]:
    """Return what changes ids and labels of a case: ``change(ids, pad_id)``."""

    def altered(case: Case) -> Case:
        ids = {name: np.array(change(array, case.config.pad_id)) for name, array in case.inputs.items()}
        return replace(case, inputs=ids)

    return altered


def without_learning(case: Case) -> Case:
    """Make a case of optimizer steps take steps of zero length."""
    return case if case.settings is None else replace(case, settings=replace(case.settings, learning_rate_factor=1e-30))


def with_limit(case: Case) -> Case:
    """Make a search end after one token."""
    return case if case.search is None else replace(case, search=replace(case.search, max_length=1))


nothing_shows("ZeroWeights", "The weights of both are zero.", weight=lambda name, x: 0 * x)
nothing_shows(
    "ZeroScales",
    "The scales of the norms of both are zero.",
    *FULL,
    weight=lambda name, x: 0 * x if name.endswith(".scale") else x,
)
nothing_shows(
    "TinyWeights",
    "The kernels of both are 1e-30 times as large.",
    weight=lambda name, x: 1e-30 * x if x.ndim == 2 else x,
)
nothing_shows(
    "NoPadding",
    "No sentence of both is padded, so that no mask is needed.",
    change=with_ids(lambda ids, pad: np.where(ids == pad, 3, ids)),
)
nothing_shows(
    "OneSentenceForAll",
    "All sentences of both are equal.",
    change=with_ids(lambda ids, pad: np.repeat(ids[1:2] if len(ids) > 1 else ids, len(ids), 0)),
)
nothing_shows(
    "OneTokenForAll", "All tokens of both are equal.", change=with_ids(lambda ids, pad: np.where(ids == pad, ids, 5))
)
nothing_shows("NoLearning", "The learning rate of both is so small that no weight changes.", change=without_learning)
vectors(
    "TruthOfTheEasiest",
    "A holds the easiest case only, which has no padding.",
    lambda a, b: (a.keep(EASIEST), a.manifest.update(left_out=LATER)),
    expected=INCOMPLETE,
)


def leave_padding_out(a: Vectors, b: Vectors) -> None:
    """Drop every forward pass and gradient with padding."""
    padded = [case["name"] for case in b.manifest["cases"] if (b.inputs(case["name"])["source_ids"] == 0).any()]
    kept = [case["name"] for case in b.manifest["cases"]]
    b.keep(*[name for name in kept if name not in padded or not name.startswith(("full/", "gradients/"))])
    b.manifest.update(left_out=LATER)


vectors(
    "PaddedLeftOut",
    "B leaves out every forward pass and gradient with padding.",
    leave_padding_out,
    expected=INCOMPLETE,
)


def results_left_out(name: str, what: str, stage: str, kept: str) -> None:
    """Add an attack in which B leaves out all tensors of a stage but one."""

    def edit(a: Vectors, b: Vectors) -> None:
        entries = []
        for case in [case["name"] for case in b.manifest["cases"] if case["stage"] == stage]:
            entries.append({**LATER[0], "case": case, "tensors": [n for n in b.outputs(case)[0] if n != kept]})
            b.drop(lambda tensor: tensor != kept, case)
        b.manifest.update(left_out=entries)

    vectors(name, what, edit, expected=INCOMPLETE)


EMBEDDING = "source_embedding.output"
results_left_out("EmbeddingsOnly", "B leaves out what is computed from the embeddings.", "activations", EMBEDDING)
results_left_out("LossOnly", "B leaves out all gradients, and holds their losses.", "gradients", "loss")
results_left_out("FirstLossOnly", "B leaves out what optimizer steps change.", "steps", "step 1 loss")
nothing_shows("OneTokenSearches", "The searches of both end after one token.", change=with_limit)
