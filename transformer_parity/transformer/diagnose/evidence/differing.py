"""Determine which tensors of a case differ from the reference, and describe groups of these tensors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
from numpy import ndarray

from transformer_parity.engine.comparison import Arrays
from transformer_parity.engine.findings import DIVERGES, Finding
from transformer_parity.engine.signatures import SAME, written
from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.diagnose.evidence.closeness import best_factor, factor_in_words
from transformer_parity.transformer.stages.training_stage import WHOLE, is_noise

PROJECTIONS = ("query", "key", "value", "gate", "inner", "output")
KINDS = {  # maps a kind of parameter to a pattern for the end of a parameter's name
    "parameters": "",
    "biases and norms (all 1-D parameters)": r"\.(bias|scale)",
    "biases": r"\.bias",
    "scales of norms": r"\.scale",
    "kernels": r"\.kernel",
    "embedding matrices": r"\.table",
    **{f"kernels of {kind} projections": rf"\.{kind}_proj\.kernel" for kind in PROJECTIONS},
    **{f"{kind} projections": rf"\.{kind}_proj\.\w+" for kind in PROJECTIONS},
}
PLACES = {  # maps a part of the model to a pattern for the start of a parameter's name
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
    """The tensors of a case, and the names of the tensors that differ from the reference.

    Attributes:
        case: The case.
        wrong: Names of the tensors that differ from the reference and have the correct shape, in the order of
            computation.
        actual: The port's tensors.
        truth: The reference's tensors.
    """

    case: Case
    wrong: tuple[str, ...]
    actual: Arrays
    truth: Arrays

    @classmethod
    def of(cls, case: Case, findings: Sequence[Finding], actual: Arrays, truth: Arrays) -> Differing:
        """Return the tensors of a case.

        The findings about the case show which tensors differ from the reference.
        """
        differs = {f.tap for f in findings if f.case == case.name and f.verdict == DIVERGES}
        comparable = [name for name in truth if name in actual and np.shape(actual[name]) == np.shape(truth[name])]
        return cls(case, tuple(name for name in comparable if name in differs and name != WHOLE), actual, truth)

    @cached_property
    def right(self) -> list[str]:
        """Names of the tensors that agree with the reference."""
        names = [name for name in self.truth if name in self.actual and name not in self.wrong and name != WHOLE]
        return [name for name in names if name not in self.misshapen]

    @cached_property
    def misshapen(self) -> list[str]:
        """Names of the tensors whose shape is wrong."""
        names = [name for name in self.truth if name in self.actual]
        return [name for name in names if np.shape(self.actual[name]) != np.shape(self.truth[name])]

    def group(self, names: Sequence[str], prefix: str) -> str:
        """Return a description of the parameters with the given tensor names, which all start with ``prefix``."""
        every = [name for name in (*self.wrong, *self.right) if name.startswith(prefix)]
        return described([name.removeprefix(prefix) for name in names], [name.removeprefix(prefix) for name in every])


def described(names: Sequence[str], every: Sequence[str]) -> str:
    """Return a description that matches all parameters in ``names`` but no other parameters in ``every``.

    If there is no such description, return the first three names and the number of remaining names.
    """
    some, rest = ({name for name in several if not is_noise(name)} for several in (names, every))
    layers = sorted({found[0] for name in rest if (found := re.match(r"(encoder|decoder)\.layers\.\d+\.", name))})
    places = {**PLACES, **{f" of {layer.rstrip('.')}": re.escape(layer) for layer in layers}}
    for (place, start), (kind, end) in product(places.items(), KINDS.items()):
        fits = {name for name in rest if re.match(start, name) and re.search(f"{end}$", name)}
        if len(some) > 1 and fits == some:
            return f"all {kind}{place}"
        if len(rest - some) > 1 and rest - fits == some:
            return f"all parameters except {kind}{place}"
    if len(some) > 1 and len(rest - some) == 1:
        return f"all parameters except {next(iter(rest - some))}"
    return listed(sorted(some, key=list(names).index))


def listed(names: Sequence[str]) -> str:
    """Return a string with the first three names and the number of remaining names."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def differ(names: Sequence[str]) -> str:
    """Return "differs" for a single name, and "differ" for multiple names."""
    return "differs" if len(names) == 1 else "differ"


def factor_between(actual: ndarray, truth: ndarray, same: float = SAME) -> float:
    """Return the ratio of ``actual`` to ``truth``, or NaN if ``actual`` is not a multiple of ``truth``."""
    factor = best_factor(actual, truth)
    # The factor is valid only if multiplying by it removes nearly all of the error.
    left = np.linalg.norm(actual - factor * truth)
    return factor if left <= min(same, 0.01 * abs(factor - 1.0)) * np.linalg.norm(truth) else np.nan


def by_factor(
    shown: Differing, factors: dict[str, float], prefix: str, sentence: str, batch: Case | None = None
) -> str:
    """Describe the factors by which the wrong tensors differ from the reference.

    Return "" if there are more than three different factors, or if a factor is NaN.

    Args:
        shown: The tensors of the case.
        factors: For each wrong tensor, the factor by which it differs from the reference.
        prefix: Prefix of the tensors' names. For example, the names of gradients start with ``of``.
        sentence: Format string for a sentence about a group of parameters, with the fields ``group`` and ``factor``.
        batch: The case if a factor can depend on batch sizes, for example because of averaging; otherwise None.
    """
    values = {name: float(written(factor)) for name, factor in factors.items()}
    different = dict.fromkeys(values.values())
    if len(different) > 3 or any(np.isnan(value) for value in different):
        return ""
    groups = [(shown.group([name for name in values if values[name] == value], prefix), value) for value in different]
    return "; ".join(
        sentence.format(group=group, factor=written(value)) + factor_in_words(value, shown.case.config, batch)
        for group, value in groups
    )
