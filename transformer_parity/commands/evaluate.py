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

from reference_numpy.training_config import TrainingConfig
from transformer_parity import corpora
from transformer_parity.batches import Batches, number
from transformer_parity.commands import add_backends, add_search, positive, search_options
from transformer_parity.corpora import Corpus
from transformer_parity.decoding import SearchOptions
from transformer_parity.learner import Learner
from transformer_parity.ports import PORTS, MissingFrameworkError, quiet_frameworks
from transformer_parity.run import longest_translation
from transformer_parity.text import Vocabulary
from transformer_parity.translator import Trained, read_trained

SEED = 19171  # of the held-out dates: others than those a run was validated on
TOKENS = 2048  # of a batch

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
        help="how well trained weights do on held-out sentences",
        description="Translate held-out sentences with weights that `parity train` wrote, and report the loss per "
        "target token and BLEU (sacrebleu, cased, detokenised) or, for dates, the share of exact matches. A sentence "
        "that is longer than the model's positions counts as translated into nothing.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("weights", nargs="+", type=Path, metavar="FILE", help="final weights, or checkpoints of a run")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--task", choices=["dates"], help="days that no training run has seen")
    what.add_argument("--text", nargs=2, type=Path, metavar=("SOURCE", "TARGET"), help="two line-aligned files")
    add_backends(parser, ["torch"])
    parser.add_argument("--sentences", type=positive, metavar="N", help="the first N only (default: all; 1000 dates)")
    add_search(parser)
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu", help="(default: cpu)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result for machines")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Evaluate, and return the exit code."""
    try:
        search = search_options(options, None)
        for name in options.backends:
            PORTS[name].check_installed()
        with quiet_frameworks() as terminal:
            console = Console(file=terminal)
            results = []
            for path in options.weights:
                trained = read_trained(path)
                corpus = _held_out(trained.vocabulary, options)
                for backend in options.backends:
                    with console.status(f"{backend}: {path}"):
                        results.append(_evaluate(trained, corpus, backend, options.device, search))
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    except (MissingFrameworkError, OSError, RuntimeError, TypeError, ValueError) as error:
        print(f"parity evaluate: error: {error}", file=sys.stderr)
        return 3
    _print(results)
    return 0


def _held_out(vocabulary: Vocabulary, options: argparse.Namespace) -> Corpus:
    if options.task:
        return corpora.held_out_dates(SEED, vocabulary, options.sentences or 1000)
    return corpora.held_out(options.text, vocabulary, options.sentences)


def _evaluate(trained: Trained, corpus: Corpus, backend: str, device: str, search: SearchOptions) -> dict[str, Any]:
    config = trained.config
    learner = Learner(backend, config, trained.weights, TrainingConfig(), 0, "float32", device, "highest")
    batches = Batches(number(corpus.held_out, corpus.vocabulary, config), config, TOKENS)
    loss = learner.validate(batches.once())
    sources = [source for source, _ in corpus.held_out]
    start = time.perf_counter()
    lines = learner.translate(sources, corpus.vocabulary, longest_translation(batches), search)
    seconds = time.perf_counter() - start
    return {
        "file": str(trained.path),
        "step": trained.step,
        "backend": backend,
        "sentences": len(lines),
        "beam": search.beam_size,
        "length_penalty": search.length_penalty if search.beam_size else None,
        "loss": loss,
        "perplexity": math.exp(loss),
        corpus.metric: corpus.score(lines, [target for _, target in corpus.held_out]),
        "seconds": seconds,
    }


def _print(results: list[dict[str, Any]]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    metric = "BLEU" if "BLEU" in results[0] else "exact match"
    search = f"beam {results[0]['beam']}" if results[0]["beam"] else "greedy"
    table.add_column("weights", overflow="fold")
    for column in ("step", "backend", "sentences", "loss", "perplexity", f"{metric}, {search}", "translated in"):
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
