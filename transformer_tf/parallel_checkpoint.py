"""Checkpoints of runs with a distribution strategy: directories that ``tf.train.Checkpoint`` writes and reads.

Runs with any number of devices can read the directory. It contains the weights under their canonical names, and the
moments under the same names with a prefix. The file ``run.safetensors`` contains the rest of the checkpoint. Every copy
of the model is complete, so only the first process writes. All processes of a run must see the same directory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from transformer_spec.checkpoint import Checkpoint, checkpoint_tensors, describe_run
from transformer_spec.checkpoint_directory import PREFIXES, begin_directory, check_held, partial_directory, read_run
from transformer_spec.files import VocabularyFiles
from transformer_tf.parallel import first_alone
from transformer_tf.training import Trainer
from transformer_tf.weights import parameters

TENSORS = "tensors"


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
    description = describe_run(trainer.model.config, trainer.settings, trainer, dict(progress or {}))
    first_alone(trainer, lambda: _write(Path(directory), _variables(trainer), description, vocabulary))


def load_sharded(directory: str | Path, trainer: Trainer) -> dict[str, Any]:
    """Resume a trainer from a directory and return the progress. All processes must call this function.

    The trainer's plan can differ from the plan with which the directory was written.

    Args:
        directory: Path of the directory.
        trainer: Trainer whose weights, moments, step, and seed are replaced.

    Raises:
        OSError: If a file can't be read.
        ValueError: If the directory contains no training run, or a run with a different model or dtype.
    """
    directory = Path(directory)
    training, variables = read_run(directory).training, _variables(trainer)
    check_held(
        directory, _held(_reader(directory)), {name: (tuple(x.shape), x.dtype.name) for name, x in variables.items()}
    )
    tf.train.Checkpoint(tensors=variables).read(str(directory / TENSORS)).assert_consumed()
    trainer.step, trainer.seed = training["step"], training["seed"]
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
    run, reader = read_run(Path(directory)), _reader(Path(directory))
    return run.joined({name: reader.get_tensor(_key(name)) for name in _held(reader)})


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
    tensors = checkpoint_tensors(checkpoint)
    description = describe_run(checkpoint.config, checkpoint.settings, checkpoint.state, checkpoint.progress)
    with tf.device("/CPU:0"):
        variables = {name: tf.Variable(array, trainable=False) for name, array in tensors.items()}
    _write(Path(directory), variables, description, checkpoint.vocabulary)


def _variables(trainer):
    """Return all variables of a run, keyed by name."""
    trainer.start(trainer.optimizer.parameters)
    groups = parameters(trainer.model), trainer.optimizer.first_moment, trainer.optimizer.second_moment
    return {prefix + name: x for prefix, group in zip(PREFIXES, groups, strict=True) for name, x in group.items()}


def _write(directory, variables, description, vocabulary):
    """Write a directory under a temporary name, then rename it."""
    begin_directory(directory, description, vocabulary)
    try:
        tf.train.Checkpoint(tensors=variables).write(str(partial_directory(directory) / TENSORS))
    except tf.errors.OpError as error:
        raise OSError(f"cannot write {directory}: {error.message}") from error
    os.replace(partial_directory(directory), directory)


def _reader(directory):
    try:
        return tf.train.load_checkpoint(str(directory / TENSORS))
    except (ValueError, tf.errors.OpError) as error:
        raise OSError(f"cannot read {directory}: {error}") from error


def _held(reader):
    """Return the shape and dtype of each tensor in a directory, except for TensorFlow's internal entries."""
    shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    keys = [key for key in shapes if key.startswith("tensors/")]
    return {key.split("/")[1].replace("..", "."): (tuple(shapes[key]), dtypes[key].name) for key in keys}


def _key(name):
    """Return the key that TensorFlow uses for a tensor. In this key, each dot of the tensor's name is doubled."""
    return f"tensors/{name.replace('.', '..')}/.ATTRIBUTES/VARIABLE_VALUE"
