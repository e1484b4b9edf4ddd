"""``parity check``: whether the ports agree with the reference, tap by tap."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

import reference_numpy as ref
from reference_numpy.config import PRESETS
from transformer_parity.cases.case import ACTIVATIONS, STAGES, STEPS, Case
from transformer_parity.cases.standard import port_cases
from transformer_parity.check.one_port import Job, Message
from transformer_parity.check.processes import SILENCE, Outcome, keep, run_all
from transformer_parity.check.selection import choose_cases, left_out
from transformer_parity.check.selftest import Trial, all_trials
from transformer_parity.cli.options import add_backends, one_or_more, positive
from transformer_parity.compare.findings import EXIT_CODES, FAILED, SKIPPED, Setting, exit_code, failure
from transformer_parity.compare.tolerances import EPS
from transformer_parity.mistakes.catalogue import parts
from transformer_parity.mistakes.mistake import ALL
from transformer_parity.ports.protocol import MissingFrameworkError
from transformer_parity.ports.registry import PORTS
from transformer_parity.report.diagnoses import print_audit, print_failure_report, to_row
from transformer_parity.report.html import write_html
from transformer_parity.report.junit import write_junit
from transformer_parity.report.result import build, write_json
from transformer_parity.report.tables import (
    print_depth,
    print_near_ties,
    print_problems,
    print_skips,
    print_summary,
    verdict_line,
)
from transformer_parity.system.machine import describe_machine

EXAMPLES = """
examples:
  parity check                                       all cases and the shipped sentences, every port
  parity check --backends torch,jax --dtype float64  two ports, semantics only
  parity check --preset marian,fairseq               two published conventions
  parity check --text train.en.gz train.de.gz        your own sentences
  parity check --weights model.safetensors           your own weights
  parity check --device gpu --precision fast         what TF32 costs
  parity check --port my_package.my_module:MyPort    a port of yours; `parity init-port` writes one to start from
  parity check --port mine:Port --html report.html   and a page to look at

