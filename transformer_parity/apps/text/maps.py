"""Readers for other software's vocabulary files. The readers check the size and the content of each file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformer_parity.apps.containers.directory import member

MOST_BYTES = 2**26  # maximum file size in bytes; the largest published files have 33 million bytes

ESCAPES = {"0": "\0", "a": "\a", "b": "\b", "t": "\t", "n": "\n", "v": "\v", "f": "\f", "r": "\r", "e": "\x1b"}
ESCAPES |= {"N": "\x85", "_": "\xa0", "L": "\u2028", "P": "\u2029"}
ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U(00[0-9A-Fa-f]{6})|(.))", re.DOTALL)


def read_files(directory: Path, names: Iterable[str], optional: Iterable[str] = ()) -> dict[str, bytes]:
    """Return a dict that maps the name of each file to its content. Missing optional files are skipped.

    Raises:
        OSError: If a file is missing or cannot be read.
        ValueError: If a file is too large or is a link to a file outside the directory.
    """
    optional = [name for name in optional if (directory / name).is_file()]
    return {name: read_file(member(directory, name)) for name in (*names, *optional)}


def read_file(path: Path) -> bytes:
    """Return the content of a file.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file does not exist or is too large.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"{path.name} has more than {MOST_BYTES:,} bytes")
    return content


def read_json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty dict if the file does not exist.

    Raises:
        ValueError: If the file does not contain a JSON object, or if a field occurs more than once.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise ValueError(f"duplicate key {twice!r}")
        return found

    try:
        content = json.loads(files.get(name, b"{}"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{name} must contain a JSON object: got {type(content).__name__}")
    return content


def read_map(files: Mapping[str, bytes], name: str) -> dict[str, int]:
    """Return the ID of each piece in a vocabulary file, which is a ``.json`` file or a ``.yml`` file.

    Raises:
        KeyError: If the file does not exist.
        ValueError: If the file is invalid, or if the IDs are not 0, 1, 2, and so on, each exactly once.
    """
    content = files[name]
    found = read_json({name: content}, name) if name.endswith(".json") else read_yaml_map(content, name)
    return checked_ids(found, name)


def checked_ids(found: Mapping[str, Any], name: str) -> dict[str, int]:
    """Check that the IDs of a vocabulary are 0, 1, 2, and so on, each exactly once, and return the ID of each piece.

    Raises:
        ValueError: If an ID is missing, occurs more than once, or is not an integer.
    """
    pieces: list[str | None] = [None] * len(found)
    for piece, number in found.items():
        if type(number) is not int or number < 0:
            raise ValueError(f"the ID of {piece!r} in {name} must be a nonnegative integer: got {number!r}")
        if number >= len(pieces):
            raise ValueError(f"the ID of {piece!r} in {name} must be below {len(pieces):,}: got {number:,}")
        if pieces[number] is not None:
            raise ValueError(f"{name} assigns the ID {number:,} to both {pieces[number]!r} and {piece!r}")
        pieces[number] = piece
    if not pieces:
        raise ValueError(f"{name} contains no pieces")
    return dict(found)


def read_yaml_map(content: bytes, name: str) -> dict[str, int]:
    """Return the IDs in a ``vocab.yml``, in which each line consists of a piece, a colon, and an ID.

    A YAML parser cannot read every such file, because pieces such as ``:`` and ``- `` are not quoted. A piece that is
    too long for one line is written as ``? piece``, with ``: id`` on the next line.

    Raises:
        ValueError: If a line has a different format or a piece occurs more than once.
    """
    try:
        lines = content.decode().split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not valid UTF-8: {error}") from error
    found: dict[str, int] = {}
    pending: str | None = None
    for number, line in enumerate(lines, 1):
        line = line.removesuffix("\r")
        if not line.strip() or (line.startswith(("---", "#")) and ":" not in line):
            continue
        if line.startswith("? "):
            pending = line[2:]
            continue
        piece, _, value = line.rpartition(":")
        if pending is not None:
            piece, pending = pending, None
        if not value.strip().isdecimal() or not piece:
            raise ValueError(f"line {number} of {name} must be `piece: id`: got {line[:60]!r}")
        piece = _unquoted(piece)
        if piece in found:
            raise ValueError(f"duplicate piece {piece!r} in {name}")
        found[piece] = int(value)
    return found


def _unquoted(piece: str) -> str:
    """Remove YAML quotes and escapes from a piece."""
    if len(piece) > 1 and piece[0] == piece[-1] == '"':
        return ESCAPE.sub(_unescaped, piece[1:-1])
    if len(piece) > 1 and piece[0] == piece[-1] == "'":
        return piece[1:-1].replace("''", "'")
    return piece


def _unescaped(match: re.Match[str]) -> str:
    *codes, other = match.groups()
    code = next((code for code in codes if code), None)
    return chr(int(code, 16)) if code else ESCAPES.get(other, other)
