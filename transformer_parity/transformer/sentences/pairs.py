"""Read sentence pairs from files."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import BinaryIO

from transformer_spec.files import POINTER

Pairs = list[tuple[str, str]]
MIB = 2**20
MOST_BYTES = 16 * MIB  # maximum length of a line in bytes; tokenizing a line takes much more memory than storing it


def read_pairs(source: str | Path | None = None, target: str | Path | None = None) -> Pairs:
    """Return the sentence pairs in two line-aligned UTF-8 files. Pairs with an empty line are omitted.

    Args:
        source: The source file, plain or gzipped; None for the text included in this project.
        target: The target file, plain or gzipped; None for the text included in this project.

    Raises:
        OSError: If a file can't be read.
        ValueError: If a file isn't UTF-8, if the line counts differ, or if there are no pairs.
    """
    shipped = files("transformer_parity") / "data"
    lines = [
        _read_lines(Path(str(path or shipped / name)))
        for path, name in ((source, "parallel.en"), (target, "parallel.de"))
    ]
    if len(lines[0]) != len(lines[1]):
        raise ValueError(f"{source} and {target} must be line-aligned: got {len(lines[0])} and {len(lines[1])} lines")
    pairs = [(a, b) for a, b in zip(*lines, strict=True) if a and b]
    if not pairs:
        raise ValueError(f"{source} and {target} must contain at least one pair of nonempty lines")
    return pairs


def _read_lines(path: Path) -> list[str]:
    with open_text(path) as file:
        return [line.strip() for line in read_lines(file, str(path))]


def open_text(path: Path) -> BinaryIO:
    """Open a text file, plain or gzipped, for ``read_lines``.

    Raises:
        OSError: If the file can't be read.
    """
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]  # GzipFile is compatible


def read_lines(file: BinaryIO, name: str) -> Iterator[str]:
    """Yield the lines of a UTF-8 text. Only newlines separate lines, unlike in ``str.splitlines``.

    Args:
        file: The stream to read.
        name: The name of the file, for error messages.

    Raises:
        ValueError: If a line is too long or is not valid UTF-8, or if the file is damaged or a git-lfs pointer.
    """
    try:
        for number, line in enumerate(iter(partial(file.readline, MOST_BYTES + 1), b""), 1):
            if len(line) > MOST_BYTES:
                raise ValueError(f"line {number} of {name} must be at most {MOST_BYTES / MIB:g} MiB long")
            try:
                text = line.removesuffix(b"\n").removesuffix(b"\r").decode()
            except UnicodeDecodeError as error:
                raise ValueError(f"{name} is not valid UTF-8 in line {number}: {error}") from error
            if number == 1 and line.startswith(POINTER):
                raise ValueError(f"{name} is a git-lfs pointer, not the file; fetch the file with `git lfs pull`")
            yield text
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{name} is not a valid gzip file: {error}") from error
