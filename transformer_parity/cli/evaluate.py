"""``parity evaluate``: measure the loss and the score of trained weights."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from transformer_parity.apps.train.evaluate import evaluate, held_out
from transformer_parity.apps.translate.trained import read_trained
from transformer_parity.cli.options import (
    FALLBACK_HELP,
    add_backends,
    add_languages,
    add_search,
    check_installed,
    described,
    directed,
    installed_backend,
    positive,
    search_options,
)
from transformer_parity.cli.progress import PlainConsole, make_console
from transformer_parity.engine.report.envelope import envelope
from transformer_parity.engine.system.environment import quiet_frameworks
from transformer_parity.engine.system.errors import printable, refusals
from transformer_parity.engine.system.files import check_writable, write_json, write_results

EXAMPLES = """\
examples:
  parity evaluate runs/dates-jax/model.safetensors --task dates --sentences 5000 --backend numpy,torch,jax,tf
  parity evaluate runs/text-torch/checkpoint-*.safetensors --text test.en test.de
  parity evaluate model.safetensors --text test.en test.de --beam 4    use the paper's beam size

exit code: 0 evaluated, 3 not evaluated
"""


def add_parser(commands: Any) -> None:
    """Add the command and its options to the parser."""
    parser = commands.add_parser(
        "evaluate",
        description="Translate held-out sentences with weights written by `parity train` or `parity import`. Report "
        "the loss per target token and BLEU (sacrebleu, cased, detokenized) or, for dates, the percentage of exact "
        "matches. If a sentence is longer than the model supports, its translation is empty.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "weights", nargs="+", type=Path, metavar="FILE", help="evaluate these weight files or training checkpoints"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--task", choices=["dates"], help="evaluate on generated dates, which are held out from every training set"
    )
    what.add_argument(
        "--text", nargs=2, type=Path, metavar=("SOURCE", "TARGET"), help="evaluate on two line-aligned text files"
    )
    add_backends(parser, None, FALLBACK_HELP)
    parser.add_argument(
        "--sentences",
        type=positive,
        metavar="N",
        help="evaluate only the first N sentences (default: all sentences for --text, 1000 dates for --task)",
    )
    add_search(parser)
    add_languages(parser)
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu", help="run on this device (default: cpu)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Evaluate each model in each backend, and return the exit code."""
    check_writable(options.json)
    started = time.monotonic()
    backends = options.backends or [installed_backend("parity evaluate")]
    check_installed(backends)
    results = []
    with quiet_frameworks() as terminal, refusals(OSError, RuntimeError, TypeError, ValueError):
        console = PlainConsole(file=terminal)
        for path in options.weights:
            trained = directed(read_trained(path), options)
            search = search_options(options, trained.search)
            corpus = held_out(options.text, options.sentences)
            for backend in backends:
                with console.status(Text(printable(f"{backend}: {path}"))):
                    results.append(evaluate(trained, corpus, backend, options.device, search))
    _print(results)
    if options.json is not None:
        document = envelope(
            "evaluate",
            {"evaluations": results},
            compares=False,
            environment=described(backends),
            seconds=time.monotonic() - started,
        )
        write_results(document, (options.json, write_json))
    return 0


def _print(results: list[dict[str, Any]]) -> None:
    """Print one row per model and backend."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    metric = "BLEU" if "BLEU" in results[0] else "exact match"
    search = f"beam {results[0]['beam']}" if results[0]["beam"] else "greedy"
    table.add_column("weights", overflow="fold")
    for column in ("step", "backend", "sentences", "loss", "perplexity", f"{metric}, {search}", "time"):
        table.add_column(column, justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            printable(result["file"]),
            "-" if result["step"] is None else f"{result['step']:,}",
            result["backend"],
            f"{result['sentences']:,}",
            f"{result['loss']:.4f}",
            f"{result['perplexity']:.2f}",
            f"{result[metric]:.2f}" + "%" * (metric == "exact match"),
            f"{result['seconds']:.0f} s",
        )
    make_console().print(table)
