"""Runs of `parity translate` and models for them."""

from __future__ import annotations

import numpy as np
import pytest
from search_models import lively

import reference_numpy as ref
from transformer_parity.apps.translate.trained import read_trained
from transformer_parity.cli.main import main
from transformer_parity.transformer.sentences.subwords import Subwords
from transformer_spec.search import Search

LETTERS = "abcdefghi"
LONG = "paper_learned"  # a preset with learned positional encodings
LIMIT = 12  # maximum length in most tests, because some of these models never generate EOS


def save(path, config, weights):
    """Save a model that translates letters to letters."""
    vocabulary = Subwords.train([LETTERS], kind="char")
    ref.save_weights(path, config, weights, vocabulary=vocabulary.model)
    return path


def random_lines(count, seed=0, longest=9):
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(list(LETTERS), rng.integers(1, longest + 1))) for _ in range(count)]


def translated(capfd, model, lines, *options, file=None):
    """Translate lines, and return the exit code, the output lines, and the messages."""
    path = file or model.with_name("lines")
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    limit = min(LIMIT, read_trained(model).config.max_positions or LIMIT)
    usual = ["--dtype", "float64", "--search", f"max_length={limit}"]
    code = main(["translate", "--weights", str(model), *usual, *map(str, options), str(path)])
    captured = capfd.readouterr()
    return code, captured.out.split("\n")[:-1], captured.err


def one_by_one(model, lines, **options):
    """Translate each line separately with the reference."""
    return [answers[0] for answers in all_hypotheses(model, lines, **options)]


def all_hypotheses(model, lines, **options):
    """Translate each line separately with the reference, and return all hypotheses. Blank lines remain blank."""
    trained = read_trained(model)
    options = {"max_length": min(LIMIT, trained.config.max_positions or LIMIT)} | options
    loaded = ref.Transformer.from_weights(trained.config, trained.weights, "float64")
    answers = []
    for line in lines:
        source_ids = np.array([trained.vocabulary.ids(line)])
        found = Search(**options).run(ref, loaded, source_ids)
        texts = [trained.vocabulary.text(ids) for ids in found.nbest_ids[0]]
        answers.append(texts if line.strip() else [""])
    return answers


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model") / "model.safetensors", *lively())


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A model that supports six positions."""
    config, weights = lively(LONG, max_length=6)
    return save(tmp_path_factory.mktemp("short") / "model.safetensors", config, weights)
