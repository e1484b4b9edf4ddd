"""docs/examples/rounding.py: training on dates with four devices yields the same weights as with one device."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_train_parallel import make_few
from training_texts import SMALL

rounding = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "docs" / "examples" / "rounding.py")))


def test_runs_are_compared_at_their_checkpoints(monkeypatch, tmp_path, capfd):
    make_few(monkeypatch)
    found = rounding.compare("numpy", ["--parallel", "data=4"], 4, 2, tmp_path, SMALL)
    assert [step for step, _, _ in found] == [2, 4]
    assert "4 devices (data=4) in 1 process" in capfd.readouterr().err
    for _, several, moved in found:
        assert several < 1e-13
        assert 0.0 < moved < 1e-13


@pytest.mark.extended("plans")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.only(name)) for name in ("torch", "jax", "tf")])
def test_dates_run_on_four_devices_matches_one_device(name, tmp_path):
    """The weights agree to 1e-10, both on four devices and after perturbing the initial weights by rounding errors."""
    for _, several, moved in rounding.compare(name, ["--parallel", "data=4"], 200, 100, tmp_path, rounding.SMALL):
        assert several < 1e-10
        assert moved < 1e-10
