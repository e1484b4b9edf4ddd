"""`parity info`, `parity source` and `parity show`: what they print, draw and refuse."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.text import Text

import reference_numpy as ref
from transformer_parity.__main__ import main
from transformer_parity.commands import info, show, source
from transformer_parity.hard_inputs import hard_weights
from transformer_parity.ports import PORTS, PackagePort
from transformer_parity.text import Vocabulary, batch, read_pairs

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = [port.package for port in PORTS.values()]
FRAMEWORKS = {module for port in PORTS.values() for module in port.needs}


@pytest.fixture(autouse=True)
def _terminal(monkeypatch):
    """Print as into a pipe of 80 columns, whatever runs the tests."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def installed(monkeypatch):
    """Return a function that leaves only some frameworks installed."""
    find_spec = importlib.util.find_spec

    def leave(*names):
        kept = {module for name in names for module in PORTS[name].needs}
        hidden = FRAMEWORKS - kept
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *rest: None if name in hidden else find_spec(name, *rest)
        )

    return leave


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


# info


def test_info_without_frameworks(capsys, installed):
    installed()
    code, out, err = parity(capsys, "info")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    for name in ("torch", "jax", "tf"):
        assert f"pip install 'transformer-parity[{name}]'\n" in out
    assert "pip install 'transformer-parity[numpy]'" not in out
    assert np.__version__ in out
    assert "fails" not in out
    assert "37,000 yields 0; 41,096 yields 10" in out


def test_install_lines_can_be_copied_from_a_narrow_terminal(capsys, installed, monkeypatch):
    installed()
    monkeypatch.setenv("COLUMNS", "50")
    assert "pip install 'transformer-parity[torch]'\n" in parity(capsys, "info")[1]


def test_info_describes_what_is_installed(capsys, installed, backends):
    installed(*(backend.name for backend in backends))
    code, out, _ = parity(capsys, "info", "--json")
    found = json.loads(out)["backends"]
    assert code == 0
    assert list(found) == list(PORTS)
    for backend in backends:
        described = backend.package.describe()
        assert found[backend.name].items() >= {**described, "installed": True}.items()
        assert found[backend.name]["dtypes"] == list(backend.package.runtime.DTYPES)
        assert found[backend.name]["runs on"] == list(backend.package.runtime.DEVICES)


def test_info_says_what_a_broken_installation_raises(capsys, installed, monkeypatch):
    def fail(port):
        raise ImportError(f"no libfoo for {port.name}")

    installed(*PORTS)
    monkeypatch.setattr(PackagePort, "import_package", fail)
    code, out, _ = parity(capsys, "info")
    assert code == 0
    for name in PORTS:
        assert f"{name}: installed, but it fails: ImportError: no libfoo for {name}" in out


def test_info_counts_parameters(capsys, installed):
    installed()
    presets = json.loads(parity(capsys, "info", "--json")[1])["presets"]
    assert list(presets) == list(ref.PRESETS)
    assert presets["paper_base"] == {"parameters": 63_045_632, "printed_millions": 65, "differs": {}}
    assert presets["paper_big"]["parameters"] == 214_171_648
    assert presets["paper_h1"]["printed_millions"] is None
    assert sum(preset["printed_millions"] is not None for preset in presets.values()) == 11
    smaller = json.loads(parity(capsys, "info", "--json", "--vocab", 1000)[1])["presets"]
    for name, matrices in {"paper_base": 1, "torch": 3}.items():  # torch ties nothing, and its output has a bias
        bias = 36_000 * (name == "torch")
        assert presets[name]["parameters"] - smaller[name]["parameters"] == matrices * 36_000 * 512 + bias


@pytest.mark.parametrize("preset", ref.PRESETS)
def test_differences_lead_from_the_base_model_to_the_preset(preset):
    sizes = {"source_vocab_size": 9, "target_vocab_size": 9}
    found = info.differences(preset)
    rates = {name.removeprefix("dropout."): rate for name, rate in found.items() if name.startswith("dropout.")}
    fields = {name: value for name, value in found.items() if not name.startswith("dropout.")}
    rebuilt = ref.TransformerConfig.preset("paper_base", **sizes, **fields, dropout=ref.DropoutRates(**rates))
    assert rebuilt == ref.TransformerConfig.preset(preset, **sizes)


