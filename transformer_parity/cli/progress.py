"""The progress display of all commands: one bar per task on a terminal, and log lines otherwise."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.segment import Segment

from transformer_parity.engine.system.errors import printable

PIPE_WIDTH = 140  # line length, in characters, of tables that are not printed on a terminal


class PlainConsole(Console):
    """A console that prints untrusted names and paths literally.

    The console doesn't interpret markup. It escapes all control characters except the ones that rich generates.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Render an object to segments. rich calls this method for everything that it prints."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else "\n".join(map(printable, text.split("\n"))), style, control)


def make_console(pipe_width: int = PIPE_WIDTH) -> PlainConsole:
    """Return a console that prints to standard output.

    The console is as wide as the terminal, or ``pipe_width`` characters wide if standard output is not a terminal.
    """
    return PlainConsole(width=None if sys.stdout.isatty() else pipe_width)


class Progress:
    """A progress display. On a terminal, it shows one bar per task. Otherwise, it shows no bars.

    Args:
        names: The names of the tasks. For ``module:class``, only the class is displayed.
        total: The number of steps of each task; None if it isn't known yet.
        file: The stream to write to; None for standard output.
        hidden: Whether to hide the bars even on a terminal.
        is_still: Whether to redraw only in ``update``, so that drawing doesn't disturb time measurements.
    """

    def __init__(
        self,
        names: Iterable[str],
        total: int | None = None,
        file: TextIO | None = None,
        *,
        hidden: bool = False,
        is_still: bool = False,
    ) -> None:
        console = PlainConsole(file=file)
        self.is_terminal = console.is_terminal
        self._is_still = is_still
        self._logged: set[str] = set()
        titles = {name: name.rpartition(":")[2] for name in names}
        columns = (
            SpinnerColumn(),
            TextColumn(f"{{task.fields[title]:{max(map(len, titles.values()), default=0)}}}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            "<",
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
        )
        self._bars = Bars(
            *columns,
            console=console,
            transient=True,
            auto_refresh=not is_still,
            disable=hidden or not console.is_terminal,
        )
        self._tasks = {name: self._bars.add_task("", total=total, title=title) for name, title in titles.items()}

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Remove the bars."""
        self._bars.stop()

    def update(
        self,
        name: str,
        doing: str | None = None,
        *,
        advance: int = 0,
        completed: int | None = None,
        total: int | None = None,
    ) -> None:
        """Update a bar.

        Args:
            name: The name of the task.
            doing: A description of the current activity.
            advance: The number of newly completed steps; ignored if ``completed`` is given.
            completed: The number of steps completed so far.
            total: The number of steps of the task.
        """
        self._bars.update(
            self._tasks[name],
            description=doing,
            advance=advance if completed is None else None,
            completed=completed,
            total=total,
            refresh=self._is_still,
        )

    def say(self, line: str) -> None:
        """Print a line above the bars, if there are any."""
        self._bars.console.print(line, soft_wrap=True)

    def log(self, line: str) -> None:
        """Print a line to standard error if no bars are shown, unless the same line was printed before."""
        if not self.is_terminal and line not in self._logged:
            self._logged.add(line)
            print(printable(line), file=sys.stderr, flush=True)
