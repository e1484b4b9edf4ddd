"""The processes of the two implementations, seen from the process that compares them."""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from numpy import ndarray

from transformer_parity.engine.processes.child import Child, ChildEndedError
from transformer_parity.engine.processes.children import Children
from transformer_parity.engine.processes.messages import Broken
from transformer_parity.engine.system.kept_programs import keep_programs
from transformer_parity.pairs.contract.arrays import cast
from transformer_parity.pairs.contract.implementation import Arrays
from transformer_parity.pairs.contract.source import Source
from transformer_parity.pairs.run.messages import LOGITS, Call, Declaration, Import, Load, Raised, Ran

WORK = "transformer_parity.pairs.run.worker:work"  # entry point of a process
MODELS = 4  # number of models that a process keeps
SILENCE = 600.0  # seconds without an answer after which a process is stopped


class RunError(Exception):
    """An implementation can't be imported, or a call of it failed.

    Args:
        why: The reason.
        side: The name of the implementation that failed; empty if it is unknown.
    """

    def __init__(self, why: str, side: str = "") -> None:
        super().__init__(why)
        self.side = side


class Side:
    """One of the two implementations, which runs in a separate process.

    Args:
        source: The class of the implementation.
        children: The object that starts processes.
        child: The process.
        timeout: Seconds without an answer after which the process is stopped.

    Attributes:
        name: The name in reports, such as ``my_pair:Original``.
        imported: The dtypes, methods, and versions that the class declares.
        versions: The versions of the frameworks that the process has imported so far.
    """

    def __init__(self, source: Source, children: Children, child: Child, timeout: float = SILENCE) -> None:
        self.name = str(source)
        self._children, self._child, self._timeout = children, child, timeout
        self._models: OrderedDict[str, SideModel] = OrderedDict()
        self._ended = ""
        self.imported: Declaration
        self.versions: dict[str, str] = {}

    def start(self) -> None:
        """Wait until the class is imported.

        Raises:
            RunError: If it can't be imported.
        """
        answer = self._answer()
        if isinstance(answer, Broken):
            raise RunError(answer.why, self.name)
        self.imported = answer
        self.versions.update(answer.versions)

    def has(self, method: str) -> bool:
        """Return whether the class defines an optional method."""
        return method in self.imported.methods

    def new(self, method: str, seed: int) -> dict[str, ndarray]:
        """Return the weights or the inputs that the implementation chooses for a seed.

        Raises:
            RunError: If the method is missing or raises an exception.
        """
        if not self.has(method):
            raise RunError(
                f"{self.name} must define {method}(), because it is the implementation that you trust", self.name
            )
        found = self._ask(Call("", method, (seed,))).outputs
        if not found:
            raise RunError(f"{self.name}.{method}() returned no arrays", self.name)
        return found

    def model(self, weights: Arrays, dtype: str) -> SideModel:
        """Return a model with these weights, which must already have the dtype. Models are created when they run."""
        return SideModel(self, weights, dtype)

    def run(self, model: SideModel, method: str, *arguments: Any, given: Arrays | None = None) -> Ran:
        """Call a method of a model.

        Raises:
            RunError: If the model can't be created, or if the method raises an exception.
        """
        return self._ask(Call(self._loaded(model), method, arguments, given or {}))

    def _loaded(self, model: SideModel) -> str:
        """Create a model in the process unless it exists, and return its key."""
        key = next((key for key, known in self._models.items() if known.is_same(model)), "")
        if key:
            self._models.move_to_end(key)
            return key
        free = [key for key in map(str, range(1, MODELS + 1)) if key not in self._models]
        key = free[0] if free else self._models.popitem(last=False)[0]
        self.versions.update(self._ask(Load(key, model.weights, model.dtype)).versions)
        self._models[key] = model
        return key

    def _ask(self, request: Any) -> Ran:
        if self._ended:
            raise RunError(self._ended, self.name)
        self._child.send(request)
        answer = self._answer()
        if isinstance(answer, Raised):
            raise RunError(answer.why, self.name)
        return answer

    def _answer(self) -> Any:
        for _, answer in self._children.listen([self._child], patience=self._timeout):
            if isinstance(answer, ChildEndedError):
                self._ended = f"{answer.how}: {answer.last_line}"
                raise RunError(self._ended, self.name)
            return answer
        raise RunError("the process ended", self.name)


class SideModel:
    """A model of one implementation: its weights and dtype, and the methods that run it."""

    def __init__(self, side: Side, weights: Arrays, dtype: str) -> None:
        self.side, self.weights, self.dtype = side, weights, dtype

    def is_same(self, other: SideModel) -> bool:
        """Return whether both models have the same weights and dtype."""
        return self.weights is other.weights and self.dtype == other.dtype

    def forward(self, inputs: Arrays, given: Arrays | None = None) -> Ran:
        """Run the model on inputs, with the values of some taps replaced."""
        return self.side.run(self, "forward", cast(inputs, self.dtype), given=given)

    def gradients(self, inputs: Arrays) -> Ran:
        """Return the gradients of the loss."""
        return self.side.run(self, "gradients", cast(inputs, self.dtype))

    def next_logits(self, inputs: Arrays, prefix: ndarray, cached: bool) -> ndarray:
        """Return the logits that follow a prefix."""
        method = "next_logits_cached" if cached else "next_logits"
        return self.side.run(self, method, cast(inputs, self.dtype), prefix).outputs[LOGITS]


@contextmanager
def two_sides(
    original: Import,
    port: Import,
    interpreters: Mapping[str, str],
    timeout: float,
) -> Iterator[tuple[Side, Side]]:
    """Start a process for each of two implementations, and yield both. The processes end with the block.

    Args:
        original: The implementation that you trust.
        port: The other implementation.
        interpreters: The paths of Python interpreters, keyed by ``original`` and ``port``.
        timeout: Seconds without an answer after which a process is stopped.
    """
    defaults = {"OMP_WAIT_POLICY": "passive", **keep_programs(os.environ)}
    with Children({**defaults, **os.environ}) as children:
        sides = []
        for role, request in (("original", original), ("port", port)):
            child = children.start(WORK, interpreters.get(role, sys.executable))
            child.send(request)
            sides.append(Side(request.source, children, child, timeout))
        yield sides[0], sides[1]
