"""``parity train``: train a model in one backend, resume a run in a different backend, or train in lockstep."""

from __future__ import annotations

import argparse
import atexit
import os
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from io import StringIO
from pathlib import Path
from typing import Any, TextIO

from transformer_parity.apps.train import corpora, curves
from transformer_parity.apps.train.corpora import RECIPES
from transformer_parity.apps.train.group import ALONE, Group, of_this_process
from transformer_parity.apps.train.learner import Where
from transformer_parity.apps.train.log import CURVE, LOG, MODEL, RESULT, checkpoints, locked, read_log
from transformer_parity.apps.train.processes import TrainingJob, train
from transformer_parity.apps.train.run import Observer, Status
from transformer_parity.apps.train.start import Changes, Setup, begin, resume
from transformer_parity.cli.options import check_installed, installed_backend
from transformer_parity.cli.progress import PlainConsole, Progress
from transformer_parity.cli.train_options import (
    MODEL_FIELDS,
    PLAN_FIELDS,
    RUN_FIELDS,
    TRAINING_FIELDS,
    add_options,
)
from transformer_parity.engine.report.envelope import envelope
from transformer_parity.engine.system.environment import keep_freed_memory, quiet_frameworks
from transformer_parity.engine.system.errors import UsageError, refusals
from transformer_parity.engine.system.files import write_json
from transformer_parity.engine.system.interrupts import stop_on_signal
from transformer_parity.transformer.distributed.environments import number_of_processes
from transformer_parity.transformer.ports.protocol import Placement

KNOWN = {*MODEL_FIELDS, *TRAINING_FIELDS, *RUN_FIELDS}
LINE_EVERY = 10.0  # seconds between progress lines if the output is not a terminal


