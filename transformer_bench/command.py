"""``parity bench``: time the packages on the same workload, and verify their results."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformer_bench import tables
from transformer_bench.measurements import Entry, exponents
from transformer_bench.options import ONLY, add_options
from transformer_bench.plots import draw_growth, draw_times, place_of
from transformer_bench.rounds import Tell
from transformer_bench.run import Setting, Timing, grown, work_title
from transformer_bench.workload import DecodeWork, ForwardWork, TrainWork, Work
from transformer_parity.cli.options import check_installed
from transformer_parity.cli.progress import Progress, make_console
from transformer_parity.engine.report.envelope import envelope
from transformer_parity.engine.style import FORMATS, OPEN_STYLE, write
from transformer_parity.engine.system.errors import UsageError
from transformer_parity.engine.system.files import check_writable, write_json, write_results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEPS = 4  # progress steps before the rounds: import, load, and two calls


def add_parser(commands: Any) -> None:
    """Add the ``bench`` command and its options to the parser."""
    add_options(commands).set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Time one task at one or more sizes, and return the exit code."""
    started = time.monotonic()
    _check_task(options)
    work = _work(options)
    setting = Setting(options.backends, options.peers, options.threads, options.rounds, options.parallel)
    axis, values = options.scale or (None, ())
    works = [grown(work, axis, value) for value in values] if axis else [work]
    _check(options, setting, works)
    console = make_console()
    timing = Timing.begin(setting)
    for work in works:
        entries = timing.add(work, show_rounds)
        if setting.rounds:
            tables.print_times(console, work, entries, setting.threads, timing.peaks[-1])
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
        return draw_times(works[0].title, works[0].details, timed, place)

    found = {"task": options.task, "rounds": setting.rounds, "scale": axis, **timing.to_dict()}
    if axis:
        found["exponents"] = exponents(values, timing.races)
    document = envelope(
        "bench",
        found,
        exit_code=timing.exit_code,
        environment={entry.name: entry.environment for entry in timing.entries},
        seconds=time.monotonic() - started,
    )
    _write(options, document, draw if any(entry.is_timed for entry in timing.entries) else None)
    return timing.exit_code


def _check_task(options: argparse.Namespace) -> None:
    """Raise a UsageError if an option applies only to a different task."""
    task = options.task
    if wrong := [f"--{name.replace('_', '-')}" for name in ONLY if getattr(options, name) and ONLY[name] != task]:
        raise UsageError(f"{task} does not support {', '.join(wrong)}; see `parity bench --help`")
    if not options.rounds and task != "train":
        raise UsageError(f"--rounds must be positive for {task}: got 0")


def _work(options: argparse.Namespace) -> Work:
    """Return the workload that the options specify."""
    given = {name: getattr(options, name) for name in ("batch", "source", "target") if getattr(options, name)}
    given |= {name: getattr(options, name) for name in ("dtype", "device")}
    if options.task == "forward":
        return ForwardWork(options.config, **given)
    if options.task == "decode":
        return DecodeWork(options.config, **given, beam_size=options.beam)
    return TrainWork(
        options.config,
        **given,
        dropout=options.dropout or 0.0,
        activation_checkpointing=options.activation_checkpointing,
    )


def _check(options: argparse.Namespace, setting: Setting, works: Sequence[Work]) -> None:
    """Raise a UsageError before the timing starts if a workload can't run or a file can't be written."""
    check_installed(setting.backends)
    for work in works:
        setting.check(work)
    check_writable(options.json, options.plot)
    if options.plot is not None and options.plot.suffix.lower()[1:] not in FORMATS:
        raise UsageError(f"--plot must end in {' or '.join(FORMATS)}: got {options.plot.name}")


@contextmanager
def show_rounds(entries: Sequence[Entry], rounds: int) -> Iterator[Tell]:
    """Show the progress of each implementation: as bars on a terminal, and otherwise as lines on standard error."""
    # The processes that measure the machine's peak have no entry, so their progress isn't shown.
    names = [entry.name for entry in entries]
    # The bars are redrawn only between measurements, so that drawing doesn't slow down a measurement.
    with Progress(names, STEPS + rounds, is_still=True) as progress:

        def tell(name: str, doing: str) -> None:
            if name in names:
                progress.update(name, doing, advance=1)
                progress.log(doing if doing.startswith("round") else f"{name}: {doing}")  # one line per round

        yield tell


def _write(options: argparse.Namespace, document: dict[str, Any], draw: Callable[[], Figure] | None = None) -> None:
    """Write the output files that the options request: the JSON file and, if ``draw`` is given, the plot."""

    def write_picture(path: Path, _: object) -> None:
        import matplotlib

        if draw is not None:
            with matplotlib.rc_context(OPEN_STYLE):
                write(draw(), path)

    write_results(document, (options.json, write_json), (options.plot, write_picture))
