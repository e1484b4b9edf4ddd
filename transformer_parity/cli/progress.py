"""The progress display of every command: one bar for each of several tasks, or lines where there is no terminal."""

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

PIPE_WIDTH = 140  # columns of a table that is not printed on a terminal


class PlainConsole(Console):
    """Prints names and paths from outside as they are: no markup, and no control characters but its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Render an object into segments; everything that is printed comes through here."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else "\n".join(map(printable, text.split("\n"))), style, control)


def make_console(pipe_width: int = PIPE_WIDTH) -> PlainConsole:
    """Return standard output for tables: as wide as the terminal, or as ``pipe_width`` where there is none."""
    return PlainConsole(width=None if sys.stdout.isatty() else pipe_width)


class Progress:
    """Shows the progress of several tasks: a bar for each on a terminal, no bars elsewhere.

    Args:
        names: One bar for each; of ``module:class``, the class is shown.
        total: Steps of each task; None where that is not known yet.
        file: The terminal, if it is one; standard output by default.
        hidden: Show no bars on a terminal either.
        is_still: Draw on ``update`` only and not in between, so that drawing takes no time from what is measured.
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
        """Change a bar: what is being done, steps more, steps in all, or the number of steps."""
        self._bars.update(
            self._tasks[name],
            description=doing,
            advance=advance if completed is None else None,
            completed=completed,
            total=total,
            refresh=self._is_still,
        )

    def say(self, line: str) -> None:
        """Print a line, above the bars where there are any."""
        self._bars.console.print(line, soft_wrap=True)

    def log(self, line: str) -> None:
        """Print a line on standard error where there are no bars, each line once."""
        if not self.is_terminal and line not in self._logged:
            self._logged.add(line)
            print(printable(line), file=sys.stderr, flush=True)
