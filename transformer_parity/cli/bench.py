"""``parity bench``: how fast the packages are, on the same work, with results that agree."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from transformer_parity.bench import tables
from transformer_parity.bench.imports import Pair, run_imports
from transformer_parity.bench.measurements import Entry, fastest, ratio, verdict
from transformer_parity.bench.participants import OURS
from transformer_parity.bench.plots import draw_growth, draw_times
from transformer_parity.bench.rounds import Participant, Tell
from transformer_parity.bench.run import choose_participants, grown, make_work, time_work, work_title
from transformer_parity.bench.workload import SIZES, DecodeWork, Work
from transformer_parity.cli.options import add_backends, positive
from transformer_parity.compare.verdict import AGREES, EXIT_CODES, FAILED
from transformer_parity.figures.style import FORMATS, STYLE, write
from transformer_parity.ports.protocol import MissingFrameworkError
from transformer_parity.ports.registry import PORTS
from transformer_parity.system import files
from transformer_parity.system.machine import processors

STEPS = 4  # before the rounds: import, load, and two calls
GROWTH = {  # what --scale lets grow, and how far if nothing is said
    "source": (64, 128, 256, 512, 1024, 2048, 4096),
    "length": (64, 128, 256, 512, 1024, 2048, 4096),
    "batch": (1, 2, 4, 8, 16, 32),
    "depth": (1, 2, 4, 8, 16),
}

DESCRIPTION = """\
Time the packages beside one another, as their users run them.

Each runs in a process of its own, with the same number of threads. All are
started, loaded and warmed up first; then come the rounds. In each round everybody
runs once, while all others wait, so that nobody meets the machine at a better time
than the others. Ratios are taken within a round, and then their median.

No time is printed for a result that does not agree with the reference.

Nothing else should run meanwhile: it does not slow all of them down alike.
"""

SIZES_HELP = """
Sizes: tiny is d_model 128, 2+2 layers, vocabulary 1,000; small 256, 3+3, 8,000;
base 512, 6+6, 37,000, the paper's. The conventions are those of the preset marian.
"""

DESCRIPTIONS = {
    "forward": """\
Compute the logits of a batch of sentences, in inference mode: eagerly in NumPy and
PyTorch, by a compiled function in JAX and TensorFlow.
""",
    "train": """\
Train on a batch of sentences, again and again: forward, backward and an update by
Adam. The loss of every step has to be the reference's. That is why there is no
dropout by default; with --dropout, everybody drops something else, and losses are
only told to be of the right size.
""",
    "decode": """\
Translate a batch of sentences: random ones, by a random model that never ends a
sentence by itself, so that everybody says the same number of tokens.
""",
    "compile": """\
How long the first call takes, and a later one: what is between the two is compiling.
Forward pass, training step and greedy search, each in a fresh process.
""",
    "import": """\
Import each package, and its framework alone, each in a fresh process: what does the
package add?
""",
}

EXAMPLES = {
    "forward": """\
  parity bench forward                                  all four, small
  parity bench forward --peers --plot forward.png       beside torch.nn.Transformer, Marian, a Flax NNX model,
                                                        Keras hub, and the matrix products alone
  parity bench forward --config base --json base.json   the paper's size, every number into a file
  parity bench forward --scale source --batch 1 --plot growth.png    sources of 64 up to 4,096 tokens: time and memory
  parity bench forward --scale depth=1,2,4,8            1+1 up to 8+8 layers
  parity bench forward --dtype bfloat16 --device gpu --backends torch,jax
""",
    "train": """\
  parity bench train                                    all four, small
  parity bench train --peers --threads 2                beside torch.nn.Transformer, Marian, Flax NNX and Keras hub
  parity bench train --dropout 0.1                      with the paper's dropout
  parity bench train --scale length --activation-checkpointing --backends torch
""",
    "decode": """\
  parity bench decode                                   all four, small
  parity bench decode --backends numpy,torch --config tiny
  parity bench decode --peers --plot decode.png         beside Hugging Face's MarianMTModel, Flax NNX, Keras hub, and
                                                        the matrix products alone: what NumPy cannot beat
  parity bench decode --beam 4 --against torch          beam search; how many times as long as torch
  parity bench decode --config base --json decode.json  the paper's size, every number into a file
""",
    "compile": """\
  parity bench compile --backends jax,tf
  parity bench compile --peers --json compile.json
