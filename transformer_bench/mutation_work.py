"""The process that runs mutants of one package, one after another, on the cases for ports and the standard cases.

For each mutant, the process runs only the cases that execute a modified line, and stops at the first difference.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from transformer_bench.mutants import ROOT, Mutant
from transformer_parity.engine.findings import AGREES, FAILED, SKIPPED, Finding
from transformer_parity.engine.processes.messages import Parent
from transformer_parity.engine.tolerances import ALL_DTYPES
from transformer_parity.plugin import Port
from transformer_parity.transformer.bugs.edited_package import edited_package
from transformer_parity.transformer.cases.case import ACTIVATIONS, DECODE, GRADIENTS, STEPS, Case
from transformer_parity.transformer.cases.for_ports import port_cases, port_config
from transformer_parity.transformer.cases.standard import standard_cases
from transformer_parity.transformer.compare.comparator import Comparator
from transformer_parity.transformer.compare.reference import Reference
from transformer_parity.transformer.compare.runner import run_cases
from transformer_parity.transformer.ports.package import PackagePort
from transformer_parity.transformer.ports.protocol import Placement, Placements
from transformer_parity.transformer.ports.registry import PORTS
from transformer_parity.transformer.ports.user import PluginPort
from transformer_parity.transformer.selftest.uncompiled import interpreted
from transformer_spec.config import TransformerConfig
from transformer_spec.search import Search
from transformer_spec.taps import Tap, no_tap
from transformer_spec.training_config import Gradients, TrainingConfig

# Ports that together cover every value of every convention.
CONVENTIONS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("paper_base", {"embedding_norm": True}),
    ("annotated", {"activation": "gelu_tanh", "tie_embeddings": "target_output", "skip_first_self_attention": True}),
    ("marian", {"feed_forward_bias": False}),
    ("bart", {"norm_order": "pre"}),
    ("fairseq", {"decoder_num_heads": 2, "decoder_d_k": 12, "decoder_d_v": 15, "decoder_d_ff": 56}),
)
# Backends that run slowly, one operation at a time. They are tested with only some of the conventions and, in bfloat16,
# in only some of the cases.
SLOW = ("jax", "tf")
PORT, CHECK = "cases for ports", "check of the packages"
COLUMNS = (PORT, CHECK)
ROOM = 4 * 2**30  # maximum number of bytes by which a mutant may increase the memory use of its process
IN_ORDER = (ACTIVATIONS, GRADIENTS, DECODE, STEPS)  # from the fastest to the slowest stage


class PackageAsPort(Port):
    """An adapter that presents a package, which may be mutated, as a user's port.

    Subclasses set ``package_port`` and, like every port, the conventions and dtypes.
    """

    taps = ("**",)
    package_port: PackagePort

    def load(self, config: TransformerConfig, weights: Mapping[str, ndarray], dtype: str) -> None:
        """Build the model."""
        self.loaded = self.package_port.load(config, weights, Placement(dtype))

    def forward(self, source_ids: ndarray, target_ids: ndarray, tap: Tap) -> ndarray:
        """Return the logits, and call every tap."""
        inputs = {"source_ids": source_ids, "target_ids": target_ids}
        result = self.loaded.run("", inputs, taps=tap is not no_tap)
        for name, value in result.taps.items():
            tap(name, value)
        return result.output

    def export_weights(self) -> Mapping[str, ndarray]:
        """Return every parameter."""
        return self.loaded.export()

    def gradients(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> Gradients:
        """Return the loss and the gradients."""
        return self.loaded.gradients({"source_ids": source_ids, "target_ids": target_ids, "labels": labels})

    def start_training(self, settings: TrainingConfig) -> None:
        """Create a trainer."""
        self.trainer = self.loaded.trainer(settings)

    def train_step(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> float:
        """Run a training step and return the loss."""
        return float(self.trainer.train_step(source_ids, target_ids, labels).loss)

    def generate(self, source_ids: ndarray, max_length: int, beam_size: int, length_penalty: float) -> ndarray:
        """Return the best hypotheses."""
        beam = beam_size if beam_size > 1 else None
        return self.loaded.search(source_ids, Search(beam, length_penalty, max_length)).ids


@dataclass(frozen=True)
class ColumnResult:
    """The result for one mutant in one column of the table.

    Attributes:
        key: The key of the mutant.
        column: ``PORT`` or ``CHECK``.
        caught: ``difference``, ``exception``, or ``end`` (of the process); empty if the mutant survives.
        by: The first failing case with its dtype and its first failing tensor.
        cases: The number of trials that ran; 0 if no case executes the modified line.
        seconds: The duration in seconds.
    """

    key: str
    column: str
    caught: str
    by: str
    cases: int
    seconds: float

    to_dict = asdict


Lines = Mapping[str, Sequence[str]]  # the lines that each trial executes, as module:number


@dataclass
class ColumnTrials:
    """All trials of one package for one column of the table.

    A trial runs a case with one variant of the port in one dtype.

    Attributes:
        column: ``PORT`` or ``CHECK``.
        backend: The backend of the package.
        report: A function to call before each case.
    """

    column: str
    backend: str
    report: Callable[[str], None]

    def __post_init__(self) -> None:
        self.original = PORTS[self.backend]
        self.comparators: dict[str, Comparator] = {}
        self.reference = Reference(ports=sys.maxsize)
        offered = self.original.import_package().runtime.DTYPES
        wanted = ALL_DTYPES if self.column == CHECK else ("float64", "float32")
        self.conventions = CONVENTIONS
        if self.backend in SLOW:
            wanted, self.conventions = tuple(dtype for dtype in wanted if dtype != "float32"), CONVENTIONS[:2]
        self.dtypes = [dtype for dtype in wanted if dtype in offered]
        # In NumPy, also run the model that doesn't use fast.py, because only this model executes the reference's
        # formulas. All other packages are run only with the default setting.
        self.fast = (False, True) if self.backend == "numpy" else (True,)

    def ports(self, package: str) -> Iterator[tuple[str, Any, Sequence[Case]]]:
        """Yield (name, port, cases) for each variant."""
        for fast in self.fast:
            one = replace(self.original, package=package, fast=fast)
            if self.column == CHECK:
                yield f"fast={fast}", one, sorted(standard_cases(), key=lambda case: IN_ORDER.index(case.stage))
                continue
            for preset, overrides in self.conventions:
                port = PluginPort(f"{__name__}:{PackageAsPort.__name__}")
                members = {
                    "package_port": one,
                    "preset": preset,
                    "overrides": overrides,
                    "dtypes": tuple(self.dtypes),
                }
                port.kind = type(PackageAsPort.__name__, (PackageAsPort,), members)
                cases = port_cases(port_config(port))
                yield f"{preset} fast={fast}", port, sorted(cases, key=lambda case: IN_ORDER.index(case.stage))

    def findings(self, package: str, lines: Lines | None, changed: Sequence[str]) -> Iterator[tuple[str, Finding]]:
        """Yield (trial, finding) for every finding.

        Args:
            package: The name of the package, possibly a mutated copy.
            lines: The lines that each trial executes. A trial is run only if it executes a modified line. If None, all
                trials are run, each with a newly loaded model, so that a tracer can record the lines that each trial
                executes.
            changed: The modified lines. If the mutant changes code outside functions, this is empty, and every trial is
                run that executes any line of the package.
        """
        for dtype in self.dtypes:
            setting = Placements((dtype,))
            comparator = self.comparators.setdefault(dtype, Comparator("mutant", setting, self.reference))
            for name, port, cases in self.ports(package):
                trials = {case.name: f"{self.column} {name} {dtype} {case.name}" for case in cases}
                chosen = [case for case in cases if _runs(changed, trials[case.name], lines)]
                if self.backend in SLOW and dtype == "bfloat16":
                    chosen = [case for case in chosen if "float32" not in case.dtypes]
                for together in [[case] for case in chosen] if lines is None else _by_way(chosen):
                    by_name = {case.name: case for case in together}
                    with self.running(together):
                        for outputs in run_cases(together, port, [setting.placement(dtype)], self.report):
                            for finding in comparator.compare(by_name[outputs.case], outputs):
                                yield trials[outputs.case], finding

    def running(self, cases: Sequence[Case]) -> AbstractContextManager[None]:
        """Return a context manager. While it is active, cases run one operation at a time.

        TensorFlow's optimizer steps are an exception: like ``parity check``, they run in a ``tf.function``.
        """
        is_traced = self.backend == "tf" and self.column == CHECK and any(case.stage == STEPS for case in cases)
        return nullcontext() if is_traced else interpreted(self.backend)


def _by_way(cases: Sequence[Case]) -> list[list[Case]]:
    """Return two lists: the cases without optimizer steps, and the cases that TensorFlow may run in a trace."""
    return [[case for case in cases if (case.stage == STEPS) == steps] for steps in (False, True)]


def _runs(changed: Sequence[str], trial: str, lines: Lines | None) -> bool:
    """Return whether a trial executes one of the changed lines or, if ``changed`` is empty, any line."""
    if lines is None:
        return True
    ran = lines.get(trial, ())
    return not set(changed).isdisjoint(ran) if changed else bool(ran)


class Worker:
    """Runs the mutants of one package."""

    def __init__(self, backend: str, lines: Lines | None, report: Callable[[str], None]) -> None:
        self.package = PORTS[backend].package
        self.columns = [ColumnTrials(column, backend, report) for column in COLUMNS]
        self.lines: Lines = self._trace() if lines is None else lines

    def _trace(self) -> Lines:
        """Run the unmodified package, and return the lines that each trial executes.

        For a trial that fails, the list of lines is empty.
        """
        found: dict[str, set[str]] = {}
        wrong: set[str] = set()  # trials that fail without a mutation and therefore can't detect mutants
        seen: set[str] = set()
        directory = f"{ROOT / self.package}{os.sep}"
        modules: dict[str, str] = {}  # module names by file

        def called(frame: Any, event: str, argument: object) -> Any:
            file = frame.f_code.co_filename
            if not file.startswith(directory):
                return None
            modules[file] = file.removeprefix(directory).removesuffix(".py")
            seen.add(f"{modules[file]}:{frame.f_code.co_firstlineno}")
            return ran

        def ran(frame: Any, event: str, argument: object) -> Any:
            if event == "line":
                seen.add(f"{modules[frame.f_code.co_filename]}:{frame.f_lineno}")
            return ran

        for trials in self.columns:
            sys.settrace(called)
            try:
                for trial, finding in trials.findings(self.package, None, ()):
                    if finding.verdict not in (AGREES, SKIPPED):
                        wrong.add(trial)
                    found.setdefault(trial, set()).update(seen)
                    seen.clear()
            finally:
                sys.settrace(None)
        return {trial: [] if trial in wrong else sorted(lines) for trial, lines in found.items()}

    def results(self, mutant: Mutant) -> Iterator[ColumnResult]:
        """For each column of the table, run the column's trials with the mutant, and yield the result."""
        first, last = mutant.lines or (0, -1)
        changed = [f"{mutant.module}:{line}" for line in range(first, last + 1)]
        for trials in self.columns:
            start = time.perf_counter()
            seen: set[str] = set()
            caught = by = ""
            forget_open_calls()
            try:
                package = edited_package(self.package, mutant.edits()).__name__
                for trial, finding in trials.findings(package, self.lines, changed):
                    seen.add(trial)
                    if finding.verdict not in (AGREES, SKIPPED):
                        caught = "exception" if finding.verdict == FAILED else "difference"
                        by = f"{trial} {finding.path} {finding.tap}: {finding.detail or finding.error}"
                        break
            except Exception as error:  # raised while the mutant is imported
                caught, by = "exception", f"{type(error).__name__}: {error}"
            yield ColumnResult(mutant.key, trials.column, caught, by[:300], len(seen), time.perf_counter() - start)


