"""The notebooks' stored outputs match their current sources and are reproduced by executing them.

Executing them is ``extended``. Each notebook is one test, in the reader's order, with a fresh kernel in an empty
directory.
"""

from __future__ import annotations

import base64
import io
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import jupytext
import numpy as np
import pytest
from sphinx.errors import ExtensionError

ROOT = Path(__file__).parents[1]
DIRECTORY = ROOT / "docs" / "notebooks"
sys.path.insert(0, str(ROOT / "docs" / "_ext"))

import code_cells  # noqa: E402  a module of the site

NEEDS = {"tour": "all", "one-attention": "all", "broken-port": "torch", "train-and-change": "jax tf"}  # reading order
NAMES = list(NEEDS)
SECONDS = 180  # maximum CPU time per notebook, including imports and compilation
MOST_BYTES = 70_000  # maximum size of the figures on a page; other limits apply to the rest of the page
FENCE = re.compile(r"^```\{code-cell\} ipython3\n((?::\w+: [^\n]*\n)*)\n?(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?")


def source(name: str) -> tuple[list[str], list[str]]:
    """Return the text and the code cells of a source file, which alternate."""
    _, _, body = (DIRECTORY / f"{name}.md").read_text("utf-8").split("---\n", 2)
    *pieces, last = re.split(FENCE, body)
    return [*pieces[::3], last], [code.rstrip("\n") for code in pieces[2::3]]


def stored(path: Path, kind: str) -> list[dict]:
    return [cell for cell in json.loads(path.read_text("utf-8"))["cells"] if cell["cell_type"] == kind]


def outputs(path: Path) -> list[dict]:
    return [output for cell in stored(path, "code") for output in cell["outputs"]]


def pictures(path: Path) -> list[bytes]:
    found = [output.get("data", {}).get("image/png") for output in outputs(path)]
    return [base64.b64decode(code_cells.joined(picture)) for picture in found if picture]


def said(path: Path) -> str:
    found = [output.get("text") or output["data"]["text/plain"] for output in outputs(path)]
    return "\n".join(map(code_cells.joined, found))


def differences(kept: str, again: str) -> list[str]:
    """Return the differences between two texts, except in whitespace and in numbers that differ only by rounding."""
    words = [NUMBER.sub("#", text).split() for text in (kept, again)]
    if words[0] != words[1]:
        return [f"{ours!r} is now {theirs!r}" for ours, theirs in zip(*words, strict=False) if ours != theirs] or [
            f"{len(words[0])} words are now {len(words[1])}"
        ]
    numbers = [[float(found.replace(",", "")) for found in NUMBER.findall(text)] for text in (kept, again)]
    return [
        f"{ours} is now {theirs}"
        for ours, theirs in zip(*numbers, strict=True)
        if not math.isclose(ours, theirs, rel_tol=1e-4, abs_tol=1e-6)
    ]


# --- Stored outputs ---


def test_every_notebook_is_listed():
    assert {path.stem for path in DIRECTORY.glob("*.ipynb")} == set(NAMES)
    assert {path.stem for path in DIRECTORY.glob("*.md")} == {*NAMES, "index"}
    index = (DIRECTORY / "index.md").read_text("utf-8")
    assert re.findall(r"^([\w-]+)$", index.partition("{toctree}")[2], re.MULTILINE) == NAMES
    assert re.findall(r"\{download\}`([\w-]+)\.ipynb`", index) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_source_is_valid_for_jupytext(name):
    """Options of code cells, such as alternative texts, must be valid YAML."""
    cells = jupytext.read(DIRECTORY / f"{name}.md").cells
    assert [cell.source for cell in cells if cell.cell_type == "code"] == source(name)[1]


@pytest.mark.parametrize("name", NAMES)
def test_stored_notebook_matches_its_source(name):
    prose, code = source(name)
    path = DIRECTORY / f"{name}.ipynb"
    assert [code_cells.joined(cell["source"]) for cell in stored(path, "code")] == code
    kept = "\n".join(code_cells.joined(cell["source"]) for cell in stored(path, "markdown"))
    assert kept.split() == "\n".join(prose).split()


