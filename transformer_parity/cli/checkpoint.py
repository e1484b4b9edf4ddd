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
  parity checkpoint join run/step-4000 --out run/checkpoint-0004000.safetensors
  parity train --resume run/checkpoint-0004000.safetensors --backend jax --parallel fsdp=4
  parity checkpoint split run/checkpoint-0004000.safetensors --backend torch --out run/step-4000

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
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    join = actions.add_parser("join", help="write the one file", description="Write what a folder holds to one file.")
    join.add_argument("folder", type=Path, metavar="FOLDER", help="what save_sharded of a package wrote")
    join.add_argument("--out", type=Path, required=True, metavar="FILE", help="the checkpoint to write")
    join.set_defaults(run=run_join)
    split = actions.add_parser(
        "split", help="write a folder", description="Write a checkpoint as a folder, which load_sharded reads."
    )
    split.add_argument("file", type=Path, metavar="FILE", help="a checkpoint of any run")
    split.add_argument("--backend", required=True, choices=["torch", "jax", "tf"], help="whose folder")
    split.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="the folder to make")
    split.set_defaults(run=run_split)


def run_join(options: argparse.Namespace) -> int:
    """Write a folder to one file, and return the exit code."""
    folder, path = options.folder, options.out
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}")
    if path.exists():
        raise UsageError(f"{path} exists already: choose another name with --out")
    backend = next((name for name, file in WRITTEN.items() if (folder / file).exists()), "jax")
    with refusals(OSError, TypeError, ValueError), quiet_frameworks():
        checkpoint = _package(backend).join_sharded(folder)
        save_checkpoint(path, checkpoint)
    print(f"{path}: step {checkpoint.state.step:,}, from a folder of {backend}")
    return 0


def run_split(options: argparse.Namespace) -> int:
    """Write a file to a folder, and return the exit code."""
    with refusals(OSError, TypeError, ValueError), quiet_frameworks():
        checkpoint = load_checkpoint(options.file)
        _package(options.backend).split_sharded(options.out, checkpoint)
    print(f"{options.out}: step {checkpoint.state.step:,}, for {options.backend}")
    return 0


def _package(backend: str) -> Any:
    """Return the functions of a package that read and write its folders."""
    check_installed([backend])
    return import_module(f"{PORTS[backend].import_package().__name__}.parallel_checkpoint")
