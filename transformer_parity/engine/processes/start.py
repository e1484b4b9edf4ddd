"""Run ``module:function`` in another interpreter: our packages come from here, all others from its environment.

The function is called with the parent process, a ``messages.Parent``.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder

FOLDER = os.path.dirname(os.path.realpath(__file__))  # without pathlib, whose import would not be timed any more
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(FOLDER)))
OURS = (
    *("transformer_spec", "reference_numpy", "transformer_torch", "transformer_jax", "transformer_tf"),
    *("transformer_parity", "transformer_bench"),
)


class Ours:
    """Finds our packages beside this one, but nothing else there: that may be built for another interpreter."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Return where a module is, if it is one of ours."""
        return PathFinder.find_spec(name, [ROOT]) if name in OURS else None


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    if sys.version_info < (3, 11):  # noqa: UP036  of the other environment
        sys.exit(f"Python 3.11 or later is needed: got {sys.version.split()[0]}")
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != FOLDER]  # its modules are no packages
    sys.meta_path.insert(0, Ours)

    from transformer_parity.engine.processes.messages import Parent

    parent = Parent()
    module, _, function = sys.argv[1].partition(":")
    getattr(importlib.import_module(module), function)(parent)
