"""Compare the translations of two packages, line by line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from transformer_parity.compare.near_ties import Doubt
from transformer_parity.translate.lines import Hypothesis, Line

SAME, NEAR_TIE, DIVERGENCE = "same", "near-tie", "divergence"


@dataclass(frozen=True)
class Comparison:
    """What several ports say to a line.

    Attributes:
        line: The line.
        said: The best hypothesis, by backend; empty where all say the same, and for a line that is blank or too long.
        doubts: Each decision that the reference would have taken otherwise, by backend; likewise.
    """

    line: Line
    said: Mapping[str, Hypothesis]
    doubts: Mapping[str, Sequence[Doubt]]

    @property
    def verdict(self) -> str:
        """Whether all say the same, or rounding explains why not, or a port decided as no rounding explains."""
        if not self.said:
            return SAME
        doubts = chain.from_iterable(self.doubts.values())
        undoubted = {hypothesis.ids for backend, hypothesis in self.said.items() if not self.doubts[backend]}
        explained = len(undoubted) <= 1 and all(doubt.is_near_tie for doubt in doubts)
        return NEAR_TIE if explained else DIVERGENCE
