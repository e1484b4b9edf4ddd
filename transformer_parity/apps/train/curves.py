"""Training curves as a figure and, for runs in lockstep, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich import box
from rich.table import Table

from transformer_parity.apps.train.log import LOG, read_log
from transformer_parity.engine.style import BACKENDS, GRAY, OPEN_STYLE, write
from transformer_parity.engine.system.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTED = 1e-6  # relative loss difference above which the curves are considered to have diverged


def losses(events: Sequence[dict[str, Any]]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the steps and each backend's training losses at these steps."""
    steps = [event for event in events if event["event"] == "step"]
    backends = list(dict.fromkeys(name for event in steps for name in event["loss"]))
    return (
        np.array([event["step"] for event in steps]),
        {name: np.array([event["loss"].get(name, np.nan) for event in steps]) for name in backends},
    )


def spread(by_backend: dict[str, np.ndarray]) -> np.ndarray:
    """Return the largest relative difference between the losses of any two backends at each step."""
    together = np.stack(list(by_backend.values()))
    return np.ptp(together, axis=0) / np.abs(together[0])


def draw(events: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw training and held-out losses and, below them, the score or (for runs in lockstep) the loss differences."""
    import matplotlib

    with matplotlib.rc_context(OPEN_STYLE):
        write(_figure(events), path)


def _figure(events: Sequence[dict[str, Any]]) -> Figure:
    from matplotlib.figure import Figure

    steps, by_backend = losses(events)
    lockstep = any(len(event["loss"]) > 1 for event in events if event["event"] == "step")
    figure = Figure(figsize=(7, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for name, values in by_backend.items():
        known = ~np.isnan(values)
        if not lockstep:
            upper.plot(steps[known], values[known], color=BACKENDS[name], alpha=0.25, linewidth=0.7)
        smooth = values[known] if lockstep else _smoothed(values[known])
        upper.plot(steps[known], smooth, color=BACKENDS[name], label=name)
    for name in by_backend:
        found = [event for event in events if event["event"] == "validation" and event["backend"] == name]
        found = [event for event in found if not event["averaged"]]  # exclude validation results for averaged weights
        found = list({event["step"]: event for event in found}.values())
        at = [event["step"] for event in found]
        style: dict[str, Any] = {"marker": "o", "markersize": 4, "markerfacecolor": "white", "color": BACKENDS[name]}
        upper.plot(at, [event["loss"] for event in found], **style)
        if not lockstep:
            lower.plot(at, [event["score"] for event in found], **style)
    task = next(event["task"] for event in events if event["event"] == "start")
    upper.set(ylabel="loss per target token [nats]", ylim=(0, None))
    with_what = "smoothed labels" if lockstep else "smoothed labels, dropout"
    upper.set_title(f"{task}: training loss (line; {with_what}) and held-out loss (circles)", fontsize=9)
    upper.legend(frameon=False)
    if lockstep:
        apart = spread(by_backend)
        lower.plot(steps, np.where(apart > 0, apart, np.nan), ".", color="black", markersize=3)  # omit zeros
        lower.axhline(PARTED, color=GRAY, linestyle=":", linewidth=0.9)
        lower.set(yscale="log", ylabel="largest relative difference\nbetween two losses")
    else:
        lower.set(ylabel="exact match [%]" if task == "dates" else "BLEU", ylim=(0, None))
    lower.set_xlabel("step")
    for axes in (upper, lower):
        axes.grid(alpha=0.2)
    return figure


def lockstep_table(events: Sequence[dict[str, Any]]) -> Table:
    """Return a table that shows each backend's loss and the largest relative difference at a few steps."""
    steps, by_backend = losses(events)
    apart = spread(by_backend)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("step", *by_backend, "difference"):
        table.add_column(column, justify="right", no_wrap=True)
    for step in (step for step in milestones(int(steps[-1])) if step in steps):
        at = int(np.flatnonzero(steps == step)[0])
        table.add_row(f"{step:,}", *(f"{values[at]:.9f}" for values in by_backend.values()), f"{apart[at]:.0e}")
    return table


def parting(events: Sequence[dict[str, Any]]) -> str:
    """Return a sentence that reports the step at which the curves diverge and the largest difference."""
    steps, by_backend = losses(events)
    apart = spread(by_backend)
    beyond = np.flatnonzero(~(apart <= PARTED))
    most = f"the largest relative difference between two losses is {np.nanmax(apart):.1e}"
    if not beyond.size:
        return f"The curves agree for {len(steps):,} steps: {most}."
    return f"The curves diverge by more than {PARTED:.0e} at step {steps[beyond[0]]:,}: {most}."


def milestones(last: int) -> list[int]:
    """Return the steps 1, 2, 5, 10, 20, 50, and so on, up to and including the last step."""
    found = [factor * 10**power for power in range(len(str(last))) for factor in (1, 2, 5)]
    return sorted({*(step for step in found if step <= last), last})


def _smoothed(values: np.ndarray, width: int = 25) -> np.ndarray:
    """Return the moving average of the values."""
    if len(values) < 2:
        return values
    width = min(width, len(values))
    padded = np.pad(values, (width // 2, width - 1 - width // 2), mode="edge")
    return np.convolve(padded, np.full(width, 1.0 / width), mode="valid")


def read_runs(directories: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the events of one or more runs, after checking that the runs can be drawn in the same figure.

    Raises:
        OSError: If a log cannot be read.
        UsageError: If a directory does not contain a run, if a run has no steps, or if the runs have different tasks or
            the same backend.
    """
    if missing := [str(directory) for directory in directories if not (directory / LOG).is_file()]:
        raise UsageError(f"there is no {LOG} in {', '.join(missing)}")
    logs = [read_log(directory) for directory in directories]
    for directory, log in zip(directories, logs, strict=True):
        kinds = {event["event"] for event in log}
        if lacking := [f"no {kind} event" for kind in ("start", "step") if kind not in kinds]:
            got = " and ".join(lacking)
            raise UsageError(f"{directory / LOG} contains {got}")
    backends = [name for log in logs for name in losses(log)[1]]
    if len(logs) > 1 and len(set(backends)) < len(backends):
        raise UsageError(f"runs must have different backends: got {', '.join(backends)}")
    events = [event for log in logs for event in log]
    tasks = {event["task"] for event in events if event["event"] == "start"}
    if len(tasks) > 1:
        raise UsageError(f"runs must have the same task: got {', '.join(sorted(tasks))}")
    return events
