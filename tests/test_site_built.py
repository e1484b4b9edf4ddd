"""The built site: links, sizes, and rendering in a browser.

These tests are ``extended``, and ``.ci/run`` requests them. Without Chromium, the tests that use a browser are skipped
and reported as NOT TESTED.
"""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest
from imports import ROOT

DOCS = ROOT / "docs"
sys.path[:0] = [str(DOCS / "_ext"), str(DOCS / "examples")]

import panes  # noqa: E402  a module of the site

COPIED = (
    *("docs", "benchmarks", "transformer_bench", "transformer_parity", "transformer_spec"),
    *panes.PACKAGES.values(),
)
MOST_BYTES = 250_000  # limit per page, including everything that it loads, gzipped and without fonts
SECONDS = 180  # maximum CPU time of a build; a busy, slow processor takes about 90 seconds
FRAMEWORKS = ("torch", "jax", "flax", "tensorflow", "keras")


# Runs sphinx-build in a process that can't import frameworks or open network connections.
BUILD = f"""
import socket, sys
def refuse(*_): raise OSError("the build must not need a network")
socket.socket.connect = refuse
sys.modules.update(dict.fromkeys({FRAMEWORKS!r}))
from sphinx.cmd.build import main
sys.exit(main(sys.argv[1:]))
"""


# --- The built site ---


