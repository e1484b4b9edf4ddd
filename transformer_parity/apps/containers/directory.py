"""Access files in a directory, and reject names and links that lead outside the directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformer_spec.files import check_fetched

MIB = 2**20


def member(directory: Path, name: str) -> Path:
    """Return the path of an existing file in a directory.

    The file may be a link to a file in the same directory or in the Hugging Face Hub cache.

    Args:
        directory: Directory that must contain the file.
        name: Name of the file. The name may come from an untrusted source.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If the path is outside the directory, is not a regular file, or is a Git LFS pointer.
    """
    if not name or name in (".", "..") or not name.isprintable() or any(one in name for one in "/\\:"):
        raise ValueError(f"file names must not contain a directory or drive: got {name!r}")
    path = directory / name
    if not path.is_symlink() and not path.exists():
        raise FileNotFoundError(f"there is no file {name} in {directory}")
    home, real = directory.resolve(), path.resolve()
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if real.parent not in homes:
        raise ValueError(f"{path} must not be a link to a file outside its directory: got {real}")
    if not real.is_file():
        raise ValueError(f"{path} must be a regular file")
    check_fetched(path)
    return path


def has(directory: Path, name: str) -> bool:
    """Return whether a directory contains an entry with this name, including broken links."""
    return (directory / name).exists() or (directory / name).is_symlink()


def read_bytes(path: Path, most: int = 64 * MIB) -> bytes:
    """Return the content of a file that has at most ``most`` bytes.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file has more than ``most`` bytes or is a Git LFS pointer.
    """
    check_fetched(path)
    if (size := path.stat().st_size) > most:
        raise ValueError(f"{path.name} must have at most {most / MIB:g} MiB: got {size / MIB:.1f} MiB")
    return path.read_bytes()


def read_json(path: Path, most: int = 16 * MIB) -> dict[str, Any]:
    """Return the content of a JSON file, which must be an object and have at most ``most`` bytes.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is too large, is not valid JSON, or does not contain an object.
    """
    try:
        content = json.loads(read_bytes(path, most))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} must contain a JSON object: got {type(content).__name__}")
    return content
