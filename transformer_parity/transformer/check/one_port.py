"""What the process of one port does: run the cases, and replay blocks where something differs.

It compares nothing: outputs go to the parent process, where no port runs, and what differs comes back.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer_parity.engine.findings import Finding, Kept
from transformer_parity.engine.outputs import Outputs
from transformer_parity.engine.processes.messages import Parent
from transformer_parity.engine.tolerances import ALL_DTYPES
from transformer_parity.transformer.cases.case import SENTENCES, Case
from transformer_parity.transformer.cases.for_ports import port_cases, port_config
from transformer_parity.transformer.check.kept_programs import kept_by_tensorflow
from transformer_parity.transformer.diagnose.investigate import FailureReport, Investigation
from transformer_parity.transformer.diagnose.weight_audit import Fate, as_mistake, audit
from transformer_parity.transformer.explore.view import view_of_case
from transformer_parity.transformer.mistakes.mistake import Mistake
from transformer_parity.transformer.ports.compile_clock import COMPILING, Spent, listen_to_jax
from transformer_parity.transformer.ports.exceptions import described
from transformer_parity.transformer.ports.protocol import Placement, Placements
from transformer_parity.transformer.ports.registry import PORTS
from transformer_parity.transformer.ports.user import PluginPort
from transformer_parity.transformer.stages.registry import STAGES
from transformer_parity.transformer.stages.run import run_cases
from transformer_spec.config import TransformerConfig

THRESHOLD = 10_000  # new objects before garbage is looked for, not 700: what is traced stays while it is traced


@dataclass(frozen=True)
class Job:
    """What a process is to run.

    Attributes:
        backend: A name of ``PORTS``, or a port of the user's own: ``module:class``, or the name of an entry point.
        setting: Dtypes, device and precision.
        cases: What to run; None is what ``port_cases`` returns for the port, in its own process.
        stages: Those of a port of the user's own.
        failures: Where to save the inputs of the first wrong block; None saves nothing.
        views: Whether a page is to show what differs.
    """

    backend: str
    setting: Placements
    cases: tuple[Case, ...] | None = None
    stages: Sequence[str] = tuple(STAGES)
    failures: Path | None = None
    views: bool = False

    @property
    def title(self) -> str:
        """What to call a port without a name."""
        return self.backend.rpartition(":")[2]


@dataclass(frozen=True)
class Facts:
    """What a port declares when it is imported: its name, its config if it has its own, and its dtypes."""

    name: str
    config: TransformerConfig | None = None
    dtypes: Sequence[str] = ALL_DTYPES


@dataclass(frozen=True)
class Message:
    """What a process sends: what it does next, and what came of what it did.

    Attributes:
        backend: The port, as it was asked for.
        doing: What it does next.
        facts: Sent once, after the import.
        outputs: Of one case in one dtype.
        ran: Whether all cases have run; the process now waits for the findings.
        problem: Why it could not go on.
        audit: What became of the weights.
        failure_report: Where a difference was introduced, and what explains it.
        environment: Versions and switches, sent at the end.
        spent: Time, likewise.
        done: Whether that was all.
        findings: Of the outputs; the parent process puts them here.
    """

    backend: str
    doing: str = ""
    facts: Facts | None = None
    outputs: Outputs | None = None
    ran: bool = False
    problem: str = ""
    audit: tuple[Fate, ...] = ()
    failure_report: FailureReport | None = None
    environment: dict[str, str] | None = None
    spent: Spent | None = None
    done: bool = False
    findings: tuple[Finding, ...] = ()


class _Process:
    """The work of one process, which sends messages meanwhile."""

    def __init__(self, parent: Parent, job: Job) -> None:
        self.parent = parent
        self.job = job
        self.doing = ""
        self.describe: Callable[[], dict[str, str]] = dict
        self.spent: defaultdict[str, float] = defaultdict(float)  # processor seconds, by what they went into

    def spend(self, what: str) -> None:
        """Count the processor seconds since the last count."""
        self.spent[what] += time.process_time() - sum(self.spent.values())

    def send(self, **what: Any) -> None:
        """Send a message."""
        self.parent.send(Message(self.job.backend, doing=self.doing, **what))

    def report(self, doing: str) -> None:
        """Say what is done next."""
        self.doing = doing
        self.send()

    def run(self) -> None:
        """Run the cases, wait for the findings, and look for the cause of what differs."""
        self.report("importing")
        port, facts = self._import()
        kept = self.job.backend == "tf" and self.job.setting.device == "cpu"
        with kept_by_tensorflow(os.environ) if kept else nullcontext():
            self._run(port, facts)

    def _run(self, port: Any, facts: Facts) -> None:
        self.spend("importing")
        gc.freeze()  # what is imported stays: to look through it again and again takes TensorFlow a fifth of its time
        gc.set_threshold(THRESHOLD)
        self.send(facts=facts)
        cases = cases_of(self.job, facts)
        main = next((case for case in cases if case.is_forward), None)
        suspect = self._audit(port, main) if main is not None and isinstance(port, PluginPort) else None
        setting = self.job.setting
        placements = [setting.placement(dtype) for dtype in setting.dtypes]
        stages = {case.name: SENTENCES if case.component == SENTENCES else case.stage for case in cases}
        for outputs in run_cases(cases, port, placements, self.report):
            self.send(outputs=outputs)
            self.spend(f"{stages[outputs.case]} {outputs.dtype}")
        self.send(ran=True)
        findings, kept = self._receive()
        shown = view_of_case if self.job.views else None
        investigation = Investigation(port, setting, self.job.backend, self.job.failures, self.report, suspect, shown)
        for report in investigation.failures(findings, kept, cases):
            self.send(failure_report=report)

    def _receive(self) -> tuple[Sequence[Finding], Kept]:
        return self.parent.receive()

    def _import(self) -> tuple[Any, Facts]:
        """Import a port; return it, and what it declares."""
        backend, setting = self.job.backend, self.job.setting
        if backend in PORTS:
            port: Any = PORTS[backend]
            package = port.import_package()
            self.describe = package.describe
            for dtype in setting.dtypes:
                package.runtime.check_placement(dtype, setting.device)
            facts = Facts(port.name)
        else:
            port = PluginPort(backend)
            self.describe = port.describe
            facts = Facts(str(port.name), port_config(port), tuple(map(str, port.kind.dtypes)))
        if "jax" in sys.modules:
            listen_to_jax()
        return port, facts

    def _audit(self, port: PluginPort, main: Case) -> Mistake | None:
        """Send what became of the weights, and return the mistake that it looks like."""
        dtypes = (*self.job.setting.dtypes, *port.kind.dtypes)
        dtype = next((dtype for dtype in dtypes if dtype in port.kind.dtypes and dtype in ALL_DTYPES), None)
        if dtype is None:
            return None
        self.report(f"{dtype} {main.name}")
        with suppress(Exception):  # what is wrong shows in the comparison
            fates = audit(port, main, Placement(dtype), self.report)
            self.send(audit=tuple(fates))
            return as_mistake(fates)
        return None


def cases_of(job: Job, facts: Facts) -> list[Case]:
    """Return the cases of a job: the same in both processes."""
    if job.cases is not None:
        return list(job.cases)
    if facts.config is None:
        raise ValueError(f"{job.backend} has no cases, and no config to make them of")
    return port_cases(facts.config, job.stages)


def work(parent: Parent) -> None:
    """Receive a job and do it."""
    started = time.monotonic()
    process = _Process(parent, parent.receive())
    try:
        process.run()
    except SystemExit as error:
        process.send(problem=f"it called sys.exit({error.code!r}) at {process.doing}")
    except Exception as error:
        process.send(problem=f"{described(error)} at {process.doing}")
    process.spend("the rest")
    spent = Spent(time.monotonic() - started, time.process_time(), COMPILING.seconds, dict(process.spent))
    # Plain text: the version of torch is of a class of its own, and the parent process would import torch to read it.
    environment = {name: str(value) for name, value in process.describe().items()}
    process.send(environment=environment, done=True, spent=spent)
