"""Information about a checkpoint that its files do not contain and that the user must provide."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Options of the user for reading a checkpoint. Each reader only uses the options that its format supports.

    Attributes:
        vocab: Vocabulary files, source first. One file is used for both sides. Empty if there is no vocabulary.
        names: TOML file that maps canonical names to the user's tensor names, or None.
        fields: Config fields that the format does not store, such as ``num_heads``.
    """

    vocab: tuple[Path, ...] = ()
    names: Path | None = None
    fields: dict[str, object] = field(default_factory=dict)
