"""Files that are written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reference_numpy.files import replacing
from transformer_parity.system.errors import UsageError


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, whole or not at all.

    Raises:
        OSError: The file cannot be written.
    """
    with replacing(path) as temporary:
        temporary.write_text(text, "utf-8")


def write_json(path: Path, content: Mapping[str, Any] | list[Any]) -> None:
    """Write plain values as JSON, whole or not at all.

    Raises:
        OSError: The file cannot be written.
        ValueError: A number is not finite.
    """
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def check_writable(path: Path | None) -> None:
    """Refuse, before any work, a file that could not be written afterwards; None is no file.

    Raises:
        UsageError: The path is a folder, or lies in a folder that does not exist.
    """
    if path is None:
        return
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent}")
    if path.is_dir():
        raise UsageError(f"{path} is a folder")