def add_parser(commands: Any) -> None:
    """Add the command and its options to the parser."""
    add_options(commands).set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Train while holding the lock of the run directory, and return the exit code."""
    options.backends = options.backends or [installed_backend("parity train")]
    check_installed(options.backends)
    _check_options(options)
    directory = _directory(options)
    keep_freed_memory()
    with refusals(ValueError):
        group = of_this_process(options.backends[0])
    if group is not None and group.size > 1 and options.parallel is None:
        raise UsageError(
            f"{group.size} processes were started without a parallelism plan; add --parallel, such as --parallel "
            f"data={group.size}"
        )
    writes = group is None or group.rank == 0
    with _ended_at_once(group or ALONE), refusals(OSError), locked(directory) if writes else nullcontext():
        return _train(options, directory, group)


@contextmanager
def _ended_at_once(group: Group) -> Iterator[None]:
    """End the process immediately if an error occurs in one of multiple processes.

    A normal exit would deadlock: the frameworks' exit handlers wait for the other processes, which wait for this one.
    """
    try:
        yield
    except BaseException:
        if group.size > 1:
            atexit.register(os._exit, 3)  # runs before the exit handlers of the frameworks
        raise


def _train(options: argparse.Namespace, directory: Path, group: Group | None) -> int:
    """Train in the run directory and return the exit code."""
    with refusals(TypeError, ValueError):
        setup = _set_up(options, directory)
    if options.stop_at and options.stop_at > setup.plan.steps:
        raise UsageError(f"--stop-at must be at most {setup.plan.steps}, the last step: got {options.stop_at}")
    if group is None or group.rank == 0:
        (directory / RESULT).unlink(missing_ok=True)  # outdated result from before the run was resumed
    placement = Placement(options.dtype or setup.dtype, options.device, options.precision)
    where = Where(placement, options.parallel, group or ALONE)
    if options.parallel is not None and group is None:
        return _start_processes(options, TrainingJob(setup, options.backends[0], directory, where, options.stop_at))
    # If one of multiple processes crashes, the output of compiled code may be the only information about the cause, so
    # it isn't suppressed.
    with quiet_frameworks() if where.group.size == 1 else nullcontext(sys.stderr) as terminal:
        shown = terminal if where.group.rank == 0 else StringIO()
        show = _TrainingLog(shown, options.backends, options.stop_at or setup.plan.steps)
        with stop_on_signal() as stop:
            show.say(f"loading {', '.join(options.backends)}")
            with refusals(RuntimeError, TypeError, ValueError):
                training = setup.start(options.backends, directory, Observer(show.status, show.say), where)
            show.say(training.description)
            with show.progress:
                training.go(stop, options.stop_at)
        if stop.signal or training.step < setup.plan.steps:
            show.say(_how_to_go_on(training.step, directory, options, where))
            return 128 + stop.signal if stop.signal else 0
        # All steps have been taken and saved, so Ctrl-C may interrupt ``finish`` immediately.
        reached = training.finish()
    if where.group.rank == 0:
        with refusals(OSError):
            _report(directory, setup.corpus.metric, reached, training.seconds)
    return 0


def _start_processes(options: argparse.Namespace, job: TrainingJob) -> int:
    """Start the processes of a parallelism plan, run the training in them, and return the exit code."""
    steps = options.stop_at or job.setup.plan.steps
    with refusals(ValueError):
        processes = number_of_processes(job.backend, options.parallel, options.processes)
        options.parallel.check(job.setup.config)
    show = _TrainingLog(sys.stderr, options.backends, steps)
    with stop_on_signal() as stop, show.progress:
        show.say(f"loading {job.backend} in {processes} process{'es' * (processes > 1)}")
        ended = train(job, processes, Observer(show.status, show.say), stop)
    if ended.reached is None:
        show.say(_how_to_go_on(ended.step, job.directory, options, job.where))
        return 128 + stop.signal if stop.signal else 0
    with refusals(OSError):
        _report(job.directory, job.setup.corpus.metric, ended.reached, ended.seconds)
    return 0


def _check_options(options: argparse.Namespace) -> None:
    """Raise a UsageError if any of the options would have no effect."""
    what = _given(options, ("task", "text", "resume"))
    if what not in (["--task"], ["--text"], ["--resume"], ["--text", "--resume"]):
        raise UsageError(
            f"exactly one of --task, --text, and --resume is required (but --resume can be combined with --text): got "
            f"{', '.join(what) or 'none'}"
        )
    fields = dict(options.fields)
    if unknown := [name for name in fields if name not in KNOWN]:
        raise UsageError(f"unknown --set field {unknown[0]}; choose from {', '.join(sorted(KNOWN))}")
    if options.resume:
        given = _given(options, ("preset", "vocab_size", "seed"))
        if given := [*given, *(f"--set {name}" for name in fields if name not in PLAN_FIELDS)]:
            raise UsageError(f"--resume uses the settings stored in the checkpoint; remove {', '.join(given)}")
        if len(options.backends) > 1:
            raise UsageError("--resume requires exactly one backend, because runs in lockstep are not saved")
    if options.parallel is None and options.processes is not None:
        raise UsageError("--processes requires a parallelism plan; add --parallel, such as --parallel data=2")
    if options.parallel is not None and len(options.backends) > 1:
        raise UsageError("--parallel requires exactly one backend, because runs in lockstep use one device per backend")
    if options.task and (options.held_out or options.vocab_size):
        raise UsageError("--held-out and --vocab-size require --text; remove them, or replace --task with --text")
    unused = [f"--set {name}" for name in fields if name in ("dropout", "save_every", "keep", "average")]
    if len(options.backends) > 1 and unused:
        raise UsageError(f"runs in lockstep use no dropout and are not saved; remove {', '.join(unused)}")


def _given(options: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Return the names of the options that are set, such as ``--vocab-size``."""
    return [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) is not None]


def _directory(options: argparse.Namespace) -> Path:
    """Return the directory of the run."""
    if options.out:
        return options.out
    if options.resume:
        return options.resume if options.resume.is_dir() else options.resume.parent
    return Path("runs") / f"{options.task or 'text'}-{'-'.join(options.backends)}"


