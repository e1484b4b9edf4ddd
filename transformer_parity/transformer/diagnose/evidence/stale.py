"""Parameters that a method still reads with their values from before an update."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import numpy as np
from numpy import ndarray

from transformer_parity.engine.comparison import Arrays
from transformer_parity.engine.tensors import relative_error
from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.diagnose.evidence.closeness import SAME
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.ports.registry import DEFINITION
from transformer_parity.transformer.stages.steps import other_calls

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
    """Say with which weights of an earlier step a method's wrong results are right; empty if with none.

    Args:
        case: A case of training, with calls of other methods between steps.
        actual: The port's tensors.
        truth: The reference's tensors.
    """
    start = case.load_weights()
    weights = {0: start}
    for step in case.calls:
        weights[step] = {name: truth.get(f"step {step} weight {name}", array) for name, array in start.items()}
    for step, older in combinations(sorted(weights, reverse=True), 2):
        names = [f"step {step} {result}" for result in METHODS if f"step {step} {result}" in actual]
        names = [name for name in names if np.shape(actual[name]) == np.shape(truth[name])]
        wrong = {name: actual[name] for name in names if relative_error(actual[name], truth[name]) > SAME}
        if not wrong or f"step {step} weight {next(iter(start))}" not in truth:
            continue
        for part, beginnings in PARTS.items():
            stale = {
                name: weights[older][name] if name.startswith(beginnings) else array
                for name, array in weights[step].items()
            }
            if _reproduces(case, step, stale, wrong):
                methods = " and ".join(METHODS[name.split()[2]] for name in wrong)
                since = f"after step {older}" if older else "before the first step"
                return f"after step {step}, {methods} computed with the weights that {part} had {since}"
    return ""


def _reproduces(case: Case, step: int, weights: Mapping[str, ndarray], wanted: Arrays) -> bool:
    """Whether the reference with some weights has the results that a port showed after a step."""
    loaded = DEFINITION.load(case.config, weights, Placement("float64"))
    found = {f"step {step} {name}": array for name, array in other_calls(case, loaded)}
    return all(relative_error(array, found[name]) <= SAME for name, array in wanted.items())
