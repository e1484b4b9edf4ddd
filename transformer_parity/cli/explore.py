"""``parity explore``: write an interactive HTML page that shows one sentence pair in every port, tap by tap."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from numpy import ndarray

from transformer_parity.apps.text.dates import SHIPPED
from transformer_parity.apps.translate.trained import Trained, read_trained
from transformer_parity.cli.options import add_backends, add_languages, add_ports, check_installed, directed, sentence
from transformer_parity.cli.progress import PlainConsole, Progress
from transformer_parity.engine.report.envelope import envelope
from transformer_parity.engine.report.page import write_page
from transformer_parity.engine.system.environment import quiet_frameworks
from transformer_parity.engine.system.errors import UsageError, refusals
from transformer_parity.engine.system.files import check_writable, write_json, write_results
from transformer_parity.transformer.explore.recording import Recording, record
from transformer_parity.transformer.explore.view import view
from transformer_parity.transformer.ports.exceptions import import_port
from transformer_parity.transformer.ports.registry import PORTS
from transformer_parity.transformer.sentences.vocabulary import pad

EXAMPLES = """\
examples:
  parity explore "Freitag, 3. Mai 2024"                     run the included date model in every installed backend
  parity explore "3 May 2024" 2024-05-03 --backends torch,jax --out dates.html
  parity explore --weights model.safetensors "A dog runs." "Ein Hund rennt."
  parity explore --port mine:MyPort "3 May 2024"            compare your port with the reference

The page is a single file that works offline. The left side lists all taps (named intermediate values) in the order of
computation, with each port's error on a logarithmic scale and the tolerance. "introduced here" marks the taps at
which a difference starts; later taps only inherit it. The right side shows the reference, the port, and the difference.
Attention scores, weights, and biases, the first tap over tolerance, and that tap's inputs are shown in full. For all
other taps, the page shows the norm at each position.

keys on the page: F first tap over tolerance, W largest difference, N/P next or previous tap, H next head, B next port,
arrow keys select a cell

exit code: 0 every tap is within tolerance; 1 a tap is over tolerance; 3 nothing was compared, or a tap is over
tolerance in float32, in which a wrong formula looks like lost precision (use --dtype float64)
"""


def add_parser(commands: Any) -> None:
    """Add the command and its options to the parser."""
    parser = commands.add_parser(
        "explore",
        description="Run one sentence pair through the reference and the ports, and write an HTML page that shows "
        "every intermediate value side by side.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", type=sentence, metavar="SOURCE", help="use this sentence as the encoder input")
    parser.add_argument(
        "target",
        type=sentence,
        nargs="?",
        metavar="TARGET",
        help="use this translation as the decoder input (default: the reference's translation of SOURCE)",
    )
    parser.add_argument(
        "--weights",
        type=Path,
        default=SHIPPED,
        metavar="FILE",
        help="use this weight file, which must contain a vocabulary, as written by `parity train` or `parity import` "
        "(default: the included date model)",
    )
    add_backends(parser, None, "all that are installed, or none if --port is given")
    add_ports(parser)
    parser.add_argument(
        "--dtype",
        choices=("float64", "float32"),
        default="float32",
        help="run the ports in this dtype; only float64 can distinguish a wrong formula from rounding "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("explore.html"),
        metavar="FILE",
        help="write the page to this file (default: %(default)s)",
    )
    add_languages(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the errors at all taps as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Record all taps, write the page, print a summary, and return the exit code."""
    check_writable(options.out, options.json)
    started = time.monotonic()
    console = PlainConsole()
    with refusals(OSError, TypeError, ValueError):
        ports = _ports(options, console)
        trained = directed(read_trained(options.weights), options)
        if not options.source.strip():
            raise UsageError("SOURCE must not be blank")
        source_ids = pad([trained.vocabulary.ids(options.source)], trained.config)
        target_ids, said = _target(options.target, trained, options.source)
    with quiet_frameworks() as terminal, Progress(["explore"], len(ports) + 1, terminal) as progress:

        def advance(name: str) -> None:
            progress.update("explore", name, advance=name != "the reference")
            progress.log(f"running {name}")

        inputs = {"source_ids": source_ids, "target_ids": target_ids}
        with refusals(RuntimeError, ValueError):
            recording = record(trained.config, trained.weights, inputs, ports, options.dtype, advance)
    names = trained.vocabulary.names
    tokens = {"source": [trained.vocabulary.pieces(options.source)], "target": [names(target_ids[0].tolist())]}
    shown = view(recording, f"{options.source} → {said}", tokens)
    about = [
        f"{options.weights.name}: {_all(recording)} in {options.dtype}, compared with the NumPy reference in float64. "
        "The error of a tap is the L2 norm of the difference divided by the norm of the reference.",
        verdict(recording),
    ]
    with refusals(OSError):
        write_page(options.out, shown, about)
    outcome = recording.verdict
    for line in filter(None, (about[-1], outcome.doubt, *shown["notes"])):
        console.print(line, soft_wrap=True)
    size = options.out.stat().st_size / 1e6
    console.print(f"wrote {options.out} ({size:.1f} MB); open it in a browser", soft_wrap=True)
    if options.json is not None:
        result = {"source": options.source, "target": said, "page": str(options.out), "dtype": options.dtype}
        result["ports"] = [
            {"port": port.name, "first_over": port.first_over, "taps": [asdict(mark) for mark in port.marks]}
            for port in recording.ports
        ]
        document = envelope("explore", result, exit_code=outcome.exit_code, seconds=time.monotonic() - started)
        write_results(document, (options.json, write_json))
    return outcome.exit_code


def verdict(recording: Recording) -> str:
    """Return a sentence that reports, for each port, the first tap whose error exceeds the tolerance."""
    wrong = {port.name: port.first_over for port in recording.ports if port.first_over}
    if not wrong:
        return f"All {len(recording.expected)} taps of {_all(recording)} are within tolerance."
    return "First tap over tolerance: " + "; ".join(f"{tap} in {name}" for name, tap in wrong.items()) + "."


def _all(recording: Recording) -> str:
    *most, last = (port.name for port in recording.ports)
    return f"{', '.join(most)}{',' * (len(most) > 1)} and {last}" if most else last


def _ports(options: argparse.Namespace, console: PlainConsole) -> list[Any]:
    """Return the requested ports, or all installed backends if no ports are requested."""
    backends = options.backends
    if backends is None:
        backends = [] if options.port else [name for name, port in PORTS.items() if port.missing() is None]
        absent = [name for name in PORTS if name not in backends and not options.port]
        if absent:
            console.print(f"skipping backends that are not installed: {', '.join(absent)}", soft_wrap=True)
    check_installed(backends)
    return [PORTS[name] for name in backends] + [import_port(name) for name in dict.fromkeys(options.port)]


def _target(text: str | None, trained: Trained, source: str) -> tuple[ndarray, str]:
    """Return the decoder input and the target text. Without ``text``, the reference translates the source."""
    vocabulary, config = trained.vocabulary, trained.config
    start = config.bos_id if vocabulary.start_id is None else vocabulary.start_id
    if text is not None:
        ids = vocabulary.target_ids(text)
    else:
        ids = trained.translation(source)
        text = vocabulary.text(ids)
    return pad([[start, *ids[:-1]]], config), text