class Heartbeat:
    """A callback that reports the current case to the parent at most once per second.

    If the parent process receives no reports for a long time, it assumes that the current case is hanging.
    """

    def __init__(self, parent: Parent) -> None:
        self.parent = parent
        self.last = 0.0

    def __call__(self, doing: str) -> None:
        """Report the current case, unless a report was sent within the last second."""
        if time.monotonic() > self.last + 1.0:
            self.parent.send(doing)
            self.last = time.monotonic()


def work(parent: Parent) -> None:
    """Receive a backend, send the lines that its trials execute, then receive mutants and send their results."""
    backend, lines = parent.receive()
    PORTS[backend].import_package()
    with np.errstate(all="ignore"):
        worker = Worker(backend, lines, Heartbeat(parent))
        parent.send(worker.lines)
        _limit_memory()
        while True:
            try:
                mutant = parent.receive()
            except EOFError:
                return
            parent.send(list(worker.results(mutant)))


def forget_open_calls() -> None:
    """Reset Keras's state after a mutant interrupted a layer call.

    Otherwise, later calls would use that call's arguments.
    """
    if "keras" in sys.modules:
        from keras.src.backend.common.global_state import set_global_attribute

        set_global_attribute("current_call_ctx", None)


def _limit_memory() -> None:
    import resource

    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    limit = pages * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
