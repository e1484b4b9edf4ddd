"""The checker, checked: every known mistake is planted in a port, and has to be caught, located and named.

Caught: the comparison fails. Located: the first place that fails is where the mistake is, and blame, which replays
every block, introduces the difference there. Named: of all hypotheses, the diagnosis chooses the one that was planted.
Some mistakes have no name: an exception, a shape, a NaN or a missing tap says itself what it is, and rounding is
rounding.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from transformer_parity.cases.case import ACTIVATIONS, GRADIENTS, Case
from transformer_parity.check import planted_ports
from transformer_parity.check.planted_ports import planted
from transformer_parity.check.uncompiled import interpreted, interpreted_training
from transformer_parity.compare import training_outputs
from transformer_parity.compare.comparator import compare
from transformer_parity.compare.findings import Finding, Kept, Setting
from transformer_parity.compare.verdict import AGREES, DIVERGES, SKIPPED
from transformer_parity.diagnose.blame import blame_files
from transformer_parity.diagnose.diagnosis import EXACT, Diagnosis, diagnose
from transformer_parity.diagnose.hypotheses import content, hypotheses
from transformer_parity.mistakes import training
from transformer_parity.mistakes.catalogue import TRAINING, cases, parts
from transformer_parity.mistakes.mistake import Mistake
from transformer_parity.ports.protocol import Placement, Port
from transformer_parity.ports.registry import PORTS
from transformer_parity.system.child import Children
from transformer_parity.system.messages import Parent


@dataclass(frozen=True)
class Trial:
    """What became of one mistake in one port.

    Attributes:
        backend: The port.
        part: What the mistake is about.
        mistake: Its name.
        caught: Whether the comparison fails.
        located: Whether it fails first where the mistake is, and blame puts it there.
        named: Whether the diagnosis names it; None where it has no name.
        said: What the comparison or the diagnosis says.
    """

    backend: str
    part: str
    mistake: str
    caught: bool
    located: bool
    named: bool | None
    said: str

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)


def trials(backends: Iterable[str], chosen: Iterable[str], folder: Path) -> Iterator[Trial]:
    """Plant every mistake of some parts of the catalogue in some backends, one after another.

    Args:
        backends: Which ports.
        chosen: Which parts.
        folder: Where copies of the packages may be written.
    """
    for backend in backends:
        for part in chosen:
            for i, mistake in enumerate(parts()[part]):
                if backend in mistake.edits:
                    place = folder / f"{backend}-{part}-{i}".replace(" ", "-")
                    place.mkdir()
                    yield try_out(backend, part, mistake, place)


def try_out(backend: str, part: str, mistake: Mistake, folder: Path) -> Trial:
    """Plant one mistake in one port, and see what becomes of it."""
    case = _case(backend, part, mistake)
    kept: Kept = {}
    with _planted(backend, part, mistake, folder) as port, _settled(backend, part, mistake):
        findings = list(compare([case], port, Setting((mistake.dtype,)), kept=kept))
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
    """Whether a hypothesis can be told from all others by numbers: it changes them, in float64, with taps on."""
    if backend in mistake.own_numbers:
        return False
    return mistake.dtype == "float64" and mistake.path != "run" and "numpy" in mistake.edits and bool(mistake.at)


def where_it_is(failures: list[Finding], mistake: Mistake) -> bool:
    """Whether the first failure is where a mistake is, and nothing fails in another way than it should."""
    rest = list(failures)
    if mistake.announced:
        announcement = rest.pop(0)
        if announcement.verdict != DIVERGES or not announcement.detail.startswith(mistake.announced):
            return False
    if rest and rest[0].tap == training_outputs.WHOLE:  # which says that something is wrong, not where
        del rest[0]
    if not mistake.at:
        return not rest
    if not rest:
        return False
    first = rest[0]
    as_it_should = (first.tap, first.verdict) == (mistake.at, mistake.verdict) and mistake.detail in first.detail
    return as_it_should and {failure.verdict for failure in rest} == {mistake.verdict}


def _blamed(case: Case, mistake: Mistake, failures: list[Finding], shown: Mapping[str, Any]) -> bool:
    """Whether blame puts the mistake where it is, too; true where there is nothing to replay."""
    if case.stage not in (ACTIVATIONS, GRADIENTS) or mistake.dtype != "float64" or mistake.path != "taps":
        return True
    if not mistake.at or mistake.at == training_outputs.LOSS or not shown:
        return True
    truth = PORTS["numpy"].load(case.config, case.load_weights(), Placement("float64"))
    introduced = blame_files(case, shown, truth, failures[0].backend).blame.introduced
    return introduced[:1] == [mistake.at]


def _case(backend: str, part: str, mistake: Mistake) -> Case:
    if part == "gradient":
        return training.GRADIENTS
    case = cases()[mistake.case]
    slow = backend != "torch" and mistake.path != "fast"  # compiling takes its time
    return replace(case, fast=False) if slow else case


def _planted(backend: str, part: str, mistake: Mistake, folder: Path) -> AbstractContextManager[Port]:
    in_the_model = any(module != "training" for module, _, _ in mistake.edits[backend])
    if part in TRAINING and not in_the_model:
        return planted_ports.retrained(mistake, backend)
    return planted(mistake, backend, folder)


def _settled(backend: str, part: str, mistake: Mistake) -> AbstractContextManager[Any]:
    """Return a context in which nothing is compiled, and no more steps are taken than the mistake needs."""
    if part in TRAINING:
        return _Training(backend, (1,) if mistake.at.startswith("step 1") else (1, 2))
    if mistake.path == "fast" and part != "decoding":
        return nullcontext()
    # TensorFlow compiles nothing but searches where taps are on.
    return interpreted(backend) if backend == "jax" or part == "decoding" else nullcontext()


class _Training:
    """A context for mistakes of training."""

    def __init__(self, backend: str, snapshots: tuple[int, ...]) -> None:
        self.contexts = (interpreted_training(backend), patch.object(training_outputs, "SNAPSHOTS", snapshots))

    def __enter__(self) -> None:
        for context in self.contexts:
            context.__enter__()

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self.contexts):
            context.__exit__(*error)


def _is_named(found: Diagnosis, case: Case, mistake: Mistake) -> bool:
    """Whether a diagnosis names a mistake: by its own name, or by that of the convention that it amounts to."""
    known = hypotheses(case.config, case.stage)
    names = {mistake.name, *(other.name for other in known if content(other) == content(mistake))}
    return found.confidence == EXACT and not names.isdisjoint(found.hypotheses)


def _first(failures: list[Finding]) -> str:
    if not failures:
        return "nothing fails"
    first = failures[0]
    return first.detail or f"{first.tap}: error {first.error:.1e}"


WORK = "transformer_parity.check.selftest:work"  # what a process runs


def all_trials(backends: Sequence[str], chosen: Sequence[str]) -> Iterator[tuple[str, str, list[Trial]]]:
    """Yield what becomes of each part of the catalogue in each backend, as it is done.

    Raises:
        ChildEndedError: A process has ended in the middle of a part.
    """
    jobs = sorted(
        ((backend, part) for backend in backends for part in chosen),
        key=lambda job: (job[0] == "torch", -len(parts()[job[1]])),  # the longest first
    )
    with Children({"OMP_NUM_THREADS": "1", **os.environ}) as children:
        running = {}
        for _ in range(min(os.cpu_count() or 1, len(jobs))):
            child = children.start(WORK)
            child.send((tuple(backends), children.folder))
            child.send(jobs[0])
            running[child] = jobs.pop(0)
        while running:
            for child in children.wait(list(running)):
                tried: list[Trial] = child.receive()
                yield *running.pop(child), tried
                if jobs:
                    child.send(jobs[0])
                    running[child] = jobs.pop(0)


def work(parent: Parent) -> None:
    """Receive which ports there are, and then which part of the catalogue to try in which of them, again and again."""
    backends, folder = parent.receive()
    for name in PORTS:  # in the order in which they bear one another
        if name in backends:
            PORTS[name].import_package()
    while True:
        try:
            backend, part = parent.receive()
        except EOFError:
            return
        with tempfile.TemporaryDirectory(dir=folder) as place:
            parent.send(list(trials([backend], [part], Path(place))))
