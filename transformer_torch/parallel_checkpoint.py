"""Checkpoints of large runs: a folder into which each process writes its parts, by ``torch.distributed.checkpoint``.

A folder is read by any number of processes on any plan. It has the tensors under the names and in the shapes of
``state_dict()``, those of moments with a prefix, and all else that a checkpoint holds in ``run.safetensors``. All
processes of a run see the same folder. Read none from a stranger: what describes its tensors is a pickle.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from transformer_spec.checkpoint import Checkpoint, checkpoint_tensors, describe_run
from transformer_spec.checkpoint_folder import PREFIXES, begin_folder, check_held, partial_folder, read_run
from transformer_spec.files import VocabularyFiles
from transformer_torch.runtime import dtype_name
from transformer_torch.training import Trainer
from transformer_torch.weights import copy_in, copy_out, parameters, torch_path


def save_sharded(
    folder: str | Path,
    trainer: Trainer,
    progress: Mapping[str, Any] | None = None,
    vocabulary: bytes | VocabularyFiles | None = None,
) -> None:
    """Write a training run to a new folder, which has its name once it is complete. All processes call it.

    Args:
        folder: The folder to make.
        trainer: Has weights, moments and settings.
        progress: As in ``Checkpoint``.
        vocabulary: As in ``Checkpoint``.

    Raises:
        FileExistsError: There is something of that name.
        OSError: A file cannot be written.
    """
    model: Any = trainer.model
    description = describe_run(model.config, trainer.settings, trainer, dict(progress or {}))
    _write(Path(folder), _tensors(trainer), description, vocabulary)


def load_sharded(folder: str | Path, trainer: Trainer) -> dict[str, Any]:
    """Let a trainer go on from a folder, whatever plan wrote it, and return the progress. All processes call it.

    Each process reads its own parts. After an error while it reads, the trainer is of no use any more.

    Raises:
        OSError: A file cannot be read.
        ValueError: The folder holds no training run, or one of another model or in another dtype.
    """
    folder = Path(folder)
    training, tensors = read_run(folder).training, _tensors(trainer)
    check_held(folder, _held(folder), {name: (tuple(x.shape), dtype_name(x)) for name, x in tensors.items()})
    _load(folder, tensors)
    trainer.step, trainer.seed = training["step"], training["seed"]
    for state in trainer.optimizer.state.values():
        state["step"].fill_(trainer.step)
    return training["progress"]


def join_sharded(folder: str | Path) -> Checkpoint:
    """Return the contents of a folder as a checkpoint, which can be one file. One process does.

    Raises:
        OSError: A file cannot be read.
        ValueError: The folder holds no training run.
    """
    folder = Path(folder)
    run, held = read_run(folder), _held(folder)
    tensors = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in held.items()}
    _load(folder, tensors)
    return run.joined({name: copy_out(name, tensors[path]) for name in run.names if (path := torch_path(name)) in held})


def split_sharded(folder: str | Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint to a new folder, for a run of several processes. One process does.

    Raises:
        TypeError: A tensor is not of a floating-point dtype.
        ValueError: Weights or moments are not those of the config.
        FileExistsError: There is something of that name.
        OSError: A file cannot be written.
    """
    tensors = {}
    for name, array in checkpoint_tensors(checkpoint).items():
        shape = array.T.shape if name.endswith("kernel") else array.shape
        tensor = tensors[torch_path(name)] = torch.empty(shape, dtype=getattr(torch, array.dtype.name))
        copy_in(name, array, tensor)
    description = describe_run(checkpoint.config, checkpoint.settings, checkpoint.state, checkpoint.progress)
    _write(Path(folder), tensors, description, checkpoint.vocabulary)


def _tensors(trainer):
    """Return all tensors of a run by name, divided as they are: what is read into them is the trainer's."""
    found: dict[str, Tensor] = {}
    for name, parameter in parameters(trainer.model).items():
        state = trainer.optimizer.moments(parameter, trainer.step)
        tensors = parameter.detach(), state["exp_avg"], state["exp_avg_sq"]
        found |= {torch_path(prefix + name): tensor for prefix, tensor in zip(PREFIXES, tensors, strict=True)}
    return found


def _write(folder, tensors, description, vocabulary):
    """Write a folder under another name, and rename it."""
    import torch.distributed.checkpoint as dcp

    _by_the_first(lambda: begin_folder(folder, description, vocabulary))
    with _reported(f"cannot write {folder}"):
        dcp.save(tensors, checkpoint_id=partial_folder(folder))
    _by_the_first(lambda: os.replace(partial_folder(folder), folder))


def _load(folder, tensors):
    """Read tensors in place, of each the part that this process holds."""
    import torch.distributed.checkpoint as dcp

    with _reported(f"cannot read {folder}"):
        dcp.load(tensors, checkpoint_id=folder)


def _held(folder):
    """Return shape and dtype of each tensor of a folder."""
    from torch.distributed.checkpoint import FileSystemReader

    held: dict[str, Any] = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {name: (tuple(entry.size), dtype_name(entry.properties)) for name, entry in held.items()}


def _by_the_first(action: Callable[[], None]) -> None:
    """Let the first process do something; all raise what it raises."""
    failed: list[Exception | None] = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            action()
        except (OSError, TypeError, ValueError) as error:
            failed = [error]
    if dist.is_initialized():
        dist.broadcast_object_list(failed)
    if failed[0] is not None:
        raise failed[0]


@contextmanager
def _reported(what):
    """Raise what any process met, in all of them, and let a single one not be warned that it is alone."""
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            rank, (first, _) = min(error.failures.items())
            raise OSError(f"{what}: process {rank}: {first}") from error
