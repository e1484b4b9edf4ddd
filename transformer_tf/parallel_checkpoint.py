"""Checkpoints of runs on a strategy: a folder that ``tf.train.Checkpoint`` writes and reads, on any number of devices.

It has the tensors under their canonical names, and all else that a checkpoint holds in ``run.safetensors``. Each copy
of a model is whole, so the first process writes; all processes of a run see the same folder.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf
from numpy import ndarray

from reference_numpy.checkpoint import Checkpoint
from reference_numpy.config import TransformerConfig
from reference_numpy.files import VocabularyFiles, open_file, read_vocabulary, write_file
from reference_numpy.names import check_training_state, check_weights, parameter_shapes
from reference_numpy.training_config import TrainingConfig, TrainingState
from transformer_tf.parallel import first_alone
from transformer_tf.training import Trainer
from transformer_tf.weights import parameters

RUN = "run.safetensors"
KIND = "sharded checkpoint"
TENSORS = "tensors"
GROUPS = ("weights", "first_moment", "second_moment")


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
    training = {"step": trainer.step, "seed": trainer.seed, "settings": trainer.settings.to_dict()}
    training["progress"] = dict(progress or {})
    description = {"config": trainer.model.config.to_dict(), "training": training}
    first_alone(trainer, lambda: _write(Path(folder), _variables(trainer), description, vocabulary))


def load_sharded(folder: str | Path, trainer: Trainer) -> dict[str, Any]:
    """Let a trainer go on from a folder, whatever plan wrote it, and return the progress. All processes call it.

    Raises:
        OSError: A file cannot be read.
        ValueError: The folder holds no training run, or one of another model or in another dtype.
    """
    training, _ = _read_run(Path(folder))
    reader = _reader(Path(folder))
    held = {name: (shape, reader.get_variable_to_dtype_map()[name]) for name, shape in _shapes(reader).items()}
    needed = {
        _key(group, name): (variable.shape.as_list(), variable.dtype)
        for group, variables in _variables(trainer).items()
        for name, variable in variables.items()
    }
    if different := [name for name in held.keys() | needed if held.get(name) != needed.get(name)]:
        name = min(different).rpartition("/.A")[0].replace("..", ".")
        raise ValueError(f"{folder} must hold what the model has, in its shapes and dtype: {name} is different")
    tf.train.Checkpoint(**_variables(trainer)).read(str(Path(folder) / TENSORS)).assert_consumed()
    trainer.step, trainer.seed = training["step"], training["seed"]
    return training["progress"]


def join_sharded(folder: str | Path) -> Checkpoint:
    """Return what a folder holds as a checkpoint, for the one file that every framework reads. One process does.

    Raises:
        OSError: A file cannot be read.
        ValueError: The folder holds no training run.
    """
    training, (config, vocabulary) = _read_run(Path(folder))
    reader = _reader(Path(folder))
    shapes = parameter_shapes(config)
    missing = [name for name in shapes for group in GROUPS if not reader.has_tensor(_key(group, name))]
    if missing:
        raise ValueError(f"{folder} is no complete training run: it lacks {missing[0]}")
    groups = ({name: reader.get_tensor(_key(group, name)) for name in shapes} for group in GROUPS)
    weights, first, second = groups
    check_weights(config, weights)
    state = TrainingState(training["step"], training["seed"], first, second)
    check_training_state(config, state)
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
    training = {"step": int(state.step), "seed": int(state.seed), "settings": checkpoint.settings.to_dict()}
    description = {"config": config.to_dict(), "training": {**training, "progress": checkpoint.progress}}
    groups = (checkpoint.weights, state.first_moment, state.second_moment)
    with tf.device("/CPU:0"):
        variables = {
            group: {name: tf.Variable(array, trainable=False) for name, array in arrays.items()}
            for group, arrays in zip(GROUPS, groups, strict=True)
        }
    _write(Path(folder), variables, description, checkpoint.vocabulary)


def _variables(trainer):
    """Return all tensors of a run by group and name."""
    optimizer = trainer.optimizer
    groups = parameters(trainer.model), optimizer.first_moment, optimizer.second_moment
    return {group: dict(variables) for group, variables in zip(GROUPS, groups, strict=True)}


def _write(folder, variables, description, vocabulary):
    """Write a folder under another name, and rename it."""
    if folder.exists():
        raise FileExistsError(f"{folder} exists already")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    partial.mkdir()
    write_file(partial / RUN, description, dict[str, ndarray](), vocabulary)
    try:
        tf.train.Checkpoint(**variables).write(str(partial / TENSORS))
    except tf.errors.OpError as error:
        raise OSError(f"cannot write {folder}: {error.message}") from error
    os.replace(partial, folder)


def _reader(folder):
    try:
        return tf.train.load_checkpoint(str(folder / TENSORS))
    except (ValueError, tf.errors.OpError) as error:
        raise OSError(f"cannot read {folder}: {error}") from error


def _key(group, name):
    """Return the name by which TensorFlow holds a tensor: in that of each attribute, dots are doubled."""
    return f"{group}/{name.replace('.', '..')}/.ATTRIBUTES/VARIABLE_VALUE"


def _shapes(reader):
    """Return the shape of each tensor of a checkpoint; what else is in it is TensorFlow's own."""
    return {name: shape for name, shape in reader.get_variable_to_shape_map().items() if name.startswith(GROUPS)}


def _read_run(folder):
    """Return all that a folder holds beside tensors."""
    with open_file(folder / RUN, KIND) as (description, file):
        training = description["training"]
        return training, (TransformerConfig.from_dict(description["config"]), read_vocabulary(description, file))
