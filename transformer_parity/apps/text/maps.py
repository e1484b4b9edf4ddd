"""Files of vocabularies, as other software writes them: read as data, bounded in size, and refused if they are odd."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformer_parity.apps.containers.folder import member

MOST_BYTES = 2**26  # of a file; the largest that are published have 33 million

ESCAPES = {"0": "\0", "a": "\a", "b": "\b", "t": "\t", "n": "\n", "v": "\v", "f": "\f", "r": "\r", "e": "\x1b"}
ESCAPES |= {"N": "\x85", "_": "\xa0", "L": "\u2028", "P": "\u2029"}
ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U(00[0-9A-Fa-f]{6})|(.))", re.DOTALL)


def read_files(folder: Path, names: Iterable[str], optional: Iterable[str] = ()) -> dict[str, bytes]:
    """Return files of a folder by name; of the optional ones, those that are there.

    Raises:
        OSError: A file is missing or cannot be read.
        ValueError: A file is too large, or a link that leads out of the folder.
    """
    optional = [name for name in optional if (folder / name).is_file()]
    return {name: read_file(member(folder, name)) for name in (*names, *optional)}


def read_file(path: Path) -> bytes:
    """Return what a file holds.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is missing or too large.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"{path.name} must be at most {MOST_BYTES:,} bytes")
    return content


def read_json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if there is no such file.

    Raises:
        ValueError: The file is no JSON object, or names a field twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise ValueError(f"{twice!r} stands there twice")
        return found

    try:
        content = json.loads(files.get(name, b"{}"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is no JSON that can be used: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{name} must hold an object with named fields: got {type(content).__name__}")
    return content


def read_map(files: Mapping[str, bytes], name: str) -> dict[str, int]:
    """Return the ids of pieces, from ``.json`` or from Marian's ``.yml``.

    Raises:
        KeyError: There is no such file.
        ValueError: It is neither, or the ids are not 0, 1, 2, ... each once.
    """
    content = files[name]
    found = read_json({name: content}, name) if name.endswith(".json") else read_yaml_map(content, name)
    return checked_ids(found, name)


def checked_ids(found: Mapping[str, Any], name: str) -> dict[str, int]:
    """Return the ids of pieces, and refuse those that are not 0, 1, 2, ... each once.

    Raises:
        ValueError: See above.
    """
    pieces: list[str | None] = [None] * len(found)
    for piece, number in found.items():
        if type(number) is not int or number < 0:
            raise ValueError(f"{name}: the id of {piece!r} must be an integer of at least 0: got {number!r}")
        if number >= len(pieces):
            raise ValueError(f"{name}: {len(pieces):,} pieces must have the ids below that: {piece!r} has {number:,}")
        if pieces[number] is not None:
            raise ValueError(f"{name}: {pieces[number]!r} and {piece!r} have the same id {number:,}")
        pieces[number] = piece
    if not pieces:
        raise ValueError(f"{name} holds no piece")
    return dict(found)


def read_yaml_map(content: bytes, name: str) -> dict[str, int]:
    """Return the ids in a ``vocab.yml``: a line ends in a colon and the id, and what stands before is the piece.

    It is not YAML to all readers: pieces such as ``:`` and ``- `` stand there as they are, and one too long for a line
    is written as ``? piece`` with ``: id`` on the next.

    Raises:
        ValueError: A line is something else, or a piece stands there twice.
    """
    try:
        lines = content.decode().split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: {error}") from error
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
            raise ValueError(f"{name}: line {number} must be `piece: id`: got {line[:60]!r}")
        piece = _unquoted(piece)
        if piece in found:
            raise ValueError(f"{name}: {piece!r} stands there twice")
        found[piece] = int(value)
    return found


def _unquoted(piece: str) -> str:
    """Return a piece without the quotes and escapes of YAML."""
    if len(piece) > 1 and piece[0] == piece[-1] == '"':
        return ESCAPE.sub(_unescaped, piece[1:-1])
    if len(piece) > 1 and piece[0] == piece[-1] == "'":
        return piece[1:-1].replace("''", "'")
    return piece


def _unescaped(match: re.Match[str]) -> str:
    *codes, other = match.groups()
    code = next((code for code in codes if code), None)
    return chr(int(code, 16)) if code else ESCAPES.get(other, other)
