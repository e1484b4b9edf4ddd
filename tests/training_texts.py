"""Small training runs, started by tests."""

from __future__ import annotations

import dataclasses
import json
from functools import cache

import pytest
from conftest import exit_code

import reference_numpy as ref
from transformer_parity.apps.train import batches, corpora
from transformer_parity.apps.train.log import read_log

SMALL = ["--set", "d_model=16", "num_heads=2", "d_ff=24", "num_encoder_layers=1", "num_decoder_layers=1"]


SMALL += ["warmup_steps=4", "tokens_per_batch=256"]


PAIRS = 60


def make_small(monkeypatch):
    """Reduce the number of dates and the number of batch shapes, because each shape is compiled."""
    monkeypatch.setattr(corpora, "DATES_TRAINED", PAIRS)
    monkeypatch.setattr(corpora, "DATES_HELD_OUT", 6)
    monkeypatch.setattr(batches, "MAX_SHAPES", 2)


def train(directory, *options, task=("--task", "dates"), small=SMALL):
    return exit_code("train", *task, "--out", directory, *small, *options)


def resume(path, *options):
    return exit_code("train", "--resume", path, *options)


def losses(directory):
    """Return the training loss of each step, regardless of the backend that computed it."""
    return {
        event["step"]: next(iter(event["loss"].values())) for event in read_log(directory) if event["event"] == "step"
    }


def spoilt(checkpoint, path, *entry, value=None, settings=None):
    """Write a checkpoint with one entry of its progress replaced or removed."""
    progress = json.loads(json.dumps(checkpoint.progress))
    *outer, last = entry or ("plan",)
    place = progress
    for key in outer:
        place = place[key]
    if entry and value is None:
        del place[last]
    elif entry:
        place[last] = value
    changed = dataclasses.replace(checkpoint, progress=progress, settings=settings or checkpoint.settings)
    ref.save_checkpoint(path, changed)


@pytest.fixture(autouse=True)
def few_dates(monkeypatch):
    make_small(monkeypatch)


@cache
def _finished(directory):
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        assert (
            train(directory, "--backend", "numpy", "--steps", 12, "--set", "save_every=4", "keep=2", "average=2") == 0
        )
    return directory


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A completed run of twelve steps, shared by all test files."""
    return _finished(tmp_path_factory.getbasetemp() / "finished_run")


@pytest.fixture
def texts(tmp_path):
    """Source and target files for training and for the held-out text."""
    paths = [tmp_path / name for name in ("a", "b", "c", "d")]
    for path in paths:
        path.write_text("".join(f"{path.name} has {i} cats\n" for i in range(40)), "utf-8")
    return paths
