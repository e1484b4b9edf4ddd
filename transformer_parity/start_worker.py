"""What the interpreter of a worker runs: our packages come from here, all others from its own environment."""

import signal
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
OURS = ("reference_numpy", "transformer_torch", "transformer_jax", "transformer_tf", "transformer_parity")


class Ours:
    """Finds our packages beside this one, but nothing else there: that may be built for another interpreter."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Return where a module is, if it is one of ours."""
        return PathFinder.find_spec(name, [str(FOLDER.parent)]) if name in OURS else None


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    if sys.version_info < (3, 11):  # noqa: UP036  of the environment, which nobody has looked at
        sys.exit(f"Python 3.11 or later is needed: got {sys.version.split()[0]}")
    sys.path[:] = [entry for entry in sys.path if entry != str(FOLDER)]  # its modules are no packages
    sys.meta_path.insert(0, Ours)

    from transformer_parity.workers import work

    work()
