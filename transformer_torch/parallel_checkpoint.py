"""Checkpoints of large runs: directories to which each process writes its shards (``torch.distributed.checkpoint``).

Runs with any number of processes and any parallel plan can read the directory. It contains the weights with the names
and shapes of ``state_dict()``, and the moments under the same names with a prefix. The file ``run.safetensors``
contains the rest of the checkpoint. All processes of a run must see the same directory. Don't read directories from
untrusted sources, because the description of the tensors is a pickle.
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
from transformer_spec.checkpoint_directory import PREFIXES, begin_directory, check_held, partial_directory, read_run
from transformer_spec.files import VocabularyFiles
from transformer_torch.runtime import dtype_name
from transformer_torch.training import Trainer
from transformer_torch.weights import copy_in, copy_out, parameters, torch_path


def save_sharded(
    directory: str | Path,
    trainer: Trainer,
    progress: Mapping[str, Any] | None = None,
    vocabulary: bytes | VocabularyFiles | None = None,
) -> None:
    """Write a training run to a new directory. All processes must call this function.

    The directory gets its final name only when it is complete.

    Args:
        directory: Path of the directory, which must not exist.
        trainer: Trainer whose weights, moments, and settings are saved.
        progress: Values that the training loop needs to resume, such as the position in the data. These
            values must not change when they are converted to JSON and back. If None, an empty dict is saved.
        vocabulary: A sentencepiece model, the files of another type of vocabulary, or None.

    Raises:
        FileExistsError: If the path exists.
        OSError: If a file can't be written.
        TypeError: If the progress is not a dict.
        ValueError: If the progress changes when it is converted to JSON and back.
    """
    model: Any = trainer.model
    description = describe_run(model.config, trainer.settings, trainer, dict(progress or {}))
    _write(Path(directory), _tensors(trainer), description, vocabulary)


def load_sharded(directory: str | Path, trainer: Trainer) -> dict[str, Any]:
    """Resume a trainer from a directory and return the progress. All processes must call this function.

    The trainer's plan can differ from the plan with which the directory was written. Each process reads only its own
    shards. If an error occurs while tensors are read, don't use the trainer afterwards.

    Args:
        directory: Path of the directory.
        trainer: Trainer whose weights, moments, step, and seed are replaced.

    Raises:
        OSError: If a file can't be read.
        ValueError: If the directory contains no training run, or a run with a different model or dtype.
    """
    directory = Path(directory)
    training, tensors = read_run(directory).training, _tensors(trainer)
    check_held(directory, _held(directory), {name: (tuple(x.shape), dtype_name(x)) for name, x in tensors.items()})
    _load(directory, tensors)
    trainer.step, trainer.seed = training["step"], training["seed"]
    for state in trainer.optimizer.state.values():
        state["step"].fill_(trainer.step)
    return training["progress"]


def join_sharded(directory: str | Path) -> Checkpoint:
    """Return the contents of a directory as a ``Checkpoint``, which can be saved as one file.

    Call this function in one process only.

    Args:
        directory: Path of the directory.

    Raises:
        OSError: If a file can't be read.
        ValueError: If the directory contains no training run.
    """
    directory = Path(directory)
    run, held = read_run(directory), _held(directory)
    tensors = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in held.items()}
    _load(directory, tensors)
    return run.joined({name: copy_out(name, tensors[path]) for name in run.names if (path := torch_path(name)) in held})


def split_sharded(directory: str | Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint to a new directory, from which a run with multiple processes can resume.

    Call this function in one process only.

    Args:
        directory: Path of the directory, which must not exist.
        checkpoint: Checkpoint to write.

    Raises:
        TypeError: If a tensor doesn't have a floating-point dtype.
        ValueError: If weights or moments don't match the config.
        FileExistsError: If the path exists.
        OSError: If a file can't be written.
    """
    tensors = {}
    for name, array in checkpoint_tensors(checkpoint).items():
        shape = array.T.shape if name.endswith("kernel") else array.shape
        tensor = tensors[torch_path(name)] = torch.empty(shape, dtype=getattr(torch, array.dtype.name))
        copy_in(name, array, tensor)
    description = describe_run(checkpoint.config, checkpoint.settings, checkpoint.state, checkpoint.progress)
    _write(Path(directory), tensors, description, checkpoint.vocabulary)


def _tensors(trainer):
    """Return all tensors of a run, keyed by name, without copying them. Overwriting a tensor changes the trainer."""
    found: dict[str, Tensor] = {}
    for name, parameter in parameters(trainer.model).items():
        state = trainer.optimizer.moments(parameter, trainer.step)
        tensors = parameter.detach(), state["exp_avg"], state["exp_avg_sq"]
        found |= {torch_path(prefix + name): tensor for prefix, tensor in zip(PREFIXES, tensors, strict=True)}
    return found


def _write(directory, tensors, description, vocabulary):
    """Write a directory under a temporary name, then rename it."""
    import torch.distributed.checkpoint as dcp

    _by_the_first(lambda: begin_directory(directory, description, vocabulary))
    with _reported(f"cannot write {directory}"):
        dcp.save(tensors, checkpoint_id=partial_directory(directory))
    _by_the_first(lambda: os.replace(partial_directory(directory), directory))


def _load(directory, tensors):
    """Read this process's shards of the tensors in place."""
    import torch.distributed.checkpoint as dcp

    with _reported(f"cannot read {directory}"):
        dcp.load(tensors, checkpoint_id=directory)


def _held(directory):
    """Return the shape and dtype of each tensor in a directory."""
    from torch.distributed.checkpoint import FileSystemReader

    held: dict[str, Any] = FileSystemReader(directory).read_metadata().state_dict_metadata
    return {name: (tuple(entry.size), dtype_name(entry.properties)) for name, entry in held.items()}


def _by_the_first(action: Callable[[], None]) -> None:
    """Call a function in the first process. If the function fails, all processes raise the same error."""
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
    """In all processes, raise the error of the first failed process.

    Suppress PyTorch's warning that it saves or loads in a single process.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            rank, (first, _) = min(error.failures.items())
            raise OSError(f"{what} in process {rank}: {first}") from error
