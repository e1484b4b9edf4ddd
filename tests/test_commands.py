"""`parity info`, `parity source` and `parity show`: what they print, draw and refuse."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import psutil
import pytest
import tiers
from rich.text import Text

import reference_numpy as ref
from transformer_parity.apps.figures import attention
from transformer_parity.apps.train import corpora
from transformer_parity.cli import describe_presets as presets
from transformer_parity.cli import info, show, source
from transformer_parity.cli.main import main
from transformer_parity.engine.system.environment import quiet_frameworks
from transformer_parity.transformer.cases.inputs import hard_weights
from transformer_parity.transformer.ports import source_code, source_marks
from transformer_parity.transformer.ports.package import PackagePort
from transformer_parity.transformer.ports.registry import PORTS
from transformer_parity.transformer.sentences.pairs import read_pairs
from transformer_parity.transformer.sentences.subwords import Subwords
from transformer_parity.transformer.sentences.vocabulary import batch

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = [port.package for port in PORTS.values()]
FRAMEWORKS = {module for port in PORTS.values() for module in port.needs}


parsed = cache(source_code.SourcePackage)  # once for all tests


@pytest.fixture(autouse=True)
def _pipe(monkeypatch):
    """Print as into a pipe of 80 columns, whatever runs the tests."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(source, "SourcePackage", parsed)


