"""Find patterns in training: wrong losses and weights, the first wrong step, and methods that use old weights."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import numpy as np
from numpy import ndarray

from transformer_parity.engine.comparison import Arrays
from transformer_parity.engine.signatures import SAME, is_of
from transformer_parity.engine.tensors import relative_error
from transformer_parity.transformer.cases.case import STEPS, Case
from transformer_parity.transformer.diagnose.evidence.differing import Differing, by_factor, differ, factor_between
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.ports.registry import DEFINITION
from transformer_parity.transformer.stages.steps import SNAPSHOTS, other_calls
from transformer_parity.transformer.stages.training_stage import LOSS, is_noise

LEAST_OF_A_MOVE = 0.01  # minimum error, relative to a step's weight change, that affects the next loss
METHODS = {"logits": "`forward`", "tokens": "`generate`"}
PARTS = {  # maps a description of parameters to the prefixes of their names
    "all parameters": ("",),
    "the encoder": ("source_embedding.", "encoder."),
    "the layers of the encoder": ("encoder.",),
    "the decoder": ("target_embedding.", "decoder.", "output_projection."),
    "the layers of the decoder": ("decoder.",),
    "the embedding of the source": ("source_embedding.",),
    "the embedding of the target": ("target_embedding.",),
    "the output projection": ("output_projection.",),
}


def rounded_weights(shown: Differing) -> str:
    """Report that every float64 weight that differs after a step was rounded to float32."""
    names = [name for name in shown.wrong if shown.case.stage == STEPS and " weight " in name]
    if not names or not all(is_of(shown.actual[name], "float32") for name in names):
        return ""
    if all(is_of(shown.truth[name], "float32") for name in names):
        return ""
    return "every returned weight that differs has only float32 precision"


def right_losses(shown: Differing) -> str:
    """Report that all losses are correct, but that all weights returned after the first step are wrong."""
    prefix = f"step {SNAPSHOTS[0]} weight "
    losses = [name for name in shown.right if name.endswith(f" {LOSS}")]
    if shown.case.stage != STEPS or not losses or any(name.endswith(f" {LOSS}") for name in shown.wrong):
        return ""
    start = shown.case.load_weights()
    names = [f"{prefix}{name}" for name in start if not is_noise(name)]
    if not set(names) <= set(shown.wrong):
        return ""
    moved = _flat({name: shown.truth[name] - start[name.removeprefix(prefix)] for name in names})
    wrong = _flat({name: shown.actual[name] - shown.truth[name] for name in names})
    if not np.linalg.norm(wrong) > LEAST_OF_A_MOVE * np.linalg.norm(moved):
        return ""
    return (
        f"all {len(losses)} losses agree, so training is correct, but the weights that are returned after a step "
        "differ from the weights that the next step uses"
    )


def first_wrong_step(shown: Differing) -> str:
    """Report the first training step in which the loss is wrong."""
    wrong = [int(name.split()[1]) for name in shown.wrong if shown.case.stage == STEPS and name.endswith(f" {LOSS}")]
    first, restart = min(wrong, default=0), shown.case.restart
    moved = [int(name.split()[1]) for name in shown.wrong if " weight " in name]
    if first > 1:
        sentence = f"the losses agree up to step {first - 1} and differ from step {first} on"
        if min(moved, default=first) < first - 1:
            return f"{sentence}, and weights already differ after step {min(moved)}"
        if restart and first - restart in (1, 2):
            return f"{sentence}; training restarts after step {restart} with a new optimizer"
        if shown.case.rows:  # the next batch has a different size, which the port may not handle correctly
            return (
                f"{sentence}: the batch of step {first} has a different number of sentences, or the update of step "
                f"{first - 1} is wrong"
            )
        if first - 1 in shown.case.calls:
            return f"{sentence}: the update of step {first - 1}, or a method that is called after it, is wrong"
        return f"{sentence}: the update of step {first - 1} is wrong, or the forward pass with the weights after it"
    return "the loss already differs in step 1, before the first update" if first else ""


def only_between_steps(shown: Differing) -> str:
    """Report that training is correct but methods called between two steps return wrong results."""
    results = [name for name in shown.wrong if name.endswith((" logits", " gradient between steps", " tokens"))]
    if shown.case.stage != STEPS or not results or len(results) < len(shown.wrong):
        return ""
    cause = stale_weights(shown.case, shown.actual, shown.truth) or (
        "for example, these methods use weights from before the last update, or the model is still in training mode"
    )
    return f"all losses and weights agree, and only the results of methods called between steps differ: {cause}"


def moved_weights(shown: Differing) -> str:
    """For the first snapshot with wrong weights, compare the port's and the reference's movements of these weights.

    A movement is the difference between a weight and its initial value. The function reports the factors by which
    the movements are too large or too small. If there are no such factors, it reports which weights are wrong.
    """
    if shown.case.stage != STEPS:
        return ""
    start = shown.case.load_weights()
    for step in SNAPSHOTS:
        prefix = f"step {step} weight "
        names = [name for name in shown.wrong if name.startswith(prefix)]
        if not names:
            continue
        moves = [
            {name: array[name] - start[name.removeprefix(prefix)] for name in names}
            for array in (shown.actual, shown.truth)
        ]
        factors = {name: factor_between(moves[0][name], moves[1][name], 1e-6) for name in names}
        said = by_factor(
            shown,
            factors,
            prefix,
            f"after step {step}, {{group}} moved {{factor}} times as far as in the reference",
        )
        agree = len([name for name in shown.right if name.startswith(prefix)])
        only = f"after step {step}, {shown.group(names, prefix)} {differ(names)}, and {agree} agree"
        return said or (only if agree else "")
    return ""


def stale_weights(case: Case, actual: Arrays, truth: Arrays) -> str:
    """Report which earlier weights explain a method's wrong results, or return an empty string if none do.

    Args:
        case: A training case that calls other methods between steps.
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
                or_some = (
                    ", or some of these weights" if all(name.endswith(" tokens") for name in wrong) else ""
                )  # different weights can lead to the same tokens
                return f"after step {step}, {methods} used the weights that {part} had {since}{or_some}"
    return ""


def _reproduces(case: Case, step: int, weights: Mapping[str, ndarray], wanted: Arrays) -> bool:
    """Return whether the reference, loaded with the given weights, reproduces the results in ``wanted``."""
    loaded = DEFINITION.load(case.config, weights, Placement("float64"))
    found = {f"step {step} {name}": array for name, array in other_calls(case, loaded)}
    return all(relative_error(array, found[name]) <= SAME for name, array in wanted.items())


def _flat(arrays: Arrays) -> ndarray:
    return np.concatenate([np.ravel(array) for array in arrays.values()])
