"""Checkpoints: files that store the complete state of a training run, and that all four packages can read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from transformer_spec.checks import check_fields, check_integer, check_type, some
from transformer_spec.config import TransformerConfig
from transformer_spec.files import (
    FIRST_MOMENT,
    SECOND_MOMENT,
    VocabularyFiles,
    check_plain,
    load_weights,
    open_file,
    read_moments,
    read_vocabulary,
    read_weights,
    write_file,
)
from transformer_spec.names import check_training_state, check_weights, rounded
from transformer_spec.training_config import TrainingConfig, TrainingState

TRAINING_FIELDS = {"step", "seed", "settings", "progress"}  # fields of ``training`` in the metadata of a checkpoint


@dataclass(frozen=True)
class Checkpoint:
    """The state of a training run between two steps.

    Attributes:
        config: Configuration of the model.
        settings: Training settings.
        weights: Weights, keyed by canonical name.
        state: Step number, seed, and the optimizer's moments.
        progress: Values that the training loop needs to resume, such as the position in the data. These values must
            not change when they are converted to JSON and back.
        vocabulary: A sentencepiece model, the files of another type of vocabulary, or None.
    """

    config: TransformerConfig
    settings: TrainingConfig
    weights: dict[str, ndarray]  # by canonical name
    state: TrainingState
    progress: dict[str, Any]  # must not change when it is converted to JSON and back
    vocabulary: bytes | VocabularyFiles | None = None  # bytes: a sentencepiece model


def save_checkpoint(path: str | Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint to a file atomically: if an error occurs, an existing file remains intact.

    Every array keeps its dtype, so no value is rounded. The keys of ``progress`` are sorted. ``load_weights`` can also
    read the file.

    Args:
        path: File to create or replace.
        checkpoint: Checkpoint to write.

    Raises:
        TypeError: If a tensor doesn't have a floating-point dtype, or a value has the wrong type.
        ValueError: If weights or moments don't match the config, or if the progress changes when it is converted to
            JSON and back.
        OSError: If the file can't be written.
    """
    check_type("checkpoint", checkpoint, Checkpoint)
    tensors = {name: rounded(name, array, array.dtype.name) for name, array in checkpoint_tensors(checkpoint).items()}
    description = describe_run(checkpoint.config, checkpoint.settings, checkpoint.state, checkpoint.progress)
    write_file(path, description, tensors, checkpoint.vocabulary)


def checkpoint_tensors(checkpoint: Checkpoint) -> dict[str, ndarray]:
    """Check the weights and moments of a checkpoint, and return them keyed by name. The names of moments have a prefix.

    Raises:
        TypeError: If a tensor doesn't have a floating-point dtype.
        ValueError: If weights or moments don't match the config.
    """
    state = checkpoint.state
    check_weights(checkpoint.config, checkpoint.weights)
    check_training_state(checkpoint.config, state)
    groups = (("", checkpoint.weights), (FIRST_MOMENT, state.first_moment), (SECOND_MOMENT, state.second_moment))
    return {prefix + name: array for prefix, group in groups for name, array in group.items()}


def describe_run(
    config: TransformerConfig, settings: TrainingConfig, state: Any, progress: dict[str, Any]
) -> dict[str, Any]:
    """Return the metadata of a checkpoint: the config, and the step, seed, settings, and progress of the run.

    Args:
        config: Configuration of the model.
        settings: Training settings.
        state: Object with the attributes ``step`` and ``seed``: a ``TrainingState`` or a trainer.
        progress: Values that the training loop needs to resume.

    Raises:
        TypeError: If the progress is not a dict.
        ValueError: If the progress changes when it is converted to JSON and back.
    """
    _check_progress(progress)
    training = {
        "step": int(state.step),  # JSON doesn't support NumPy integers
        "seed": int(state.seed),
        "settings": settings.to_dict(),
        "progress": progress,
    }
    return {"config": config.to_dict(), "training": training}


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Read a checkpoint, regardless of the framework that wrote it. Each array keeps the dtype in which it is stored.

    Args:
        path: File written by ``save_checkpoint``.

    Raises:
        OSError: If the file can't be read.
        ValueError: If the file is truncated, corrupt, or not a checkpoint, or if its contents are invalid or
            inconsistent.
    """
    with open_file(path, "checkpoint") as (description, file):
        config, weights = read_weights(description, file)
        training, settings = read_training(description)
        first, second = (read_moments(description, file, prefix) for prefix in (FIRST_MOMENT, SECOND_MOMENT))
        state = TrainingState(training["step"], training["seed"], first, second)
        check_training_state(config, state)
        vocabulary = read_vocabulary(description, file)
        return Checkpoint(config, settings, weights, state, training["progress"], vocabulary)


def average_weights(paths: Sequence[str | Path]) -> tuple[TransformerConfig, dict[str, ndarray]]:
    """Average the weights of several files, and return the config and the averages.

    Section 6.1 of Vaswani et al. (2017) describes this method. The average is computed in float64 and rounded to the
    dtype in which the weights are stored.

    Args:
        paths: Weight files or checkpoints of the same model.

    Raises:
        TypeError: If ``paths`` is one path instead of a list.
        OSError: If a file can't be read.
        ValueError: If no files are given, a file is invalid, or the files differ in config, tensor names, or dtypes.
    """
    if isinstance(paths, str | Path):
        raise TypeError(f"paths must be a list of files: got {str(paths)!r}")
    paths = list(paths)
    if not paths:
        raise ValueError("averaging weights requires at least one file: got none")
    config, first = load_weights(paths[0])
    total = {name: array.astype(np.float64) for name, array in first.items()}
    for path in paths[1:]:
        other_config, weights = load_weights(path)
        if other_config != config:
            fields, others = config.to_dict(), other_config.to_dict()
            different = ", ".join(name for name in fields if fields[name] != others[name])
            raise ValueError(f"{path} and {paths[0]} must have the same config: the configs differ in {different}")
        problems = [f"missing {name}" for name in first if name not in weights]
        problems += [f"unexpected {name}" for name in weights if name not in first]
        if problems:  # for example, if one file contains an encoder and another file contains a decoder
            raise ValueError(f"{path} must contain the same tensors as {paths[0]}: {some(problems)}")
        for name, array in weights.items():
            if array.dtype != first[name].dtype:
                found = f"got {array.dtype} and {first[name].dtype}"
                raise ValueError(f"{path} and {paths[0]} must store {name} in the same dtype: {found}")
            total[name] += array
    return config, {name: rounded(name, total[name] / len(paths), first[name].dtype.name) for name in first}


def read_training(description: Mapping[str, Any]) -> tuple[dict[str, Any], TrainingConfig]:
    """Return the metadata and the settings of a training run, given the description of an open file.

    Raises:
        TypeError: If a field has the wrong type.
        ValueError: If the file contains no training run, or a field is missing, unknown, or invalid.
    """
    if "training" not in description:
        raise ValueError("the file contains weights but no training state")
    training = description["training"]
    if not isinstance(training, dict):
        raise TypeError(f"expected the training state to be an object with named fields, got {type(training).__name__}")
    check_fields("fields of the training state", training, TRAINING_FIELDS)
    check_integer("step", training["step"], minimum=0)
    check_integer("seed", training["seed"], minimum=0)
    _check_progress(training["progress"])
    return training, TrainingConfig.from_dict(training["settings"])


def _check_progress(progress: Any) -> None:
    """Raise an error unless the progress is a dict that doesn't change when it is converted to JSON and back."""
    if not isinstance(progress, dict):
        raise TypeError(f"progress must be a dict: got {type(progress).__name__}")
    check_plain("progress", progress)
