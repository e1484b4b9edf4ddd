"""``parity info``: this machine, the four backends, and every preset with its size."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from reference_numpy import PRESETS, TransformerConfig, count_parameters
from reference_numpy.config import IMPLEMENTATIONS
from reference_numpy.names import parameter_shapes, tap_shapes
from transformer_parity.cases import BATCH, SOURCE, TARGET, tiny
from transformer_parity.ports import PORTS, PackagePort, quiet_frameworks

DISTRIBUTION = "transformer-parity"
PAPER_VOCABULARY = 37_000  # section 5.1: "about 37000 tokens"
BEST_VOCABULARY = 41_096  # one of those that explain the most of Table 3

# Table 3 of the paper, in millions of parameters; its other rows print no number.
PRINTED_MILLIONS = {
    "paper_base": 65,
    "paper_dk16": 58,
    "paper_dk32": 60,
    "paper_n2": 36,
    "paper_n4": 50,
    "paper_n8": 80,
    "paper_d256": 28,
    "paper_d1024": 168,
    "paper_ff1024": 53,
    "paper_ff4096": 90,
    "paper_big": 213,
}

DESCRIPTION = """\
Show this machine, what is installed of the four backends, and every preset:
how many parameters it has, and how it differs from the paper's base model.
"""

EXAMPLES = """\
examples:
  parity info                  everything, as tables
  parity info --vocab 8000     the presets' sizes at another vocabulary
  parity info --json           the same for programs; put it into a bug report
  parity info --names marian   every parameter and every tap of a preset, with its shape
"""


def add_parser(commands: Any) -> None:
    """Describe the command and its options."""
    parser = commands.add_parser(
        "info",
        help="this machine, the four backends, and every preset with its size",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--vocab",
        type=int,
        default=PAPER_VOCABULARY,
        metavar="N",
        help="the vocabulary at which parameters are counted (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--names",
        nargs="?",
        const="paper_base",
        choices=PRESETS,
        metavar="PRESET",
        help="print the canonical names of parameters and taps instead, with the shapes they have in the deck",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print what there is to know and return the exit code."""
    if options.names is not None:
        print_names(options.names, as_json=options.json)
        return 0
    try:
        presets = describe_presets(options.vocab)
    except ValueError as error:
        print(f"parity info: error: --vocab {options.vocab}: {error}", file=sys.stderr)
        return 3
    backends = {}
    with quiet_frameworks() as terminal, Console(file=terminal).status("") as spinner:
        for name, port in PORTS.items():
            spinner.update(f"importing {port.package}")
            backends[name] = describe_backend(port)
    machine = describe_machine()
    if options.json:
        report = {**machine, "backends": backends, "vocab_size": options.vocab, "presets": presets}
        print(json.dumps(report, indent=2))
        return 0
    console = Console(highlight=False)
    _print_machine(console, machine)
    _print_backends(console, backends)
    _print_presets(console, presets, options.vocab)
    return 0


def print_names(preset: str, *, as_json: bool) -> None:
    """Print every parameter and every tap of a preset, at the sizes of the deck: B 4, S 9, T 7, two layers a side."""
    config = tiny(preset, d_k=None, d_v=None)
    names = {"parameters": parameter_shapes(config), "taps": tap_shapes(config, BATCH, SOURCE, TARGET)}
    if as_json:
        print(json.dumps({kind: {name: list(shape) for name, shape in of.items()} for kind, of in names.items()}))
        return
    console = Console(highlight=False)
    for kind, shapes in names.items():
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column(kind, no_wrap=True)
        table.add_column("shape", no_wrap=True)
        for name, shape in shapes.items():
            table.add_row(name, str(list(shape)))
        console.print(table)


def describe_machine() -> dict[str, Any]:
    """Return what the comparison runs on."""
    try:
        release = version(DISTRIBUTION)
    except PackageNotFoundError:
        release = "not installed, run from its folder"
    return {
        DISTRIBUTION: release,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
    }


def describe_backend(port: PackagePort) -> dict[str, Any]:
    """Return what is installed of a backend: versions, devices and switches, or how to install it."""
    if missing := port.missing():
        return {"installed": False, "missing": missing, "install": f"pip install '{DISTRIBUTION}[{port.name}]'"}
    try:
        package = port.import_package()
        described = package.describe()
    except Exception as error:  # whatever a broken installation raises is what the user wants to know
        return {"installed": True, "error": f"{type(error).__name__}: {error}"}
    return {
        "installed": True,
        **described,
        "dtypes": list(package.runtime.DTYPES),
        "runs on": list(package.runtime.DEVICES),
    }


