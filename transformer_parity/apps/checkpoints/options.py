"""Options with which the user provides information that a checkpoint's files do not contain."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """The user's options for reading a checkpoint. Each reader uses only the options that its format supports.

    Attributes:
        vocab: Vocabulary files, source first. If there is only one file, it is used for both the source and the target.
            Empty if there is no vocabulary.
        names: TOML file that maps canonical names to the user's tensor names, or None.
        fields: Config fields that the format does not store, such as ``num_heads``.
    """

    vocab: tuple[Path, ...] = ()
    names: Path | None = None
    fields: dict[str, object] = field(default_factory=dict)
