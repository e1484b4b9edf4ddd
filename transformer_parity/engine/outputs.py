"""The outputs of one implementation: named tensors for each path, from a run or from a directory of files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from numpy import ndarray

from transformer_parity.engine.tensors import Digest, Tensors, plain

# A path is a way to run a model. ``taps`` runs the model with taps, which record intermediate values. ``fast`` runs the
# model the way users do. ``cached`` decodes position by position with a cache. ``load`` only loads and exports the
# weights. ``files`` reads the results of an earlier run from files.
TAPS, FAST, CACHED, LOAD, FILES = ("taps", "fast", "cached", "load", "files")
# The name of the value that a block returns. If a model returns several values, their names follow, as in
# ``output logits``.
OUTPUT = "output"


def is_output(name: str) -> bool:
    """Return whether a tensor is a value that a block returns, in contrast to the value at a tap."""
    return name.partition(" ")[0] == OUTPUT


class MissingAbilityError(Exception):
    """An implementation doesn't support a requested operation. The comparison is reported as skipped, not as passed."""


@dataclass
class Outputs:
    """The results of one implementation in one case and dtype.

    Attributes:
        case: The name of the case.
        dtype: The working dtype.
        paths: The tensors, keyed by path and name, in the order of computation.
        trace: Arrays that are used for the diagnosis but not compared, such as the beam after each step of a search.
        hidden: The taps that the implementation deliberately doesn't report.
        weights: The digests of the exported weights; None if the model was not loaded for this case.
        skipped: The unsupported paths, with the reasons.
        problems: Problems that are failures regardless of the tolerance, as (path, name, problem).
        failures: The paths that raised an exception, with a description of each exception.
        absent: Patterns for the names of tensors that the files declare as omitted, and the reason for each pattern.
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
        """Run the model, and store its tensors or, if it can't run, the reason.

        Args:
            path: The path under which to store the tensors.
            run: A function that runs the model and returns its tensors.
            describe: A function that returns the description of an exception.
        """
        try:
            self.paths[path] = plain(run())
        except MissingAbilityError as missing:
            self.skipped.append((path, str(missing)))
        except Exception as error:  # an exception in an implementation is a finding, not an error of the checker
            self.failures.append((path, describe(error)))

    @property
    def shown(self) -> Tensors:
        """All tensors, keyed by name. If the ``taps`` path is available, tensors of the ``fast`` path are omitted."""
        found: Tensors = {}
        for path, tensors in self.paths.items():
            if path != FAST or TAPS not in self.paths:
                found |= tensors
        return found
