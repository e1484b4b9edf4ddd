"""Child processes that work together. If one process fails, all are stopped, and the first failure is reported."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from transformer_parity.engine.processes.child import PATIENCE, Child, ChildEndedError
from transformer_parity.engine.processes.children import Children
from transformer_parity.engine.processes.messages import Broken

# Seconds to wait for the error message of the process that failed first. Other processes may report an error earlier,
# because they have lost the connection to the failed process.
CAUSE = 2.0


class TeamError(Exception):
    """A process in a team failed, and all processes in the team were stopped.

    Attributes:
        where: A description of the process, such as ``process 1 of 2``.
        cause: The error message that the process sent, or a description of how the process exited.
    """

    def __init__(self, where: str, cause: Broken | ChildEndedError) -> None:
        super().__init__(f"{where}: {cause.why if isinstance(cause, Broken) else cause}")
        self.where, self.cause = where, cause


class Team:
    """Child processes that work on one job together.

    Args:
        children: The object that started the processes.
        members: The processes in the order of their ranks.

    Attributes:
        is_over: Whether all processes in the team were stopped.
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
        """Yield (rank, message) for every message, until each process has sent a message of the type ``until``.

        Args:
            until: The type of the last message from each process. By default, each process sends one message.
            patience: See ``Children.listen``.
            pulse: See ``Children.listen``.

        Raises:
            TeamError: If a process exits, is silent for too long, or sends ``Broken``.
        """
        waiting = list(self._members)
        for member, message in self._children.listen(waiting, patience=patience, pulse=pulse):
            if isinstance(message, Broken | ChildEndedError):
                raise self._failure(member, message)
            if isinstance(message, until):
                waiting.remove(member)
            yield self._members.index(member), message

    def replies(self, patience: float = math.inf) -> list[Any]:
        """Return the next message from each process, as a list in rank order.

        Raises:
            TeamError: See ``listen``.
        """
        found = dict(self.listen(patience=patience))
        return [found[rank] for rank in range(len(self))]

    def stop(self, patience: float = PATIENCE) -> None:
        """Wait up to ``patience`` seconds for the processes to exit, then kill them."""
        deadline = time.monotonic() + patience
        for member in self._members:
            self._children.stop(member, max(0.0, deadline - time.monotonic()))
        self.is_over = True

    def where(self, rank: int) -> str:
        """Return a description of the process with the given rank."""
        return f"process {rank} of {len(self)}"

    def _failure(self, first: Child, cause: Broken | ChildEndedError) -> TeamError:
        """Stop all processes and return the error to report.

        An error caused by the input has the highest priority. If there is none, the exit of a process that didn't send
        an error is reported. Otherwise, the earliest of the other errors is reported.
        """
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
    """Return the sort key of a cause. The cause with the smallest key is reported."""
    if isinstance(cause, ChildEndedError):
        return (1,)
    return (0, rank) if cause.is_usage else (2, cause.at)
