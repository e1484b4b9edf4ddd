"""``parity check-distributed``: compare training on multiple devices with training on one device."""

from __future__ import annotations

import argparse
import time

import reference_numpy as ref
from transformer_parity.cli.check import add_outputs, add_processes, interpreters, print_result, watch, write
from transformer_parity.cli.options import (
    add_backends,
    add_ports,
    check_installed,
    one_or_more,
    parallel_plan,
    positive,
)
from transformer_parity.cli.progress import make_console
from transformer_parity.engine.system.errors import UsageError, refusals
from transformer_parity.engine.system.files import check_writable
from transformer_parity.engine.system.machine import describe_machine
from transformer_parity.transformer.check.known_numbers import check_reference
from transformer_parity.transformer.distributed.check import DTYPES, DistributedCheck
from transformer_parity.transformer.ports.registry import PORTS
from transformer_parity.transformer.report.result import CheckResult

DESCRIPTION = (
    "Train small models on multiple devices of this machine, and compare every gradient, weight, and optimizer moment "
    "with training on one device. Each run also resumes from a checkpoint saved under the previous plan or by the "
    "previous framework."
)
EXAMPLES = """
examples:
  parity check-distributed                                        check every framework on two devices
  parity check-distributed --backends torch --parallel data=4     check a specific parallelism plan
  parity check-distributed --backends jax --parallel data=2 --processes 2
  parity check-distributed --port my_package.my_module:MyPort     check your trainer in two processes

exit code: 0 all results agree, 1 the math differs, 2 only precision was lost, 3 not everything was compared
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command and its options to the parser."""
    parser = commands.add_parser(
        "check-distributed",
        help="compare training on multiple devices with training on one",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_backends(parser, None, "all except numpy, or none if --port is given")
    add_ports(parser)
    add_processes(parser)
    parser.add_argument(
        "--dtype", action=one_or_more(DTYPES), metavar=",".join(DTYPES), help="train in these dtypes (default: all)"
    )
    parser.add_argument(
        "--parallel",
        type=parallel_plan,
        action="append",
        default=[],
        metavar="PLAN",
        help="check this parallelism plan, such as data=2 or fsdp=2,tensor=2; can be repeated (default: check three "
        "separate plans, data=2, fsdp=2, and tensor=2, but only data=2 for tf and for --port)",
    )
    parser.add_argument(
        "--processes",
        type=positive,
        metavar="N",
        help="divide each plan's devices among N processes (default: one process per device for torch, otherwise "
        "one process)",
    )
    add_outputs(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the comparison and return the exit code."""
    console = make_console()
    check_writable(options.json, options.html)
    check_reference()
    backends = list(PORTS) * (not options.port) if options.backends is None else options.backends
    with refusals(OSError, ValueError):
        check = DistributedCheck(
            backends=[name for name in backends if name != "numpy"],
            ports=list(dict.fromkeys(options.port)),
            asked=options.parallel,
            processes=options.processes,
            dtypes=options.dtype,
        )
        if not check.named:
            raise UsageError(
                "specify at least one backend or port to compare with the NumPy reference (--backends torch "
                "or --port MODULE:CLASS)"
            )
        check_installed(check.backends)
        chosen = interpreters(options.isolate, check.named)
    started = time.monotonic()
    ports = check.checked_ports()
    watch(check.run(ports, interpreters=chosen, timeout=options.timeout), ports)
    result = CheckResult(
        command="check-distributed",
        setting=check.setting,
        ports=ports,
        asked=[check.asked_of(port) for port in ports],
        reference=ref.describe(),
        machine=describe_machine(),
        cases=list({case.name: case for port in ports for case in port.cases}.values()),
        not_tested=check.not_tested(),
        seconds=time.monotonic() - started,
        cpu_seconds=time.process_time(),
    )
    print_result(console, result)
    write(result, options)
    return result.verdict.exit_code