def test_differences_are_few():
    assert info.differences("paper_d256") == {"d_model": 256}
    assert info.differences("paper_dk16") == {"d_k": 16}
    assert info.differences("paper_dropout_0.2") == {"dropout.embedding": 0.2, "dropout.residual": 0.2}


@pytest.mark.parametrize("vocabulary", [2, 0, -5, "many"])
def test_info_refuses_an_impossible_vocabulary(capsys, vocabulary):
    code, out, err = parity(capsys, "info", "--vocab", vocabulary)
    assert (code, out) == (3, "")
    assert "parity info: error: " in err.splitlines()[-1]


def test_what_a_framework_prints_is_held_back_unless_it_fails(capfd):
    with info.quiet_frameworks() as terminal:
        os.write(2, b"oneDNN is on\n")
        print("spinner", file=terminal)
    assert capfd.readouterr().err == "spinner\n"
    with pytest.raises(ValueError, match="many"), info.quiet_frameworks():  # noqa: PT012  the block is what is tested
        os.write(2, b"the reason\n")
        int("many")
    os.write(2, b"and on\n")
    assert capfd.readouterr().err == "the reason\nand on\n"


# source


def pieces(out):
    """Return the code of each piece by its place."""
    blocks = out.split("\n# ")[1:]
    return {
        block.partition("\n")[0]: block.partition("\n")[2] for block in blocks if ".py:" in block.partition("\n")[0]
    }


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
    code, out, err = parity(capsys, "source", name)
    found = pieces(out)
    assert (code, err) == (0, "")
    assert [place.partition("/")[0] for place in found] == PACKAGES
    for place, text in found.items():
        assert text.startswith(first), place
        assert inside in text, place
        assert '"""' not in text, place
        file, _, line = place.partition(":")
        if name != "attention":
            assert (ROOT / file).read_text().splitlines()[int(line) - 1].strip() == text.splitlines()[0]


def test_source_takes_any_framework_s_name_of_the_forward_method(capsys):
    printed = [parity(capsys, "source", f"EncoderLayer.{name}")[1] for name in ("forward", "__call__", "call")]
    assert len({text.partition("\n\n")[2] for text in printed}) == 1
    both = pieces(parity(capsys, "source", "Transformer.call", "--backends", "tf")[1])
    assert [text.count("\ndef ") + text.startswith("def ") for text in both.values()] == [2]  # __call__ and call
    _, inherited, _ = parity(capsys, "source", "Linear.forward", "--backends", "numpy,torch")
    assert list(pieces(inherited).values())[1].strip() == "class Linear(nn.Linear):  # inherits this method"


