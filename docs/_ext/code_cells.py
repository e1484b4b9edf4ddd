"""The directive ``code-cell``: the code of a notebook, and what it printed and drew when it was executed.

The notebooks are MyST sources that Jupyter opens through Jupytext. Their outputs are those of the ``.ipynb`` beside
them, which ``docs/notebooks/run.py`` writes. A cell whose stored code is another one fails the build.
"""

from __future__ import annotations

import json
from functools import cache
from html import escape
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import OptionSpec

FOLDER = Path(__file__).parents[1] / "notebooks"


@cache
def code_cells(name: str) -> list[dict[str, Any]]:
    """Return the stored code cells of a notebook.

    Raises:
        ExtensionError: It has never been executed.
    """
    try:
        stored = json.loads((FOLDER / f"{name}.ipynb").read_text("utf-8"))
    except FileNotFoundError:
        raise ExtensionError(f"docs/notebooks/{name}.ipynb is not there: {command(name)}") from None
    return [cell for cell in stored["cells"] if cell["cell_type"] == "code"]


def command(name: str) -> str:
    """Return a clause with the command that executes a notebook."""
    return f"run python docs/notebooks/run.py {name}"


def outputs(name: str, number: int, code: str) -> list[dict[str, Any]]:
    """Return the stored outputs of the cell of a number, counted from 0.

    Raises:
        ExtensionError: What is stored was computed by other code.
    """
    cells = code_cells(name)
    if number >= len(cells) or joined(cells[number]["source"]) != code:
        raise ExtensionError(f"code cell {number} of docs/notebooks/{name}.md has changed: {command(name)}")
    return cells[number]["outputs"]


def joined(text: str | list[str]) -> str:
    """Return a text that a notebook may hold in lines."""
    return text if isinstance(text, str) else "".join(text)


class CodeCell(SphinxDirective):
    """Show a cell of a notebook and its outputs; the option ``alt`` says in words what its figure shows."""

    optional_arguments = 1  # the language
    has_content = True
    option_spec: ClassVar[OptionSpec] = {"alt": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        """Return the code, then each output."""
        name = Path(self.env.docname).name
        self.env.note_dependency(str(FOLDER / f"{name}.ipynb"))
        code = "\n".join(self.content)
        found = outputs(name, self.env.new_serialno("code-cell"), code)
        return [block(code, "python", "cell"), *(shown for output in found for shown in self._show(output))]

    def _show(self, output: dict[str, Any]) -> list[nodes.Node]:
        if output["output_type"] == "stream":
            return [block(joined(output["text"]), "text", "cell-output")]
        data = output["data"]
        if "image/png" not in data:
            return [block(joined(data["text/plain"]), "text", "cell-output")]
        if "alt" not in self.options:
            raise self.error("a cell that draws must say in words what is drawn: :alt: ...")
        alt = escape(self.options["alt"], quote=True)
        image = f'<img alt="{alt}" src="data:image/png;base64,{joined(data["image/png"]).strip()}">'
        return [nodes.raw("", f'<p class="cell-figure">{image}</p>', format="html")]


def block(text: str, language: str, kind: str) -> nodes.literal_block:
    """Return a text as it stands."""
    text = text.rstrip("\n")
    return nodes.literal_block(text, text, language=language, classes=[kind])


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("code-cell", CodeCell)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