@pytest.fixture
def bare(monkeypatch):
    """Have no framework installed."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in FRAMEWORKS else real(name))


def parity(capsys, *arguments):
    """Run a command and return its exit code and what it printed."""
    try:
        code = main(list(map(str, arguments)))
    except SystemExit as leaving:  # argparse's way out
        code = leaving.code
    return code, *capsys.readouterr()


def draw(picture, *arguments):
    """Return the figure of a command line."""
    parser = argparse.ArgumentParser()
    show.add_parser(parser.add_subparsers())
    options = parser.parse_args(["show", picture, *map(str, arguments)])
    return options.draw(options)


POINTERS = re.compile(r"#[ ^]*\^[ ^]*\n")  # lines below those that differ


def printed_pieces(out):
    """Return what `parity source` printed of each package, by its place and note."""
    blocks = re.split(r"\n# (?=\w+/\w+\.py:|not in )", out)[1:]
    return {title: code for title, _, code in (block.partition("\n") for block in blocks) if ".py:" in title}


def pieces(out):
    """Return the code that `parity source` printed, by its place."""
    return {
        title.partition("  ")[0]: "".join(line for line in code.splitlines(keepends=True) if not POINTERS.match(line))
        for title, code in printed_pieces(out).items()
    }


@pytest.mark.usefixtures("bare")
def test_info_without_frameworks(capsys, monkeypatch):
    code, out, err = parity(capsys, "info")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert "fails" not in out
    assert "37,000 yields 0; 41,096 yields 10" in out
    monkeypatch.setenv("COLUMNS", "50")  # narrower than the line that is to be copied
    out = parity(capsys, "info")[1]
    for name in PORTS:
        assert (f"pip install 'transformer-parity[cli,{name}]'\n" in out) == (name != "numpy")
    monkeypatch.delattr(PackagePort, "import_package")  # a broken installation
    assert "numpy: installed, but it fails: AttributeError:" in parity(capsys, "info")[1]


def test_info_describes_what_is_installed(capsys, monkeypatch, backends):
    expected = {backend.name: backend.package.describe() for backend in backends}  # which imports them first
    monkeypatch.setattr(info, "PORTS", {backend.name: PORTS[backend.name] for backend in backends})
    found = json.loads(parity(capsys, "info", "--json")[1])["result"]["backends"]
    for backend in backends:
        runtime = backend.package.runtime
        known = {"installed": True, "dtypes": list(runtime.DTYPES), "runs on": list(runtime.DEVICES)}
        products = {row: found[backend.name].pop(row) for row in (info.RATE, "products on a CPU")}
        assert products[info.RATE] > 0.1
        assert re.match("openblas|MKL; measured|XLA|oneDNN", products["products on a CPU"])
        assert found[backend.name].pop(info.BY_ONEDNN, 1.0) > 0.1  # where it is much faster
        described = {row: said for row, said in expected[backend.name].items() if row not in products}
        assert found[backend.name] == {**described, **known}


def test_info_says_which_library_is_slow():
    rates = lambda **found: {name: {info.RATE: rate} for name, rate in found.items()}  # noqa: E731
    even, uneven = rates(numpy=100.0, torch=61.0), rates(numpy=140.0, torch=150.0, jax=300.0)
    assert list(info.slow(even, 0.0)) == list(info.slow({"jax": {"error": "no"}}, 0.0)) == []
    assert list(info.slow(uneven, 0.0)) == [
        "numpy: its products reach 47% of the best rate here, jax's",
        "torch: its products reach 50% of the best rate here, jax's",
    ]
    uneven["torch"][info.BY_ONEDNN] = 400.0
    assert list(info.slow(uneven, 0.0))[1] == (
        "torch: its products reach 38% of the best rate here, torch's by oneDNN; "
        'precision="highest" lets oneDNN take them'
    )
    assert list(info.slow(uneven, 1000.0)) == ["the machine is busy, and rates vary: load average 1000.0"]
    assert list(info.slow(even, 1000.0)) == []


@pytest.mark.usefixtures("bare")
def test_info_counts_parameters(capsys):
    presets = json.loads(parity(capsys, "info", "--json")[1])["result"]["presets"]
    assert list(presets) == list(ref.PRESETS)
    assert presets["paper_base"] == {"parameters": 63_045_632, "printed_millions": 65, "differs": {}}
    assert presets["paper_d256"] == {"parameters": 26_816_512, "printed_millions": 28, "differs": {"d_model": 256}}
    smaller = json.loads(parity(capsys, "info", "--json", "--vocab", 1000)[1])["result"]["presets"]
    assert presets["paper_base"]["parameters"] - smaller["paper_base"]["parameters"] == 36_000 * 512


@pytest.mark.parametrize("preset", ref.PRESETS)
def test_differences_lead_from_the_base_model_to_the_preset(preset):
    sizes = {"source_vocab_size": 9, "target_vocab_size": 9}
    fields = presets.differences(preset)
    rates = {name.partition(".")[2]: fields.pop(name) for name in list(fields) if name.startswith("dropout.")}
    rebuilt = ref.TransformerConfig.preset("paper_base", **sizes, **fields, dropout=ref.DropoutRates(**rates))
    assert rebuilt == ref.TransformerConfig.preset(preset, **sizes)


def test_what_a_framework_prints_is_held_back_unless_it_fails(capfd):
    with quiet_frameworks() as terminal:
        os.write(2, b"oneDNN is on\n")
        print("spinner", file=terminal)
    assert capfd.readouterr().err == "spinner\n"
    with pytest.raises(ValueError, match="many"), quiet_frameworks():  # noqa: PT012  the block is what is tested
        os.write(2, b"the reason\n")
        int("many")
    os.write(2, b"and on\n")
    assert capfd.readouterr().err == "the reason\nand on\n"


@pytest.mark.parametrize(
    ("name", "first", "inside"),
    [
        ("scaled_dot_product_attention", "def scaled_dot_product_attention(", 'tap("scores"'),
        ("MultiHeadAttention", "class MultiHeadAttention", "self.query_proj = Linear("),
        ("MultiHeadAttention.forward", "def ", 'tap("output"'),
        ("Transformer.from_weights", "@classmethod", "set_weights(model, weights)"),
        ("attention", "from __future__", "def merge_heads("),
        ("ACTIVATIONS", "ACTIVATIONS: ", '"relu": '),
    ],
)
def test_source_prints_the_four(capsys, name, first, inside):
    out = parity(capsys, "source", name)[1]
    assert [place.partition("/")[0] for place in pieces(out)] == PACKAGES
    for place, text in pieces(out).items():
        file, _, line = place.partition(":")
        assert text.startswith(first), place
        assert inside in text, place
        assert (ROOT / file).read_text().splitlines()[int(line) - 1].strip() == text.splitlines()[0] or line == "1"


def test_source_knows_where_the_packages_differ(capsys):
    printed = [parity(capsys, "source", f"EncoderLayer.{name}")[1] for name in ("forward", "__call__", "call")]
    assert len({text.partition("\n\n")[2] for text in printed}) == 1
    both = pieces(parity(capsys, "source", "Transformer.call", "--backends", "tf")[1])
    assert [text.count("def ") for text in both.values()] == [1]
    inherited = pieces(parity(capsys, "source", "Linear.call", "--backends", "tf")[1])
    assert [text.strip() for text in inherited.values()] == [
        "class Linear(Configured, keras.layers.Dense): ...  # inherits its forward method"
    ]
    for name, method in (("Encoder", "encode"), ("Decoder", "decode")):  # as in ``forward = encode``
        assert all(f"def {method}(" in text for text in pieces(parity(capsys, "source", f"{name}.forward")[1]).values())
    lacking = parity(capsys, "source", "transformer_backward")[1]
    assert lacking.endswith("\n# not in transformer_torch, transformer_jax, transformer_tf\n")


def test_names_may_be_given_one_by_one(capsys):
    alone, together = (
        parity(capsys, "source", "Linear", *options)[1]
        for options in (["--backends", "tf", "--backend", "jax,tf"], ["--backends", "jax,tf"])
    )
    assert alone == together
    assert [*pieces(alone)] == [*pieces(together)]
    assert len(pieces(alone)) == 2


def test_source_imports_no_framework():
    unwanted = {*FRAMEWORKS, *PACKAGES[1:], "matplotlib"}
    script = "import sys; from transformer_parity.__main__ import main; main(['source', 'Linear']);"
    script += f"print({unwanted} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert len(pieces(done.stdout)) == 4
    assert done.stdout.endswith("\nset()\n")


def test_source_hides_or_keeps_docstrings(capsys, tmp_path):
    summary = "Average the values, weighted by how well each key answers each query."
    hidden = parity(capsys, "source", "scaled_dot_product_attention")[1]
    assert " ".join(hidden.partition("\n\n")[0].replace("# ", "").split()).endswith(summary)
    assert '"""' not in hidden
    kept = parity(capsys, "source", "scaled_dot_product_attention", "--docstrings")[1]
    assert kept.count(f'"""{summary}') == 4
    assert summary not in kept.partition("\n\n")[0]
    (tmp_path / "module.py").write_text('def f():\n    """Say."""\n\n    # why\n    return 1\n')
    assert source_code.Module(tmp_path / "module.py").find("f", False).code == "def f():\n    # why\n    return 1"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_piece_is_the_code_in_the_file(package):
    for module in parsed(package).modules.values():
        for name, node in module.definitions.items():
            assert ast.dump(ast.parse(module.find(name, docstrings=True).code)) == ast.dump(ast.Module([node], []))
        forwards = [f"{name}.forward" for name in module.public if module.find(f"{name}.forward", docstrings=False)]
        for name in [*module.dotted_names(), *forwards]:
            for part in ast.walk(ast.parse(module.find(name, docstrings=False).code)):
                if isinstance(part, source_code.DOCUMENTED) and len(part.body) > 1:
                    assert ast.get_docstring(part) is None, name
        whole = ast.parse(module.cut([module.tree], docstrings=False).code)
        assert [type(node) for node in whole.body] == [type(node) for node in module.tree.body[1:]]