exit code: 0 agree, 1 semantic divergence, 2 precision only, 3 nothing or not everything compared
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Describe the options."""
    parser = commands.add_parser(
        "check",
        help="compare every port with the reference, tap by tap",
        description="Compare every port with the NumPy reference at every intermediate value: each component alone, "
        "the stacks, the full model, every edge case, every preset, and a base-sized model on real sentences.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_backends(parser, None, "all four, or none beside --port")
    parser.add_argument(
        "--port",
        action="append",
        default=[],
        metavar="MODULE:CLASS",
        help="a port of yours (see `parity init-port`), or the name under which one is registered; may be repeated",
    )
    parser.add_argument(
        "--isolate",
        action="append",
        default=[],
        metavar="PORT=PYTHON",
        help="every port runs in a process of its own; this one by another interpreter: ../other/.venv/bin/python",
    )
    parser.add_argument(
        "--timeout",
        type=positive,
        default=int(SILENCE),
        metavar="SECONDS",
        help="end a port that is silent so long, not counting what it waits for a processor (default: %(default)s)",
    )
    parser.add_argument("--dtype", type=one_or_more(EPS), default=list(EPS), metavar=",".join(EPS), help="default: all")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="default: cpu")
    parser.add_argument(
        "--precision",
        choices=("highest", "fast"),
        default="highest",
        help="float32 matrix products: highest (the default) in full float32, fast in TF32 on a GPU",
    )
    parser.add_argument(
        "--preset", type=one_or_more(PRESETS), metavar="NAME[,NAME]", help="only these; see `parity info` for the list"
    )
    parser.add_argument(
        "--stage",
        type=one_or_more(STAGES),
        default=list(STAGES),
        metavar=",".join(STAGES),
        help="every intermediate value; every gradient; weights and moments after 1, 5 and 20 steps; "
        "tokens and scores of greedy and beam search. Default: all",
    )
    parser.add_argument("--only", choices=("cases", "text"), help="only the small cases, or only the sentences")
    parser.add_argument(
        "--weights", type=Path, metavar="FILE", help="a model of yours, on the sentences, in subwords learned from them"
    )
    parser.add_argument(
        "--text", type=Path, nargs=2, metavar=("SOURCE", "TARGET"), help="two line-aligned files, gzip too"
    )
    parser.add_argument("--sentences", type=int, default=16, metavar="N", help="pairs to run, default: 16")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result for machines")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="also write it for a CI server")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write it as one page with pictures")
    parser.add_argument(
        "--failures",
        type=Path,
        default=Path("parity-failures"),
        metavar="DIR",
        help="where what a guilty block was given is saved (default: parity-failures)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the comparison and return the exit code."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    if options.backends is None:
        options.backends = [] if options.port else list(PORTS)
    ports = [name for name in options.backends if name != "numpy"]
    try:
        if not ports and not options.port:
            raise ValueError("numpy is the reference: name at least one port to compare with it")
        _check_options(options)
        for name in ports:
            PORTS[name].check_installed()
        setting = Setting(options.dtype, options.device, options.precision)
        cases = choose_cases(options, console) if ports else []
        interpreters = _interpreters(options)
    except (MissingFrameworkError, OSError, ValueError) as error:
        print(f"parity check: error: {error}", file=sys.stderr)
        return EXIT_CODES[FAILED]

    started = time.monotonic()
    # Only in its own process is known what a port of the user's is.
    plugins = dict.fromkeys(options.port, partial(port_cases, stages=tuple(options.stage)))
    jobs = [
        Job(name, chosen, setting, options.failures.absolute(), attention=options.html is not None)
        for name, chosen in {**dict.fromkeys(ports, cases), **plugins}.items()
    ]
    messages = run_all(jobs, interpreters=interpreters, timeout=options.timeout)
    outcome = Outcome({"numpy": ref.describe()})
    _listen(messages, [*ports, *plugins], cases, setting, console, outcome)
    seconds = time.monotonic() - started
    return _report(options, outcome, [*ports, *options.port], setting, cases, seconds, console)


def _report(
    options: argparse.Namespace,
    outcome: Outcome,
    asked: Sequence[str],
    setting: Setting,
    cases: Sequence[Case],
    seconds: float,
    console: Console,
) -> int:
    """Print what was found, write the files that were asked for, and return the exit code."""
    findings = outcome.findings
    ports = [outcome.names.get(name, name.rpartition(":")[2]) for name in asked]
    for name, fates in outcome.audits.items():
        print_audit(console, name, fates)
    print_summary(console, findings, ports)
    print_depth(console, findings, ports)
    print_near_ties(console, findings)
    print_problems(console, findings)
    for failure_report in outcome.failure_reports:
        print_failure_report(console, failure_report)
    print_skips(console, findings)
    for what in left_out(options):
        console.print(f"NOT TESTED: {what}")
    console.print(verdict_line(findings, ports, seconds, outcome.spent))
    result = build(
        findings,
        ports,
        setting,
        outcome.environment,
        describe_machine(),
        cases=cases,
        weights=options.weights,
        text=options.text or (),
        not_tested=left_out(options),
        blames=[failure_report.blame for failure_report in outcome.failure_reports if failure_report.blame],
        diagnoses=[to_row(failure_report) for failure_report in outcome.failure_reports if failure_report.diagnosis],
        audits=[
            {"backend": name, "weights": [fate.to_dict() for fate in fates]} for name, fates in outcome.audits.items()
        ],
        attention=[row for failure_report in outcome.failure_reports for row in failure_report.attention],
        seconds=seconds,
        spent=outcome.spent,
    )
    for path, write in ((options.json, write_json), (options.junit, write_junit), (options.html, write_html)):
        if path is not None:
            write(path, result)
    return exit_code(findings)


def _interpreters(options: argparse.Namespace) -> dict[str, str]:
    """Return the interpreter of each port that has one of its own."""
    found = {}
    for text in options.isolate:
        name, equals, python = text.rpartition("=")
        if not equals or name not in (*options.port, *options.backends):
            asked = ", ".join((*options.port, *options.backends))
            raise ValueError(f"--isolate must be PORT=PYTHON, with one of {asked}: got {text!r}")
        found[name] = python
    return found


def _check_options(options: argparse.Namespace) -> None:
    """Refuse options of which one would be ignored, and a result that could not be written."""
    if options.only == "cases" and (options.text or options.weights):
        raise ValueError("--text and --weights are about the sentences, which --only cases leaves out")
    if ACTIVATIONS not in options.stage and (options.text or options.weights or options.only == "text"):
        raise ValueError(f"sentences are compared by --stage {ACTIVATIONS}")
    if options.preset and options.stage == [STEPS]:
        raise ValueError("optimizer steps are compared on models of their own: leave out --preset")
    if options.weights and options.preset:
        raise ValueError("--weights brings its own config: leave out --preset")
    if not options.backends and (options.preset or options.weights or options.text or options.only == "text"):
        raise ValueError("a port says itself what it is compared on: leave out --preset, --weights, --text and --only")
    for path in (options.json, options.junit, options.html):
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"there is no folder {path.parent}")
        if path is not None and path.is_dir():
            raise ValueError(f"{path} is a folder")


def _listen(
    messages: Iterator[Message],
    asked: Sequence[str],
    cases: Sequence[Case],
    setting: Setting,
    console: Console,
    outcome: Outcome,
) -> None:
    """Collect what the workers say, with a progress bar for each, until they are done or somebody presses Ctrl-C.

    An interruption is a finding too: what was compared until then is kept, and it is no agreement.
    """
    steps = sum(len([dtype for dtype in setting.dtypes if dtype in case.dtypes]) for case in cases)
    columns = (
        SpinnerColumn(),
        "{task.fields[backend]:6}",
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    done: set[str] = set()
    with Progress(*columns, console=console, transient=True) as progress:
        titles = {name: name.rpartition(":")[2] for name in asked}
        bars = {name: progress.add_task("waiting", total=steps, backend=titles[name]) for name in asked}
        logged: set[tuple[str, str]] = set()
        try:
            for message in messages:
                keep(message, outcome)
                if not console.is_terminal:
                    _log_progress(message, logged)
                if message.steps:
                    progress.update(bars[message.backend], total=message.steps)
                if message.done:
                    done.add(message.backend)
                doing = "done" if message.done else message.doing
                progress.update(bars[message.backend], description=doing, advance=1 if message.findings else 0)
        except KeyboardInterrupt:
            unfinished = [outcome.names.get(name, titles[name]) for name in asked if name not in done]
            outcome.findings += [failure(name, "interrupted before everything was compared") for name in unfinished]
    for name in asked:
        title = outcome.names.get(name, titles[name])
        if all(finding.verdict == SKIPPED for finding in outcome.findings if finding.backend == title):
            outcome.findings.append(failure(title, "nothing was compared, and a skip is no pass"))


def _log_progress(message: Message, logged: set[tuple[str, str]]) -> None:
    """Say on standard error, where no bar can be drawn, which component a port has reached."""
    for finding in message.findings:
        if (message.backend, finding.component) not in logged:
            logged.add((message.backend, finding.component))
            print(f"{finding.backend}: {finding.component}", file=sys.stderr, flush=True)


FRAMEWORKS = ("torch", "jax", "tf", "other")
NAME = "my_port"  # of the templates' module, as it stands in them


INIT_PORT_EXAMPLES = """
examples:
  parity init-port --framework torch                     writes my_port.py
  parity init-port --framework other --out marian.py     any framework: NumPy arrays go in and come out

