"""``parity check``: whether the ports agree with the reference, tap by tap."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

import reference_numpy as ref
from transformer_parity.cli.options import (
    add_backends,
    add_machine,
    add_ports,
    check_installed,
    one_or_more,
    parallel_plan,
    positive,
)
from transformer_parity.cli.progress import Progress, make_console
from transformer_parity.engine.findings import failure
from transformer_parity.engine.system.errors import refusals
from transformer_parity.engine.system.files import check_writable, write_json, write_results
from transformer_parity.engine.system.machine import describe_machine
from transformer_parity.engine.tolerances import EPS
from transformer_parity.transformer.cases.case import DISTRIBUTED
from transformer_parity.transformer.check.distributed import run_distributed
from transformer_parity.transformer.check.one_port import Job, Message
from transformer_parity.transformer.check.processes import SILENCE, Outcome, run_all
from transformer_parity.transformer.check.selection import ONLY, Selection
from transformer_parity.transformer.distributed.stage import Check
from transformer_parity.transformer.ports.registry import PORTS
from transformer_parity.transformer.report.diagnoses import print_audit, print_failure_report, print_undiagnosed
from transformer_parity.transformer.report.junit import write_junit
from transformer_parity.transformer.report.result import Run, build
from transformer_parity.transformer.report.tables import (
    print_coverage,
    print_depth,
    print_near_ties,
    print_problems,
    print_profile,
    print_skips,
    print_summary,
    verdict_line,
)
from transformer_parity.transformer.stages.registry import STAGES
from transformer_spec.presets import PRESETS

EXAMPLES = """
examples:
  parity check                                       all cases and the shipped sentences, every port
  parity check --backends torch,jax --dtype float64  two ports, semantics only
  parity check --preset marian,fairseq               two published conventions
  parity check --text train.en.gz train.de.gz        your own sentences
  parity check --weights model.safetensors           your own weights
  parity check --device gpu --precision fast         what TF32 costs
  parity check --port my_package.my_module:MyPort    a port of yours; `parity init-port` writes one to start from
  parity check --stage distributed --parallel data=2 training on two devices against training on one
  parity check --port mine:Port --html report.html   and a page for a browser

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
    add_ports(parser)
    parser.add_argument(
        "--isolate",
        action="append",
        default=[],
        metavar="PORT=PYTHON",
        help="run this port with another Python interpreter, such as ../other/.venv/bin/python",
    )
    parser.add_argument(
        "--timeout",
        type=positive,
        default=int(SILENCE),
        metavar="SECONDS",
        help="stop a port that reports nothing for so long, not counting waits for a processor (default: %(default)s)",
    )
    parser.add_argument("--dtype", action=one_or_more(EPS), metavar=",".join(EPS), help="which dtypes (default: all)")
    add_machine(parser)
    parser.add_argument(
        "--preset",
        action=one_or_more(PRESETS),
        metavar="NAME[,NAME]",
        help="compare only these presets; `parity info` lists them",
    )
    parser.add_argument(
        "--stage",
        action=one_or_more((*STAGES, DISTRIBUTED)),
        metavar=",".join((*STAGES, DISTRIBUTED)),
        help="what to compare: every intermediate value; every gradient; weights and moments after 1, 5 and 20 steps; "
        "tokens and scores of greedy and beam search; training on several devices (default: all but the last)",
    )
    parser.add_argument(
        "--parallel",
        type=parallel_plan,
        action="append",
        default=[],
        metavar="PLAN",
        help="a plan of several devices for --stage distributed, such as data=2 or fsdp=2,tensor=2; may be repeated "
        "(default: data=2, fsdp=2 and tensor=2, where the framework has it)",
    )
    parser.add_argument(
        "--processes",
        type=positive,
        metavar="N",
        help="how many processes have the devices of a plan, for --stage distributed (default: one for each in torch, "
        "else one)",
    )
    parser.add_argument("--only", choices=ONLY, help="only the small cases, or only the sentences")
    parser.add_argument(
        "--weights",
        type=Path,
        metavar="FILE",
        help="compare with these weights, on the sentences alone, in subwords learned from them",
    )
    parser.add_argument(
        "--text",
        type=Path,
        nargs=2,
        metavar=("SOURCE", "TARGET"),
        help="your own sentences: two line-aligned files, plain or gzipped",
    )
    parser.add_argument("--sentences", type=int, default=16, metavar="N", help="sentence pairs to run (default: 16)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result for machines")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="also write it as JUnit XML, for a CI server")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write it as one page for a browser")
    parser.add_argument("--profile", action="store_true", help="also show what the processor time went into")
    parser.add_argument(
        "--failures",
        type=Path,
        default=Path("parity-failures"),
        metavar="DIR",
        help="where the inputs of the first wrong block are saved (default: parity-failures)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the comparison and return the exit code."""
    console = make_console()
    check_writable(options.json, options.junit, options.html)
    with refusals(OSError, ValueError):
        selection = _selection(options)
        check_installed(selection.backends)
        with console.status("learning subwords from the text"):
            cases = selection.cases()
        interpreters = _interpreters(options.isolate, [*selection.ports, *selection.backends])

    started = time.monotonic()
    common = {"failures": options.failures.absolute(), "views": options.html is not None}
    if selection.distributed:
        check = Check(selection.plans, selection.processes, selection.setting.dtypes)
        named = [*selection.ports, *selection.backends]
        jobs = [Job(name, selection.setting, tuple(check.cases(name)), **common) for name in named]
        messages = run_distributed(jobs, check, interpreters=interpreters, timeout=options.timeout)
    else:
        jobs = [Job(name, selection.setting, tuple(cases), **common) for name in selection.backends]
        jobs += [Job(name, selection.setting, None, selection.chosen_stages, **common) for name in selection.ports]
        messages = run_all(jobs, interpreters=interpreters, timeout=options.timeout)
    outcome = Outcome({"numpy": ref.describe()})
    _listen(messages, jobs, outcome)
    ports = [outcome.name(job) for job in jobs]
    ran = {case.name: case for own in outcome.cases.values() for case in own}
    result = Run(
        selection.setting,
        outcome.findings,
        ports,
        [selection.asked(name, outcome.cases.get(name, ()), outcome.dtypes.get(name, ())) for name in ports],
        outcome.environment,
        describe_machine(),
        cases,
        selection.weights,
        selection.text,
        selection.not_tested(ran.values()),
        outcome.failure_reports,
        [{"backend": name, "weights": [fate.to_dict() for fate in fates]} for name, fates in outcome.audits.items()],
        time.monotonic() - started,
        outcome.spent,
        time.process_time(),
    )
    for name, fates in outcome.audits.items():
        print_audit(console, name, fates)
    _print(console, result, options.profile)
    if options.json or options.junit or options.html:
        from transformer_parity.transformer.report.html import (
            write_html,  # which a check without a page need not wait for
        )

        files = ((options.json, write_json), (options.junit, write_junit), (options.html, write_html))
        write_results(build(result), *files)
    return result.verdict.exit_code


def _selection(options: argparse.Namespace) -> Selection:
    backends = list(PORTS) * (not options.port) if options.backends is None else options.backends
    return Selection(
        backends=tuple(name for name in backends if name != "numpy"),
        ports=tuple(dict.fromkeys(options.port)),
        dtypes=options.dtype,
        stages=options.stage,
        device=options.device,
        precision=options.precision,
        presets=options.preset or (),
        only=options.only,
        weights=options.weights,
        text=options.text or (),
        sentences=options.sentences,
        plans=options.parallel,
        processes=options.processes,
    )


def _print(console: Console, result: Run, profile: bool) -> None:
    """Print tables, what failed and why, what was not compared, and the verdict."""
    findings = result.findings
    print_summary(console, findings, result.ports)
    print_depth(console, findings, result.ports)
    print_near_ties(console, findings)
    print_problems(console, findings, result.verdict)
    for report in result.failure_reports:
        print_failure_report(console, report)
    print_undiagnosed(console, findings, result.failure_reports)
    print_skips(console, findings)
    print_coverage(console, result.verdict, result.not_tested)
    if profile:
        print_profile(console, result.spent, result.cpu_seconds)
    console.print(verdict_line(result.verdict, findings, result.ports, result.seconds, result.spent))


def _interpreters(isolate: Sequence[str], asked: Sequence[str]) -> dict[str, str]:
    """Return the interpreter of each port that has one of its own."""
    found = {}
    for text in isolate:
        name, equals, python = text.rpartition("=")
        if not equals or name not in asked:
            raise ValueError(f"--isolate must be PORT=PYTHON, with one of {', '.join(asked)}: got {text!r}")
        found[name] = python
    return found


def _listen(messages: Iterator[Message], jobs: Sequence[Job], outcome: Outcome) -> None:
    """Collect the messages of all processes, with a progress bar for each, until they are done or interrupted.

    An interruption is a finding too: what was compared until then is kept, and it is no agreement.
    """
    by_name = {job.backend: job for job in jobs}
    done: set[str] = set()
    with Progress(by_name) as progress:
        titles = ", ".join(job.title for job in jobs)
        progress.log(f"comparing {titles} with the reference in {', '.join(jobs[0].setting.dtypes)}")
        try:
            for message in messages:
                job = by_name[message.backend]
                outcome.keep(message, job)
                for finding in message.findings:
                    progress.log(f"{finding.backend}: {finding.component}")
                total = None
                if message.facts is not None:
                    cases = outcome.cases[outcome.name(job)]
                    total = sum(dtype in case.dtypes for case in cases for dtype in job.setting.dtypes)
                doing = "done" if message.done else message.doing
                progress.update(message.backend, doing, advance=bool(message.findings), total=total)
                if message.done:
                    done.add(message.backend)
        except KeyboardInterrupt:
            problem = "interrupted before everything was compared"
            outcome.findings += [failure(outcome.name(job), problem) for job in jobs if job.backend not in done]
