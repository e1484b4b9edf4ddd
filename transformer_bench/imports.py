"""The time to import a package, beside that of its framework alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from transformer_bench.measurements import Entry
from transformer_parity.engine.system.child import ChildEndedError, Children
from transformer_parity.engine.system.environment import prepare_environment
from transformer_parity.transformer.ports.registry import PORTS

WORK = "transformer_bench.import_clock:work"  # what a process runs
FRAMEWORKS = {"numpy": "numpy, safetensors.numpy", "torch": "torch", "jax": "jax, flax.nnx", "tf": "tensorflow, keras"}


@dataclass
class Pair:
    """A package and its framework: each round imports both, each in a fresh process."""

    name: str
    alone: Entry = field(init=False)
    package: Entry = field(init=False)

    def __post_init__(self) -> None:
        self.alone = Entry(FRAMEWORKS[self.name], has_result=False)
        self.package = Entry(PORTS[self.name].package)


def run_imports(pairs: Sequence[Pair], rounds: int, tell: Callable[[str, int], None]) -> None:
    """Import all pairs in interleaved rounds, after one that is not counted: it reads the files from the disk.

    Raises:
        ImportError: A module cannot be imported; the message is the last line that the process printed.
    """
    prepare_environment()  # as `parity` does, for the processes that are started here
    with Children() as children:
        for number in range(rounds + 1):
            for pair in pairs:
                tell(pair.name, number)
                for entry in (pair.alone, pair.package):
                    seconds = _import_seconds(children, entry.name)
                    if number > 0:
                        entry.seconds.append(seconds)


def _import_seconds(children: Children, modules: str) -> float:
    child = children.start(WORK)
    child.send(modules.split(", "))
    try:
        return child.receive()
    except ChildEndedError as error:
        raise ImportError(f"import {modules}: {error.last_line}") from None
    finally:
        children.stop(child)
