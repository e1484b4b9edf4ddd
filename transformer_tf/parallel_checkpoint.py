"""Checkpoints of runs on a strategy: a folder that ``tf.train.Checkpoint`` writes and reads, on any number of devices.

It has the tensors under their canonical names, and all else that a checkpoint holds in ``run.safetensors``. Each copy
of a model is whole, so the first process writes; all processes of a run see the same folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from transformer_spec.checkpoint import Checkpoint, checkpoint_tensors, describe_run
from transformer_spec.checkpoint_folder import PREFIXES, begin_folder, check_held, partial_folder, read_run
from transformer_spec.files import VocabularyFiles
from transformer_tf.parallel import first_alone
from transformer_tf.training import Trainer
from transformer_tf.weights import parameters

TENSORS = "tensors"


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
    description = describe_run(trainer.model.config, trainer.settings, trainer, dict(progress or {}))
    first_alone(trainer, lambda: _write(Path(folder), _variables(trainer), description, vocabulary))


def load_sharded(folder: str | Path, trainer: Trainer) -> dict[str, Any]:
    """Let a trainer go on from a folder, whatever plan wrote it, and return the progress. All processes call it.

    Raises:
        OSError: A file cannot be read.
        ValueError: The folder holds no training run, or one of another model or in another dtype.
    """
    folder = Path(folder)
    training, variables = read_run(folder).training, _variables(trainer)
    check_held(folder, _held(_reader(folder)), {name: (tuple(x.shape), x.dtype.name) for name, x in variables.items()})
    tf.train.Checkpoint(tensors=variables).read(str(folder / TENSORS)).assert_consumed()
    trainer.step, trainer.seed = training["step"], training["seed"]
    return training["progress"]


def join_sharded(folder: str | Path) -> Checkpoint:
    """Return what a folder holds as a checkpoint, for the one file that every framework reads. One process does.

    Raises:
        OSError: A file cannot be read.
        ValueError: The folder holds no training run.
    """
    run, reader = read_run(Path(folder)), _reader(Path(folder))
    return run.joined({name: reader.get_tensor(_key(name)) for name in _held(reader)})


def split_sharded(folder: str | Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint to a new folder, for a run of several processes. One process does.

    Raises:
        TypeError: A tensor is not of a floating-point dtype.
        ValueError: Weights or moments are not those of the config.
        FileExistsError: There is something of that name.
        OSError: A file cannot be written.
    """
    tensors = checkpoint_tensors(checkpoint)
    description = describe_run(checkpoint.config, checkpoint.settings, checkpoint.state, checkpoint.progress)
    with tf.device("/CPU:0"):
        variables = {name: tf.Variable(array, trainable=False) for name, array in tensors.items()}
    _write(Path(folder), variables, description, checkpoint.vocabulary)


def _variables(trainer):
    """Return all variables of a run by name."""
    trainer.start(trainer.optimizer.parameters)
    groups = parameters(trainer.model), trainer.optimizer.first_moment, trainer.optimizer.second_moment
    return {prefix + name: x for prefix, group in zip(PREFIXES, groups, strict=True) for name, x in group.items()}


def _write(folder, variables, description, vocabulary):
    """Write a folder under another name, and rename it."""
    begin_folder(folder, description, vocabulary)
    try:
        tf.train.Checkpoint(tensors=variables).write(str(partial_folder(folder) / TENSORS))
    except tf.errors.OpError as error:
        raise OSError(f"cannot write {folder}: {error.message}") from error
    os.replace(partial_folder(folder), folder)


def _reader(folder):
    try:
        return tf.train.load_checkpoint(str(folder / TENSORS))
    except (ValueError, tf.errors.OpError) as error:
        raise OSError(f"cannot read {folder}: {error}") from error


def _held(reader):
    """Return shape and dtype of each tensor of a folder; what else is in it is TensorFlow's own."""
    shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    keys = [key for key in shapes if key.startswith("tensors/")]
    return {key.split("/")[1].replace("..", "."): (tuple(shapes[key]), dtypes[key].name) for key in keys}


def _key(name):
    """Return the name by which TensorFlow holds a tensor: in that of each attribute, dots are doubled."""
    return f"tensors/{name.replace('.', '..')}/.ATTRIBUTES/VARIABLE_VALUE"
