"""What a vocabulary does: lines of text become the ids of a model, and ids become text."""

from __future__ import annotations

import copy
import difflib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
from numpy import ndarray

from transformer_parity.transformer.sentences.pairs import Pairs
from transformer_spec.config import TransformerConfig

LONGEST = 4096  # tokens of a sentence; what is longer, such as a file in one line, would take hours and all memory

# What transformers replaces, in this order.
TIDIED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")


class Vocabulary(ABC):
    """The vocabulary of a trained model, in the model's own ids.

    Args:
        files: What it is made of, by name.

    Attributes:
        kind: What a weight file calls it; `transformer_parity.apps.text.kinds` builds one from kind and files.
        sizes: How many ids a model must have, for what it reads and for what it writes.
        source_languages: Codes of the languages that it tells apart in what it reads; empty if it reads one.
        target_languages: Likewise in what it writes.
        needs_direction: Whether it numbers no line until ``between`` says of which language.
        start_id: What the decoder starts with in this direction; None is the ``bos_id`` of the config.
        forced_ids: What every translation in this direction starts with.
    """

    kind: ClassVar[str]
    sizes: tuple[int, int]
    source_languages: Sequence[str] = ()
    target_languages: Sequence[str] = ()
    needs_direction: bool = False
    start_id: int | None = None
    forced_ids: tuple[int, ...] = ()

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = dict(files)

    def files(self) -> dict[str, bytes]:
        """Return what it is made of, to travel with the weights."""
        return dict(self._files)

    @abstractmethod
    def ids(self, line: str) -> list[int]:
        """Return the ids of a line to translate, as the encoder reads them: with the end symbol, if the model has it.

        An empty line has the fewest: no more than the symbols that every line has.
        """

    @abstractmethod
    def target_ids(self, line: str) -> list[int]:
        """Return the ids of a translation, as the model writes them: from the forced ones to the end symbol."""

    @abstractmethod
    def text(self, ids: Iterable[int]) -> str:
        """Return the text of a translation, without special symbols."""

    @abstractmethod
    def names(self, ids: Iterable[int], *, source: bool = False) -> list[str]:
        """Spell out each id of a translation, or of a line to translate."""

    def pieces(self, line: str, *, source: bool = True) -> list[str]:
        """Spell out the ids of a line, to translate or translated; if possible, what is unknown as it stands there."""
        return self.names(self.ids(line) if source else self.target_ids(line), source=source)

    def between(self, source: str | None, target: str | None) -> Self:
        """Return the vocabulary for translations from one language into another.

        Args:
            source: A code of ``source_languages``; None where there are none, or none is needed.
            target: Likewise of ``target_languages``.

        Raises:
            ValueError: A code is missing or not known, or there are no languages to choose from.
        """
        check_code("source", source, self.source_languages, needed=self.needs_direction)
        check_code("target", target, self.target_languages, needed=self.needs_direction)
        return copy.copy(self)


def check_code(side: str, code: str | None, known: Sequence[str], *, needed: bool) -> None:
    """Refuse a language that a vocabulary does not have, or none where one is needed.

    Raises:
        ValueError: See above; the message names those that look alike.
    """
    if code is None:
        if needed:
            some = ", ".join(known[:4]) + (f" and {len(known) - 4} others" if len(known) > 4 else "")
            raise ValueError(f"this vocabulary needs a {side} language: one of {some}")
        return
    if not known:
        raise ValueError(f"this vocabulary has no {side} languages to choose from: got {code!r}")
    if code not in known:
        raise ValueError(f"this vocabulary has no {side} language {code!r}: {nearest(code, known)}")


def tidied(text: str, settings: Mapping[str, Any]) -> str:
    """Return a text without the spaces that a ``tokenizer_config.json`` has taken out before punctuation."""
    if settings.get("clean_up_tokenization_spaces") is True:
        for said in TIDIED:
            text = text.replace(said, said.strip())
    return text


def nearest(code: str, known: Sequence[str]) -> str:
    """Return a clause that names the known codes that are most like one."""
    begins, begins_alike = (
        [other for other in known if start and other.lower().startswith(start)]
        for start in (code.lower(), code.lower()[:2])
    )
    alike = list(dict.fromkeys([*begins, *difflib.get_close_matches(code, known, 5, 0.5), *begins_alike]))[:5]
    return f"did you mean {', '.join(alike)}?" if alike else f"it has {', '.join(known[:10])}, ..."


def pick(pairs: Pairs, count: int) -> Pairs:
    """Return ``count`` pairs, evenly spread from the shortest to the longest."""
    ordered = sorted(pairs, key=lambda pair: (len(pair[0]), pair))
    chosen = np.linspace(0, len(ordered) - 1, min(count, len(ordered))).round().astype(int)
    return [ordered[i] for i in chosen]


def batch(pairs: Pairs, vocabulary: Vocabulary, config: TransformerConfig) -> dict[str, ndarray]:
    """Return the ids of a batch of sentence pairs, padded: what the decoder reads starts with ``bos_id``."""
    start = config.bos_id if vocabulary.start_id is None else vocabulary.start_id
    return {
        "source_ids": pad([vocabulary.ids(source) for source, _ in pairs], config),
        "target_ids": pad([[start, *vocabulary.target_ids(target)[:-1]] for _, target in pairs], config),
    }


def most_tokens(config: TransformerConfig) -> int:
    """Return how long a sentence may be: as the model's positions, where it has so few."""
    return min(config.max_positions or LONGEST, LONGEST)


def pad(sentences: Sequence[Sequence[int]], config: TransformerConfig) -> ndarray:
    """Return a batch of numbered sentences, padded to the longest of them.

    Raises:
        ValueError: A sentence is longer than the model's positions, or than any may be.
    """
    width = max(map(len, sentences))
    if width > (most := most_tokens(config)):
        raise ValueError(f"a sentence is {width:,} tokens long, and may have at most {most:,}")
    ids = np.full((len(sentences), width), config.pad_id)
    for row, sentence in enumerate(sentences):
        ids[row, : len(sentence)] = sentence
    return ids
