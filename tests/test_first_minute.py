"""A new user's first steps: `parity` without arguments, without frameworks, and `parity info` on a weight file."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
from conftest import parity, random_weights, tiny_config

import reference_numpy as ref
from transformer_parity.apps.checkpoints.imported import Imported, Origin
from transformer_parity.apps.checkpoints.importer import save
from transformer_parity.apps.text.dates import SHIPPED
from transformer_parity.cli.main import COMMANDS, make_parser
from transformer_parity.cli.options import NUMPY_ALONE
from transformer_parity.engine.system import machine
from transformer_parity.transformer.ports.registry import PORTS
from transformer_spec.search import Search

DATE = "Freitag, 3. Mai 2024"


@pytest.fixture
def only(monkeypatch):
    """Return a function that makes only the given frameworks appear to be installed."""
    real = importlib.util.find_spec

    def install(*names):
        absent = {module for name, port in PORTS.items() for module in port.needs if name not in names}
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else real(name))

    return install


def commands(text):
    """Return the arguments of each `parity` command line in a text."""
    found = re.findall(r"^ +parity (.*?)(?:  .*)?$", text, re.MULTILINE)
    return [shlex.split(line) for line in found]


def test_command_without_arguments_suggests_first_commands(capsys):
    code, out, err = parity(capsys)
    assert (code, err) == (0, "")
    start = commands(out)
    assert [words[0] for words in start] == ["translate", "explore", "source", "check", "init-port"]
    assert {words[0] for words in start} <= COMMANDS.keys()
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_the_line_width_and_shows_an_example(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    code, out, _ = parity(capsys, name, "--help")
    assert code == 0
    assert [line for line in out.splitlines() if len(line) > 120] == []
    if name != "show":  # show has subcommands
        assert f"  parity {name}" in out  # an example


@pytest.mark.parametrize(
    "name", ["golden", "compare", "explore", "init-pair", "init-port", "pair", "evaluate", "bench"]
)
def test_missing_arguments_error_refers_to_the_examples(name, capsys):
    code, _, err = parity(capsys, name)
    assert code == 3
    assert re.search(rf"parity {name}: error: .* required: .*; `parity {name} --help` has examples\n$", err)


def options(parser):
    """Yield every option of a command and its subcommands, with the name of the command."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from options(below)
        else:
            yield parser.prog, action


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_description(name):
    found = list(options(make_parser(name)))
    assert len(found) > 3
    bare = [
        f"{command} {action.option_strings or action.dest}"
        for command, action in found
        if not re.sub(r"[(;,]? ?default.*", "", action.help or "").strip()
    ]
    assert bare == []


