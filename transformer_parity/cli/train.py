"""``parity train``: train a model in any backend, go on in another, or run several in lockstep."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import reference_numpy as ref
from reference_numpy.config import PRESETS
from transformer_parity.cli.options import add_backends, add_search, positive, search_options
from transformer_parity.ports.protocol import MissingFrameworkError, Placement
from transformer_parity.ports.registry import PORTS
from transformer_parity.system.environment import quiet_frameworks
from transformer_parity.system.interrupts import stop_on_signal
from transformer_parity.train import corpora, curves
from transformer_parity.train.corpora import RECIPES
from transformer_parity.train.evaluate import evaluate, held_out
from transformer_parity.train.log import CURVE, LOG, MODEL, checkpoints, read_log
from transformer_parity.train.run import Observer, Run, Status
from transformer_parity.train.start import Setup, begin, resume
from transformer_parity.translate.trained import read_trained

SUBWORDS = RECIPES["text"].vocab_size
LINE_EVERY = 10.0  # seconds between two lines where no bar can be drawn
SIZES = {  # option: fields of the model's config
    "d_model": ("d_model",),
    "d_ff": ("d_ff",),
    "heads": ("num_heads",),
    "layers": ("num_encoder_layers", "num_decoder_layers"),
}
SETTINGS = {  # option: field of the training settings
    "factor": "learning_rate_factor",
    "warmup": "warmup_steps",
    "cooldown": "cooldown_steps",
    "clip": "clip_norm",
    "accumulate": "accumulation_steps",
    "mixed_bfloat16": "mixed_bfloat16",
    "activation_checkpointing": "activation_checkpointing",
}

EXAMPLES = f"""\
examples:
  parity train --task dates --backend jax                   the dates, to more than 99 % exact matches in minutes
  parity train --text train.en.gz train.de.gz --held-out val.en.gz val.de.gz --backend torch
  parity train --resume runs/dates-jax --backend tf         go on in another framework, with the very same state
  parity train --task dates --backend torch,jax,tf --steps 100 --dtype float64
                                                            in lockstep: same weights, same batches, no dropout

what a run leaves in its folder: checkpoint-*.safetensors (config, weights, optimizer state, position in the data,
vocabulary: any backend can go on from it), {MODEL} (the final weights, for load_transformer), {LOG} (one JSON
object a line) and {CURVE}. Ctrl-C and SIGTERM finish the step, save, and say how to go on.

