"""The output of ``parity bench``: tables, notes, a description of the machine, and results for JSON."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from transformer_bench.costs import HELD, Batch, held, sent
from transformer_bench.measurements import (
    FITTED,
    Entry,
    Spread,
    at_sizes,
    exponents,
    fastest,
    median_seconds,
    ratio,
    verdict,
    work_bytes,
)
from transformer_bench.peak import Peak
from transformer_bench.workload import Work
from transformer_parity.engine.report.tables import STYLES, print_line
from transformer_parity.engine.system.machine import describe_machine
from transformer_parity.engine.verdict import WORDS
from transformer_spec.parallel_plan import AXES, Plan

BUSY = 0.5  # print a note if the load average before the benchmark is higher than this value
SPARE = 0.1  # print a note if the number of busy cores exceeds the number of requested threads by more than this value
MEBI = 2**20

Machine = Mapping[str, Any]


def print_times(console: Console, work: Work, entries: Sequence[Entry], threads: int, peak: Peak | None) -> None:
    """Print the times, from fastest to slowest, and the verdicts of the implementations that have no times."""
    console.print(work.title, style="bold")
    console.print(f"{work.details}; threads: {threads}")
    against = fastest(entries)
    name = against.name if against else ""
    times = table("median\nms", "lowest to\nhighest", "tokens/s\n", f"times\n{name}", "lowest to\nhighest")
    process = table("GFLOP/s", "of the\npeak", "cores", "first\ncall s", "memory\nMiB", "increase\nMiB")
    timed = [entry for entry in entries if entry.is_timed]
    for entry in sorted(timed, key=lambda entry: (not entry.has_result, Spread.of(entry.seconds).median)):
        for each, cells in (
            (times, _time_cells(work, entry, against)),
            (process, _process_cells(work, entry, peak)),
        ):
            if not entry.has_result:
                each.add_section()
            each.add_row(entry.name, *cells)
    for entry in entries:
        if not entry.is_timed:
            times.add_row(entry.name, Text(WORDS[entry.verdict], STYLES[entry.verdict]))
    console.print(times)
    if timed:
        console.print(process)
    print_remarks(console, work, entries, threads)
    print_peak(console, work, peak)


def table(*headings: str) -> Table:
    """Return an empty table with a column for names and a column for each of the given headings."""
    empty = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    empty.add_column("", no_wrap=True)
    for heading in headings:
        empty.add_column(heading, justify="right", no_wrap=True)
    return empty


def _time_cells(work: Work, entry: Entry, against: Entry | None) -> list[str]:
    times = Spread.of([1e3 * seconds for seconds in entry.seconds])
    cells = [
        f"{times.median:,.1f}",
        f"{times.low:,.1f} .. {times.high:,.1f}",
        f"{1e3 * work.produced / times.median:,.0f}" if entry.has_result else "",
    ]
    if against is not None and entry is not against:
        relative = ratio(entry, against)
        cells += [f"{relative.median:.2f}", f"{relative.low:.2f} .. {relative.high:.2f}"]
    return cells


def _process_cells(work: Work, entry: Entry, peak: Peak | None) -> list[str]:
    seconds = Spread.of(entry.seconds).median
    return [
        f"{work.operations / seconds / 1e9:,.1f}",
        f"{peak.seconds(work) / seconds:.0%}" if peak else "-",
        f"{Spread.of(entry.cores).median:.1f}",
        f"{entry.first_seconds:,.1f}",
        *("-" if size is None else f"{size / MEBI:,.0f}" for size in (entry.peak_bytes, entry.work_bytes)),
    ]


def print_remarks(console: Console, work: Work, entries: Sequence[Entry], threads: int) -> None:
    """Print failures, near-ties, notes, and the criterion of agreement."""
    for entry in entries:
        if not entry.is_timed:
            print_line(console, f"{WORDS[entry.verdict]:9}", "", f" {entry.name}: {entry.problem}")
        elif entry.near_ties:
            print_line(console, "NEAR-TIE ", "", f" {entry.name}: {entry.near_ties}")
        if entry.is_timed and max(entry.cores) > threads + SPARE:
            console.print(f"NOTE      {entry.name} used {max(entry.cores):.1f} cores instead of {threads}")
    timed = [entry for entry in entries if entry.is_timed]
    agreeing = [entry.name for entry in timed if entry.has_result]
    if agreeing:
        console.print(
            f"Medians of {max(len(entry.seconds) for entry in timed)} interleaved rounds. {work.what} of every "
            f"call of {', '.join(agreeing)} {work.agreement}."
        )
    if len(agreeing) < len(timed):
        console.print("matmuls: only the matrix multiplications in NumPy, a lower bound for the time of numpy.")


def print_peak(console: Console, work: Work, peak: Peak | None) -> None:
    """Print the machine's peak throughput and bandwidth, and the matmul libraries."""
    if peak is None:
        return
    rates = ", ".join(f"{name} {rate / 1e9:,.0f}" for name, rate in peak.rates.items())
    console.print(
        f"peak: the work takes at least {1e3 * peak.seconds(work):,.1f} ms on this machine, for "
        f"{work.operations / 1e9:,.2f} GFLOP at a matmul throughput of {peak.rate / 1e9:,.0f} GFLOP/s and a memory "
        f"bandwidth of {peak.bandwidth / 1e9:,.1f} GB/s. Throughput by library in GFLOP/s: {rates}."
    )
    console.print("; ".join(f"{name}: {said}" for name, said in peak.libraries.items()), style="dim")