def test_suggested_commands_run_without_a_framework(capsys, only, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    only()
    lines = commands("\n".join(NUMPY_ALONE))
    assert len(lines) == 3
    for words in lines:
        code, out, _ = parity(capsys, *words)
        assert code == 0
        assert out.startswith("2024-05-03\n") == (words[0] == "translate")
    assert Path("explore.html").stat().st_size > 10_000


@pytest.mark.parametrize(
    "command",
    [
        "check --backends torch",
        "check --device gpu",  # NumPy has no GPU support
        "selftest",
        "bench forward --backends jax",
        "bench train --backends tf",
        "translate --text x --compare",
        "translate --text x --backend torch",
        f"evaluate {SHIPPED} --task dates --backend tf",
        "train --task dates --backend jax",
        "explore x --backends torch",
        "import . --backends jax",
    ],
)
def test_missing_framework_error_suggests_a_package_and_numpy_commands(capsys, only, command):
    only()
    code, out, err = parity(capsys, *command.split())
    assert (code, out) == (3, "")
    first, *below = err.splitlines()
    assert re.search(r"error: .* not installed; run pip install 'transformer-parity\[cli,[a-z,]+\]'$", first)
    assert tuple(below) == NUMPY_ALONE


@pytest.mark.parametrize(
    ("there", "command", "choice"),
    [
        ([], "check", "numpy"),
        (["torch"], "check", "numpy,torch"),
        (["torch", "tf"], "check", "numpy,torch,tf"),
        ([], "bench forward", "numpy"),
        (["jax"], "translate --text x --compare", "numpy,jax"),
        (["jax"], "translate --text x --backend torch", "jax"),
        (["jax", "tf"], "check --backends torch", "jax"),
    ],
)
def test_missing_framework_error_lists_installed_backends(capsys, only, there, command, choice):
    only(*there)
    code, _, err = parity(capsys, *command.split())
    assert code == 3
    assert err.endswith(f", or specify --backends {choice}\n")


def test_all_missing_frameworks_are_listed_at_once(capsys, only):
    only()
    err = parity(capsys, "check")[2]
    needed = "torch, jax, and tensorflow are not installed; run pip install 'transformer-parity[cli,torch,jax,tf]'"
    assert err == f"parity check: error: {needed}, or specify --backends numpy\n"


@pytest.mark.parametrize(("there", "used"), [([], "numpy"), (["tf"], "tf"), (["torch", "jax"], "torch")])
def test_default_backend_is_an_installed_backend(capsys, only, monkeypatch, there, used):
    only(*there)
    loaded = []
    monkeypatch.setattr(type(PORTS["numpy"]), "load", lambda port, *_: loaded.append(port.name) or _stop())
    code, _, err = parity(capsys, "translate", "--text", DATE)
    assert (code, loaded) == (3, [used])
    note = "parity translate: no framework is installed, so the slower backend numpy is used\n"
    assert (note in err, "slower" in err) == ((True, True) if used == "numpy" else (False, False))


def _stop():
    raise RuntimeError("far enough")


def test_weight_file_is_described_by_info(capsys):
    code, out, err = parity(capsys, "info", SHIPPED)
    assert (code, err) == (0, "")
    words = " ".join(out.split())
    for part in ("(2.9 MB) family this project preset paper_base", "670,848 parameters in float32", "search greedy"):
        assert part in words
    assert "step" not in words
    found = json.loads(parity(capsys, "info", SHIPPED, "--json")[1])["result"]
    assert found["config"] == ref.load_weights(SHIPPED)[0].to_dict()
    assert found["vocabulary"] == {"kind": "joint", "sizes": [89, 89], "source_languages": [], "target_languages": []}
    assert (found["parameters"], found["dtypes"], found["part"], found["step"]) == (670_848, ["float32"], None, None)
    assert found["bytes"] == Path(SHIPPED).stat().st_size


def test_info_shows_the_origin_of_an_imported_model(capsys, tmp_path):
    config = tiny_config(norm_order="pre", final_norm=True)
    origin = Origin(format="hf", family="marian\x1b[31m", preset="paper_base", files={"a.bin": "12ab"}, license="MIT")
    search = Search(beam_size=6, max_length=512)
    model = Imported(config=config, weights=random_weights(config), vocabulary=None, search=search, origin=origin)
    save(tmp_path / "a", model, "float16")
    words = " ".join(parity(capsys, "info", tmp_path / "a")[1].split())
    for part in (
        "family marian\N{REPLACEMENT CHARACTER}[31m (a Hugging Face directory with config.json) preset paper_base",
        "norm_order pre instead of post",
        "parameters in float16",
        "vocabulary none search beam 6, length penalty 0.6 (gnmt), at most 512 tokens license MIT",
        "from a.bin, SHA-256 12ab",
    ):
        assert part in words
    assert json.loads(parity(capsys, "info", tmp_path / "a", "--json")[1])["result"]["origin"] == origin.to_dict()


def test_info_shows_the_closest_preset(capsys, tmp_path):
    sizes = {"source_vocab_size": 9, "target_vocab_size": 9, "d_model": 8, "num_heads": 2, "d_ff": 8}
    for preset in ("marian", "fairseq", "paper_big"):
        config = ref.TransformerConfig.preset(preset, **{**sizes, "d_k": 4, "d_v": 4})
        ref.save_weights(tmp_path / "a", config, ref.init_weights(config, seed=0))
        found = json.loads(parity(capsys, "info", tmp_path / "a", "--json")[1])["result"]
        # paper_big differs from paper_base only in its sizes.
        assert found["preset"] == {"paper_big": "paper_base"}.get(preset, preset)
        assert found["differences"] == {}


def test_info_rejects_invalid_weight_files(capsys, tmp_path):
    (tmp_path / "a.pt").write_bytes(b"PK")
    for path, said in (
        (tmp_path / "none", f"there is no weight file {tmp_path / 'none'}"),
        (
            tmp_path,
            f"{tmp_path} is a directory; specify a weight file in it, or use `parity import {tmp_path}` for a "
            "checkpoint from other software",
        ),
        (tmp_path / "a.pt", f"{tmp_path / 'a.pt'} is not a usable weight file: "),
    ):
        code, out, err = parity(capsys, "info", path)
        assert (code, out) == (3, "")
        assert err.startswith(f"parity info: error: {said}")
        assert err.count("\n") == 1
    said = "--vocab and --names cannot be combined with FILE; remove either FILE or --vocab and --names"
    assert parity(capsys, "info", SHIPPED, "--vocab", "9", "--names")[2] == f"parity info: error: {said}\n"


@pytest.mark.parametrize(
    ("text", "name"),
    {
        "model name\t: A Processor\nflags\t: fpu avx2 avx512f amx_tile\n": "A Processor (AVX2, AVX-512, AMX)",
        "model name\t: A Processor\nflags\t: fpu sse2\n": "A Processor",
        "Features : asimd\n": "an ARM",
    }.items(),
)
def test_processor_name_includes_vector_extensions(text, name, monkeypatch):
    monkeypatch.setattr(machine.platform, "processor", lambda: "an ARM")
    monkeypatch.setattr(machine.Path, "read_text", lambda *given: text)
    assert machine.processor() == name