exit code: 0 written, 3 not written
"""


def add_parser_init_port(commands: argparse._SubParsersAction) -> None:
    """Describe the options."""
    parser = commands.add_parser(
        "init-port",
        help="write a port of your own, to start from",
        description="Write a port that runs and agrees, around a stand-in: replace it by your own model, method by "
        "method, and compare after each.",
        epilog=INIT_PORT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--framework", choices=FRAMEWORKS, required=True, help="what your model is written in")
    parser.add_argument(
        "--out", type=Path, default=Path(f"{NAME}.py"), metavar="FILE", help=f"where to; default: {NAME}.py"
    )
    parser.add_argument("--force", action="store_true", help="write over a file that exists")
    parser.set_defaults(run=run_init_port)


def run_init_port(options: argparse.Namespace) -> int:
    """Write the file and return the exit code."""
    path: Path = options.out
    try:
        if path.suffix != ".py" or not path.stem.isidentifier():
            raise ValueError(f"--out must be a module that Python can import, such as {NAME}.py: got {path.name}")
        with path.open("w" if options.force else "x", encoding="utf-8") as file:
            file.write(skeleton(options.framework, path.stem))
    except FileExistsError:
        return _refuse(f"{path} exists: choose another name with --out, or write over it with --force")
    except (OSError, ValueError) as error:
        return _refuse(str(error))
    print(f"Wrote {path}. It agrees as it stands; compare it with")
    if path.parent.resolve() != Path.cwd():  # where `module:class` is looked for
        print(f"  cd {path.parent}")
    print(f"  parity check --port {path.stem}:MyPort")
    print(f"  pytest --parity-port={path.stem}:MyPort")
    return 0


def skeleton(framework: str, module: str) -> str:
    """Return the source of a port, as a module of some name."""
    template = files("transformer_parity.ports.templates").joinpath(f"{framework}_port.py")
    return template.read_text("utf-8").replace(NAME, module)


def _refuse(problem: str) -> int:
    print(f"parity init-port: error: {problem}", file=sys.stderr)
    return EXIT_CODES[FAILED]


NAMED = 0.9  # of those that have a name
DESCRIPTION = """\
Plant every known mistake in a copy of each port, one at a time, and compare it with the reference. Caught: the
comparison fails. Located: it fails first where the mistake is, and blame puts it there. Named: the diagnosis chooses
this mistake among all hypotheses; some have no name, because the failure itself says what it is.
"""


SELFTEST_EXAMPLES = """\
examples:
  parity selftest                                  everything; a quarter of an hour on two cores
  parity selftest --backends torch --part norm     one part of the catalogue, in one port
  parity selftest --json selftest.json             every mistake by name, for machines

