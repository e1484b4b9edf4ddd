"""The translations of one line by several packages, compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain

from numpy import ndarray

import reference_numpy as ref
from transformer_parity.apps.translate.lines import Line, TranslatedLine
from transformer_parity.apps.translate.trained import Trained
from transformer_parity.transformer.decoding.near_ties import Doubt
from transformer_parity.transformer.decoding.prefixes import PrefixScorer

SAME, NEAR_TIE, DIVERGENCE = "same", "near-tie", "divergence"


@dataclass(frozen=True)
class TranslationComparison:
    """The translations of a line by several ports.

    Attributes:
        line: The line.
        said: The best hypothesis, by backend; empty where all are the same, and for a line that is blank or too long.
        doubts: The decisions that differ from those of the reference, by backend; likewise.
    """

    line: Line
    said: Mapping[str, TranslatedLine]
    doubts: Mapping[str, Sequence[Doubt]]

    @property
    def verdict(self) -> str:
        """``SAME``, ``NEAR_TIE`` if rounding explains every difference, or ``DIVERGENCE``."""
        if not self.said:
            return SAME
        doubts = chain.from_iterable(self.doubts.values())
        undoubted = {hypothesis.ids for backend, hypothesis in self.said.items() if not self.doubts[backend]}
        explained = len(undoubted) <= 1 and all(doubt.is_near_tie for doubt in doubts)
        return NEAR_TIE if explained else DIVERGENCE


def scorers(trained: Trained, dtype: str) -> Callable[[ndarray], PrefixScorer]:
    """Return a function from the padded ids of a sentence to its scorer by the float64 reference.

    Args:
        trained: The model.
        dtype: That of the ports: the rounding noise is measured on the reference in this dtype.
    """

    @cache
    def reference(dtype: str) -> ref.Transformer:
        return ref.Transformer.from_weights(trained.config, trained.weights, dtype, fast=False)

    def scorer(source_ids: ndarray) -> PrefixScorer:
        rounded = None if dtype == "float64" else reference(dtype)
        return PrefixScorer(reference("float64"), rounded, source_ids)

    return scorer
