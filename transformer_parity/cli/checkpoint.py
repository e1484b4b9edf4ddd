"""``parity checkpoint``: convert between sharded checkpoints (directories) and single-file checkpoints."""

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

`parity train` writes single-file checkpoints, from which every backend can resume with any parallelism plan. If your
own training script trains a model that is too large for one process, use save_sharded and load_sharded instead. All
processes write to one directory, which the same framework can load with any plan. The functions are in:
  transformer_torch.parallel_checkpoint (uses torch.distributed.checkpoint)
  transformer_jax.parallel_checkpoint (uses Orbax)
  transformer_tf.parallel_checkpoint (uses tf.train.Checkpoint)
Do not load sharded checkpoints from untrusted sources, because torch stores a pickle in them.

exit code: 0 written, 3 not written
"""
# A file that identifies the framework of a sharded checkpoint. JAX writes neither of these files.
WRITTEN = {"torch": ".metadata", "tf": "tensors.index"}


def add_parser(commands: Any) -> None:
    """Add the command and its options to the parser."""
    parser = commands.add_parser(
        "checkpoint",
        description="Convert a sharded checkpoint, which is a directory, to a single file that every backend can load, "
        "or convert such a file to a sharded checkpoint. A checkpoint contains the weights, the optimizer state, the "
        "settings, and the training progress.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "path",
        type=Path,
        metavar="PATH",
        help="convert this checkpoint: a directory written by save_sharded, or a file written by `parity train`",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="PATH",
        help="write the result here: a file if the input is a directory, or a directory if the input is a file",
    )
    parser.add_argument(
        "--backend",
        choices=["torch", "jax", "tf"],
        help="write a sharded checkpoint for this framework (required if the input is a file)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Convert a directory to a file, or a file to a directory, and return the exit code."""
    if not options.path.exists():
        raise UsageError(f"no such file or directory: {options.path}")
    if options.path.is_dir():
        if options.backend is not None:
            raise UsageError(
                f"--backend requires PATH to be a file, but {options.path} is a directory; remove --backend"
            )
        return _join(options.path, options.out)
    if options.backend is None:
        raise UsageError(
            f"{options.path} is a file; specify the framework of the sharded checkpoint to write, such as "
            "--backend torch"
        )
    return _split(options.path, options.backend, options.out)


def _join(directory: Path, path: Path) -> int:
    """Convert a sharded checkpoint to one file, and return the exit code."""
    if path.exists():
        raise UsageError(f"{path} already exists; choose a different name with --out")
    backend = next((name for name, file in WRITTEN.items() if (directory / file).exists()), "jax")
    with refusals(OSError, TypeError, ValueError), quiet_frameworks():
        checkpoint = _package(backend).join_sharded(directory)
        save_checkpoint(path, checkpoint)
    print(f"{path}: step {checkpoint.state.step:,}, converted from a sharded {backend} checkpoint")
    return 0


def _split(path: Path, backend: str, directory: Path) -> int:
    """Convert a file to a sharded checkpoint, and return the exit code."""
    with refusals(OSError, TypeError, ValueError), quiet_frameworks():
        checkpoint = load_checkpoint(path)
        _package(backend).split_sharded(directory, checkpoint)
    print(f"{directory}: step {checkpoint.state.step:,}, as a sharded {backend} checkpoint")
    return 0


def _package(backend: str) -> Any:
    """Return the module of a package that reads and writes sharded checkpoints."""
    check_installed([backend])
    return import_module(f"{PORTS[backend].import_package().__name__}.parallel_checkpoint")
