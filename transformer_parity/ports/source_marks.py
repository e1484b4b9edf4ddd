"""Where a piece of code differs from the reference's, token by token; used by ``parity source`` and by the site."""

from __future__ import annotations

import io
import itertools
import tokenize
from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import NamedTuple

LAYOUT = {tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


class Token(NamedTuple):
    """A token, and where it stands in the code."""

    text: str
    start: int
    stop: int


class Marks(NamedTuple):
    """The tokens of a piece of code that the reference does not have there."""

    spans: list[tuple[int, int]]  # of characters; neighbours on one line are one span
    different: int  # tokens
    total: int  # tokens


def tokens(code: str) -> list[Token]:
    """Return the tokens of a piece of Python, without those of its layout."""
    starts = [0, *itertools.accumulate(len(line) for line in code.splitlines(keepends=True))]
    found = tokenize.generate_tokens(io.StringIO(code).readline)
    return [
        Token(token.string, starts[token.start[0] - 1] + token.start[1], starts[token.end[0] - 1] + token.end[1])
        for token in found
        if token.type not in LAYOUT
    ]


def differences(code: str, reference: str) -> Marks:
    """Return which tokens of the code the reference does not have in this order."""
    ours, theirs = tokens(code), tokens(reference)
    matcher = SequenceMatcher(None, [token.text for token in theirs], [token.text for token in ours], autojunk=False)
    changed = [
        token for tag, _, _, first, last in matcher.get_opcodes() if tag != "equal" for token in ours[first:last]
    ]
    return Marks(list(_joined(code, changed)), len(changed), len(ours))


def note(marks: Marks) -> str:
    """Return a phrase: how much of the code differs."""
    if not marks.different:
        return f"the same {marks.total} tokens"
    return f"{marks.different} of {marks.total} tokens differ"


def _joined(code: str, changed: list[Token]) -> Iterator[tuple[int, int]]:
    """Yield the spans of tokens; those with nothing but blanks between them are one."""
    spans: list[tuple[int, int]] = []
    for _, start, stop in changed:
        if spans and code[spans[-1][1] : start].strip(" ") == "":
            spans[-1] = spans[-1][0], stop
        else:
            spans.append((start, stop))
    yield from spans
