"""The outputs of one implementation: named tensors by path, the same from a run and from a directory of files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from numpy import ndarray

from transformer_parity.engine.tensors import Digest, Tensors, plain

# How a model was run: with every intermediate value shown; the way a user runs it; position by position; weights in
# and out; elsewhere.
TAPS, FAST, CACHED, LOAD, FILES = ("taps", "fast", "cached", "load", "files")
OUTPUT = "output"  # the name of the value that a block returns


class MissingAbilityError(Exception):
    """Something that an implementation does not offer: it is skipped and counted, and never passes."""


@dataclass
class Outputs:
    """The results of one implementation in one case and dtype.

    Attributes:
        case: The name of the case.
        dtype: The working dtype.
        paths: The tensors by path and name, in the order of computation.
        trace: Arrays that explain the tensors and are not compared, such as the beam after each step of a search.
        hidden: The intermediate values that are not shown, on purpose.
        weights: The digests of the exported weights, if the model was loaded for this case.
        skipped: The paths that are not offered, and why.
        problems: Problems that no tolerance excuses: path, name, and problem.
        failures: The paths that ended with an exception, and the exception.
        absent: Patterns of names that files leave out on purpose, and why.
    """

    case: str
    dtype: str
    paths: dict[str, Tensors] = field(default_factory=dict)
    trace: list[ndarray] = field(default_factory=list)
    hidden: tuple[str, ...] = ()
    weights: dict[str, Digest] | None = None
    skipped: list[tuple[str, str]] = field(default_factory=list)
    problems: list[tuple[str, str, str]] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)
    absent: list[tuple[str, str]] = field(default_factory=list)

    def attempt(
        self, path: str, run: Callable[[], Mapping[str, ndarray]], describe: Callable[[Exception], str]
    ) -> None:
        """Run the model one way and keep its tensors, or why there are none.

        Args:
            path: The way.
            run: Runs it, and returns its tensors.
            describe: Returns the description of an exception.
        """
        try:
            self.paths[path] = plain(run())
        except MissingAbilityError as missing:
            self.skipped.append((path, str(missing)))
        except Exception as error:  # a finding, not a crash of the comparison
            self.failures.append((path, describe(error)))

    @property
    def shown(self) -> Tensors:
        """All tensors by name, without the fast path where the taps are shown."""
        found: Tensors = {}
        for path, tensors in self.paths.items():
            if path != FAST or TAPS not in self.paths:
                found |= tensors
        return found
