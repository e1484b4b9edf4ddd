"""The picture of ``parity bench``: one bar for each contestant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from transformer_parity.bench import Entry, Spread, ratio
from transformer_parity.why_figures import GOOD, GREY

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_times(title: str, details: str, entries: Sequence[Entry], against: Entry, machine: str) -> Figure:
    """Draw medians as bars, the fastest on top, and the lowest and highest time as a line.

    Args:
        title: What was done.
        details: At what sizes.
        entries: Those that have times.
        against: Whose time the others' are multiples of.
        machine: On what.
    """
    from matplotlib.figure import Figure

    ordered = sorted(entries, key=lambda entry: (not entry.has_result, Spread.of(entry.seconds).median))
    figure = Figure(figsize=(8.0, 1.5 + 0.4 * len(ordered)), layout="constrained")
    axes = figure.subplots()
    for place, entry in enumerate(ordered):
        times = Spread.of([1e3 * seconds for seconds in entry.seconds])
        colour = GOOD if entry.has_result else GREY
        axes.barh(place, times.median, color=colour, height=0.65)
        axes.plot([times.low, times.high], [place, place], color="black", linewidth=1)
        text = f"  {times.median:,.0f} ms"
        if entry is not against:
            text += f", {ratio(entry, against).median:.2f} times {against.name}"
        axes.text(max(times.high, times.median), place, text, va="center", fontsize=8)
    axes.set_yticks(range(len(ordered)), [entry.name for entry in ordered])
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set_xlabel("milliseconds; line: lowest to highest of the rounds")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_title(f"{title}\n", loc="left", fontsize=10, fontweight="bold")
    axes.text(0.0, 1.03, details, transform=axes.transAxes, fontsize=8, color=GREY)
    note = machine
    if any(not entry.has_result for entry in ordered):
        note += ". Grey: only the matrix products, without a result."
    figure.supxlabel(note, fontsize=8, color=GREY)
    return figure
