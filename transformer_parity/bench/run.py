"""Run a benchmark: choose the participants, time them in rounds, and grow the sizes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import reference_numpy as ref
from transformer_parity.bench.matrix_products import MatrixRate, Products
from transformer_parity.bench.measurements import Entry, Spread
from transformer_parity.bench.participants import OURS, others
from transformer_parity.bench.rounds import Participant, Tell, run_rounds, started
from transformer_parity.bench.verify import verifier_of
from transformer_parity.bench.workload import DecodeWork, ForwardWork, TrainWork, Work
from transformer_parity.compare.verdict import AGREES, FAILED

Progress = Callable[[list[Entry], int], AbstractContextManager[Tell]]


def make_work(options: argparse.Namespace, task: str) -> Work:
    """Return what there is to do."""
    common = {
        "size": options.config,
        "batch": options.batch,
        "source": options.source,
        "target": options.target,
        "layers": options.layers,
        "dtype": getattr(options, "dtype", Work.dtype),
        "device": options.device,
    }
    if task == "forward":
        return ForwardWork(**common)
    if task == "decode":
        return DecodeWork(**common, beam_size=getattr(options, "beam", None))
    checkpointing = getattr(options, "activation_checkpointing", False)
    return TrainWork(**common, dropout=getattr(options, "dropout", 0.0), activation_checkpointing=checkpointing)


def grown(work: Work, axis: str, value: int) -> Work:
    """Return the same work at another size."""
    if axis == "length":
        return replace(work, source=value, target=value)
    if axis == "depth":
        return replace(work, layers=value)
    return replace(work, source=value) if axis == "source" else replace(work, batch=value)


def work_title(work: Work, axis: str) -> str:
    """Return what is done, without the size that grows."""
    sizes = {"batch": f"batch {work.batch}", "source": f"source {work.source}", "target": f"target {work.target}"}
    grown = {"length": ("source", "target"), "depth": ()}.get(axis, (axis,))
    return f"{work.task}, {work.size}: {', '.join(text for name, text in sizes.items() if name not in grown)}"


def choose_participants(work: Work, options: argparse.Namespace) -> list[Participant]:
    """Return who does some work, in the order of the rounds."""
    participants = [OURS[work.task][name] for name in options.backends]
    return [*participants, *others(work), Products()] if options.peers else participants


def time_work(
    work: Work, options: argparse.Namespace, progress: Progress, machine: dict[str, Any]
) -> tuple[list[Entry], bool]:
    """Run all participants on some work; return their entries, and whether Ctrl-C cut it short."""
    participants = choose_participants(work, options)
    entries = [Entry(participant.name, participant.has_result) for participant in participants]
    baseline = MatrixRate()
    rate_entry = Entry(baseline.name, has_result=False)
    interrupted = False
    try:
        with (
            progress(entries, options.rounds) as tell,
            started([*participants, baseline], [*entries, rate_entry], options.threads) as (processes, folder),
        ):
            # While they import: their model, and what they are to find.
            file, weights = folder / "model.safetensors", work.weights()
            ref.save_weights(file, work.config, weights)
            run_rounds(processes, work, file, options.rounds, verifier_of(work, weights).verify, tell)
    except KeyboardInterrupt:
        interrupted = True
    if rate_entry.is_timed:
        machine["matrix_rate"] = baseline.operations / Spread.of(rate_entry.seconds).median
    for entry in entries:
        if entry.verdict == AGREES and not entry.seconds:
            entry.verdict, entry.problem = FAILED, "interrupted before it was timed"
        if work.device == "gpu":  # what was measured is the memory of the host
            entry.loaded_bytes = entry.peak_bytes = None
    return entries, interrupted
