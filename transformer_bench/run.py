"""Run a benchmark: select the implementations, run the rounds, and repeat them for multiple sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import reference_numpy as ref
from transformer_bench.implementations import FORMS, OURS, TrainOnDevices, others
from transformer_bench.matmuls import Matmuls
from transformer_bench.measurements import Entry, verdict
from transformer_bench.peak import LibraryEntry, Peak, libraries, peak_of
from transformer_bench.rounds import Tell, TimedImplementation, run_rounds, started
from transformer_bench.tables import costs_for_machines, describe, times_for_machines
from transformer_bench.verify import verifier_of
from transformer_bench.workload import Work
from transformer_parity.engine.findings import AGREES, FAILED
from transformer_parity.engine.system.errors import UsageError, refusals
from transformer_parity.engine.system.machine import check_memory, processors
from transformer_parity.engine.verdict import EXIT_CODES
from transformer_spec.parallel_plan import Plan

Progress = Callable[[list[Entry], int], AbstractContextManager[Tell]]


@dataclass(frozen=True)
class Setting:
    """The implementations to time, and the number of rounds.

    Attributes:
        backends: The backends of the packages to time.
        peers: Whether to also time the compiled modes of the packages, and implementations from other projects.
        threads: The number of threads of each implementation.
        rounds: The number of timed calls to each implementation; 0 to only compute the costs of plans.
        plans: The parallelism plans. The benchmark also times training with each plan in each package.
    """

    backends: Sequence[str]
    peers: bool = False
    threads: int = 1
    rounds: int = 1
    plans: Sequence[Plan] = ()

    def implementations(self, work: Work) -> list[TimedImplementation]:
        """Return the implementations that support the given workload, in the order of the first round."""
        ours: list[TimedImplementation] = []
        for name in self.backends:
            ours += [OURS[work.task][name], *(TrainOnDevices(name, plan, work.device) for plan in self.plans)]
            # Training a base-sized model in a dozen processes takes more than 24 GB of memory. Therefore, training in
            # the compiled mode is timed only if there is one backend.
            if self.peers and name in FORMS[work.task] and (work.task != "train" or len(self.backends) == 1):
                ours.append(FORMS[work.task][name])
        return [*ours, *others(work), Matmuls()] if self.peers else ours

    def check(self, work: Work) -> None:
        """Check that the benchmark can run, before anything is timed.

        Raises:
            MissingFrameworkError: If an implementation isn't installed.
            UsageError: If the workload, an implementation, or the machine doesn't support a setting.
        """
        for plan in self.plans:
            try:
                plan.check(work.config)
            except ValueError as error:
                raise UsageError(f"--parallel {plan}: {error}") from error
        if not self.rounds:
            if not self.plans:
                raise UsageError("--rounds 0 only computes the costs of parallelism plans; add --parallel PLAN")
            return
        implementations = self.implementations(work)
        for implementation in implementations:
            implementation.check_installed()
        numbers = ref.count_parameters(work.config) * sum(
            implementation.processes for implementation in implementations
        )
        numbers += work.batch * max(work.source, work.target) * work.config.d_model
        check_memory(4 * numbers, f"{work.title}, {work.details},")
        if self.threads > processors():
            raise UsageError(f"--threads must be at most {processors()}, the number of CPU cores: got {self.threads}")
        if self.peers and work.device != "cpu":
            raise UsageError("--peers supports only the CPU; remove --peers or --device gpu")
        if self.peers and work.dtype != "float32":
            raise UsageError("--peers supports only float32; remove --peers or --dtype bfloat16")
        if self.peers and getattr(work, "activation_checkpointing", False):
            raise UsageError("--peers does not support --activation-checkpointing; remove one of these options")
        if "numpy" in self.backends and work.dtype == "bfloat16":
            raise UsageError("numpy does not support bfloat16 in benchmarks; add --backends torch,jax,tf")
        if "numpy" in self.backends and work.device == "gpu":
            raise UsageError("numpy supports only the CPU; add --backends torch,jax,tf")


@dataclass
class Timing:
    """The results of a benchmark, which may include multiple workloads.

    Attributes:
        setting: The implementations and the number of rounds.
        machine: A description of the machine, as returned by ``tables.describe``.
        works: The workloads that were timed.
        races: The entries of each workload.
        peaks: The machine's peak throughput and memory bandwidth, measured separately for each workload.
        interrupted: Whether Ctrl-C interrupted the benchmark.
    """

    setting: Setting
    machine: dict[str, Any]
    works: list[Work] = field(default_factory=list)
    races: list[list[Entry]] = field(default_factory=list)
    peaks: list[Peak | None] = field(default_factory=list)
    interrupted: bool = False

    @classmethod
    def begin(cls, setting: Setting) -> Timing:
        """Return a ``Timing`` that contains a description of this machine, but no results yet."""
        return cls(setting, describe(setting.threads))

    def add(self, work: Work, progress: Progress) -> list[Entry]:
        """Time the given workload and return its entries; empty if ``setting.rounds`` is 0."""
        entries: list[Entry] = []
        peak: Peak | None = None
        if self.setting.rounds:
            entries, peak, self.interrupted = time_work(work, self.setting, progress)
        self.works.append(work)
        self.races.append(entries)
        self.peaks.append(peak)
        return entries

    @property
    def entries(self) -> list[Entry]:
        """The entries of all workloads."""
        return [entry for entries in self.races for entry in entries]

    @property
    def exit_code(self) -> int:
        """The exit code of the worst entry. It is never 0 after an interruption."""
        return EXIT_CODES[verdict(self.entries)] or EXIT_CODES[FAILED if self.interrupted else AGREES]

    def to_dict(self) -> dict[str, Any]:
        """Return the results as built-in Python types."""
        races = [
            {**times_for_machines(*one), "plans": costs_for_machines(one[0], self.setting.plans)}
            for one in zip(self.works, self.races, self.peaks, strict=True)
        ]
        conditions = {name: self.machine[name] for name in ("threads", "load_average")}
        return {**conditions, "interrupted": self.interrupted, "races": races}


def grown(work: Work, axis: str, value: int) -> Work:
    """Return a copy of a workload with a different size.

    Args:
        work: The workload to copy.
        axis: The axis of ``--scale``.
        value: The new size.
    """
    if axis == "length":
        return replace(work, source=value, target=value)
    sizes: dict[str, Any] = {"layers" if axis == "depth" else axis: value}
    return replace(work, **sizes)


def work_title(work: Work, axis: str) -> str:
    """Return the title of a workload, without the size that ``--scale`` increases."""
    sizes = {"batch": f"batch {work.batch}", "source": f"source {work.source}", "target": f"target {work.target}"}
    grown = ("source", "target") if axis == "length" else (axis,)
    return f"{work.task}, {work.size}: {', '.join(text for name, text in sizes.items() if name not in grown)}"


def time_work(work: Work, setting: Setting, progress: Progress) -> tuple[list[Entry], Peak | None, bool]:
    """Run the given workload with every implementation.

    Returns:
        The entries, the machine's peak, and whether Ctrl-C interrupted the run.
    """
    implementations = setting.implementations(work)
    entries = [Entry(implementation.name, implementation.has_result) for implementation in implementations]
    measured = libraries(setting.backends, work, peers=setting.peers)
    rates = [LibraryEntry(library.name, has_result=False) for library in measured]
    interrupted = False
    try:
        with (
            progress(entries, setting.rounds) as tell,
            started([*implementations, *measured], [*entries, *rates], setting.threads) as (processes, directory),
        ):
            # The weights and the expected results are computed while the processes import their packages.
            file, weights = directory / "model.safetensors", work.weights()
            with refusals(OSError):
                ref.save_weights(file, work.config, weights)
            run_rounds(processes, work, file, setting.rounds, verifier_of(work, weights).verify, tell)
    except KeyboardInterrupt:
        interrupted = True
    for entry in entries:
        if entry.verdict == AGREES and not entry.seconds:
            entry.verdict, entry.problem = FAILED, "interrupted before it was timed"
        if work.device == "gpu":  # the measured memory is host memory rather than GPU memory
            entry.loaded_bytes = entry.peak_bytes = None
    return entries, peak_of([library.backend for library in measured], rates), interrupted
