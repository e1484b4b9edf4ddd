"""``parity pair``: compare any two implementations of any model."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformer_parity.cli.check import add_outputs
from transformer_parity.cli.options import one_or_more, positive
from transformer_parity.cli.progress import Progress, make_console
from transformer_parity.engine.system.errors import UsageError, refusals
from transformer_parity.engine.system.files import check_writable, write_json, write_results, write_text
from transformer_parity.pairs.check import compare_pair
from transformer_parity.pairs.compare.names import as_toml
from transformer_parity.pairs.compare.stages import NEEDS
from transformer_parity.pairs.compare.truth import ALL_EPS, NoTruthError
from transformer_parity.pairs.contract.source import Source
from transformer_parity.pairs.directories import write_original
from transformer_parity.pairs.page import write
from transformer_parity.pairs.report import document, print_result
from transformer_parity.pairs.result import SEEDS, Settings
from transformer_parity.pairs.run.messages import Import
from transformer_parity.pairs.run.side import SILENCE, RunError

EXAMPLES = """
examples:
  parity init-pair --framework torch,jax                   write my_pair.py, a template that runs
  parity pair my_pair.py                                   compare its class Port with its class Original
  parity pair original.py:Model port.py:Model              compare classes of two files
  parity pair my_pair:Original my_pair:Port --names my_pair:names
  parity pair my_pair.py --write-names names.toml          save which taps correspond, as found by their values
  parity pair my_pair.py --isolate port=../mlx/bin/python  run the port with a different Python interpreter
  parity pair my_pair.py --out truth                       write files for a port in another language
  parity pair my_pair.py --json result.json --html result.html

Both classes are subclasses of transformer_parity.pair.Implementation. You don't choose tolerances: the
command measures them on the original, as docs/reference/pair-tolerances.md describes.

exit code: 0 all results agree, 1 the math differs, 2 only precision was lost, 3 not everything was compared
"""


def add_parser(commands: Any) -> None:
    """Add the command and its options to the parser."""
    parser = commands.add_parser(
        "pair",
        description="Compare two implementations of any model: the original, which you trust, and a port of it. Both "
        "receive the same weights and inputs. If their results differ, the report shows the intermediate value at "
        "which the difference starts and, if possible, its cause.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "original",
        metavar="ORIGINAL",
        help="use this implementation as the original: a Python file or module, optionally followed by :CLASS "
        "(default class: Original)",
    )
    parser.add_argument(
        "port",
        nargs="?",
        metavar="PORT",
        help="compare this implementation (default: the class Port of the same file)",
    )
    parser.add_argument(
        "--names",
        metavar="NAMES",
        help="use this map from the original's taps to the port's: a .toml file, or a dict such as my_pair:names "
        "(default: the dict `names` of the original's file, if it exists)",
    )
    parser.add_argument(
        "--write-names", type=Path, metavar="FILE", help="write the map that was used to this .toml file"
    )
    parser.add_argument(
        "--dtype",
        action=one_or_more(ALL_EPS),
        metavar=",".join(ALL_EPS),
        help="compare in these dtypes (default: the dtypes of the port)",
    )
    parser.add_argument(
        "--stage",
        action=one_or_more(NEEDS),
        metavar=",".join(NEEDS),
        help="compare only these stages (default: all that both classes support): forward (outputs and taps), "
        "gradients, decode (the logits of greedy decoding), 'cached decode' (the same with a cache)",
    )
    parser.add_argument(
        "--seeds",
        type=positive,
        default=SEEDS,
        metavar="N",
        help="compare on N batches, from inputs(0) to inputs(N-1) (default: %(default)s)",
    )
    parser.add_argument(
        "--isolate",
        action="append",
        default=[],
        metavar="SIDE=PYTHON",
        help="run the original or the port with a different Python interpreter, such as port=../other/bin/python; "
        "can be repeated",
    )
    parser.add_argument(
        "--timeout",
        type=positive,
        default=int(SILENCE),
        metavar="SECONDS",
        help="stop an implementation if a single call takes longer (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="compare nothing; write the original's weights, inputs, tensors, and tolerances to this directory, for a "
        "port in a different language (`parity compare DIR MINE` compares its tensors)",
    )
    add_outputs(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the comparison and return the exit code."""
    console = make_console()
    check_writable(options.json, options.html, options.write_names)
    with refusals(OSError, ValueError):
        original = Source.parse(options.original, "Original")
        port = Source.parse(options.port or options.original.partition(":")[0], "Port")
        if original == port:
            raise UsageError(f"ORIGINAL and PORT must be different classes: got {original} twice")
        names, source = _names(options.names, options.original)
        settings = Settings(
            options.seeds, options.dtype, options.stage, _interpreters(options.isolate), options.timeout
        )
    if options.out is not None:
        _check_no_comparison(options)
        with refusals(OSError, RunError, NoTruthError):
            replaced = write_original(Import(original), options.out, settings)
        said = f"; random values replaced {len(replaced)} constant weights" if replaced else ""
        console.print(f"wrote {options.out}{said}", soft_wrap=True)
        return 0
    with Progress(["pair"]) as progress:

        def doing(text: str) -> None:
            progress.update("pair", text, advance=1)
            progress.log(text)

        request = Import(original, names=source, needs_names=options.names is not None)
        result = compare_pair(request, Import(port), settings, names, doing)
    print_result(console, result)
    write_results(
        result,
        (options.write_names, lambda path, found: write_text(path, as_toml(found.names.written()))),
        (options.json, lambda path, found: write_json(path, document(found))),
        (options.html, write),
    )
    return result.verdict.exit_code


def _check_no_comparison(options: argparse.Namespace) -> None:
    """Raise an error if ``--out`` is combined with an option for a comparison, which would have no effect."""
    names = ("port", "names", "write_names", "dtype", "stage", "json", "html")
    if given := [name for name in names if getattr(options, name) is not None]:
        words = ", ".join("PORT" if name == "port" else f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(f"--out compares nothing, so it can't be combined with {words}")


def _names(text: str | None, original: str) -> tuple[Mapping[str, Any] | None, Source | None]:
    """Return the map of a .toml file, or the place of a dict that the original's process imports."""
    if text is None:
        return None, Source.parse(original.partition(":")[0], "names")
    if not text.endswith(".toml"):
        return None, Source.parse(text, "names")
    return tomllib.loads(Path(text).read_text("utf-8")), None


def _interpreters(isolate: Sequence[str]) -> dict[str, str]:
    found = {}
    for text in isolate:
        side, equals, python = text.partition("=")
        if not equals or side not in ("original", "port"):
            raise ValueError(f"--isolate must be original=PYTHON or port=PYTHON: got {text!r}")
        found[side] = python
    return found
