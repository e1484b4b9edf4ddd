"""How far training carries rounding: a run on several devices, and one of which the first weights were moved.

    python docs/examples/rounding.py --backend torch            a column of docs/how-to/several-devices.md
    python docs/examples/rounding.py --backend torch --whole    the same for the model of `parity train`

Any other option is one of `parity train`. With `--steps 2400`, the runs end, and print what they translate right.
All train on the dates in float64. Each weight of the last run is moved, after its first step, to the next number that
float64 has: as far as one rounding does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import reference_numpy as ref
from transformer_parity.apps.train.log import checkpoints, step_of
from transformer_parity.cli.main import main as parity
from transformer_parity.transformer.ports.registry import PORTS

# A tenth of the model.
SMALL = ["--set", "d_model=64", "d_ff=128", "num_encoder_layers=1", "num_decoder_layers=1", "warmup_steps=100"]
UNSEEN = ["--set", "validate_every=100000", "keep=100000"]  # on the way


def train(folder: Path, *options: str) -> None:
    """Train by ``parity train``."""
    if code := parity(["train", "--out", str(folder), *options]):
        sys.exit(code)


def train_moved(folder: Path, first: Path, begin: Sequence[str], go_on: Sequence[str]) -> None:
    """Take one step, move each weight to the next number, and take the others.

    Args:
        folder: Where the run goes.
        first: Where its first step goes.
        begin: Options of a run.
        go_on: Those that a run which goes on takes.
    """
    train(first, *begin, "--stop-at", "1")
    (path,) = checkpoints(first)
    begun = ref.load_checkpoint(path)
    weights = {name: np.nextafter(array, np.inf) for name, array in begun.weights.items()}
    ref.save_checkpoint(path, replace(begun, weights=weights))
    train(folder, "--resume", str(first), *go_on)


def distances(run: Path, other: Path) -> Iterator[tuple[int, float]]:
    """Yield steps, and how far the weights of two runs are apart there, each tensor by its largest magnitude."""
    for path in checkpoints(run):
        weights, others = (ref.load_weights(folder / path.name)[1] for folder in (run, other))
        apart = (np.abs(others[name] - array).max() / np.abs(array).max() for name, array in weights.items())
        yield step_of(path), max(apart)


def compare(
    backend: str, devices: Sequence[str], steps: int, every: int, folder: Path, options: Sequence[str]
) -> list[tuple]:
    """Return steps, and at each how far the weights on several devices and the moved ones are from those of one."""
    go_on = ["--backend", backend, "--set", f"save_every={every}", "--stop-at", str(steps), *UNSEEN]
    begin = ["--task", "dates", "--dtype", "float64", *options]
    train(folder / "one", *begin, *go_on)
    train(folder / "several", *begin, *go_on, *devices)
    train_moved(folder / "moved", folder / "first", [*begin, *go_on[:4]], go_on)
    found = [dict(distances(folder / "one", folder / other)) for other in ("several", "moved")]
    return [(step, *(each[step] for each in found)) for step in found[0]]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=PORTS, default="numpy")
    parser.add_argument("--parallel", default="data=4", metavar="PLAN")
    parser.add_argument("--processes", metavar="N", help="that the devices of the plan are in")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--every", type=int, default=100, metavar="N")
    parser.add_argument("--whole", action="store_true", help="train the model of `parity train`")
    options, others = parser.parse_known_args()
    devices = ["--parallel", options.parallel]
    devices += ["--processes", options.processes] if options.processes else []
    others = others if options.whole else [*SMALL, *others]
    with TemporaryDirectory() as folder:
        found = compare(options.backend, devices, options.steps, options.every, Path(folder), others)
    print(f"| step | {options.parallel} | moved |\n|---:|---:|---:|")
    for step, several, moved in found:
        print(f"| {step:,} | {several:.0e} | {moved:.0e} |")


if __name__ == "__main__":
    main()
