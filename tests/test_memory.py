"""`parity train` retains freed memory for the next step instead of returning it to the system."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest

from transformer_parity.apps.train import processes
from transformer_parity.cli import train
from transformer_parity.cli.main import main

PAGES = """
import mmap, resource, sys
import numpy as np
from transformer_parity.engine.system.environment import keep_freed_memory

def take_and_free():
    \"\"\"Return how many pages Linux provided for an array of 64 MiB.\"\"\"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.empty(2**26, np.uint8)[:: mmap.PAGESIZE] = 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = take_and_free(), take_and_free()
keep_freed_memory()
take_and_free()
print(*before, take_and_free(), take_and_free())
"""


def pages(**environment):
    """Return the page faults for two arrays by default, and for two arrays after memory is retained."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    run = subprocess.run(
        [sys.executable, "-c", PAGES],
        **{"check": True, "capture_output": True, "text": True, "env": {**inherited, **environment}},
    )
    return [int(number) for number in run.stdout.split()]


@pytest.mark.parametrize("environment", [{}, {"MALLOC_MMAP_MAX_": "65536"}, {"GLIBC_TUNABLES": "glibc.malloc.check=0"}])
def test_freed_memory_is_retained_unless_the_environment_configures_malloc(environment):
    *usual, first, second = pages(**environment)
    if platform.libc_ver()[0] == "glibc" and not environment:
        assert min(usual) > 10 * max(first, second)
    else:  # malloc returns freed memory to the system
        assert min(first, second) > 0.5 * min(usual)


def test_every_training_process_retains_freed_memory(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(train, "keep_freed_memory", lambda: calls.append("the command"))
    beyond_the_end = ["--steps", "1", "--stop-at", "2"]  # rejected only after memory has been configured
    assert (
        main(["train", "--task", "dates", "--backend", "numpy", "--out", str(tmp_path / "run"), *beyond_the_end]) == 3
    )
    monkeypatch.setattr(processes, "keep_freed_memory", lambda: calls.append("a process of several"))
    where = SimpleNamespace(group=SimpleNamespace(rank=0))
    sent = []
    parent = SimpleNamespace(receive=lambda: (SimpleNamespace(backend="nothing", where=where), {}), send=sent.append)
    with pytest.raises(KeyError, match="nothing"):
        processes.work(parent)
    assert calls == ["the command", "a process of several"]
