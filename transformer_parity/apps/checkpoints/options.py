"""What a checkpoint does not say about itself, and a user has to."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """What is asked for where a format needs it; a reader leaves alone what is not its own.

    Attributes:
        vocab: Files of the vocabulary, source first; one for both sides, or none.
        names: A TOML file with a table of names, for tensors that were named by their user.
        fields: Fields of the config that the format leaves to the program that reads it, such as ``num_heads``.
    """

    vocab: tuple[Path, ...] = ()
    names: Path | None = None
    fields: dict[str, object] = field(default_factory=dict)
