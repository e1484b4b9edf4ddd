"""The shapes in the signatures are correct: every annotated function runs under a checker that rejects wrong shapes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("shapes_worker.py")


@pytest.mark.extended("shapes", "torch", "jax", "tf")  # the annotations are the same in all packages
def test_shape_annotations_hold_at_runtime(backend):
    command = [sys.executable, str(WORKER), backend.name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stdout.splitlines() == ["done"]
