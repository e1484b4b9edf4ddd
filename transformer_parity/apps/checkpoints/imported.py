"""What an import yields: a model in canonical names, and where it came from."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy import ndarray

from transformer_spec.checks import check_choice, check_fields
from transformer_spec.config import TransformerConfig
from transformer_spec.presets import PRESETS
from transformer_spec.search import Search

if TYPE_CHECKING:
    from transformer_parity.transformer.sentences.vocabulary import Vocabulary

BLOCK = 2**22  # bytes that are hashed at a time


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where weights came from: it travels in the file that is written.

    Attributes:
        format: What was read, such as ``hf`` or ``marian``.
        family: The model's name for itself there, such as ``m2m_100``.
        preset: The preset that it is nearest to.
        files: The SHA-256 of each file that was read, by its name.
        licence: The licence that the files name; None if they name none.
    """

    format: str
    family: str
    preset: str
    files: Mapping[str, str]
    licence: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return every field as plain values that JSON can hold."""
        return {**dataclasses.asdict(self), "files": dict(self.files)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Origin:
        """Rebuild an origin from ``to_dict``.

        Raises:
            TypeError: A field has the wrong type.
            ValueError: A field is missing or unknown.
        """
        if not isinstance(fields, Mapping):
            raise TypeError(f"an origin must be a mapping of field names: got {type(fields).__name__}")
        check_fields("fields of an origin", fields, (entry.name for entry in dataclasses.fields(cls)))
        texts = [fields[name] for name in ("format", "family", "preset")]
        files = fields["files"]
        texts += [*files, *files.values()] if isinstance(files, Mapping) else [None]
        texts += [fields["licence"]] if fields["licence"] is not None else []
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("the fields of an origin must be text, and its files text by name")
        check_choice("preset", fields["preset"], tuple(PRESETS))
        return cls(**{**fields, "files": dict(files)})


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A checkpoint in our terms.

    Attributes:
        config: The model.
        weights: One array per canonical name, in the dtype in which it was stored.
        vocabulary: What cuts a line into ids; None if there is none beside the weights.
        search: The search that the checkpoint asks for.
        origin: Where it came from.
        notes: What was decided where the files are contradictory or incomplete: one sentence each.
        part: Which part of the model the weights are of; None if they are of all of it.
        step: Of the training run whose checkpoint it is; None if it is none.
    """

    config: TransformerConfig
    weights: Mapping[str, ndarray]
    vocabulary: Vocabulary | None
    search: Search
    origin: Origin
    notes: tuple[str, ...] = ()
    part: str | None = None
    step: int | None = None


def sha256_of(paths: Iterable[Path], on_bytes: Callable[[int], None] | None = None) -> dict[str, str]:
    """Return the SHA-256 of files by their names.

    Args:
        paths: The files, of different names.
        on_bytes: Called with how many bytes more have been read.

    Raises:
        OSError: A file cannot be read.
    """
    found = {}
    for path in paths:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
                if on_bytes:
                    on_bytes(len(block))
        found[path.name] = digest.hexdigest()
    return found
