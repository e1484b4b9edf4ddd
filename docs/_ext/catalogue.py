"""What the site says from the packages themselves: known mistakes, and comments that say why something is not used.

::

    ```{mistakes} attention, fused kernels
    :only: scores|softmax
    ```

    ```{side-note} jax scaled_dot_product_attention is not used
    ```

A part of the catalogue, a mistake or a comment that is gone fails the build.
"""

from __future__ import annotations

import re
from functools import cache
from html import escape
from typing import ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from panes import PACKAGES, ROOT, TITLES, packages
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import OptionSpec

from transformer_parity.engine.findings import DIVERGES
from transformer_parity.transformer.mistakes import catalogue
from transformer_parity.transformer.mistakes.mistake import Mistake


def chosen(part_names: str, only: str = "", without: str = "") -> list[Mistake]:
    """Return the mistakes of some parts of the catalogue whose names match, each name once.

    Raises:
        ExtensionError: There is no such part, or nothing matches.
    """
    known = catalogue.parts()
    named = [part.strip() for part in part_names.split(",")]
    if unknown := [part for part in named if part not in known]:
        raise ExtensionError(f"mistakes: the catalogue has no part {', '.join(unknown)}: it has {', '.join(known)}")
    found = {mistake.name: mistake for part in reversed(named) for mistake in reversed(known[part])}
    kept = [
        mistake
        for mistake in reversed(found.values())
        if re.search(only, mistake.name) and not (without and re.search(without, mistake.name))
    ]
    if not kept:
        raise ExtensionError(f"mistakes: nothing in {part_names} matches {only!r}")
    return kept


def shown_at(mistake: Mistake) -> str:
    """Return where and how a mistake shows."""
    if mistake.verdict == "failed" or not mistake.at:
        return f"Shows as {escape(mistake.announced) if mistake.announced else 'an exception'}."
    how = "differs" if mistake.verdict == DIVERGES else "is less precise than it has to be"
    taps = " The taps are right: only the fast path is wrong." if mistake.path == "fast" else ""
    return f"First place that {how}: <code>{escape(mistake.at)}</code>.{taps}"


@cache
def reports() -> dict[str, str]:
    """Return the links to the threads in which mistakes were reported, as HTML, by the name of the mistake."""
    page = (ROOT / "docs" / "reported-mistakes.md").read_text("utf-8")
    found = {}
    for name, threads in re.findall(r"^\| [^|]*\| (.+?) \| (\[.+?) \| (?:yes|no)", page, re.MULTILINE):
        links = re.findall(r"\[(.+?)\]\((.+?)\)", threads)
        found[name] = ", ".join(f'<a href="{escape(url, quote=True)}">{escape(title)}</a>' for title, url in links)
    return found


def edit(backend: str, mistake: Mistake) -> str:
    """Return what changes in a package, as lines that go and lines that come."""
    package = PACKAGES[backend]
    changes = ""
    for module, old, new in mistake.edits[backend]:
        before, after = whole_lines((ROOT / package / f"{module}.py").read_text("utf-8"), old, new)
        changes += f'<p class="file">{package}/{module}.py</p>'
        changes += f"<pre><del>{prefixed('- ', before)}</del><ins>{prefixed('+ ', after)}</ins></pre>"
    return f'<div class="only {backend}"><div class="edit">{changes}</div></div>' if changes else ""


def whole_lines(text: str, old: str, new: str) -> tuple[str, str]:
    """Return the lines that hold a piece of text, before and after it is replaced, without their common indent."""
    start = text.index(old)
    first = text.rfind("\n", 0, start) + 1
    last = text.find("\n", start + len(old))
    lines = text[first : last if last >= 0 else len(text)]
    indent = len(lines) - len(lines.lstrip())
    both = (lines, text[first:start] + new + text[start + len(old) : first + len(lines)])
    before, after = ("\n".join(line.removeprefix(" " * indent) for line in part.split("\n")) for part in both)
    return before, after


def prefixed(prefix: str, text: str) -> str:
    """Return text as HTML with a sign before each line."""
    return "\n".join(prefix + escape(line) for line in text.split("\n"))


