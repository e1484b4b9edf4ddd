"""Marian vocabularies, which consist of two SentencePiece models, of ID tables, or of both."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

from transformer_parity.apps.text.maps import read_file, read_json, read_map
from transformer_parity.transformer.sentences.engines import UNKNOWN, Pieces, read_model
from transformer_parity.transformer.sentences.subwords import JointVocabulary
from transformer_parity.transformer.sentences.vocabulary import Vocabulary, tidied

END, PADDING = "</s>", "<pad>"
SETTINGS = "tokenizer_config.json"
TABLES = ("vocab.json", "vocab.yml")  # ID tables for the source, and for the target if there is no separate table
TARGET_TABLES = ("target_vocab.json", "target_vocab.yml")


class MarianVocabulary(Vocabulary):
    """A vocabulary with SentencePiece models for the source and the target, and IDs from a table or from the models.

    A line may start with a token that specifies the target language, such as ``>>deu<<``. ``between`` adds this token.

    Args:
        files: Dict from file names to the content of the files. ``source.spm`` and ``target.spm`` are the SentencePiece
            models. Without these models, lines are split at spaces. ``vocab.json`` or ``vocab.yml`` is the ID table.
            Without an ID table, the IDs in the SentencePiece models are used. ``target_vocab.json`` or
            ``target_vocab.yml`` is a separate ID table for the target. ``tokenizer_config.json`` contains Hugging
            Face's settings.

    Raises:
        ValueError: If a file is missing or invalid.
    """

    kind = "marian"

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__(files)
        models = {name: read_model(files[name], name) for name in ("source.spm", "target.spm") if name in files}
        tables = [read_map(files, name) for names in (TABLES, TARGET_TABLES) for name in names if name in files]
        if len(models) == 1 or not (models or tables):
            raise ValueError(
                "a Marian vocabulary must contain an ID table, or both source.spm and target.spm, or all of these files"
            )
        if not tables:
            tables = [
                {model.id_to_piece(token): token for token in range(model.get_piece_size())}
                for model in models.values()
            ]
        for table in tables:
            if missing := [piece for piece in (END, UNKNOWN) if piece not in table]:
                raise ValueError(f"a Marian vocabulary must contain {' and '.join(missing)}")
        self._settings = read_json(files, SETTINGS)
        is_shared = len(tables) == 1
        special = dict.fromkeys((END, UNKNOWN, PADDING), False)
        source, target = models.get("source.spm"), models.get("target.spm")
        self._source = _Tagged(source, tables[0], special)
        self._target = _Tagged(target, tables[-1], special)
        # With a shared table, Hugging Face uses the source's SentencePiece model to decode pieces.
        self._said = self._source if is_shared and "vocab.json" in files else self._target
        self.sizes = (self._source.size, self._target.size)
        self._ends = tables[0][END], tables[-1][END]
        self._tag: list[int] = []
        self._tags = {piece[2:-2]: token for piece, token in tables[0].items() if is_tag(piece)}
        self.target_languages = list(self._tags)

    def between(self, source: str | None, target: str | None) -> Self:
        """Return a vocabulary that adds the target language's token to the start of every line."""
        directed = super().between(source, target)
        directed._tag = [] if target is None else [self._tags[target]]
        return directed

    def ids(self, line: str) -> list[int]:
        """Return the IDs of the language token (if any), the pieces, and EOS."""
        return [*self._tag, *self._source.ids(line), self._ends[0]]

    def target_ids(self, line: str) -> list[int]:
        """Return the IDs of the pieces, followed by EOS."""
        return [*self._target.ids(line), self._ends[1]]

    def text(self, ids: Iterable[int]) -> str:
        """Decode IDs to text."""
        return tidied(self._said.text(ids), self._settings)

    def names(self, ids: Iterable[int], *, source: bool = False) -> list[str]:
        """Return the piece of each ID."""
        side = self._source if source else self._target
        return [side.name(token) for token in ids]


class _Tagged(Pieces):
    """A tokenizer for lines that may start with a language token such as ``>>deu<<``."""

    def cut(self, text: str) -> list[str]:
        """Return the language token (if any) and the pieces."""
        end = text.find("<<") + 2 if text.startswith(">>") else 0
        tag = [text[:end]] if end > 1 else []
        return [*tag, *super().cut(text[end:] if tag else text)]


def is_tag(piece: str) -> bool:
    """Return whether a piece is a language token."""
    return piece.startswith(">>") and piece.endswith("<<") and len(piece) > 4


def read_marian_vocabulary(paths: list[Path]) -> MarianVocabulary:
    """Read the vocabulary files of a model that was trained with Marian.

    Args:
        paths: SentencePiece models (``.spm``, ``.model``), ID tables (``.yml``, ``.json``), or both. If there are two
            files of the same type, the first is for the source and the second is for the target. If there is only one
            file of a type, it is used for both the source and the target.

    Raises:
        OSError: If a file cannot be read.
        ValueError: If there are more than two files of the same type, or if a file is invalid.
    """
    files: dict[str, bytes] = {}
    for suffix in (".spm", ".yml", ".json"):
        same = [path for path in paths if path.suffix == suffix or (suffix, path.suffix) == (".spm", ".model")]
        if len(same) > 2:
            raise ValueError(f"a vocabulary must have at most two {suffix} files: got {len(same)}")
        first, second = (
            ("source.spm", "target.spm") if suffix == ".spm" else (f"vocab{suffix}", f"target_vocab{suffix}")
        )
        for name, path in zip((first, second), same, strict=False):
            files[name] = read_file(path)
        if suffix == ".spm" and len(same) == 1:
            files[second] = files[first]
    if other := [path.name for path in paths if path.suffix not in (".spm", ".model", ".yml", ".json")]:
        raise ValueError(f"vocabulary files must end in .spm, .model, .yml, or .json: got {', '.join(other)}")
    if any(name.endswith(".yml") for name in files) and any(name.endswith(".json") for name in files):
        raise ValueError("all ID tables of a vocabulary must have the same format: got .yml and .json")
    for path in paths:  # parse each file here so that an error message identifies the user's file
        content = read_file(path)
        if path.suffix in (".spm", ".model"):
            read_model(content, path.name)
        else:
            read_map({path.name: content}, path.name)
    return MarianVocabulary(files)


def as_marian(joint: JointVocabulary) -> MarianVocabulary:
    """Convert a vocabulary built by `parity train` to a Marian vocabulary with the same IDs."""
    model = joint.subwords.model
    table = json.dumps(joint.table(), ensure_ascii=False, indent=2).encode()
    return MarianVocabulary({"source.spm": model, "target.spm": model, "vocab.json": table})
