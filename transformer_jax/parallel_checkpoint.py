"""Checkpoints of large runs. Each checkpoint is a directory to which each process writes its shards, using Orbax.

Runs with any number of processes and any parallel plan can read the directory. It contains an Orbax checkpoint
``arrays``, with the weights under their canonical names and the moments under the same names with a prefix. The file
``run.safetensors`` contains the rest of the checkpoint. All processes of a run must see the same directory.
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
from transformer_spec.checkpoint_directory import (
    KIND,
    PREFIXES,
    begin_directory,
    check_held,
    partial_directory,
    read_run,
)
from transformer_spec.files import FIRST_MOMENT, SECOND_MOMENT, VocabularyFiles
from transformer_spec.names import parameter_shapes

ARRAYS = "arrays"
ERRORS = (FileExistsError, OSError, TypeError, ValueError)


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
        ImportError: If Orbax is not installed.
        FileExistsError: If the path exists.
        OSError: If a file can't be written.
        TypeError: If the progress is not a dict.
        ValueError: If the progress changes when it is converted to JSON and back.
    """
    description = describe_run(trainer.model.config, trainer.settings, trainer, dict(progress or {}))
    _write(Path(directory), _arrays(trainer), description, vocabulary)


def load_sharded(directory: str | Path, trainer: Trainer) -> dict[str, Any]:
    """Resume a trainer from a directory and return the progress. All processes must call this function.

    The trainer's plan can differ from the plan with which the directory was written. Each process reads only its own
    shards. If an error occurs, the trainer remains unchanged.

    Args:
        directory: Path of the directory.
        trainer: Trainer whose weights, moments, step, and seed are replaced.

    Raises:
        ImportError: If Orbax is not installed.
        OSError: If a file can't be read.
        ValueError: If the directory contains no training run, or a run with a different model or dtype.
    """
    directory = Path(directory)
    training, arrays = read_run(directory).training, _arrays(trainer)
    check_held(directory, _held(directory), {name: (tuple(x.shape), x.dtype.name) for name, x in arrays.items()})
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in arrays.items()}
    found = _read(directory, shapes)
    names = parameter_shapes(trainer.model.config)
    for name in names:
        parameter_of(trainer.model, name).set_value(found[name])
    first, second = ({name: found[prefix + name] for name in names} for prefix in (FIRST_MOMENT, SECOND_MOMENT))
    trainer.optimizer = Adam(first, second, trainer.settings)
    trainer.step, trainer.seed = training["step"], training["seed"]
    return training["progress"]


def join_sharded(directory: str | Path) -> Checkpoint:
    """Return the contents of a directory as a ``Checkpoint``, which can be saved as one file.

    Call this function in one process only.

    Args:
        directory: Path of the directory.

    Raises:
        ImportError: If Orbax is not installed.
        OSError: If a file can't be read.
        ValueError: If the directory contains no training run.
    """
    directory = Path(directory)
    run, held = read_run(directory), _held(directory)
    return run.joined(_read(directory, {name: np.empty(shape, dtype) for name, (shape, dtype) in held.items()}))


def split_sharded(directory: str | Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint to a new directory, from which a run with multiple processes can resume.

    Call this function in one process only.

    Args:
        directory: Path of the directory, which must not exist.
        checkpoint: Checkpoint to write.

    Raises:
        ImportError: If Orbax is not installed.
        TypeError: If a tensor doesn't have a floating-point dtype.
        ValueError: If weights or moments don't match the config.
        FileExistsError: If the path exists.
        OSError: If a file can't be written.
    """
    description = describe_run(checkpoint.config, checkpoint.settings, checkpoint.state, checkpoint.progress)
    _write(Path(directory), checkpoint_tensors(checkpoint), description, checkpoint.vocabulary)


def _arrays(trainer):
    """Return all arrays of a run with their sharding, keyed by name."""
    weights = {name: parameter_of(trainer.model, name).get_value() for name in parameter_shapes(trainer.model.config)}
    groups = weights, trainer.optimizer.first_moment, trainer.optimizer.second_moment
    return {prefix + name: group[name] for prefix, group in zip(PREFIXES, groups, strict=True) for name in weights}


def _write(directory, arrays, description, vocabulary):
    """Write a directory under a temporary name, then rename it."""
    checkpointer = _orbax()
    _by_the_first(lambda: begin_directory(directory, description, vocabulary))
    with checkpointer() as writer:
        writer.save(partial_directory(directory).absolute() / ARRAYS, arrays)
    _by_the_first(lambda: os.replace(partial_directory(directory), directory))


def _held(directory):
    """Return the shape and dtype of each array in a directory."""
    with _orbax()() as reader:
        held = reader.metadata((directory / ARRAYS).absolute()).item_metadata
    if held is None:
        raise ValueError(f"{directory} is not a usable {KIND}: it contains no arrays")
    return {name: (tuple(entry.shape), np.dtype(entry.dtype).name) for name, entry in held.tree.items()}


def _read(directory, wanted):
    with _orbax()() as reader:
        return reader.restore((directory / ARRAYS).absolute(), wanted)


def _orbax():
    try:
        from orbax.checkpoint import StandardCheckpointer
    except ImportError as error:
        raise ImportError(f"a {KIND} in JAX requires Orbax: pip install orbax-checkpoint") from error
    return StandardCheckpointer


def _by_the_first(action: Callable[[], None]) -> None:
    """Call a function in the first process. If the function fails, all processes raise an error of the same type."""
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
        raise failed or ERRORS[kind](
            "the first process cannot write the directory; see the error message of that process"
        )
