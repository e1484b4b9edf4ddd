"""Parameters that a method still reads with their values from before an update."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy import ndarray

from transformer_parity.engine.comparison import Arrays
from transformer_parity.engine.tensors import relative_error
from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.ports.registry import DEFINITION
from transformer_parity.transformer.stages.steps import other_calls

SAME = 1e-9  # relative
METHODS = {"logits": "`forward`", "tokens": "`generate`"}
PARTS = {  # beginnings of the names of parameters, in words
    "all parameters": ("",),
    "the encoder": ("source_embedding.", "encoder."),
    "the layers of the encoder": ("encoder.",),
    "the decoder": ("target_embedding.", "decoder.", "output_projection."),
    "the layers of the decoder": ("decoder.",),
    "the embedding of the source": ("source_embedding.",),
    "the embedding of the target": ("target_embedding.",),
    "the output projection": ("output_projection.",),
}


def stale_weights(case: Case, actual: Arrays, truth: Arrays) -> str:
    """Say with which weights from before the first step a method's wrong results are right; empty if with none.

    Args:
        case: A case of training, with calls of other methods between steps.
        actual: The port's tensors.
        truth: The reference's tensors.
    """
    start = case.load_weights()
    trained = {name: truth.get(f"step 1 weight {name}", array) for name, array in start.items()}
    names = [name for name in actual if name.startswith("step 1 ") and name.endswith((" logits", " tokens"))]
    names = [name for name in names if np.shape(actual[name]) == np.shape(truth[name])]
    wrong = [name for name in names if relative_error(actual[name], truth[name]) > SAME]
    if not wrong or all(trained[name] is start[name] for name in start):
        return ""
    for part, beginnings in PARTS.items():
        stale = {name: start[name] if name.startswith(beginnings) else array for name, array in trained.items()}
        if _reproduces(case, stale, {name: actual[name] for name in wrong}):
            methods = " and ".join(METHODS[name.split()[2]] for name in wrong)
            return f"after step 1, {methods} computed with the weights that {part} had before the step"
    return ""


def _reproduces(case: Case, weights: Mapping[str, ndarray], wanted: Arrays) -> bool:
    """Whether the reference with some weights has the results that a port showed after step 1."""
    loaded = DEFINITION.load(case.config, weights, Placement("float64"))
    found = {f"step 1 {name}": array for name, array in other_calls(case, loaded)}
    return all(relative_error(array, found[name]) <= SAME for name, array in wanted.items())
