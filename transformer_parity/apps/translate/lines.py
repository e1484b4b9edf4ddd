"""A line to translate, and its translations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformer_parity.transformer.decoding.prefixes import Tokens


@dataclass(frozen=True)
class Line:
    """A line to translate.

    Attributes:
        number: Counted from 1.
        text: The text, as read.
        ids: Its subwords, and the symbols that every line has.
        most: How many ids it may have.
        least: How many it has unless it is blank.
    """

    number: int
    text: str
    ids: Sequence[int]
    most: int
    least: int = 2

    @property
    def is_too_long(self) -> bool:
        """Whether it is longer than what can be translated."""
        return len(self.ids) > self.most

    @property
    def can_be_translated(self) -> bool:
        """Whether it holds anything, and not too much."""
        is_blank = (
            len(self.ids) < self.least or not self.text.strip()
        )  # bytes of a space are pieces to some vocabularies
        return not is_blank and not self.is_too_long


@dataclass(frozen=True)
class TranslatedLine:
    """A translation of a line.

    Attributes:
        text: One line.
        score: The log-probability in nats; in beam search, over the length penalty.
        ids: The tokens, ``eos_id`` included unless the maximum length came first.
        pieces: The same, spelled out.
    """

    text: str
    score: float
    ids: Tokens
    pieces: Sequence[str]


@dataclass(frozen=True)
class Translation:
    """What was found for a line, best first: nothing for a line that is blank or too long."""

    line: Line
    hypotheses: Sequence[TranslatedLine]

    @property
    def text(self) -> str:
        """The best hypothesis, or an empty line."""
        return self.hypotheses[0].text if self.hypotheses else ""