""",
    "import": """\
  parity bench import
  parity bench import --backends torch --rounds 20
""",
}

READING = """
reading the table: `times` is the median of the ratios within each round, with the
lowest and the highest; tokens count padding too. GFLOP/s counts matrix products only; beside it, as a share of
what one large product reaches through NumPy here. `cores` is how many the process kept
busy. `first call` includes compiling. Memory is the most that the process held in a
round, and how much more that was than before its first call.
"""

EXIT = """
exit code: 0 all agree and are timed, 1 a result does not agree, 3 not everything was timed
"""


def add_parser(commands: Any) -> None:
    """Describe the command and its options."""
    parser = commands.add_parser(
        "bench",
        help="how fast the packages are, on the same work, with results that agree",
        description=DESCRIPTION,
        epilog="Start with `parity bench forward --peers`.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tasks = parser.add_subparsers(title="what to time", metavar="TASK", required=True)
    for task, what in (
        ("forward", "logits of a batch"),
        ("train", "steps of Adam"),
        ("decode", "greedy or beam search with a cache"),
        ("compile", "first calls and later ones, of all three"),
        ("import", "the packages beside their frameworks"),
    ):
        _add_task(tasks, task, what)


def _add_task(tasks: Any, task: str, what: str) -> None:
    parser = tasks.add_parser(
        task,
        help=what,
        description=DESCRIPTIONS[task] + ("" if task == "import" else SIZES_HELP),
        epilog=f"examples:\n{EXAMPLES[task]}{READING if task in OURS else ''}{EXIT}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_backends(parser, list(PORTS))
    if task != "import":
        _add_work(parser, task)
    if task in OURS:
        parser.add_argument(
            "--against", metavar="NAME", help="whose time the others' are compared with; default: the fastest"
        )
    if task != "compile":
        parser.add_argument("--rounds", type=positive, default=7, metavar="N", help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything for machines")
    if task != "compile":
        what = "a bar for each" if task not in GROWING else "a bar for each, or with --scale a line"
        parser.add_argument(
            "--plot", type=Path, metavar="FILE", help=f"also draw {what}; the name ends in {', '.join(FORMATS)}"
        )
    parser.set_defaults(run=RUN[task])


def _add_work(parser: argparse.ArgumentParser, task: str) -> None:
    """Add what there is to do, and who else does it."""
    default = DecodeWork if task == "decode" else Work
    parser.add_argument("--config", choices=SIZES, default=Work.size, help="default: %(default)s")
    parser.add_argument("--peers", action="store_true", help="other people's implementations too, and baselines")
    threads = min(2, processors())
    parser.add_argument("--threads", type=positive, default=threads, metavar="N", help=f"of each, default: {threads}")
    for name, what in (
        ("batch", "sentences"),
        ("source", "tokens of the longest source sentence"),
        ("target", "tokens of the longest target sentence; of each, when decoding"),
    ):
        parser.add_argument(
            f"--{name}",
            *(["--tokens"] if name == "target" else []),
            type=positive,
            default=getattr(default, name),
            metavar="N",
            help=f"{what}, default: {getattr(default, name)}",
        )
    parser.add_argument("--layers", type=positive, metavar="N", help="of encoder and decoder each; default: the size's")
    if task == "decode":
        parser.add_argument(
            "--beam", type=positive, metavar="K", help="beam search, keeping K hypotheses; default: greedy"
        )
    if task == "train":
        parser.add_argument(
            "--dropout", type=rate, default=0.0, metavar="RATE", help="of embeddings and residuals, default: none"
        )
        parser.add_argument(
            "--activation-checkpointing",
            action="store_true",
            help="compute layers again in the backward pass, to save memory; our packages only",
        )
    if task in GROWING:
        parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: %(default)s")
        parser.add_argument(
            "--scale",
            type=growth,
            metavar="AXIS[=N,N,...]",
            help=f"let {', '.join(GROWTH)} grow, and say how time and memory do",
        )
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="default: %(default)s")


GROWING = ("forward", "train")


def rate(text: str) -> float:
    """Return an argparse value: a number in [0, 1)."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"must be a number from 0 up to but not including 1: got {text!r}")
    return value