def print_growth(console: Console, axis: str, values: Sequence[int], results: Sequence[Sequence[Entry]]) -> None:
    """Print the median time and the memory at each size, and their growth exponents."""
    for heading, kind, measure, unit in (
        ("milliseconds", "seconds", median_seconds, 1e3),
        ("MiB of additional memory since the first call", "work_bytes", work_bytes, 1 / MEBI),
    ):
        rows = table(*(f"{value:,}" for value in values[: len(results)]), "exponent")
        for name, steepness in exponents(values, results).items():
            measured = at_sizes(name, results, measure)
            cells = ["-" if number is None else f"{unit * number:,.0f}" for number in measured]
            fitted = steepness[kind]
            rows.add_row(name, *cells, "-" if fitted is None else f"{fitted:.2f}")
        console.print(f"{heading}, by {axis}")
        console.print(rows)
    console.print(
        f"exponent: exponent of growth, a least-squares fit over the largest {FITTED} sizes (1 is linear, 2 is "
        "quadratic)."
    )


def print_costs(console: Console, work: Work, plans: Sequence[Plan]) -> None:
    """Print the number of bytes that each device in a plan stores and sends per step."""
    first, *others = HELD
    rows = table(*(f"sends\n{axis}" for axis in AXES), f"stores\n{first}", *others, "total")
    for cost in costs_for_machines(work, [Plan(), *plans]):
        sizes = [*cost["sent"].values(), *cost["held"].values(), sum(cost["held"].values())]
        name = cost["plan"] if sum(cost["sent"].values()) else "one device"
        rows.add_row(name, *(f"{size / MEBI:,.{1 if size < 100 * MEBI else 0}f}" if size else "-" for size in sizes))
    console.print(f"MiB of float32 per device in a {work.title} (computed from the plan)", style="bold")
    console.print(rows)
    console.print(
        "sends: the bytes that ring algorithms send along each axis, excluding the loss and the gradient norm. "
        "activations: a lower bound that includes only the operands of all matmuls, which the backward pass requires."
    )


def costs_for_machines(work: Work, plans: Sequence[Plan]) -> list[dict[str, Any]]:
    """Return the costs of each plan in bytes, as built-in Python types."""
    batch = Batch(work.batch, work.source, work.target)
    return [
        {"plan": str(plan), "sent": sent(plan, work.config, batch), "held": held(plan, work.config, batch)}
        for plan in plans
    ]


def print_environment(console: Console, entries: Sequence[Entry], machine: Machine) -> None:
    """Print the machine and the versions, and a note if the machine was busy before the benchmark."""
    console.print(f"{machine['processor']}, CPU cores: {machine['cpus']}")
    found = {entry.name: entry.environment["version"] for entry in entries if entry.environment}
    versions = [f"{name} {said}" for name, said in found.items() if found.get(name.rpartition(" ")[0]) != said]
    console.print("; ".join([f"Python {machine['python']}, {machine['platform']}", *versions]))
    if (machine["load_average"] or 0.0) > BUSY:
        console.print(
            f"NOTE      the machine was busy before the benchmark (load average {machine['load_average']:.1f}). This "
            "slows down libraries with synchronized threads most. Use --threads 1, or try again later."
        )


def describe(threads: int) -> dict[str, Any]:
    """Return a description of the machine, its load average, and the number of threads."""
    return {
        **describe_machine(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,  # not available on Windows
        "threads": threads,
    }


def times_for_machines(work: Work, entries: Sequence[Entry], peak: Peak | None) -> dict[str, Any]:
    """Return the results for the given workload as built-in Python types."""
    timed = [entry for entry in entries if entry.is_timed]
    return {
        "verdict": verdict(entries),
        "peak": peak.to_dict(work) if peak else None,
        "work": {**asdict(work), "title": work.title, "operations": work.operations, "produced": work.produced},
        "config": work.config.to_dict(),
        "implementations": [entry.to_dict() for entry in entries],
        "ratios": {
            entry.name: {other.name: asdict(ratio(entry, other)) for other in timed if other is not entry}
            for entry in timed
        },
    }
