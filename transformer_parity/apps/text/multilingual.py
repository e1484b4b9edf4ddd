"""Vocabularies for Hugging Face models that add language codes to sentences or use a custom tokenizer template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files as resources
from typing import Any, Self

from transformer_parity.apps.text.maps import read_json, read_map
from transformer_parity.transformer.sentences.engines import (
    UNKNOWN,
    Engine,
    Pieces,
    TokenizerFile,
    import_extra,
    read_model,
    rust_errors,
)
from transformer_parity.transformer.sentences.vocabulary import Vocabulary, tidied

MODEL, TABLE, TOKENIZER, MERGES = "sentencepiece.bpe.model", "vocab.json", "tokenizer.json", "merges.txt"
SETTINGS, SPECIAL = "tokenizer_config.json", "special_tokens_map.json"
START, PADDING, END, MASK = "<s>", "<pad>", "</s>", "<mask>"
CODE = re.compile(r"[a-z]{2,3}_[A-Z][A-Za-z]{1,3}")  # a language followed by a country or a script


@dataclass(frozen=True)
class Form:
    """A model family's representation of languages.

    Attributes:
        languages: Key of the family's list of languages in ``data/languages.json``.
        token: Format string that converts a language code to its token.
        code_first: Whether the source starts with the language token. If False, the token follows EOS.
        is_start: Whether the target's language token is the decoder's BOS token. If False, the decoder generates the
            language token as the first token.
        tidies: Whether decoding removes spaces before punctuation. A vocabulary's settings can override this value.
    """

    languages: str
    token: str = "{}"
    code_first: bool = True
    is_start: bool = False
    tidies: bool = False


FORMS = {
    "nllb": Form("nllb"),
    "m2m_100": Form("m2m_m2m100", "__{}__"),
    "mbart": Form("mbart", code_first=False, is_start=True),
    "mbart50": Form("mbart50"),
    "plbart": Form("plbart_base", "__{}__", code_first=False, is_start=True, tidies=True),
}


class MultilingualVocabulary(Vocabulary):
    """A vocabulary that consists of SentencePiece pieces and one token per language.

    If there is a ``tokenizer.json``, its tokenizer replaces the SentencePiece model for splitting lines. The two
    tokenizers differ only in how they treat leading spaces, trailing spaces, and unknown characters.

    Args:
        files: Dict from file names to the content of the files. The files must include ``tokenizer.json`` or
            ``sentencepiece.bpe.model``. With ``sentencepiece.bpe.model``, M2M100 also requires ``vocab.json``. The
            files may include ``tokenizer_config.json`` with Hugging Face's settings.
        kind: Model family, a key of ``FORMS``.

    Raises:
        ValueError: If a file is missing or invalid.
    """

    needs_direction = True

    def __init__(self, files: Mapping[str, bytes], kind: str) -> None:
        super().__init__(files)
        self.kind = kind  # type: ignore[misc]  # this class implements multiple kinds of vocabularies
        self._form = form = FORMS[kind]
        self._settings = {"clean_up_tokenization_spaces": form.tidies, **read_json(files, SETTINGS)}
        names = _languages(str(self._settings.get("language_codes")), form.languages)
        tokens = [form.token.format(name) for name in names]
        self._engine: Engine
        if TOKENIZER in files:
            self._engine = TokenizerFile(files[TOKENIZER])
            tokens = list(dict.fromkeys([*tokens, *filter(CODE.fullmatch, self._engine.special())]))
        else:
            self._engine = _pieces(files, tokens)
        pattern = re.compile(re.escape(form.token).replace(r"\{\}", "(.*)"))
        self._codes = {
            found[1]: number
            for token in tokens
            if (found := pattern.fullmatch(token)) and (number := self._engine.find(token)) is not None
        }
        end = self._engine.find(END)
        if end is None or not self._codes:
            raise ValueError(f"a vocabulary of kind {kind} must contain {END} and language codes")
        self._end = end
        self.source_languages = self.target_languages = list(self._codes)
        self.sizes = (self._engine.size, self._engine.size)
        self._code_first = form.code_first and not self._settings.get("legacy_behaviour")
        self._from: list[int] = []

    def between(self, source: str | None, target: str | None) -> Self:
        """Return a copy of the vocabulary with the given source and target languages."""
        directed = super().between(source, target)
        directed._from, code = [self._codes[str(source)]], self._codes[str(target)]
        directed.start_id = code if self._form.is_start else None
        directed.forced_ids = () if self._form.is_start else (code,)
        return directed

    def ids(self, line: str) -> list[int]:
        """Return the IDs of the source language, the pieces, and EOS, in the model family's order."""
        if not self._from:
            self.between(None, None)
        pieces = self._engine.ids(line)
        return [*self._from, *pieces, self._end] if self._code_first else [*pieces, self._end, *self._from]

    def target_ids(self, line: str) -> list[int]:
        """Return the IDs of the target language (if the model generates it), the pieces, and EOS."""
        return [*self.forced_ids, *self._engine.ids(line), self._end]

    def text(self, ids: Iterable[int]) -> str:
        """Decode IDs to text."""
        codes = set(self._codes.values())
        return tidied(self._engine.text(token for token in map(int, ids) if token not in codes), self._settings)

    def names(self, ids: Iterable[int], *, source: bool = False) -> list[str]:
        """Return the piece of each ID."""
        return [self._engine.name(token) for token in ids]


