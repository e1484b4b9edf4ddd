"""``parity evaluate`` and ``parity curve``: loss and score of trained weights, and the curves of training."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from transformer_parity.apps.train import curves
from transformer_parity.apps.train.evaluate import evaluate, held_out
from transformer_parity.apps.train.log import CURVE, LOG, read_log
from transformer_parity.apps.translate.trained import read_trained
from transformer_parity.cli.options import (
    FALLBACK_HELP,
    add_backends,
    add_languages,
    add_search,
    check_installed,
    directed,
    installed_backend,
    positive,
    search_options,
)
from transformer_parity.cli.progress import PlainConsole, make_console
from transformer_parity.engine.system.environment import quiet_frameworks
from transformer_parity.engine.system.errors import UsageError, printable, refusals
from transformer_parity.engine.system.files import check_writable, write_json, write_results

EXAMPLES = """\
examples:
  parity evaluate runs/dates-jax/model.safetensors --task dates --sentences 5000 --backend numpy,torch,jax,tf
  parity evaluate runs/text-torch/checkpoint-*.safetensors --text test.en test.de
  parity evaluate model.safetensors --text test.en test.de --beam 4    as in the paper

exit code: 0 evaluated, 3 not
"""


def add_parser(commands: Any) -> None:
    """Describe the options."""
    parser = commands.add_parser(
        "evaluate",
        description="Translate held-out sentences with weights that `parity train` wrote, and report the loss per "
        "target token and BLEU (sacrebleu, cased, detokenised) or, for dates, the share of exact matches. A sentence "
        "that is longer than the model's positions counts as translated into nothing.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("weights", nargs="+", type=Path, metavar="FILE", help="final weights, or checkpoints of a run")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--task", choices=["dates"], help="dates on days that no training set contains")
    what.add_argument("--text", nargs=2, type=Path, metavar=("SOURCE", "TARGET"), help="two line-aligned files")
    add_backends(parser, None, FALLBACK_HELP)
    parser.add_argument("--sentences", type=positive, metavar="N", help="the first N only (default: all; 1000 dates)")
    add_search(parser)
    add_languages(parser)
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu", help="where to compute (default: cpu)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result for machines")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Evaluate, and return the exit code."""
    check_writable(options.json)
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
    write_results(results, (options.json, write_json))
    return 0


def _print(results: list[dict[str, Any]]) -> None:
    """Print one row for each model in each backend."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    metric = "BLEU" if "BLEU" in results[0] else "exact match"
    search = f"beam {results[0]['beam']}" if results[0]["beam"] else "greedy"
    table.add_column("weights", overflow="fold")
    for column in ("step", "backend", "sentences", "loss", "perplexity", f"{metric}, {search}", "translated in"):
        table.add_column(column, justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            printable(result["file"]),
            "-" if result["step"] is None else f"{result['step']:,}",
            result["backend"],
            f"{result['sentences']:,}",
            f"{result['loss']:.4f}",
            f"{result['perplexity']:.2f}",
            f"{result[metric]:.2f}" + " %" * (metric == "exact match"),
            f"{result['seconds']:.0f} s",
        )
    make_console().print(table)


def add_parser_curve(commands: Any) -> None:
    """Describe the options."""
    parser = commands.add_parser(
        "curve",
        description="Draw training loss, held-out loss and score of several runs, one backend each, into one picture.",
        epilog="example:\n  parity curve runs/dates-torch runs/dates-jax runs/dates-tf --out dates.png",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders that `parity train` wrote")
    parser.add_argument("--out", type=Path, default=Path(CURVE), metavar="FILE", help=f"png or svg (default: {CURVE})")
    parser.set_defaults(run=run_curve)


def run_curve(options: argparse.Namespace) -> int:
    """Draw, and return the exit code."""
    if missing := [str(folder) for folder in options.runs if not (folder / LOG).is_file()]:
        raise UsageError(f"no {LOG} in {', '.join(missing)}")
    if options.out.suffix not in (".png", ".svg"):
        raise UsageError(f"--out must end in .png or .svg: got {options.out}")
    check_writable(options.out)
    with refusals(OSError):
        logs = [read_log(folder) for folder in options.runs]
        for folder, log in zip(options.runs, logs, strict=True):
            kinds = {event["event"] for event in log}
            if lacking := [f"no {kind}" for kind in ("start", "step") if kind not in kinds]:
                got = " and ".join(lacking)
                raise UsageError(f"{folder / LOG} must hold the start of a run and a step: got {got}")
        backends = [name for log in logs for name in curves.losses(log)[1]]
        if len(logs) > 1 and len(set(backends)) < len(backends):
            raise UsageError(f"one run a backend: got {', '.join(backends)}")
        events = [event for log in logs for event in log]
        tasks = {event["task"] for event in events if event["event"] == "start"}
        if len(tasks) > 1:
            raise UsageError(f"runs of one task can share a picture: got {', '.join(sorted(tasks))}")
        curves.draw(events, options.out)
    print(options.out)
    return 0
