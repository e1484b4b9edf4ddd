"""Draw the figures of docs/why.md, with four panels for each claim."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from measurements import (
    CARRIED,
    D_MODEL,
    LAYERS,
    POSITIONS,
    SEQUENCES,
    Cost,
    LayerGradient,
    Saturation,
    Spread,
    Step,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
from transformer_parity.engine.style import BAD, GOOD, GRAY

LABELS = (  # for each panel of the first figure, the positions of the labels "raw" and "divided"
    ((0.80, 0.88), (0.97, 0.22)),
    ((0.97, 0.85), (0.97, 0.21)),
    ((0.52, 0.15), (0.97, 0.91)),
    ((0.97, 0.25), (0.97, 0.87)),
)
BANDS = "Bands: all but the lowest and the highest tenth."


def draw_sqrt_dk(softmax: list[Saturation], layer: list[LayerGradient]) -> Figure:
    """Return a figure that shows scores, attention weights, and the gradients of the softmax and of a layer by d_k."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(8.0, 6.0), layout="constrained")
    (scores, largest), (gradient, carriers) = figure.subplots(2, 2)
    d_ks, layer_d_ks = sorted({entry.d_k for entry in softmax}), sorted({entry.d_k for entry in layer})
    sides = {False: (BAD, "raw"), True: (GOOD, r"divided by $\sqrt{d_k}$")}
    for divided, (color, name) in sides.items():
        entries = [entry for entry in softmax if entry.divided is divided]
        scores.plot(d_ks, [entry.variance for entry in entries], "o", color=color, markersize=4)
        _curve(largest, d_ks, [entry.largest for entry in entries], color)
        _curve(gradient, d_ks, [entry.gradient for entry in entries], color)
        _curve(carriers, layer_d_ks, [entry.carriers for entry in layer if entry.divided is divided], color)
        for panel, places in zip(figure.axes, LABELS, strict=True):
            panel.text(*places[divided], name, color=color, transform=panel.transAxes, ha="right")
    scores.plot(d_ks, d_ks, d_ks, [1] * len(d_ks), color=GRAY, linewidth=1, zorder=0)
    scores.text(24, 90, "theory: $d_k$", color=GRAY, ha="right")
    scores.text(1, 0.45, "theory: 1", color=GRAY, va="center")
    carried = f"queries with {CARRIED:.0%} of the gradient"
    scores.set(yscale="log", ylim=(0.25, 8000), title="1  The scores spread", ylabel="variance of the scores")
    largest.set(ylim=(0, 1.03), title="2  Raw, one key takes all", ylabel=f"largest of {POSITIONS} weights")
    gradient.set(yscale="log", ylim=(1e-9, 8), title="3  Raw, most queries get no gradient")
    gradient.set(ylabel="norm of the softmax's Jacobian")
    carriers.set(ylim=(0, 1), title=f"4  Raw, few learn (layers of d_model {D_MODEL})", ylabel=carried)
    carriers.yaxis.set_major_formatter(PercentFormatter(1.0))
    for axes in figure.axes:
        axes.set_xlabel("$d_k$")
        _powers_of_two(axes, layer_d_ks[::2] if axes is carriers else d_ks[::2])
    over = f"Lines: medians over {SEQUENCES * POSITIONS:,} queries (4: over {LAYERS} random layers)."
    _finish(figure, f"{over} {BANDS}")
    return figure


