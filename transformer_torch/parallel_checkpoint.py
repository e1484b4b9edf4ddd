"""Checkpoints of large runs: a folder into which each process writes its parts, by ``torch.distributed.checkpoint``.

A folder is read by any number of processes on any plan. It has the tensors under the names and in the shapes of
``state_dict()``, those of moments with a prefix, and all else that a checkpoint holds in ``run.safetensors``. All
processes of a run see the same folder. Read none from a stranger: what describes its tensors is a pickle.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from reference_numpy.checkpoint import Checkpoint
from reference_numpy.config import TransformerConfig
from reference_numpy.files import FIRST_MOMENT, SECOND_MOMENT, VocabularyFiles, open_file, read_vocabulary, write_file
from reference_numpy.names import check_training_state, check_weights, parameter_shapes
from reference_numpy.training_config import TrainingConfig, TrainingState
from transformer_torch.training import Trainer
from transformer_torch.weights import copy_in, copy_out, parameters, torch_path

RUN = "run.safetensors"
KIND = "sharded checkpoint"


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
    training = {"step": trainer.step, "seed": trainer.seed, "settings": trainer.settings.to_dict()}
    description = {
        "config": model.config.to_dict(),
        "training": {**training, "progress": dict(progress or {})},
    }
    _write(Path(folder), _tensors(trainer), description, vocabulary)


def load_sharded(folder: str | Path, trainer: Trainer) -> dict[str, Any]:
    """Let a trainer go on from a folder, whatever plan wrote it, and return the progress. All processes call it.

    Each process reads its own parts. After an error while it reads, the trainer is of no use any more.

    Raises:
        OSError: A file cannot be read.
        ValueError: The folder holds no training run, or one of another model or in another dtype.
    """
    training, _ = _read_run(Path(folder))
    tensors = _tensors(trainer)
    held = _held(Path(folder))
    for name, tensor in tensors.items():
        needed = tuple(tensor.shape), tensor.dtype
        if held.get(name) != needed:
            raise ValueError(f"{folder} must hold {name} as {_shown(needed)}: got {_shown(held.get(name))}")
    if unknown := held.keys() - tensors.keys():
        raise ValueError(f"{folder} holds what the model lacks: {', '.join(sorted(unknown))}")
    _load(Path(folder), tensors)
    trainer.step, trainer.seed = training["step"], training["seed"]
    for parameter in trainer.model.parameters():
        trainer.optimizer.state[parameter]["step"].fill_(trainer.step)
    return training["progress"]


def join_sharded(folder: str | Path) -> Checkpoint:
    """Return what a folder holds as a checkpoint, for the one file that every framework reads. One process does.

    Raises:
        OSError: A file cannot be read.
        ValueError: The folder holds no training run.
    """
    training, (config, vocabulary) = _read_run(Path(folder))
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in _held(Path(folder)).items()}
    _load(Path(folder), tensors)
    weights, first, second = (
        {name: copy_out(name, tensors[prefix + torch_path(name)]) for name in parameter_shapes(config)}
        for prefix in ("", FIRST_MOMENT, SECOND_MOMENT)
    )
    state = TrainingState(training["step"], training["seed"], first, second)
    settings = TrainingConfig.from_dict(training["settings"])
    return Checkpoint(config, settings, weights, state, training["progress"], vocabulary)


def split_sharded(folder: str | Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint to a new folder, for a run of several processes. One process does.

    Raises:
        TypeError: A tensor is not of a floating-point dtype.
        ValueError: Weights or moments are not those of the config.
        FileExistsError: There is something of that name.
        OSError: A file cannot be written.
    """
    config, state = checkpoint.config, checkpoint.state
    check_weights(config, checkpoint.weights)
    check_training_state(config, state)
    groups = (("", checkpoint.weights), (FIRST_MOMENT, state.first_moment), (SECOND_MOMENT, state.second_moment))
    tensors = {}
    for prefix, group in groups:
        for name, array in group.items():
            shape = array.T.shape if name.endswith("kernel") else array.shape
            tensor = tensors[prefix + torch_path(name)] = torch.empty(shape, dtype=getattr(torch, array.dtype.name))
            copy_in(name, array, tensor)
    training = {"step": int(state.step), "seed": int(state.seed), "settings": checkpoint.settings.to_dict()}
    description = {"config": config.to_dict(), "training": {**training, "progress": checkpoint.progress}}
    _write(Path(folder), tensors, description, checkpoint.vocabulary)


def _tensors(trainer):
    """Return all tensors of a run by name, divided as they are: what is read into them is the trainer's."""
    found: dict[str, Tensor] = {}
    for name, parameter in parameters(trainer.model).items():
        remembered = trainer.optimizer.state[parameter]
        for prefix, tensor in (
            ("", parameter.detach()),
            (FIRST_MOMENT, remembered["exp_avg"]),
            (SECOND_MOMENT, remembered["exp_avg_sq"]),
        ):
            found[prefix + torch_path(name)] = tensor
    return found


def _write(folder, tensors, description, vocabulary):
    """Write a folder under another name, and rename it."""
    import torch.distributed.checkpoint as dcp

    partial = folder.with_name(f".{folder.name}.partial")

    def begin() -> None:
        if folder.exists():
            raise FileExistsError(f"{folder} exists already")
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
        partial.mkdir()
        write_file(partial / RUN, description, {}, vocabulary)

    _by_the_first(begin)
    with _reported(f"cannot write {folder}"):
        dcp.save(tensors, checkpoint_id=partial)
    _by_the_first(lambda: os.replace(partial, folder))


def _load(folder, tensors):
    """Read tensors in place, of each the part that this process holds."""
    import torch.distributed.checkpoint as dcp

    with _reported(f"cannot read {folder}"):
        dcp.load(tensors, checkpoint_id=folder)


def _read_run(folder):
    """Return all that a folder holds beside tensors."""
    with open_file(folder / RUN, KIND) as (description, file):
        training = description["training"]
        return training, (TransformerConfig.from_dict(description["config"]), read_vocabulary(description, file))


def _held(folder):
    """Return shape and dtype of each tensor of a folder."""
    from torch.distributed.checkpoint import FileSystemReader

    held: dict[str, Any] = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {name: (tuple(entry.size), entry.properties.dtype) for name, entry in held.items()}


def _shown(held):
    return "nothing" if held is None else f"{str(held[1]).removeprefix('torch.')} {list(held[0])}"


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
