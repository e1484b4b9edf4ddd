"""The interface of vocabularies, which convert lines of text to token IDs, and token IDs back to text."""

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

# Maximum number of tokens in a sentence. Processing longer input, such as a file without line breaks, would take hours
# and exhaust the memory.
LONGEST = 4096

# Hugging Face transformers removes the spaces from these strings, one string after another in this order.
TIDIED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")


class Vocabulary(ABC):
    """The vocabulary of a trained model, with the token IDs that the model uses.

    Args:
        files: A dict from file names to the content of the files that define the vocabulary.

    Attributes:
        kind: Name that identifies this kind of vocabulary in weight files. `transformer_parity.apps.text.kinds` builds
            a vocabulary from its kind and files.
        sizes: The required vocabulary sizes of the model, for source and target.
        source_languages: The codes of the source languages; empty if there is only one source language.
        target_languages: The codes of the target languages; empty if there is only one target language.
        needs_direction: Whether ``between`` must select the languages before the vocabulary can be used.
        start_id: The first decoder input for the selected languages. If None, the config's ``bos_id`` is used.
        forced_ids: The token IDs with which every translation into the selected language starts.
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
        """Return the files that define the vocabulary. These files are stored together with the weights."""
        return dict(self._files)

    @abstractmethod
    def ids(self, line: str) -> list[int]:
        """Return the encoder input for a line to translate: its token IDs, including special tokens such as EOS.

        For an empty line, the result contains only these special tokens.
        """

    @abstractmethod
    def target_ids(self, line: str) -> list[int]:
        """Return the token IDs of a translation as the model generates them, from the forced tokens to EOS."""

    @abstractmethod
    def text(self, ids: Iterable[int]) -> str:
        """Return the text of a translation, without special tokens."""

    @abstractmethod
    def names(self, ids: Iterable[int], *, source: bool = False) -> list[str]:
        """Return the token for each ID of a translation or, if ``source`` is True, of a line to translate."""

    def pieces(self, line: str, *, source: bool = True) -> list[str]:
        """Return the tokens of a source or target line. If possible, show unknown tokens as their text."""
        return self.names(self.ids(line) if source else self.target_ids(line), source=source)

    def between(self, source: str | None, target: str | None) -> Self:
        """Return the vocabulary for translations between two languages.

        Args:
            source: One of ``source_languages``, or None if the vocabulary doesn't require a source language.
            target: One of ``target_languages``, or None if the vocabulary doesn't require a target language.

        Raises:
            ValueError: If a code is missing or unknown, or if the vocabulary has no languages to choose from.
        """
        check_code("source", source, self.source_languages, needed=self.needs_direction)
        check_code("target", target, self.target_languages, needed=self.needs_direction)
        return copy.copy(self)


def check_code(side: str, code: str | None, known: Sequence[str], *, needed: bool) -> None:
    """Check the code of a language.

    Args:
        side: ``source`` or ``target``.
        code: The code; None if it isn't specified.
        known: The codes that the vocabulary supports.
        needed: True if the vocabulary requires a language code.

    Raises:
        ValueError: If the code is missing or unknown. The message suggests similar codes.
    """
    if code is None:
        if needed:
            some = ", ".join(known[:4]) + (f" and {len(known) - 4} others" if len(known) > 4 else "")
            raise ValueError(f"this vocabulary requires a {side} language; choose one of {some}")
        return
    if not known:
        raise ValueError(f"this vocabulary does not use {side} language codes: got {code!r}")
    if code not in known:
        raise ValueError(f"this vocabulary has no {side} language {code!r}: {nearest(code, known)}")


def tidied(text: str, settings: Mapping[str, Any]) -> str:
    """Remove the spaces before punctuation, if the settings in ``tokenizer_config.json`` request this cleanup."""
    if settings.get("clean_up_tokenization_spaces") is True:
        for said in TIDIED:
            text = text.replace(said, said.strip())
    return text


def nearest(code: str, known: Sequence[str]) -> str:
    """Return a clause that suggests the known codes that are most similar to the given code."""
    begins, begins_alike = (
        [other for other in known if start and other.lower().startswith(start)]
        for start in (code.lower(), code.lower()[:2])
    )
    alike = list(dict.fromkeys([*begins, *difflib.get_close_matches(code, known, 5, 0.5), *begins_alike]))[:5]
    return f"did you mean {', '.join(alike)}?" if alike else f"the vocabulary supports {', '.join(known[:10])}, ..."


def pick(pairs: Pairs, count: int) -> Pairs:
    """Sort the pairs by length, and return at most ``count`` evenly spaced pairs from the shortest to the longest."""
    ordered = sorted(pairs, key=lambda pair: (len(pair[0]), pair))
    chosen = np.linspace(0, len(ordered) - 1, min(count, len(ordered))).round().astype(int)
    return [ordered[i] for i in chosen]


def batch(pairs: Pairs, vocabulary: Vocabulary, config: TransformerConfig) -> dict[str, ndarray]:
    """Return the padded token IDs of a batch of sentence pairs.

    The decoder input starts with the ``start_id`` of the vocabulary. If the vocabulary has no ``start_id``, the decoder
    input starts with the ``bos_id`` of the config.
    """
    start = config.bos_id if vocabulary.start_id is None else vocabulary.start_id
    return {
        "source_ids": pad([vocabulary.ids(source) for source, _ in pairs], config),
        "target_ids": pad([[start, *vocabulary.target_ids(target)[:-1]] for _, target in pairs], config),
    }


def most_tokens(config: TransformerConfig) -> int:
    """Return the maximum number of tokens in a sentence. The number of learned positions may limit this maximum."""
    return min(config.max_positions or LONGEST, LONGEST)


def pad(sentences: Sequence[Sequence[int]], config: TransformerConfig) -> ndarray:
    """Return a batch of sentences, padded to the length of the longest sentence.

    Args:
        sentences: The token IDs of each sentence.
        config: The config of the model.

    Raises:
        ValueError: If a sentence is longer than ``most_tokens``.
    """
    width = max(map(len, sentences))
    if width > (most := most_tokens(config)):
        raise ValueError(f"a sentence must have at most {most:,} tokens: got {width:,}")
    ids = np.full((len(sentences), width), config.pad_id)
    for row, sentence in enumerate(sentences):
        ids[row, : len(sentence)] = sentence
    return ids