exit code: 0 all caught and located, and nine of ten named; 1 not; 3 not everything could be tried
"""


def add_parser_selftest(commands: argparse._SubParsersAction) -> None:
    """Describe the options."""
    parser = commands.add_parser(
        "selftest",
        help="plant every known mistake: is it caught, located and named?",
        description=DESCRIPTION,
        epilog=SELFTEST_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--backend",
        "--backends",
        dest="backends",
        type=one_or_more(ALL),
        default=list(ALL),
        metavar=",".join(ALL),
        help="which ports (default: all)",
    )
    names = [name.replace(" ", "-") for name in parts()]
    parser.add_argument(
        "--part", type=one_or_more(names), default=names, metavar="NAME[,NAME]", help=f"of {', '.join(names)}"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result for machines")
    parser.set_defaults(run=run_selftest)


def run_selftest(options: argparse.Namespace) -> int:
    """Try every mistake and return the exit code."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    chosen = [name for name in parts() if name.replace(" ", "-") in options.part]
    try:
        for backend in options.backends:
            PORTS[backend].check_installed()
        if options.json is not None and not options.json.parent.is_dir():
            raise ValueError(f"there is no folder {options.json.parent}")
    except (MissingFrameworkError, ValueError) as error:
        print(f"parity selftest: error: {error}", file=sys.stderr)
        return EXIT_CODES[FAILED]
    expected = sum(backend in m.edits for name in chosen for m in parts()[name] for backend in options.backends)
    started = time.monotonic()
    found: list[Trial] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("mistakes", total=expected)
        try:
            for backend, part, batch in all_trials(options.backends, chosen):
                found += batch
                progress.update(task, advance=len(batch), description=f"{backend}: {part}")
                if not console.is_terminal:
                    print(f"{backend}: {part}", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            console.print("interrupted before everything was tried")
    order = {(backend, part): i for i, (backend, part) in enumerate((b, p) for b in options.backends for p in chosen)}
    found.sort(key=lambda trial: order[trial.backend, trial.part])
    _print(console, found, options.backends, chosen)
    code = _exit_code(found, expected)
    nameable = [trial for trial in found if trial.named is not None]
    counts = f"{sum(trial.caught for trial in found):,} caught, {sum(trial.located for trial in found):,} located, "
    counts += f"{sum(bool(trial.named) for trial in nameable):,} of {len(nameable):,} named"
    word = {0: "PASS", 1: "FAIL", 3: "INCOMPLETE"}[code]
    console.print(
        Text(word, "bold green" if code == 0 else "bold red")
        + Text(
            f"  {len(found):,} of {expected:,} mistakes planted: {counts}; {time.monotonic() - started:.0f} s.",
            "default",
        )
    )
    if options.json is not None:
        write_json(options.json, {"format": 1, "exit_code": code, "trials": [trial.to_dict() for trial in found]})
    return code


def _exit_code(found: Sequence[Trial], expected: int) -> int:
    if len(found) < expected or not found:
        return EXIT_CODES[FAILED]
    named = [trial.named for trial in found if trial.named is not None]
    good = all(trial.caught and trial.located for trial in found) and sum(named) >= NAMED * len(named)
    return 0 if good else 1


def _print(console: Console, found: Sequence[Trial], backends: Sequence[str], chosen: Sequence[str]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("part", no_wrap=True)
    for backend in backends:
        table.add_column(f"{backend}\ncaught", justify="right")
        table.add_column("\nlocated", justify="right")
        table.add_column("\nnamed", justify="right")
    for part in chosen:
        row = [part]
        for backend in backends:
            group = [trial for trial in found if trial.part == part and trial.backend == backend]
            named = [trial for trial in group if trial.named is not None]
            row.append(f"{sum(trial.caught for trial in group)}/{len(group)}")
            row.append(f"{sum(trial.located for trial in group)}/{len(group)}")
            row.append(f"{sum(bool(trial.named) for trial in named)}/{len(named)}" if named else "-")
        table.add_row(*row)
    console.print(table)
    for trial in found:
        if not (trial.caught and trial.located and trial.named is not False):
            what = "not caught" if not trial.caught else "not located" if not trial.located else "not named"
            console.print(Text(f"{what:11}", "bold red") + Text(f" {trial.backend}, {trial.mistake}: {trial.said}"))
