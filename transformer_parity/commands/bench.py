"""``parity bench``: how fast the packages are, on the same work, with results that agree."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

import reference_numpy as ref
from transformer_parity.bench import DTYPE, SIZES, DecodeWork, Entry, Reference, Spread, fastest, ratio, verdict
from transformer_parity.bench_figure import draw_times
from transformer_parity.commands import add_backends, positive
from transformer_parity.commands.info import describe_machine
from transformer_parity.commands.show import FORMATS, STYLE, write
from transformer_parity.compare import AGREES, FAILED
from transformer_parity.contestants import DECODE_PEERS, DECODERS
from transformer_parity.ports import PORTS, MissingFrameworkError
from transformer_parity.race import Contestant, Tell, race, started
from transformer_parity.report import EXIT_CODES, WORDS
from transformer_parity.report import STYLES as VERDICT_STYLES

STEPS = 4  # before the rounds: import, load, and two calls
BUSY = 0.5  # processes: a higher load average before anything is started is worth a word
SPARE = 0.1  # of a core: more than this beyond the threads asked for is worth a word

DESCRIPTION = """\
Time the packages beside one another, as their users run them.

Each runs in a process of its own, with the same number of threads. All are
started, loaded and warmed up first; then come the rounds. In each round everybody
runs once, while all others wait, so that nobody meets the machine at a better time
than the others. Ratios are taken within a round, and then their median.

No time is printed for a result that does not agree with the reference.

Nothing else should run meanwhile: it does not slow all of them down alike.
"""

DECODE = """\
Translate a batch of sentences: random ones, by a random model that never ends a
sentence by itself, so that everybody says the same number of tokens.

Sizes: tiny is d_model 128, 2+2 layers, vocabulary 1,000; small 256, 3+3, 8,000;
base 512, 6+6, 37,000, the paper's. The conventions are those of the preset marian.
"""

DECODE_EXAMPLES = """\
examples:
  parity bench decode                                   all four, small
  parity bench decode --backends numpy,torch --config tiny
  parity bench decode --peers --plot decode.png         beside Hugging Face's MarianMTModel, and beside
                                                        the matrix products alone: what NumPy cannot beat
  parity bench decode --beam 4 --against torch          beam search; how many times as long as torch
  parity bench decode --config base --json decode.json  the paper's size, every number into a file

reading the table: `times` is the median of the ratios within each round, with the
lowest and the highest; `cores` is how many the process kept busy, GFLOP/s counts
matrix products only, `first call` includes compiling, and memory is that of the
whole process up to then.

