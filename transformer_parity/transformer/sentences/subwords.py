"""Subwords that are learned from text here, and the vocabulary of a model that was trained on them."""

from __future__ import annotations

import io
from collections.abc import Iterable

import sentencepiece

from transformer_parity.transformer.sentences.engines import read_model
from transformer_parity.transformer.sentences.vocabulary import Vocabulary
from transformer_spec.checks import check_choice
from transformer_spec.config import TransformerConfig

VOCAB_SIZE = 1000
UNLIMITED = 0x110000  # characters in Unicode
SPECIAL = 3  # ids a model may keep for itself: padding, start and end


class Subwords:
    """Joint subwords of two languages (sentencepiece), free of any model's special ids.

    Args:
        model: A serialized sentencepiece model.

    Attributes:
        model: The same bytes, to be kept with the weights that were trained on it.
        size: How many subwords there are, the unknown one included.

    Raises:
        ValueError: The bytes are no sentencepiece model.
    """

    def __init__(self, model: bytes) -> None:
        self.processor = read_model(model)
        self.model = model
        self.size: int = self.processor.get_piece_size()

    @classmethod
    def train(cls, lines: Iterable[str], size: int = VOCAB_SIZE, kind: str = "unigram") -> Subwords:
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
        subwords = cls(model.getvalue())
        if subwords.size > size:
            raise ValueError(f"{size} subwords are too few for this text: it needs {subwords.size}")
        return subwords

    def pieces(self, line: str) -> list[str]:
        """Cut a line into subwords."""
        return self.processor.encode(line, out_type=str)

    def numbered(self, config: TransformerConfig) -> JointVocabulary:
        """Return them as a vocabulary, in ids that are not special ids of a config.

        Raises:
            ValueError: The model's vocabulary is too small for this one.
        """
        return JointVocabulary(self, config)


class JointVocabulary(Vocabulary):
    """What `parity train` trains with: subwords, in ids that source and target have in common.

    Args:
        subwords: What a line is cut into.
        config: That of the model; its special ids stand for no subword.

    Raises:
        ValueError: The model's vocabulary is too small for this one.
    """

    kind = "joint"

    def __init__(self, subwords: Subwords, config: TransformerConfig) -> None:
        super().__init__({"joint.model": subwords.model})
        self.subwords = subwords
        self._special = {config.pad_id: "<pad>", config.bos_id: "<s>", config.eos_id: "</s>"}
        self._pad_id, self._bos_id, self._eos_id = config.pad_id, config.bos_id, config.eos_id
        available = min(config.source_vocab_size, config.target_vocab_size)
        free = [token for token in range(available) if token not in self._special]  # ascending
        if subwords.size > len(free):
            needed = subwords.size + len(self._special)
            raise ValueError(f"{subwords.size} subwords need a vocabulary of {needed}: got {available}")
        self._ids = free[: subwords.size]
        self.sizes = (available, available)
        self._pieces = {token: piece for piece, token in enumerate(self._ids)}

    def ids(self, line: str) -> list[int]:
        """Cut a line into subwords and number them; ``eos_id`` ends them."""
        return [*(self._ids[piece] for piece in self.subwords.processor.encode(line)), self._eos_id]

    def target_ids(self, line: str) -> list[int]:
        """Return what ``ids`` returns: the subwords are joint."""
        return self.ids(line)

    def text(self, ids: Iterable[int]) -> str:
        """Turn ids back into a line: what stands before the first ``eos_id``, without padding and ``bos_id``.

        An id that stands for no subword, as a model may produce one, reads as an unknown subword.
        """
        tokens = [int(token) for token in ids]
        if tokens[:1] == [self._bos_id]:  # first of all, because bos_id may be eos_id
            tokens = tokens[1:]
        if self._eos_id in tokens:
            tokens = tokens[: tokens.index(self._eos_id)]
        silent = (self._pad_id, self._bos_id)
        unknown = self.subwords.processor.unk_id()
        pieces = [self._pieces.get(token, unknown) for token in tokens if token not in silent]
        return self.subwords.processor.decode(pieces)

    def pieces(self, line: str, *, source: bool = True) -> list[str]:
        """Spell out the ids of a line, what is unknown as it stands there."""
        return [*self.subwords.pieces(line), "</s>"]

    def names(self, ids: Iterable[int], *, source: bool = False) -> list[str]:
        """Spell out each id: a subword, or ``</s>``, ``<s>`` or ``<pad>`` for the special ids of the config."""
        processor = self.subwords.processor
        unknown = processor.unk_id()
        return [self._special.get(token) or processor.id_to_piece(self._pieces.get(token, unknown)) for token in ids]

    def table(self) -> dict[str, int]:
        """Return the id of each subword, and of padding and end symbol under the names that Marian has for them."""
        processor = self.subwords.processor
        subwords = {processor.id_to_piece(piece): token for token, piece in self._pieces.items()}
        return {**subwords, "<pad>": self._pad_id, "</s>": self._eos_id}
