"""Mutation test of the comparison: inject every known bug into a port, and test whether it is found.

Each bug must be caught, located, and identified:

- Caught: The comparison fails.
- Located: The first failing tap is the tap that the catalog specifies, and the replay of every block reports the same
  tap.
- Identified: The diagnosis selects the injected bug from all candidates. Bugs that lead to exceptions, wrong shapes,
  NaN, missing taps, or rounding errors can't be identified.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from transformer_parity.engine.findings import AGREES, DIVERGES, SKIPPED, Finding, Kept
from transformer_parity.engine.processes.child import Child, ChildEndedError
from transformer_parity.engine.processes.children import Children
from transformer_parity.engine.processes.messages import Parent
from transformer_parity.engine.system.machine import free_bytes, processors
from transformer_parity.transformer.bugs import training
from transformer_parity.transformer.bugs.bug import Bug
from transformer_parity.transformer.bugs.catalog import TRAINING, cases, parts
from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.check.processes import SILENCE
from transformer_parity.transformer.compare.comparator import compare
from transformer_parity.transformer.diagnose.candidates.candidate import candidates, content
from transformer_parity.transformer.diagnose.diagnosis import EXACT, Diagnosis, diagnose
from transformer_parity.transformer.diagnose.evidence.blame import REPLAYED, blame_files
from transformer_parity.transformer.ports.protocol import Placement, Placements
from transformer_parity.transformer.ports.registry import DEFINITION, PORTS
from transformer_parity.transformer.selftest.buggy_ports import injected
from transformer_parity.transformer.selftest.uncompiled import interpreted
from transformer_parity.transformer.stages.training_stage import LOSS, WHOLE


@dataclass(frozen=True)
class Trial:
    """The result for one bug in one port.

    Attributes:
        backend: Name of the port.
        part: Name of the part of the bug catalog that contains the bug.
        bug: Name of the bug.
        caught: Whether the comparison fails.
        located: Whether the comparison and the replay find the first difference at the expected tap.
        named: Whether the diagnosis identifies the bug; None if the bug can't be identified.
        said: The message about the first failure, or the diagnosis as one sentence.
    """

    backend: str
    part: str
    bug: str
    caught: bool
    located: bool
    named: bool | None
    said: str

    to_dict = asdict  # returns the fields as built-in Python types


class PartDone:
    """Message that a process sends when it has tested all bugs of a part of the catalog."""


def try_out(backend: str, part: str, bug: Bug) -> Trial:
    """Inject a bug into a port, compare the port with the reference, and diagnose the difference."""
    case = _case(backend, part, bug)
    kept: Kept = {}
    port = injected(bug, backend)
    with _settled(backend, part, bug):
        findings = list(compare([case], port, Placements((bug.dtype,)), kept=kept))
        failures = [finding for finding in findings if finding.verdict not in (AGREES, SKIPPED)]
        shown = kept.get((case.name, bug.dtype), {})
        located = bool(failures) and where_it_is(failures, bug) and _blamed(case, bug, failures, shown)
        said = _first(failures)
        named = None
        if shown and has_a_name(bug, backend):
            found = diagnose(case, shown, backend)
            named, said = _is_named(found, case, bug), found.sentence
    return Trial(backend, part, bug.name, bool(failures), located, named, said)


def has_a_name(bug: Bug, backend: str) -> bool:
    """Return whether a bug has an effect in float64 and in the reference, so that the diagnosis can identify it."""
    if backend in bug.own_numbers:
        return False
    return bug.dtype == "float64" and bug.path != "run" and "numpy" in bug.edits and bool(bug.at)


def where_it_is(failures: list[Finding], bug: Bug) -> bool:
    """Return whether the first failure is at the expected tap and all failures have the expected verdict."""
    rest = list(failures)
    if bug.announced:
        announcement = rest.pop(0)
        if announcement.verdict != DIVERGES or not announcement.detail.startswith(bug.announced):
            return False
    if rest and rest[0].tap == WHOLE:  # this tensor contains all gradients, so its error doesn't show where the bug is
        del rest[0]
    if not bug.at and bug.path != "run":
        return not rest
    if not rest:
        return False
    first = rest[0]
    as_it_should = (first.tap, first.verdict) == (bug.at, bug.verdict) and bug.detail in first.detail
    return as_it_should and {failure.verdict for failure in rest} == {bug.verdict}


def _blamed(case: Case, bug: Bug, failures: list[Finding], shown: Mapping[str, Any]) -> bool:
    """Return True if a replay of every block locates the bug at the expected tap, or if there is no replay."""
    if case.stage not in REPLAYED or bug.dtype != "float64" or bug.path != "taps":
        return True
    if not bug.at or bug.at == LOSS or not shown:
        return True
    truth = DEFINITION.load(case.config, case.load_weights(), Placement("float64"))
    introduced = blame_files(case, shown, truth, failures[0].backend).blame.introduced
    return introduced[:1] == [bug.at]


def _case(backend: str, part: str, bug: Bug) -> Case:
    case = training.CASES.get(bug.case, training.GRADIENTS) if part == "gradient" else cases()[bug.case]
    if part in TRAINING:  # don't run more steps than the bug requires
        case = replace(case, snapshots=(1,) if bug.at.startswith("step 1") else (1, 2))
    slow = backend != "torch" and bug.path != "fast"  # these backends have a long compile time
    return replace(case, fast=False) if slow else case


@contextmanager
def _settled(backend: str, part: str, bug: Bug) -> Iterator[None]:
    """Disable compilation inside a ``with`` statement, unless the bug affects only compiled code."""
    # If taps are recorded, TensorFlow compiles only searches and training steps.
    if part in TRAINING or part == "decoding" or (backend == "jax" and bug.path != "fast"):
        with interpreted(backend):
            yield
    else:
        yield


def _is_named(found: Diagnosis, case: Case, bug: Bug) -> bool:
    """Return whether a diagnosis names a bug, or a different candidate with the same change."""
    known = candidates(case.config, case.stage)
    names = {bug.name, *(other.name for other in known if content(other) == content(bug))}
    return found.confidence == EXACT and not names.isdisjoint(found.candidates)


def _first(failures: list[Finding]) -> str:
    if not failures:
        return "nothing fails"
    first = failures[0]
    return first.detail or f"{first.tap}: error {first.error:.1e}"


WORK = "transformer_parity.transformer.selftest.trials:work"  # function that a process runs
EACH = 2.5 * 2**30  # bytes of memory per process; each process imports all frameworks


def number_of_processes(jobs: int) -> int:
    """Return how many processes to start for the given number of jobs, limited by the processors and free memory."""
    return max(1, min(jobs, processors(), int(free_bytes() / EACH)))


def all_trials(backends: Sequence[str], chosen: Sequence[str], timeout: float = SILENCE) -> Iterator[Trial]:
    """Yield the result for each bug in each backend, as soon as the result is available.

    Args:
        backends: Names of the ports.
        chosen: Names of the parts of the bug catalog to try.
        timeout: Seconds without a message after which a process is stopped, as in ``processes.run_all``.

    Raises:
        ChildEndedError: If a process ends before it finishes its part of the bug catalog, or if a process times out.
    """
    jobs = sorted(
        ((backend, part) for backend in backends for part in chosen),
        key=lambda job: (job[0] == "torch", -len(parts()[job[1]])),  # start the longest jobs first
    )
    with Children({"OMP_NUM_THREADS": "1", **os.environ}) as children:
        running: dict[Child, tuple[str, str]] = {}
        for _ in range(number_of_processes(len(jobs))):
            child = children.start(WORK)
            child.send(tuple(backends))
            child.send(jobs[0])
            running[child] = jobs.pop(0)
        for child, message in children.listen(running, patience=timeout):
            match message:
                case Trial():
                    yield message
                case ChildEndedError():
                    raise ChildEndedError(f"{message.how} at {': '.join(running[child])}", message.last_line)
                case PartDone() if jobs:
                    child.send(jobs[0])
                    running[child] = jobs.pop(0)
                case PartDone():
                    del running[child]


def work(parent: Parent) -> None:
    """Receive the names of all ports. Then repeatedly receive a port and a part of the bug catalog to test."""
    backends = parent.receive()
    for name in PORTS:  # this import order avoids conflicts between the frameworks
        if name in backends:
            PORTS[name].import_package()
    while True:
        try:
            backend, part = parent.receive()
        except EOFError:
            return
        for bug in parts()[part]:
            if backend in bug.edits:
                parent.send(try_out(backend, part, bug))
        parent.send(PartDone())
