"""A test of the comparison itself: every known mistake is planted in a port, and must be caught, located and named.

Caught: the comparison fails. Located: the first tap that fails is where the mistake is, and the replay of every block
introduces the difference there. Named: of all hypotheses, the diagnosis chooses the one that was planted. Some mistakes
have no name: an exception, a shape, a NaN, a missing tap, and rounding.
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
from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.check.processes import SILENCE
from transformer_parity.transformer.compare.comparator import compare
from transformer_parity.transformer.diagnose.diagnosis import EXACT, Diagnosis, diagnose
from transformer_parity.transformer.diagnose.evidence.blame import REPLAYED, blame_files
from transformer_parity.transformer.diagnose.hypotheses.hypothesis import content, hypotheses
from transformer_parity.transformer.mistakes import training
from transformer_parity.transformer.mistakes.catalogue import TRAINING, cases, parts
from transformer_parity.transformer.mistakes.mistake import Mistake
from transformer_parity.transformer.ports.protocol import Placement, Placements
from transformer_parity.transformer.ports.registry import DEFINITION, PORTS
from transformer_parity.transformer.selftest.planted_ports import planted
from transformer_parity.transformer.selftest.uncompiled import interpreted
from transformer_parity.transformer.stages.training_stage import LOSS, WHOLE


@dataclass(frozen=True)
class Trial:
    """The result for one mistake in one port.

    Attributes:
        backend: The port.
        part: What the mistake is about.
        mistake: Its name.
        caught: Whether the comparison fails.
        located: Whether the first failure is where the mistake is, in the comparison and in the replay.
        named: Whether the diagnosis names it; None where it has no name.
        said: The detail of the first failure, or the sentence of the diagnosis.
    """

    backend: str
    part: str
    mistake: str
    caught: bool
    located: bool
    named: bool | None
    said: str

    to_dict = asdict  # the fields as plain values


class PartDone:
    """A process has tried a whole part of the catalogue."""


def try_out(backend: str, part: str, mistake: Mistake) -> Trial:
    """Plant one mistake in one port, compare that port with the reference, and diagnose it."""
    case = _case(backend, part, mistake)
    kept: Kept = {}
    port = planted(mistake, backend)
    with _settled(backend, part, mistake):
        findings = list(compare([case], port, Placements((mistake.dtype,)), kept=kept))
        failures = [finding for finding in findings if finding.verdict not in (AGREES, SKIPPED)]
        shown = kept.get((case.name, mistake.dtype), {})
        located = bool(failures) and where_it_is(failures, mistake) and _blamed(case, mistake, failures, shown)
        said = _first(failures)
        named = None
        if shown and has_a_name(mistake, backend):
            found = diagnose(case, shown, backend)
            named, said = _is_named(found, case, mistake), found.sentence
    return Trial(backend, part, mistake.name, bool(failures), located, named, said)


def has_a_name(mistake: Mistake, backend: str) -> bool:
    """Whether numbers tell a mistake from all others: it changes them in float64, with taps on, and in NumPy too."""
    if backend in mistake.own_numbers:
        return False
    return mistake.dtype == "float64" and mistake.path != "run" and "numpy" in mistake.edits and bool(mistake.at)


def where_it_is(failures: list[Finding], mistake: Mistake) -> bool:
    """Whether the first failure is where a mistake is, and every failure has the verdict of the mistake."""
    rest = list(failures)
    if mistake.announced:
        announcement = rest.pop(0)
        if announcement.verdict != DIVERGES or not announcement.detail.startswith(mistake.announced):
            return False
    if rest and rest[0].tap == WHOLE:  # which has no place
        del rest[0]
    if not mistake.at and mistake.path != "run":
        return not rest
    if not rest:
        return False
    first = rest[0]
    as_it_should = (first.tap, first.verdict) == (mistake.at, mistake.verdict) and mistake.detail in first.detail
    return as_it_should and {failure.verdict for failure in rest} == {mistake.verdict}


def _blamed(case: Case, mistake: Mistake, failures: list[Finding], shown: Mapping[str, Any]) -> bool:
    """Whether the replay of every block locates the mistake, too; true where there is nothing to replay."""
    if case.stage not in REPLAYED or mistake.dtype != "float64" or mistake.path != "taps":
        return True
    if not mistake.at or mistake.at == LOSS or not shown:
        return True
    truth = DEFINITION.load(case.config, case.load_weights(), Placement("float64"))
    introduced = blame_files(case, shown, truth, failures[0].backend).blame.introduced
    return introduced[:1] == [mistake.at]


def _case(backend: str, part: str, mistake: Mistake) -> Case:
    case = training.CASES.get(mistake.case, training.GRADIENTS) if part == "gradient" else cases()[mistake.case]
    if part in TRAINING:  # no more steps than the mistake needs
        case = replace(case, snapshots=(1,) if mistake.at.startswith("step 1") else (1, 2))
    slow = backend != "torch" and mistake.path != "fast"  # compiling takes long
    return replace(case, fast=False) if slow else case


@contextmanager
def _settled(backend: str, part: str, mistake: Mistake) -> Iterator[None]:
    """Compile nothing that the mistake does not need."""
    # Where taps are on, TensorFlow compiles only searches and steps.
    if part in TRAINING or part == "decoding" or (backend == "jax" and mistake.path != "fast"):
        with interpreted(backend):
            yield
    else:
        yield


def _is_named(found: Diagnosis, case: Case, mistake: Mistake) -> bool:
    """Whether a diagnosis names a mistake: by its own name, or by that of a convention with the same content."""
    known = hypotheses(case.config, case.stage)
    names = {mistake.name, *(other.name for other in known if content(other) == content(mistake))}
    return found.confidence == EXACT and not names.isdisjoint(found.hypotheses)


def _first(failures: list[Finding]) -> str:
    if not failures:
        return "nothing fails"
    first = failures[0]
    return first.detail or f"{first.tap}: error {first.error:.1e}"


WORK = "transformer_parity.transformer.selftest.trials:work"  # what a process runs
EACH = 2.5 * 2**30  # bytes of memory for a process, which imports every framework


def number_of_processes(jobs: int) -> int:
    """Return how many processes share so many jobs: as many as there are processors and memory for."""
    return max(1, min(jobs, processors(), int(free_bytes() / EACH)))


def all_trials(backends: Sequence[str], chosen: Sequence[str], timeout: float = SILENCE) -> Iterator[Trial]:
    """Yield what becomes of each mistake in each backend, as it is done.

    Args:
        backends: Names of the ports.
        chosen: Parts of the catalogue.
        timeout: As in ``processes.run_all``.

    Raises:
        ChildEndedError: A process has ended in the middle of a part, or was silent for too long.
    """
    jobs = sorted(
        ((backend, part) for backend in backends for part in chosen),
        key=lambda job: (job[0] == "torch", -len(parts()[job[1]])),  # the longest first
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
    """Receive which ports there are, and then which part of the catalogue to try in which of them, again and again."""
    backends = parent.receive()
    for name in PORTS:  # in the order in which they bear one another
        if name in backends:
            PORTS[name].import_package()
    while True:
        try:
            backend, part = parent.receive()
        except EOFError:
            return
        for mistake in parts()[part]:
            if backend in mistake.edits:
                parent.send(try_out(backend, part, mistake))
        parent.send(PartDone())
