"""Directives that show bugs from the bug catalog, and comments from the packages.

::

    ```{bugs} attention, fused kernels
    :only: scores|softmax
    ```

    ```{side-note} jax scaled_dot_product_attention is not used
    ```

The build fails if the part of the catalog, the bug, or the comment doesn't exist.
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
from transformer_parity.transformer.bugs import catalog
from transformer_parity.transformer.bugs.bug import Bug


def chosen(part_names: str, only: str = "", without: str = "") -> list[Bug]:
    """Return the bugs in the given parts of the catalog whose names match the regular expressions, each name once.

    Args:
        part_names: Names of the parts, separated by commas.
        only: Regular expression that the names must match.
        without: Regular expression that the names must not match. An empty string excludes no bugs.

    Raises:
        ExtensionError: If a part doesn't exist or no bug matches.
    """
    known = catalog.parts()
    named = [part.strip() for part in part_names.split(",")]
    if unknown := [part for part in named if part not in known]:
        raise ExtensionError(f"bugs: unknown parts {', '.join(unknown)}: choose from {', '.join(known)}")
    found = {bug.name: bug for part in reversed(named) for bug in reversed(known[part])}
    kept = [
        bug
        for bug in reversed(found.values())
        if re.search(only, bug.name) and not (without and re.search(without, bug.name))
    ]
    if not kept:
        raise ExtensionError(f"bugs: no bug in {part_names} matches {only!r}")
    return kept


def shown_at(bug: Bug) -> str:
    """Return a sentence with the first value that a bug changes, as HTML."""
    if bug.verdict == "failed" or not bug.at:
        return f"Reported as: {escape(bug.announced)}." if bug.announced else "Raises an exception."
    how = "differs" if bug.verdict == DIVERGES else "loses precision"
    taps = " The taps are correct; only the fast path is wrong." if bug.path == "fast" else ""
    return f"First value that {how}: <code>{escape(bug.at)}</code>.{taps}"


@cache
def reports() -> dict[str, str]:
    """Return HTML links to the threads in which users reported each bug. The keys are the names of the bugs."""
    page = (ROOT / "docs" / "reported-bugs.md").read_text("utf-8")
    found: dict[str, str] = {}
    for name, threads in re.findall(r"^\| [^|]*\| (.+?) \| (\[.+?) \| (?:yes|no)", page, re.MULTILINE):
        links = re.findall(r"\[(.+?)\]\((.+?)\)", threads)
        linked = ", ".join(f'<a href="{escape(url, quote=True)}">{escape(title)}</a>' for title, url in links)
        found |= dict.fromkeys(name.split("; "), linked)
    return found


def edit(backend: str, bug: Bug) -> str:
    """Return the code change that injects a bug into a package, as HTML with removed and added lines."""
    package = PACKAGES[backend]
    changes = ""
    for module, old, new in bug.edits[backend]:
        before, after = whole_lines((ROOT / package / f"{module}.py").read_text("utf-8"), old, new)
        changes += f'<p class="file">{package}/{module}.py</p>'
        changes += f"<pre><del>{prefixed('- ', before)}</del><ins>{prefixed('+ ', after)}</ins></pre>"
    return f'<div class="only {backend}"><div class="edit">{changes}</div></div>' if changes else ""


def whole_lines(text: str, old: str, new: str) -> tuple[str, str]:
    """Return the complete lines that a replacement changes, before and after the replacement, without indentation."""
    start = text.index(old)
    first = text.rfind("\n", 0, start) + 1
    last = text.find("\n", start + len(old))
    lines = text[first : last if last >= 0 else len(text)]
    indent = len(lines) - len(lines.lstrip())
    both = (lines, text[first:start] + new + text[start + len(old) : first + len(lines)])
    before, after = ("\n".join(line.removeprefix(" " * indent) for line in part.split("\n")) for part in both)
    return before, after


def prefixed(prefix: str, text: str) -> str:
    """Return text as HTML, and insert a prefix at the start of each line."""
    return "\n".join(prefix + escape(line) for line in text.split("\n"))


def entry(bug: Bug) -> str:
    """Return a collapsed HTML element with the first value that a bug changes and its code change in each package."""
    made = "".join(edit(backend, bug) for backend in PACKAGES if backend in bug.edits)
    if bug.config:
        fields = ", ".join(f"{name}={value!r}" for name, value in bug.config.items())
        made = f"<p class='where'>The port uses <code>{escape(fields)}</code>.</p>"
    elif not made:
        made = "<p class='where'>The weights are converted incorrectly.</p>"
    elif absent := [TITLES[backend] for backend in PACKAGES if not bug.edits.get(backend)]:
        made += f"<p class='where'>Not injected into {', '.join(absent)}.</p>"
    seen = f'<p class="where">Reported in {reports()[bug.name]}.</p>' if bug.name in reports() else ""
    where = f'<p class="where">{shown_at(bug)}</p>{seen}'
    return f"<details><summary>{escape(bug.name)}</summary>{where}{made}</details>"


class Bugs(SphinxDirective):
    """List the bugs in the given parts of the catalog."""

    required_arguments = 1
    final_argument_whitespace = True
    option_spec: ClassVar[OptionSpec] = {"only": directives.unchanged, "without": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        """Return the list."""
        found = chosen(self.arguments[0], self.options.get("only", ""), self.options.get("without", ""))
        for path in (ROOT / "transformer_parity" / "transformer" / "bugs").glob("*.py"):
            self.env.note_dependency(str(path))
        self.env.note_dependency(str(ROOT / "docs" / "reported-bugs.md"))
        html = "".join(map(entry, found))
        return [nodes.raw("", f'<div class="bugs">{html}</div>', format="html")]


class Catalog(SphinxDirective):
    """List the names of all bugs, grouped by part. The site's search can find these names."""

    def run(self) -> list[nodes.Node]:
        """Return one table per part of the catalog."""
        parts = catalog.parts()
        text = []
        for name, bugs in parts.items():
            text += [
                f"## {name[0].upper()}{name[1:]}",
                "",
                "| bug | first difference | injected into |",
                "|---|---|---|",
            ]
            for bug in {bug.name: bug for bug in bugs}.values():
                at = f"`{bug.at}`" if bug.at else bug.announced or "an exception"
                injected = [TITLES[backend] for backend in PACKAGES if backend in bug.edits]
                text.append(f"| {bug.name.replace('|', '/')} | {at} | {', '.join(injected)} |")
            text.append("")
        return self.parse_text_to_nodes("\n".join(text), allow_section_headings=True)


def comment(code: str, phrase: str) -> str | None:
    """Return the complete comment that contains a phrase, joined into one line, or None if no comment contains it."""
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
    """Show a comment from a package, for example the reason why a framework function is not used."""

    required_arguments = 3
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Return the note."""
        backend, name, phrase = self.arguments
        piece = packages()[backend].find(name)
        found = comment(piece.code, phrase) if piece else None
        if piece is None or found is None:
            raise ExtensionError(f"side-note: {name} in {PACKAGES[backend]} has no comment that contains {phrase!r}")
        place = f'<span class="pane-place">{escape(piece.place)}</span>'
        html = f"<p><strong>{TITLES[backend]}</strong> {place}</p><p>{escape(found)}</p>"
        label = f"A comment in {PACKAGES[backend]}, {name}"
        note = f'<aside class="side-note" data-framework="{backend}" aria-label="{label}">{html}</aside>'
        return [nodes.raw("", note, format="html")]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives."""
    app.add_directive("bugs", Bugs)
    app.add_directive("catalog", Catalog)
    app.add_directive("side-note", SideNote)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
