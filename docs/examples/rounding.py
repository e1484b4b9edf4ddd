"""Measure how training amplifies the rounding errors of a run on multiple devices and of a run with perturbed weights.

    python docs/examples/rounding.py --backend torch            a column of docs/results/devices.md
    python docs/examples/rounding.py --backend torch --whole    the same for the default model of `parity train`

The script passes all other options to `parity train`. With `--steps 2400`, the runs aren't stopped early, and they
print their accuracy. All runs train on the dates task in float64. In the perturbed run, the script replaces each weight
with the next larger float64 number after the first step. This change is as small as a single rounding error.
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

# With these settings, the model has only 89,000 parameters. The default model is about ten times larger.
SMALL = ["--set", "d_model=64", "d_ff=128", "num_encoder_layers=1", "num_decoder_layers=1", "warmup_steps=100"]
UNSEEN = ["--set", "validate_every=100000", "keep=100000"]  # skip validation and keep every checkpoint


def train(directory: Path, *options: str) -> None:
    """Run ``parity train`` with the given options, and exit if it fails."""
    if code := parity(["train", "--out", str(directory), *options]):
        sys.exit(code)


def train_moved(directory: Path, first: Path, begin: Sequence[str], go_on: Sequence[str]) -> None:
    """Run the first step, replace each weight with the next larger number, and run the remaining steps.

    Args:
        directory: Output directory for the remaining steps.
        first: Output directory for the first step.
        begin: Options of ``parity train`` for the first step.
        go_on: Options of ``parity train`` for the remaining steps.
    """
    train(first, *begin, "--stop-at", "1")
    (path,) = checkpoints(first)
    begun = ref.load_checkpoint(path)
    weights = {name: np.nextafter(array, np.inf) for name, array in begun.weights.items()}
    ref.save_checkpoint(path, replace(begun, weights=weights))
    train(directory, "--resume", str(first), *go_on)


def distances(run: Path, other: Path) -> Iterator[tuple[int, float]]:
    """Yield each saved step and the largest relative difference between the weights of two runs after this step."""
    for path in checkpoints(run):
        weights, others = (ref.load_weights(directory / path.name)[1] for directory in (run, other))
        apart = (np.abs(others[name] - array).max() / np.abs(array).max() for name, array in weights.items())
        yield step_of(path), max(apart)


def compare(
    backend: str, devices: Sequence[str], steps: int, every: int, directory: Path, options: Sequence[str]
) -> list[tuple]:
    """Return each saved step, and how far the parallel and the perturbed run are from the run on one device."""
    go_on = ["--backend", backend, "--set", f"save_every={every}", "--stop-at", str(steps), *UNSEEN]
    begin = ["--task", "dates", "--dtype", "float64", *options]
    train(directory / "one", *begin, *go_on)
    train(directory / "several", *begin, *go_on, *devices)
    train_moved(directory / "moved", directory / "first", [*begin, *go_on[:4]], go_on)
    found = [dict(distances(directory / "one", directory / other)) for other in ("several", "moved")]
    return [(step, *(each[step] for each in found)) for step in found[0]]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=PORTS, default="numpy")
    parser.add_argument("--parallel", default="data=4", metavar="PLAN")
    parser.add_argument("--processes", metavar="N", help="number of processes that share the devices")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--every", type=int, default=100, metavar="N")
    parser.add_argument("--whole", action="store_true", help="train the default model of `parity train`")
    options, others = parser.parse_known_args()
    devices = ["--parallel", options.parallel]
    devices += ["--processes", options.processes] if options.processes else []
    others = others if options.whole else [*SMALL, *others]
    with TemporaryDirectory() as directory:
        found = compare(options.backend, devices, options.steps, options.every, Path(directory), others)
    print(f"| step | {options.parallel} | perturbed |\n|---:|---:|---:|")
    for step, several, moved in found:
        print(f"| {step:,} | {several:.0e} | {moved:.0e} |")


if __name__ == "__main__":
    main()
