"""Sphinx configuration. ``sphinx-build -W docs build/site`` requires neither a framework nor network access."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "_ext")]


def commit() -> str:
    """Return the hash of the current commit, or an empty string outside of a Git checkout."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=10", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


project = "transformer-parity"
author = "the authors of transformer-parity"
spec = (ROOT / "transformer_spec" / "__init__.py").read_text("utf-8")
release = re.search(r'^__version__ = "(.+)"', spec, re.MULTILINE)[1]
version = f"{release}, commit {commit()}" if commit() else release

extensions = [
    "myst_parser",
    "sphinx.ext.napoleon",
    "autoapi.extension",
    "code_cells",
    "formulas",
    "panes",
    "example_numbers",
    "catalog",
    "facts",
]

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "dollarmath", "fieldlist"]
myst_heading_anchors = 3

html_math_renderer = "katex"

autoapi_dirs = [
    str(ROOT / name)
    for name in ("transformer_spec", "reference_numpy", "transformer_torch", "transformer_jax", "transformer_tf")
]
autoapi_root = "reference/api"
autoapi_options = ["members", "show-module-summary", "undoc-members"]
autoapi_add_toctree_entry = False
autoapi_keep_files = False
autoapi_member_order = "bysource"
autodoc_typehints = "none"
suppress_warnings = ["autoapi.python_import_resolution"]  # annotations use names that autoapi can't resolve
napoleon_use_ivar = True
napoleon_custom_sections = [("Taps", "params_style")]

html_theme = "pydata_sphinx_theme"
html_title = "transformer-parity"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = [("site.js", {"defer": "defer"})]
html_show_sourcelink = False
html_copy_source = False
html_show_search_summary = False  # summaries require fetching pages, which browsers reject for file: URLs
templates_path = ["_templates"]
html_last_updated_fmt = None
html_context = {"default_mode": "auto"}
html_theme_options = {
    "logo": {"text": "transformer-parity"},
    "navbar_end": ["framework-choice", "theme-switcher"],
    "secondary_sidebar_items": ["page-toc"],
    "show_prev_next": True,
    "footer_start": ["version"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
    "show_toc_level": 2,
}