def test_source_imports_no_framework():
    unwanted = {*FRAMEWORKS, *PACKAGES[1:], "matplotlib"}
    script = (
        "import sys; from transformer_parity.__main__ import main; "
        f"code = main(['source', 'MultiHeadAttention']); print(code, {unwanted} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stderr == "0 set()\n"
    assert [place.partition("/")[0] for place in pieces(done.stdout)] == PACKAGES


def test_source_can_keep_docstrings(capsys):
    summary = "Average the values, weighted by how well each key answers each query."
    without = parity(capsys, "source", "scaled_dot_product_attention")[1]
    assert " ".join(without.split("\n\n")[0].replace("# ", "").split()).endswith(summary)
    kept = parity(capsys, "source", "scaled_dot_product_attention", "--docstrings")[1]
    assert kept.count(f'"""{summary}') == 4
    assert summary not in kept.partition("\n\n")[0]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_piece_is_the_code_in_the_file(package):
    package = source.Package(package)
    for module in package.modules.values():
        for name, node in module.definitions.items():
            assert ast.dump(ast.parse(module.find(name, docstrings=True).code)) == ast.dump(ast.Module([node], []))
        for name in module.dotted_names():
            for part in ast.walk(ast.parse(module.find(name, docstrings=False).code)):
                if isinstance(part, source.DOCUMENTED) and len(part.body) > 1:
                    assert ast.get_docstring(part) is None, name
        whole = module.cut([module.tree], docstrings=False).code
        assert [type(node) for node in ast.parse(whole).body] == [type(node) for node in module.tree.body[1:]]


def test_comments_behind_a_docstring_stay(tmp_path):
    file = tmp_path / "module.py"
    file.write_text('def f():\n    """Say."""\n\n    # why\n    return 1\n')
    assert source.Module(file).find("f", docstrings=False).code == "def f():\n    # why\n    return 1"


@pytest.mark.parametrize(("width", "columns"), [(60, 1), (119, 1), (120, 2), (130, 2), (200, 2), (240, 4)])
def test_source_stands_side_by_side_where_there_is_room(capsys, width, columns):
    code, out, _ = parity(capsys, "source", "split_heads", "--width", width)
    lines = out.splitlines()
    assert code == 0
    assert "\x1b" not in out
    assert max(map(len, lines)) == width
    titles = [[package for package in PACKAGES if f"{package}/attention.py:" in line] for line in lines]
    assert [row for row in titles if row] == [PACKAGES[i : i + columns] for i in range(0, 4, columns)]


def test_source_is_coloured_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[94" in parity(capsys, "source", "split_heads")[1]
    plain = parity(capsys, "source", "split_heads", "--no-color")[1]
    assert "\x1b[94" not in plain
    assert "╭─ reference_numpy/attention.py:" in plain


@pytest.mark.parametrize("width", [8, 20, 56])
def test_folding_loses_nothing(width):
    for line in (ROOT / "transformer_torch" / "attention.py").read_text().splitlines():
        parts = [part.plain for part in source._fold(Text(line), width)]
        assert "".join("".join(parts).split()) == "".join(line.split())
        assert max(map(len, parts)) <= width


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("MultiheadAttention", "MultiHeadAttention"),
        ("encode", "Transformer.encode"),
        ("atention", "attention"),
        ("EncoderLayer.fwd", "EncoderLayer.forward"),
    ],
)
def test_source_suggests_names(capsys, name, meant):
    code, out, err = parity(capsys, "source", name)
    assert (code, out) == (3, "")
    first = err.splitlines()[0]
    assert first.startswith(f"parity source: error: there is no '{name}' in the packages; did you mean ")
    assert meant in first.partition("mean ")[2].rstrip("?").split(" or ")
    assert "attention:     scaled_dot_product_attention, additive_attention*, split_heads," in err


def test_source_says_who_lacks_a_name(capsys):
    code, out, _ = parity(capsys, "source", "additive_attention")
    assert code == 0
    assert out.endswith("\n# not in transformer_torch, transformer_jax, transformer_tf\n")
    code, _, err = parity(capsys, "source", "additive_attention", "--backends", "torch")
    expected = "parity source: error: additive_attention is not in transformer_torch, but in reference_numpy\n"
    assert (code, err) == (3, expected)


def test_source_lists_names(capsys):
    code, out, _ = parity(capsys, "source")
    assert code == 0
    assert out.startswith("masks:         padding_mask, target_padding_mask, causal_mask\nattention:")
    assert "functional*:" in out


@pytest.mark.parametrize(
    "wrong", [("--width", "10"), ("--width", "wide"), ("--backends", "mxnet"), ("--backends", ",")]
)
def test_source_refuses_wrong_options(capsys, wrong):
    code, out, err = parity(capsys, "source", "Linear", *wrong)
    assert (code, out) == (3, "")
    assert "parity source: error: " in err.splitlines()[-1]


# show


