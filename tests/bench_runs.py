"""Helpers for tests that run `parity bench`."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import parity
from test_bench_verify import another_token

from transformer_bench import rounds
from transformer_bench.implementations import DecodePackage
from transformer_bench.peak import Library

QUICK = ["--config", "tiny", "--target", "4", "--source", "6", "--threads", "1"]


def bench(capsys, *arguments, task="decode"):
    return parity(capsys, "bench", task, *QUICK, "--rounds", "2", *arguments)


def read(path):
    """Return the results of the first workload, and the contents of the file merged with its ``result`` entry."""
    document = json.loads(path.read_text())
    found = document["result"]
    return found["races"][0], {**document, **found}


@dataclass
class Wrong(DecodePackage):
    """An implementation that returns a wrong token from the third call on."""

    calls: int = 0

    def result(self, found):
        self.calls += 1
        return another_token(found) if self.calls > 2 else found


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(rounds, "PAUSE", 0.0)
    # Measuring every library takes long, so only one test does it.
    monkeypatch.setattr("transformer_bench.run.libraries", lambda *_, **__: [Library("numpy")])
    here = str(Path(__file__).parent)  # directory from which child processes import the implementations defined here
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])]))
