"""What the process of one port does: audit, compare, investigate."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer_parity.cases.case import ACTIVATIONS, Case
from transformer_parity.compare.comparator import compare
from transformer_parity.compare.exceptions import described
from transformer_parity.compare.findings import Finding, Kept, Setting, failure
from transformer_parity.compare.verdict import AGREES, SKIPPED
from transformer_parity.diagnose.investigate import FailureReport, investigate, look
from transformer_parity.diagnose.weight_audit import Fate, as_mistake, audit
from transformer_parity.ports.compile_clock import COMPILING, Spent, listen_to_jax
from transformer_parity.ports.protocol import Placement
from transformer_parity.ports.registry import PORTS
from transformer_parity.ports.user import PluginPort
from transformer_parity.system.messages import Parent

Cases = Sequence[Case] | Callable[[Any], Sequence[Case]]  # or what returns them for a port, in the port's process


@dataclass(frozen=True)
class Message:
    """What a worker says: findings made, and what it does next."""

    backend: str  # as it was asked for
    findings: tuple[Finding, ...] = ()
    doing: str = ""
    environment: dict[str, str] | None = None
    done: bool = False
    audit: tuple[Fate, ...] = ()
    failure_report: FailureReport | None = None
    name: str = ""  # by which findings call it: said once, when it is imported
    steps: int = 0  # how many cases times dtypes there are: likewise
    spent: Spent | None = None  # said at the end


@dataclass(frozen=True)
class Job:
    """What a process is to compare.

    Attributes:
        backend: A name of ``PORTS``, or a plug-in port: ``module:class``, or the name of an entry point.
        cases: What to compare. A function, such as ``port_cases``, is called with the port in its process, where alone
            its conventions are known; it has to be picklable.
        setting: Dtypes, device and precision.
        failures: Where to save what a guilty block was given; None saves nothing.
        attention: Whether the attention of a port that agrees is wanted too.
    """

    backend: str
    cases: Cases
    setting: Setting
    failures: Path | None = None
    attention: bool = False


def title(backend: str) -> str:
    """Return what to call a port that could not be asked for its name."""
    return backend.rpartition(":")[2]


def work(parent: Parent) -> None:
    """Receive a job, do it, and send messages meanwhile."""
    started = time.monotonic()
    job: Job = parent.receive()
    made: list[Finding] = []
    name, doing = title(job.backend), "importing"
    describe: Callable[[], dict[str, str]] = dict

    def tell(**what: Any) -> None:
        parent.send(Message(job.backend, tuple(made), **what))
        made.clear()

    def report(what: str) -> None:
        nonlocal doing
        doing = what
        tell(doing=what)

    try:
        report(doing)
        port, describe = _import(job.backend)
        name = port.name
        if job.backend in PORTS:
            for dtype in job.setting.dtypes:
                port.import_package().runtime.check_placement(dtype, job.setting.device)
        cases = job.cases(port) if callable(job.cases) else job.cases
        steps = sum(len([dtype for dtype in job.setting.dtypes if dtype in case.dtypes]) for case in cases)
        tell(doing=doing, name=name, steps=steps)
        suspect = None
        main = next((case for case in cases if case.stage == ACTIVATIONS and not case.block), None)
        if main is not None and isinstance(port, PluginPort):
            dtype = next(dtype for dtype in (*job.setting.dtypes, *port.kind.dtypes) if dtype in port.kind.dtypes)
            report(f"{dtype} {main.name}")
            with suppress(Exception):  # what is wrong will show in the comparison, and be told there
                fates = audit(port, main, Placement(dtype), report)
                suspect = as_mistake(fates)
                tell(doing=doing, audit=tuple(fates))
        found: list[Finding] = []
        kept: Kept = {}
        for finding in compare(cases, port, job.setting, report, kept):
            made.append(finding)
            found.append(finding)
        for failure_report in investigate(
            found, kept, cases, port, job.setting, job.backend, job.failures, report, suspect
        ):
            tell(doing=doing, failure_report=failure_report)
        if job.attention and main is not None and all(f.verdict in (AGREES, SKIPPED) for f in found):
            tell(doing=doing, failure_report=look(main, port, job.setting))
    except SystemExit as error:
        made.append(failure(name, f"it called sys.exit({error.code!r}) at {doing}"))
    except Exception as error:
        made.append(failure(name, f"{described(error)} at {doing}"))
    spent = Spent(time.monotonic() - started, time.process_time(), COMPILING.seconds)
    tell(environment=describe(), done=True, spent=spent)


def _import(backend: str) -> tuple[Any, Callable[[], dict[str, str]]]:
    """Return a port, and what describes its environment."""
    port = PORTS[backend] if backend in PORTS else PluginPort(backend)
    describe = port.describe if isinstance(port, PluginPort) else port.import_package().describe
    if "jax" in sys.modules:
        listen_to_jax()
    return port, describe