exit code: 0 finished, 3 not started, failed, or Ctrl-C pressed twice, 130 stopped by Ctrl-C, 143 by SIGTERM
"""


def add_parser(commands: Any) -> None:
    """Describe the options."""
    parser = commands.add_parser(
        "train",
        help="train a model in any backend, go on in another, or several in lockstep",
        description="Train a Transformer on generated dates or on your own parallel text: token-bucketed batches, the "
        "paper's schedule, label smoothing and Adam, validation, checkpoints that every backend can go on from.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--task", choices=["dates"], help="human-written dates to ISO 8601, generated as needed")
    what.add_argument("--text", nargs=2, type=Path, metavar=("SOURCE", "TARGET"), help="two line-aligned files")
    what.add_argument("--resume", type=Path, metavar="RUN", help="go on from a run's folder, or from one checkpoint")
    add_backends(parser, ["torch"])
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the run goes (default: runs/TASK-BACKEND)")
    parser.add_argument("--held-out", nargs=2, type=Path, metavar=("SOURCE", "TARGET"), help="text to validate on")

    length = parser.add_argument_group("length")
    length.add_argument("--steps", type=positive, metavar="N", help=_default("the whole run", "steps"))
    length.add_argument("--stop-at", type=positive, metavar="N", help="stop after this step, to go on later")
    length.add_argument("--validate-every", type=positive, metavar="N", help="steps (default: a tenth of the run)")
    length.add_argument("--save-every", type=positive, metavar="N", help="steps (default: a tenth of the run)")
    length.add_argument("--keep", type=positive, metavar="N", help="checkpoints (default: as many as --average)")
    length.add_argument(
        "--average", type=positive, metavar="N", help=_default("of the last checkpoints, at the end", "average")
    )

    model = parser.add_argument_group("model")
    model.add_argument("--preset", choices=list(PRESETS), metavar="NAME", help="conventions (default: paper_base)")
    model.add_argument("--d-model", type=positive, metavar="N", help=_default("width", "d_model"))
    model.add_argument("--d-ff", type=positive, metavar="N", help=_default("inner width", "d_ff"))
    model.add_argument("--heads", type=positive, metavar="N", help=_default("of attention", "num_heads"))
    model.add_argument("--layers", type=positive, metavar="N", help=_default("in each stack", "num_encoder_layers"))
    model.add_argument("--vocab-size", type=positive, metavar="N", help=f"subwords of --text (default: {SUBWORDS})")
    model.add_argument("--dropout", type=float, metavar="P", help=_default("its rate", "dropout"))

    optimizer = parser.add_argument_group("optimizer")
    optimizer.add_argument(
        "--tokens", type=positive, metavar="N", help=_default("of a batch, padding included", "tokens_per_batch")
    )
    optimizer.add_argument(
        "--factor", type=float, metavar="X", help=_default("times equation (3)", "learning_rate_factor")
    )
    optimizer.add_argument("--warmup", type=positive, metavar="N", help=_default("steps", "warmup_steps"))
    optimizer.add_argument(
        "--cooldown", type=int, metavar="N", help=_default("last steps, linearly towards zero", "cooldown_steps")
    )
    optimizer.add_argument("--clip", type=float, metavar="X", help="the largest norm of the gradient (default: none)")
    optimizer.add_argument("--accumulate", type=positive, metavar="N", help="slices of a batch, to save memory")
    optimizer.add_argument(
        "--mixed-bfloat16", action="store_true", default=None, help="compute in bfloat16 with float32 weights"
    )
    optimizer.add_argument(
        "--activation-checkpointing",
        action="store_true",
        default=None,
        help="keep each layer's input alone, and compute the rest again in the backward pass, to save memory",
    )
    optimizer.add_argument("--seed", type=int, metavar="N", help="of weights, batches and dropout (default: 0)")

    machine = parser.add_argument_group("machine")
    machine.add_argument("--dtype", choices=["float64", "float32"], help="(default: float32, or the run's)")
    machine.add_argument("--device", choices=["cpu", "gpu"], default="cpu", help="(default: cpu)")
    machine.add_argument("--precision", choices=["highest", "fast"], default="highest", help="(default: highest)")
    parser.set_defaults(run=run)


def _default(what: str, field: str) -> str:
    """Return the help of an option, with the default of each task."""
    dates, text = (
        {**vars(recipe), **recipe.model, **recipe.training}[field] for recipe in (RECIPES["dates"], RECIPES["text"])
    )
    return f"{what} (default: {dates} for dates, {text} for text)"


def run(options: argparse.Namespace) -> int:
    """Train, and return the exit code."""
    try:
        for name in options.backends:
            PORTS[name].check_installed()
        _check_options(options)
        setup, folder = _set_up(options)
        if options.stop_at and options.stop_at > setup.plan.steps:
            raise ValueError(f"--stop-at must be at most {setup.plan.steps}, the run's end: got {options.stop_at}")
        with quiet_frameworks() as terminal:
            show = _Show(terminal, options.stop_at or setup.plan.steps)
            with stop_on_signal() as stop:
                show.say(f"loading {', '.join(options.backends)}")
                placement = Placement(options.dtype or setup.dtype, options.device, options.precision)
                training = setup.start(options.backends, folder, Observer(show.status, show.say), placement)
                show.say(_describe(training))
                with show:
                    training.go(stop, options.stop_at)
            if stop.signal or training.step < setup.plan.steps:
                _say_how_to_go_on(show, training, options)
                return 128 + stop.signal if stop.signal else 0
            reached = training.finish()  # here Ctrl-C interrupts at once: all steps are taken, and saved
        _report(training, reached)
    except (MissingFrameworkError, OSError, RuntimeError, TypeError, ValueError) as error:
        print(f"parity train: error: {error}", file=sys.stderr)
        return 3
    return 0


def _check_options(options: argparse.Namespace) -> None:
    """Refuse options of which one would be ignored."""
    if options.resume:
        own = ("held_out", "preset", "vocab_size", "seed", "dropout", "tokens", *SIZES, *SETTINGS)
        if given := _given(options, own):
            raise ValueError(f"--resume goes on with the settings of the run: leave out {', '.join(given)}")
        if len(options.backends) > 1:
            raise ValueError("--resume goes on with one backend: runs in lockstep are not saved")
    if options.task and (options.held_out or options.vocab_size):
        raise ValueError("--held-out and --vocab-size are about --text: the dates bring their own")
    if len(options.backends) > 1 and (given := _given(options, ("dropout", "save_every", "keep", "average"))):
        raise ValueError(f"runs in lockstep have no dropout and are not saved: leave out {', '.join(given)}")


def _given(options: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Return those of some options that were given, as they are written."""
    return [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) is not None]