class Page(HTMLParser):
    """Collects the links in a page and their possible targets."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids |= {found[name] for name in ("id", "name") if found.get(name)}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if tag in ("script", "img", "iframe", "source") and found.get("src"):
            self.loaded.append(found["src"])
        if tag == "link" and found.get("rel") in ("stylesheet", "preload", "icon", "modulepreload"):
            self.loaded.append(found["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built from a copy of the tree without frameworks, network, or a checkout. Warnings are errors."""
    directory = tmp_path_factory.mktemp("site")
    for name in COPIED:
        shutil.copytree(ROOT / name, directory / "tree" / name, ignore=shutil.ignore_patterns("__pycache__", "api"))
    shutil.copy(ROOT / "pyproject.toml", directory / "tree")
    options = ["-W", "--keep-going", "-q", "-d", str(directory / "doctrees"), str(directory / "tree" / "docs")]
    command = [sys.executable, "-c", BUILD, *options, str(directory / "html")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    before = os.times()
    built = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    after = os.times()
    assert built.returncode == 0, built.stdout + built.stderr
    assert after.children_user + after.children_system - before.children_user - before.children_system < SECONDS
    return directory / "html"


@pytest.fixture(scope="module")
def pages(site):
    found = (path for path in sorted(site.rglob("*.html")) if "_static" not in path.parts)
    return {path: Page(path.read_text("utf-8")) for path in found}


def is_local(link: str) -> bool:
    return not urlsplit(link).scheme and not link.startswith("//")


@pytest.mark.extended("site")
def test_links_and_anchors_have_targets(site, pages):
    lost = []
    for path, page in pages.items():
        for link in filter(is_local, page.links):
            parts = urlsplit(link)
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists() or (
                parts.fragment and target.suffix == ".html" and unquote(parts.fragment) not in pages[target].ids
            ):
                lost.append(f"{path.relative_to(site)}: {link}")
    assert lost == []
    assert len(pages) > 60


@pytest.mark.extended("site")
def test_pages_are_small_and_load_only_files(site, pages):
    for path, page in pages.items():
        loaded = [link for link in page.loaded if not link.startswith("data:")]
        assert all(map(is_local, loaded)), path
        files = {(path.parent / urlsplit(link).path).resolve() for link in loaded}
        weight = sum(len(gzip.compress(file.read_bytes())) for file in {path, *files})
        assert weight <= MOST_BYTES, f"{path.relative_to(site)}: {weight:,} bytes gzipped"


@pytest.mark.extended("site")
def test_package_code_is_not_copied_into_the_documentation():
    copied = sorted(page.name for page in DOCS.rglob("*.md") if "def forward(" in page.read_text("utf-8"))
    own = ["broken-port.md", "check-my-port.md", "compare-two-implementations.md", "quickstart.md"]
    assert copied == own  # the code of ports that the reader writes


SHOWN = (
    "index.html",
    "quickstart.html",
    "paper/index.html",
    "paper/stacks.html",
    "paper/attention.html",
    "paper/positions.html",
    "paper/training.html",
    "paper/search.html",
    "how-to/checkpoints.html",
    "notebooks/tour.html",
    "notebooks/broken-port.html",
    "how-to/import.html",
    "how-to/find-the-bug.html",
    "how-to/train.html",
    "reference/config.html",
    "reference/bugs.html",
    "reference/modules.html",
    "results/conformance.html",
    "results/benchmarks.html",
    "results/relative-speed.html",
    "reference/checkpoint-formats.html",
    "speed.html",
    "agreement.html",
    "reference/attacks.html",
    "why.html",
    "reference/api/transformer_torch/attention/index.html",
)


@pytest.fixture(scope="module")
def chromium(browser):
    """A browser that playwright controls."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=shutil.which(browser), args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def look(chromium, site):
    """A function that opens a page. Network requests and console messages make the test fail at the end."""
    opened, complaints = [], []

    def open_page(name: str, width: int = 1280, theme: str = "light", query: str = ""):
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
        opened.append(context)
        page = context.new_page()
        page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request", lambda asked: None if asked.url.startswith(("file:", "data:")) else complaints.append(asked.url)
        )
        page.goto(f"{(site / name).as_uri()}?{query}")
        return page

    yield open_page
    for context in opened:
        context.close()
    assert complaints == []


@pytest.mark.extended("site")
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_pages_fit_the_screen_width(look, width, theme):
    too_wide = []
    for name in SHOWN:
        page = look(name, width, theme)
        if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
            too_wide.append(name)
        page.close()
    assert too_wide == []


@pytest.mark.extended("site")
@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (1280, "dark"), (400, "dark")])
def test_pages_are_accessible(look, width, theme):
    from axe_playwright_python.sync_playwright import Axe

    found = []
    for name in SHOWN[:: 1 if width == 400 else 2]:
        page = look(name, width, theme)
        for violation in Axe().run(page, options={"preload": False}).response["violations"]:
            if violation["impact"] in ("serious", "critical"):
                targets = [node["target"] for node in violation["nodes"][:3]]
                found.append(f"{name}: {violation['id']} {targets}")
        page.close()
    assert found == []


@pytest.mark.extended("site")
def test_framework_choice_applies_to_the_whole_site(look):
    page = look("paper/attention.html", 400)
    tab = page.locator(".panes-tabs [role=tab][data-framework=jax]").first
    tab.click()
    assert page.evaluate("document.documentElement.dataset.framework") == "jax"
    visible = ".panes:not(.is-single) .pane:not([hidden])"
    assert set(page.locator(visible).evaluate_all("all => all.map(pane => pane.dataset.framework)")) == {"jax"}
    page.reload()
    assert page.locator(visible).first.get_attribute("data-framework") == "jax"
    page.goto(page.url.replace("attention", "stacks"))
    assert page.locator(visible).count() >= 4
    assert set(page.locator(visible).evaluate_all("all => all.map(pane => pane.dataset.framework)")) == {"jax"}
    page.set_viewport_size({"width": 1280, "height": 900})
    page.wait_for_function("document.querySelectorAll('.panes.is-tabbed').length === 0")
    assert page.locator(visible).count() % 4 == 0
    assert page.locator("#framework-choice").first.input_value() == "jax"


@pytest.mark.extended("site")
def test_framework_choice_is_kept_in_links_without_local_storage(look):
    page = look("paper/index.html", 400)
    page.add_init_script(
        "for (const name of ['getItem', 'setItem']) {"
        "  const kept = Storage.prototype[name];"
        "  Storage.prototype[name] = function (key, ...rest) {"
        "    if (key === 'framework') throw new Error('denied');"
        "    return kept.call(this, key, ...rest);"
        "  };"
        "}"
    )
    page.goto(page.url.replace("index", "attention"))
    page.locator(".panes-tabs [role=tab][data-framework=tf]").first.click()
    page.locator("a.right-next").click()
    page.wait_for_url("**/multi-head.html*")
    assert page.evaluate("document.documentElement.dataset.framework") == "tf"


@pytest.mark.extended("site")
def test_tabs_can_be_operated_by_keyboard(look):
    page = look("paper/attention.html", 400)
    page.locator(".panes-tabs [role=tab][aria-selected=true]").first.focus()
    keys = {"ArrowRight": "jax", "End": "tf", "ArrowLeft": "jax", "Home": "numpy"}
    for key, expected in keys.items():
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.dataset.framework") == expected
        assert page.evaluate("document.activeElement.getAttribute('aria-selected')") == "true"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('role')") == "tabpanel"
    assert page.evaluate("document.activeElement.dataset.framework") == "numpy"


@pytest.mark.extended("site")
def test_panes_form_a_two_by_two_grid_and_long_lines_wrap(look):
    page = look("paper/attention.html")
    place = "pane => [pane.getBoundingClientRect().left, pane.getBoundingClientRect().top].map(Math.round)"
    boxes = page.locator(".panes").first.locator(".pane").evaluate_all(f"all => all.map({place})")
    assert len({left for left, _ in boxes}) == len({top for _, top in boxes}) == 2
    cut = "all => all.filter(pre => pre.scrollWidth > pre.clientWidth).length"
    assert page.locator(".pane pre").evaluate_all(cut) == 0
    assert look("paper/attention.html", 400).locator(".pane:not([hidden]) pre").evaluate_all(cut) == 0


@pytest.mark.extended("site")
def test_formulas_are_rendered(look):
    page = look("paper/attention.html")
    assert page.locator(".math .katex").count() == page.locator(".math").count() > 2


@pytest.mark.extended("site")
def test_bug_entry_shows_the_code_of_the_chosen_framework(look):
    page = look("paper/attention.html")
    page.get_by_text("scores not scaled").click()
    assert page.locator("details[open] .only.torch ins").first.is_visible()
    page.locator("#framework-choice").first.select_option("jax")
    assert page.locator("details[open] .only.jax ins").first.is_visible()
    assert not page.locator("details[open] .only.torch ins").first.is_visible()


@pytest.mark.extended("site")
def test_search_page_finds_softmax(look):
    page = look("search.html", query="q=softmax")
    page.get_by_text("Search finished").wait_for(timeout=30_000)
    assert any("Scaled dot-product attention" in found for found in page.locator("ul.search li").all_text_contents())
