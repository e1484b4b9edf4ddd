"""The checkpoint: one file with all that a training run depends on, whichever framework goes on with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from transformer_spec.checks import check_fields, check_integer, some
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

TRAINING_FIELDS = {"step", "seed", "settings", "progress"}  # what the metadata of a checkpoint has beside the config


@dataclass(frozen=True)
class Checkpoint:
    """A training run between two steps."""

    config: TransformerConfig
    settings: TrainingConfig
    weights: dict[str, ndarray]  # by canonical name
    state: TrainingState
    progress: dict[str, Any]  # plain JSON values: the position in the data, and what else the loop has to remember
    vocabulary: bytes | VocabularyFiles | None = None  # a sentencepiece model, so that the file alone can translate


def save_checkpoint(path: str | Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint to one file, atomically: whatever fails, an old file stays whole.

    Every array keeps its bits; the keys of the progress come back sorted. The file is a weight file too.

    Args:
        path: The file to write or replace.
        checkpoint: What to write.

    Raises:
        TypeError: A tensor is not of a floating-point dtype, or a value is of the wrong type.
        ValueError: Weights or moments are not those of the config, or JSON would alter the progress.
        OSError: The file cannot be written.
    """
    tensors = {name: rounded(name, array, array.dtype.name) for name, array in checkpoint_tensors(checkpoint).items()}
    description = describe_run(checkpoint.config, checkpoint.settings, checkpoint.state, checkpoint.progress)
    write_file(path, description, tensors, checkpoint.vocabulary)


def checkpoint_tensors(checkpoint: Checkpoint) -> dict[str, ndarray]:
    """Return the weights of a checkpoint by name, and its moments behind their prefixes; all are checked.

    Raises:
        TypeError: A tensor is not of a floating-point dtype.
        ValueError: Weights or moments are not those of the config.
    """
    state = checkpoint.state
    check_weights(checkpoint.config, checkpoint.weights)
    check_training_state(checkpoint.config, state)
    groups = (("", checkpoint.weights), (FIRST_MOMENT, state.first_moment), (SECOND_MOMENT, state.second_moment))
    return {prefix + name: array for prefix, group in groups for name, array in group.items()}


def describe_run(
    config: TransformerConfig, settings: TrainingConfig, state: Any, progress: dict[str, Any]
) -> dict[str, Any]:
    """Return all that a checkpoint holds beside tensors and vocabulary; a trainer has ``step`` and ``seed`` too.

    Raises:
        TypeError: The progress is no dict.
        ValueError: JSON would alter the progress.
    """
    _check_progress(progress)
    training = {
        "step": int(state.step),  # JSON has no integers of NumPy's
        "seed": int(state.seed),
        "settings": settings.to_dict(),
        "progress": progress,
    }
    return {"config": config.to_dict(), "training": training}


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Read a checkpoint, whichever framework saved it; each array is in the dtype it is stored in.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is truncated, corrupt or not a checkpoint, or its parts contradict each other.
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
    """Return the mean of the weights of several files, and their config (Vaswani et al., 2017, section 6.1).

    The mean is taken in float64 and rounded to the dtype the weights are stored in.

    Args:
        paths: Weight files or checkpoints of one model.

    Raises:
        OSError: A file cannot be read.
        ValueError: No file, a file that is not usable, or files that differ in their config, tensors or dtypes.
    """
    if not paths:
        raise ValueError("an average needs at least one file: got none")
    config, first = load_weights(paths[0])
    total = {name: array.astype(np.float64) for name, array in first.items()}
    for path in paths[1:]:
        other_config, weights = load_weights(path)
        if other_config != config:
            fields, others = config.to_dict(), other_config.to_dict()
            different = ", ".join(name for name in fields if fields[name] != others[name])
            raise ValueError(f"{path} and {paths[0]} must have the same config: they differ in {different}")
        problems = [f"missing {name}" for name in first if name not in weights]
        problems += [f"unexpected {name}" for name in weights if name not in first]
        if problems:  # parts of the model, or different ones
            raise ValueError(f"{path} must hold the same tensors as {paths[0]}: {some(problems)}")
        for name, array in weights.items():
            if array.dtype != first[name].dtype:
                found = f"got {array.dtype} and {first[name].dtype}"
                raise ValueError(f"{path} and {paths[0]} must store {name} in the same dtype: {found}")
            total[name] += array
    return config, {name: rounded(name, total[name] / len(paths), first[name].dtype.name) for name in first}


def read_training(description: Mapping[str, Any]) -> tuple[dict[str, Any], TrainingConfig]:
    """Return the metadata of the training run in an open file, and its settings.

    Raises:
        TypeError: A part has the wrong type.
        ValueError: There is none, or a part is missing, unknown or makes no sense.
    """
    if "training" not in description:
        raise ValueError("it holds weights but no training state")
    training = description["training"]
    if not isinstance(training, dict):
        raise TypeError(f"its training state must be an object with named fields: got {type(training).__name__}")
    check_fields("fields of the training state", training, TRAINING_FIELDS)
    check_integer("step", training["step"], minimum=0)
    check_integer("seed", training["seed"], minimum=0)
    _check_progress(training["progress"])
    return training, TrainingConfig.from_dict(training["settings"])


def _check_progress(progress: Any) -> None:
    """Refuse what is no dict, or would not come back from JSON as it is."""
    if not isinstance(progress, dict):
        raise TypeError(f"progress must be a dict: got {type(progress).__name__}")
    check_plain("progress", progress)
