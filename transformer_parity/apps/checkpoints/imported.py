"""The result of an import, which is a model with canonical parameter names and a record of its origin."""

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

BLOCK = 2**22  # number of bytes to hash at a time


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The origin of a model's weights, which is stored in the metadata of the weight file.

    Attributes:
        format: Format of the imported checkpoint, such as ``hf`` or ``marian``.
        family: Name of the model's architecture in that format, such as ``m2m_100``.
        preset: The most similar preset of this project.
        files: Dict from the name of each file that was read to its SHA-256 hash.
        license: License specified in the files, or None if the files do not specify a license.
    """

    format: str
    family: str
    preset: str
    files: Mapping[str, str]
    license: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON-compatible values."""
        return {**dataclasses.asdict(self), "files": dict(self.files)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Origin:
        """Create an origin from the result of ``to_dict``.

        Raises:
            TypeError: If a field has the wrong type.
            ValueError: If a field is missing or unknown.
        """
        if not isinstance(fields, Mapping):
            raise TypeError(f"an origin must be a mapping of field names to values: got {type(fields).__name__}")
        check_fields("fields of an origin", fields, (entry.name for entry in dataclasses.fields(cls)))
        texts = [fields[name] for name in ("format", "family", "preset")]
        files = fields["files"]
        texts += [*files, *files.values()] if isinstance(files, Mapping) else [None]
        texts += [fields["license"]] if fields["license"] is not None else []
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("the fields of an origin must be strings, and files must map strings to strings")
        check_choice("preset", fields["preset"], tuple(PRESETS))
        return cls(**{**fields, "files": dict(files)})


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A checkpoint that has been converted to this project's config, parameter names, and settings.

    Attributes:
        config: Config of the model.
        weights: One array per canonical name, in the dtype used by the checkpoint.
        vocabulary: Vocabulary that converts text to IDs, or None if the checkpoint does not include a vocabulary.
        search: Search settings of the checkpoint.
        origin: Origin of the weights.
        notes: One sentence for each decision that the import had to make because the files are contradictory or
            incomplete.
        part: Part of the model for which the checkpoint contains weights, or None for the entire model.
        step: Training step of a checkpoint, or None for a weight file.
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
    """Return a dict from the name of each file to its SHA-256 hash.

    Args:
        paths: Files with distinct names.
        on_bytes: Function that is called after each block is hashed. Its argument is the size of the block in bytes.

    Raises:
        OSError: If a file cannot be read.
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