def growth(text: str) -> tuple[str, tuple[int, ...]]:
    """Return an argparse value: what grows, and the values it takes."""
    axis, given, values = text.partition("=")
    if axis not in GROWTH:
        raise argparse.ArgumentTypeError(f"must begin with one of {', '.join(GROWTH)}: got {text!r}")
    sizes = tuple(positive(value) for value in values.split(",")) if given else GROWTH[axis]
    if any(after <= before for before, after in itertools.pairwise(sizes)):
        raise argparse.ArgumentTypeError(f"must grow: got {values}")
    return axis, sizes


def run_one(options: argparse.Namespace, task: str) -> int:
    """Time one task, at one size or over a size that grows, and return the exit code."""
    work = make_work(options, task)
    scale = getattr(options, "scale", None)
    works = [work] if scale is None else [grown(work, scale[0], value) for value in scale[1]]
    console = _console()
    if (code := _refused(task, options, choose_participants(work, options))) is not None:
        return code
    machine = tables.describe(options.threads)
    races: list[list[Entry]] = []
    rates: list[float | None] = []
    interrupted = False
    for work in works:
        entries, interrupted = time_work(work, options, partial(progress, console), machine)
        races.append(entries)
        rates.append(machine["matrix_rate"])
        against = next((entry for entry in entries if entry.name == options.against and entry.is_timed), None)
        tables.print_times(console, work, entries, against or fastest(entries), machine)
        if interrupted:
            break
    everything = [entry for entries in races for entry in entries]
    if scale is not None:
        tables.print_growth(console, scale[0], scale[1], races)
    tables.print_environment(console, races[0], machine)
    code = EXIT_CODES[verdict(everything)] or EXIT_CODES[FAILED if interrupted else AGREES]
    if interrupted:
        done = max(len(entry.seconds) for entry in races[-1])
        console.print(f"INTERRUPTED after {done} of {options.rounds} rounds.")

    def draw() -> Any:
        place = f"{machine['processor']}, {machine['cpus']} processors, threads: {options.threads}"
        if scale is not None:
            return draw_growth(work_title(works[0], scale[0]), works[0].details, scale[0], scale[1], races, place)
        timed = [entry for entry in races[0] if entry.is_timed]
        against = next((entry for entry in timed if entry.name == options.against), fastest(timed))
        return draw_times(work.title, work.details, timed, against, place)

    found: dict[str, Any] = {"task": task, "machine": machine, "rounds": options.rounds}
    found |= {"scale": scale[0] if scale else None, "interrupted": interrupted, "exit_code": code}
    found["races"] = [tables.times_for_machines(*one) for one in zip(works, races, rates, strict=False)]
    return _write(f"bench {task}", options, found, draw if any(entry.is_timed for entry in everything) else None, code)


def run_compile(options: argparse.Namespace) -> int:
    """Time first calls and later ones, and return the exit code."""
    works = [make_work(options, task) for task in OURS]
    for work in works:
        if (code := _refused("compile", options, choose_participants(work, options))) is not None:
            return code
    console, machine = _console(), tables.describe(options.threads)
    options = argparse.Namespace(**{**vars(options), "rounds": 1})
    races: list[list[Entry]] = []
    rates: list[float | None] = []
    interrupted = False
    for work in works:
        entries, interrupted = time_work(work, options, partial(progress, console), machine)
        races.append([entry for entry in entries if entry.has_result])
        rates.append(machine["matrix_rate"])
        if interrupted:
            break
    tables.print_first_calls(console, works, races, machine)
    tables.print_environment(console, races[0], machine)
    everything = [entry for entries in races for entry in entries]
    code = EXIT_CODES[verdict(everything)] or EXIT_CODES[FAILED if interrupted else AGREES]
    found: dict[str, Any] = {"task": "compile", "machine": machine, "interrupted": interrupted, "exit_code": code}
    found["races"] = [tables.times_for_machines(*one) for one in zip(works, races, rates, strict=False)]
    return _write("bench compile", options, found, None, code)


def run_import(options: argparse.Namespace) -> int:
    """Time imports, and return the exit code."""
    if (code := _refused("import", options, [OURS["forward"][name] for name in options.backends])) is not None:
        return code
    console, machine = _console(), tables.describe(1)
    pairs = [Pair(name) for name in options.backends]
    interrupted = False
    try:
        run_imports(pairs, options.rounds, partial(print, file=sys.stderr, flush=True))
    except KeyboardInterrupt:
        interrupted = True
    except ImportError as error:
        print(f"parity bench import: error: {error}", file=sys.stderr)
        return EXIT_CODES[FAILED]
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

    def draw() -> Any:
        place = f"{machine['processor']}, {machine['cpus']} processors"
        return draw_times("import", "each in a fresh process; grey: the framework alone", entries, None, place)

    return _write("bench import", options, found, draw if entries else None, code)


