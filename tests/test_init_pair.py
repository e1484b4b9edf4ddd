"""`parity init-pair`: the template runs and agrees in every framework, and bugs in it are found at the right tap."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import parity
from imports import ROOT
from result_schema import read_document

from transformer_parity.cli.init_pair import FRAMEWORKS
from transformer_parity.cli.main import main

# Each framework is the original of one template and the port of another.
PORTS_AND_ORIGINALS = ("torch", "numpy", "equinox", "mlx", "keras", "jax", "torch")
MODULES = {"keras": "tensorflow"}
BACKENDS = {"torch": "torch", "jax": "jax", "equinox": "jax", "keras": "tf"}


def pairs():
    """Return the frameworks of six templates, with the marks of their tests."""
    found = []
    for port, original in pairwise(PORTS_AND_ORIGINALS):
        names = [MODULES.get(name, name) for name in (port, original)]
        marks = [pytest.mark.needs(importlib.util.find_spec(name), name) for name in names]
        backend = next(BACKENDS[name] for name in (original, port) if name in BACKENDS)
        slow = [pytest.mark.extended("pair templates")] * (backend != "torch")
        found.append(pytest.param(f"{original},{port}", marks=[pytest.mark.only(backend), *marks, *slow]))
    return found


def compare(capsys, *options):
    """Run `parity pair my_pair.py`, and return the exit code, the report, and the JSON result."""
    code, out, _ = parity(capsys, "pair", "my_pair.py", "--json", "result.json", *options)
    return code, out, read_document(Path("result.json"), "pair")


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("frameworks", pairs())
def test_template_agrees(frameworks, directory, capsys):
    code, out, _ = parity(capsys, "init-pair", "--framework", frameworks)
    assert (code, out.splitlines()[1]) == (0, "  parity pair my_pair.py")
    code, report, result = compare(capsys)
    assert code == 0, report
    taps = {"embed", "norm", *(f"blocks.{i}.{name}" for i in range(2) for name in ("attention", "mlp"))}
    assert {tensor["tap"] for tensor in result["result"]["tensors"]} == taps | {"logits"}
    assert not re.search("NOTE|constant", report) or "mlx" in frameworks


BUGS = {
    "epsilon": ("+ EPSILON)", "+ 1e-6)", "blocks.0.attention"),
    "name": ('f"{name}.norm2"', 'f"{name}.norm1"', "blocks.0.mlp"),
    "last norm": ('self.norm("norm", x)', 'self.norm("norm", x) / 1.01', "norm"),
    "last bias": ('return self.linear("head"', 'return 1.01 * self.linear("head"', "logits"),
    "padding": ("mask[:, None] & ", "", "blocks.0.attention"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_bug_in_the_template_is_located(bug, directory, capsys):
    main(["init-pair", "--framework", "numpy"])
    before, after, tap = BUGS[bug]
    start, model, rest = (directory / "my_pair.py").read_text().partition("class PortModel")
    assert before in rest
    (directory / "my_pair.py").write_text(start + model + rest.replace(before, after))
    code, report, result = compare(capsys, "--seeds", "2")
    assert code == 1
    assert f"STARTS AT {tap}\n" in report
    assert result["introduced"][0] == tap


def test_port_with_different_tap_names_agrees(directory, capsys):
    main(["init-pair", "--framework", "numpy"])
    start, model, rest = (directory / "my_pair.py").read_text().partition("class PortModel")
    rest = rest.replace('f"{name}.mlp"', 'f"layers.{name[7:]}.ffn"')
    rest = rest.replace("names: dict = {}", 'names = {"blocks.{i}.mlp": "layers.{i}.ffn"}')
    (directory / "my_pair.py").write_text(start + model + rest)
    code, report, result = compare(capsys, "--seeds", "1")
    assert code == 0, report
    assert result["result"]["names"]["blocks.1.mlp"] == "layers.1.ffn"


@pytest.mark.parametrize("of_port", FRAMEWORKS)
@pytest.mark.parametrize("of_original", FRAMEWORKS)
def test_every_template_is_complete(of_original, of_port, directory):
    assert main(["init-pair", "--framework", f"{of_original},{of_port}", "--out", "bert_pair.py"]) == 0
    text = (directory / "bert_pair.py").read_text()
    compile(text, "bert_pair.py", "exec")
    assert not re.search("[Rr]ole|templates|my_pair", text)
    for name in ("Original", "Port"):
        assert text.count(f"class {name}(Implementation):") == 1
    assert text.count("    def load(self, weights, dtype):") == 2
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "the following arguments are required: --framework; `parity init-pair --help` has examples"),
        ("--framework torhc,jax", "unknown 'torhc'; choose from numpy, torch, jax, keras, mlx, equinox"),
        ("--framework torch,", "unknown ''; choose from"),
        ("--framework torch,jax,mlx", "must be one or two frameworks, such as torch,jax: got torch,jax,mlx"),
        ("--framework torch --out my-pair.py", "such as my_pair.py: got my-pair.py"),
        ("--framework torch --out keras.py", "--out keras.py would hide the module keras from all code"),
        ("--framework torch --out mine.py", "mine.py already exists; choose a different name with --out"),
    ],
)
def test_invalid_options_are_rejected(options, message, directory, capsys):
    (directory / "mine.py").write_text("mine")
    code, _, error = parity(capsys, "init-pair", *options.split())
    assert code == 3
    assert message in error
    assert [path.name for path in directory.iterdir()] == ["mine.py"]
    assert (directory / "mine.py").read_text() == "mine"


def test_program_of_the_guide_writes_files_that_agree(directory, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(directory))
    main(["init-pair", "--framework", "numpy"])
    assert parity(capsys, "pair", "my_pair.py", "--out", "truth")[1].endswith("\nwrote truth\n")
    page = (ROOT / "docs" / "how-to" / "compare-files.md").read_text("utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    exec(compile(program, "compare-files.md", "exec"), {})
    del sys.modules["my_pair"]
    (directory / "names.toml").write_text(re.search(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[1])
    code, report, _ = parity(capsys, "compare", "truth", "mine", "--json", "result.json")
    assert code == 0, report
    assert re.search(r"^AGREE .* comparisons; the largest error is ", page, re.MULTILINE)[0] in report
    read_document(directory / "result.json", "compare")
    code, report, _ = parity(capsys, "compare", "truth", "mine", "--names", "names.toml")
    assert (code, "the port has no such tap" in report) == (1, True)


def test_isolated_interpreter_needs_only_numpy():
    """An interpreter that `parity pair --isolate` starts may lack the packages that the command line needs."""
    code = "import sys\nsys.modules |= dict.fromkeys(('rich', 'psutil', 'jinja2', 'matplotlib'))\n"
    code += "from transformer_parity.pair import Implementation\nimport transformer_parity.pairs.run.worker"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
