"""Learn subwords from text, and use them as the vocabulary of a model."""

from __future__ import annotations

import io
from collections.abc import Iterable

import sentencepiece

from transformer_parity.transformer.sentences.engines import read_model
from transformer_parity.transformer.sentences.vocabulary import Vocabulary
from transformer_spec.checks import check_choice
from transformer_spec.config import TransformerConfig

VOCAB_SIZE = 1000
UNLIMITED = 0x110000  # the number of Unicode code points
SPECIAL = 3  # number of token IDs that a model may reserve: padding, BOS, and EOS


class Subwords:
    """Joint sentencepiece subwords of two languages, without special tokens.

    Args:
        model: A serialized sentencepiece model.

    Attributes:
        model: The serialized model, which is stored with weights trained on these subwords.
        size: The number of subwords, including the unknown subword.

    Raises:
        ValueError: If the bytes are not a sentencepiece model.
    """

    def __init__(self, model: bytes) -> None:
        self.processor = read_model(model)
        self.model = model
        self.size: int = self.processor.get_piece_size()

    @classmethod
    def train(cls, lines: Iterable[str], size: int = VOCAB_SIZE, kind: str = "unigram") -> Subwords:
        """Learn at most ``size`` subwords from lines of text; fewer if the text is small.

        Args:
            lines: The lines of the text.
            size: The maximum number of subwords.
            kind: ``unigram``, or ``char`` to use individual characters as subwords.

        Raises:
            ValueError: If the size is too small to include every character of the text.
        """
        check_choice("kind", kind, ("unigram", "char"))
        if size < 2:
            raise ValueError(f"a subword vocabulary must have at least 2 entries: got {size}")
        if size > UNLIMITED:
            raise ValueError(f"a subword vocabulary must have at most {UNLIMITED:,} entries: got {size:,}")
        model = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(lines),
                model_writer=model,
                model_type=kind,
                vocab_size=size if kind == "unigram" else UNLIMITED,  # a limit would drop rare characters
                add_dummy_prefix=kind == "unigram",  # words at the start of a line get the same pieces as elsewhere
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
        """Split a line into subwords."""
        return self.processor.encode(line, out_type=str)

    def numbered(self, config: TransformerConfig) -> JointVocabulary:
        """Return a vocabulary that numbers these subwords from 0 and skips the special IDs of a config.

        Raises:
            ValueError: If the vocabulary size of the model is too small.
        """
        return JointVocabulary(self, config)


class JointVocabulary(Vocabulary):
    """The vocabulary that `parity train` uses: subwords with token IDs that source and target share.

    Args:
        subwords: The subwords.
        config: The config of the model. Its special IDs are not assigned to subwords.

    Raises:
        ValueError: If the vocabulary size of the model is too small.
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
            raise ValueError(
                f"{subwords.size} subwords and {len(self._special)} special tokens require source_vocab_size and "
                f"target_vocab_size to be at least {needed}: got {available}"
            )
        self._ids = free[: subwords.size]
        self.sizes = (available, available)
        self._pieces = {token: piece for piece, token in enumerate(self._ids)}

    def ids(self, line: str) -> list[int]:
        """Return the token IDs of a line, followed by ``eos_id``."""
        return [*(self._ids[piece] for piece in self.subwords.processor.encode(line)), self._eos_id]

    def target_ids(self, line: str) -> list[int]:
        """Return the same token IDs as ``ids``, because source and target share the subwords."""
        return self.ids(line)

    def text(self, ids: Iterable[int]) -> str:
        """Return the text of the tokens before the first ``eos_id``, ignoring padding and ``bos_id``.

        A model may generate an ID without a subword, which is decoded as the unknown subword.
        """
        tokens = [int(token) for token in ids]
        if tokens[:1] == [self._bos_id]:  # must be checked first, because bos_id may equal eos_id
            tokens = tokens[1:]
        if self._eos_id in tokens:
            tokens = tokens[: tokens.index(self._eos_id)]
        silent = (self._pad_id, self._bos_id)
        unknown = self.subwords.processor.unk_id()
        pieces = [self._pieces.get(token, unknown) for token in tokens if token not in silent]
        return self.subwords.processor.decode(pieces)

    def pieces(self, line: str, *, source: bool = True) -> list[str]:
        """Return the tokens of a line. Unknown subwords appear as their text."""
        return [*self.subwords.pieces(line), "</s>"]

    def names(self, ids: Iterable[int], *, source: bool = False) -> list[str]:
        """Return the token for each ID: a subword, or ``</s>``, ``<s>``, or ``<pad>`` for special IDs of the config."""
        processor = self.subwords.processor
        unknown = processor.unk_id()
        return [self._special.get(token) or processor.id_to_piece(self._pieces.get(token, unknown)) for token in ids]

    def table(self) -> dict[str, int]:
        """Return a dict from subwords to IDs. It includes the padding and EOS tokens under Marian's names."""
        processor = self.subwords.processor
        subwords = {processor.id_to_piece(piece): token for token, piece in self._pieces.items()}
        return {**subwords, "<pad>": self._pad_id, "</s>": self._eos_id}
