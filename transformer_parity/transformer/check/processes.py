"""Run each port in a separate process, so that ports don't affect each other and a crash is reported as a finding.

A process may use a Python interpreter from a different environment. That environment must include Python 3.11 or later,
NumPy 2, ml-dtypes, and safetensors, as well as the port and its framework. This package doesn't need to be installed in
that environment.
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
from transformer_parity.engine.system.kept_programs import keep_programs
from transformer_parity.engine.system.machine import processors
from transformer_parity.transformer.cases.for_ports import port_cases
from transformer_parity.transformer.check.checked_port import CheckedPort, free_label, give_labels
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

WORK = "transformer_parity.transformer.check.one_port:work"  # entry point of a process
SLOWEST_FIRST = ("jax", "tf", "torch", "numpy")  # backends, sorted by the time for compiling and running all cases
SILENCE = 600.0  # stop a process that runs for this many seconds without sending a message

# glibc settings for new processes. ``system.environment.keep_freed_memory`` has the same effect in the current process.
# By default, glibc returns freed memory to Linux and soon requests it again, which takes 12% of JAX's compile time.
MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**34)}


def run_all(
    ports: Sequence[CheckedPort], *, interpreters: Mapping[str, str] | None = None, timeout: float | None = SILENCE
) -> Iterator[tuple[CheckedPort, Any]]:
    """Compare all ports. Yield pairs of a port and a message about this port.

    At most one port per available processor runs at the same time. The current process compares the outputs and doesn't
    run any port. For every ``CaseRan`` that it receives, it yields a ``CaseCompared`` instead. Each ``CheckedPort``
    stores the content of the messages about it. Closing the iterator stops the processes.

    Args:
        ports: Ports to compare.
        interpreters: Dict from names of ports to the paths of their Python interpreters. All other ports use the
            current interpreter.
        timeout: Number of seconds without a message after which a process is stopped. Time during which the process
            waits for a processor is not included. None disables the limit.
    """
    cores = processors()
    at_once = max(1, min(len(ports), cores))
    threads = dict.fromkeys(THREAD_SWITCHES, str(max(1, cores // at_once)))
    waiting = sorted(ports, key=lambda port: _when(port.job))
    running: dict[Child, _Comparing] = {}
    reference = Reference(ports=sum(port.given is not None for port in ports) or 1)
    give_labels(ports)
    # The frameworks read these variables when a process imports them. With small models, threads mostly wait for each
    # other. With the passive policy, waiting threads sleep, whereas busy waiting would occupy one processor per thread.
    defaults = {**threads, "OMP_WAIT_POLICY": "passive", **MEMORY, **keep_programs(os.environ)}
    with Children({**defaults, **os.environ}) as children:

        def begin() -> Iterator[tuple[CheckedPort, CaseCompared]]:
            """Start processes up to the limit, and yield the ports whose processes can't be started."""
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
                children.stop(child, PATIENCE)  # stop the process, because some frameworks hang at exit
                yield from begin()


def _when(job: PortJob) -> int:
    return SLOWEST_FIRST.index(job.backend) if job.backend in SLOWEST_FIRST else -1


class _Comparing:
    """Handles the messages from one port's process: assigns the cases and compares the outputs."""

    def __init__(self, port: CheckedPort, child: Child, ports: Sequence[CheckedPort], reference: Reference) -> None:
        self.port, self.child, self.ports, self.reference = port, child, ports, reference
        self.kept: Kept = {}

    def received(self, message: Any) -> Any:
        """Reply to a message, and return the message that ``run_all`` yields for it."""
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
        """Choose the label and the cases of the port, and send both to the port's process."""
        port = self.port
        port.label = free_label(port, imported.name, self.ports)
        port.dtypes = imported.dtypes
        if port.given is not None:
            port.cases = port.given
        elif imported.config is not None:
            port.cases = port_cases(imported.config, port.stages)
        else:
            raise ValueError(f"{port.job.backend} must have cases or a config from which to create them: got neither")
        self.cases = {case.name: case for case in port.cases}
        # User ports don't receive a precision setting, so the tolerances of the highest precision apply to them.
        setting = port.job.setting if imported.config is None else Placements(port.job.setting.dtypes)
        self.comparator = Comparator(port.label, setting, self.reference)
        self.child.send(Assignment(port.label, port.cases))