def describe_presets(vocab_size: int) -> dict[str, dict[str, Any]]:
    """Return each preset's parameter count, the paper's where it prints one, and how it differs from the base model.

    Raises:
        ValueError: There is no model with such a vocabulary.
    """
    return {
        name: {
            "parameters": count(name, vocab_size),
            "printed_millions": PRINTED_MILLIONS.get(name),
            "differs": differences(name),
        }
        for name in PRESETS
    }


def count(preset: str, vocab_size: int) -> int:
    """Return how many parameters a preset has at a vocabulary, which both sides have in common."""
    return count_parameters(
        TransformerConfig.preset(preset, source_vocab_size=vocab_size, target_vocab_size=vocab_size)
    )


def reproduced(vocab_size: int) -> int:
    """Return how many of the paper's printed counts a vocabulary yields, rounded to millions."""
    return sum(round(count(name, vocab_size) / 1e6) == printed for name, printed in PRINTED_MILLIONS.items())


def differences(preset: str) -> dict[str, Any]:
    """Return the fields in which a preset is not the base model; a dropout rate as ``dropout.<site>``.

    ``d_k`` and ``d_v`` count as different only where they are not d_model / num_heads.
    """
    base, other = (
        TransformerConfig.preset(name, source_vocab_size=PAPER_VOCABULARY, target_vocab_size=PAPER_VOCABULARY)
        for name in ("paper_base", preset)
    )
    found: dict[str, Any] = {}
    for field in dataclasses.fields(TransformerConfig):
        ours, theirs = getattr(base, field.name), getattr(other, field.name)
        if field.name in ("d_k", "d_v") and theirs == other.d_model // other.num_heads:
            continue
        if field.name == "dropout":
            rates = {
                site.name: (getattr(ours, site.name), getattr(theirs, site.name)) for site in dataclasses.fields(ours)
            }
            found |= {f"dropout.{site}": rate for site, (before, rate) in rates.items() if rate != before}
        elif theirs != ours:
            found[field.name] = theirs
    return found


def _print_machine(console: Console, machine: dict[str, Any]) -> None:
    grid = Table.grid(padding=(0, 2))
    for name, value in machine.items():
        grid.add_row(f"[bold]{name}[/]", str(value))
    console.print(grid)


def _print_backends(console: Console, backends: dict[str, dict[str, Any]]) -> None:
    """Print one column per backend, so that they can be compared row by row."""
    console.print()
    table = Table(title="Backends", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in backends:
        table.add_column(name, overflow="fold")
    working = {name: found for name, found in backends.items() if "version" in found}
    rows = dict.fromkeys(row for found in working.values() for row in found if row != "installed")
    for row in rows:
        cells = (_cell(found.get(row, "-")) if name in working else "" for name, found in backends.items())
        table.add_row(row, *cells)
    if not_working := [name for name in backends if name not in working]:
        marks = {name: "fails" if backends[name]["installed"] else "not installed" for name in not_working}
        table.add_row("", *(f"[red]{marks.get(name, '')}[/]" for name in backends))
    console.print(table)
    console.print(
        "[dim]Switches stand as each framework sets them on import; loading a model sets them to its precision.[/]"
    )
    for name, found in backends.items():
        if not found["installed"]:
            console.print(
                f"{name}: {found['missing']} is not installed. {found['install']}", markup=False, soft_wrap=True
            )
        elif "error" in found:
            console.print(f"{name}: installed, but it fails: {found['error']}", style="red", markup=False)


def _cell(value: Any) -> str:
    return "\n".join(value) if isinstance(value, list) else str(value).replace(", ", "\n")


def _print_presets(console: Console, presets: dict[str, dict[str, Any]], vocab_size: int) -> None:
    console.print()
    title = f"Presets at a vocabulary of {vocab_size:,}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column("parameters", justify="right")
    table.add_column("paper", justify="right")
    table.add_column("differs from paper_base in")
    for name, preset in presets.items():
        if name == next(iter(IMPLEMENTATIONS)):
            table.add_section()
        printed = preset["printed_millions"]
        millions = "" if printed is None else f"{printed} M"
        differs = ", ".join(f"{field}={value}" for field, value in preset["differs"].items())
        table.add_row(name, f"{preset['parameters']:,}", millions, differs)
    console.print(table)
    tried = dict.fromkeys((vocab_size, PAPER_VOCABULARY, BEST_VOCABULARY))
    hits = "; ".join(f"{size:,} yields {reproduced(size)}" for size in tried)
    console.print(
        f"[dim]paper: as printed in Table 3. No single vocabulary reproduces all {len(PRINTED_MILLIONS)} numbers: "
        f"{hits}.[/]"
    )
