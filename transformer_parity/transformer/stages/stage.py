"""A stage: it runs a port in a case, and defines the expected tensors and their tolerances."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import ClassVar

from numpy import ndarray

from transformer_parity.engine.comparison import Arrays, Measure, compare_names, compare_tensors
from transformer_parity.engine.findings import Finding
from transformer_parity.engine.outputs import FILES, TAPS, Outputs
from transformer_parity.engine.tensors import Tensors
from transformer_parity.engine.verdict import Author
from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.ports.package import LoadedPackage
from transformer_parity.transformer.ports.protocol import LoadedPort, Placement

Way = tuple[str, Callable[[], Tensors]]  # a path, and the function that runs the port that way


@dataclass(frozen=True)
class Expected:
    """The tensors that one case must yield in one dtype.

    Attributes:
        tensors: The float64 truth by name, in the order of computation.
        tolerances: The largest error that agrees, by name; a search has none here, because they depend on its result.
        exact: The reference in float64, for searches.
        rounded: The reference in float32, if that is the dtype.
    """

    tensors: Tensors
    tolerances: dict[str, float]
    exact: LoadedPackage
    rounded: LoadedPackage | None


@dataclass(frozen=True)
class PathTensors:
    """The tensors that a port shows in a case on one path, and the expected ones.

    Attributes:
        author: Makes the findings.
        case: The case.
        path: How the port was run.
        tensors: The tensors of the port by name.
        expected: The expected tensors and their tolerances.
        outputs: All results of the case.
    """

    author: Author
    case: Case
    path: str
    tensors: Tensors
    expected: Expected
    outputs: Outputs


class Stage(Measure, ABC):
    """One kind of comparison.

    Attributes:
        name: Its name in ``--stage`` and in findings.
        component: The part of the model that cases of golden vectors are about.
        path: The path whose tensors golden vectors hold.
        is_ordered: Whether the tensors must come in the order of the reference's.
        searches: Whether the model is run by a search.
        has_baseline: Whether tolerances in float32 follow from the error of the reference in float32.
        perturbed_baselines: The number of further runs of the reference in float32, with weights perturbed by one unit
            in the last place. A tolerance follows from the largest error.
        has_loss: Whether the model is run with labels.
        trains: Whether running a case changes the model, which then is loaded for this case only.
        reproduces: The largest error that a right hypothesis leaves when it repeats what a port does: rounding. The
            weakest mistake leaves 1.8e-10 in activations (an epsilon rounded to float32) and 8e-9 in weights (1e-6
            added to a norm before clipping).
        optional: Tensors that a port may omit: a pattern of their names, and their description.
    """

    name: str
    component: str
    path: str = TAPS
    is_ordered: bool = False
    searches: bool = False
    has_baseline: bool = True
    perturbed_baselines: int = 0
    has_loss: bool = False
    trains: bool = False
    reproduces: float
    optional: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def run(self, case: Case, loaded: LoadedPort, outputs: Outputs) -> Iterator[Way]:
        """Yield the ways to run a port in a case; the caller runs each one before it requests the next.

        Args:
            case: The case, with copies of its inputs for the port.
            loaded: The port.
            outputs: The results of the case so far.
        """

    def tensors(self, case: Case, loaded: LoadedPort, dtype: str = "float64") -> Tensors:
        """Return all tensors that a model yields in a case, in the order of computation, each once."""
        found: Tensors = {}
        for _, run in self.run(replace(case, fast=False), loaded, Outputs(case.name, dtype)):
            found |= run()
        return found

    def expected(self, case: Case, reference: LoadedPackage, dtype: str) -> Tensors:
        """Return the reference's tensors in a case; ``dtype`` is the working dtype of the port."""
        return self.tensors(case, reference, dtype)

    def diagnosed(self, case: Case, tensors: Tensors) -> Tensors:
        """Return the tensors of a case in the form in which hypotheses are compared with them."""
        return tensors

    @abstractmethod
    def tolerances(self, truth: Arrays, baseline: Arrays, placement: Placement) -> dict[str, float]:
        """Return the tolerance of each tensor.

        Args:
            truth: The tensors of the reference in float64.
            baseline: The tensors of the reference in float32; empty if that is not the working dtype.
            placement: The working dtype, device and precision.
        """

    def problem(self, name: str, actual: ndarray, expected: ndarray, dtype: str) -> str:
        """Return what is wrong with a tensor; losses, norms and counts are float64 in every dtype."""
        return super().problem(name, actual, expected, dtype if expected.ndim else "float64")

    def compare(self, shown: PathTensors) -> Iterator[Finding]:
        """Yield the omissions, a finding about wrong names, and then the comparison of each tensor."""
        names, skips = self._due(shown)
        yield from (shown.author.skipped(shown.path, why) for why in skips)
        due, known = set(names), shown.expected.tensors
        have = [name for name in shown.tensors if name in due or name not in known]
        yield from compare_names(shown.author, shown.path, have, names, ordered=self.is_ordered)
        yield from self.compare_tensors([name for name in names if name in shown.tensors], shown)

    def compare_tensors(self, names: Sequence[str], shown: PathTensors) -> Iterator[Finding]:
        """Yield the comparison of each tensor."""
        expected = shown.expected
        yield from compare_tensors(
            shown.author, shown.path, names, shown.tensors, expected.tensors, expected.tolerances, self
        )

    def due(self, shown: PathTensors) -> list[str]:
        """Return the names of the tensors that belong to a path."""
        return list(shown.expected.tensors)

    def not_offered(self, due: list[str], shown: PathTensors) -> tuple[list[str], list[str]]:
        """Return the names that are required, and why others are not."""
        skips = []
        for pattern, what in self.optional.items():
            names = [name for name in due if fnmatchcase(name, pattern)]
            if names and not any(name in shown.tensors for name in names):
                skips.append(f"{len(names)} {what} are not shown")
                due = [name for name in due if name not in names]
        return due, skips

    def left_out(
        self, case: Case, tensors: Collection[str], hidden: Sequence[str]
    ) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield the names, or patterns of names, that files leave out, and why.

        Args:
            case: The case.
            tensors: The names of the tensors that the port shows.
            hidden: The taps that it does not promise to show.
        """
        for pattern, what in self.optional.items():
            if not any(fnmatchcase(name, pattern) for name in tensors):
                yield (pattern,), f"{what} are not shown"

    def _due(self, shown: PathTensors) -> tuple[list[str], list[str]]:
        """Return the names that are required, and why others are not; files give their own reasons."""
        due = self.due(shown)
        if shown.path != FILES:
            return self.not_offered(due, shown)
        reasons = {name: _why_absent(name, shown.outputs) for name in due if name not in shown.tensors}
        absent = {name: why for name, why in reasons.items() if why}
        given = list(absent.values())
        skips = [f"{given.count(why)} tensors: {why}" for why in dict.fromkeys(given)]
        return [name for name in due if name not in absent], skips


def _why_absent(name: str, outputs: Outputs) -> str:
    return next((why for pattern, why in outputs.absent if fnmatchcase(name, pattern)), "")
