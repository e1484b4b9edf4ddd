"""Run the measurements for docs/why.md, and print tables and conclusions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from measurements import (
    CARRIED,
    D_MODEL,
    LAYERS,
    POSITIONS,
    SEQUENCES,
    Cost,
    LayerGradient,
    Saturation,
    Step,
    measure_cost,
    measure_layer,
    measure_saturation,
    measure_steps,
)
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

D_KS = [2**n for n in range(13)]  # 1 ... 4096
LAYER_D_KS = [2**n for n in range(3, 10)]  # 8 ... 512: the heads together have d_model = 512
PAPER_D_K = 64
LENGTHS = [2**n for n in range(4, 11)]  # 16 ... 1024, with the paper's d_k
COST_D_KS = [1, 4, 16, 64, 256]
COST_LENGTH = 512  # length for the measurements over d_k and of the steps


def threads() -> str:
    """Return a description of the number of threads that NumPy's matmuls use."""
    import reference_numpy

    return reference_numpy.describe()["threads"]


def _in_turn(title: str, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run the tasks one after another, with a progress bar if standard error is a terminal."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        return [task() for task in progress.track(tasks, description=title)]


# Why divide by sqrt(d_k)?


def measure_sqrt_dk() -> dict[str, list[Any]]:
    """Return measurements of the softmax for all values in ``D_KS``, and of a layer for those in ``LAYER_D_KS``."""
    both = (False, True)
    softmax: list[Callable[[], Any]] = [
        partial(measure_saturation, d_k, divided=divided) for d_k in D_KS for divided in both
    ]
    layer: list[Callable[[], Any]] = [
        partial(measure_layer, d_k, divided=divided) for d_k in LAYER_D_KS for divided in both
    ]
    found = _in_turn("random queries, keys and layers", [*softmax, *layer])
    return {"softmax": found[: len(softmax)], "layer": found[len(softmax) :]}


def show_sqrt_dk(console: Console, softmax: list[Saturation], layer: list[LayerGradient]) -> None:
    """Print two tables and a conclusion."""
    scores = "variance", "largest\nweight", "gradient\nmedian"
    table = _table(
        f"Softmax over {POSITIONS} keys, of raw scores and of scores divided by sqrt(d_k)",
        *("d_k", *(f"raw\n{name}" for name in scores), "lowest\ntenth", *(f"divided\n{name}" for name in scores)),
    )
    for raw, divided in _pairs(softmax):
        left, right = (
            (f"{entry.variance:,.1f}", f"{entry.largest.median:.3f}", f"{entry.gradient.median:.2g}")
            for entry in (raw, divided)
        )
        table.add_row(f"{raw.d_k:,}", *left, f"{raw.gradient.low:.1g}", *right)
    console.print(table)
    console.print(
        f"Measured with {SEQUENCES * POSITIONS:,} queries. Gradient: the norm of the softmax's Jacobian, which is "
        f"{uniform_gain():.2f} if all keys have the same weight.\n",
        style="dim",
    )
    measures = "part of\nqueries", "query\nkernel", "key\nkernel"
    table = _table(
        f"A random gradient, back through multi-head attention, d_model {D_MODEL}",
        *("d_k", "heads", *(f"{side}\n{measure}" for side in ("raw", "divided") for measure in measures)),
    )
    for pair in _pairs(layer):
        cells = [
            (f"{entry.carriers.median:.0%}", f"{entry.query_kernel.median:.1f}", f"{entry.key_kernel.median:.1f}")
            for entry in pair
        ]
        table.add_row(f"{pair[0].d_k:,}", f"{pair[0].num_heads}", *cells[0], *cells[1])
    console.print(table)
    console.print(
        f"Part of queries: the queries that together carry {CARRIED:.0%} of the squared gradient. Kernels: the "
        f"norm of the gradient with respect to them. Medians of {LAYERS} layers.\n",
        style="dim",
    )
    console.print(conclude_sqrt_dk(softmax, layer) + "\n")


def uniform_gain() -> float:
    """Return the norm of the softmax's Jacobian if all keys have the same weight."""
    return math.sqrt(POSITIONS - 1) / POSITIONS


def conclude_sqrt_dk(softmax: list[Saturation], layer: list[LayerGradient]) -> str:
    """Return a conclusion from the measured numbers."""
    (first, _), *_, (raw, _) = _pairs(softmax)
    kept = [entry.gradient.median for entry in softmax if entry.divided]
    *_, (raw_layer, divided_layer) = _pairs(layer)
    louder = raw_layer.query_kernel.median / divided_layer.query_kernel.median
    return (
        f"Without the division, the variance of the scores is d_k. The largest of {POSITIONS} weights grows from "
        f"{first.largest.median:.2f} to {raw.largest.median:.2f}, and the gradient that passes through the softmax of "
        f"the median query falls from {first.gradient.median:.2f} at d_k = {first.d_k} to "
        f"{raw.gradient.median:.0e} at {raw.d_k:,}; divided by sqrt(d_k), it stays between {min(kept):.2f} and "
        f"{max(kept):.2f}. In a complete layer, the division changes the number of queries that learn and not the "
        f"size of the gradient: at d_k = {raw_layer.d_k}, {raw_layer.carriers.median:.0%} of the queries carry "
        f"{CARRIED:.0%} of the squared gradient (divided: {divided_layer.carriers.median:.0%}), although the norm at "
        f"the query kernel is larger by a factor of {louder:.0f}."
    )


# Why dot products, and not additive attention?


def measure_additive() -> dict[str, list[Any]]:
    """Return measurements of both functions for several lengths and values of d_k, and of their steps for one size."""
    sizes = [(length, PAPER_D_K) for length in LENGTHS]
    sizes += [(COST_LENGTH, d_k) for d_k in COST_D_KS if d_k != PAPER_D_K]
    tasks: list[Callable[[], Any]] = [
        *(partial(measure_cost, *size) for size in sizes),
        partial(measure_steps, COST_LENGTH, PAPER_D_K),
    ]
    *costs, steps = _in_turn("both kinds of attention, in turn", tasks)
    return {"costs": costs, "steps": steps}


def show_additive(console: Console, costs: list[Cost], steps: list[Step]) -> None:
    """Print two tables and a conclusion."""
    table = _table(
        f"One head, d_model {D_MODEL}, float32, threads: {threads()}",
        *("length", "d_k", "million\nmult-adds", "opera-\ntions", "dot\nms", "additive\nms"),
        *("additive / dot\n(10%, 90%)", "memory\nMiB"),
    )
    for cost in costs:
        limits = cost.ratio.low, cost.ratio.high
        table.add_row(
            f"{cost.length:,}",
            f"{cost.d_k}",
            f"{cost.multiply_adds / 1e6:,.1f}",
            f"x {operations_ratio(cost):.2f}",
            f"{1e3 * cost.dot_seconds.median:.3g}",
            f"{1e3 * cost.additive_seconds.median:.3g}",
            Text.assemble((f"{cost.ratio.median:.1f}", "bold"), f" ({', '.join(map(_digits, limits))})"),
            f"{_digits(cost.additive_bytes / 2**20)} (x {cost.additive_bytes / cost.dot_bytes:.0f})",
        )
    console.print(table)
    console.print(
        "Mult-adds: multiply-adds, the same for both, 2 L d_model d_k + L^2 (d_k + d_v). Operations: the ratio of "
        "additive to dot-product attention, including L^2 d_k additions and tanh calls. Additive / dot: the ratio of "
        "the times in the median round, and its 10th and 90th percentiles. Memory: the peak of additive attention, "
        "and its ratio to dot-product attention. Times are the processor time of the calling thread. If matmuls use "
        "several threads, other programs can slow them down; OMP_NUM_THREADS=1 limits them to one thread.\n",
        style="dim",
    )
    table = _table(
        f"The steps at length {COST_LENGTH} and d_k {PAPER_D_K}",
        *("step", "of", "ms", "operations\nper byte", "billion\noperations/s", "GB/s"),
    )
    for step in steps:
        table.add_row(
            step.name,
            step.used_by,
            f"{1e3 * step.seconds.median:.3g}",
            *map(_digits, (intensity(step), rate(step), step.bytes_moved / step.seconds.median / 1e9)),
        )
    console.print(table)
    console.print("\n" + conclude_additive(costs, steps) + "\n")


def operations_ratio(cost: Cost) -> float:
    """Return the ratio of additive to dot-product operations. A multiply-add is two operations, and a tanh is one."""
    return 1 + cost.extra / cost.multiply_adds


def intensity(step: Step) -> float:
    """Return the number of operations per byte moved."""
    return step.operations / step.bytes_moved


def rate(step: Step) -> float:
    """Return the number of operations per nanosecond."""
    return step.operations / step.seconds.median / 1e9


def conclude_additive(costs: list[Cost], steps: list[Step]) -> str:
    """Return a conclusion from the measured numbers."""
    cost = next(cost for cost in costs if (cost.length, cost.d_k) == (COST_LENGTH, PAPER_D_K))
    product = next(step for step in steps if step.used_by == "dot")
    additive = [step for step in steps if step.used_by == "additive"]
    without_tanh = sum(step.seconds.median for step in additive if step.name != "tanh") / product.seconds.median
    return (
        f"With d_k = {PAPER_D_K} and {COST_LENGTH} positions, both functions require "
        f"{cost.multiply_adds / 1e6:.0f} million multiply-adds. Including additions and tanh calls, additive attention "
        f"performs {operations_ratio(cost):.2f} times the operations of dot-product attention, but it is slower by a "
        f"factor of {cost.ratio.median:.0f} and uses {cost.additive_bytes / cost.dot_bytes:.0f} times the memory. To "
        f"compute the scores, it writes d_k numbers for every pair of positions and reads them again. It performs "
        f"{_range(map(intensity, additive))} operations per byte moved and {_range(map(rate, additive))} billion "
        f"operations per second; the matmul performs {intensity(product):.0f} per byte and {rate(product):.0f} billion "
        f"per second. Even without tanh, computing the additive scores would be slower than the matmul by a factor of "
        f"{without_tanh:.0f}."
    )


def _table(title: str, *headings: str) -> Table:
    """Return an empty table. All columns except the names are right-aligned."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("step", "of") else "right", no_wrap=True)
    return table


def _pairs(entries: list[Any]) -> list[tuple[Any, Any]]:
    """Return pairs of measurements, without and with the division."""
    return list(zip(entries[::2], entries[1::2], strict=True))


def _range(values: Iterable[float]) -> str:
    values = list(values)
    return f"{_digits(min(values), 1)} to {_digits(max(values), 1)}"


def _digits(value: float, digits: int = 2) -> str:
    """Format a value without an exponent, with this number of digits or all digits before the decimal point."""
    return f"{value:,.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"
