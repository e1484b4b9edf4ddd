"""``parity info``: describe the machine, the backends, the presets, and the canonical names, or a weight file."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from reference_numpy import PRESETS
from transformer_parity.apps.checkpoints.importer import load
from transformer_parity.apps.checkpoints.summary import describe, print_model
from transformer_parity.cli.describe_presets import PAPER_VOCABULARY, describe_presets, print_presets
from transformer_parity.cli.progress import PlainConsole, make_console
from transformer_parity.engine.report.envelope import envelope
from transformer_parity.engine.system.environment import quiet_frameworks
from transformer_parity.engine.system.errors import UsageError, printable, refusals
from transformer_parity.engine.system.machine import describe_machine, processors
from transformer_parity.transformer.cases.case import tiny
from transformer_parity.transformer.cases.inputs import BATCH, SOURCE, TARGET
from transformer_parity.transformer.ports.matmuls import library, quick_rate
from transformer_parity.transformer.ports.package import PackagePort
from transformer_parity.transformer.ports.registry import PORTS
from transformer_spec.names import parameter_shapes, tap_shapes

DESCRIPTION = """\
Describe this machine, the installed backends with their matmul throughput on the
CPU, and all presets with their parameter counts and their differences from the
paper's base model.

If FILE is given, describe this weight file or training checkpoint instead: the
closest preset and the differences from it, the size, dtype, vocabulary, languages,
search settings, training step, and origin. For checkpoints from other software,
use `parity import`.
"""
LIBRARY = "matmul library on a CPU"
RATE = "GFLOP/s, one matmul"
BY_ONEDNN = "GFLOP/s, by oneDNN"  # only for PyTorch, if it uses oneDNN under precision="highest"
# Names of rows in the printed table. The JSON output contains the original keys.
ROW_NAMES = {LIBRARY: "matmul library (CPU)", RATE: "matmul GFLOP/s", BY_ONEDNN: "matmul GFLOP/s with oneDNN"}
SLOW = 0.6  # fraction of the best throughput below which a note is printed
BUSY = 0.5  # load average per CPU core above which measured throughputs are unreliable
EXAMPLES = """\
examples:
  parity info                             show all tables
  parity info --vocab 8000                compute the presets' sizes for a different vocabulary
  parity info --json                      print JSON, for example for a bug report
  parity info --names marian              list the parameters and taps of a preset with their shapes
  parity info model.safetensors           describe a weight file
  parity info model.safetensors --json    describe it as JSON, including every field of the config
"""


def add_parser(commands: Any) -> None:
    """Add the command and its options to the parser."""
    parser = commands.add_parser(
        "info",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="describe this weight file or checkpoint")
    parser.add_argument(
        "--vocab",
        type=int,
        metavar="N",
        help=f"count the presets' parameters for a vocabulary of N entries (default: {PAPER_VOCABULARY})",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--names",
        nargs="?",
        const="paper_base",
        choices=PRESETS,
        metavar="PRESET",
        help="instead of the tables, print the canonical names of parameters and taps, and their shapes in the "
        "standard cases (PRESET defaults to %(const)s)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the requested description and return the exit code."""
    if options.file is not None:
        if given := [f"--{name}" for name in ("vocab", "names") if getattr(options, name) is not None]:
            flags = " and ".join(given)
            raise UsageError(f"{flags} cannot be combined with FILE; remove either FILE or {flags}")
        print_file(options.file, as_json=options.json)
    elif options.names is not None:
        print_names(options.names, as_json=options.json)
    else:
        print_installation(PAPER_VOCABULARY if options.vocab is None else options.vocab, as_json=options.json)
    return 0


def print_file(path: Path, *, as_json: bool) -> None:
    """Print a description of a weight file or a checkpoint.

    Raises:
        UsageError: If the file can't be read, or is neither a weight file nor a checkpoint.
    """
    started = time.monotonic()
    if path.is_dir():
        raise UsageError(
            f"{path} is a directory; specify a weight file in it, or use `parity import {path}` for a checkpoint from "
            "other software"
        )
    with refusals(OSError):
        try:
            model, size = load(path), path.stat().st_size
        except ValueError as error:
            raise UsageError(f"{error}; for a checkpoint from other software, use `parity import {path}`") from error
    if as_json:
        _print_json({"path": str(path), "bytes": size, **describe(model)}, started)
        return
    make_console().print(f"{path}  ({size / 1e6:,.1f} MB)", soft_wrap=True)
    print_model(make_console(), model, files=True)


def print_installation(vocab_size: int, *, as_json: bool) -> None:
    """Print the tables of the machine, the backends, and the presets."""
    started = time.monotonic()
    try:
        presets = describe_presets(vocab_size)
    except ValueError as error:
        raise UsageError(f"--vocab {vocab_size}: {error}") from error
    backends = {}
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    with quiet_frameworks() as terminal, Console(file=terminal).status("") as spinner:
        for name, port in PORTS.items():
            spinner.update(f"importing {port.package}")
            backends[name] = describe_backend(port)
    machine = describe_machine()
    if as_json:
        _print_json({"backends": backends, "vocab_size": vocab_size, "presets": presets}, started)
        return
    console = PlainConsole()
    _print_machine(console, machine)
    _print_backends(console, backends, load)
    print_presets(console, presets, vocab_size)


