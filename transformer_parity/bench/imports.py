"""The time to import a package, beside that of its framework alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from transformer_parity.bench.measurements import Entry
from transformer_parity.ports.registry import PORTS
from transformer_parity.system.environment import prepare_environment

FRAMEWORKS = {
    "numpy": "numpy, safetensors.numpy",
    "torch": "torch",
    "jax": "jax, flax.nnx",
    "tf": "tensorflow, keras",
}
SCRIPT = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"


@dataclass
class Pair:
    """A package and its framework: each round imports both, each in a fresh process."""

    name: str
    alone: Entry = field(init=False)
    package: Entry = field(init=False)

    def __post_init__(self) -> None:
        self.alone = Entry(FRAMEWORKS[self.name], has_result=False)
        self.package = Entry(PORTS[self.name].package)

    def run(self) -> None:
        """Import the framework, and then, in another process, the package.

        Raises:
            ImportError: One of the two cannot be imported; the message is the last line that it printed.
        """
        prepare_environment()  # as `parity` does, for the processes that are started here
        for entry in (self.alone, self.package):
            entry.seconds.append(_import_seconds(entry.name))


def time_imports(pairs: Sequence[Pair], rounds: int, tell: Callable[[str, int], None]) -> bool:
    """Import every package in every round, and return whether Ctrl-C ended it early.

    Round 0 fills the caches of the file system and is not counted.

    Args:
        pairs: The packages, each with its framework.
        rounds: That are counted.
        tell: Called with a package and the round that begins.

    Raises:
        ImportError: As from ``Pair.run``.
    """
    try:
        for number in range(rounds + 1):
            for pair in pairs:
                tell(pair.name, number)
                pair.run()
                if number == 0:
                    pair.alone.seconds.clear()
                    pair.package.seconds.clear()
    except KeyboardInterrupt:
        return True
    return False


def _import_seconds(modules: str) -> float:
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(modules)], capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise ImportError(f"import {modules}: {last[0]}")
    return float(done.stdout.split()[-1])
