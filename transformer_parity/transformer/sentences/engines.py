"""What cuts a line into pieces and numbers them: sentencepiece with a table of ids, or a file of `tokenizers`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import sentencepiece

from transformer_parity.engine.system.errors import UsageError

UNKNOWN = "<unk>"
MOST_GROWTH = 64  # of a text, by replacements
MOST_SYMBOLS = 1000  # around a line
SPACE = "▁"  # what sentencepiece writes for a space


class Engine(Protocol):
    """A line as ids without the symbols that begin and end it, and back."""

    size: int  # the largest id, and one more

    def ids(self, line: str) -> list[int]:
        """Return the ids of a line."""

    def text(self, ids: Iterable[int]) -> str:
        """Return the text of ids, without special ones."""

    def name(self, token: int) -> str:
        """Spell out an id."""

    def find(self, piece: str) -> int | None:
        """Return the id of a piece; None if there is none."""


def read_model(model: bytes, name: str = "") -> sentencepiece.SentencePieceProcessor:
    """Return what cuts text by a serialized sentencepiece model.

    Raises:
        ValueError: The bytes are no such model.
    """
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model)
    except RuntimeError as error:
        raise ValueError(f"{name}{' is ' * bool(name)}not a sentencepiece model: {error}") from error
    return processor


class Pieces:
    """Pieces of sentencepiece, in ids of another table.

    Args:
        processor: What cuts a line, or None: then spaces do.
        ids: The id of each piece.
        special: Pieces that are symbols where they stand in a line, and are left out of a text; each with whether it
            takes the spaces before it along.
    """

    def __init__(
        self,
        processor: sentencepiece.SentencePieceProcessor | None,
        ids: Mapping[str, int],
        special: Mapping[str, bool],
    ) -> None:
        self._processor = processor
        self._ids = dict(ids)
        self._names = {token: piece for piece, token in ids.items()}
        self._special = {piece: takes_spaces for piece, takes_spaces in special.items() if piece in ids}
        self._silent = {ids[piece] for piece in self._special}
        # The longest first: one special piece may begin another.
        alternatives = "|".join(map(re.escape, sorted(self._special, key=len, reverse=True)))
        self._split = re.compile(f"({alternatives})" if alternatives else r"(?!)()")
        self._unknown = ids[UNKNOWN]
        self.size = max(ids.values()) + 1

    def ids(self, line: str) -> list[int]:
        """Return the ids of a line; special pieces in it stand for themselves."""
        parts = self._split.split(line)  # text, special, text, special, ...
        found: list[int] = []
        for text, special in zip(parts[::2], [*parts[1::2], None], strict=True):
            if special is not None and self._special[special]:
                text = text.rstrip()
            if text:
                found += [self._ids.get(piece, self._unknown) for piece in self.cut(text)]
            if special is not None:
                found.append(self._ids[special])
        return found

    def cut(self, text: str) -> Sequence[str]:
        """Return the pieces of a text that holds no special one."""
        return text.split() if self._processor is None else self._processor.encode(text, out_type=str)

    def text(self, ids: Iterable[int]) -> str:
        """Return the text of ids, without special ones."""
        pieces = [self.name(token) for token in map(int, ids) if token not in self._silent]
        if self._processor is None:
            return " ".join(pieces)
        return self._processor.decode_pieces(pieces).replace(SPACE, " ").strip()

    def name(self, token: int) -> str:
        """Spell out an id."""
        return self._names.get(int(token), UNKNOWN)

    def find(self, piece: str) -> int | None:
        """Return the id of a piece; None if there is none."""
        return self._ids.get(piece)


class TokenizerFile:
    """A ``tokenizer.json``.

    Args:
        content: What the file holds.

    Raises:
        UsageError: `tokenizers` is not installed.
        ValueError: It is not such a file.
    """

    def __init__(self, content: bytes | str) -> None:
        tokenizers = import_extra("tokenizers")
        content = content if isinstance(content, bytes) else content.encode()
        if (symbols := content.count(b'"type_id"')) > MOST_SYMBOLS:
            raise ValueError(f"tokenizer.json must put at most {MOST_SYMBOLS:,} symbols around a line: got {symbols:,}")
        with rust_errors("tokenizer.json"):
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
            self._check_growth()
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.size: int = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def _check_growth(self) -> None:
        """Refuse a chain of replacements each of which lengthens a text: it could fill any memory."""
        growth = 1.0
        for part in ("normalizer", "pre_tokenizer", "decoder"):
            if (component := getattr(self._tokenizer, part)) is not None:
                growth *= _growth(json.loads(component.__getstate__()))
        if growth > MOST_GROWTH:
            raise ValueError(f"its replacements must make a text at most {MOST_GROWTH} times as long: got {growth:.3g}")

    def ids(self, line: str) -> list[int]:
        """Return the ids of a line, without what its own template puts around them."""
        with rust_errors("tokenizer.json"):
            return self._tokenizer.encode(line, add_special_tokens=False).ids

    def framed(self, line: str) -> list[int]:
        """Return the ids of a line, with what its own template puts around them."""
        with rust_errors("tokenizer.json"):
            return self._tokenizer.encode(line).ids

    def text(self, ids: Iterable[int]) -> str:
        """Return the text of ids, without special ones."""
        with rust_errors("tokenizer.json"):
            return self._tokenizer.decode([token for token in map(int, ids) if 0 <= token < self.size])

    def name(self, token: int) -> str:
        """Spell out an id."""
        return self._tokenizer.id_to_token(int(token)) or UNKNOWN

    def find(self, piece: str) -> int | None:
        """Return the id of a piece; None if there is none."""
        return self._tokenizer.token_to_id(piece)

    def special(self) -> list[str]:
        """Return the pieces that are symbols, by ascending id."""
        added = self._tokenizer.get_added_tokens_decoder()
        return [str(added[token].content) for token in sorted(added) if added[token].special]


def _growth(step: Any) -> float:
    """Return how many times as long a text becomes at most by a step of a tokenizer and by those inside it."""
    if isinstance(step, list):
        return math.prod(map(_growth, step))
    if not isinstance(step, dict):
        return 1.0
    if step.get("type") == "Replace":
        shortest = len(step["pattern"].get("String", "")) or 1  # of a regular expression: one character
        return max(1.0, float(len(step["content"])) / shortest)
    return math.prod(map(_growth, step.values()))


@contextmanager
def rust_errors(name: str) -> Iterator[None]:
    """Turn whatever `tokenizers` raises about a file into a ValueError: its panics are no Exception.

    Raises:
        ValueError: See above.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ValueError(f"{name} cannot be used: {error}") from error


def import_extra(name: str) -> Any:
    """Import a package that only some vocabularies need.

    Raises:
        UsageError: It is not installed.
    """
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"this vocabulary needs {name}: pip install 'transformer-parity[import]'") from error