@cache
def _languages(name: str, usual: str) -> list[str]:
    """Return the list of language codes that the settings specify, or the family's default list."""
    tables = json.loads((resources("transformer_parity") / "data" / "languages.json").read_text("utf-8"))
    return " ".join(tables.get(f"{usual.split('_')[0]}_{name}", tables[usual])).split()


def _pieces(files: Mapping[str, bytes], tokens: list[str]) -> Pieces:
    """Return a tokenizer with the pieces of a SentencePiece model, followed by the language tokens in ``tokens``.

    If there is an ID table, the IDs of the pieces are read from the table. Otherwise, the IDs follow fairseq's order.
    """
    processor = read_model(files[MODEL], MODEL)
    special = dict.fromkeys((START, PADDING, END, UNKNOWN, *tokens), False) | {MASK: True}
    if TABLE in files:
        table = read_map(files, TABLE)
        return Pieces(processor, _behind(table, tokens), special)
    first = [START, PADDING, END, UNKNOWN]
    pieces = [processor.id_to_piece(token) for token in range(processor.get_piece_size())]
    table = {piece: number for number, piece in enumerate([*first, *pieces[3:]])}
    if pieces[:3] != [UNKNOWN, START, END] or len(table) != len(pieces) + 1:
        raise ValueError(f"{MODEL} must start with {UNKNOWN} {START} {END}: got {' '.join(pieces[:3])}")
    return Pieces(processor, _behind(table, [*tokens, MASK]), special)


def _behind(table: dict[str, int], tokens: list[str]) -> dict[str, int]:
    """Return an ID table to which the missing tokens have been appended."""
    return table | {token: len(table) + number for number, token in enumerate(tokens) if token not in table}


class TokenizerVocabulary(Vocabulary):
    """A vocabulary that uses either a ``tokenizer.json`` with its template, or byte-level BPE with BART's template.

    The template specifies the special tokens that are added to each line.

    Args:
        files: Dict from file names to the content of the files. The files must include ``tokenizer.json``, or
            ``vocab.json`` and ``merges.txt``. They may include ``tokenizer_config.json``.

    Raises:
        UsageError: If ``tokenizers`` is not installed.
        ValueError: If a file is missing or invalid.
    """

    kind = "tokenizer"

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__(files)
        self._settings = read_json(files, SETTINGS)
        self._engine = TokenizerFile(files[TOKENIZER] if TOKENIZER in files else _byte_level(files, self._settings))
        self.sizes = (self._engine.size, self._engine.size)

    def ids(self, line: str) -> list[int]:
        """Return the IDs of a line, including the template's special tokens."""
        return self._engine.framed(line)

    def target_ids(self, line: str) -> list[int]:
        """Return the IDs of a line, including the template's special tokens. The model generates all of these IDs."""
        return self._engine.framed(line)

    def text(self, ids: Iterable[int]) -> str:
        """Decode IDs to text."""
        return tidied(self._engine.text(ids), self._settings)

    def names(self, ids: Iterable[int], *, source: bool = False) -> list[str]:
        """Return the piece of each ID."""
        return [self._engine.name(token) for token in ids]


def _byte_level(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> str:
    """Return the content of a ``tokenizer.json`` built from an ID table, merges, and BART's special tokens."""
    tokenizers = import_extra("tokenizers")
    table = read_map(files, TABLE)
    if missing := [piece for piece in (START, PADDING, END, UNKNOWN) if piece not in table]:
        raise ValueError(f"{TABLE} must contain {', '.join(missing)}")
    lines = files[MERGES].decode().split("\n")
    merges = [tuple(line.split(" ")) for line in lines if line.strip() and not line.startswith("#version")]
    before = bool(settings.get("add_prefix_space", False))
    with rust_errors(MERGES):
        model = tokenizers.models.BPE(table, merges, continuing_subword_prefix="", end_of_word_suffix="")
    found = tokenizers.Tokenizer(model)
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=before)
    found.decoder = tokenizers.decoders.ByteLevel()
    found.post_processor = tokenizers.processors.RobertaProcessing(
        (END, table[END]), (START, table[START]), True, before
    )
    found.add_special_tokens([piece for piece in (START, PADDING, END, UNKNOWN, MASK) if piece in table])
    return found.to_str()