def _run_task(task: str) -> Any:
    return lambda options: run_one(options, task)


RUN = {**{task: _run_task(task) for task in OURS}, "compile": run_compile, "import": run_import}


def _console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else 140)


def _refused(task: str, options: argparse.Namespace, participants: Sequence[Participant]) -> int | None:
    """Say, before anything is timed, what could not be done, and return the exit code."""
    try:
        _check_options(options, participants)
    except (MissingFrameworkError, ValueError) as error:
        print(f"parity bench {task}: error: {error}", file=sys.stderr)
        return EXIT_CODES[FAILED]
    return None


def _check_options(options: argparse.Namespace, participants: Sequence[Participant]) -> None:
    for participant in participants:
        participant.check_installed()
    names = [participant.name for participant in participants if participant.has_result]
    against, plot = getattr(options, "against", None), getattr(options, "plot", None)
    threads, peers = getattr(options, "threads", 1), getattr(options, "peers", False)
    if against is not None and against not in names:
        raise ValueError(f"--against must be one of {', '.join(names)}: got {against}")
    if threads > processors():
        raise ValueError(f"--threads must be at most {processors()}, the processors there are: got {threads}")
    if peers and options.device != "cpu":
        raise ValueError("--peers run on the CPU: leave out --peers or --device gpu")
    if peers and getattr(options, "dtype", "float32") != "float32":
        raise ValueError("--peers compute in float32: leave out --peers or --dtype bfloat16")
    if peers and getattr(options, "activation_checkpointing", False):
        raise ValueError("--peers have no activation checkpointing: leave out one of the two")
    if "numpy" in options.backends and getattr(options, "dtype", "float32") == "bfloat16":
        raise ValueError("reference_numpy has no bfloat16 worth timing: add --backends torch,jax,tf")
    if "numpy" in options.backends and getattr(options, "device", "cpu") == "gpu":
        raise ValueError("reference_numpy runs on the CPU: add --backends torch,jax,tf")
    for path in filter(None, (options.json, plot)):
        if not path.parent.is_dir():
            raise ValueError(f"there is no folder {path.parent}")
        if path.is_dir():
            raise ValueError(f"{path} is a folder")
    if plot is not None and plot.suffix.lower()[1:] not in FORMATS:
        raise ValueError(f"--plot must end in {' or '.join(FORMATS)}: got {plot.name}")


@contextmanager
def progress(console: Console, entries: Sequence[Entry], rounds: int) -> Iterator[Tell]:
    """Show who does what: as bars on a terminal, as lines on standard error elsewhere."""
    names = {entry.name for entry in entries}  # the baseline is nobody's news
    if not console.is_terminal:
        said: set[str] = set()

        def say(name: str, doing: str) -> None:
            text = doing if doing.startswith("round") else f"{name}: {doing}"  # one line for each round
            if name in names and text not in said:
                said.add(text)
                print(text, file=sys.stderr, flush=True)

        yield say
        return
    # Drawn when something new begins, and not in between: nothing else runs while a participant does.
    width = max(len(name) for name in names)
    columns = (f"{{task.fields[name]:{width}}}", BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        bars = {entry.name: progress.add_task("", total=STEPS + rounds, name=entry.name) for entry in entries}

        def show(name: str, doing: str) -> None:
            if name in names:
                progress.update(bars[name], description=doing, advance=1, refresh=True)

        yield show


def _write(command: str, options: argparse.Namespace, found: dict[str, Any], draw: Any, code: int) -> int:
    """Write the numbers and the picture that were asked for, and return the exit code."""
    try:
        if options.json is not None:
            files.write_json(options.json, found)
        if getattr(options, "plot", None) is not None and draw is not None:
            import matplotlib

            with matplotlib.rc_context({**STYLE, "axes.spines.top": False, "axes.spines.right": False}):
                write(draw(), options.plot)
    except OSError as error:
        print(f"parity {command}: error: {error}", file=sys.stderr)
        return EXIT_CODES[FAILED]
    return code
