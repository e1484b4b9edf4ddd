"""``parity bench``: how fast the packages are, on the same work, with results that agree."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformer_bench import tables
from transformer_bench.imports import Pair, run_imports
from transformer_bench.measurements import Entry, exponents, fastest, ratio
from transformer_bench.options import Run, add_tasks
from transformer_bench.participants import OURS
from transformer_bench.plots import draw_growth, draw_times, place_of
from transformer_bench.rounds import Tell
from transformer_bench.run import Setting, Timing, grown, work_title
from transformer_bench.workload import DecodeWork, ForwardWork, TrainWork, Work
from transformer_parity.cli.options import check_installed
from transformer_parity.cli.progress import Progress, make_console
from transformer_parity.engine.style import FORMATS, OPEN_STYLE, write
from transformer_parity.engine.system.errors import UsageError, refusals
from transformer_parity.engine.system.files import check_writable, write_json, write_results
from transformer_parity.transformer.compare.findings import AGREES, FAILED
from transformer_parity.transformer.compare.verdict import EXIT_CODES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEPS = 4  # before the rounds: import, load, and two calls


def add_parser(commands: Any) -> None:
    """Describe the command, its tasks and their options."""
    runs: dict[str, Run] = {task: partial(run_one, task=task) for task in OURS}
    add_tasks(commands, {**runs, "compile": run_compile, "import": run_import})


def run_one(options: argparse.Namespace, task: str) -> int:
    """Time one task, at one size or over a size that grows, and return the exit code."""
    work, setting = _work(options, task), _setting(options)
    axis, values = getattr(options, "scale", None) or (None, ())
    works = [grown(work, axis, value) for value in values] if axis else [work]
    _check(options, setting, works)
    console = make_console()
    timing = Timing.begin(setting)
    for work in works:
        entries = timing.add(work, show_rounds)
        if setting.rounds:
            against = next((entry for entry in entries if entry.name == setting.against and entry.is_timed), None)
            tables.print_times(console, work, entries, against or fastest(entries), setting.threads, timing.limits[-1])
        if setting.plans:
            tables.print_costs(console, work, setting.plans)
        if timing.interrupted:
            break
    if axis and setting.rounds:
        tables.print_growth(console, axis, values, timing.races)
    if setting.rounds:
        tables.print_environment(console, timing.races[0], timing.machine)
    if timing.interrupted:
        done = max(len(entry.seconds) for entry in timing.races[-1])
        console.print(f"INTERRUPTED after {done} of {setting.rounds} rounds.")

    def draw() -> Figure:
        place = f"{place_of(timing.machine)}, threads: {setting.threads}"
        if axis:
            return draw_growth(work_title(works[0], axis), works[0].details, axis, values, timing.races, place)
        timed = [entry for entry in timing.entries if entry.is_timed]
        against = next((entry for entry in timed if entry.name == setting.against), fastest(timed))
        return draw_times(works[0].title, works[0].details, timed, against, place)

    found = {"task": task, "rounds": setting.rounds, "scale": axis, **timing.to_dict()}
    if axis:
        found["exponents"] = exponents(values, timing.races)
    _write(options, found, draw if any(entry.is_timed for entry in timing.entries) else None)
    return timing.exit_code


def run_compile(options: argparse.Namespace) -> int:
    """Time first calls and later ones, and return the exit code."""
    works, setting = [_work(options, task) for task in OURS], _setting(options)
    _check(options, setting, works)
    console = make_console()
    timing = Timing.begin(setting)
    for work in works:
        timing.add(work, show_rounds)
        timing.races[-1] = [entry for entry in timing.races[-1] if entry.has_result]
        if timing.interrupted:
            break
    tables.print_first_calls(console, works, timing.races, timing.machine)
    tables.print_environment(console, timing.races[0], timing.machine)
    _write(options, {"task": "compile", **timing.to_dict()})
    return timing.exit_code


def run_import(options: argparse.Namespace) -> int:
    """Time imports, and return the exit code."""
    check_installed(options.backends)
    _check_files(options)
    console, machine = make_console(), tables.describe(1)
    pairs = [Pair(name) for name in options.backends]
    interrupted = False
    with Progress([pair.name for pair in pairs], options.rounds + 1) as progress, refusals(ImportError):

        def tell(name: str, number: int) -> None:
            progress.update(name, f"round {number}", completed=number)
            progress.log(f"round {number} of {options.rounds}: {name}")

        try:
            run_imports(pairs, options.rounds, tell)
        except KeyboardInterrupt:
            interrupted = True
    pairs = [pair for pair in pairs if pair.package.seconds]
    tables.print_imports(console, pairs)
    tables.print_environment(console, [], machine)
    code = EXIT_CODES[FAILED if interrupted else AGREES]
    if interrupted:
        console.print("INTERRUPTED.")
    entries = [entry for pair in pairs for entry in (pair.alone, pair.package)]
    found = {
        "task": "import",
        "machine": machine,
        "interrupted": interrupted,
        "exit_code": code,
        "imports": [entry.to_dict() for entry in entries],
        "ratios": {pair.name: asdict(ratio(pair.package, pair.alone)) for pair in pairs},
    }
    details = "each in a fresh process; grey: the framework alone"
    draw = partial(draw_times, "import", details, entries, None, place_of(machine))
    _write(options, found, draw if entries else None)
    return code


def _work(options: argparse.Namespace, task: str) -> Work:
    """Return the work that the options describe."""
    common = {name: getattr(options, name) for name in ("batch", "source", "target", "layers", "device")}
    common |= {"size": options.config, "dtype": getattr(options, "dtype", Work.dtype)}
    if task == "forward":
        return ForwardWork(**common)
    if task == "decode":
        return DecodeWork(**common, beam_size=getattr(options, "beam", None))
    checkpointing = getattr(options, "activation_checkpointing", False)
    return TrainWork(**common, dropout=getattr(options, "dropout", 0.0), activation_checkpointing=checkpointing)


def _setting(options: argparse.Namespace) -> Setting:
    """Return the participants and the rounds; compiling is timed in one."""
    rounds, against = getattr(options, "rounds", 1), getattr(options, "against", None)
    plans = getattr(options, "parallel", ())
    return Setting(options.backends, options.peers, options.threads, rounds, against, plans)


def _check(options: argparse.Namespace, setting: Setting, works: Sequence[Work]) -> None:
    """Raise UsageError, before anything is timed, for what could not be done or written."""
    check_installed(setting.backends)
    for work in works:
        setting.check(work)
    _check_files(options)


def _check_files(options: argparse.Namespace) -> None:
    plot = getattr(options, "plot", None)
    check_writable(options.json, plot)
    if plot is not None and plot.suffix.lower()[1:] not in FORMATS:
        raise UsageError(f"--plot must end in {' or '.join(FORMATS)}: got {plot.name}")


@contextmanager
def show_rounds(entries: Sequence[Entry], rounds: int) -> Iterator[Tell]:
    """Show what each participant does: as bars on a terminal, as lines on standard error elsewhere."""
    names = [entry.name for entry in entries]  # without the processes that measure the limit
    # Drawn when something new begins, and not in between: nothing else runs while a participant does.
    with Progress(names, STEPS + rounds, is_still=True) as progress:

        def tell(name: str, doing: str) -> None:
            if name in names:
                progress.update(name, doing, advance=1)
                progress.log(doing if doing.startswith("round") else f"{name}: {doing}")  # one line for each round

        yield tell


def _write(options: argparse.Namespace, found: dict[str, Any], draw: Callable[[], Figure] | None = None) -> None:
    """Write the numbers, and draw the picture, that were asked for; None is no picture."""

    def write_picture(path: Path, _: object) -> None:
        import matplotlib

        if draw is not None:
            with matplotlib.rc_context(OPEN_STYLE):
                write(draw(), path)

    head = {"format": 3, "date": datetime.now(UTC).isoformat(timespec="seconds")}
    plot = getattr(options, "plot", None)
    write_results({**head, **found}, (options.json, write_json), (plot, write_picture))
