"""Tables generated from benchmarks/*/*.json: percentages of the peak, ratios, and goals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from panes import ROOT
from results import IMPLEMENTATIONS, MACHINES, PORTS, RESULTS, read

TASKS = ("forward", "train", "decode")
SIZES = ("small", "base")
ALONE = "forward-alone"  # benchmark of one sentence of 8 tokens, at tiny size
PEERS = {
    "numpy": ("its matmuls", ("matmuls",)),
    "torch": ("best PyTorch alternative", ("torch.nn", "torch.nn compiled", "marian")),
    "jax": ("Flax NNX", ("flax nnx",)),
    "tf": ("best KerasHub mode", ("keras hub", "keras hub XLA")),
}
FORMS = {port: (port, f"{port} compiled") for port in ("torch", "tf")}  # comparisons use the fastest of these modes


class Versus(NamedTuple):
    """The fastest mode of a package and the fastest alternative: their names and the ratio of their times."""

    own: str
    peer: str
    ratio: dict[str, float]


class Aim(NamedTuple):
    """A performance goal: its description, the target value, the measured value, and whether the goal is met."""

    what: str
    goal: str
    found: str
    is_met: bool | None  # None if nothing was measured


def race(name: str, machine: str) -> dict[str, Any]:
    """Return the results of a benchmark on one of the ``MACHINES``, whose ``implementations`` are a dict by name."""
    (found,) = read(ROOT / "benchmarks" / machine / f"{name}.json")["result"]["races"]
    return {**found, "implementations": {one["name"]: one for one in found["implementations"]}}


def own_race(task: str, machine: str, port: str) -> dict[str, Any]:
    """Return the base-size benchmark of a task with all modes of a package or, if it doesn't exist, the shared one."""
    name = f"{task}-base-{port}"
    return race(name if (ROOT / "benchmarks" / machine / f"{name}.json").exists() else f"{task}-base", machine)


def fraction_of_peak(found: dict[str, Any], name: str) -> float | None:
    """Return the time at the machine's peak divided by the median time, or None if one of the times is unknown."""
    seconds = found["implementations"].get(name, {}).get("median_seconds")
    peak = found.get("peak")
    return peak["seconds"] / seconds if peak and seconds else None


def fractions_of_peak() -> Iterator[str]:
    """Yield the lines of one Markdown table per processor, with the percentage of the peak for each task and size."""
    for machine, title in MACHINES.items():
        columns = {f"{task}, {size}": race(f"{task}-{size}", machine) for task in TASKS for size in SIZES}
        yield f"| {title} | {' | '.join(columns)} |"
        yield "|---|" + "---:|" * len(columns)
        for name, called in IMPLEMENTATIONS.items():
            cells = [percent(fraction_of_peak(found, name)) for found in columns.values()]
            if any(cells):
                yield f"| {called} | {' | '.join(cells)} |"
        peaks = [found.get("peak") for found in columns.values()]
        cells = [
            f"{peak['rate'] / 1e9:,.0f} GFLOP/s, {peak['bandwidth'] / 1e9:,.0f} GB/s" if peak else "" for peak in peaks
        ]
        yield f"| peak | {' | '.join(cells)} |"
        yield ""


def percent(part: float | None) -> str:
    """Return a fraction as a percentage."""
    return "" if part is None else f"{part:.0%}"


def best_of(found: dict[str, Any], names: Iterable[str]) -> str | None:
    """Return the implementation with the lowest median time, or None if none has a time."""
    times = {name: found["implementations"].get(name, {}).get("median_seconds") for name in names}
    return min((name for name in times if times[name]), key=times.__getitem__, default=None)


def best_form(found: dict[str, Any], port: str) -> str | None:
    """Return the mode of a package with the lowest median time, or None if none has a time."""
    return best_of(found, FORMS.get(port, (port,)))


def against_peer(found: dict[str, Any], name: str) -> Versus | None:
    """Compare the fastest mode of a package with the fastest alternative, or return None if either has no time."""
    own, peer = best_form(found, name), best_of(found, PEERS[name][1])
    return Versus(own, peer, found["ratios"][own][peer]) if own and peer else None


def against_fastest(found: dict[str, Any]) -> dict[str, dict[str, float] | None]:
    """Return the ratio of each port's time to the time of the fastest port.

    A port is the fastest if its median ratios to the other ports are below 1. For this port, the function returns None.
    """
    forms = {port: best_form(found, port) for port in PORTS}
    ratios = {port: {other: found["ratios"][own].get(forms[other]) for other in PORTS} for port, own in forms.items()}
    (first,) = (port for port in PORTS if all(one["median"] < 1 for one in ratios[port].values() if one))
    return {port: ratios[port][first] for port in PORTS}


def compared(task: str) -> Iterator[str]:
    """Yield the lines of Markdown tables that compare each package with its alternatives and with the fastest port."""
    for machine, title in MACHINES.items():
        races = [race(f"{task}-{size}", machine) for size in SIZES]
        yield f"| {task}, {title} | {' | '.join(SIZES)} |"
        yield "|---|" + "---|" * len(SIZES)
        for name, (peer, _) in PEERS.items():
            package = "reference_numpy" if name == "numpy" else f"transformer_{name}"
            cells = [said(against_peer(found, name), name) for found in races]
            yield f"| {package} / {peer} | {' | '.join(cells)} |"
        columns = [against_fastest(found) for found in races]
        for port in PORTS:
            cells = [spread(column[port], "the fastest") for column in columns]
            yield f"| transformer_{port} / fastest port | {' | '.join(cells)} |"
        yield ""


def spread(ratio: dict[str, float] | None, without: str) -> str:
    """Return a table cell with the median, minimum, and maximum of a ratio, or ``without`` if there is no ratio."""
    return f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})" if ratio else without