def entry(mistake: Mistake) -> str:
    """Return one mistake, folded: where it shows, and the code that makes it in the framework of choice."""
    made = "".join(edit(backend, mistake) for backend in PACKAGES if backend in mistake.edits)
    if mistake.config:
        fields = ", ".join(f"{name}={value!r}" for name, value in mistake.config.items())
        made = f"<p class='where'>The port computes with <code>{escape(fields)}</code>.</p>"
    elif not made:
        made = "<p class='where'>The weights are converted wrongly.</p>"
    elif absent := [TITLES[backend] for backend in PACKAGES if not mistake.edits.get(backend)]:
        made += f"<p class='where'>Not planted in {', '.join(absent)}.</p>"
    seen = f'<p class="where">Reported in {reports()[mistake.name]}.</p>' if mistake.name in reports() else ""
    where = f'<p class="where">{shown_at(mistake)}</p>{seen}'
    return f"<details><summary>{escape(mistake.name)}</summary>{where}{made}</details>"


class Mistakes(SphinxDirective):
    """List the known mistakes of some parts of the catalogue."""

    required_arguments = 1
    final_argument_whitespace = True
    option_spec: ClassVar[OptionSpec] = {"only": directives.unchanged, "without": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        """Return the list."""
        found = chosen(self.arguments[0], self.options.get("only", ""), self.options.get("without", ""))
        for path in (ROOT / "transformer_parity" / "transformer" / "mistakes").glob("*.py"):
            self.env.note_dependency(str(path))
        self.env.note_dependency(str(ROOT / "docs" / "reported-mistakes.md"))
        html = "".join(map(entry, found))
        return [nodes.raw("", f'<div class="mistakes">{html}</div>', format="html")]


class Catalogue(SphinxDirective):
    """List the names of all mistakes, by part, for the search and for an overview."""

    def run(self) -> list[nodes.Node]:
        """Return a table for each part."""
        parts = catalogue.parts()
        text = []
        for name, mistakes in parts.items():
            text += [f"## {name[0].upper()}{name[1:]}", "", "| mistake | first shows at | in |", "|---|---|---|"]
            for mistake in {mistake.name: mistake for mistake in mistakes}.values():
                at = f"`{mistake.at}`" if mistake.at else mistake.announced or "an exception"
                planted = [TITLES[backend] for backend in PACKAGES if backend in mistake.edits]
                text.append(f"| {mistake.name.replace('|', '/')} | {at} | {', '.join(planted)} |")
            text.append("")
        return self.parse_text_to_nodes("\n".join(text), allow_section_headings=True)


def comment(code: str, phrase: str) -> str | None:
    """Return the whole comment that holds a phrase, as one line; None where there is none."""
    block: list[str] = []
    for line in [*code.split("\n"), ""]:
        before, found, text = line.partition("#")
        if found and not before.strip():
            block.append(text.strip())
            continue
        if phrase in (whole := " ".join(block)):
            return whole
        block = []
        if found and phrase in text:
            return text.strip()
    return None


class SideNote(SphinxDirective):
    """Show a comment of a package: why something of the framework's own is not used."""

    required_arguments = 3
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Return the note."""
        backend, name, phrase = self.arguments
        piece = packages()[backend].find(name)
        found = comment(piece.code, phrase) if piece else None
        if piece is None or found is None:
            raise ExtensionError(f"side-note: no comment with {phrase!r} in {name} of {PACKAGES[backend]}")
        place = f'<span class="pane-place">{escape(piece.place)}</span>'
        html = f"<p><strong>{TITLES[backend]}</strong> {place}</p><p>{escape(found)}</p>"
        label = f"A comment in {PACKAGES[backend]}, {name}"
        note = f'<aside class="side-note" data-framework="{backend}" aria-label="{label}">{html}</aside>'
        return [nodes.raw("", note, format="html")]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives."""
    app.add_directive("mistakes", Mistakes)
    app.add_directive("catalogue", Catalogue)
    app.add_directive("side-note", SideNote)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
