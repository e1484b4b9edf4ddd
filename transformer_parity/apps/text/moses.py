"""Vocabularies with the Moses tokenizer and byte-pair encoding, for fairseq and Hugging Face's FSMT."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from transformer_parity.apps.text.maps import read_json, read_map
from transformer_parity.transformer.sentences.engines import UNKNOWN, import_extra, read_model
from transformer_parity.transformer.sentences.vocabulary import Vocabulary

SETTINGS, MERGES = "tokenizer_config.json", "merges.txt"
SOURCE_TABLE, TARGET_TABLE = "vocab-src.json", "vocab-tgt.json"
SOURCE_LIST, TARGET_LIST, CODES, MODEL = "dict.src.txt", "dict.tgt.txt", "bpecodes", "sentencepiece.bpe.model"
FIRST = ("<s>", "<pad>", "</s>", UNKNOWN)
END = "</s>"
WORD_END = "</w>"
INSIDE = "@@"  # suffix that fairseq adds to pieces that do not end a word

# The same replacements as in Moses' replace-unicode-punctuation.perl.
# ruff: noqa: RUF001
PUNCTUATION = str.maketrans(
    dict(zip("，、∶：？）！（；～━〈〉【】％０１２３４５６７８９", ",,::?)!(;~-<>[]%0123456789", strict=True))
    | dict.fromkeys("”“《》」「", '"')
    | {"’": "'", "…": "..."}
)
FULL_STOP = re.compile(r"[。．]\s*")


class MosesVocabulary(Vocabulary):
    """A vocabulary that splits lines with the Moses tokenizer and splits words with byte-pair encoding.

    Args:
        files: Dict from file names to the content of the files. For FSMT, the files are ``vocab-src.json``,
            ``vocab-tgt.json``, ``merges.txt``, and ``tokenizer_config.json``, which specifies the languages. For
            fairseq, the files are ``dict.src.txt``, ``dict.tgt.txt``, and, optionally, ``bpecodes`` or
            ``sentencepiece.bpe.model``. If there is a SentencePiece model, it replaces Moses for splitting lines. If
            there are neither byte-pair encoding merges nor a SentencePiece model, lines are split at spaces.

    Raises:
        UsageError: If ``sacremoses`` is required but not installed.
        ValueError: If a file is missing or invalid.
    """

    kind = "moses"

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__(files)
        self._settings = read_json(files, SETTINGS)
        self._of_fairseq = SOURCE_LIST in files
        if self._of_fairseq:
            tables = [read_dictionary(files[name], name) for name in (SOURCE_LIST, TARGET_LIST)]
        else:
            tables = [read_map(files, name) for name in (SOURCE_TABLE, TARGET_TABLE)]
        for table in tables:
            if missing := [piece for piece in (END, UNKNOWN) if piece not in table]:
                raise ValueError(f"the ID tables of the vocabulary must contain {' and '.join(missing)}")
        self._source, self._target = tables
        self._names = [{token: piece for piece, token in table.items()} for table in tables]
        self.sizes = (len(self._source), len(self._target))
        self._model = read_model(files[MODEL], MODEL) if MODEL in files else None
        codes = files.get(CODES if self._of_fairseq else MERGES)
        self._codes = None if codes is None else PairEncoding(codes.decode())
        self._moses = None if self._codes is None else Moses(self._settings.get("langs"), not self._of_fairseq)
        self._specials = [piece for piece in FIRST if piece in self._source and piece in self._target]

    def ids(self, line: str) -> list[int]:
        """Return the IDs of the pieces, followed by EOS."""
        return self._numbered(line, 0)

    def target_ids(self, line: str) -> list[int]:
        """Return the IDs of the pieces, followed by EOS."""
        return self._numbered(line, 1)

    def _numbered(self, line: str, side: int) -> list[int]:
        table = (self._source, self._target)[side]
        parts = [line] if self._of_fairseq else re.split(f"({'|'.join(map(re.escape, self._specials))})", line)
        pieces = [piece for part in parts for piece in ([part] if part in self._specials else self._cut(part, side))]
        return [*(table.get(piece, table[UNKNOWN]) for piece in pieces), table[END]]

    def _cut(self, text: str, side: int) -> list[str]:
        if self._model is not None:
            return self._model.encode(text, out_type=str)
        if self._codes is None or self._moses is None:
            return text.split()
        if self._settings.get("do_lower_case"):
            text = text.lower()
        found: list[str] = []
        for word in self._moses.words(text, side):
            *inside, last = self._codes.cut(word)
            if self._of_fairseq:
                found += [*(f"{piece}{INSIDE}" for piece in inside), last.removesuffix(WORD_END)]
            else:
                found += [*inside, last]
        return found

    def text(self, ids: Iterable[int]) -> str:
        """Decode IDs to text in the target language."""
        silent = {self._target[piece] for piece in FIRST if piece in self._target}
        pieces = [self._names[1].get(token, UNKNOWN) for token in map(int, ids) if token not in silent]
        if self._model is not None:
            return self._model.decode_pieces(pieces)
        if self._of_fairseq:
            words = f"{' '.join(pieces)} ".replace(f"{INSIDE} ", "").split()
        else:
            words = "".join(piece.replace(" ", "").replace(WORD_END, " ") for piece in pieces).split()
        return " ".join(words) if self._moses is None else self._moses.joined(words)

    def names(self, ids: Iterable[int], *, source: bool = False) -> list[str]:
        """Return the piece of each ID."""
        return [self._names[0 if source else 1].get(int(token), UNKNOWN) for token in ids]


class PairEncoding:
    """Byte-pair encoding with given merges.

    Args:
        codes: Merges in the order in which they were learned, one pair per line. A line may also include the pair's
            frequency, and the first line may start with ``#version``.
    """

    def __init__(self, codes: str) -> None:
        pairs = [
            tuple(line.split()[:2]) for line in codes.split("\n") if line.strip() and not line.startswith("#version")
        ]
        self._ranks = {pair: rank for rank, pair in reversed(list(enumerate(pairs)))}
        self.cut = lru_cache(100_000)(self._cut)

    def _cut(self, word: str) -> list[str]:
        """Return the pieces of a word. The last piece ends with ``</w>``."""
        pieces = [*word[:-1], word[-1] + WORD_END]
        while len(pieces) > 1:
            ranks = [self._ranks.get(pair, len(self._ranks)) for pair in itertools.pairwise(pieces)]
            if (best := min(ranks)) == len(self._ranks):
                break
            first = pieces[ranks.index(best)], pieces[ranks.index(best) + 1]
            merged: list[str] = []
            for piece in pieces:
                if merged and (merged[-1], piece) == first:
                    merged[-1] += piece
                else:
                    merged.append(piece)
            pieces = merged
        return pieces


class Moses:
    """Moses tokenizers for the source and the target, and a detokenizer for the target.

    Args:
        languages: Language codes of the source and the target.
        normalizes: Whether to convert punctuation to ASCII and remove unprintable characters before tokenization.

    Raises:
        UsageError: If ``sacremoses`` is not installed.
        ValueError: If ``languages`` is not a list of two codes.
    """

    def __init__(self, languages: Any, normalizes: bool) -> None:
        if not isinstance(languages, list) or len(languages) != 2 or not all(type(one) is str for one in languages):
            raise ValueError(f"'langs' in {SETTINGS} must be a list of two languages: got {languages!r}")
        sacremoses = import_extra("sacremoses")
        self._tokenizers = [sacremoses.MosesTokenizer(lang=language) for language in languages]
        self._joiner = sacremoses.MosesDetokenizer(lang=languages[1])
        self._normalizers = [sacremoses.MosesPunctNormalizer(lang=language) for language in languages] * normalizes

    def words(self, text: str, side: int) -> list[str]:
        """Split a line into words, separate punctuation, and escape special characters such as ``&``."""
        if self._normalizers:
            text = self._normalizers[side].normalize(FULL_STOP.sub(". ", text.translate(PUNCTUATION)))
            text = "".join(one for one in text if not unicodedata.category(one).startswith("C"))
        return [word for word in self._tokenizers[side].tokenize(text, aggressive_dash_splits=True) if word]

    def joined(self, words: list[str]) -> str:
        """Join words into a line."""
        return self._joiner.detokenize(words)


def read_dictionary(content: bytes, name: str) -> dict[str, int]:
    """Return the ID of each symbol in fairseq's ``dict.txt``.

    The four special symbols have IDs 0 to 3. The symbols in the file have consecutive IDs from 4, in file order.
    The file also includes the symbols that fairseq adds to pad the vocabulary to a multiple of 8.

    Raises:
        ValueError: If a line is not of the form ``symbol count`` or a symbol occurs more than once.
    """
    symbols = list(FIRST)
    for number, line in enumerate(content.decode().split("\n"), 1):
        if not line.strip():
            continue
        symbol, _, count = line.rstrip().removesuffix(" #fairseq:overwrite").rpartition(" ")
        if not count.isdecimal() or not symbol:
            raise ValueError(f"line {number} of {name} must be `symbol count`: got {line[:60]!r}")
        symbols.append(symbol)
    found = {symbol: number for number, symbol in enumerate(symbols)}
    if len(found) < len(symbols):
        twice = next(symbol for number, symbol in enumerate(symbols) if found[symbol] != number)
        raise ValueError(f"duplicate symbol {twice!r} in {name}")
    return found
