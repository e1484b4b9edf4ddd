"""``parity checkpoint``: the folder of a run on several devices becomes one file, and a file such a folder."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any

from transformer_parity.cli.options import check_installed
from transformer_parity.engine.system.environment import quiet_frameworks
from transformer_parity.engine.system.errors import UsageError, refusals
from transformer_parity.transformer.ports.registry import PORTS
from transformer_spec.checkpoint import load_checkpoint, save_checkpoint

EXAMPLES = """\
examples:
  parity checkpoint run/step-4000 --out run/checkpoint-0004000.safetensors
  parity train --resume run/checkpoint-0004000.safetensors --backend jax --parallel fsdp=4
  parity checkpoint run/checkpoint-0004000.safetensors --backend torch --out run/step-4000

`parity train` writes one file, in which each backend can continue on any plan. A run of your own that is too large to
be gathered calls save_sharded and load_sharded of the package, in transformer_torch.parallel_checkpoint (which has
torch.distributed.checkpoint write), transformer_jax.parallel_checkpoint (Orbax) or transformer_tf.parallel_checkpoint
(tf.train.Checkpoint): the processes write one folder, and any plan of that framework reads it. Read no folder from a
stranger: that of torch has a pickle.

exit code: 0 written, 3 not written
"""
WRITTEN = {"torch": ".metadata", "tf": "tensors.index"}  # what the folder of a framework holds; JAX's has neither


def add_parser(commands: Any) -> None:
    """Describe the command and its options."""
    parser = commands.add_parser(
        "checkpoint",
        description="Turn the folder of a run on several devices into the one file that every backend reads, or a file "
        "into such a folder: weights, optimizer state, settings and progress.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "path",
        type=Path,
        metavar="PATH",
        help="a folder that save_sharded of a package wrote, or a checkpoint of any run",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="PATH", help="the file to write, or the folder if PATH is a file"
    )
    parser.add_argument("--backend", choices=["torch", "jax", "tf"], help="whose folder to write, if PATH is a file")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write a folder to one file, or a file to a folder, and return the exit code."""
    if not options.path.exists():
        raise UsageError(f"there is no file or folder {options.path}")
    if options.path.is_dir():
        if options.backend is not None:
            raise UsageError("--backend is about a file that becomes a folder: leave it out")
        return _join(options.path, options.out)
    if options.backend is None:
        raise UsageError(f"{options.path} becomes a folder: say whose, as by --backend torch")
    return _split(options.path, options.backend, options.out)


def _join(folder: Path, path: Path) -> int:
    """Write a folder to one file, and return the exit code."""
    if path.exists():
        raise UsageError(f"{path} exists already: choose another name with --out")
    backend = next((name for name, file in WRITTEN.items() if (folder / file).exists()), "jax")
    with refusals(OSError, TypeError, ValueError), quiet_frameworks():
        checkpoint = _package(backend).join_sharded(folder)
        save_checkpoint(path, checkpoint)
    print(f"{path}: step {checkpoint.state.step:,}, from a folder of {backend}")
    return 0


def _split(path: Path, backend: str, folder: Path) -> int:
    """Write a file to a folder, and return the exit code."""
    with refusals(OSError, TypeError, ValueError), quiet_frameworks():
        checkpoint = load_checkpoint(path)
        _package(backend).split_sharded(folder, checkpoint)
    print(f"{folder}: step {checkpoint.state.step:,}, for {backend}")
    return 0


def _package(backend: str) -> Any:
    """Return the functions of a package that read and write its folders."""
    check_installed([backend])
    return import_module(f"{PORTS[backend].import_package().__name__}.parallel_checkpoint")