def test_show_writes_png_and_svg(capsys, tmp_path):
    folder = tmp_path / "new" / "pictures"
    code, out, err = parity(capsys, "show", "masks", "--out", f"{folder}/")
    assert (code, out, err) == (0, f"{folder / 'masks.png'}\n", "")
    assert (folder / "masks.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    again = []
    for _ in range(2):
        assert parity(capsys, "show", "positions", "--out", folder, "--format", "svg")[0] == 0
        again.append((folder / "positions.svg").read_bytes())
    assert ElementTree.fromstring(again[0]).tag == "{http://www.w3.org/2000/svg}svg"
    assert again[0] == again[1]
    assert parity(capsys, "show", "masks", "--out", folder / "m.SVG")[1] == f"{folder / 'm.SVG'}\n"
    assert b"<svg" in (folder / "m.SVG").read_bytes()
    assert sorted(path.name for path in folder.iterdir()) == ["m.SVG", "masks.png", "positions.svg"]


def test_a_failed_write_leaves_the_old_picture(capsys, tmp_path, monkeypatch):
    def fail(figure, path, **options):
        Path(path).write_text("half a pic")
        raise OSError("no space left")

    (tmp_path / "masks.png").write_text("old")
    monkeypatch.setattr(Figure, "savefig", fail)
    code, out, err = parity(capsys, "show", "masks", "--out", tmp_path)
    assert (code, out, err) == (3, "", "parity show masks: error: no space left\n")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("masks.png", "old")]


def test_positions_are_those_of_the_presets():
    figure = draw("positions", "--preset", "paper_base,fairseq", "--length", 12, "--d-model", 8)
    paper, fairseq, _ = figure.axes
    np.testing.assert_array_equal(paper.images[0].get_array(), ref.sinusoidal_encoding(12, 8))
    shifted = ref.sinusoidal_encoding(12, 8, "split", "m_minus_1", 2)
    np.testing.assert_array_equal(fairseq.images[0].get_array(), shifted)
    assert paper.get_title("left").startswith("paper_base: sine and cosine take turns\nof p / 10000^(i / 4), ")
    assert fairseq.get_title("left").endswith("10000^(i / 3), i = 0 ... 3; the first position is p = 2")
    assert "4 sines, then 4 cosines" in fairseq.get_title("left")


def test_masks_allow_what_the_model_allows():
    def rows(axes):
        return ["".join(".x"[allowed] for allowed in row) for row in axes.images[0].get_array().astype(int)]

    encoder, causal, decoder, cross = draw("masks").axes
    assert rows(encoder) == ["xxxxx.."] * 7
    assert rows(causal) == ["x....", "xx...", "xxx..", "xxxx.", "xxxxx"]
    assert rows(decoder) == ["x....", "xx...", "xxx..", "xxxx.", "xxxx."]
    assert rows(cross) == ["xxxxx.."] * 5
    for axes in (encoder, causal, decoder, cross):
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("key", "query")
    assert [label.get_text() for label in cross.get_yticklabels()] == ["<s>", "wir", "sind", "zuhause", "<pad>"]
    assert [label.get_text() for label in cross.get_xticklabels()][-3:] == ["</s>", "<pad>", "<pad>"]


def reference_attention(which, layer):
    """Return the weights of the default model and sentences, computed without `parity show`."""
    pairs = read_pairs()
    assert (show.SOURCE, show.TARGET) in pairs
    vocabulary = Vocabulary.train([line for pair in pairs for line in pair])
    size = vocabulary.size + 3
    config = ref.TransformerConfig(source_vocab_size=size, target_vocab_size=size, **show.SMALL)
    seen = ref.Recorder("*.weights")
    model = ref.Transformer.from_weights(config, hard_weights(config), "float64")
    model(**batch([(show.SOURCE, show.TARGET)], vocabulary, config), tap=seen)
    kind = "cross_attention" if which == "cross" else "self_attention"
    return seen[f"{'encoder' if which == 'encoder' else 'decoder'}.layers.{layer}.{kind}.weights"][0]


@pytest.mark.parametrize("which", ["cross", "decoder", "encoder"])
def test_attention_of_every_backend(backends, which):
    names = [backend.name for backend in backends]
    options = ("--dtype", "float64", "--layer", 1, "--which", which, "--backends", ",".join(names))
    figure = draw("attention", *options)
    heads = [axes.images[0] for axes in figure.axes if axes.images]
    assert len(heads) == 4 * len(names)
    weights = np.array([image.get_array() for image in heads]).reshape(len(names), 4, *heads[0].get_array().shape)
    assert len({image.get_clim() for image in heads}) == 1
    assert heads[0].get_clim() == (0.0, weights.max())
    np.testing.assert_allclose(weights.sum(axis=-1), 1.0, atol=1e-14)
    assert np.abs(weights - weights[:1]).max() < 1e-12
    np.testing.assert_allclose(weights[0], reference_attention(which, layer=1), atol=1e-14)
    if which == "decoder":
        assert not np.triu(weights, k=1).any()
    rows = [axes.get_ylabel() for axes in figure.axes if axes.images and axes.get_ylabel()]
    assert rows == names
    assert "not trained, built as paper_base" in figure.get_suptitle()
    last = figure.get_supxlabel().splitlines()[-1]
    assert last.startswith("Largest difference between two backends: " if len(names) > 1 else "Only numpy was run")