def on_terminal(capsys, monkeypatch, width, *arguments):
    """Return what `parity source` prints on a terminal of some width, without colours and styles."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    return re.sub(r"\x1b\[[0-9;]*m", "", parity(capsys, "source", *arguments)[1])


@pytest.mark.parametrize(("width", "columns"), [(60, 1), (119, 1), (120, 2), (130, 2), (200, 2), (240, 4)])
def test_source_stands_side_by_side_where_there_is_room(capsys, monkeypatch, width, columns):
    out = on_terminal(capsys, monkeypatch, width, "split_heads")
    assert max(map(len, out.splitlines())) == width
    titles = [[package for package in PACKAGES if f"{package}/attention.py:" in line] for line in out.splitlines()]
    assert [row for row in titles if row] == [PACKAGES[i : i + columns] for i in range(0, 4, columns)]


def test_source_points_at_what_differs(capsys):
    """In a pipe: the output is Python, and the comments below its lines point at the tokens that the marks name."""
    name = "MultiHeadAttention.forward"
    codes = {package: parsed(package).find(name).code for package in PACKAGES}
    for place, printed in printed_pieces(parity(capsys, "source", name)[1]).items():
        package = place.partition("/")[0]
        code, marks = codes[package], source_marks.compare(codes, "reference_numpy")[package]
        lines = printed.splitlines(keepends=True)
        pointers = [line if POINTERS.match(line) else "" for line in lines]
        assert "".join(line for line in lines if line not in pointers).strip("\n") == code
        found = [
            below[match.start() : match.end()]
            for below, pointer in zip(lines, pointers[1:], strict=False)
            for match in re.finditer(r"\^+", pointer)
        ]
        assert found == [code[start:stop] for start, stop in marks.spans]
        assert found
        ast.parse(printed)
        counts = [f"{marks.different} added", f"{marks.missing} missing"]
        if package == "reference_numpy":
            counts = [f"{marks.different} not in all ports"]
        assert place.endswith(f"{marks.total} tokens, {', '.join(counts)}")


def test_source_compares_with_the_reference_though_it_is_not_shown(capsys):
    both = [parity(capsys, "source", "LayerNorm", "--backends", names)[1] for names in ("numpy,tf", "tf")]
    assert both[0].partition("# transformer_tf")[2] == both[1].partition("# transformer_tf")[2]
    lacking = printed_pieces(parity(capsys, "source", "Configured", "--backends", "torch,tf")[1])
    assert [place.partition("  ")[2] for place in lacking] == ["the others are compared with this"]


def test_source_keeps_docstrings_as_they_are(capsys):
    for place, printed in printed_pieces(parity(capsys, "source", "LayerNorm", "--docstrings")[1]).items():
        package = place.partition("/")[0]
        assert ast.dump(ast.parse(printed)) == ast.dump(ast.parse(parsed(package).find("LayerNorm", True).code))


@pytest.mark.parametrize("width", [60, 100, 240])
@pytest.mark.parametrize("name", ["MultiHeadAttention", "LayerNorm"])
def test_marks_survive_folding(width, name):
    """Every token that differs is highlighted, on a line with a mark in the margin; without colours too."""
    found = {package: parsed(package).find(name) for package in PACKAGES}
    marks = source_marks.compare({package: piece.code for package, piece in found.items()}, "reference_numpy")
    for package, piece in found.items():
        shown = source.Shown(piece, marks[package], "")
        lines = source._highlight(shown, width - source.FRAME).split("\n", allow_blank=True)
        highlighted = ""
        for line in lines:
            spans = [span for span in line.spans if span.style == source.MARKED]
            assert line.plain.startswith(source.MARK) == bool(spans)
            highlighted += "".join(line.plain[span.start : span.end] for span in spans)
        marked = "".join(piece.code[start:stop] for start, stop in shown.spans)
        assert "".join(highlighted.split()) == "".join(marked.split())
        assert max(map(len, lines)) <= width - source.FRAME + source.MARGIN


def test_source_marks_without_colours(capsys, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    out = on_terminal(capsys, monkeypatch, 120, "LayerNorm", "--backends", "numpy,torch")
    marked = [line for line in out.splitlines() if "│ > " in line]
    assert marked
    for half in (slice(60), slice(60, None)):  # the reference too
        assert any("│ > " in line[half] for line in marked)
    assert re.search(r" tokens, \d+ added, \d+ missing ", out)
    assert "columns need" not in out
    narrow = on_terminal(capsys, monkeypatch, 120, "LayerNorm")
    assert narrow.endswith("4 columns need 240 characters; this is laid out for 120\n")


def test_source_has_colors_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[94" in parity(capsys, "source", "split_heads")[1]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[94" not in parity(capsys, "source", "split_heads")[1]
    assert "\x1b[7m" in parity(capsys, "source", "split_heads")[1]  # reversed: no colour


@pytest.mark.parametrize("width", [8, 20, 56])
def test_folding_loses_nothing(width):
    for line in (ROOT / "transformer_torch" / "attention.py").read_text().splitlines():
        parts = [part.plain for part in source._fold(Text(line), width)]
        assert "".join("".join(parts).split()) == "".join(line.split())
        assert max(map(len, parts)) <= width


@pytest.mark.parametrize(
    ("name", "meant"),
    [("MultiheadAttention", "MultiHeadAttention"), ("encode", "Encoder.encode"), ("atention", "attention")],
)
def test_source_suggests_names(capsys, name, meant):
    code, _, err = parity(capsys, "source", name)
    error, _, names = err.partition("\n")
    assert code == 3
    assert error.startswith(f"parity source: error: there is no '{name}' in the packages; did you mean ")
    assert meant in error.partition("mean ")[2].rstrip("?").split(" or ")
    assert names == "parity source, without a name, lists all names\n"


def test_source_lists_names_where_it_can_suggest_none(capsys):
    code, _, err = parity(capsys, "source", "zzzzzz")
    error, _, names = err.partition("\n")
    assert (code, error) == (3, "parity source: error: there is no 'zzzzzz' in the packages")
    assert names == parity(capsys, "source")[1]
    assert "attention:     scaled_dot_product_attention," in names
    assert " transformer_backward*" in names


def test_show_writes_png_and_svg(capsys, tmp_path):
    folder = tmp_path / "new" / "pictures"
    assert parity(capsys, "show", "masks", "--out", f"{folder}/") == (0, f"wrote {folder / 'masks.png'}\n", "")
    assert (folder / "masks.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    again = []
    for name in ("a.svg", "a.svg"):
        assert parity(capsys, "show", "positions", "--out", folder / name)[1] == f"wrote {folder / name}\n"
        again.append((folder / name).read_bytes())
    assert ElementTree.fromstring(again[0]).tag == "{http://www.w3.org/2000/svg}svg"
    assert again[0] == again[1]
    chinese = ("attention", "--preset", "paper_base", "--source", "你好 $1 $2", "--out", folder / "attention.svg")
    chinese += ("--backends", "numpy")
    note = "note: the font lacks some of the characters; boxes stand for them\n"
    assert parity(capsys, "show", *chinese) == (0, f"wrote {folder / 'attention.svg'}\n", note)
    assert sorted(path.name for path in folder.iterdir()) == ["a.svg", "attention.svg", "masks.png"]


def test_a_failed_write_leaves_the_old_picture(capsys, tmp_path, monkeypatch):
    def fail(path, content):
        path.write_text("half a pic")
        raise OSError("no space left")

    (tmp_path / "masks.png").write_text("old")
    monkeypatch.setattr(Path, "write_bytes", fail)
    assert parity(capsys, "show", "masks", "--out", tmp_path) == (3, "", "parity show masks: error: no space left\n")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("masks.png", "old")]


def test_positions_are_those_of_the_presets():
    paper, fairseq, _ = draw("positions", "--preset", "paper_base,fairseq", "--size", "12x8").axes
    np.testing.assert_array_equal(paper.images[0].get_array(), ref.sinusoidal_encoding(12, 8))
    shifted = ref.sinusoidal_encoding(12, 8, "split", "m_minus_1", 2)
    np.testing.assert_array_equal(fairseq.images[0].get_array(), shifted)
    assert paper.get_title("left").startswith("paper_base: sine and cosine take turns\nof p / 10000^(i / 4), ")
    assert fairseq.get_title("left").startswith("fairseq: 4 sines, then 4 cosines\nof p / 10000^(i / 3), ")
    assert fairseq.get_title("left").endswith("the first position is p = 2")


def test_masks_allow_what_the_model_allows():
    axes = draw("masks").axes
    encoder, causal, decoder, cross = ([list(row) for row in one.images[0].get_array().astype(int)] for one in axes)
    assert encoder == 7 * [[1, 1, 1, 1, 1, 0, 0]]
    assert causal == np.tri(5).tolist()
    assert decoder == [*np.tri(4, 5).tolist(), [1, 1, 1, 1, 0]]
    assert cross == 5 * [[1, 1, 1, 1, 1, 0, 0]]
    assert {(one.get_xlabel(), one.get_ylabel()) for one in axes} == {("key", "query")}
    tokens = [label.get_text() for label in (*axes[3].get_yticklabels(), *axes[3].get_xticklabels())]
    assert " ".join(tokens) == "<s> wir sind zuhause <pad> we are at home </s> <pad> <pad>"


@pytest.mark.parametrize("which", tiers.first_alone(["cross", "decoder", "encoder"], "pictures"))
def test_attention_of_every_backend(backends, which):
    names = [backend.name for backend in backends]
    options = ("--dtype", "float64", "--layer", 1, "--which", which, "--backends", ",".join(names))
    figure = draw("attention", "--preset", "paper_base", *options)
    panels = [axes for axes in figure.axes if axes.images]
    shown = np.array([axes.images[0].get_array() for axes in panels])
    weights = shown[: 4 * len(names)].reshape(len(names), 4, *shown.shape[1:])  # [backend, head, query, key]
    apart = [weights[i] - weights[0] for i in range(1, len(names)) if (weights[i] != weights[0]).any()]
    np.testing.assert_array_equal(shown[4 * len(names) :].reshape(len(apart), *weights.shape[1:]), np.array(apart))
    np.testing.assert_allclose(weights.sum(axis=-1), 1.0, atol=1e-14)
    vocabulary = Subwords.train([line for pair in read_pairs() for line in pair])
    size = vocabulary.size + 3
    config = ref.TransformerConfig(source_vocab_size=size, target_vocab_size=size, **attention.SMALL)
    seen = ref.Recorder(f"{which if which != 'cross' else 'decoder'}.layers.1.**.weights")
    model = ref.Transformer.from_weights(config, hard_weights(config), "float64")
    model(**batch([(attention.SOURCE, attention.TARGET)], vocabulary.numbered(config), config), tap=seen)
    assert np.linalg.norm(weights - list(seen.values())[which == "cross"]) <= 1e-12 * np.linalg.norm(weights)
    scales = {axes.images[0].get_clim() for axes in panels}
    largest = max((np.abs(difference).max() for difference in apart), default=0.0)
    assert scales == {(0.0, weights.max())} | ({(-largest, largest)} if apart else set())
    labels = [axes.get_ylabel() for axes in panels if axes.get_ylabel()]
    assert labels[: len(names)] == names
    assert all(label.endswith(f" {names[0]}") for label in labels[len(names) :])
    assert "not trained, built as paper_base" in figure.get_suptitle()
    assert figure.get_supxlabel().endswith("counted from 0)" if len(names) > 1 else "to compare them.")


def test_attention_of_the_model_that_ships():
    figure = draw("attention", "--backends", "numpy")
    panels = [axes for axes in figure.axes if axes.images]
    assert len(panels) == 4
    assert "dates.safetensors" in figure.get_suptitle()
    assert "".join(label.get_text() for label in panels[0].get_yticklabels()) == "<s>2024-05-03"
    attended = panels[0].images[0].get_array()
    assert attended.max() > 0.9  # it is trained


@pytest.mark.usefixtures("bare")
def test_attention_is_that_of_what_is_installed(monkeypatch):
    assert len([axes for axes in draw("attention").axes if axes.images]) == 4
    monkeypatch.setattr(show, "draw_attention", lambda asked: asked.backends)
    monkeypatch.setattr(PackagePort, "missing", lambda port: "keras" if port.name == "tf" else None)
    assert draw("attention") == ["numpy", "torch", "jax"]
    assert draw("attention", "--backends", "torch") == ["torch"]


def test_attention_of_a_weight_file(tmp_path):
    sizes = {"source_vocab_size": 400, "target_vocab_size": 500, "d_model": 22, "num_heads": 11, "d_ff": 8}
    config = ref.TransformerConfig.preset("marian", tie_embeddings="none", **sizes)
    ref.save_weights(tmp_path / "mine.safetensors", config, hard_weights(config))
    figure = draw(
        "attention",
        "--weights",
        tmp_path / "mine.safetensors",
        "--layer",
        5,
        "--source",
        "It costs $5 or $6.",
        "--backends",
        "numpy",
    )
    panels = [axes for axes in figure.axes if axes.images]
    assert len(panels) == 11  # in rows of 6 and 5
    assert "mine.safetensors" in figure.get_suptitle()
    keys = [label.get_text() for label in panels[-1].get_xticklabels()]
    assert (keys[0][0], keys[-1]) == ("_", "</s>")
    assert sum(r"\$" in key for key in keys) == 2  # as it is, and not as the borders of a formula


def test_agreement_names_the_two_that_differ_the_most():
    seen = {name: np.zeros((2, 3, 4)) for name in ("torch", "jax", "tf")}
    seen["jax"][1, 2, 0], seen["tf"][1, 2, 0] = -0.25, 0.125
    assert "two backends: 3.8e-01 (jax and tf; head 1, query 2, key 0; counted from 0)" in attention.agreement(seen)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("info --vocab 2", "--vocab 2: eos_id must be below the vocabulary size 2"),
        ("source Linear --backends mxnet", "unknown mxnet: choose from numpy, torch, jax, tf"),
        (
            "source transformer_backward --backends tf",
            "transformer_backward is not in transformer_tf, but in reference_numpy",
        ),
        ("show positions --preset paper_learned", "paper_learned learns its positions"),
        ("show positions --size 0x64", "must be a positive integer: got '0'"),
        ("show positions --size 50x7", "need an even d_model: got 7"),
        ("show masks --out x.pdf", "--out must be a folder or end in .png or .svg: got x.pdf"),
        ("show masks --out some_file/x.png", "some_file"),
        ("show attention --backends numpy,jax", "jax is not installed: pip install 'transformer-parity[cli,jax]'"),
        ("show attention --backends numpy --layer 2", "--layer must be 0 to 1 in this model: got 2"),
        ("show attention --backends numpy --layer -1", "--layer must be 0 to 1 in this model: got -1"),
        ("show attention --weights none.safetensors", "there is no weight file none.safetensors"),
        ("show attention --weights some_file", "some_file is not a usable weight file"),
    ],
)
@pytest.mark.usefixtures("bare")
def test_wrong_usage_exits_with_3(capsys, tmp_path, monkeypatch, command, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr(PackagePort, "load")  # it is found out before any model is run
    Path("some_file").write_text("some text")
    code, out, err = parity(capsys, *command.split())
    assert (code, out) == (3, "")
    assert err.splitlines()[-1].startswith(f"parity {command.split()[0]}")
    assert message in err.splitlines()[-1].partition("error: ")[2]
    assert os.listdir() == ["some_file"]


ABSURD = {
    "bench forward --scale depth=100000": "100000+100000 layers",
    "bench train --batch 1000000000": "1000000000 sentences",
    "bench decode --target 1000000000000 --backends numpy": "1000000000000 tokens",
    "bench forward --scale depth=1,1000000000 --backends numpy": "1000000000+1000000000 layers",
    "show positions --size 1000000000000x64": "a picture of 1,000,000,000,000 by 64",
    "show positions --size 50x1000000000000": "a picture of 50 by 1,000,000,000,000",
    "train --task dates --set num_encoder_layers=1000000000 --backends numpy": "training 131,",
    "train --task dates --set d_ff=1000000000000 --backends numpy": "training ",
    "train --task dates --set tokens_per_batch=1000000000000 --backends numpy": "a batch of 1,000,000,000,000 tokens",
}


@pytest.mark.parametrize("command", ABSURD)
def test_an_absurd_size_is_refused_at_once(command, capsys, tmp_path, monkeypatch):
    """Before memory is taken: what is free is all that counts."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**29))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(corpora, "DATES_TRAINED", 2000)
    monkeypatch.setattr(corpora, "DATES_HELD_OUT", 9)
    code, out, err = parity(capsys, *command.split())
    assert (code, out) == (3, "")
    assert re.search(r" takes [\d,]+ GiB of memory or more: [\d,.]+ GiB are free$", err)
    assert ABSURD[command] in err
    assert os.listdir() == []
