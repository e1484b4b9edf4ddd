"""Comparison of how multiple backends translate a line."""

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
    """The comparison of how multiple backends translate a line.

    Attributes:
        line: Line that was translated.
        said: Dict from backend names to the best hypotheses. Empty if all translations are identical or if the line is
            blank or too long.
        doubts: Dict from backend names to the search decisions that differ from the reference's decisions. Empty if
            ``said`` is empty.
    """

    line: Line
    said: Mapping[str, TranslatedLine]
    doubts: Mapping[str, Sequence[Doubt]]

    @property
    def verdict(self) -> str:
        """``SAME`` if there are no differences, ``NEAR_TIE`` if rounding explains all of them, or ``DIVERGENCE``."""
        if not self.said:
            return SAME
        doubts = chain.from_iterable(self.doubts.values())
        undoubted = {hypothesis.ids for backend, hypothesis in self.said.items() if not self.doubts[backend]}
        explained = len(undoubted) <= 1 and all(doubt.is_near_tie for doubt in doubts)
        return NEAR_TIE if explained else DIVERGENCE


def scorers(trained: Trained, dtype: str) -> Callable[[ndarray], PrefixScorer]:
    """Return a function that creates a float64 reference scorer for a sentence, given the sentence's padded IDs.

    Args:
        trained: Model to score with.
        dtype: Dtype of the ports. The reference's rounding error is measured in this dtype.
    """

    @cache
    def reference(dtype: str) -> ref.Transformer:
        return ref.Transformer.from_weights(trained.config, trained.weights, dtype, fast=False)

    def scorer(source_ids: ndarray) -> PrefixScorer:
        rounded = None if dtype == "float64" else reference(dtype)
        return PrefixScorer(reference("float64"), rounded, source_ids)

    return scorer
