"""The process that runs all cases on one port, and reruns individual blocks if the results are wrong.

This process doesn't compare anything. It sends the port's outputs to the parent process, which compares the outputs
with the reference and sends back the findings. The parent process doesn't run any port.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

from transformer_parity.engine.processes import provenance
from transformer_parity.engine.processes.messages import Broken, Parent
from transformer_parity.engine.system.kept_programs import kept_by_tensorflow
from transformer_parity.engine.tolerances import ALL_DTYPES
from transformer_parity.transformer.bugs.bug import Bug
from transformer_parity.transformer.cases.case import SENTENCES, Case
from transformer_parity.transformer.cases.for_ports import port_config
from transformer_parity.transformer.check.messages import (
    AllCasesCompared,
    AllCasesRan,
    Assignment,
    CaseRan,
    FailureExplained,
    NowDoing,
    PortFinished,
    PortImported,
    PortJob,
    WeightsAudited,
)
from transformer_parity.transformer.compare.runner import run_cases
from transformer_parity.transformer.diagnose.investigate import Investigation
from transformer_parity.transformer.diagnose.weight_audit import as_bug, audit
from transformer_parity.transformer.explore.view import view_of_case
from transformer_parity.transformer.ports.compile_clock import COMPILING, Spent, listen_to_jax
from transformer_parity.transformer.ports.exceptions import described
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.ports.registry import PORTS
from transformer_parity.transformer.ports.user import PluginPort

THRESHOLD = 10_000  # garbage collection threshold; the default is too low because tracing keeps many objects alive


class _PortProcess:
    """Runs one port and reports progress and results to the parent process."""

    def __init__(self, parent: Parent, job: PortJob) -> None:
        self.parent = parent
        self.job = job
        self.doing = ""
        self.describe: Callable[[], dict[str, str]] = dict
        self.spent: defaultdict[str, float] = defaultdict(float)  # maps a task to the CPU time in seconds

    def spend(self, what: str) -> None:
        """Add the CPU time since the previous call to the total of the task ``what``."""
        self.spent[what] += time.process_time() - sum(self.spent.values())

    def report(self, doing: str) -> None:
        """Send a description of the next task to the parent process."""
        self.doing = doing
        self.parent.send(NowDoing(doing))

    def run(self) -> None:
        """Run the cases, wait for the findings, and investigate the failures."""
        self.report("importing")
        port, imported = self._import()
        kept = self.job.backend == "tf" and self.job.setting.device == "cpu"
        with kept_by_tensorflow(os.environ) if kept else nullcontext():
            self.spend("importing")
            # Exclude imported objects from garbage collection, which reduces TensorFlow's running time by 20%.
            gc.freeze()
            gc.set_threshold(THRESHOLD)
            self.parent.send(imported)
            assignment: Assignment = self.parent.receive()
            if isinstance(port, PluginPort):
                port.name = assignment.label  # use the findings' name for the port in reports, too
            self._run(port, assignment.cases)

    def _run(self, port: Any, cases: Sequence[Case]) -> None:
        main = next((case for case in cases if case.is_forward), None)
        suspect = self._audit(port, main) if main is not None and isinstance(port, PluginPort) else None
        setting = self.job.setting
        offered = PORTS[self.job.backend].import_package().runtime.DTYPES if self.job.backend in PORTS else ALL_DTYPES
        placements = [setting.placement(dtype) for dtype in setting.dtypes if dtype in offered]
        stages = {case.name: SENTENCES if case.component == SENTENCES else case.stage for case in cases}
        for outputs in run_cases(cases, port, placements, self.report):
            self.parent.send(CaseRan(outputs))
            self.spend(f"{stages[outputs.case]} {outputs.dtype}")
        self.parent.send(AllCasesRan())
        compared: AllCasesCompared = self.parent.receive()
        shown = view_of_case if self.job.views else None
        investigation = Investigation(port, setting, self.job.backend, self.job.failures, self.report, suspect, shown)
        for report in investigation.failures(compared.findings, compared.kept, cases):
            self.parent.send(FailureExplained(report))

    def _import(self) -> tuple[Any, PortImported]:
        """Import a port and return it with the name, dtypes, and config that it declares."""
        backend, setting = self.job.backend, self.job.setting
        if backend in PORTS:
            port: Any = PORTS[backend]
            provenance.import_packages()
            package = port.import_package()
            self.describe = lambda: {**package.describe(), **provenance.files_elsewhere()}
            if why := provenance.other_reference([os.getcwd()]):
                raise ValueError(why)
            offered = tuple(dtype for dtype in ALL_DTYPES if dtype in package.runtime.DTYPES)
            for dtype in offered:
                package.runtime.check_placement(dtype, setting.device)
            imported = PortImported(port.name, dtypes=offered)
        else:
            port = PluginPort(backend)
            self.describe = port.describe
            imported = PortImported(str(port.name), port_config(port), tuple(map(str, port.kind.dtypes)))
        if "jax" in sys.modules:
            listen_to_jax()
        return port, imported

    def _audit(self, port: PluginPort, main: Case) -> Bug | None:
        """Audit the weights, send the result, and return the bug that the result indicates, if any."""
        dtypes = (*self.job.setting.dtypes, *port.kind.dtypes)
        dtype = next((dtype for dtype in dtypes if dtype in port.kind.dtypes and dtype in ALL_DTYPES), None)
        if dtype is None:
            return None
        self.report(f"{dtype} {main.name}")
        with suppress(Exception):  # the comparison reports any error
            fates = audit(port, main, Placement(dtype), self.report)
            self.parent.send(WeightsAudited(tuple(fates)))
            return as_bug(fates)
        return None


def work(parent: Parent) -> None:
    """Receive a job and run it."""
    started = time.monotonic()
    process = _PortProcess(parent, parent.receive())
    try:
        process.run()
    except SystemExit as error:
        parent.send(Broken(f"the port called sys.exit({error.code!r}) at {process.doing}"))
    except Exception as error:
        parent.send(Broken(f"{described(error)} at {process.doing}"))
    process.spend("the rest")
    spent = Spent(time.monotonic() - started, time.process_time(), COMPILING.seconds, dict(process.spent))
    # Convert to str. torch.__version__ is an instance of a torch class, and unpickling it would import torch.
    environment = {name: str(value) for name, value in process.describe().items()}
    parent.send(PortFinished(environment, spent))
