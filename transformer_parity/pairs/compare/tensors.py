"""Compare the tensors of a port with the tensors of the original, by name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from transformer_parity.engine.findings import Finding
from transformer_parity.engine.outputs import TAPS
from transformer_parity.engine.system.errors import printable
from transformer_parity.engine.tensors import Tensors
from transformer_parity.engine.tolerances import EPS
from transformer_parity.engine.verdict import Author
from transformer_parity.pairs.compare.difference import difference, problem
from transformer_parity.pairs.compare.names import Names, listed
from transformer_parity.pairs.compare.rounding import REPRODUCED
from transformer_parity.pairs.compare.stages import OUTPUT, plain_name
from transformer_parity.pairs.compare.truth import Tolerances
from transformer_parity.pairs.contract.arrays import is_float

SMALL = "the error is smaller than a rounding error of float32, as if a constant were rounded to float32"
STAYS = "it stays the same after small changes of the weights and inputs, so it isn't rounding"


@dataclass(frozen=True)
class Compared:
    """One compared tensor, before it is known whether its error comes from rounding.

    Attributes:
        author: The object that creates the finding.
        name: The name of the tensor.
        error: The relative error; infinite if there is a problem.
        tolerance: The largest accepted error.
        problem: A problem that makes the tensor diverge regardless of the tolerance.
        detail: A description of a near-tie, or of different decisions.
    """

    author: Author
    name: str
    error: float
    tolerance: float
    problem: str = ""
    detail: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether the tensor differs by more than the tolerance."""
        return bool(self.problem) or not self.error <= self.tolerance

    @property
    def is_small(self) -> bool:
        """Whether an error in float64 is smaller than a rounding error of float32."""
        return self.author.dtype == "float64" and not self.problem and self.error <= EPS["float32"]

    def finding(self, correlation: float) -> Finding:
        """Return the finding.

        Args:
            correlation: The correlation of the error with the errors after small changes of the weights; see
                ``rounding``. Infinite if the error can't come from rounding.
        """
        detail = self.detail
        stays = REPRODUCED < correlation < math.inf and self.author.dtype != "float64"
        if self.is_wrong and not self.problem and (self.is_small or stays):
            detail = f"error {self.error:.1e}, tolerance {self.tolerance:.1e}; {SMALL if self.is_small else STAYS}"
        return self.author.compared(
            TAPS,
            printable(plain_name(self.name)),
            self.error,
            self.tolerance,
            problem=self.problem,
            detail=detail,
            is_rounding=self.is_small or correlation <= REPRODUCED,
        )


def compare_tensors(
    author: Author,
    tolerances: Tolerances,
    actual: Tensors,
    expected: Tensors,
    names: Names | None,
    ties: Mapping[str, int],
) -> Iterator[Compared]:
    """Yield the comparison of every output, and of every tap that has a declared counterpart.

    Args:
        author: The object that creates the findings.
        tolerances: The largest accepted errors.
        actual: The tensors of the port.
        expected: The tensors of the original.
        names: The correspondence of the taps; None if all tensors are results.
        ties: The number of different decisions in each tensor whose decisions differ only at near-ties.
    """
    for text in names.problems if names else ():
        yield Compared(author, "names", math.inf, 0.0, text)
    extra = [name for name in actual if name not in expected]
    for name, value in expected.items():
        is_result = names is None or name.startswith(OUTPUT)
        if not is_result and name not in names.declared:  # type: ignore[union-attr]
            continue
        if name not in actual:
            instead = f"; it returns {listed([*map(plain_name, extra)])} instead" if extra else ""
            yield Compared(author, name, math.inf, 0.0, f"the port doesn't return this tensor{instead}")
            continue
        limit = tolerances.limit(name) if is_float(value) else 0.0
        if ties.get(name):
            detail = f"{ties[name]} of {value.size} decisions differ at near-ties"
            yield Compared(author, name, 0.0, limit, detail=detail)
        elif text := problem(actual[name], value, author.dtype, is_result):
            yield Compared(author, name, math.inf, limit, text)
        else:
            wrong = 0 if is_float(value) else int((actual[name] != value).sum())
            detail = f"{wrong} of {value.size} values differ" if wrong else ""
            error = difference(actual[name], value, tolerances.scale(name))
            yield Compared(author, name, error, limit, detail=detail)
    for name in extra:
        yield Compared(author, name, math.inf, 0.0, "the original has no such tensor")