def draw_additive(costs: list[Cost], steps: list[Step], length: int, d_k: int) -> Figure:
    """Return a figure of the time by length and by d_k, the memory by length, and the time of each step.

    Args:
        costs: Costs of both functions, for all measured sizes.
        steps: Costs of the steps, for the given length and d_k.
        length: Length of the costs that the panel over d_k shows.
        d_k: Value of d_k of the costs that the panels over the length show.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 6.0), layout="constrained")
    (time_axes, width_axes), (memory_axes, step_axes) = figure.subplots(2, 2)
    by_length = [cost for cost in costs if cost.d_k == d_k]
    by_width = sorted((cost for cost in costs if cost.length == length), key=lambda cost: cost.d_k)
    lengths, widths = [cost.length for cost in by_length], [cost.d_k for cost in by_width]
    for axes, chosen, x in ((time_axes, by_length, lengths), (width_axes, by_width, widths)):
        for name, color in (("dot_seconds", GOOD), ("additive_seconds", BAD)):
            spreads = [getattr(cost, name) for cost in chosen]
            _curve(axes, x, [Spread(*(1e3 * value for value in asdict(spread).values())) for spread in spreads], color)
        last = chosen[-1]
        for seconds, name, color in (
            (last.dot_seconds, "dot-product", GOOD),
            (last.additive_seconds, "additive", BAD),
        ):
            _end_label(axes, x[-1], 1e3 * seconds.median, name, color, above=name == "additive")
        axes.set(yscale="log", ylabel="milliseconds")
    time_axes.set(title=f"1  Time over length, $d_k$ = {d_k}", xlabel="length, of queries and of keys")
    width_axes.set(title=f"2  Time over $d_k$, length {length}", xlabel="$d_k$")
    for name, color, label in (("dot_bytes", GOOD, "dot-product"), ("additive_bytes", BAD, "additive")):
        mebibytes = [getattr(cost, name) / 2**20 for cost in by_length]
        memory_axes.plot(lengths, mebibytes, "o-", color=color, markersize=4)
        _end_label(memory_axes, lengths[-1], mebibytes[-1], label, color, above=label == "additive")
    memory_axes.set(yscale="log", title=f"3  Memory over length, $d_k$ = {d_k}", ylabel="MiB, at its peak")
    memory_axes.set(xlabel="length, of queries and of keys")
    for axes in (time_axes, width_axes, memory_axes):
        _powers_of_two(axes, widths if axes is width_axes else lengths[::2])
        axes.margins(y=0.1)
        axes.yaxis.set_major_formatter("{x:g}")
    colors = {"dot": GOOD, "additive": BAD, "both": GRAY}
    names = [step.name for step in steps]
    for place, step in enumerate(steps):
        milliseconds = 1e3 * step.seconds.median
        step_axes.barh(place, milliseconds, color=colors[step.used_by], height=0.65)
        step_axes.text(milliseconds, place, f" {milliseconds:.2g}", va="center", fontsize=8)
    step_axes.set_yticks(range(len(names)), names)
    for label, step in zip(step_axes.get_yticklabels(), steps, strict=True):
        label.set_color(colors[step.used_by])
    step_axes.invert_yaxis()
    step_axes.margins(x=0.15)
    step_axes.set(title=f"4  The steps, length {length}, $d_k$ = {d_k}", xlabel="milliseconds (gray: in both)")
    _finish(figure, f"Medians of calls made in turn, in float32; both take the same multiply-adds. {BANDS}")
    return figure


def _curve(axes: Axes, x: list[int], spreads: list[Spread], color: str) -> None:
    axes.plot(x, [spread.median for spread in spreads], "o-", color=color, markersize=4)
    low, high = [spread.low for spread in spreads], [spread.high for spread in spreads]
    axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)


def _end_label(axes: Axes, x: float, y: float, text: str, color: str, *, above: bool) -> None:
    """Label a curve at its last point."""
    place, align = ((-12, 4), "bottom") if above else ((0, -26), "top")
    axes.annotate(text, (x, y), place, textcoords="offset points", color=color, ha="right", va=align)


def _powers_of_two(axes: Axes, ticks: list[int]) -> None:
    """Use a logarithmic x axis with base 2 and the given ticks."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.minorticks_off()


def _finish(figure: Figure, note: str) -> None:
    """Align the titles of all panels to the left, and add a note below the panels."""
    for axes in figure.axes:
        axes.title.set_horizontalalignment("left")
        axes.title.set_x(0)
    figure.supxlabel(note, fontsize=8, color=GRAY)