def _set_up(options: argparse.Namespace) -> tuple[Setup, Path]:
    plan = {name: getattr(options, name) for name in ("validate_every", "save_every", "keep", "average")}
    if options.resume:
        if options.out:
            _check_unused(options.out)
        setup, folder = resume(options.resume, options.out, options.steps, plan)
        if options.dtype not in (None, setup.dtype):
            raise ValueError(f"--resume goes on in {setup.dtype}, as the run began: leave out --dtype {options.dtype}")
        if options.stop_at and setup.state and options.stop_at <= setup.state.step:
            raise ValueError(f"--stop-at must lie beyond step {setup.state.step}: got {options.stop_at}")
        return setup, folder
    task = options.task or "text"
    recipe = RECIPES[task]
    folder = options.out or Path("runs") / f"{task}-{'-'.join(options.backends)}"
    _check_unused(folder)
    seed = options.seed or 0
    if task == "dates":
        corpus = corpora.dates(seed)
    else:
        corpus = corpora.text(options.text, options.held_out, options.vocab_size or recipe.vocab_size)
    setup = begin(
        corpus,
        recipe,
        preset=options.preset or "paper_base",
        steps=options.steps or recipe.steps,
        tokens_per_batch=options.tokens,
        dropout=options.dropout,
        sizes={field: getattr(options, name) for name, fields in SIZES.items() for field in fields},
        settings={field: getattr(options, name) for name, field in SETTINGS.items()},
        plan=plan,
        seed=seed,
    )
    return setup, folder


def _check_unused(folder: Path) -> None:
    """Refuse a folder with a run in it; of one that failed before its first step, only a log is there."""
    if checkpoints(folder) or (folder / MODEL).exists() or (folder / CURVE).exists():
        go_on = f"go on with --resume {folder}, or " if checkpoints(folder) else ""
        raise ValueError(f"{folder} holds a run already: {go_on}choose another folder with --out")


