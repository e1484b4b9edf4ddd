"""Patterns: which tensors of a case differ, how, and from which step on, where other tensors are right.

Each function states one pattern in a sentence, or returns an empty string. A pattern is read off the comparison and the
two sets of tensors; it names a cause only if nothing else leaves it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
from numpy import ndarray

from transformer_parity.engine.comparison import Arrays
from transformer_parity.engine.findings import AGREES, DIVERGES, Finding
from transformer_parity.transformer.cases.case import ACTIVATIONS, DECODE, GRADIENTS, STEPS, Case
from transformer_parity.transformer.diagnose.evidence.circumstances import circumstances
from transformer_parity.transformer.diagnose.evidence.closeness import SAME, best_factor
from transformer_parity.transformer.diagnose.evidence.factors import factor_in_words
from transformer_parity.transformer.diagnose.evidence.stale import stale_weights
from transformer_parity.transformer.stages.decode import TOKENS
from transformer_parity.transformer.stages.steps import SNAPSHOTS
from transformer_parity.transformer.stages.training_stage import LOSS, WHOLE, is_noise

PROJECTIONS = ("query", "key", "value", "inner", "output")
KINDS = {  # the end of a parameter's name, in words
    "parameters": "",
    "biases and norms (all 1-D parameters)": r"\.(bias|scale)",
    "biases": r"\.bias",
    "scales of norms": r"\.scale",
    "kernels": r"\.kernel",
    "embedding matrices": r"\.table",
    **{f"kernels of {kind} projections": rf"\.{kind}_proj\.kernel" for kind in PROJECTIONS},
    **{f"{kind} projections": rf"\.{kind}_proj\.\w+" for kind in PROJECTIONS},
}
PLACES = {  # the beginning of a parameter's name, in words
    "": "",
    " of the encoder": r"encoder\.",
    " of the decoder": r"decoder\.",
    " of self-attention": r".*\.self_attention\.",
    " of cross-attention": r".*\.cross_attention\.",
    " of attention": r".*_attention\.",
    " of feed-forward networks": r".*\.feed_forward\.",
    " of norms": r".*_norm\.",
}


@dataclass(frozen=True)
class Differing:
    """A case that differs.

    Attributes:
        case: The case.
        wrong: The names of the tensors that differ and have the right shape, in the order of computation.
        actual: The tensors of the port.
        truth: The tensors of the reference.
    """

    case: Case
    wrong: tuple[str, ...]
    actual: Arrays
    truth: Arrays

    @classmethod
    def of(cls, case: Case, findings: Sequence[Finding], actual: Arrays, truth: Arrays) -> Differing:
        """Return a case with the names of the tensors that differ according to the findings of its stage."""
        differs = {f.tap for f in findings if f.case == case.name and f.verdict == DIVERGES}
        comparable = [name for name in truth if name in actual and np.shape(actual[name]) == np.shape(truth[name])]
        return cls(case, tuple(name for name in comparable if name in differs and name != WHOLE), actual, truth)

    @cached_property
    def right(self) -> list[str]:
        """The names of the tensors that agree."""
        return [name for name in self.truth if name in self.actual and name not in self.wrong and name != WHOLE]

    def group(self, names: Sequence[str], prefix: str) -> str:
        """Describe parameters among all that are compared, where their tensors have a prefix in their names."""
        every = [name for name in (*self.wrong, *self.right) if name.startswith(prefix)]
        return described([name.removeprefix(prefix) for name in names], [name.removeprefix(prefix) for name in every])


def described(names: Sequence[str], every: Sequence[str]) -> str:
    """Describe parameters in words that fit them and no others of ``every``, or else list the first ones."""
    some, rest = ({name for name in several if not is_noise(name)} for several in (names, every))
    layers = sorted({found[0] for name in rest if (found := re.match(r"(encoder|decoder)\.layers\.\d+\.", name))})
    places = {**PLACES, **{f" of {layer.rstrip('.')}": re.escape(layer) for layer in layers}}
    for (place, start), (kind, end) in product(places.items(), KINDS.items()):
        fits = {name for name in rest if re.match(start, name) and re.search(f"{end}$", name)}
        if len(some) > 1 and fits == some:
            return f"all {kind}{place}"
        if len(rest - some) > 1 and rest - fits == some:
            return f"all parameters but {kind}{place}"
    if len(some) > 1 and len(rest - some) == 1:
        return f"all parameters but {next(iter(rest - some))}"
    return _listed(sorted(some, key=list(names).index))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def not_finite(shown: Differing) -> str:
    """Find the first tensor with NaN or infinite values."""
    for name in shown.actual:
        value = np.asarray(shown.actual[name])
        if value.dtype.kind == "f" and name in shown.wrong and not np.isfinite(value).all():
            bad = ~np.isfinite(value)
            first = np.argwhere(bad)[0].tolist()
            kind = "NaN" if np.isnan(value).any() else "infinite"
            where = f", the first at index {first}" if value.ndim else ""
            tensor = f"the gradient {name}" if name.startswith(("of ", "at ")) else name
            return f"{tensor} has {int(bad.sum())} {kind} values of {bad.size}{where}: look for it before anything else"
    return ""


def rounded_losses(shown: Differing) -> str:
    """Find losses that are numbers of float32, which no loss of float64 is by chance."""
    losses = [name for name in shown.wrong if name.endswith(LOSS)]
    if not losses or any(float(np.float32(shown.actual[name])) != float(shown.actual[name]) for name in losses):
        return ""
    if any(float(np.float16(shown.actual[name])) == float(shown.actual[name]) for name in losses):  # such as zero
        return ""
    which = "the loss is a number" if len(losses) == 1 else f"all {len(losses)} losses that differ are numbers"
    return f"{which} of float32: compute losses in the dtype of the model"


def only_the_loss(shown: Differing) -> str:
    """Find a wrong loss next to right gradients."""
    if shown.case.stage == GRADIENTS and shown.wrong == (LOSS,):
        ratio = float(shown.actual[LOSS] / shown.truth[LOSS])
        known = factor_in_words(ratio, shown.case.config, shown.case)
        return (
            f"only the loss differs ({ratio:.12g} times the right one{known}): all {len(shown.right)} gradients agree"
        )
    return ""


def right_loss(shown: Differing) -> str:
    """Say that the loss is right although gradients differ."""
    if shown.case.stage == GRADIENTS and shown.wrong and LOSS in shown.right:
        return "the loss is right: only gradients differ"
    return ""


def zero_gradients(shown: Differing) -> str:
    """Find gradients that are exactly zero."""
    zero = [name for name in _parameters(shown) if not shown.actual[name].any() and shown.truth[name].any()]
    if not zero:
        return ""
    group = shown.group(zero, "of ")
    return f"the gradient of {group} is exactly zero: the backward pass stops, for example at a detached tensor"


def transformed_gradients(shown: Differing) -> str:
    """Find wrong gradients that are all a multiple, or the transpose, of the right ones."""
    names = _parameters(shown)
    if not names:
        return ""
    if all(_is_transposed(shown.actual[name], shown.truth[name]) for name in names):
        return f"the gradient of {shown.group(names, 'of ')} is the transpose of the right one"
    factors = {name: _factor(shown.actual[name], shown.truth[name]) for name in names}
    return _by_factor(shown, factors, "of ", "the gradient of {group} is {factor:.6g} times the right one")


def wrong_parameters(shown: Differing) -> str:
    """Say which gradients differ, and with post-norm also which of them the backward pass computes first."""
    names = [name for name in _parameters(shown) if not is_noise(name)]
    agree = [name for name in shown.right if name.startswith("of ") and not is_noise(name)]
    if not names or not agree:
        return ""
    sentence = f"the gradients of {shown.group(names, 'of ')} differ, and {len(agree)} agree"
    if shown.case.config.norm_order != "post":  # the names are then in another order
        return sentence
    return f"{sentence}; the backward pass computes {names[0].removeprefix('of ')} first of those that differ"


def first_wrong_step(shown: Differing) -> str:
    """Find the step from which on losses differ."""
    wrong = [int(name.split()[1]) for name in shown.wrong if shown.case.stage == STEPS and name.endswith(f" {LOSS}")]
    first, restart = min(wrong, default=0), shown.case.restart
    if first > 1:
        sentence = f"the losses agree up to step {first - 1} and differ from step {first} on"
        if restart and first - restart in (1, 2):
            return f"{sentence}; training starts a second time after step {restart}, with a new optimizer"
        if shown.case.rows:  # then the next batch may be wrong as well
            return (
                f"{sentence}: its batch has a different number of sentences, or the update of step {first - 1} is wrong"
            )
        return f"{sentence}, so the update of step {first - 1} is the first wrong one"
    return "the loss differs before the first update" if first else ""


def only_between_steps(shown: Differing) -> str:
    """Find training that is right while other methods called between two steps are wrong."""
    results = [name for name in shown.wrong if name.endswith((" logits", " gradient between steps", " tokens"))]
    if shown.case.stage != STEPS or not results or len(results) < len(shown.wrong):
        return ""
    cause = stale_weights(shown.case, shown.actual, shown.truth) or (
        "they use weights from before the last update, or the model is still in training mode"
    )
    return f"all losses and weights agree, and only the results of other methods between two steps differ: {cause}"


def moved_weights(shown: Differing) -> str:
    """Compare how far weights have moved, after the first steps whose weights differ."""
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
        factors = {name: _factor(moves[0][name], moves[1][name], 1e-6) for name in names}
        said = _by_factor(
            shown, factors, prefix, f"after step {step}, {{group}} have moved {{factor:.6g}} times as far"
        )
        agree = len([name for name in shown.right if name.startswith(prefix)])
        only = f"after step {step}, {shown.group(names, prefix)} differ, and {agree} agree"
        return said or (only if agree else "")
    return ""


def first_wrong_token(shown: Differing) -> str:
    """Say in which sentences, and from which token on, a search returns different tokens."""
    if shown.case.stage != DECODE or TOKENS not in shown.wrong or TOKENS not in shown.actual:
        return ""
    mine, theirs = shown.actual[TOKENS], shown.truth[TOKENS]
    if mine.shape != theirs.shape or mine.ndim != 3 or np.array_equal(mine, theirs):  # then the steps are wrong
        return ""
    differ = (mine != theirs).any(1)  # [B, L]
    rows = differ.any(1)
    if not rows.any():
        return ""
    first = differ.argmax(1)[rows]
    sentence = f"{rows.sum()} of {len(rows)} sentences have different tokens, from token {first.min() + 1} on"
    if first.min() == first.max() and rows.sum() > 1:
        sentence = f"{rows.sum()} of {len(rows)} sentences have different tokens, each from token {first[0] + 1} on"
    padded = (shown.case.inputs["source_ids"] == shown.case.config.pad_id).any(1)
    return sentence + _padded_only(rows, padded, "source")


def wrong_sentences(shown: Differing) -> str:
    """Say whether exactly the sentences that are padded differ."""
    output = shown.actual.get("output")
    if shown.case.stage != ACTIVATIONS or output is None or output.shape != shown.truth["output"].shape:
        return ""
    scale = np.abs(shown.truth["output"]).max()
    rows = ~(np.abs(output - shown.truth["output"]) <= SAME * scale).all((1, 2))
    for side in ("source", "target"):
        padded = (shown.case.inputs[f"{side}_ids"] == shown.case.config.pad_id).any(1)
        if said := _padded_only(rows, padded, side):
            return f"{rows.sum()} of {len(rows)} sentences differ{said}"
    return ""


PATTERNS: tuple[Callable[[Differing], str], ...] = (
    rounded_losses,
    only_the_loss,
    zero_gradients,
    transformed_gradients,
    wrong_parameters,
    right_loss,
    moved_weights,
    first_wrong_step,
    only_between_steps,
    first_wrong_token,
    wrong_sentences,
)


def patterns(shown: Differing) -> list[str]:
    """Return a sentence for each pattern in a case that differs."""
    return [said for pattern in PATTERNS if (said := pattern(shown))]


def among_cases(findings: Sequence[Finding], case: Case, others: Sequence[tuple[Case, Arrays | None]]) -> Iterator[str]:
    """Yield a sentence about the cases of a stage that agree, if there are any."""
    differ = {f.case for f in findings if f.verdict == DIVERGES and f.dtype == "float64"}
    agree = sorted({f.case for f in findings if f.verdict == AGREES} - differ)
    if not agree:
        return
    cases = {case.name: case, **{other.name: other for other, _ in others}}
    if said := circumstances(*([cases[name] for name in sorted(names) if name in cases] for names in (differ, agree))):
        yield said
    elif case.stage != ACTIVATIONS:
        yield f"these cases differ: {_listed(sorted(differ))}; these agree: {_listed(agree)}"
    for name in agree:
        if name in cases and case.stage == ACTIVATIONS and _shapes(cases[name]) == _shapes(case):
            yield f"{name} has the same shapes and agrees: look for a value that is kept from one call to the next"
            return
    if case.stage == DECODE and case.options.beam_size is not None:
        known = [other for other, _ in others if other.name in agree]
        if len(known) == len(agree) and all(other.options.beam_size is None for other in known):
            yield "only beam search differs: greedy search agrees"


def _shapes(case: Case) -> list[tuple[int, ...]]:
    return [ids.shape for ids in case.inputs.values()]


def _parameters(shown: Differing) -> list[str]:
    """Return the wrong gradients of parameters of the right shape, in the order of the backward pass."""
    names = [name for name in shown.wrong if name.startswith("of ") and name in shown.actual]
    return [name for name in names if shown.actual[name].shape == shown.truth[name].shape]


def _padded_only(rows: ndarray, padded: ndarray, side: str) -> str:
    """Say that all wrong sentences are padded, and that no sentence without padding is wrong."""
    if not rows.any() or padded.all() or not padded[rows].all():
        return ""
    every = "exactly those" if np.array_equal(rows, padded) else "all of them"
    return f", {every} with padding in the {side}"


def _factor(actual: ndarray, truth: ndarray, same: float = SAME) -> float:
    """Return the factor between two tensors; NaN if there is none."""
    factor = best_factor(actual, truth)
    return factor if np.linalg.norm(actual - factor * truth) <= same * np.linalg.norm(truth) else np.nan


def _by_factor(shown: Differing, factors: dict[str, float], prefix: str, sentence: str) -> str:
    """State the factors of all wrong tensors, if there are at most three different ones."""
    values = {name: float(f"{factor:.6g}") for name, factor in factors.items()}
    different = dict.fromkeys(values.values())
    if len(different) > 3 or any(np.isnan(value) for value in different):
        return ""
    groups = [(shown.group([name for name in values if values[name] == value], prefix), value) for value in different]
    return "; ".join(
        sentence.format(group=group, factor=value) + factor_in_words(value, shown.case.config, shown.case)
        for group, value in groups
    )


def _is_transposed(actual: ndarray, truth: ndarray) -> bool:
    is_square = actual.ndim == 2 and actual.shape == truth.shape[::-1]
    return is_square and bool(np.linalg.norm(actual - truth.T) <= SAME * np.linalg.norm(truth))
