"""The base class of the stages. A stage runs a port on a case and defines the expected tensors and tolerances."""

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

# Name of an execution path (see ``engine.outputs``), and a function that runs the port on this path.
Way = tuple[str, Callable[[], Tensors]]


@dataclass(frozen=True)
class Expected:
    """The expected tensors of a case in one dtype.

    Attributes:
        tensors: Dict from names to the reference's float64 tensors, in the order of computation.
        tolerances: Dict from tensor names to maximum allowed errors. Tensors of a search are not included, because
            their tolerances depend on the result of the search.
        exact: The reference in float64, for searches.
        rounded: The float32 reference if the dtype is float32, else None.
    """

    tensors: Tensors
    tolerances: dict[str, float]
    exact: LoadedPackage
    rounded: LoadedPackage | None


@dataclass(frozen=True)
class PathTensors:
    """The tensors that a port returns for a case on one execution path, and the expected tensors.

    Attributes:
        author: Factory that creates the findings.
        case: The case.
        path: Execution path: how the port was run, for example with taps or on its fast path.
        tensors: Dict from names to the port's tensors.
        expected: The expected tensors and their tolerances.
        outputs: All results of the port for this case.
    """

    author: Author
    case: Case
    path: str
    tensors: Tensors
    expected: Expected
    outputs: Outputs


class Stage(Measure, ABC):
    """A stage of a check. Each stage compares one kind of result, for example activations or gradients.

    Attributes:
        name: Name of the stage in ``--stage`` and in findings.
        component: Part of the model that this stage's golden-vector cases test.
        path: Execution path whose tensors are stored in golden vectors.
        is_ordered: True if the tensors must be in the same order as the reference's.
        searches: True if the stage runs a search.
        has_baseline: True if float32 tolerances depend on the reference's own float32 error.
        perturbed_baselines: Number of additional float32 runs of the reference with weights perturbed by one unit in
            the last place. The tolerance depends on the largest error in any of the runs.
        has_loss: True if the stage requires labels.
        trains: True if the stage changes the model, so that each case loads a new model.
        reproduces: Maximum error between a port with a bug and a reference with the same bug, caused only by rounding.
            If the error is larger than this value, the port and the reference have different bugs. The error that a bug
            causes is always larger than this value. The smallest such error in activations is 1.8e-10, which results
            from rounding an epsilon to float32. The smallest such error in weights is 8e-9, which results from adding
            1e-6 to a norm before clipping.
        optional: Tensors that a port may omit, as a mapping from name pattern to description.
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
        """Yield the runs of a port on a case. The caller executes each run before it requests the next run.

        Args:
            case: The case, with copies of its inputs for the port.
            loaded: The port.
            outputs: Results of the case so far.
        """

    def tensors(self, case: Case, loaded: LoadedPort, dtype: str = "float64") -> Tensors:
        """Return all tensors that a model computes for a case, in the order of computation."""
        found: Tensors = {}
        for _, run in self.run(replace(case, fast=False), loaded, Outputs(case.name, dtype)):
            found |= run()
        return found

    def expected(self, case: Case, reference: LoadedPackage, dtype: str) -> Tensors:
        """Return the reference's tensors for a case. ``dtype`` is the working dtype of the port."""
        return self.tensors(case, reference, dtype)

    def diagnosed(self, case: Case, tensors: Tensors) -> Tensors:
        """Return the tensors of a case in the format in which the diagnosis compares them with its candidates."""
        return tensors

    @abstractmethod
    def tolerances(self, truth: Arrays, baseline: Arrays, placement: Placement) -> dict[str, float]:
        """Return the tolerance of each tensor.

        Args:
            truth: The reference's tensors in float64.
            baseline: The reference's tensors in float32; empty if the working dtype is not float32.
            placement: Working dtype, device, and precision.
        """

    def problem(self, name: str, actual: ndarray, expected: ndarray, dtype: str) -> str:
        """Return an error message if a tensor is invalid, else an empty string. Scalars are float64 in every dtype."""
        return super().problem(name, actual, expected, dtype if expected.ndim else "float64")

    def compare(self, shown: PathTensors) -> Iterator[Finding]:
        """Yield findings about skipped tensors, then about missing or unknown names, then one per compared tensor."""
        names, skips = self._due(shown)
        yield from (shown.author.skipped(shown.path, why) for why in skips)
        due, known = set(names), shown.expected.tensors
        have = [name for name in shown.tensors if name in due or name not in known]
        yield from compare_names(shown.author, shown.path, have, names, ordered=self.is_ordered)
        yield from self.compare_tensors([name for name in names if name in shown.tensors], shown)

    def compare_tensors(self, names: Sequence[str], shown: PathTensors) -> Iterator[Finding]:
        """Yield a finding for each tensor."""
        expected = shown.expected
        yield from compare_tensors(
            shown.author, shown.path, names, shown.tensors, expected.tensors, expected.tolerances, self
        )

    def due(self, shown: PathTensors) -> list[str]:
        """Return the names of the tensors to compare on an execution path."""
        return list(shown.expected.tensors)

    def not_offered(self, due: list[str], shown: PathTensors) -> tuple[list[str], list[str]]:
        """Return the names of the tensors to compare, and the reasons for skipping the other tensors."""
        skips = []
        for pattern, what in self.optional.items():
            names = [name for name in due if fnmatchcase(name, pattern)]
            if names and not any(name in shown.tensors for name in names):
                skips.append(f"{len(names)} {what} are not reported")
                due = [name for name in due if name not in names]
        return due, skips

    def left_out(
        self, case: Case, tensors: Collection[str], hidden: Sequence[str]
    ) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield the names or name patterns of the tensors that golden files omit, with the reasons.

        Args:
            case: The case.
            tensors: Names of the tensors that the port returns.
            hidden: Taps that the port doesn't declare.
        """
        for pattern, what in self.optional.items():
            if not any(fnmatchcase(name, pattern) for name in tensors):
                yield (pattern,), f"{what} are not reported"

    def _due(self, shown: PathTensors) -> tuple[list[str], list[str]]:
        """Return the names of the tensors to compare, and the reasons for skipping the other tensors.

        If the tensors come from golden files, these files also contain the reasons.
        """
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
