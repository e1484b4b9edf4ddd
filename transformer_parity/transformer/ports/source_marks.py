"""Token-by-token differences between a port's code and the reference's code, for ``parity source`` and the site.

The comparison ignores comments, annotations, and layout. The forward method has a different name in each framework. The
comparison treats these names as equal.
"""

from __future__ import annotations

import ast
import io
import itertools
import tokenize
from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from typing import NamedTuple

from transformer_parity.transformer.ports.source_code import FORWARD

LAYOUT = {tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.COMMENT}
MOVED = 4  # minimum length, in tokens, of a sequence that is matched even if it has moved within its function


class Token(NamedTuple):
    """A token and its position in the code.

    Attributes:
        text: Text of the token.
        start: Index of the token's first character in the code.
        stop: Index of the first character after the token.
        owner: Class or function that contains the token; methods are written as ``Class.method``.
    """

    text: str
    start: int
    stop: int
    owner: str


class Marks(NamedTuple):
    """Marked tokens of a piece of code.

    In a port's code, a token is marked if the reference's code doesn't contain it. In the reference's code, a token is
    marked if the code of at least one port doesn't contain it.

    Attributes:
        spans: Character ranges of the marked tokens. Adjacent tokens on a line are merged.
        different: Number of marked tokens.
        missing: Number of tokens in the reference's code without a match in this piece of code.
        total: Number of tokens in this piece of code.
    """

    spans: list[tuple[int, int]]
    different: int
    missing: int
    total: int


def compare(codes: Mapping[str, str], base: str) -> dict[str, Marks]:
    """Compare each piece of code with the piece named ``base``, and mark the tokens that differ.

    The piece named ``base`` is compared with all other pieces.
    """
    reference = tokens(codes[base])
    found, lacking = {}, set()
    for name, code in codes.items():
        ours = tokens(code)
        same = _matched(reference, ours) if name != base else {i: i for i in range(len(ours))}
        missing = set(range(len(reference))) - set(same)
        different = set(range(len(ours))) - set(same.values())
        lacking |= missing
        found[name] = Marks(list(_spans(code, ours, different)), len(different), len(missing), len(ours))
    spans = list(_spans(codes[base], reference, lacking))
    return {**found, base: Marks(spans, len(lacking), 0, len(reference))}


def note(marks: Marks, *, is_base: bool = False) -> str:
    """Return a phrase with the number of tokens and the number of differences."""
    if is_base:
        return f"{marks.total} tokens" + f", {marks.different} not in all ports" * bool(marks.different)
    counts = {"added": marks.different, "missing": marks.missing}
    return f"{marks.total} tokens, {', '.join(f'{n} {what}' for what, n in counts.items() if n) or 'the same'}"


def tokens(code: str) -> list[Token]:
    """Return the tokens of Python code, without the tokens that the comparison ignores."""
    tree, lines = ast.parse(code), code.splitlines(keepends=True)
    starts = [0, *itertools.accumulate(map(len, lines))]
    owners = list(_owners(tree))
    unread = [
        range(*(starts[row - 1] + len(lines[row - 1].encode()[:at].decode()) for row, at in ends))
        for ends in _annotations(tree)  # column offsets are in bytes
    ]
    found = []
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        start, stop = (starts[row - 1] + column if row <= len(lines) else len(code) for row, column in token[2:4])
        if token.type not in LAYOUT and token.string != "->" and not any(start in span for span in unread):
            owner = [name for name, span in owners if token.start[0] in span]
            found.append(Token(token.string, start, stop, owner[-1] if owner else ""))
    return found


def _owners(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, range]]:
    """Yield the name and the line range of each class and function. Classes come before their methods."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = prefix + _one_name(node.name)
            yield name, range(min(part.lineno for part in (node, *node.decorator_list)), (node.end_lineno or 0) + 1)
            if isinstance(node, ast.ClassDef):
                yield from _owners(node, f"{name}.")


def _annotations(tree: ast.AST) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield the start and end position of each annotation, including the preceding colon."""
    for node in ast.walk(tree):
        annotation = getattr(node, "annotation", None) or getattr(node, "returns", None)
        if annotation is None:
            continue
        start = annotation.lineno, annotation.col_offset
        if isinstance(node, ast.arg):
            start = node.lineno, node.col_offset + len(node.arg.encode())
        elif isinstance(node, ast.AnnAssign):
            start = node.target.end_lineno or 0, node.target.end_col_offset or 0
        yield start, (annotation.end_lineno, annotation.end_col_offset)


def _one_name(text: str) -> str:
    return FORWARD[0] if text in FORWARD else text


def _matched(reference: list[Token], ours: list[Token]) -> dict[int, int]:
    """Match the reference's tokens with a port's tokens, and return a dict from reference indices to port indices.

    Two tokens match only if they are in the same class or function.
    """
    found: dict[int, int] = {}
    for owner in dict.fromkeys(token.owner for token in reference):
        theirs_here = [i for i, token in enumerate(reference) if token.owner == owner]
        ours_here = [i for i, token in enumerate(ours) if token.owner == owner]
        shortest = 1
        # The first iteration matches tokens in order. Later iterations match longer sequences that have moved.
        while True:
            left = [_one_name(reference[i].text) if i not in found else ("theirs", i) for i in theirs_here]
            taken = set(found.values())
            right = [_one_name(ours[i].text) if i not in taken else ("ours", i) for i in ours_here]
            blocks = SequenceMatcher(None, left, right, autojunk=False).get_matching_blocks()
            if not (blocks := [block for block in blocks if block.size >= shortest]):
                break
            for block in blocks:
                at, to = theirs_here[block.a : block.a + block.size], ours_here[block.b : block.b + block.size]
                found |= dict(zip(at, to, strict=True))
            shortest = MOVED
    return found


def _whole_lines(code: str, found: list[Token], marked: set[int]) -> set[int]:
    """Shift marks so that they don't start at the end of a line.

    For example, if ``b`` begins a new line in ``a, b, c``, mark ``b,`` instead of ``, b``. The number of marks stays
    the same.
    """
    chosen = set(marked)
    for first in sorted(marked):
        behind = next(i for i in range(first, len(found) + 1) if i not in marked)
        ends_a_line = first + 1 < len(found) and "\n" in code[found[first].stop : found[first + 1].start]
        if first - 1 not in marked and ends_a_line and behind < len(found) and found[first].text == found[behind].text:
            chosen = chosen - {first} | {behind}
    return chosen


def _spans(code: str, found: list[Token], marked: set[int]) -> Iterator[tuple[int, int]]:
    """Yield the character ranges of the marked tokens.

    Adjacent tokens on a line are merged into one range, which includes any ignored text between them.
    """
    spans: list[tuple[int, int]] = []
    chosen = _whole_lines(code, found, marked)
    for i in sorted(chosen):
        _, start, stop, _ = found[i]
        if i - 1 in chosen and "\n" not in code[spans[-1][1] : start]:
            spans[-1] = spans[-1][0], stop
        else:
            spans.append((start, stop))
    yield from spans
