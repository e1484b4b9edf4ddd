"""Tokenizers that convert a line to token IDs and back, based on sentencepiece or `tokenizers`."""

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
MOST_GROWTH = 64  # maximum factor by which replacements may lengthen a text
MOST_SYMBOLS = 1000  # maximum number of special tokens around a line
SPACE = "▁"  # the character that represents a space in sentencepiece


class Engine(Protocol):
    """A tokenizer that converts a line to token IDs, without BOS and EOS tokens, and back."""

    size: int  # the largest ID plus one

    def ids(self, line: str) -> list[int]:
        """Return the token IDs of a line."""

    def text(self, ids: Iterable[int]) -> str:
        """Return the text of token IDs, without special tokens."""

    def name(self, token: int) -> str:
        """Return the token that has the given ID."""

    def find(self, piece: str) -> int | None:
        """Return the ID of a token, or None if it doesn't exist."""


def read_model(model: bytes, name: str = "") -> sentencepiece.SentencePieceProcessor:
    """Return the sentencepiece processor of a serialized model.

    Args:
        model: The serialized model.
        name: The name of the model's file, for the error message.

    Raises:
        ValueError: If the bytes are not a sentencepiece model.
    """
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model)
    except RuntimeError as error:
        raise ValueError(f"{name}{' is ' * bool(name)}not a sentencepiece model: {error}") from error
    return processor


class Pieces:
    """A tokenizer that uses sentencepiece pieces but assigns IDs using a separate table.

    Args:
        processor: The sentencepiece processor; None to split lines at spaces.
        ids: The ID of each piece.
        special: The special tokens, which are recognized in a line and omitted from decoded text. The value for a token
            is True if spaces before the token are removed.
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
        # Sort the tokens from longest to shortest, because a special token may be a prefix of a longer special token.
        alternatives = "|".join(map(re.escape, sorted(self._special, key=len, reverse=True)))
        self._split = re.compile(f"({alternatives})" if alternatives else r"(?!)()")
        self._unknown = ids[UNKNOWN]
        self.size = max(ids.values()) + 1

    def ids(self, line: str) -> list[int]:
        """Return the token IDs of a line. Special tokens in the line are converted to their IDs."""
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
        """Split a text without special tokens into pieces."""
        return text.split() if self._processor is None else self._processor.encode(text, out_type=str)

    def text(self, ids: Iterable[int]) -> str:
        """Return the text of token IDs, without special tokens."""
        pieces = [self.name(token) for token in map(int, ids) if token not in self._silent]
        if self._processor is None:
            return " ".join(pieces)
        return self._processor.decode_pieces(pieces).replace(SPACE, " ").strip()

    def name(self, token: int) -> str:
        """Return the token that has the given ID."""
        return self._names.get(int(token), UNKNOWN)

    def find(self, piece: str) -> int | None:
        """Return the ID of a token, or None if it doesn't exist."""
        return self._ids.get(piece)


class TokenizerFile:
    """A tokenizer defined by a ``tokenizer.json`` file of the `tokenizers` library.

    Args:
        content: The content of the file.

    Raises:
        UsageError: If `tokenizers` isn't installed.
        ValueError: If the content is invalid.
    """

    def __init__(self, content: bytes | str) -> None:
        tokenizers = import_extra("tokenizers")
        content = content if isinstance(content, bytes) else content.encode()
        if (symbols := content.count(b'"type_id"')) > MOST_SYMBOLS:
            raise ValueError(f"tokenizer.json must add at most {MOST_SYMBOLS:,} tokens to a line: got {symbols:,}")
        with rust_errors("tokenizer.json"):
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
            self._check_growth()
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.size: int = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def _check_growth(self) -> None:
        """Raise an error if a chain of replacements could lengthen a text so much that it exhausts memory."""
        growth = 1.0
        for part in ("normalizer", "pre_tokenizer", "decoder"):
            if (component := getattr(self._tokenizer, part)) is not None:
                growth *= _growth(json.loads(component.__getstate__()))
        if growth > MOST_GROWTH:
            raise ValueError(f"the replacements must lengthen a text by at most {MOST_GROWTH} times: got {growth:.3g}")

    def ids(self, line: str) -> list[int]:
        """Return the token IDs of a line, without the special tokens of the tokenizer's template."""
        with rust_errors("tokenizer.json"):
            return self._tokenizer.encode(line, add_special_tokens=False).ids

    def framed(self, line: str) -> list[int]:
        """Return the token IDs of a line, including the special tokens of the tokenizer's template."""
        with rust_errors("tokenizer.json"):
            return self._tokenizer.encode(line).ids

    def text(self, ids: Iterable[int]) -> str:
        """Return the text of token IDs, without special tokens."""
        with rust_errors("tokenizer.json"):
            return self._tokenizer.decode([token for token in map(int, ids) if 0 <= token < self.size])

    def name(self, token: int) -> str:
        """Return the token that has the given ID."""
        return self._tokenizer.id_to_token(int(token)) or UNKNOWN

    def find(self, piece: str) -> int | None:
        """Return the ID of a token, or None if it doesn't exist."""
        return self._tokenizer.token_to_id(piece)

    def special(self) -> list[str]:
        """Return the special tokens, sorted by ID."""
        added = self._tokenizer.get_added_tokens_decoder()
        return [str(added[token].content) for token in sorted(added) if added[token].special]


def _growth(step: Any) -> float:
    """Return the maximum factor by which a tokenizer step, including its nested steps, lengthens a text."""
    if isinstance(step, list):
        return math.prod(map(_growth, step))
    if not isinstance(step, dict):
        return 1.0
    if step.get("type") == "Replace":
        shortest = len(step["pattern"].get("String", "")) or 1  # a regular expression may match a single character
        return max(1.0, float(len(step["content"])) / shortest)
    return math.prod(map(_growth, step.values()))


@contextmanager
def rust_errors(name: str) -> Iterator[None]:
    """Raise a ValueError for any exception of `tokenizers`, even for Rust panics, which don't derive from Exception.

    Raises:
        ValueError: If the block raises any exception except KeyboardInterrupt and SystemExit.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ValueError(f"{name} cannot be used: {error}") from error


def import_extra(name: str) -> Any:
    """Import a package that only some vocabularies require.

    Raises:
        UsageError: If the package isn't installed.
    """
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"this vocabulary requires {name}: pip install 'transformer-parity[import]'") from error
