"""One process per port: they do not disturb one another, and a crash of one is a finding about that one.

A process may be run by another interpreter, in an environment that has what the port needs: Python 3.11 or later, NumPy
2, ml-dtypes and safetensors, beside the port and its framework. This package need not be installed there.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformer_parity.engine.findings import Kept
from transformer_parity.engine.processes.child import PATIENCE, Child, ChildEndedError, StartError
from transformer_parity.engine.processes.children import THREAD_SWITCHES, Children
from transformer_parity.engine.processes.messages import Broken
from transformer_parity.engine.system.machine import processors
from transformer_parity.transformer.cases.for_ports import port_cases
from transformer_parity.transformer.check.checked_port import CheckedPort, free_label, give_labels
from transformer_parity.transformer.check.kept_programs import keep_programs
from transformer_parity.transformer.check.messages import (
    AllCasesCompared,
    AllCasesRan,
    Assignment,
    CaseCompared,
    CaseRan,
    PortImported,
    PortJob,
)
from transformer_parity.transformer.compare.comparator import Comparator
from transformer_parity.transformer.compare.reference import Reference
from transformer_parity.transformer.ports.protocol import Placements

WORK = "transformer_parity.transformer.check.one_port:work"  # what a process runs
SLOWEST_FIRST = ("jax", "tf", "torch", "numpy")  # to compile, on all cases
SILENCE = 600.0  # seconds, of a process' own, without a message, after which it is ended

# Of glibc, which by default gives memory back to Linux and asks for it again: an eighth of JAX's time for compiling.
# As ``system.environment.keep_freed_memory``, of processes that are yet to start.
MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**34)}


def run_all(
    ports: Sequence[CheckedPort], *, interpreters: Mapping[str, str] | None = None, timeout: float | None = SILENCE
) -> Iterator[tuple[CheckedPort, Any]]:
    """Compare all ports, as many at a time as processors are allowed, and yield each message with its port.

    This process compares the outputs, because no port runs in it: it yields a ``CaseCompared`` for every ``CaseRan``.
    Each port keeps the content of its messages. Closing the iterator ends the processes.

    Args:
        ports: The ports to compare.
        interpreters: The Python interpreters of ports that use a different one.
        timeout: Seconds of silence, without waits for a processor, after which a process is stopped; None for no limit.
    """
    cores = processors()
    at_once = max(1, min(len(ports), cores))
    threads = dict.fromkeys(THREAD_SWITCHES, str(max(1, cores // at_once)))
    waiting = sorted(ports, key=lambda port: _when(port.job))
    running: dict[Child, _Comparing] = {}
    reference = Reference(ports=sum(port.given is not None for port in ports) or 1)
    give_labels(ports)
    # Read by the frameworks when a process imports them.
    # The threads of small models mostly wait for one another: asleep, not by counting, which takes a processor each.
    defaults = {**threads, "OMP_WAIT_POLICY": "passive", **MEMORY, **keep_programs(os.environ)}
    with Children({**defaults, **os.environ}) as children:

        def begin() -> Iterator[tuple[CheckedPort, CaseCompared]]:
            """Start as many processes as there is room for, and yield what cannot be started."""
            while waiting and len(running) < at_once:
                port = waiting.pop(0)
                try:
                    child = children.start(WORK, (interpreters or {}).get(port.job.backend, sys.executable))
                except StartError as error:
                    port.is_done = True
                    yield port, port.fail(str(error))
                else:
                    child.send(port.job)
                    running[child] = _Comparing(port, child, ports, reference)

        yield from begin()
        for child, message in children.listen(running, patience=math.inf if timeout is None else timeout):
            port = running[child].port
            yield port, running[child].received(message)
            if port.is_done:
                del running[child]
                children.stop(child, PATIENCE)  # a framework may hang at exit
                yield from begin()


def _when(job: PortJob) -> int:
    return SLOWEST_FIRST.index(job.backend) if job.backend in SLOWEST_FIRST else -1


class _Comparing:
    """The parent's side of one process: it assigns the cases and compares the outputs."""

    def __init__(self, port: CheckedPort, child: Child, ports: Sequence[CheckedPort], reference: Reference) -> None:
        self.port, self.child, self.ports, self.reference = port, child, ports, reference
        self.kept: Kept = {}

    def received(self, message: Any) -> Any:
        """Answer a message, and return it as the caller of ``run_all`` gets it."""
        port = self.port
        match message:
            case ChildEndedError():
                port.is_done = True
                return port.fail(f"{message.how} at {port.doing}: {message.last_line}")
            case Broken():
                return port.fail(message.why)
            case PortImported():
                self._assign(message)
            case CaseRan(outputs=outputs):
                message = CaseCompared([*self.comparator.compare(self.cases[outputs.case], outputs, self.kept)])
            case AllCasesRan():
                self.child.send(AllCasesCompared(port.findings, self.kept))
        port.keep(message)
        return message

    def _assign(self, imported: PortImported) -> None:
        """Decide what the port is called and run on, before it runs anything."""
        port = self.port
        port.label = free_label(port, imported.name, self.ports)
        port.dtypes = imported.dtypes
        if port.given is not None:
            port.cases = port.given
        elif imported.config is not None:
            port.cases = port_cases(imported.config, port.stages)
        else:
            raise ValueError(f"{port.job.backend} has no cases, and no config to make them of")
        self.cases = {case.name: case for case in port.cases}
        # A user's port is not told a precision, and is allowed none but the highest.
        setting = port.job.setting if imported.config is None else Placements(port.job.setting.dtypes)
        self.comparator = Comparator(port.label, setting, self.reference)
        self.child.send(Assignment(port.label, port.cases))
