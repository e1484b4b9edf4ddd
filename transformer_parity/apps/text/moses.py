"""Words by Moses, cut by codes of byte-pair encoding: the vocabularies of fairseq, and of FSMT at Hugging Face."""

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
INSIDE = "@@"  # what fairseq has behind a piece that does not end a word

# As Moses' replace-unicode-punctuation.perl.
# ruff: noqa: RUF001
PUNCTUATION = str.maketrans(
    dict(zip("，、∶：？）！（；～━〈〉【】％０１２３４５６７８９", ",,::?)!(;~-<>[]%0123456789", strict=True))
    | dict.fromkeys("”“《》」「", '"')
    | {"’": "'", "…": "..."}
)
FULL_STOP = re.compile(r"[。．]\s*")


class MosesVocabulary(Vocabulary):
    """Moses' tokens of a language each side, cut by byte-pair encoding.

    Args:
        files: Of FSMT: ``vocab-src.json``, ``vocab-tgt.json``, ``merges.txt`` and ``tokenizer_config.json``, which
            names the languages. Of fairseq: ``dict.src.txt`` and ``dict.tgt.txt``, with ``bpecodes``, with
            ``sentencepiece.bpe.model``, which then cuts lines without Moses, or with neither: then spaces do.

    Raises:
        UsageError: `sacremoses` is not installed, and is needed.
        ValueError: A file is missing, or not what it should be.
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
                raise ValueError(f"the tables of this vocabulary must have {' and '.join(missing)}")
        self._source, self._target = tables
        self._names = [{token: piece for piece, token in table.items()} for table in tables]
        self.sizes = (len(self._source), len(self._target))
        self._model = read_model(files[MODEL], MODEL) if MODEL in files else None
        codes = files.get(CODES if self._of_fairseq else MERGES)
        self._codes = None if codes is None else PairEncoding(codes.decode())
        self._moses = None if self._codes is None else Moses(self._settings.get("langs"), not self._of_fairseq)
        self._specials = [piece for piece in FIRST if piece in self._source and piece in self._target]

    def ids(self, line: str) -> list[int]:
        """Return the pieces and the end symbol."""
        return self._numbered(line, 0)

    def target_ids(self, line: str) -> list[int]:
        """Return the pieces and the end symbol."""
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
        """Return the text of the pieces, as words of the target language."""
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
        """Spell out each id."""
        return [self._names[0 if source else 1].get(int(token), UNKNOWN) for token in ids]


class PairEncoding:
    """Codes of byte-pair encoding: merges in the order in which they were learned.

    Args:
        codes: A pair a line, with or without a first line ``#version``, and a count behind.
    """

    def __init__(self, codes: str) -> None:
        pairs = [
            tuple(line.split()[:2]) for line in codes.split("\n") if line.strip() and not line.startswith("#version")
        ]
        self._ranks = {pair: rank for rank, pair in reversed(list(enumerate(pairs)))}
        self.cut = lru_cache(100_000)(self._cut)

    def _cut(self, word: str) -> list[str]:
        """Return the pieces of a word; the last one ends in ``</w>``."""
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
    """Moses' tokenizer of the source, and its inverse of the target.

    Args:
        languages: Two codes.
        normalizes: Whether punctuation is made ASCII first, and characters that are not printed are left out.

    Raises:
        UsageError: `sacremoses` is not installed.
        ValueError: These are not two codes.
    """

    def __init__(self, languages: Any, normalizes: bool) -> None:
        if not isinstance(languages, list) or len(languages) != 2 or not all(type(one) is str for one in languages):
            raise ValueError(f"{SETTINGS} must name two languages in 'langs': got {languages!r}")
        sacremoses = import_extra("sacremoses")
        self._tokenizers = [sacremoses.MosesTokenizer(lang=language) for language in languages]
        self._joiner = sacremoses.MosesDetokenizer(lang=languages[1])
        self._normalizers = [sacremoses.MosesPunctNormalizer(lang=language) for language in languages] * normalizes

    def words(self, text: str, side: int) -> list[str]:
        """Return the words of a line, with punctuation apart and ``&`` and others escaped."""
        if self._normalizers:
            text = self._normalizers[side].normalize(FULL_STOP.sub(". ", text.translate(PUNCTUATION)))
            text = "".join(one for one in text if not unicodedata.category(one).startswith("C"))
        return [word for word in self._tokenizers[side].tokenize(text, aggressive_dash_splits=True) if word]

    def joined(self, words: list[str]) -> str:
        """Return words as a line."""
        return self._joiner.detokenize(words)


def read_dictionary(content: bytes, name: str) -> dict[str, int]:
    """Return the ids of fairseq's ``dict.txt``: four symbols, then those of the lines.

    The symbols that fairseq makes up, to reach a multiple of 8, it writes into the file too.

    Raises:
        ValueError: A line has no count, or a symbol stands there twice.
    """
    symbols = list(FIRST)
    for number, line in enumerate(content.decode().split("\n"), 1):
        if not line.strip():
            continue
        symbol, _, count = line.rstrip().removesuffix(" #fairseq:overwrite").rpartition(" ")
        if not count.isdecimal() or not symbol:
            raise ValueError(f"{name}: line {number} must be `symbol count`: got {line[:60]!r}")
        symbols.append(symbol)
    found = {symbol: number for number, symbol in enumerate(symbols)}
    if len(found) < len(symbols):
        twice = next(symbol for number, symbol in enumerate(symbols) if found[symbol] != number)
        raise ValueError(f"{name}: {twice!r} stands there twice")
    return found