def said(versus: Versus | None, name: str) -> str:
    """Return a table cell with the ratio to the best alternative and, if there are several, the compared names."""
    if versus is None:
        return ""
    names = f", {versus.own} / {versus.peer}" if len(PEERS[name][1]) > 1 else ""
    return f"{spread(versus.ratio, '')}{names}"


def aims(machine: str) -> Iterator[Aim]:
    """Yield all goals for a machine, for base size unless the description of a goal specifies a different size."""
    races = {task: race(f"{task}-base", machine) for task in TASKS}
    below, above = dict(zip(TASKS, (0.60, 0.85, 0.40), strict=True)), dict(zip(TASKS, (0.97, 0.92, 0.60), strict=True))
    for task in races:
        found = own_race(task, machine, "torch")
        versus = against_peer(found, "torch")
        part = fraction_of_peak(found, versus.peer) if versus else None
        if part is None:
            yield Aim(f"torch / best PyTorch alternative, {task}", f"{below[task]:.2f} or {above[task]:.2f}", "", None)
        else:
            goal = below[task] if part < 0.6 else above[task]
            yield at_most(
                f"torch / best PyTorch alternative, {task} (which reaches {percent(part)} of the peak)",
                goal,
                versus,
                "torch",
            )
    for name, goals in (("jax", (0.80, 0.75, 0.85)), ("tf", (0.97, 0.95, 0.75)), ("numpy", (1.15, 1.7, 1.15))):
        for task, goal in zip(races, goals, strict=True):
            versus = against_peer(own_race(task, machine, name), name)
            yield at_most(f"{name} / {PEERS[name][0]}, {task}", goal, versus, name)
    for task, every, best in (("forward", 0.85, 0.95), ("train", 0.65, 0.80)):
        forms = [best_form(races[task], port) for port in PORTS]
        parts = {form: fraction_of_peak(races[task], form) for form in forms if form}
        listed = ", ".join(f"{form} {percent(part)}" for form, part in parts.items() if part)
        known = [part for part in parts.values() if part]
        whole = f"{percent(every)} for every port, {percent(best)} for the best port"
        is_met = min(known) >= every and max(known) >= best if len(known) == len(PORTS) else None
        yield Aim(f"percentage of the peak, {task}", whole, listed, is_met)
    alone = race(ALONE, machine)
    for port in PORTS:
        what = f"{port} / {PEERS[port][0]}, forward, tiny size, one sentence of 8 tokens"
        yield at_most(what, 1.0, against_peer(alone, port), port)


def kept() -> Iterator[str]:
    """Yield the lines of a Markdown table of the median times, by default and if glibc keeps freed memory."""
    races = [race(f"{task}-base{kind}", "amd") for task in ("forward", "train") for kind in ("", "-kept")]
    yield f"| {MACHINES['amd']}, base, ms | forward | with memory kept | training step | with memory kept |"
    yield "|---|" + "---:|" * len(races)
    for name, title in IMPLEMENTATIONS.items():
        times = [found["implementations"].get(name, {}).get("median_seconds") for found in races]
        if any(times):
            yield f"| {title} | {' | '.join(f'{1000 * seconds:,.0f}' if seconds else '' for seconds in times)} |"
    rates = [f"{found['peak']['rate'] / 1e9:,.0f} GFLOP/s" for found in races]
    yield f"| matmul throughput | {' | '.join(rates)} |"


def translated() -> Iterator[str]:
    """Yield the lines of a Markdown table of the number of sentences that each implementation translates per second."""
    searches = {"greedy": "translate-base-greedy", "beam size 4": "translate-base-beam4"}
    reports = {search: read(ROOT / "benchmarks" / "amd" / f"{name}.json") for search, name in searches.items()}
    rates = [{one["name"]: one["sentences_per_second"] for one in found["translators"]} for found in reports.values()]
    yield f"| {MACHINES['amd']}, base, sentences/s | {' | '.join(searches)} |"
    yield "|---|" + "---:|" * len(searches)
    for name in rates[0]:
        cells = (f"{rate[name]:,.1f}" if name in rate else "" for rate in rates)
        yield f"| {IMPLEMENTATIONS.get(name, name.replace('ctranslate2', 'CTranslate2'))} | {' | '.join(cells)} |"


def at_most(what: str, goal: float, versus: Versus | None, name: str) -> Aim:
    """Return the goal that the ratio of a package to its best alternative is at most a given value."""
    is_met = versus.ratio["median"] <= goal if versus else None
    return Aim(what, f"{goal:.2f}", said(versus, name), is_met)


def goals() -> Iterator[str]:
    """Yield the lines of one Markdown table per processor, with all goals and whether they are met."""
    words = {True: "yes", False: "no", None: "not measured"}
    for machine in MACHINES:
        found = read(ROOT / "benchmarks" / machine / "forward-base.json")
        yield f"| on {found['machine']['processor']}, threads: {found['result']['threads']} | goal | measured | met |"
        yield "|---|---|---|---|"
        yield from (f"| {aim.what} | {aim.goal} | {aim.found} | {words[aim.is_met]} |" for aim in aims(machine))
        yield ""
    report = read(RESULTS / "conformance.json")
    seconds, where = report["time"]["seconds"], report["machine"].get("processor", "")
    yield f"| `parity check`{f', on {where}' * bool(where)} | goal | measured | met |"
    yield "|---|---|---|---|"
    shown = "duration of [the last full check](conformance.md), first run without a compilation cache"
    yield f"| {shown} | 120 s | {seconds:.0f} s | {words[seconds <= 120]} |"


if __name__ == "__main__":
    print("\n".join(goals()))
