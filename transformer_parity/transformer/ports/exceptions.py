"""Exceptions of ports, without the lines of code that are ours."""

from __future__ import annotations

from pathlib import Path

import transformer_parity
from transformer_parity.engine import exceptions
from transformer_parity.transformer.ports.registry import PORTS

ROOT = Path(transformer_parity.__file__).parent.parent
OURS = [ROOT / name for name in ("transformer_spec", "transformer_parity", *(port.package for port in PORTS.values()))]


def described(error: Exception) -> str:
    """Return an error, and the lines of the port's code that led to it."""
    return exceptions.described(error, OURS)
