"""Find patterns in a case: which tensors are wrong, how they are wrong, and at which training step the error starts.

Each function returns a sentence that describes one pattern, or an empty string if the case doesn't have the pattern.
Patterns are derived from the findings and from the port's and the reference's tensors. A sentence states a cause only
if no other cause leads to the same pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy import ndarray

from reference_numpy.training import cross_entropy_backward
from transformer_parity.engine.comparison import Arrays
from transformer_parity.engine.findings import AGREES, DIVERGES, Finding
from transformer_parity.engine.signatures import SAME
from transformer_parity.engine.tolerances import POLICY
from transformer_parity.transformer.cases.case import ACTIVATIONS, DECODE, GRADIENTS, Case
from transformer_parity.transformer.diagnose.evidence.circumstances import circumstances
from transformer_parity.transformer.diagnose.evidence.closeness import factor_in_words
from transformer_parity.transformer.diagnose.evidence.differing import (
    Differing,
    by_factor,
    differ,
    factor_between,
    listed,
)
from transformer_parity.transformer.diagnose.evidence.steps import (
    first_wrong_step,
    moved_weights,
    only_between_steps,
    right_losses,
    rounded_weights,
)
from transformer_parity.transformer.stages.decode import TOKENS
from transformer_parity.transformer.stages.training_stage import LOSS, is_noise

LEAST_OF_FLOAT32, MOST_OF_FLOAT32 = 1e-9, 1e-6  # relative errors that float32 rounding causes in losses and gradients


def not_finite(shown: Differing) -> str:
    """Report the first tensor with NaN or infinite values."""
    for name in shown.actual:
        value = np.asarray(shown.actual[name])
        if value.dtype.kind == "f" and name in shown.wrong and not np.isfinite(value).all():
            first = np.argwhere(~np.isfinite(value))[0].tolist()
            numbers = {"NaN": int(np.isnan(value).sum()), "infinite": int(np.isinf(value).sum())}
            counts = " and ".join(f"{number} {kind}" for kind, number in numbers.items() if number)
            where = f", the first at index {first}" if value.ndim else ""
            tensor = f"the gradient {name}" if name.startswith(("of ", "at ")) else name
            return f"{tensor}: {counts} of {value.size} values{where}. Fix this before anything else"
    return ""


def rounded_losses(shown: Differing) -> str:
    """Report float64 losses that have only float32 precision, because this doesn't happen by chance."""
    losses = [name for name in shown.wrong if name.endswith(LOSS)]
    if not losses or any(float(np.float32(shown.actual[name])) != float(shown.actual[name]) for name in losses):
        return ""
    if any(float(np.float16(shown.actual[name])) == float(shown.actual[name]) for name in losses):  # for example, zero
        return ""
    which = "the loss has" if len(losses) == 1 else f"all {len(losses)} losses that differ have"
    return f"{which} only float32 precision: compute the loss in the dtype of the model"


def only_the_loss(shown: Differing) -> str:
    """Report that the loss is wrong although all gradients are correct."""
    if shown.case.stage == GRADIENTS and shown.wrong == (LOSS,) and not shown.misshapen:
        ratio = float(shown.actual[LOSS] / shown.truth[LOSS])
        known = factor_in_words(ratio, shown.case.config, shown.case)
        return (
            f"only the loss differs ({ratio:.12g} times the correct one{known}): all {len(shown.right)} gradients agree"
        )
    return ""


def right_loss(shown: Differing) -> str:
    """Report that the loss is correct although gradients are wrong."""
    if shown.case.stage == GRADIENTS and shown.wrong and LOSS in shown.right:
        return "the loss is correct, and only gradients differ"
    return ""


