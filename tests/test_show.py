"""`parity show`: figures of positional encodings, masks, and attention."""

from __future__ import annotations

import argparse
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import tiers
from command_runs import _pipe as _pipe  # a fixture of every test
from command_runs import bare as bare  # a fixture
from conftest import parity

import reference_numpy as ref
from transformer_parity.apps.figures import attention
from transformer_parity.cli import show
from transformer_parity.transformer.cases.inputs import hard_weights
from transformer_parity.transformer.ports.package import PackagePort
from transformer_parity.transformer.sentences.pairs import read_pairs
from transformer_parity.transformer.sentences.subwords import Subwords
from transformer_parity.transformer.sentences.vocabulary import batch


def draw(picture, *arguments):
    """Return the figure that a command line draws."""
    parser = argparse.ArgumentParser()
    show.add_parser(parser.add_subparsers())
    options = parser.parse_args(["show", picture, *map(str, arguments)])
    return options.draw(options)


def test_show_writes_png_and_svg(capsys, tmp_path):
    directory = tmp_path / "new" / "pictures"
    assert parity(capsys, "show", "masks", "--out", f"{directory}/") == (0, f"wrote {directory / 'masks.png'}\n", "")
    assert (directory / "masks.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    again = []
    for name in ("a.svg", "a.svg"):
        assert parity(capsys, "show", "positions", "--out", directory / name)[1] == f"wrote {directory / name}\n"
        again.append((directory / name).read_bytes())
    assert ElementTree.fromstring(again[0]).tag == "{http://www.w3.org/2000/svg}svg"
    assert again[0] == again[1]
    chinese = ("attention", "--preset", "paper_base", "--source", "你好 $1 $2", "--out", directory / "attention.svg")
    chinese += ("--backends", "numpy")
    note = "note: the font does not contain some of the characters, which are shown as boxes\n"
    assert parity(capsys, "show", *chinese) == (0, f"wrote {directory / 'attention.svg'}\n", note)
    assert sorted(path.name for path in directory.iterdir()) == ["a.svg", "attention.svg", "masks.png"]


def test_failed_write_keeps_the_old_figure(capsys, tmp_path, monkeypatch):
    def fail(path, content):
        path.write_text("half a pic")
        raise OSError("no space left")

    (tmp_path / "masks.png").write_text("old")
    monkeypatch.setattr(Path, "write_bytes", fail)
    assert parity(capsys, "show", "masks", "--out", tmp_path) == (3, "", "parity show masks: error: no space left\n")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("masks.png", "old")]


def test_positions_figure_matches_the_presets():
    paper, fairseq, _ = draw("positions", "--preset", "paper_base,fairseq", "--size", "12x8").axes
    np.testing.assert_array_equal(paper.images[0].get_array(), ref.sinusoidal_encoding(12, 8))
    shifted = ref.sinusoidal_encoding(12, 8, "split", "m_minus_1", 2)
    np.testing.assert_array_equal(fairseq.images[0].get_array(), shifted)
    assert paper.get_title("left").startswith("paper_base: alternating sines and cosines\nof p / 10000^(i / 4), ")
    assert fairseq.get_title("left").startswith("fairseq: 4 sines, then 4 cosines\nof p / 10000^(i / 3), ")
    assert fairseq.get_title("left").endswith("the first position is p = 2")


def test_masks_figure_matches_the_model():
    axes = draw("masks").axes
    encoder, causal, decoder, cross = ([list(row) for row in one.images[0].get_array().astype(int)] for one in axes)
    assert encoder == 7 * [[1, 1, 1, 1, 1, 0, 0]]
    assert causal == np.tri(5).tolist()
    assert decoder == [*np.tri(4, 5).tolist(), [1, 1, 1, 1, 0]]
    assert cross == 5 * [[1, 1, 1, 1, 1, 0, 0]]
    assert {(one.get_xlabel(), one.get_ylabel()) for one in axes} == {("key", "query")}
    tokens = [label.get_text() for label in (*axes[3].get_yticklabels(), *axes[3].get_xticklabels())]
    assert " ".join(tokens) == "<s> wir sind zuhause <pad> we are at home </s> <pad> <pad>"


@pytest.mark.parametrize("which", tiers.first_alone(["cross", "decoder", "encoder"], "figures"))
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
    assert "not trained, preset paper_base" in figure.get_suptitle()
    assert figure.get_supxlabel().endswith("counting from 0)" if len(names) > 1 else "with --backends.")


def test_attention_figure_uses_the_bundled_model():
    figure = draw("attention", "--backends", "numpy")
    panels = [axes for axes in figure.axes if axes.images]
    assert len(panels) == 4
    assert "dates.safetensors" in figure.get_suptitle()
    assert "".join(label.get_text() for label in panels[0].get_yticklabels()) == "<s>2024-05-03"
    attended = panels[0].images[0].get_array()
    assert attended.max() > 0.9  # the model is trained


@pytest.mark.usefixtures("bare")
def test_attention_figure_uses_installed_backends(monkeypatch):
    assert len([axes for axes in draw("attention").axes if axes.images]) == 4
    monkeypatch.setattr(show, "draw_attention", lambda asked: asked.backends)
    monkeypatch.setattr(PackagePort, "missing", lambda port: "keras" if port.name == "tf" else None)
    assert draw("attention") == ["numpy", "torch", "jax"]
    assert draw("attention", "--backends", "torch") == ["torch"]


def test_attention_of_a_weight_file_can_be_plotted(tmp_path):
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
    assert sum(r"\$" in key for key in keys) == 2  # escaped, so that matplotlib doesn't typeset a formula


def test_agreement_names_the_two_most_different_backends():
    seen = {name: np.zeros((2, 3, 4)) for name in ("torch", "jax", "tf")}
    seen["jax"][1, 2, 0], seen["tf"][1, 2, 0] = -0.25, 0.125
    assert "two backends: 3.8e-01 (jax and tf; head 1, query 2, key 0, counting from 0)" in attention.agreement(seen)
