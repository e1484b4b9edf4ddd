"""Vocabularies of T5 models: a SentencePiece model with sentinel tokens, or the bytes of ByT5."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from transformer_parity.apps.text.maps import read_json
from transformer_parity.transformer.sentences.engines import UNKNOWN, Pieces, read_model
from transformer_parity.transformer.sentences.vocabulary import Vocabulary, tidied

MODEL, SETTINGS, ADDED = "spiece.model", "tokenizer_config.json", "added_tokens.json"
END, PADDING = "</s>", "<pad>"
FIRST = {PADDING: 0, END: 1, UNKNOWN: 2}  # ByT5's special tokens before the bytes
SENTINELS, BYTE_SENTINELS = 100, 125  # default numbers of sentinels, <extra_id_0> and so on
OFFSET, BYTES = len(FIRST), 256  # ID of the first byte, and number of bytes
REMEDY = "save the tokenizer with transformers, which writes tokenizer.json"


class T5Vocabulary(Vocabulary):
    """A vocabulary with the pieces of a SentencePiece model, followed by sentinels such as ``<extra_id_0>``.

    The library `sentencepiece`, with which the SentencePiece models were trained, splits the lines. Transformers 5 uses
    `tokenizers` instead, which converts a character to the unknown token if the model contains only its bytes.

    Args:
        files: Dict from file names to the content of the files. ``spiece.model`` is required. ``tokenizer_config.json``
            contains Hugging Face's settings.

    Raises:
        ValueError: If a file is missing or invalid.
    """

    kind = "t5"

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__(files)
        self._settings = settings = read_json(files, SETTINGS)
        self._processor = processor = read_model(files[MODEL], MODEL)
        table = {processor.id_to_piece(token): token for token in range(processor.get_piece_size())}
        if "added_tokens_decoder" in settings:
            added = _added(settings)
        elif ADDED in files:
            raise ValueError(f"{ADDED} is not supported; {REMEDY}")
        else:
            count = _count(settings, SENTINELS)
            added = {f"<extra_id_{i}>": len(table) + count - 1 - i for i in range(count)}
        pieces, table = table, table | added
        usual = {"eos_token": END, "unk_token": UNKNOWN, "pad_token": PADDING}
        end, *others = (_content(settings.get(name)) or piece for name, piece in usual.items())
        if missing := [piece for piece in (end, UNKNOWN) if piece not in table]:
            raise ValueError(f"{MODEL} must contain {' and '.join(missing)}")
        special = (end, *others, *added)
        self._engine = Pieces(processor, table, dict.fromkeys(special, False))
        self._end = table[end]
        self._spoken = {token for piece, token in pieces.items() if piece not in special}
        self.sizes = (self._engine.size, self._engine.size)

    def ids(self, line: str) -> list[int]:
        """Return the IDs of the pieces, followed by EOS."""
        return [*self._engine.ids(line), self._end]

    def target_ids(self, line: str) -> list[int]:
        """Return the IDs of the pieces, followed by EOS."""
        return self.ids(line)

    def text(self, ids: Iterable[int]) -> str:
        """Decode IDs to text, omitting special tokens and the IDs of rows that pad the embedding matrix."""
        kept = [token for token in map(int, ids) if token in self._spoken]
        return tidied(self._processor.decode(kept), self._settings)

    def names(self, ids: Iterable[int], *, source: bool = False) -> list[str]:
        """Return the piece of each ID."""
        return [self._engine.name(token) for token in ids]


def _content(token: Any) -> Any:
    """Return the text of a token in tokenizer_config.json, where a token is either a string or a dict."""
    return token.get("content") if isinstance(token, dict) else token


def _count(settings: Mapping[str, Any], usual: int) -> int:
    """Return the number of sentinels."""
    count = settings.get("extra_ids", usual)
    if type(count) is not int or not 0 <= count <= 100_000:
        raise ValueError(f"extra_ids in {SETTINGS} must be an integer in [0, 100,000]: got {count!r:.60}")
    return count


def _added(settings: Mapping[str, Any]) -> dict[str, int]:
    """Return the tokens in ``added_tokens_decoder``, which maps IDs to tokens."""
    added, tokens = {}, settings["added_tokens_decoder"]
    for number, token in tokens.items() if isinstance(tokens, dict) else []:
        if not number.isdecimal() or not isinstance(token, dict) or not isinstance(token.get("content"), str):
            raise ValueError(f"added_tokens_decoder in {SETTINGS} must map IDs to tokens: got {number!r:.60}")
        if token.get("special") is not True:
            raise ValueError(f"the added token {token['content']!r:.60} is not special; {REMEDY}")
        added[token["content"]] = int(number)
    return added


class ByteVocabulary(Vocabulary):
    """The vocabulary of ByT5: padding, EOS, unknown, the 256 bytes of UTF-8, and sentinels such as ``<extra_id_0>``.

    Args:
        files: Dict from file names to the content of the files. ``tokenizer_config.json`` is optional.

    Raises:
        ValueError: If the settings are invalid.
    """

    kind = "byt5"

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._settings = read_json(files, SETTINGS)
        if "tokenizer_class" not in self._settings:  # transformers requires the class because there is no other file
            said = {"tokenizer_class": "ByT5Tokenizer", **self._settings}
            files = {**files, SETTINGS: json.dumps(said).encode()}
        super().__init__(files)
        sentinels = [f"<extra_id_{i}>" for i in range(_count(self._settings, BYTE_SENTINELS))]
        self._special = FIRST | {piece: OFFSET + BYTES + number for number, piece in enumerate(sentinels)}
        self._names = {number: piece for piece, number in self._special.items()}
        self._split = re.compile(f"({'|'.join(map(re.escape, self._special))})")
        self.sizes = (OFFSET + BYTES + len(sentinels), OFFSET + BYTES + len(sentinels))

    def ids(self, line: str) -> list[int]:
        """Return the IDs of the bytes, followed by EOS unless the line already ends with EOS."""
        parts = ["", *self._split.split(line), ""]  # special, text, special, text, ..., special
        found: list[int] = []
        for before, text, after in zip(parts[::2], parts[1::2], parts[2::2], strict=False):
            # transformers removes spaces around the first three special tokens, but not around sentinels.
            text = text.lstrip() if before in FIRST else text
            text = text.rstrip() if after in FIRST else text
            found += [OFFSET + byte for byte in text.encode("utf-8", "replace")]
            found += [self._special[after]] if after else []
        return found if found[-1:] == [FIRST[END]] else [*found, FIRST[END]]

    def target_ids(self, line: str) -> list[int]:
        """Return the same IDs as ``ids``."""
        return self.ids(line)

    def text(self, ids: Iterable[int]) -> str:
        """Decode IDs to text. Incomplete characters are omitted."""
        found = bytes(token - OFFSET for token in map(int, ids) if OFFSET <= token < OFFSET + BYTES)
        return tidied(found.decode("utf-8", "ignore"), self._settings)

    def names(self, ids: Iterable[int], *, source: bool = False) -> list[str]:
        """Return a name for each ID: the character whose code is the byte, or the name of the special token."""
        characters = {OFFSET + byte: chr(byte) for byte in range(BYTES)} | self._names
        return [characters.get(int(token), UNKNOWN) for token in ids]