def targets(shown: Differing) -> str:
    """Derive the target probabilities in the loss from the gradient of the logits, and report wrong probabilities.

    The gradient is ``total * prediction - target``, where ``total`` is the sum of the target probabilities. If the loss
    is correct, ``total`` is 1.
    """
    case, name = shown.case, "at logits"
    if case.stage != GRADIENTS or name not in shown.wrong or shown.actual[name].shape != shown.truth[name].shape:
        return ""
    labels, pad_id = case.inputs["labels"], case.config.pad_id
    counted = labels != pad_id
    zeros = np.zeros_like(shown.truth[name])  # logits of zero predict the probability 1 / V for every token
    right = (1.0 / zeros.shape[-1] - cross_entropy_backward(zeros, labels, case.config))[counted]
    actual, truth = (counted.sum() * found[name][counted] for found in (shown.actual, shown.truth))
    is_label = np.arange(zeros.shape[-1]) == labels[counted][:, None]
    is_padding = (np.arange(zeros.shape[-1]) == pad_id) & ~is_label
    groups = {"the label": is_label, "padding": is_padding, "every other token": ~(is_label | is_padding)}
    prediction, others = truth + right, groups["every other token"]
    rows = np.stack([np.ones(others.sum()), prediction[others]], axis=-1)
    _, total = np.linalg.lstsq(rows, actual[others], rcond=None)[0]
    found = total * prediction - actual
    if not 0.5 < total < 1.5:  # the full loss is scaled, so the target probabilities don't explain the gradient
        return ""
    if any(np.ptp(found[group]) > SAME for group in groups.values()):
        return ""
    words, instead = (
        ", ".join(f"{round(float(np.median(one[group])), 12):.6g} for {what}" for what, group in groups.items())
        for one in (found, right)
    )
    return f"the loss uses target probabilities of {words}, instead of {instead}" if words != instead else ""


def labels_of_padding(shown: Differing) -> str:
    """Report padding labels that contribute to the gradient."""
    case, name = shown.case, "at logits"
    if case.stage != GRADIENTS or name not in shown.wrong or shown.actual[name].shape != shown.truth[name].shape:
        return ""
    padding = case.inputs["labels"] == case.config.pad_id
    counted = np.asarray(shown.actual[name])[padding].any(-1)
    if not counted.any():
        return ""
    return f"{counted.sum()} of {len(counted)} padding labels contribute to the loss: the gradient there is not zero"


def zero_gradients(shown: Differing) -> str:
    """Report gradients that are exactly zero."""
    zero = [name for name in _parameters(shown) if not shown.actual[name].any() and shown.truth[name].any()]
    if not zero:
        return ""
    group = shown.group(zero, "of ")
    return f"the gradient of {group} is exactly zero: the backward pass stops, for example at a detached tensor"


def transformed_gradients(shown: Differing) -> str:
    """Report wrong gradients if all of them are multiples or transposes of the correct gradients."""
    names = _parameters(shown)
    if not names:
        return ""
    if all(_is_transposed(shown.actual[name], shown.truth[name]) for name in names):
        return f"the gradient of {shown.group(names, 'of ')} is the transpose of the correct one"
    factors = {name: factor_between(shown.actual[name], shown.truth[name]) for name in names}
    return by_factor(shown, factors, "of ", "the gradient of {group} is {factor} times the correct one", shown.case)


def wrong_parameters(shown: Differing) -> str:
    """Report which gradients are wrong.

    For post-norm models, also name the wrong gradient that the backward pass computes first.
    """
    names = [name for name in _parameters(shown) if not is_noise(name)]
    agree = [name for name in shown.right if name.startswith("of ") and not is_noise(name)]
    if not names or not agree:
        return ""
    which = "gradient" if len(names) == 1 else "gradients"
    sentence = f"the {which} of {shown.group(names, 'of ')} {differ(names)}, and {len(agree)} agree"
    if shown.case.config.norm_order != "post":  # tensors aren't in backward-pass order
        return sentence
    return f"{sentence}; the backward pass computes the gradient of {names[0].removeprefix('of ')} first"


def as_small_as_rounding(shown: Differing) -> str:
    """Report that the errors of float64 losses and gradients have the size of float32 rounding errors."""
    if shown.case.stage != GRADIENTS or not shown.wrong:
        return ""
    errors = [
        float(np.linalg.norm(shown.actual[name] - shown.truth[name]) / np.linalg.norm(shown.truth[name]))
        for name in shown.wrong
        if not is_noise(name) and np.any(shown.truth[name])
    ]
    if not np.isfinite(errors).all() or not LEAST_OF_FLOAT32 < max(errors, default=0.0) < MOST_OF_FLOAT32:
        return ""
    size = f"the largest relative error of losses and gradients is about {max(errors):.0e}"
    return f"{size}: rounding to float32, or a small constant such as an epsilon, causes errors of this size"