exit code: 0 all agree and are timed, 1 a result does not agree, 3 not everything was timed
"""


def add_parser(commands: Any) -> None:
    """Describe the command and its options."""
    parser = commands.add_parser(
        "bench",
        help="how fast the packages are, on the same work, with results that agree",
        description=DESCRIPTION,
        epilog="Start with `parity bench decode`.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tasks = parser.add_subparsers(title="what to time", metavar="TASK", required=True)
    _add_decode(tasks)


def _add_decode(tasks: Any) -> None:
    parser = tasks.add_parser(
        "decode",
        help="greedy or beam search with a cache",
        description=DECODE,
        epilog=DECODE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", choices=SIZES, default=DecodeWork.size, help="default: %(default)s")
    _add_protocol(parser)
    for name, default, what in (
        ("batch", DecodeWork.batch, "sentences"),
        ("source", DecodeWork.source, "tokens of the longest sentence"),
        ("tokens", DecodeWork.tokens, "new tokens for each sentence"),
    ):
        parser.add_argument(
            f"--{name}", type=positive, default=default, metavar="N", help=f"{what}, default: {default}"
        )
    parser.add_argument("--beam", type=positive, metavar="K", help="beam search, keeping K hypotheses; default: greedy")
    parser.set_defaults(run=run_decode)


def _add_protocol(parser: argparse.ArgumentParser) -> None:
    """Add what all tasks have in common: who takes part, how often, and where results go."""
    add_backends(parser, list(PORTS))
    parser.add_argument("--peers", action="store_true", help="other people's implementations too, and yardsticks")
    parser.add_argument(
        "--against", metavar="NAME", help="whose time the others' are compared with; default: the fastest"
    )
    threads = min(2, processors())
    parser.add_argument("--threads", type=positive, default=threads, metavar="N", help=f"of each, default: {threads}")
    parser.add_argument("--rounds", type=positive, default=7, metavar="N", help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything for machines")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help=f"also draw a bar for each; the name ends in {', '.join(FORMATS)}"
    )


def processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_decode(options: argparse.Namespace) -> int:
    """Time decoding, and return the exit code."""
    work = DecodeWork(options.config, options.batch, options.source, options.tokens, options.beam)
    contestants = [DECODERS[name] for name in options.backends]
    contestants += DECODE_PEERS.values() if options.peers else ()
    return _run("decode", work, contestants, options)


def _run(task: str, work: DecodeWork, contestants: Sequence[Contestant], options: argparse.Namespace) -> int:
    """Time a task, print, draw and write, and return the exit code."""
    try:
        _check_options(options, contestants)
    except (MissingFrameworkError, ValueError) as error:
        print(f"parity bench {task}: error: {error}", file=sys.stderr)
        return EXIT_CODES[FAILED]
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    machine = _describe_machine()
    entries = [Entry(contestant.name, contestant.has_result) for contestant in contestants]
    interrupted = False
    try:
        with _progress(console, entries, options.rounds) as tell:
            _time(work, contestants, entries, options, tell)
    except KeyboardInterrupt:
        interrupted = True
    for entry in entries:
        if entry.verdict == AGREES and not entry.seconds:
            entry.verdict, entry.problem = FAILED, "interrupted before it was timed"
    against = next((entry for entry in entries if entry.name == options.against and entry.is_timed), fastest(entries))
    print_times(console, work, entries, against, options.threads)
    print_environment(console, entries, machine)
    code = EXIT_CODES[FAILED] if interrupted and verdict(entries) == AGREES else EXIT_CODES[verdict(entries)]
    if interrupted:
        console.print(f"INTERRUPTED after {max(len(entry.seconds) for entry in entries)} of {options.rounds} rounds.")
    try:
        if options.plot is not None and against is not None:
            _write_plot(options.plot, work, entries, against, machine, options.threads)
        if options.json is not None:
            report = _report(task, work, entries, options, machine)
            _write_json(options.json, {**report, "interrupted": interrupted, "exit_code": code})
    except OSError as error:
        print(f"parity bench {task}: error: {error}", file=sys.stderr)
        return EXIT_CODES[FAILED]
    return code


def _check_options(options: argparse.Namespace, contestants: Sequence[Contestant]) -> None:
    """Refuse, before anything is timed, what could not be done."""
    for contestant in contestants:
        contestant.check_installed()
    names = [contestant.name for contestant in contestants if contestant.has_result]
    if options.against is not None and options.against not in names:
        raise ValueError(f"--against must be one of {', '.join(names)}: got {options.against}")
    if options.threads > processors():
        raise ValueError(f"--threads must be at most {processors()}, the processors there are: got {options.threads}")
    for path in filter(None, (options.json, options.plot)):
        if not path.parent.is_dir():
            raise ValueError(f"there is no folder {path.parent}")
        if path.is_dir():
            raise ValueError(f"{path} is a folder")
    if options.plot is not None and options.plot.suffix.lower()[1:] not in FORMATS:
        raise ValueError(f"--plot must end in {' or '.join(FORMATS)}: got {options.plot.name}")


def _time(
    work: DecodeWork,
    contestants: Sequence[Contestant],
    entries: Sequence[Entry],
    options: argparse.Namespace,
    tell: Tell,
) -> None:
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        started(contestants, entries, options.threads) as racers,
    ):
        # While they import: their model, and what they are to find.
        file, weights = Path(folder) / "model.safetensors", work.weights()
        ref.save_weights(file, work.config, weights)
        reference = Reference(work, weights)
        race(racers, work, file, options.rounds, reference.judge, tell)


@contextmanager
def _progress(console: Console, entries: Sequence[Entry], rounds: int) -> Iterator[Tell]:
    """Show who does what: as bars on a terminal, as lines on standard error elsewhere."""
    if not console.is_terminal:
        said: set[str] = set()

        def say(name: str, doing: str) -> None:
            text = doing if doing.startswith("round") else f"{name}: {doing}"  # one line for each round
            if text not in said:
                said.add(text)
                print(text, file=sys.stderr, flush=True)

        yield say
        return
    # Drawn when something new begins, and not in between: nothing else runs while a contestant does.
    columns = ("{task.fields[name]:9}", BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        bars = {entry.name: progress.add_task("", total=STEPS + rounds, name=entry.name) for entry in entries}
        yield lambda name, doing: progress.update(bars[name], description=doing, advance=1, refresh=True)


def print_times(
    console: Console, work: DecodeWork, entries: Sequence[Entry], against: Entry | None, threads: int
) -> None:
    """Print who took how long, the fastest first, and why others have no time."""
    console.print(f"[bold]{work.title}[/]\n{work.details}; threads: {threads}")
    name = against.name if against else ""
    times = _table("median\nms", "lowest to\nhighest", "tokens\nper s", f"times\n{name}", "lowest to\nhighest")
    process = _table("GFLOP/s", "cores", "first\ncall s", "memory\nMiB")
    timed = [entry for entry in entries if entry.is_timed]
    for entry in sorted(timed, key=lambda entry: (not entry.has_result, Spread.of(entry.seconds).median)):
        for table, cells in ((times, _time_cells(work, entry, against)), (process, _process_cells(work, entry))):
            if not entry.has_result:
                table.add_section()
            table.add_row(entry.name, *cells)
    for entry in entries:
        if not entry.is_timed:
            times.add_row(entry.name, Text(WORDS[entry.verdict], VERDICT_STYLES[entry.verdict]))
    console.print(times)
    if timed:
        console.print(process)
    _print_remarks(console, entries, threads)


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _time_cells(work: DecodeWork, entry: Entry, against: Entry | None) -> list[str]:
    times = Spread.of([1e3 * seconds for seconds in entry.seconds])
    cells = [
        f"{times.median:,.1f}",
        f"{times.low:,.1f} .. {times.high:,.1f}",
        f"{1e3 * work.produced / times.median:,.0f}" if entry.has_result else "",
    ]
    if against is not None and entry is not against:
        relative = ratio(entry, against)
        cells += [f"{relative.median:.2f}", f"{relative.low:.2f} .. {relative.high:.2f}"]
    return cells


def _process_cells(work: DecodeWork, entry: Entry) -> list[str]:
    return [
        f"{work.operations / Spread.of(entry.seconds).median / 1e9:,.1f}",
        f"{Spread.of(entry.cores).median:.1f}",
        f"{entry.first_seconds:,.1f}",
        "-" if entry.peak_bytes is None else f"{entry.peak_bytes / 2**20:,.0f}",
    ]


def _print_remarks(console: Console, entries: Sequence[Entry], threads: int) -> None:
    """Print what the tables do not say: reasons, near-ties, and what agreement rests on."""
    for entry in entries:
        if not entry.is_timed:
            console.print(f"{WORDS[entry.verdict]:9} {entry.name}: {entry.problem}", markup=False)
        elif entry.near_ties:
            console.print(f"NEAR-TIE  {entry.name}: {entry.near_ties}", markup=False)
        if entry.is_timed and max(entry.cores) > threads + SPARE:
            console.print(f"NOTE      {entry.name} kept {max(entry.cores):.1f} cores busy, not {threads}", markup=False)
    timed = [entry for entry in entries if entry.is_timed]
    agreeing = [entry.name for entry in timed if entry.has_result]
    if agreeing:
        console.print(
            f"Medians of {max(len(entry.seconds) for entry in timed)} interleaved rounds. Tokens and scores of every "
            f"call of {', '.join(agreeing)} agree with the float64 reference."
        )
    if len(agreeing) < len(timed):
        console.print("products: only the matrix products, by NumPy, without a result; reference_numpy cannot beat it.")


def print_environment(console: Console, entries: Sequence[Entry], machine: dict[str, Any]) -> None:
    """Print what it ran on."""
    console.print(f"{machine['processor']}, processors: {machine['cpus']}", markup=False)
    versions = [f"{entry.name} {entry.environment['version']}" for entry in entries if entry.environment]
    console.print(f"Python {machine['python']}, {machine['platform']}; {'; '.join(versions)}", markup=False)
    if (machine["load_average"] or 0.0) > BUSY:
        console.print(
            f"NOTE      the machine was busy with something else: load average {machine['load_average']:.1f} before. "
            "Libraries whose threads wait for one another suffer most: try --threads 1, or later."
        )


def _describe_machine() -> dict[str, Any]:
    return {**describe_machine(), "processor": _processor(), "load_average": _load()}


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _load() -> float | None:
    """Return how many processes have wanted to run of late; None where the system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def _report(
    task: str, work: DecodeWork, entries: Sequence[Entry], options: argparse.Namespace, machine: dict[str, Any]
) -> dict[str, Any]:
    timed = [entry for entry in entries if entry.is_timed]
    return {
        "format": 1,
        "task": task,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "verdict": verdict(entries),
        "work": {**asdict(work), "operations": work.operations, "produced": work.produced},
        "config": work.config.to_dict(),
        "dtype": DTYPE,
        "threads": options.threads,
        "rounds": options.rounds,
        "machine": machine,
        "contestants": [entry.to_dict() for entry in entries],
        "ratios": {
            entry.name: {other.name: asdict(ratio(entry, other)) for other in timed if other is not entry}
            for entry in timed
        },
    }


def _write_json(path: Path, report: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", "utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_plot(
    path: Path, work: DecodeWork, entries: Sequence[Entry], against: Entry, machine: dict[str, Any], threads: int
) -> None:
    import matplotlib

    place = f"{machine['processor']}, {machine['cpus']} processors, threads: {threads}"
    with matplotlib.rc_context({**STYLE, "axes.spines.top": False, "axes.spines.right": False}):
        timed = [entry for entry in entries if entry.is_timed]
        write(draw_times(work.title, work.details, timed, against, place), path)
