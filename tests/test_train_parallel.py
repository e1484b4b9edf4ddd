"""``parity train --parallel``: the processes of a plan train what one device trains, and end together."""

from __future__ import annotations

import numpy as np
import pytest
from test_train import losses, resume, saved_weights, train

from transformer_parity.train import corpora

EXACT = ("--dtype", "float64", "--heads", 4)
SECONDS = 20  # in which processes have to end; most of it for a busy machine
PLANS = {
    "numpy": ["data=2,fsdp=2,tensor=2"],
    "torch": ["data=2", "fsdp=2", "tensor=2", "data=2,fsdp=2"],
    "jax": ["data=2", "fsdp=2,tensor=2"],
    "tf": ["data=2", "data=4"],
}


@pytest.fixture(autouse=True)
def few_dates(monkeypatch):
    make_few(monkeypatch)


def make_few(monkeypatch):
    """Let the dates be few; other processes are sent them."""
    monkeypatch.setattr(corpora, "DATES_TRAINED", 40)
    monkeypatch.setattr(corpora, "DATES_HELD_OUT", 6)


def agree(found, expected, tolerance=1e-10):
    """Compare weights by name, each by its largest magnitude."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert np.abs(found[name] - array).max() <= tolerance * np.abs(array).max(), name


def final(folder):
    return saved_weights(folder / "model.safetensors")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A run on one device, without dropout, which each framework would draw otherwise."""
    folder = tmp_path_factory.mktemp("runs") / "alone"
    with pytest.MonkeyPatch.context() as patch:
        make_few(patch)
        assert train(folder, "--backend", "numpy", "--steps", 6, "--dropout", 0, *EXACT) == 0
    return folder


def test_a_plan_changes_nothing_in_the_reference(alone, tmp_path, capfd):
    folder = tmp_path / "run"
    plan = "--parallel", "data=2,tensor=2"
    assert train(folder, "--backend", "numpy", "--steps", 6, "--dropout", 0, *EXACT, *plan) == 0
    assert "on 4 devices, data=2,tensor=2, of 1 process" in capfd.readouterr().err
    agree(final(folder), final(alone))
    assert {path.name for path in folder.iterdir()} == {path.name for path in alone.iterdir()}
    assert losses(folder) == pytest.approx(losses(alone), rel=1e-12)


@pytest.mark.only("torch")
def test_a_run_goes_on_with_other_devices_in_another_framework(alone, tmp_path, capfd):
    """Two processes of PyTorch, then one device of NumPy."""
    folder = tmp_path / "run"
    options = "--backend", "torch", "--parallel", "data=2", "--steps", 6, "--stop-at", 3, "--save-every", 2
    assert train(folder, *options, "--dropout", 0, *EXACT) == 0
    said = capfd.readouterr().err
    assert "on 2 devices, data=2, of 2 processes" in said
    assert f"parity train --resume {folder} --backend torch --parallel data=2" in said
    assert (folder / "checkpoint-0000003.safetensors").exists()
    assert resume(folder, "--backend", "numpy") == 0
    agree(final(folder), final(alone))


@pytest.mark.extended("plans")
@pytest.mark.parametrize(
    ("name", "plan"),
    [pytest.param(name, plan, marks=pytest.mark.only(name)) for name, plans in PLANS.items() for plan in plans],
)
def test_every_plan_ends_with_the_weights_of_one_device(name, plan, alone, tmp_path):
    options = "--backend", name, "--steps", 6, "--dropout", 0, *EXACT
    assert train(tmp_path / "run", *options, "--parallel", plan) == 0
    agree(final(tmp_path / "run"), final(alone))
