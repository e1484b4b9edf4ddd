"""``parity check``: whether the ports agree with the reference, tap by tap."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

import reference_numpy as ref
from transformer_parity.cli.options import (
    add_backends,
    add_machine,
    add_ports,
    check_installed,
    one_or_more,
    positive,
)
from transformer_parity.cli.progress import Progress, make_console
from transformer_parity.engine.report.tables import (
    print_coverage,
    print_near_ties,
    print_problems,
    print_skips,
    print_summary,
    verdict_line,
)
from transformer_parity.engine.system.errors import refusals
from transformer_parity.engine.system.files import check_writable, write_json, write_results
from transformer_parity.engine.system.machine import describe_machine
from transformer_parity.engine.tolerances import EPS
from transformer_parity.transformer.check.checked_port import CheckedPort
from transformer_parity.transformer.check.known_numbers import check_reference
from transformer_parity.transformer.check.messages import CaseCompared, PortImported, PortJob
from transformer_parity.transformer.check.processes import SILENCE, run_all
from transformer_parity.transformer.check.selection import Selection
from transformer_parity.transformer.ports.registry import PORTS
from transformer_parity.transformer.report.diagnoses import (
    print_audit,
    print_failure_report,
    print_files_elsewhere,
    print_undiagnosed,
)
from transformer_parity.transformer.report.result import CheckResult, build
from transformer_parity.transformer.report.tables import TITLES, print_depth
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
  parity check --port mine:Port --html report.html   and a page for a browser
  pytest --parity-port mine:Port --junitxml x.xml    the same comparisons as tests, with a report for a CI server

--json FILE also has the processor time of each port by what it went into.

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
    add_processes(parser)
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
        action=one_or_more(STAGES),
        metavar=",".join(STAGES),
        help="what to compare: every intermediate value; every gradient; weights and moments after 1, 5 and 20 steps; "
        "tokens and scores of greedy and beam search (default: all)",
    )
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
    parser.add_argument(
        "--sentences",
        type=int,
        default=16,
        metavar="N",
        help="sentence pairs to run (default: 16); 0 compares the small cases only",
    )
    add_outputs(parser)
    parser.add_argument(
        "--failures",
        type=Path,
        default=Path("parity-failures"),
        metavar="DIR",
        help="where the inputs of the first wrong block are saved (default: parity-failures)",
    )
    parser.set_defaults(run=run)


def add_processes(parser: argparse.ArgumentParser) -> None:
    """Add the options about the processes that run the ports."""
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


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Add the options that write the result to files."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write it as one page for a browser")


def run(options: argparse.Namespace) -> int:
    """Run the comparison and return the exit code."""
    console = make_console()
    check_writable(options.json, options.html)
    check_reference()
    with refusals(OSError, ValueError):
        selection = _selection(options)
        check_installed(selection.backends)
        with console.status("learning subwords from the text"):
            cases = selection.cases()
        chosen = interpreters(options.isolate, [*selection.ports, *selection.backends])

    started = time.monotonic()
    common = {"failures": options.failures.absolute(), "views": options.html is not None}
    ports = [CheckedPort(PortJob(name, selection.setting, **common), cases) for name in selection.backends]
    ports += [
        CheckedPort(PortJob(name, selection.setting, **common), stages=selection.chosen_stages)
        for name in selection.ports
    ]
    watch(run_all(ports, interpreters=chosen, timeout=options.timeout), ports)
    result = CheckResult(
        setting=selection.setting,
        ports=ports,
        asked=[selection.asked(port.label, port.cases, port.dtypes) for port in ports],
        reference=ref.describe(),
        machine=describe_machine(),
        cases=cases,
        weights=selection.weights,
        text=selection.text,
        not_tested=selection.not_tested({case.name: case for port in ports for case in port.cases}.values()),
        seconds=time.monotonic() - started,
        cpu_seconds=time.process_time(),
    )
    for port in ports:
        if port.audit:
            print_audit(console, port.label, port.audit)
    print_result(console, result)
    write(result, options)
    return result.verdict.exit_code


def write(result: CheckResult, options: argparse.Namespace) -> None:
    """Write the result to the files that the options name."""
    if options.json or options.html:
        # A check without a page does not wait for this import.
        from transformer_parity.transformer.report.html import write_html

        files = ((options.json, write_json), (options.html, write_html))
        write_results(build(result), *files)


def _selection(options: argparse.Namespace) -> Selection:
    backends = list(PORTS) * (not options.port) if options.backends is None else options.backends
    if options.backends is None and (options.device == "gpu" or "bfloat16" in (options.dtype or ())):
        backends = [name for name in backends if name != "numpy"]  # which has neither
    return Selection(
        backends=tuple(backends),
        ports=tuple(dict.fromkeys(options.port)),
        dtypes=options.dtype,
        stages=options.stage,
        device=options.device,
        precision=options.precision,
        presets=options.preset or (),
        weights=options.weights,
        text=options.text or (),
        sentences=options.sentences,
    )


def print_result(console: Console, result: CheckResult) -> None:
    """Print tables, what failed and why, what was not compared, and the verdict."""
    findings = result.findings
    print_summary(console, findings, result.names, TITLES)
    print_depth(console, findings, result.names)
    print_near_ties(console, findings)
    print_problems(console, findings, result.verdict)
    for report in result.failure_reports:
        print_failure_report(console, report)
    print_undiagnosed(console, findings, result.failure_reports)
    print_skips(console, findings)
    print_coverage(console, result.verdict, result.not_tested)
    for backend, environment in result.environment.items():
        print_files_elsewhere(console, backend, environment)
    console.print(verdict_line(result.verdict, findings, result.names, result.seconds, result.spent))


def interpreters(isolate: Sequence[str], asked: Sequence[str]) -> dict[str, str]:
    """Return the interpreter of each port that has one of its own."""
    found = {}
    for text in isolate:
        name, equals, python = text.rpartition("=")
        if not equals or name not in asked:
            raise ValueError(f"--isolate must be PORT=PYTHON, with one of {', '.join(asked)}: got {text!r}")
        found[name] = python
    return found


def watch(messages: Iterator[tuple[CheckedPort, Any]], ports: Sequence[CheckedPort]) -> None:
    """Show the progress of all ports, with a bar for each, until they are done or interrupted.

    An interruption is a finding too: what was compared until then is kept, and it is no agreement.
    """
    with Progress(port.job.backend for port in ports) as progress:
        titles = ", ".join(port.job.title for port in ports)
        progress.log(f"comparing {titles} with the reference in {', '.join(ports[0].job.setting.dtypes)}")
        try:
            for port, message in messages:
                total, compared = None, isinstance(message, CaseCompared)
                if isinstance(message, CaseCompared):
                    for finding in message.findings:
                        progress.log(f"{finding.backend}: {finding.component}")
                elif isinstance(message, PortImported):
                    total = sum(dtype in case.dtypes for case in port.cases for dtype in port.job.setting.dtypes)
                doing = "done" if port.is_done else port.doing
                progress.update(port.job.backend, doing, advance=compared, total=total)
        except KeyboardInterrupt:
            for port in ports:
                if not port.is_done:
                    port.fail("interrupted before everything was compared")