@pytest.mark.parametrize("name", NAMES)
def test_cells_were_executed_in_order_without_errors(name):
    path = DIRECTORY / f"{name}.ipynb"
    cells = stored(path, "code")
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert all(output["output_type"] != "error" and output.get("name") != "stderr" for output in outputs(path))
    assert all(len(code_cells.joined(cell["source"]).splitlines()) <= 30 for cell in cells)
    assert sum(map(len, pictures(path))) <= MOST_BYTES


@pytest.mark.parametrize("name", NAMES)
def test_notebook_has_a_title_figures_and_next_steps(name):
    prose, code = source(name)
    assert re.findall(r"^# .+$", "".join(prose), re.MULTILINE) == re.findall(r"\A\s*(# .+)$", prose[0], re.MULTILINE)
    assert re.findall(r"^## (.+)$", "".join(prose), re.MULTILINE)[-1] == "What to try next"
    assert len(re.findall(r"^- ", prose[-1], re.MULTILINE)) >= 3
    assert prose[0].strip() != ""
    assert code
    assert pictures(DIRECTORY / f"{name}.ipynb")


def test_site_rejects_outputs_of_outdated_code():
    _, code = source("tour")
    assert code_cells.outputs("tour", 0, code[0]) == stored(DIRECTORY / "tour.ipynb", "code")[0]["outputs"]
    with pytest.raises(ExtensionError, match=r"code cell 0 of docs/notebooks/tour.md has changed: run python docs/"):
        code_cells.outputs("tour", 0, code[0] + " ")
    with pytest.raises(ExtensionError, match=f"code cell {len(code)} of"):
        code_cells.outputs("tour", len(code), code[0])
    with pytest.raises(ExtensionError, match=r"nothing.ipynb doesn't exist: run python docs/notebooks/run.py nothing"):
        code_cells.outputs("nothing", 0, "")


def test_texts_are_compared_by_words_and_numbers():
    kept = "JAX  1,200 of 2.5000 (1.3e-16)\nright"
    assert differences(kept, kept) == []
    assert differences(kept, "JAX 1,200 of 2.50001 (0e+00) right") == []
    assert differences(kept, kept.replace("2.5000", "2.501")) == ["2.5 is now 2.501"]
    assert differences(kept, kept.replace("1.3e-16", "1.3e-05")) == ["1.3e-16 is now 1.3e-05"]
    assert differences(kept, kept.replace("right", "wrong")) == ["'right' is now 'wrong'"]
    assert differences(kept, kept + " more") == ["6 words are now 7"]


# --- Execution ---


def pixels(picture: bytes) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(picture)).convert("RGB"), float) / 255


def executed(name: str) -> list[pytest.MarkDecorator]:
    frameworks = ("torch", "jax", "tf") if NEEDS[name] == "all" else tuple(NEEDS[name].split())
    return [pytest.mark.extended("notebooks"), pytest.mark.only(*frameworks)]


@pytest.mark.parametrize("name", [pytest.param(name, marks=executed(name)) for name in NAMES])
def test_executed_notebook_reproduces_stored_outputs(name, tmp_path):
    # Disable the test suite's JAX compilation cache, which a reader doesn't have.
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_", "PYTEST_"))}
    before = os.times()
    command = [sys.executable, DIRECTORY / "run.py", name, "--out", tmp_path]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    after = os.times()
    assert ran.returncode == 0, ran.stderr
    assert after.children_user + after.children_system - before.children_user - before.children_system < SECONDS
    kept, again = DIRECTORY / f"{name}.ipynb", tmp_path / f"{name}.ipynb"
    assert differences(said(kept), said(again)) == []
    drawn = [list(map(pixels, pictures(path))) for path in (kept, again)]
    for ours, theirs in zip(*drawn, strict=True):
        assert ours.shape == theirs.shape
        assert np.abs(ours - theirs).mean() < 1e-3
