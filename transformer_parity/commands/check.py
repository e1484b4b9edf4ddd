"""``parity check``: whether the ports agree with the reference, tap by tap."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import reference_numpy as ref
from reference_numpy.config import PRESETS, TransformerConfig
from transformer_parity.cases import ACTIVATIONS, RUNGS, STEPS, Case, deck, gradient_case, preset_case, search_cases
from transformer_parity.commands import add_backends, one_or_more
from transformer_parity.commands.info import describe_machine
from transformer_parity.compare import AGREES, FAILED, Finding, Setting
from transformer_parity.policy import EPS
from transformer_parity.ports import PORTS, MissingFrameworkError
from transformer_parity.report import (
    EXIT_CODES,
    SENTENCES,
    exit_code,
    is_near_tie,
    overall,
    print_depth,
    print_near_ties,
    print_problems,
    print_summary,
    summarise,
    verdict_line,
)
from transformer_parity.text import SPECIAL, VOCAB_SIZE, Vocabulary, batch, pick, read_pairs
from transformer_parity.workers import Message, failure, run_all

EXAMPLES = """
examples:
  parity check                                       the deck and the shipped sentences, every port
  parity check --backends torch,jax --dtype float64  two ports, semantics only
  parity check --preset marian,fairseq               two published conventions
  parity check --text train.en.gz train.de.gz        your own sentences
  parity check --weights model.safetensors           your own weights
  parity check --device gpu --precision fast         what TF32 costs

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
    add_backends(parser, list(PORTS))
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
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the comparison and return the exit code."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    ports = [name for name in options.backends if name != "numpy"]
    try:
        if not ports:
            raise ValueError("numpy is the reference: name at least one port to compare with it")
        _check_options(options)
        for name in ports:
            PORTS[name].check_installed()
        setting = Setting(options.dtype, options.device, options.precision)
        cases = _choose_cases(options, console)
    except (MissingFrameworkError, OSError, ValueError) as error:
        print(f"parity check: error: {error}", file=sys.stderr)
        return EXIT_CODES[FAILED]

    started = time.monotonic()
    findings, environment = _compare(ports, cases, setting, console)
    seconds = time.monotonic() - started
    print_summary(console, findings, ports)
    print_depth(console, findings, ports)
    print_near_ties(console, findings)
    print_problems(console, findings)
    for what in _left_out(options):
        console.print(f"NOT TESTED: {what}")
    console.print(verdict_line(findings, ports, seconds))
    code = exit_code(findings)
    if options.json is not None:
        _write_json(options, code, findings, environment, setting)
    return code


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
    if options.json is not None:
        if not options.json.parent.is_dir():
            raise ValueError(f"there is no folder {options.json.parent}")
        if options.json.is_dir():
            raise ValueError(f"{options.json} is a folder")


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
    left_out = [f"{name} (left out of --backends)" for name in PORTS if name not in ("numpy", *options.backends)]
    left_out += [f"{dtype} (left out of --dtype)" for dtype in EPS if dtype not in options.dtype]
    if options.weights or options.only == "text":
        left_out.append("the deck (left out by --weights or --only text)")
    elif options.preset:
        left_out.append("the rest of the deck (left out by --preset)")
    left_out += [f"{rung} (left out of --rung)" for rung in RUNGS if rung not in options.rung]
    if options.only == "deck":
        left_out.append("sentences (left out by --only deck)")
    other = "cpu" if options.device == "gpu" else "gpu"
    return [*left_out, f"{other} (ask for it with --device {other})"]


def _compare(
    ports: Sequence[str], cases: list[Case], setting: Setting, console: Console
) -> tuple[list[Finding], dict[str, dict[str, str]]]:
    """Run the workers with a progress bar for each, until they are done or somebody presses Ctrl-C.

    An interruption is a finding too: what was compared until then is kept, and it is no agreement.
    """
    steps = sum(len([dtype for dtype in setting.dtypes if dtype in case.dtypes]) for case in cases)
    findings: list[Finding] = []
    environment: dict[str, dict[str, str]] = {"numpy": ref.describe()}
    columns = (
        SpinnerColumn(),
        "{task.fields[backend]:6}",
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bars = {name: progress.add_task("waiting", total=steps, backend=name) for name in ports}
        logged: set[tuple[str, str]] = set()
        try:
            for message in run_all(ports, cases, setting):
                findings += message.findings
                if not console.is_terminal:
                    _log_progress(message, logged)
                if message.environment:
                    environment[message.backend] = message.environment
                doing = "done" if message.done else message.doing
                progress.update(bars[message.backend], description=doing, advance=1 if message.findings else 0)
        except KeyboardInterrupt:
            unfinished = [name for name in ports if name not in environment]
            findings += [failure(name, "interrupted before everything was compared") for name in unfinished]
    return findings, environment


def _log_progress(message: Message, logged: set[tuple[str, str]]) -> None:
    """Say on standard error, where no bar can be drawn, which component a port has reached."""
    for finding in message.findings:
        if (message.backend, finding.component) not in logged:
            logged.add((message.backend, finding.component))
            print(f"{message.backend}: {finding.component}", file=sys.stderr, flush=True)


def _write_json(
    options: argparse.Namespace,
    code: int,
    findings: Sequence[Finding],
    environment: dict[str, dict[str, str]],
    setting: Setting,
) -> None:
    content = {
        "format": 1,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "exit_code": code,
        "verdict": overall(findings),
        "backends": [name for name in options.backends if name != "numpy"],
        "setting": asdict(setting),
        "weights": options.weights and str(options.weights),
        "text": [str(path) for path in options.text or ("shipped",)],
        "not_tested": _left_out(options),
        "machine": describe_machine(),
        "environment": environment,
        "comparisons": len(findings),
        "summary": summarise(findings),
        "near_ties": [finding.to_dict() for finding in findings if is_near_tie(finding)],
        "failures": [finding.to_dict() for finding in findings if finding.verdict != AGREES],
        "sentences": [finding.to_dict() for finding in findings if finding.component == SENTENCES],
    }
    temporary = options.json.with_name(f".{options.json.name}.tmp")
    try:
        temporary.write_text(json.dumps(_finite(content), indent=1, allow_nan=False) + "\n", "utf-8")
        temporary.replace(options.json)
    finally:
        temporary.unlink(missing_ok=True)


def _finite(value: object) -> object:
    """Write an infinite error as a string: JSON has no number for it, nor for NaN."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