def first_wrong_token(shown: Differing) -> str:
    """Report for how many sentences a search returns wrong tokens, and the position of the first wrong token."""
    if shown.case.stage != DECODE or TOKENS not in shown.wrong or TOKENS not in shown.actual:
        return ""
    mine, theirs = shown.actual[TOKENS], shown.truth[TOKENS]
    if mine.shape != theirs.shape or mine.ndim != 3 or np.array_equal(mine, theirs):  # only the scores differ
        return ""
    differ = (mine != theirs).any(1)  # [B, L]
    rows = differ.any(1)
    if not rows.any():
        return ""
    first = differ.argmax(1)[rows]
    sentence = f"in {shown.case.name}, {rows.sum()} of {len(rows)} sentences have different tokens"
    each = "each " if first.min() == first.max() and rows.sum() > 1 else ""
    sentence += f", {each}starting at token {first.min() + 1}"
    padded = (shown.case.inputs["source_ids"] == shown.case.config.pad_id).any(1)
    return sentence + _padded_only(rows, padded, "source")


def wrong_sentences(shown: Differing) -> str:
    """If only padded sentences have wrong outputs, report the number of these sentences."""
    output = shown.actual.get("output")
    if shown.case.stage != ACTIVATIONS or output is None or output.shape != shown.truth["output"].shape:
        return ""
    errors = np.abs(output - shown.truth["output"]).max((1, 2)) / np.abs(shown.truth["output"]).max()
    rows = ~(errors <= POLICY["float64"]["tap"])
    for side in ("source", "target"):
        padded = (shown.case.inputs[f"{side}_ids"] == shown.case.config.pad_id).any(1)
        if said := _padded_only(rows, padded, side):
            return f"{rows.sum()} of {len(rows)} sentences differ{said}"
    return ""


PATTERNS: tuple[Callable[[Differing], str], ...] = (
    rounded_losses,
    only_the_loss,
    targets,
    labels_of_padding,
    zero_gradients,
    transformed_gradients,
    wrong_parameters,
    right_loss,
    as_small_as_rounding,
    right_losses,
    rounded_weights,
    moved_weights,
    first_wrong_step,
    only_between_steps,
    first_wrong_token,
    wrong_sentences,
)


def patterns(shown: Differing) -> list[str]:
    """Return a sentence for each pattern found in a case with wrong tensors."""
    return [said for pattern in PATTERNS if (said := pattern(shown))]


def among_cases(findings: Sequence[Finding], case: Case, others: Sequence[tuple[Case, Arrays | None]]) -> Iterator[str]:
    """Yield sentences that compare the differing cases of a stage with its agreeing cases."""
    differ = {f.case for f in findings if f.verdict == DIVERGES and f.dtype == "float64"}
    agree = sorted({f.case for f in findings if f.verdict == AGREES} - differ)
    if not agree:
        return
    cases = {case.name: case, **{other.name: other for other, _ in others}}
    if said := circumstances(*([cases[name] for name in sorted(names) if name in cases] for names in (differ, agree))):
        yield said
    elif case.stage != ACTIVATIONS:
        yield f"cases that differ: {listed(sorted(differ))}; cases that agree: {listed(agree)}"
    for name in agree:
        if name in cases and case.stage == ACTIVATIONS and _shapes(cases[name]) == _shapes(case):
            yield f"{name} has the same shapes and agrees"
            return
    if case.stage == DECODE and case.options.beam_size is not None:
        known = [other for other, _ in others if other.name in agree]
        if len(known) == len(agree) and all(other.options.beam_size is None for other in known):
            yield "only cases with beam search differ, and cases with greedy search agree"


def _shapes(case: Case) -> list[tuple[int, ...]]:
    return [ids.shape for ids in case.inputs.values()]


def _parameters(shown: Differing) -> list[str]:
    """Return the parameter gradients that are wrong but have the correct shape, in the order of the backward pass."""
    names = [name for name in shown.wrong if name.startswith("of ") and name in shown.actual]
    return [name for name in names if shown.actual[name].shape == shown.truth[name].shape]


def _padded_only(rows: ndarray, padded: ndarray, side: str) -> str:
    """Return a phrase about padding if all wrong sentences are padded, or an empty string otherwise."""
    if not rows.any() or padded.all() or not padded[rows].all():
        return ""
    every = "exactly those" if np.array_equal(rows, padded) else "all of them"
    return f", {every} with padding in the {side}"


def _is_transposed(actual: ndarray, truth: ndarray) -> bool:
    is_square = actual.ndim == 2 and actual.shape == truth.shape[::-1]
    return is_square and bool(np.linalg.norm(actual - truth.T) <= SAME * np.linalg.norm(truth))