def _set_up(options: argparse.Namespace, directory: Path) -> Setup:
    """Return the setup of a new or resumed run."""
    fields = dict(options.fields)
    if options.resume:
        if options.out:
            _check_unused(options.out)
        elif (directory / LOG).exists():
            read_log(directory)  # if the log is damaged, fail now rather than at the end of the run
        moved = {"files": options.text, "held_out": options.held_out}
        setup = resume(options.resume, directory, options.steps, fields, moved)
        if options.dtype not in (None, setup.dtype):
            raise UsageError(f"--resume uses {setup.dtype}, the dtype of the run; remove --dtype {options.dtype}")
        if options.stop_at and setup.state and options.stop_at <= setup.state.step:
            raise UsageError(
                f"--stop-at must be greater than {setup.state.step}, the step of the checkpoint: got {options.stop_at}"
            )
        return setup
    task = options.task or "text"
    recipe = RECIPES[task]
    _check_unused(directory)
    seed = options.seed or 0
    if task == "dates":
        corpus = corpora.dates(seed)
    else:
        corpus = corpora.text(options.text, options.held_out, options.vocab_size or recipe.vocab_size)
    changes = Changes(
        preset=options.preset or "paper_base",
        steps=options.steps,
        model={name: fields[name] for name in MODEL_FIELDS if name in fields},
        training={name: fields[name] for name in TRAINING_FIELDS if name in fields},
        run={name: fields[name] for name in RUN_FIELDS if name in fields},
        seed=seed,
    )
    return begin(corpus, recipe, changes)


def _check_unused(directory: Path) -> None:
    """Raise a UsageError if a directory contains a run.

    A directory that contains only a log is accepted, because its run failed before the first step.
    """
    if checkpoints(directory) or (directory / MODEL).exists() or (directory / CURVE).exists():
        go_on = f"resume it with --resume {directory}, or " if checkpoints(directory) else ""
        raise UsageError(f"{directory} already contains a run; {go_on}choose a different directory with --out")


class _TrainingLog:
    """The progress display of a run: a bar on a terminal, or a line every ten seconds otherwise."""

    def __init__(self, terminal: TextIO, backends: Sequence[str], steps: int) -> None:
        self.name = ", ".join(backends)
        self.steps = steps
        self.last_line = 0.0
        self.progress = Progress([self.name], steps, terminal)
        self.say = self.progress.say

    def status(self, status: Status) -> None:
        """Show the step, the losses, and the throughput."""
        losses = " ".join(f"{loss:.3f}" for loss in status.losses.values())
        doing = f"loss {losses}  {status.tokens_per_second:,.0f} tokens/s  learning rate {status.learning_rate:.1e}"
        self.progress.update(self.name, doing, completed=status.step)
        if not self.progress.is_terminal and time.monotonic() - self.last_line > LINE_EVERY:
            self.last_line = time.monotonic()
            self.say(f"step {status.step:,} of {self.steps:,}  {doing}")


def _how_to_go_on(step: int, directory: Path, options: argparse.Namespace, where: Where) -> str:
    """Return a message with the command that resumes a run."""
    if len(options.backends) > 1:
        return f"stopped at step {step:,}; runs in lockstep are not saved"
    placement, plan = where.placement, where.plan
    elsewhere = f" --device {placement.device}" * (placement.device != "cpu")
    elsewhere += f" --precision {placement.precision}" * (placement.precision != "highest")
    elsewhere += "" if plan is None else f" --parallel {plan}"
    elsewhere += "" if options.processes is None else f" --processes {options.processes}"
    return (
        f"stopped and saved at step {step:,}. To resume, run\n"
        f"  parity train --resume {shlex.quote(str(directory))} --backend {options.backends[0]}{elsewhere}"
    )


def _report(directory: Path, metric: str, reached: dict[str, dict[str, float]], seconds: float) -> None:
    """Draw the training curves, and print the losses, the scores, and the files of the run."""
    console = PlainConsole()
    events = read_log(directory)
    if len(next(event for event in events if event["event"] == "start")["backends"]) > 1:
        console.print(curves.lockstep_table(events))
        console.print(curves.parting(events))
    unit = "%" if metric == "exact match" else ""
    for name, found in reached.items():
        console.print(f"{name}: held-out loss {found['loss']:.4f}, {metric} {found[metric]:.2f}{unit}")
    if any(event["event"] == "step" for event in events):  # false if all steps had been taken before resuming
        curves.draw(events, directory / CURVE)
    files = [name for name in (MODEL, CURVE, LOG) if (directory / name).exists()]
    result = {"directory": str(directory), "metric": metric, "reached": reached, "files": files}
    write_json(directory / RESULT, envelope("train", result, compares=False, seconds=seconds))
    files.append(RESULT)
    took = f"Training took {seconds:.0f} s ({time.process_time():.0f} s of CPU time in this process)."
    console.print(f"{took} Files in {directory}: {', '.join(files)}.", soft_wrap=True)
