"""Create the explorer page, a self-contained HTML file that doesn't load any other files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from transformer_parity.engine.localization import FINE, INHERITED, INTRODUCED
from transformer_parity.engine.report.matrix import number
from transformer_parity.engine.style import BACKENDS, page_colors
from transformer_parity.engine.system.files import write_text

View = Mapping[str, Any]
TEMPLATES = files("transformer_parity.engine.report") / "templates"
WORDS = {INTRODUCED: "introduced here", INHERITED: "inherited", FINE: "within tolerance"}


def write_page(path: Path, view: View, about: Sequence[str]) -> None:
    """Write the page to a file atomically.

    Args:
        path: The path of the file.
        view: The content of the page, as returned by ``view.view``.
        about: Sentences that describe the run.

    Raises:
        OSError: If the file can't be written.
    """
    write_text(path, page(view, about))


def page(view: View, about: Sequence[str]) -> str:
    """Return the HTML code of the page."""
    return environment().get_template("page.html").render(view=view, about=about, **parts([view]))


def environment(package: str = "transformer_parity.engine.report") -> Environment:
    """Return a Jinja environment that loads the templates of a package and the templates of the explorer."""
    return Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader("transformer_parity.engine.report")]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )


def parts(views: Sequence[View]) -> dict[str, Any]:
    """Return the variables that a template needs to show the given views with ``explorer.html``."""
    return {
        "colors": Markup(page_colors()),
        "explorer_style": Markup((TEMPLATES / "explorer.css").read_text("utf-8")),
        "explorer_script": Markup((TEMPLATES / "explorer.js").read_text("utf-8")),
        "explorers": [_explorer(view) for view in views],
    }


def _explorer(view: View) -> dict[str, Any]:
    scale = Scale.of(view)
    colors = [name if name in BACKENDS else "other" for name in view["ports"]]
    content = _script({**view, "data": ""})
    return {"view": view, "scale": scale, "ladder": ladder(view, scale), "colors": colors, "json": content}


def _script(content: Mapping[str, Any]) -> Markup:
    """Return content as JSON that is safe to embed in a ``<script>`` element."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace("&", "\\u0026"))


@dataclass(frozen=True)
class Scale:
    """A logarithmic scale for errors, from ``10**low`` to ``10**high``."""

    low: int
    high: int

    @classmethod
    def of(cls, view: View) -> Scale:
        """Return the shortest scale that covers all errors and tolerances on the page, except 0, infinity, and NaN."""
        entries = [port for tap in view["taps"] for port in tap["ports"] if port is not None]
        numbers = [float(entry[key]) for entry in entries for key in ("error", "tolerance")]
        exponents = [math.log10(value) for value in numbers if 0.0 < value < math.inf]
        return cls(math.floor(min(exponents, default=-16.0)), math.ceil(max(exponents, default=0.0)))

    def __call__(self, value: float | str) -> float:
        """Return a value's position on the scale as a percentage: 0 for zero, and 100 for infinity and NaN."""
        number = float(value)
        if not number < math.inf:
            return 100.0
        share = (math.log10(number) - self.low) / max(self.high - self.low, 1) if number else 0.0
        return round(4 + 92 * share, 1) if number else 0.0


def ladder(view: View, scale: Scale) -> list[dict[str, Any]]:
    """Return the taps in the order of computation, grouped by block, with the positions of their errors."""
    blocks: list[dict[str, Any]] = []
    for index, tap in enumerate(view["taps"]):
        block, _, name = tap["name"].rpartition(".")
        if not blocks or blocks[-1]["name"] != (block or "model"):
            blocks.append({"name": block or "model", "taps": []})
        blocks[-1]["taps"].append({"index": index, "name": name, **_step(view["ports"], tap["ports"], scale)})
    return blocks


def _step(names: Sequence[str], entries: Sequence[View | None], scale: Scale) -> dict[str, Any]:
    """Return the data that the list of taps shows for one tap."""
    shown = {name: entry for name, entry in zip(names, entries, strict=True) if entry is not None}
    verdicts = {name: entry["verdict"] for name, entry in shown.items()}
    worst = next((verdict for verdict in (INTRODUCED, INHERITED) if verdict in verdicts.values()), "")
    introduced = [name for name, verdict in verdicts.items() if verdict == INTRODUCED]
    says = [f"{name} {number(entry['error'])} {WORDS[entry['verdict']]}" for name, entry in shown.items()]
    return {
        "worst": worst,
        "word": WORDS[worst] + (f": {', '.join(introduced)}" if introduced and len(shown) > 1 else "") if worst else "",
        "dots": [(i, scale(entry["error"])) for i, entry in enumerate(entries) if entry is not None],
        "tick": scale(max(float(entry["tolerance"]) for entry in shown.values())) if shown else None,
        "says": "; ".join(says) or "not reported by any port",
    }
