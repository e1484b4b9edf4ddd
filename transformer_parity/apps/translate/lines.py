"""Lines to translate and their translations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformer_parity.transformer.decoding.prefixes import Tokens


@dataclass(frozen=True)
class Line:
    """A line to translate.

    Attributes:
        number: One-based line number.
        text: Unmodified text of the line.
        ids: IDs of the line's subwords and special tokens.
        most: Maximum number of IDs.
        least: Minimum number of IDs. A line is blank if it has fewer IDs than this number.
    """

    number: int
    text: str
    ids: Sequence[int]
    most: int
    least: int = 2

    @property
    def is_too_long(self) -> bool:
        """Whether the line exceeds the maximum length."""
        return len(self.ids) > self.most

    @property
    def can_be_translated(self) -> bool:
        """Whether the line is neither blank nor too long."""
        # Also check the text, because some vocabularies represent a space as byte pieces.
        is_blank = len(self.ids) < self.least or not self.text.strip()
        return not is_blank and not self.is_too_long


@dataclass(frozen=True)
class TranslatedLine:
    """A translation of a line.

    Attributes:
        text: Translation, as one line.
        score: Log-probability in nats, divided by the length penalty in beam search.
        ids: IDs of the tokens, including ``eos_id`` unless the search reached the maximum length.
        pieces: Text of each token.
    """

    text: str
    score: float
    ids: Tokens
    pieces: Sequence[str]


@dataclass(frozen=True)
class Translation:
    """The hypotheses for a line, best first. There are none if the line is blank or too long."""

    line: Line
    hypotheses: Sequence[TranslatedLine]

    @property
    def text(self) -> str:
        """Text of the best hypothesis, or an empty string."""
        return self.hypotheses[0].text if self.hypotheses else ""
