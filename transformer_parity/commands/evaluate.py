"""``parity evaluate``: how well trained weights do on sentences they have not seen, in any backend."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from reference_numpy.checkpoint import load_checkpoint
from reference_numpy.files import load_vocabulary, load_weights
from reference_numpy.training_config import TrainingConfig
from transformer_parity import corpora
from transformer_parity.batches import Batches, number
from transformer_parity.commands import add_backends, positive
from transformer_parity.learner import Learner
from transformer_parity.ports import PORTS, MissingFrameworkError, quiet_frameworks
from transformer_parity.run import longest_translation
from transformer_parity.text import Vocabulary

SEED = 19171  # of the held-out dates: others than those a run was validated on
TOKENS = 2048  # of a batch

EXAMPLES = """\
examples:
  parity evaluate runs/dates-jax/model.safetensors --task dates --sentences 5000 --backend numpy,torch,jax,tf
  parity evaluate runs/text-torch/checkpoint-*.safetensors --text test.en test.de

exit code: 0 evaluated, 3 not
"""


def add_parser(commands: Any) -> None:
    """Describe the options."""
    parser = commands.add_parser(
        "evaluate",
        help="how well trained weights do on held-out sentences",
        description="Translate held-out sentences greedily with weights that `parity train` wrote, and report the loss "
        "per target token and BLEU (sacrebleu, cased, detokenised) or, for dates, the share of exact matches.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("weights", nargs="+", type=Path, metavar="FILE", help="final weights, or checkpoints of a run")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--task", choices=["dates"], help="days that no training run has seen")
    what.add_argument("--text", nargs=2, type=Path, metavar=("SOURCE", "TARGET"), help="two line-aligned files")
    add_backends(parser, ["torch"])
    parser.add_argument("--sentences", type=positive, metavar="N", help="the first N only (default: all; 1000 dates)")
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu", help="(default: cpu)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result for machines")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Evaluate, and return the exit code."""
    try:
        for name in options.backends:
            PORTS[name].check_installed()
        with quiet_frameworks() as terminal:
            console = Console(file=terminal)
            results = []
            for path in options.weights:
                for backend in options.backends:
                    with console.status(f"{backend}: {path}"):
                        results.append(_evaluate(path, backend, options))
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    except (MissingFrameworkError, OSError, RuntimeError, TypeError, ValueError) as error:
        print(f"parity evaluate: error: {error}", file=sys.stderr)
        return 3
    _print(results)
    return 0


def _evaluate(path: Path, backend: str, options: argparse.Namespace) -> dict[str, Any]:
    config, weights = load_weights(path)
    model = load_vocabulary(path)
    if model is None:
        raise ValueError(f"{path} holds no vocabulary: parity train writes one, save_weights only when given it")
    vocabulary = Vocabulary(model)
    if options.task:
        corpus = corpora.held_out_dates(SEED, vocabulary, options.sentences or 1000)
    else:
        corpus = corpora.held_out(options.text, vocabulary, options.sentences)
    learner = Learner(backend, config, weights, TrainingConfig(), 0, "float32", options.device, "highest")
    batches = Batches(number(corpus.held_out, vocabulary, config), config, TOKENS)
    loss = learner.validate(batches.once())
    start = time.perf_counter()
    lines = learner.translate([source for source, _ in corpus.held_out], vocabulary, longest_translation(batches))
    seconds = time.perf_counter() - start
    return {
        "file": str(path),
        "step": _step(path),
        "backend": backend,
        "sentences": len(lines),
        "loss": loss,
        "perplexity": math.exp(loss),
        corpus.metric: corpus.score(lines, [target for _, target in corpus.held_out]),
        "seconds": seconds,
    }


def _step(path: Path) -> int | None:
    try:
        return load_checkpoint(path).state.step
    except ValueError:  # weights only
        return None


def _print(results: list[dict[str, Any]]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    metric = "BLEU" if "BLEU" in results[0] else "exact match"
    table.add_column("weights", overflow="fold")
    for column in ("step", "backend", "sentences", "loss", "perplexity", metric, "translated in"):
        table.add_column(column, justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            result["file"],
            "-" if result["step"] is None else f"{result['step']:,}",
            result["backend"],
            f"{result['sentences']:,}",
            f"{result['loss']:.4f}",
            f"{result['perplexity']:.2f}",
            f"{result[metric]:.2f}" + " %" * (metric == "exact match"),
            f"{result['seconds']:.0f} s",
        )
    Console(width=None if sys.stdout.isatty() else 140).print(table)
