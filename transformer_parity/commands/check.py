"""``parity check``: whether the ports agree with the reference, tap by tap."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import reference_numpy as ref
from reference_numpy.config import PRESETS, TransformerConfig
from transformer_parity.audit import Fate
from transformer_parity.cases import ACTIVATIONS, RUNGS, STEPS, Case, deck, gradient_case, preset_case, search_cases
from transformer_parity.clock import Spent
from transformer_parity.commands import add_backends, one_or_more, positive
from transformer_parity.commands.info import describe_machine
from transformer_parity.compare import FAILED, SKIPPED, Finding, Setting
from transformer_parity.html_report import write_html
from transformer_parity.inquiries import print_audit, print_inquiry, to_row
from transformer_parity.investigate import Inquiry
from transformer_parity.junit import write_junit
from transformer_parity.policy import EPS
from transformer_parity.ports import COMPILED_IN_FULL, PORTS, MissingFrameworkError
from transformer_parity.report import (
    EXIT_CODES,
    SENTENCES,
    exit_code,
    print_depth,
    print_near_ties,
    print_problems,
    print_skips,
    print_summary,
    verdict_line,
)
from transformer_parity.result import build, write_json
from transformer_parity.text import SPECIAL, VOCAB_SIZE, Vocabulary, batch, pick, read_pairs
from transformer_parity.workers import SILENCE, Message, failure, port_cases, run_all

EXAMPLES = """
examples:
  parity check                                       the deck and the shipped sentences, every port
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
        help="end a port that is silent so long (default: %(default)s)",
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
        "--rung",
        type=one_or_more(RUNGS),
        default=list(RUNGS),
        metavar=",".join(RUNGS),
        help="every intermediate value; every gradient; weights and moments after 1, 5 and 20 steps; "
        "tokens and scores of greedy and beam search. Default: all",
    )
    parser.add_argument("--only", choices=("deck", "text"), help="only the deck, or only the sentences")
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
        cases = _choose_cases(options, console) if ports else []
        interpreters = _interpreters(options)
    except (MissingFrameworkError, OSError, ValueError) as error:
        print(f"parity check: error: {error}", file=sys.stderr)
        return EXIT_CODES[FAILED]

    started = time.monotonic()
    # Only in its own process is known what a port of the user's is.
    plugins = dict.fromkeys(options.port, partial(port_cases, rungs=tuple(options.rung)))
    messages = run_all(
        [*ports, *plugins],
        {**dict.fromkeys(ports, cases), **plugins},
        setting,
        interpreters=interpreters,
        timeout=options.timeout,
        failures=options.failures.absolute(),
        attention=options.html is not None,
    )
    outcome = Outcome({"numpy": ref.describe()})
    _listen(messages, [*ports, *plugins], cases, setting, console, outcome)
    seconds = time.monotonic() - started
    return _report(options, outcome, [*ports, *options.port], setting, cases, seconds, console)


@dataclass
class Outcome:
    """All that the workers said."""

    environment: dict[str, dict[str, str]]
    findings: list[Finding] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)  # by which findings call what was asked for
    audits: dict[str, tuple[Fate, ...]] = field(default_factory=dict)
    inquiries: list[Inquiry] = field(default_factory=list)
    spent: dict[str, Spent] = field(default_factory=dict)


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
    for inquiry in outcome.inquiries:
        print_inquiry(console, inquiry)
    print_skips(console, findings)
    for what in _left_out(options):
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
        not_tested=_left_out(options),
        blames=[inquiry.blame for inquiry in outcome.inquiries if inquiry.blame],
        diagnoses=[to_row(inquiry) for inquiry in outcome.inquiries if inquiry.diagnosis],
        audits=[
            {"backend": name, "weights": [fate.to_dict() for fate in fates]} for name, fates in outcome.audits.items()
        ],
        attention=[row for inquiry in outcome.inquiries for row in inquiry.attention],
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
    if options.only == "deck" and (options.text or options.weights):
        raise ValueError("--text and --weights are about the sentences, which --only deck leaves out")
    if ACTIVATIONS not in options.rung and (options.text or options.weights or options.only == "text"):
        raise ValueError(f"sentences are compared by --rung {ACTIVATIONS}")
    if options.preset and options.rung == [STEPS]:
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