def test_attention_of_a_weight_file(tmp_path):
    config = ref.TransformerConfig.preset(
        "marian", source_vocab_size=400, target_vocab_size=500, tie_embeddings="none", d_model=22, num_heads=11, d_ff=8
    )
    ref.save_weights(tmp_path / "mine.safetensors", config, hard_weights(config))
    figure = draw(
        "attention", "--weights", tmp_path / "mine.safetensors", "--layer", 5, "--source", "It costs $5 or $6."
    )
    images = [axes for axes in figure.axes if axes.images]
    assert len(images) == 11  # in rows of 6 and 5
    assert "mine.safetensors" in figure.get_suptitle()
    keys = [label.get_text() for label in images[-1].get_xticklabels()]
    assert keys[0].startswith("_")
    assert keys[-1] == "</s>"
    assert sum(r"\$" in key for key in keys) == 2  # as it is, and not as the borders of a formula


def test_agreement_names_the_two_that_differ_the_most():
    seen = {name: np.zeros((2, 3, 4)) for name in ("torch", "jax", "tf")}
    seen["jax"][1, 2, 0] = -0.25
    seen["tf"][1, 2, 0] = 0.125
    expected = "Largest difference between two backends: 3.8e-01 (jax and tf; head 1, query 2, key 0; counted from 0)"
    assert show.agreement(seen) == expected


def test_characters_without_a_glyph_are_noted(capsys, tmp_path):
    code, out, err = parity(capsys, "show", "attention", "--source", "你好 $1 $2", "--out", tmp_path)
    assert (code, out) == (0, f"{tmp_path / 'attention.png'}\n")
    assert err == "note: the font lacks some of the characters; boxes stand for them\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("positions", "--preset", "paper_learned"), "paper_learned learns its positions"),
        (("positions", "--preset", "paper_huge"), "unknown paper_huge"),
        (("positions", "--length", "0"), "--length must be at least 1: got 0"),
        (("positions", "--d-model", "7"), "need an even d_model: got 7"),
        (("masks", "--out", "x.pdf"), "--out must be a folder or end in .png or .svg: got x.pdf"),
        (("masks", "--out", "x.svg", "--format", "png"), "--out x.svg and --format png contradict each other"),
        (("masks", "--out", f"{__file__}/x.png"), "test_commands.py"),
        (("attention", "--layer", "2"), "--layer must be 0 to 1 in this model: got 2"),
        (("attention", "--layer", "-1"), "--layer must be 0 to 1 in this model: got -1"),
        (("attention", "--weights", "missing.safetensors"), "there is no weight file missing.safetensors"),
        (("attention", "--weights", __file__), "is not a usable weight file"),
        (("attention", "--text", "missing.en", "missing.de"), "missing.en"),
        (("attention", "--backends", "numpy,mxnet"), "unknown mxnet"),
        (("paintings",), "paintings"),
    ],
)
def test_show_refuses(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = parity(capsys, "show", *arguments)
    assert (code, out) == (3, "")
    last = err.splitlines()[-1]
    assert last.startswith("parity show")
    assert "error: " in last
    assert message in last
    assert not list(tmp_path.iterdir())


def test_show_names_a_missing_framework_before_it_runs_another(capsys, tmp_path, installed, monkeypatch):
    installed()
    monkeypatch.delattr(PackagePort, "load")
    code, _, err = parity(capsys, "show", "attention", "--backends", "numpy,jax", "--out", tmp_path)
    assert code == 3
    assert err.startswith("parity show attention: error: backend 'jax' was asked for, but jax is not installed: ")
    assert "pip install 'transformer-parity[jax]'" in err
