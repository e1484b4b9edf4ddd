"""Child processes that work together: when one fails, all are ended, and the one that failed first says why."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from transformer_parity.engine.processes.child import PATIENCE, Child, ChildEndedError
from transformer_parity.engine.processes.children import Children
from transformer_parity.engine.processes.messages import Broken

CAUSE = 2.0  # seconds for the process that failed first to say so: others fail because it is gone


class TeamError(Exception):
    """A process of a team has failed, and all were ended.

    Attributes:
        where: The process, in words.
        cause: What it sent, or how it ended.
    """

    def __init__(self, where: str, cause: Broken | ChildEndedError) -> None:
        super().__init__(f"{where}: {cause.why if isinstance(cause, Broken) else cause}")
        self.where, self.cause = where, cause


class Team:
    """Child processes that do one job together.

    Args:
        children: The block that started them.
        members: The processes, by rank.

    Attributes:
        is_over: Whether all were stopped.
    """

    def __init__(self, children: Children, members: Sequence[Child]) -> None:
        self._children = children
        self._members = list(members)
        self.is_over = False

    def __len__(self) -> int:
        return len(self._members)

    def send(self, message: Any) -> None:
        """Send every process the same message."""
        for member in self._members:
            member.send(message)

    def listen(
        self, until: type = object, *, patience: float = math.inf, pulse: Callable[[], None] | None = None
    ) -> Iterator[tuple[int, Any]]:
        """Yield every message with the rank of its sender, until each process has sent one of the type ``until``.

        Args:
            until: The type of the last message of each; by default, each sends one.
            patience: As in ``Children.listen``.
            pulse: As in ``Children.listen``.

        Raises:
            TeamError: A process has ended, was silent for too long, or has sent ``Broken``.
        """
        waiting = list(self._members)
        for member, message in self._children.listen(waiting, patience=patience, pulse=pulse):
            if isinstance(message, Broken | ChildEndedError):
                raise self._failure(member, message)
            if isinstance(message, until):
                waiting.remove(member)
            yield self._members.index(member), message

    def replies(self, patience: float = math.inf) -> list[Any]:
        """Return the next message of each process, by rank.

        Raises:
            TeamError: As in ``listen``.
        """
        found = dict(self.listen(patience=patience))
        return [found[rank] for rank in range(len(self))]

    def stop(self, patience: float = PATIENCE) -> None:
        """Give the processes some seconds to end by themselves, then end them."""
        deadline = time.monotonic() + patience
        for member in self._members:
            self._children.stop(member, max(0.0, deadline - time.monotonic()))
        self.is_over = True

    def where(self, rank: int) -> str:
        """Return which process has a rank, in words."""
        return f"process {rank} of {len(self)}"

    def _failure(self, first: Child, cause: Broken | ChildEndedError) -> TeamError:
        """End all processes, and return why: what the input is at fault for, or who was killed, or who failed first."""
        found = {self._members.index(first): cause}
        others = [member for member in self._members if member is not first]
        for member, message in self._children.listen(others, seconds=CAUSE):
            if isinstance(message, Broken | ChildEndedError):
                found[self._members.index(member)] = message
                others.remove(member)
        self.stop(0.0)
        rank = min(found, key=lambda rank: _order(rank, found[rank]))
        return TeamError(self.where(rank), found[rank])


def _order(rank: int, cause: Broken | ChildEndedError) -> tuple[float, ...]:
    """Return what sorts causes: the first is reported."""
    if isinstance(cause, ChildEndedError):
        return (1,)
    return (0, rank) if cause.is_usage else (2, cause.at)