def _choose_cases(options: argparse.Namespace, console: Console) -> list[Case]:
    cases: list[Case] = []
    if options.only != "text" and options.weights is None:
        if options.preset:
            cases += [preset_case(name, thorough=True) for name in options.preset]
            cases += map(gradient_case, options.preset)
            cases += chain.from_iterable(map(search_cases, options.preset))
        else:
            cases += deck()
        cases = [case for case in cases if case.rung in options.rung]
    if options.only != "deck" and ACTIVATIONS in options.rung:
        with console.status("learning subwords from the text"):
            cases += _sentence_cases(options)
    return cases


def _sentence_cases(options: argparse.Namespace) -> list[Case]:
    if options.sentences < 1:
        raise ValueError(f"--sentences must be at least 1: got {options.sentences}")
    pairs = read_pairs(*(options.text or ()))
    lines = [line for pair in pairs for line in pair]
    if options.weights is not None:
        config, _ = ref.load_weights(options.weights)
        smaller = min(config.source_vocab_size, config.target_vocab_size)
        vocabulary = Vocabulary.train(lines, min(smaller - SPECIAL, VOCAB_SIZE))
        configs = {options.weights.name: config}
    else:
        vocabulary = Vocabulary.train(lines)
        sizes = dict.fromkeys(("source_vocab_size", "target_vocab_size"), vocabulary.size + SPECIAL)
        configs = {name: TransformerConfig.preset(name, **sizes) for name in options.preset or ["paper_base"]}
    chosen = pick(pairs, options.sentences)
    return [
        Case(f"{SENTENCES}/{name}", SENTENCES, config, "", batch(chosen, vocabulary, config), options.weights)
        for name, config in configs.items()
    ]


def _left_out(options: argparse.Namespace) -> list[str]:
    """Return what this run did not look at, and how to ask for it."""
    left_out = []
    if options.backends:
        left_out += [f"{name} (left out of --backends)" for name in PORTS if name not in ("numpy", *options.backends)]
    left_out += [f"{dtype} (left out of --dtype)" for dtype in EPS if dtype not in options.dtype]
    if COMPILED_IN_FULL not in options.dtype:
        left_out.append(f"what XLA makes of a program for users (compiled in full in {COMPILED_IN_FULL})")
    if options.weights or options.only == "text":
        left_out.append("the deck (left out by --weights or --only text)")
    elif not options.backends:
        left_out.append("sentences, fully masked rows and parts of the model alone (ask for them with --backends)")
    elif options.preset:
        left_out.append("the rest of the deck (left out by --preset)")
    left_out += [f"{rung} (left out of --rung)" for rung in RUNGS if rung not in options.rung]
    if options.only == "deck":
        left_out.append("sentences (left out by --only deck)")
    other = "cpu" if options.device == "gpu" else "gpu"
    return [*left_out, f"{other} (ask for it with --device {other})"]


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
                _keep(message, outcome)
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


def _keep(message: Message, outcome: Outcome) -> None:
    """Keep what a worker said; of two ports of the same name, the second is called as it was asked for."""
    if message.name:
        taken = {name for asked, name in outcome.names.items() if asked != message.backend}
        outcome.names[message.backend] = message.backend if message.name in taken else message.name
    name = outcome.names.get(message.backend, message.backend.rpartition(":")[2])
    outcome.findings += [replace(finding, backend=name) for finding in message.findings]
    if message.audit:
        outcome.audits[name] = message.audit
    if message.inquiry is not None:
        outcome.inquiries.append(message.inquiry.of(name))
    if message.environment:
        outcome.environment[name] = message.environment
    if message.spent:
        outcome.spent[name] = message.spent


def _log_progress(message: Message, logged: set[tuple[str, str]]) -> None:
    """Say on standard error, where no bar can be drawn, which component a port has reached."""
    for finding in message.findings:
        if (message.backend, finding.component) not in logged:
            logged.add((message.backend, finding.component))
            print(f"{finding.backend}: {finding.component}", file=sys.stderr, flush=True)
