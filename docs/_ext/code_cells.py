"""The directive ``code-cell``, which shows the code of a notebook cell and its stored outputs.

The sources of the notebooks are MyST files, which Jupyter can open via Jupytext. ``docs/notebooks/run.py`` executes the
notebooks and writes ``.ipynb`` files with the outputs. The build fails if the code of a cell differs between the MyST
file and the ``.ipynb`` file.
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

DIRECTORY = Path(__file__).parents[1] / "notebooks"


@cache
def code_cells(name: str) -> list[dict[str, Any]]:
    """Return the stored code cells of a notebook.

    Raises:
        ExtensionError: If the notebook has never been executed.
    """
    try:
        stored = json.loads((DIRECTORY / f"{name}.ipynb").read_text("utf-8"))
    except FileNotFoundError:
        raise ExtensionError(f"docs/notebooks/{name}.ipynb doesn't exist: {command(name)}") from None
    return [cell for cell in stored["cells"] if cell["cell_type"] == "code"]


def command(name: str) -> str:
    """Return a hint for error messages that contains the command to execute a notebook."""
    return f"run python docs/notebooks/run.py {name}"


def outputs(name: str, number: int, code: str) -> list[dict[str, Any]]:
    """Return the stored outputs of a code cell, given the notebook and the cell's number, which starts at 0.

    Raises:
        ExtensionError: If the stored cell contains different code.
    """
    cells = code_cells(name)
    if number >= len(cells) or joined(cells[number]["source"]) != code:
        raise ExtensionError(f"code cell {number} of docs/notebooks/{name}.md has changed: {command(name)}")
    return cells[number]["outputs"]


def joined(text: str | list[str]) -> str:
    """Return a text in a notebook as one string. Notebooks can store a text as a list of lines."""
    return text if isinstance(text, str) else "".join(text)


class CodeCell(SphinxDirective):
    """Show a notebook cell and its outputs. The ``alt`` option is the alternative text of the cell's figure."""

    optional_arguments = 1  # the language
    has_content = True
    option_spec: ClassVar[OptionSpec] = {"alt": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        """Return one literal block for the code, and one node for each output."""
        name = Path(self.env.docname).name
        self.env.note_dependency(str(DIRECTORY / f"{name}.ipynb"))
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
            raise self.error("a cell that draws a figure must describe it in words: add :alt: ...")
        alt = escape(self.options["alt"], quote=True)
        image = f'<img alt="{alt}" src="data:image/png;base64,{joined(data["image/png"]).strip()}">'
        return [nodes.raw("", f'<p class="cell-figure">{image}</p>', format="html")]


def block(text: str, language: str, kind: str) -> nodes.literal_block:
    """Return a literal block that contains a text."""
    text = text.rstrip("\n")
    return nodes.literal_block(text, text, language=language, classes=[kind])


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("code-cell", CodeCell)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