def print_names(preset: str, *, as_json: bool) -> None:
    """Print the names and shapes of a preset's parameters and taps, for a small model and batch."""
    started = time.monotonic()
    config = tiny(preset, d_k=None, d_v=None)
    names = {"parameters": parameter_shapes(config), "taps": tap_shapes(config, BATCH, SOURCE, TARGET)}
    if as_json:
        _print_json({kind: {name: list(shape) for name, shape in of.items()} for kind, of in names.items()}, started)
        return
    console = PlainConsole()
    for kind, shapes in names.items():
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column(kind, no_wrap=True)
        table.add_column("shape", no_wrap=True)
        for name, shape in shapes.items():
            table.add_row(name, str(list(shape)))
        console.print(table)


def _print_json(result: dict[str, Any], started: float) -> None:
    """Print the result as JSON."""
    print(json.dumps(envelope("info", result, compares=False, seconds=time.monotonic() - started), indent=2))


def describe_backend(port: PackagePort) -> dict[str, Any]:
    """Return a backend's versions, devices, and switches if it is installed, otherwise the install command."""
    if missing := port.missing():
        return {"installed": False, "missing": missing, "install": port.install}
    try:
        package = port.import_package()
        described = {**package.describe(), **multiplying(port.name, package)}
    except Exception as error:  # a broken installation may raise any exception
        return {"installed": True, "error": f"{type(error).__name__}: {error}"}
    return {
        "installed": True,
        **described,
        "dtypes": list(package.runtime.DTYPES),
        "runs on": list(package.runtime.DEVICES),
    }


def multiplying(backend: str, package: Any) -> dict[str, Any]:
    """Return the library that a package uses for matrix multiplication on the CPU, and the library's throughput."""
    rate = quick_rate(backend) / 1e9
    matmuls = library(package.describe(), backend)
    found: dict[str, Any] = {LIBRARY: matmuls, RATE: round(rate, 1)}
    if backend == "torch":
        from transformer_parity.transformer.ports import onednn

        found[LIBRARY] = matmuls + onednn.describe()
        if onednn.pays("highest"):
            found[BY_ONEDNN] = round(rate * onednn.measured().gain, 1)
    return found


def _print_machine(console: Console, machine: dict[str, Any]) -> None:
    grid = Table.grid(padding=(0, 2))
    for name, value in machine.items():
        grid.add_row(Text(name, "bold"), str(value))
    console.print(grid)


def _print_backends(console: Console, backends: dict[str, dict[str, Any]], load: float) -> None:
    """Print a table with one column per backend, followed by notes on slow, missing, and broken backends."""
    console.print()
    table = Table(title="Backends", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in backends:
        table.add_column(name, overflow="fold")
    working = {name: found for name, found in backends.items() if "version" in found}
    rows = dict.fromkeys(row for found in working.values() for row in found if row != "installed")
    for row in rows:
        cells = (_cell(found.get(row, "-")) if name in working else "" for name, found in backends.items())
        table.add_row(ROW_NAMES.get(row, row), *cells)
    if not_working := [name for name in backends if name not in working]:
        marks = {name: "fails" if backends[name]["installed"] else "not installed" for name in not_working}
        table.add_row("", *(Text(marks.get(name, ""), "red") for name in backends))
    console.print(table)
    said = (
        "Precision settings are shown as each framework sets them on import. `parity check` changes these settings to "
        "match --precision."
    )
    console.print(said, style="dim")
    for line in slow(backends, load):
        console.print(f"NOTE      {line}", soft_wrap=True)
    for name, found in backends.items():
        if not found["installed"]:
            console.print(f"{name}: {found['missing']} is not installed. {found['install']}", soft_wrap=True)
        elif "error" in found:
            console.print(f"{name}: cannot be imported: {printable(found['error'])}", style="red")


def slow(backends: dict[str, dict[str, Any]], load: float) -> Iterator[str]:
    """Yield a line for each backend whose matmul throughput is less than 60% of the best throughput on this machine.

    Args:
        backends: A dict from backend names to the results of ``describe_backend``.
        load: The load average before the measurement. If the load is high, the measured throughputs aren't comparable.
    """
    words = {RATE: "{}", BY_ONEDNN: "{} with oneDNN"}
    rates = {
        word.format(name): found[row] for name, found in backends.items() for row, word in words.items() if row in found
    }
    best = max(rates, key=lambda name: rates[name], default="")
    for name, found in backends.items():
        share = found[RATE] / rates[best] if RATE in found else 1.0
        if share < SLOW and load > BUSY * processors():
            yield f"the machine is busy (load average {load:.1f}), so the measured throughputs vary"
            return
        if share < SLOW:
            remedy = '; torch.set_float32_matmul_precision("medium") selects oneDNN' if BY_ONEDNN in found else ""
            yield f"{name}: matmul throughput is {share:.0%} of {best}, the best on this machine{remedy}"


def _cell(value: Any) -> str:
    return "\n".join(value) if isinstance(value, list) else str(value).replace(", ", "\n")
