"""Render formulas with KaTeX, which is included in ``docs/_static/katex``. ``site.js`` calls KaTeX in the browser."""

from __future__ import annotations

from html import escape
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx


def inline(writer: Any, node: nodes.math) -> None:
    """Write the LaTeX source of an inline formula. If scripts are disabled, readers see this source."""
    writer.body.append(f'<span class="math">{escape(node.astext())}</span>')
    raise nodes.SkipNode


def displayed(writer: Any, node: nodes.math_block) -> None:
    """Write the LaTeX source of a displayed formula."""
    writer.body.append(f'<div class="math" data-display>{escape(node.astext())}</div>')
    raise nodes.SkipNode


def add_katex(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: nodes.document | None) -> None:
    """Load KaTeX only on pages that contain formulas."""
    if tree is not None and (next(tree.findall(nodes.math), None) or next(tree.findall(nodes.math_block), None)):
        app.add_css_file("katex/katex.min.css")
        app.add_js_file("katex/katex.min.js", loading_method="defer")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the KaTeX renderer."""
    app.add_html_math_renderer("katex", inline_renderers=(inline, None), block_renderers=(displayed, None))
    app.connect("html-page-context", add_katex)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
