"""What the process of one port does: audit, compare, investigate."""

from __future__ import annotations

import os
import pickle
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
from transformer_parity.diagnose.investigate import FailureReport, Investigation
from transformer_parity.diagnose.weight_audit import Fate, as_mistake, audit
from transformer_parity.ports.compile_clock import COMPILING, Spent, listen_to_jax
from transformer_parity.ports.protocol import Placement
from transformer_parity.ports.registry import PORTS
from transformer_parity.ports.user import PluginPort

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
    backend: str
    cases: Cases
    setting: Setting
    failures: Path | None
    attention: bool


def title(backend: str) -> str:
    """Return what to call a port that could not be asked for its name."""
    return backend.rpartition(":")[2]


def work() -> None:
    """Do the job that comes through standard input, and speak through what was standard output."""
    started = time.monotonic()
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the port prints goes where its errors go
    job: Job = pickle.load(sys.stdin.buffer)
    made: list[Finding] = []
    name, doing = title(job.backend), "importing"
    describe: Callable[[], dict[str, str]] = dict

    def tell(**what: Any) -> None:
        pickle.dump(Message(job.backend, tuple(made), **what), pipe)
        pipe.flush()
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
        investigation = Investigation(port, job.setting, job.backend, job.failures, report, suspect)
        for failure_report in investigation.failures(found, kept, cases):
            tell(doing=doing, failure_report=failure_report)
        if job.attention and main is not None and all(f.verdict in (AGREES, SKIPPED) for f in found):
            tell(doing=doing, failure_report=investigation.attention(main))
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
