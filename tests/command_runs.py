"""Fixtures for tests that run short commands."""

from __future__ import annotations

import importlib.util
from functools import cache

import pytest

from transformer_parity.cli import source
from transformer_parity.transformer.ports import source_code
from transformer_parity.transformer.ports.registry import PORTS

FRAMEWORKS = {module for port in PORTS.values() for module in port.needs}
parsed = cache(source_code.SourcePackage)  # parse the sources only once for all tests


@pytest.fixture(autouse=True)
def _pipe(monkeypatch):
    """Format output for a pipe that is 80 columns wide, regardless of the terminal that runs the tests."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(source, "SourcePackage", parsed)


@pytest.fixture
def bare(monkeypatch):
    """Make every framework appear to be missing."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in FRAMEWORKS else real(name))