class _Show:
    """Shows a run: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, terminal: TextIO, steps: int) -> None:
        self.console = Console(file=terminal)
        self.steps = steps
        self.last_line = 0.0
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}  {task.fields[speed]} tokens/s  rate {task.fields[rate]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
        )
        self.progress = Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        self.bar = self.progress.add_task("", total=steps, loss="-", speed="-", rate="-")

    def __enter__(self) -> _Show:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def say(self, line: str) -> None:
        """Print a line, above the bar."""
        self.progress.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def status(self, status: Status) -> None:
        """Show where the run stands."""
        loss = " ".join(f"{loss:.3f}" for loss in status.losses.values())
        rate, speed = f"{status.learning_rate:.1e}", f"{status.tokens_per_second:,.0f}"
        self.progress.update(self.bar, completed=status.step, loss=loss, speed=speed, rate=rate)
        if not self.console.is_terminal and time.monotonic() - self.last_line > LINE_EVERY:
            self.last_line = time.monotonic()
            self.say(f"step {status.step:,} of {self.steps:,}  loss {loss}  {speed} tokens/s  rate {rate}")


def _describe(training: Run) -> str:
    """Say what is about to happen."""
    config, batches = training.learners[0].model.config, training.batches
    parameters = ref.count_parameters(config)
    lines = [
        f"{training.corpus.task}: {len(training.corpus.training):,} pairs, {len(training.corpus.held_out):,} held out, "
        f"vocabulary {config.target_vocab_size:,}; {parameters / 1e6:.2f} M parameters; "
        f"{batches.per_epoch:,} batches an epoch in {len(batches.shapes)} shapes; to {training.folder}",
    ]
    if batches.dropped:
        lines.append(f"{batches.dropped:,} pairs are longer than the model's positions and are left out")
    if len(training.learners) > 1:
        lines.append("in lockstep: same weights, same batches, no dropout; nothing is saved but log and curve")
    if training.step:
        lines.append(f"going on from step {training.step:,}")
    return "\n".join(lines)


def _say_how_to_go_on(show: _Show, training: Run, options: argparse.Namespace) -> None:
    if len(training.learners) > 1:
        show.say(f"stopped at step {training.step:,}; runs in lockstep are not saved")
        return
    backend = training.learners[0].backend
    elsewhere = f" --device {options.device}" * (options.device != "cpu")
    elsewhere += f" --precision {options.precision}" * (options.precision != "highest")
    show.say(
        f"stopped at step {training.step:,}; saved. Go on with\n"
        f"  parity train --resume {shlex.quote(str(training.folder))} --backend {backend}{elsewhere}"
    )


def _report(training: Run, reached: dict[str, dict[str, float]]) -> None:
    """Draw the curve, and print what was reached and where it is."""
    console = Console()
    backends = [learner.backend for learner in training.learners]
    metric, folder = training.corpus.metric, training.folder
    events = read_log(folder)
    if any(event["event"] == "step" for event in events):  # not where a run was only finished here
        curves.draw(events, folder / CURVE)
    if len(backends) > 1:
        console.print(curves.lockstep_table(events))
        console.print(curves.parting(events))
    unit = " %" if metric == "exact match" else ""
    for who, found in reached.items():
        console.print(f"{who}: held-out loss {found['loss']:.4f}, {metric} {found[metric]:.2f}{unit}", highlight=False)
    files = [name for name in (MODEL, CURVE, LOG) if (folder / name).exists()]
    took = f"{training.seconds:.0f} s of training, {time.process_time():.0f} s of processor time in this process."
    console.print(f"{took} In {folder}: {', '.join(files)}.", highlight=False, markup=False, soft_wrap=True)


def add_parser_curve(commands: Any) -> None:
    """Describe the options."""
    parser = commands.add_parser(
        "curve",
        help="the curves of several training runs in one picture",
        description="Draw training loss, held-out loss and score of several runs, one backend each, into one picture.",
        epilog="example: parity curve runs/dates-torch runs/dates-jax runs/dates-tf --out dates.png",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders that `parity train` wrote")
    parser.add_argument("--out", type=Path, default=Path(CURVE), metavar="FILE", help=f"png or svg (default: {CURVE})")
    parser.set_defaults(run=run_curve)


def run_curve(options: argparse.Namespace) -> int:
    """Draw, and return the exit code."""
    try:
        if missing := [str(folder) for folder in options.runs if not (folder / LOG).is_file()]:
            raise FileNotFoundError(f"no {LOG} in {', '.join(missing)}")
        if options.out.suffix not in (".png", ".svg"):
            raise ValueError(f"--out must end in .png or .svg: got {options.out}")
        logs = [read_log(folder) for folder in options.runs]
        who = [name for log in logs for name in curves.losses(log)[1]]
        if len(logs) > 1 and len(set(who)) < len(who):
            raise ValueError(f"one run a backend: got {', '.join(who)}")
        events = [event for log in logs for event in log]
        tasks = {event["task"] for event in events if event["event"] == "start"}
        if len(tasks) > 1:
            raise ValueError(f"these runs learn different things: {', '.join(sorted(tasks))}")
        curves.draw(events, options.out)
    except (OSError, ValueError) as error:
        print(f"parity curve: error: {error}", file=sys.stderr)
        return 3
    print(options.out)
    return 0


EVALUATE_EXAMPLES = """\
examples:
  parity evaluate runs/dates-jax/model.safetensors --task dates --sentences 5000 --backend numpy,torch,jax,tf
  parity evaluate runs/text-torch/checkpoint-*.safetensors --text test.en test.de
  parity evaluate model.safetensors --text test.en test.de --beam 4    as in the paper

exit code: 0 evaluated, 3 not
"""


def add_parser_evaluate(commands: Any) -> None:
    """Describe the options."""
    parser = commands.add_parser(
        "evaluate",
        help="how well trained weights do on held-out sentences",
        description="Translate held-out sentences with weights that `parity train` wrote, and report the loss per "
        "target token and BLEU (sacrebleu, cased, detokenised) or, for dates, the share of exact matches. A sentence "
        "that is longer than the model's positions counts as translated into nothing.",
        epilog=EVALUATE_EXAMPLES,
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
    parser.set_defaults(run=run_evaluate)


def run_evaluate(options: argparse.Namespace) -> int:
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
                corpus = held_out(trained.vocabulary, options)
                for backend in options.backends:
                    with console.status(f"{backend}: {path}"):
                        results.append(evaluate(trained, corpus, backend, options.device, search))
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    except (MissingFrameworkError, OSError, RuntimeError, TypeError, ValueError) as error:
        print(f"parity evaluate: error: {error}", file=sys.stderr)
        return 3
    _print(results)
    return 0


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
