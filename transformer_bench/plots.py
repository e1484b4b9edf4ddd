"""The plots of ``parity bench``: one bar per implementation, or one line per implementation over multiple sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from transformer_bench.measurements import (
    Entry,
    Spread,
    at_sizes,
    exponents,
    fastest,
    median_seconds,
    ratio,
    work_bytes,
)
from transformer_parity.engine.style import BACKENDS, GOOD, GRAY, OTHERS
from transformer_parity.transformer.ports.registry import PORTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEBI = 2**20
OURS = {
    *PORTS,
    *(port.package for port in PORTS.values()),
}  # the display name of each package of this project starts with one of these words


def place_of(machine: Mapping[str, Any]) -> str:
    """Return a short description of the machine."""
    return f"{machine['processor']}, {machine['cpus']} CPU cores"


def draw_times(title: str, details: str, entries: Sequence[Entry], machine: str) -> Figure:
    """Draw median times as bars, with the fastest on top, and the range of the times as lines.

    Args:
        title: The title of the workload.
        details: The sizes of the workload.
        entries: The entries that have times.
        machine: A short description of the machine.
    """
    from matplotlib.figure import Figure

    against = fastest(entries)
    ordered = sorted(entries, key=lambda entry: (not entry.has_result, Spread.of(entry.seconds).median))
    figure = Figure(figsize=(8.0, 1.5 + 0.4 * len(ordered)), layout="constrained")
    axes = figure.subplots()
    for place, entry in enumerate(ordered):
        times = Spread.of([1e3 * seconds for seconds in entry.seconds])
        color = GRAY if not entry.has_result else GOOD if entry.name.split()[0] in OURS else OTHERS
        axes.barh(place, times.median, color=color, height=0.65)
        axes.plot([times.low, times.high], [place, place], color="black", linewidth=1)
        text = f"  {times.median:,.0f} ms"
        if against is not None and entry is not against:
            text += f", {ratio(entry, against).median:.2f} times {against.name}"
        axes.text(max(times.high, times.median), place, text, va="center", fontsize=8)
    axes.set_yticks(range(len(ordered)), [entry.name for entry in ordered])
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set_xlabel("milliseconds (bar: median, line: lowest to highest round)")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_title(f"{title}\n", loc="left", fontsize=10, fontweight="bold")
    axes.annotate(
        details, (0, 1), (0, 6), "axes fraction", "offset points", fontsize=8, color=GRAY, annotation_clip=False
    )
    note = machine
    if any(entry.has_result and entry.name.split()[0] not in OURS for entry in ordered):
        note += ". Light blue: implementations outside this project."
    if any(not entry.has_result for entry in ordered):
        note += ". Gray: matrix multiplications only."
    figure.supxlabel(note, fontsize=8, color=GRAY)
    return figure


def draw_growth(
    title: str, details: str, axis: str, values: Sequence[int], results: Sequence[Sequence[Entry]], machine: str
) -> Figure:
    """Draw time and memory as a function of a size, with one line per implementation and two logarithmic axes.

    Args:
        title: The title of the workload.
        details: The other sizes of the workload.
        axis: The name of the size that increases.
        values: The values of this size.
        results: For each of these values, the entries of all implementations.
        machine: A short description of the machine.
    """
    from matplotlib.figure import Figure

    has_memory = any(entry.work_bytes for entries in results for entry in entries if entry.is_timed)
    figure = Figure(figsize=(9.0, 4.2), layout="constrained")
    time_axes, *others = figure.subplots(1, 2 if has_memory else 1, squeeze=False)[0]
    for name, steepness in exponents(values, results).items():
        timed = [entry for entries in results for entry in entries if entry.name == name and entry.is_timed]
        style: dict[str, Any] = {"marker": "o", "markersize": 3}
        if name in BACKENDS:
            style["color"] = BACKENDS[name]
        if not any(entry.has_result for entry in timed):
            style |= {"color": GRAY, "linestyle": "--"}
        for axes, kind, measure, unit in (
            (time_axes, "seconds", median_seconds, 1e3),
            *((axes, "work_bytes", work_bytes, 1 / MEBI) for axes in others),
        ):
            measured = at_sizes(name, results, measure)
            drawn = {value: unit * number for value, number in zip(values, measured, strict=False) if number}
            if drawn:
                fitted = steepness[kind]
                label = name if fitted is None else f"{name}: {fitted:.2f}"
                axes.plot(list(drawn), list(drawn.values()), label=label, **style)
    labels = "milliseconds", "MiB of additional memory since the first call"
    for axes, label in zip((time_axes, *others), labels, strict=False):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(list(values), [f"{value:,}" for value in values])
        axes.set_xlabel(axis)
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, title="name: exponent of growth", title_fontsize=8)
    figure.suptitle(f"{title}\n{details}", fontsize=9)
    figure.supxlabel(machine, fontsize=8, color=GRAY)
    return figure
