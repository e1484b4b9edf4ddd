"""The directive ``four-panes``, which shows one definition from all four packages.

::

    ```{four-panes} MultiHeadAttention.forward
    ```

The directive reads the code from the packages when Sphinx builds the site. It marks the tokens of each port that don't
occur in the NumPy reference, and the tokens of the reference that are missing from at least one port. The build fails
if a package has no definition with the given name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from html import escape
from pathlib import Path
from typing import ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from pygments.lexers import PythonLexer
from pygments.token import STANDARD_TYPES
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import OptionSpec

from transformer_parity.transformer.ports.source_code import Piece, SourcePackage
from transformer_parity.transformer.ports.source_marks import compare, note

ROOT = Path(__file__).parents[2]
PACKAGES = {"numpy": "reference_numpy", "torch": "transformer_torch", "jax": "transformer_jax", "tf": "transformer_tf"}
TITLES = {"numpy": "NumPy", "torch": "PyTorch", "jax": "JAX", "tf": "TensorFlow"}


# Matches comments for mypy and ruff, which the site doesn't show. An explanation after such a comment remains visible.
TO_TOOLS = re.compile(r"\s*# (?:type: ignore\S*|noqa\S*(?: [A-Z]+\d+)?)(?: +(?=[^\s#])|(?=\s|$))")
BREAKS_BEHIND, BREAKS_BEFORE = (
    ("(", "[", "{", ",", "="),
    (".",),
)  # characters where a line may wrap


@cache
def packages() -> dict[str, SourcePackage]:
    """Return the source code of the four packages, which is parsed once per build."""
    return {backend: SourcePackage(name) for backend, name in PACKAGES.items()}


@cache
def specification() -> SourcePackage:
    """Return the source code of ``transformer_spec``, whose public names the four packages re-export."""
    return SourcePackage("transformer_spec")


def pieces(name: str, backends: Sequence[str] = tuple(PACKAGES), *, docstrings: bool = False) -> dict[str, Piece]:
    """Return the definition of a name in each of the given packages.

    Raises:
        ExtensionError: If a package has no definition with this name.
    """
    found = {
        backend: package.find(name, docstrings) or specification().find(name, docstrings)
        for backend, package in packages().items()
        if backend in backends
    }
    if absent := [PACKAGES[backend] for backend, piece in found.items() if piece is None]:
        raise ExtensionError(f"four-panes: there is no {name!r} in {', '.join(absent)}")
    return {
        backend: replace(piece, code=to_readers(piece.code)) for backend, piece in found.items() if piece is not None
    }


def to_readers(code: str) -> str:
    """Return code without comments for mypy and ruff."""
    return TO_TOOLS.sub(lambda found: "  # " if found[0].endswith(" ") else "", code)


def highlighted(code: str, spans: list[tuple[int, int]]) -> str:
    """Return code as HTML with one element per line, the CSS classes of Pygments, and ``<mark>`` around the spans."""
    marked = [False] * len(code)
    for start, stop in spans:
        marked[start:stop] = [True] * (stop - start)
    lines, inside = [""], False
    for start, kind, text in PythonLexer(stripnl=False, ensurenl=False).get_tokens_unprocessed(code):
        position = start
        for character_run, mark in _runs(text, marked[position : position + len(text)]):
            if mark != inside:
                lines[-1] += "<mark>" if mark else "</mark>"
                inside = mark
            for number, part in enumerate(character_run.split("\n")):
                if number:
                    lines[-1] += "</mark>" * inside
                    lines.append("<mark>" * inside)
                if part:
                    css = STANDARD_TYPES.get(kind, "")
                    lines[-1] += "<wbr>" * part.startswith(BREAKS_BEFORE)
                    lines[-1] += f'<span class="{css}">{escape(part)}</span>' if css else escape(part)
                    lines[-1] += "<wbr>" * part.endswith(BREAKS_BEHIND)
    lines[-1] += "</mark>" * inside
    indents = [len(line) - len(line.lstrip()) for line in code.split("\n")]
    return "".join(
        f'<span class="line" style="--indent:{indent}">{line}\n</span>'
        for line, indent in zip(lines, indents, strict=True)
    )


def _runs(text: str, marked: list[bool]) -> list[tuple[str, bool]]:
    """Split the text of a token into the longest runs of characters that are all marked or all unmarked."""
    runs: list[tuple[str, bool]] = []
    for character, mark in zip(text, marked, strict=True):
        if runs and runs[-1][1] == mark:
            runs[-1] = runs[-1][0] + character, mark
        else:
            runs.append((character, mark))
    return runs


def panes(name: str, found: dict[str, Piece], serial: int) -> str:
    """Return one pane per package as HTML. If scripts are disabled, the panes appear one below the other."""
    base = next(iter(found))
    marked = compare({backend: piece.code for backend, piece in found.items()}, base)
    tabs, panels = [], []
    for backend, piece in found.items():
        marks, how = marked[backend], note(marked[backend], is_base=backend == base)
        panel = f"panes-{serial}-{backend}"
        tabs.append(
            f'<button type="button" role="tab" id="{panel}-tab" aria-controls="{panel}" aria-selected="false" '
            f'tabindex="-1" data-framework="{backend}">{TITLES[backend]}</button>'
        )
        panels.append(
            f'<section class="pane" id="{panel}" data-framework="{backend}" aria-labelledby="{panel}-title">'
            f'<p class="pane-title" id="{panel}-title"><strong>{TITLES[backend]}</strong> '
            f'<span class="pane-place">{escape(piece.place)}</span> '
            f'<span class="pane-note">{how}</span></p>'
            f'<div class="highlight"><pre>{highlighted(piece.code, marks.spans)}</pre></div></section>'
        )
    label = escape(f"{name} in {', '.join(TITLES[backend] for backend in found)}", quote=True)
    single = " is-single" if len(found) == 1 else ""
    return (
        f'<div class="panes{single}" role="group" aria-label="{label}">'
        f'<div class="panes-tabs" role="tablist" aria-label="Framework" hidden>{"".join(tabs)}</div>'
        f'<div class="panes-body">{"".join(panels)}</div></div>'
    )


class FourPanes(SphinxDirective):
    """Show the definition of a name in each package."""

    required_arguments = 1
    option_spec: ClassVar[OptionSpec] = {"docstrings": directives.flag, "only": str.split}

    def run(self) -> list[nodes.Node]:
        """Return a caption, which the site's search can find, and the panes."""
        (name,) = self.arguments
        found = pieces(name, self.options.get("only", tuple(PACKAGES)), docstrings="docstrings" in self.options)
        for piece in found.values():
            self.env.note_dependency(str(ROOT / piece.place.partition(":")[0]))
        caption = nodes.paragraph("", "", nodes.literal(name, name), classes=["panes-caption"])
        if summary := next(iter(found.values())).summary:
            parsed, _ = self.parse_inline(summary.replace("``", "`"), lineno=self.lineno)
            caption += [nodes.Text(": "), *parsed]
        serial = self.env.new_serialno("panes")
        return [caption, nodes.raw("", panes(name, found, serial), format="html")]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("four-panes", FourPanes)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
