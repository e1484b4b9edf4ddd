"""Run a ``module:function`` in a child process, possibly in a different Python interpreter.

The packages of this project are imported from the directory that contains this package. All other packages are imported
from the environment of the interpreter. The function is called with a ``messages.Parent``.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder

# pathlib is not used here, because it would already be imported when benchmarks measure import times.
DIRECTORY = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(DIRECTORY)))
OURS = (
    *("transformer_spec", "reference_numpy", "transformer_torch", "transformer_jax", "transformer_tf"),
    *("transformer_parity", "transformer_bench"),
)


class Ours:
    """An import finder that finds only this project's packages, in the directory that contains this package.

    All other packages in this directory are ignored, because they may be built for a different interpreter.
    """

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Return the location of a module if it belongs to this project."""
        return PathFinder.find_spec(name, [ROOT]) if name in OURS else None


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    if sys.version_info < (3, 11):  # noqa: UP036  the child may run an older Python than its parent
        sys.exit(f"Python 3.11 or later is required: got {sys.version.split()[0]}")
    # Python adds the directory of this script to sys.path, which would make the directory's modules importable by short
    # names.
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != DIRECTORY]
    sys.meta_path.insert(0, Ours)

    from transformer_parity.engine.processes.messages import Parent

    parent = Parent()
    module, _, function = sys.argv[1].partition(":")
    getattr(importlib.import_module(module), function)(parent)
