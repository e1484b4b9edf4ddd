"""Checkpoints of large runs: a folder into which each process writes its parts, by Orbax.

A folder is read by any number of processes on any plan. It has the arrays under their canonical names, those of moments
with a prefix, as an Orbax checkpoint ``arrays``, and all else that a checkpoint holds in ``run.safetensors``. All
processes of a run see the same folder.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import broadcast_one_to_all

from reference_numpy.checkpoint import Checkpoint
from reference_numpy.config import TransformerConfig
from reference_numpy.files import FIRST_MOMENT, SECOND_MOMENT, VocabularyFiles, open_file, read_vocabulary, write_file
from reference_numpy.names import check_training_state, check_weights, find, parameter_shapes
from reference_numpy.training_config import TrainingConfig, TrainingState
from transformer_jax.optimizer import Adam
from transformer_jax.training import Trainer

RUN = "run.safetensors"
ARRAYS = "arrays"
KIND = "sharded checkpoint"
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
    training = {"step": trainer.step, "seed": trainer.seed, "settings": trainer.settings.to_dict()}
    description = {
        "config": trainer.model.config.to_dict(),
        "training": {**training, "progress": dict(progress or {})},
    }
    weights = {name: find(trainer.model, name).get_value() for name in parameter_shapes(trainer.model.config)}
    _write(Path(folder), _tree(weights, trainer.optimizer), description, vocabulary)


def load_sharded(folder: str | Path, trainer: Trainer) -> dict[str, Any]:
    """Let a trainer go on from a folder, whatever plan wrote it, and return the progress. All processes call it.

    Each process reads its own parts. After an error, the trainer is as it was.

    Raises:
        ImportError: Orbax is not installed.
        OSError: A file cannot be read.
        ValueError: The folder holds no training run, or one of another model or in another dtype.
    """
    training, _ = _read_run(Path(folder))
    weights = {name: find(trainer.model, name).get_value() for name in parameter_shapes(trainer.model.config)}
    wanted = _tree(weights, trainer.optimizer)
    _check(Path(folder), wanted)
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in wanted.items()}
    found = _read(Path(folder), shapes)
    for name in weights:
        find(trainer.model, name).set_value(found[name])
    first, second = ({name: found[prefix + name] for name in weights} for prefix in (FIRST_MOMENT, SECOND_MOMENT))
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
    training, (config, vocabulary) = _read_run(Path(folder))
    held = _held(Path(folder))
    arrays = _read(Path(folder), {name: np.empty(shape, dtype) for name, (shape, dtype) in held.items()})
    weights, first, second = (
        {name: arrays[prefix + name] for name in parameter_shapes(config)}
        for prefix in ("", FIRST_MOMENT, SECOND_MOMENT)
    )
    state = TrainingState(training["step"], training["seed"], first, second)
    settings = TrainingConfig.from_dict(training["settings"])
    return Checkpoint(config, settings, weights, state, training["progress"], vocabulary)


def split_sharded(folder: str | Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint to a new folder, for a run of several processes. One process does.

    Raises:
        ImportError: Orbax is not installed.
        TypeError: An array is not of a floating-point dtype.
        ValueError: Weights or moments are not those of the config.
        FileExistsError: There is something of that name.
        OSError: A file cannot be written.
    """
    config, state = checkpoint.config, checkpoint.state
    check_weights(config, checkpoint.weights)
    check_training_state(config, state)
    training = {"step": int(state.step), "seed": int(state.seed), "settings": checkpoint.settings.to_dict()}
    description = {"config": config.to_dict(), "training": {**training, "progress": checkpoint.progress}}
    _write(Path(folder), _tree(checkpoint.weights, state), description, checkpoint.vocabulary)


def _tree(weights, moments):
    """Return all arrays of a run by name."""
    groups = ("", weights), (FIRST_MOMENT, moments.first_moment), (SECOND_MOMENT, moments.second_moment)
    return {prefix + name: group[name] for prefix, group in groups for name in weights}


def _write(folder, arrays, description, vocabulary):
    """Write a folder under another name, and rename it."""
    partial = folder.absolute().with_name(f".{folder.name}.partial")

    def begin() -> None:
        if folder.exists():
            raise FileExistsError(f"{folder} exists already")
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
        partial.mkdir()
        write_file(partial / RUN, description, {}, vocabulary)

    checkpointer = _orbax()
    _by_the_first(begin)
    with checkpointer() as writer:
        writer.save(partial / ARRAYS, arrays)
    _by_the_first(lambda: os.replace(partial, folder))


def _read_run(folder):
    """Return all that a folder holds beside arrays."""
    with open_file(folder / RUN, KIND) as (description, file):
        training = description["training"]
        return training, (TransformerConfig.from_dict(description["config"]), read_vocabulary(description, file))


def _check(folder, wanted):
    """Refuse a folder of other arrays than those wanted."""
    held = _held(folder)
    for name, array in wanted.items():
        needed = tuple(array.shape), array.dtype.name
        if held.get(name) != needed:
            raise ValueError(f"{folder} must hold {name} as {_shown(needed)}: got {_shown(held.get(name))}")
    if unknown := held.keys() - wanted.keys():
        raise ValueError(f"{folder} holds what the model lacks: {', '.join(sorted(unknown))}")


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


def _shown(held):
    return "nothing" if held is None else f"{held[1]} {list(held[0])}"


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
