"""``parity check``: compare ports with the reference at every tap."""

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
  parity check --port my_package.my_module:MyPort    check your port (`parity init-port` writes a template)
  parity check --port mine:Port --html report.html   also write an HTML report
  parity check                                       check all packages on all cases and the included sentences
  parity check --backends torch,jax --dtype float64  check only the math of two packages
  parity check --preset marian,fairseq               check only the conventions of Marian and fairseq
  parity check --text train.en.gz train.de.gz        use your own sentences
  parity check --weights model.safetensors           use your own weights
  parity check --device gpu --precision fast         measure how much precision TF32 loses
  pytest --parity-port mine:Port --junitxml x.xml    run the same comparisons as tests, for a CI server

The file written by --json also includes each port's CPU time, broken down by activity.

exit code: 0 all results agree, 1 the math differs, 2 only precision was lost, 3 not everything was compared
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command and its options to the parser."""
    parser = commands.add_parser(
        "check",
        help="compare ports with the reference at every intermediate value",
        description="Run ports on the same weights and inputs as the NumPy reference, and compare every intermediate "
        "value, gradient, optimizer step, and decoded token. The cases cover single components, the encoder and "
        "decoder stacks, the full model, edge cases, all presets, and a base-sized model on real sentences. If a "
        "port differs from the reference, the report shows the first wrong block and, if possible, identifies the bug.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_backends(parser, None, "all four, or none if --port is given")
    add_ports(parser)
    add_processes(parser)
    parser.add_argument(
        "--dtype",
        action=one_or_more(EPS),
        metavar=",".join(EPS),
        help="compare in these dtypes; float64 reveals different math, and float32 reveals lost precision "
        "(default: all)",
    )
    add_machine(parser)
    parser.add_argument(
        "--preset",
        action=one_or_more(PRESETS),
        metavar="NAME[,NAME]",
        help="compare only these presets; `parity info` lists all presets (default: all)",
    )
    parser.add_argument(
        "--stage",
        action=one_or_more(STAGES),
        metavar=",".join(STAGES),
        help="run only these stages (default: all): activations (compares every intermediate value), gradients "
        "(every gradient), steps (weights and moments after 1, 5, and 20 optimizer steps), decode (tokens and scores "
        "of greedy and beam search)",
    )
    parser.add_argument(
        "--weights",
        type=Path,
        metavar="FILE",
        help="run only the sentence cases, using these weights and subwords learned from the sentences",
    )
    parser.add_argument(
        "--text",
        type=Path,
        nargs=2,
        metavar=("SOURCE", "TARGET"),
        help="use your own sentences: two line-aligned text files, plain or gzipped (default: included sentences)",
    )
    parser.add_argument(
        "--sentences",
        type=int,
        default=16,
        metavar="N",
        help="run the sentence cases on N sentence pairs; 0 skips the sentence cases (default: 16)",
    )
    add_outputs(parser)
    parser.add_argument(
        "--failures",
        type=Path,
        default=Path("parity-failures"),
        metavar="DIR",
        help="save the inputs of the first wrong block to this directory (default: parity-failures)",
    )
    parser.set_defaults(run=run)


def add_processes(parser: argparse.ArgumentParser) -> None:
    """Add the options that control the processes in which ports run."""
    parser.add_argument(
        "--isolate",
        action="append",
        default=[],
        metavar="PORT=PYTHON",
        help="run this port with a different Python interpreter, such as ../other/.venv/bin/python; can be repeated",
    )
    parser.add_argument(
        "--timeout",
        type=positive,
        default=int(SILENCE),
        metavar="SECONDS",
        help="stop a port if it reports no progress for this long, not including time spent waiting for a CPU core "
        "(default: %(default)s)",
    )


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Add the options for writing the result to files."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write the result as an HTML page")


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
    """Write the result to the files that ``--json`` and ``--html`` specify."""
    if options.json or options.html:
        # Imported here because the import is slow and only needed if a file is requested.
        from transformer_parity.transformer.report.html import write_html

        files = ((options.json, write_json), (options.html, write_html))
        write_results(build(result), *files)


def _selection(options: argparse.Namespace) -> Selection:
    backends = list(PORTS) * (not options.port) if options.backends is None else options.backends
    if options.backends is None and (options.device == "gpu" or "bfloat16" in (options.dtype or ())):
        backends = [name for name in backends if name != "numpy"]  # NumPy supports neither a GPU nor bfloat16
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
    """Print the tables, the failures and their diagnoses, the missing comparisons, and the verdict."""
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
    """Return a dict from ports to the interpreters that ``--isolate`` specifies for them.

    Args:
        isolate: The values of ``--isolate``.
        asked: The ports and backends to check.

    Raises:
        ValueError: If a value isn't of the form ``PORT=PYTHON``, or if its port isn't in ``asked``.
    """
    found = {}
    for text in isolate:
        name, equals, python = text.rpartition("=")
        if not equals or name not in asked:
            raise ValueError(f"--isolate must be PORT=PYTHON, with PORT one of {', '.join(asked)}: got {text!r}")
        found[name] = python
    return found


def watch(messages: Iterator[tuple[CheckedPort, Any]], ports: Sequence[CheckedPort]) -> None:
    """Show a progress bar for each port until all ports finish or the user interrupts the run.

    After an interruption, the completed comparisons are kept. For each port that did not finish, a finding reports the
    interruption, so that the verdict cannot be ``AGREE``.
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
