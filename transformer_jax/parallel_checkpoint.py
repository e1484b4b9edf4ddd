"""Checkpoints of large runs: a folder into which each process writes its parts, by Orbax.

A folder is read by any number of processes on any plan. It has the arrays under their canonical names, those of moments
with a prefix, as an Orbax checkpoint ``arrays``, and all else that a checkpoint holds in ``run.safetensors``. All
processes of a run see the same folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import broadcast_one_to_all

from transformer_jax.optimizer import Adam
from transformer_jax.training import Trainer
from transformer_jax.weights import parameter_of
from transformer_spec.checkpoint import Checkpoint, checkpoint_tensors, describe_run
from transformer_spec.checkpoint_folder import KIND, PREFIXES, begin_folder, check_held, partial_folder, read_run
from transformer_spec.files import FIRST_MOMENT, SECOND_MOMENT, VocabularyFiles
from transformer_spec.names import parameter_shapes

ARRAYS = "arrays"
ERRORS = (FileExistsError, OSError, TypeError, ValueError)


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
        ImportError: Orbax is not installed.
        FileExistsError: There is something of that name.
        OSError: A file cannot be written.
    """
    description = describe_run(trainer.model.config, trainer.settings, trainer, dict(progress or {}))
    _write(Path(folder), _arrays(trainer), description, vocabulary)


def load_sharded(folder: str | Path, trainer: Trainer) -> dict[str, Any]:
    """Let a trainer go on from a folder, whatever plan wrote it, and return the progress. All processes call it.

    Each process reads its own parts. After an error, the trainer is as it was.

    Raises:
        ImportError: Orbax is not installed.
        OSError: A file cannot be read.
        ValueError: The folder holds no training run, or one of another model or in another dtype.
    """
    folder = Path(folder)
    training, arrays = read_run(folder).training, _arrays(trainer)
    check_held(folder, _held(folder), {name: (tuple(x.shape), x.dtype.name) for name, x in arrays.items()})
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in arrays.items()}
    found = _read(folder, shapes)
    names = parameter_shapes(trainer.model.config)
    for name in names:
        parameter_of(trainer.model, name).set_value(found[name])
    first, second = ({name: found[prefix + name] for name in names} for prefix in (FIRST_MOMENT, SECOND_MOMENT))
    trainer.optimizer = Adam(first, second, trainer.settings)
    trainer.step, trainer.seed = training["step"], training["seed"]
    return training["progress"]


def join_sharded(folder: str | Path) -> Checkpoint:
    """Return what a folder holds as a checkpoint, for the one file that every framework reads. One process does.

    Raises:
        ImportError: Orbax is not installed.
        OSError: A file cannot be read.
        ValueError: The folder holds no training run.
    """
    folder = Path(folder)
    run, held = read_run(folder), _held(folder)
    return run.joined(_read(folder, {name: np.empty(shape, dtype) for name, (shape, dtype) in held.items()}))


def split_sharded(folder: str | Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint to a new folder, for a run of several processes. One process does.

    Raises:
        ImportError: Orbax is not installed.
        TypeError: An array is not of a floating-point dtype.
        ValueError: Weights or moments are not those of the config.
        FileExistsError: There is something of that name.
        OSError: A file cannot be written.
    """
    description = describe_run(checkpoint.config, checkpoint.settings, checkpoint.state, checkpoint.progress)
    _write(Path(folder), checkpoint_tensors(checkpoint), description, checkpoint.vocabulary)


def _arrays(trainer):
    """Return all arrays of a run by name, divided as they are."""
    weights = {name: parameter_of(trainer.model, name).get_value() for name in parameter_shapes(trainer.model.config)}
    groups = weights, trainer.optimizer.first_moment, trainer.optimizer.second_moment
    return {prefix + name: group[name] for prefix, group in zip(PREFIXES, groups, strict=True) for name in weights}


def _write(folder, arrays, description, vocabulary):
    """Write a folder under another name, and rename it."""
    checkpointer = _orbax()
    _by_the_first(lambda: begin_folder(folder, description, vocabulary))
    with checkpointer() as writer:
        writer.save(partial_folder(folder).absolute() / ARRAYS, arrays)
    _by_the_first(lambda: os.replace(partial_folder(folder), folder))


def _held(folder):
    """Return shape and dtype of each array of a folder."""
    with _orbax()() as reader:
        held = reader.metadata((folder / ARRAYS).absolute()).item_metadata
    if held is None:
        raise ValueError(f"{folder} is not a usable {KIND}: it holds no arrays")
    return {name: (tuple(entry.shape), np.dtype(entry.dtype).name) for name, entry in held.tree.items()}


def _read(folder, wanted):
    with _orbax()() as reader:
        return reader.restore((folder / ARRAYS).absolute(), wanted)


def _orbax():
    try:
        from orbax.checkpoint import StandardCheckpointer
    except ImportError as error:
        raise ImportError(f"a {KIND} of JAX needs Orbax: pip install orbax-checkpoint") from error
    return StandardCheckpointer


def _by_the_first(action: Callable[[], None]) -> None:
    """Let the first process do something; all raise an error of the kind that it raises."""
    failed: Exception | None = None
    if jax.process_index() == 0:
        try:
            action()
        except ERRORS as error:
            failed = error
    kind = next((i for i, kind in enumerate(ERRORS) if isinstance(failed, kind)), -1)
    if jax.process_count() > 1:
        kind = int(broadcast_one_to_all(np.array(kind)))
    if kind >= 0:
        raise failed or ERRORS[kind]("the first process cannot write the folder, and says why")
