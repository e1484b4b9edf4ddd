"""Measure the time required to import each package, and the time required to import only its framework.

    python -m transformer_bench.imports --rounds 20 --json import.json

Every import runs in a new process. The difference between the two times is the cost of the package itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from transformer_bench import tables
from transformer_bench.measurements import Entry, Spread, ratio
from transformer_parity.cli.options import add_backends, check_installed, positive
from transformer_parity.cli.progress import Progress, make_console
from transformer_parity.engine.processes.child import ChildEndedError
from transformer_parity.engine.processes.children import Children
from transformer_parity.engine.system.environment import prepare_environment
from transformer_parity.engine.system.files import check_writable, write_json, write_results
from transformer_parity.transformer.ports.registry import PORTS

WORK = "transformer_bench.import_clock:work"  # the function that each process runs
FRAMEWORKS = {"numpy": "numpy, safetensors.numpy", "torch": "torch", "jax": "jax, flax.nnx", "tf": "tensorflow, keras"}


@dataclass
class Pair:
    """A package and its framework. Each round imports the package and the framework in two new processes."""

    name: str
    alone: Entry = field(init=False)
    package: Entry = field(init=False)

    def __post_init__(self) -> None:
        self.alone = Entry(FRAMEWORKS[self.name], has_result=False)
        self.package = Entry(PORTS[self.name].package)


def main(arguments: Sequence[str] | None = None) -> None:
    """Time imports in interleaved rounds, and print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_backends(parser, list(PORTS))
    parser.add_argument(
        "--rounds", type=positive, default=7, metavar="N", help="measure N rounds (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result as JSON")
    options = parser.parse_args(arguments)
    check_installed(options.backends)
    check_writable(options.json)
    console, machine = make_console(), tables.describe(1)
    pairs = [Pair(name) for name in options.backends]
    with Progress([pair.name for pair in pairs], options.rounds + 1) as progress:

        def tell(name: str, number: int) -> None:
            progress.update(name, f"round {number}", completed=number)
            progress.log(f"round {number} of {options.rounds}: {name}")

        run_imports(pairs, options.rounds, tell)
    print_imports(console, pairs)
    tables.print_environment(console, [], machine)
    found = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine,
        "imports": [entry.to_dict() for pair in pairs for entry in (pair.alone, pair.package)],
        "ratios": {pair.name: asdict(ratio(pair.package, pair.alone)) for pair in pairs},
    }
    write_results(found, (options.json, write_json))


def run_imports(pairs: Sequence[Pair], rounds: int, tell: Callable[[str, int], None]) -> None:
    """Import all pairs in interleaved rounds, after a warm-up round that reads the files from the disk.

    Raises:
        ImportError: If a module can't be imported. The message contains the last line that the process printed.
    """
    prepare_environment()  # sets the same environment variables as `parity`; the child processes inherit them
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


def print_imports(console: Console, pairs: Sequence[Pair]) -> None:
    """Print the import times of each package and its framework."""
    rows = tables.table("framework\nms", "package\nms", "ratio", "lowest to\nhighest")
    for pair in pairs:
        medians = [1e3 * Spread.of(entry.seconds).median for entry in (pair.alone, pair.package)]
        relative = ratio(pair.package, pair.alone)
        spread = f"{relative.low:.2f} .. {relative.high:.2f}"
        rows.add_row(pair.package.name, *(f"{ms:,.0f}" for ms in medians), f"{relative.median:.2f}", spread)
    console.print(rows)
    alone = "; ".join(f"{pair.package.name}: {pair.alone.name}" for pair in pairs)
    console.print(f"Frameworks: {alone}. Medians of interleaved rounds; each import runs in a new process.")


if __name__ == "__main__":
    main()
