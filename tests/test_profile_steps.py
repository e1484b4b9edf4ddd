"""`benchmarks/profile_steps.py`: every kind of work has its share, and the shares are the whole."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROFILE = Path(__file__).parents[1] / "benchmarks" / "profile_steps.py"


@pytest.mark.parametrize(
    ("task", "package", "kinds"),
    [
        ("train", "numpy", ["linear layers", "optimizer", "loss", "attention", "normalization", "activations"]),
        ("train", "torch", ["linear layers", "optimizer", "loss, or choice of tokens", "attention", "normalization"]),
        ("train", "jax", ["products", "indexing", "copies and transposes", "other loops: sums, normalization"]),
        ("train", "tf", ["products", "optimizer", "loss", "indexing", "copies and transposes", "other loops: sums"]),
        pytest.param(
            *("decode", "tf", ["products", "indexing", "other loops: sums, normalization"]),
            marks=pytest.mark.extended("profiles"),
        ),
        ("decode", "numpy", ["linear layers", "attention", "choice of tokens", "normalization", "activations"]),
    ],
)
def test_a_profile_divides_the_time_among_kinds(task, package, kinds):
    run = subprocess.run(
        [sys.executable, PROFILE, task, package, "--config", "tiny", "--calls", "1", "--largest", "1"],
        **{"check": True, "capture_output": True, "text": True},
    )
    head, *rows = run.stdout.splitlines()
    assert re.fullmatch(r"[\d,]+ ms a call, one thread", head)
    shares = {row.split("  ")[-1]: float(row.split("%")[0]) for row in rows[:-1]}
    assert sum(shares.values()) == pytest.approx(100.0, abs=1.0)
    assert all(any(shares[found] > 0.0 for found in shares if found.startswith(kind)) for kind in kinds)
