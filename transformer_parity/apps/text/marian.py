"""Marian's vocabularies: two sentencepiece models, and tables of ids of their own or none."""

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
TABLES = ("vocab.json", "vocab.yml")  # of both sides, or of the source where there is another for the target
TARGET_TABLES = ("target_vocab.json", "target_vocab.yml")


class MarianVocabulary(Vocabulary):
    """A sentencepiece model for each side; the ids come from a table, or are those of the model.

    A line may begin with a code such as ``>>deu<<``, which is one token and says what to translate into; ``between``
    puts it there.

    Args:
        files: ``source.spm`` and ``target.spm``, or neither: then spaces cut a line. A table, ``vocab.json`` or
            ``vocab.yml``; without one, ids are those of the models. A ``target_vocab.json`` or ``.yml`` where the
            target has another. ``tokenizer_config.json``, as Hugging Face has it.

    Raises:
        ValueError: A file is missing, or not what it should be.
    """

    kind = "marian"

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__(files)
        models = {name: read_model(files[name], name) for name in ("source.spm", "target.spm") if name in files}
        tables = [read_map(files, name) for names in (TABLES, TARGET_TABLES) for name in names if name in files]
        if len(models) == 1 or not (models or tables):
            raise ValueError("a vocabulary of Marian's is source.spm and target.spm, or a table of ids, or all of them")
        if not tables:
            tables = [
                {model.id_to_piece(token): token for token in range(model.get_piece_size())}
                for model in models.values()
            ]
        for table in tables:
            if missing := [piece for piece in (END, UNKNOWN) if piece not in table]:
                raise ValueError(f"a vocabulary of Marian's must have {' and '.join(missing)}")
        self._settings = read_json(files, SETTINGS)
        is_shared = len(tables) == 1
        special = dict.fromkeys((END, UNKNOWN, PADDING), False)
        source, target = models.get("source.spm"), models.get("target.spm")
        self._source = _Tagged(source, tables[0], special)
        self._target = _Tagged(target, tables[-1], special)
        # Hugging Face joins the pieces of a shared table by the model of the source.
        self._said = self._source if is_shared and "vocab.json" in files else self._target
        self.sizes = (self._source.size, self._target.size)
        self._ends = tables[0][END], tables[-1][END]
        self._tag: list[int] = []
        self._tags = {piece[2:-2]: token for piece, token in tables[0].items() if is_tag(piece)}
        self.target_languages = list(self._tags)

    def between(self, source: str | None, target: str | None) -> Self:
        """Return the vocabulary that puts the code of a target language before every line."""
        directed = super().between(source, target)
        directed._tag = [] if target is None else [self._tags[target]]
        return directed

    def ids(self, line: str) -> list[int]:
        """Return the code if there is one, the pieces and the end symbol."""
        return [*self._tag, *self._source.ids(line), self._ends[0]]

    def target_ids(self, line: str) -> list[int]:
        """Return the pieces and the end symbol."""
        return [*self._target.ids(line), self._ends[1]]

    def text(self, ids: Iterable[int]) -> str:
        """Return the text of the pieces."""
        return tidied(self._said.text(ids), self._settings)

    def names(self, ids: Iterable[int], *, source: bool = False) -> list[str]:
        """Spell out each id."""
        side = self._source if source else self._target
        return [side.name(token) for token in ids]


class _Tagged(Pieces):
    """Pieces of a line that may begin with a code in ``>>`` and ``<<``."""

    def cut(self, text: str) -> list[str]:
        """Return the code and the pieces."""
        end = text.find("<<") + 2 if text.startswith(">>") else 0
        tag = [text[:end]] if end > 1 else []
        return [*tag, *super().cut(text[end:] if tag else text)]


def is_tag(piece: str) -> bool:
    """Whether a piece is the code of a language."""
    return piece.startswith(">>") and piece.endswith("<<") and len(piece) > 4


def read_marian_vocabulary(paths: list[Path]) -> MarianVocabulary:
    """Return the vocabulary of a model that Marian trained, from its files.

    Args:
        paths: Those of the source and of the target, or one for both: sentencepiece models (``.spm``, ``.model``),
            ``.yml`` or ``.json`` tables, or a pair of each.

    Raises:
        OSError: A file cannot be read.
        ValueError: The files are not one or two of a kind, or not what they should be.
    """
    files: dict[str, bytes] = {}
    for suffix in (".spm", ".yml", ".json"):
        same = [path for path in paths if path.suffix == suffix or (suffix, path.suffix) == (".spm", ".model")]
        if len(same) > 2:
            raise ValueError(f"a vocabulary has at most two files that end in {suffix}: got {len(same)}")
        first, second = (
            ("source.spm", "target.spm") if suffix == ".spm" else (f"vocab{suffix}", f"target_vocab{suffix}")
        )
        for name, path in zip((first, second), same, strict=False):
            files[name] = read_file(path)
        if suffix == ".spm" and len(same) == 1:
            files[second] = files[first]
    if other := [path.name for path in paths if path.suffix not in (".spm", ".model", ".yml", ".json")]:
        raise ValueError(f"files of a vocabulary must end in .spm, .model, .yml or .json: got {', '.join(other)}")
    if any(name.endswith(".yml") for name in files) and any(name.endswith(".json") for name in files):
        raise ValueError("a vocabulary has tables of one form: got .yml and .json")
    for path in paths:  # by its own name
        content = read_file(path)
        if path.suffix in (".spm", ".model"):
            read_model(content, path.name)
        else:
            read_map({path.name: content}, path.name)
    return MarianVocabulary(files)


def as_marian(joint: JointVocabulary) -> MarianVocabulary:
    """Return the vocabulary that `parity train` trains with as one of Marian's, with the same ids."""
    model = joint.subwords.model
    table = json.dumps(joint.table(), ensure_ascii=False, indent=2).encode()
    return MarianVocabulary({"source.spm": model, "target.spm": model, "vocab.json": table})
