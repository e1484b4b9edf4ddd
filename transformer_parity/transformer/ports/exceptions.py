"""Descriptions of exceptions that ports raise, with tracebacks that show only lines of the port's code."""

from __future__ import annotations

from pathlib import Path

import transformer_parity
from transformer_parity.engine import exceptions
from transformer_parity.engine.system.errors import UsageError
from transformer_parity.transformer.ports.registry import PORTS
from transformer_parity.transformer.ports.user import PluginPort

ROOT = Path(transformer_parity.__file__).parent.parent
OURS = [ROOT / name for name in ("transformer_spec", "transformer_parity", *(port.package for port in PORTS.values()))]


def described(error: Exception) -> str:
    """Return an error message, followed by the lines of the port's code that raised the error."""
    return exceptions.described(error, OURS)


def import_port(reference: str) -> PluginPort:
    """Import a user's port in this process.

    Raises:
        ValueError: If the port doesn't exist.
        UsageError: If the port's module raises an exception.
    """
    try:
        return PluginPort(reference)
    except (UsageError, ValueError):
        raise
    except Exception as error:
        raise UsageError(f"port {reference!r} cannot be imported: {described(error)}") from error
