"""Record all taps of the reference and of ports for a batch, and find the first wrong tap of each port."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from transformer_parity.engine.comparison import Arrays
from transformer_parity.engine.findings import Finding
from transformer_parity.engine.localization import FINE, INHERITED, INTRODUCED, Evidence, Mark
from transformer_parity.engine.outputs import OUTPUT, MissingAbilityError
from transformer_parity.engine.system.errors import UsageError
from transformer_parity.engine.tensors import structure_problem
from transformer_parity.engine.tolerances import tolerance
from transformer_parity.engine.verdict import Author, Verdict
from transformer_parity.transformer.cases.case import ACTIVATIONS, Case
from transformer_parity.transformer.diagnose.evidence.blame import Subject, blame
from transformer_parity.transformer.ports.exceptions import described
from transformer_parity.transformer.ports.protocol import AnyPort, Placement
from transformer_parity.transformer.ports.registry import DEFINITION
from transformer_spec.config import TransformerConfig

NEAR = 24  # number of preceding taps to test as inputs of a tap; larger than the number of taps in a layer


@dataclass(frozen=True)
class Recorded:
    """The taps of one port.

    Attributes:
        name: The name of the port.
        marks: The error at each tap, its tolerance, and whether the difference was introduced there.
        actual: The values of the taps.
    """

    name: str
    marks: Sequence[Mark]
    actual: Arrays

    @property
    def first_over(self) -> str | None:
        """The first tap whose error exceeds its tolerance, or None if all taps are within tolerance."""
        return next((mark.name for mark in self.marks if not mark.free <= mark.tolerance), None)


@dataclass(frozen=True)
class Recording:
    """The taps of one batch.

    Attributes:
        dtype: The dtype in which the ports computed.
        expected: The reference's float64 values by tap, in the order of computation.
        ports: The taps of each port.
        feeds: Maps the first wrong tap of each port to the taps from which it is computed.
    """

    dtype: str
    expected: Arrays
    ports: Sequence[Recorded]
    feeds: dict[str, tuple[str, ...]]

    @property
    def findings(self) -> list[Finding]:
        """The findings for all taps of all ports."""
        found = []
        for port in self.ports:
            author = Author(port.name, self.dtype, "explore", "explore", ACTIVATIONS)
            for mark in port.marks:
                actual, expected = port.actual[mark.name], self.expected[mark.name]
                over = not mark.free <= mark.tolerance
                problem = structure_problem(actual, expected, self.dtype) if over else ""
                found.append(author.compared("", mark.name, mark.free, mark.tolerance, problem=problem))
        return found

    @property
    def verdict(self) -> Verdict:
        """The combined verdict on all ports, according to the rules of ``parity check``."""
        return Verdict.of(self.findings)

    @property
    def sentence(self) -> int:
        """The index of the sentence in which the first wrong tap has the largest error; 0 if no tap is wrong."""
        for port in self.ports:
            name = port.first_over
            if name is not None and port.actual[name].shape == self.expected[name].shape:
                apart = np.abs(np.asarray(port.actual[name], np.float64) - self.expected[name])
                return int(np.nan_to_num(apart, nan=np.inf).reshape(len(apart), -1).max(1).argmax())
        return 0


def record(
    config: TransformerConfig,
    weights: Arrays,
    inputs: Arrays,
    ports: Sequence[AnyPort],
    dtype: str,
    progress: Callable[[str], None] = lambda name: None,
) -> Recording:
    """Run the reference and each port on a batch, and record their taps.

    Args:
        config: The config of the model.
        weights: One array per canonical name.
        inputs: ``source_ids`` and ``target_ids`` [B, L].
        ports: The ports to compare with the reference.
        dtype: The dtype in which the ports compute, float64 or float32.
        progress: A function that receives the name of the implementation that runs next.

    Raises:
        MissingFrameworkError: If the framework of a backend isn't installed.
        UsageError: If a port raises an exception.
    """
    progress("the reference")
    load = DEFINITION.load
    truth = load(config, weights, Placement("float64"))
    same_dtype = load(config, weights, Placement("float32")) if dtype == "float32" else None
    subject = Subject(Case("explore", "explore", config, "", inputs), "", dtype, inputs, truth, same_dtype)
    found = []
    for port in ports:
        progress(port.name)
        try:
            loaded = port.load(config, weights, Placement(dtype))
            found.append(blame(loaded, replace(subject, backend=port.name)))
        except MissingAbilityError as error:
            raise UsageError(str(error)) from error
        except (UsageError, MemoryError):
            raise
        except Exception as error:  # ports may raise any exception
            raise UsageError(f"{port.name}: {described(error)}") from error
    return recording_of(found, subject)


def recording_of(found: Sequence[Evidence], subject: Subject) -> Recording:
    """Run the reference, and return a recording that contains its taps and the taps of the ports in ``found``."""
    expected = subject.run(subject.truth, {})
    baseline = subject.replay.baseline({}, expected)
    ports = [Recorded(one.blame.backend, _marks(one, baseline, subject.dtype), one.actual) for one in found]
    return Recording(subject.dtype, expected, ports, _feeds(ports, subject, expected))


def _marks(evidence: Evidence, baseline: Mapping[str, float], dtype: str) -> list[Mark]:
    """Return a port's marks, with the tolerances of a full run. In a full run, rounding errors accumulate over taps."""
    marks = []
    for mark in evidence.blame.marks:
        allowed = tolerance(mark.name, dtype, baseline.get(mark.name, 0.0))
        over = INTRODUCED if mark.verdict == INTRODUCED else INHERITED
        marks.append(replace(mark, tolerance=allowed, verdict=FINE if mark.free <= allowed else over))
    return marks


def _feeds(ports: Sequence[Recorded], subject: Subject, expected: Arrays) -> dict[str, tuple[str, ...]]:
    wrong = {port.first_over for port in ports}
    one = {name: ids[:1] for name, ids in subject.inputs.items()}
    return {name: feeds(name, replace(subject, inputs=one)) for name in expected if name in wrong}


def feeds(name: str, subject: Subject) -> tuple[str, ...]:
    """Return the preceding taps on which a tap directly depends.

    The tap's value changes if one of these taps is perturbed and all others are set to their expected values.
    """
    expected = subject.run(subject.truth, {})
    names = list(expected)
    before = names[: names.index(name)]
    given = {tap: value for tap, value in expected.items() if tap != OUTPUT}
    found = []
    for tap in before:
        if ".layers." in tap and tap not in before[-NEAR:]:
            continue
        moved = given[tap] + np.cos(np.arange(given[tap].shape[-1]))
        shown = subject.run(subject.truth, {**given, tap: moved})[name]
        if not np.array_equal(shown, expected[name], equal_nan=True):
            found.append(tap)
    return tuple(found)
