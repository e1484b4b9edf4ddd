"""Real sentences: the parallel text that ships with this project or two line-aligned files, cut into subwords."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np
import sentencepiece
from numpy import ndarray

from reference_numpy.checks import check_choice
from reference_numpy.config import TransformerConfig
from transformer_parity.text.pairs import Pairs

VOCAB_SIZE = 1000
UNLIMITED = 0x110000  # characters in Unicode
LONGEST = 4096  # tokens of a sentence; what is longer, such as a file in one line, would take hours and all memory
SPECIAL = 3  # ids a model may keep for itself: padding, start and end


class Vocabulary:
    """A joint subword vocabulary (sentencepiece), free of any model's special ids.

    Args:
        model: A serialized sentencepiece model.

    Attributes:
        model: The same bytes, to be kept with the weights that were trained on it.
        size: How many subwords there are, the unknown one included.

    Raises:
        ValueError: The bytes are no sentencepiece model.
    """

    def __init__(self, model: bytes) -> None:
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
        except RuntimeError as error:
            raise ValueError(f"not a sentencepiece model: {error}") from error
        self.model = model
        self.size: int = self._processor.get_piece_size()

    @classmethod
    def train(cls, lines: Iterable[str], size: int = VOCAB_SIZE, kind: str = "unigram") -> Vocabulary:
        """Learn at most ``size`` subwords from lines of text; a small text yields fewer.

        Args:
            lines: The text.
            size: The most subwords.
            kind: unigram, or char: every character is a subword, and there is no other.

        Raises:
            ValueError: The size is too small to hold every character of the text.
        """
        check_choice("kind", kind, ("unigram", "char"))
        if size < 2:
            raise ValueError(f"a subword vocabulary needs at least 2 entries: got {size}")
        if size > UNLIMITED:
            raise ValueError(f"a subword vocabulary has at most {UNLIMITED:,} entries: got {size:,}")
        model = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(lines),
                model_writer=model,
                model_type=kind,
                vocab_size=size if kind == "unigram" else UNLIMITED,  # it would leave out rare characters in silence
                add_dummy_prefix=kind == "unigram",  # words at the start of a line and elsewhere look alike
                hard_vocab_limit=False,
                character_coverage=1.0,
                unk_id=0,
                bos_id=-1,
                eos_id=-1,
                pad_id=-1,
                minloglevel=2,
            )
        except RuntimeError as error:
            raise ValueError(f"{size} subwords are too few for this text: {error}") from error
        vocabulary = cls(model.getvalue())
        if vocabulary.size > size:
            raise ValueError(f"{size} subwords are too few for this text: it needs {vocabulary.size}")
        return vocabulary

    def pieces(self, line: str) -> list[str]:
        """Cut a line into subwords."""
        return self._processor.encode(line, out_type=str)

    def ids(self, line: str, config: TransformerConfig, start: bool = False, end: bool = True) -> list[int]:
        """Cut a line into subwords and number them with ids that are not special ids of the config.

        Raises:
            ValueError: The model's vocabulary is too small for this one.
        """
        free = _free_ids(config)
        if self.size > len(free):
            special = len({config.pad_id, config.bos_id, config.eos_id})
            available = min(config.source_vocab_size, config.target_vocab_size)
            raise ValueError(f"{self.size} subwords need a vocabulary of {self.size + special}: got {available}")
        numbered = [free[piece] for piece in self._processor.encode(line)]
        return [config.bos_id] * start + numbered + [config.eos_id] * end

    def text(self, ids: Iterable[int], config: TransformerConfig) -> str:
        """Turn ids back into a line: what stands before the first ``eos_id``, without padding and ``bos_id``.

        An id that stands for no subword, as a model may produce one, reads as an unknown subword.
        """
        pieces = _pieces(config, self.size)
        tokens = [int(token) for token in ids]
        if tokens[:1] == [config.bos_id]:  # first of all, because bos_id may be eos_id
            tokens = tokens[1:]
        if config.eos_id in tokens:
            tokens = tokens[: tokens.index(config.eos_id)]
        silent = (config.pad_id, config.bos_id)
        unknown = self._processor.unk_id()
        return self._processor.decode([pieces.get(token, unknown) for token in tokens if token not in silent])

    def names(self, ids: Iterable[int], config: TransformerConfig) -> list[str]:
        """Spell out each id: a subword, or ``</s>``, ``<s>`` or ``<pad>`` for the special ids of the config."""
        pieces = _pieces(config, self.size)
        special = {config.pad_id: "<pad>", config.bos_id: "<s>", config.eos_id: "</s>"}
        unknown = self._processor.unk_id()
        return [special.get(token) or self._processor.id_to_piece(pieces.get(token, unknown)) for token in ids]


@lru_cache
def _free_ids(config: TransformerConfig) -> tuple[int, ...]:
    """Return the ids, ascending, that source and target have in common and that are not special ids of the config."""
    special = {config.pad_id, config.bos_id, config.eos_id}
    available = min(config.source_vocab_size, config.target_vocab_size)
    return tuple(token for token in range(available) if token not in special)


@lru_cache
def _pieces(config: TransformerConfig, size: int) -> Mapping[int, int]:
    """Return which of so many subwords each id stands for."""
    return {token: piece for piece, token in enumerate(_free_ids(config)[:size])}


def pick(pairs: Pairs, count: int) -> Pairs:
    """Return ``count`` pairs, evenly spread from the shortest to the longest."""
    ordered = sorted(pairs, key=lambda pair: (len(pair[0]), pair))
    chosen = np.linspace(0, len(ordered) - 1, min(count, len(ordered))).round().astype(int)
    return [ordered[i] for i in chosen]


def batch(pairs: Pairs, vocabulary: Vocabulary, config: TransformerConfig) -> dict[str, ndarray]:
    """Return the ids of a batch of sentence pairs, padded: what the decoder reads starts with ``bos_id``."""
    return {
        "source_ids": pad([vocabulary.ids(source, config) for source, _ in pairs], config),
        "target_ids": pad([vocabulary.ids(target, config, start=True, end=False) for _, target in pairs], config),
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
