"""The files of a folder: plain names, regular files, nothing that lies elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformer_spec.files import check_fetched

MIB = 2**20


def member(folder: Path, name: str) -> Path:
    """Return the path of a file in a folder, which has to be there.

    A link may lead to another file of the folder, or to one that the cache of Hugging Face's hub keeps for it.

    Args:
        folder: The folder.
        name: A plain name, as some other file may have given it.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The name leads out of the folder, or to what is no regular file, or to a pointer of git-lfs.
    """
    if not name or name in (".", "..") or not name.isprintable() or any(one in name for one in "/\\:"):
        raise ValueError(f"the name of a file must be plain, without a folder: got {name!r}")
    path = folder / name
    if not path.is_symlink() and not path.exists():
        raise FileNotFoundError(f"there is no file {name} in {folder}")
    home, real = folder.resolve(), path.resolve()
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if real.parent not in homes:
        raise ValueError(f"{path} is a link that leads out of its folder, to {real}")
    if not real.is_file():
        raise ValueError(f"{path} must be a regular file")
    check_fetched(path)
    return path


def has(folder: Path, name: str) -> bool:
    """Return whether a folder holds something of this name."""
    return (folder / name).exists() or (folder / name).is_symlink()


def read_bytes(path: Path, most: int = 64 * MIB) -> bytes:
    """Return a file's bytes, of which there may be ``most``.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is larger, or git-lfs has not fetched it.
    """
    check_fetched(path)
    if (size := path.stat().st_size) > most:
        raise ValueError(f"{path.name} may have at most {most / MIB:g} MiB: got {size / MIB:.1f}")
    return path.read_bytes()


def read_json(path: Path, most: int = 16 * MIB) -> dict[str, Any]:
    """Return the object that a file in JSON holds.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is too large, is not JSON, or holds something else.
    """
    try:
        content = json.loads(read_bytes(path, most))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} must hold an object: got {type(content).__name__}")
    return content
