"""Shared code for sharded checkpoints, which are directories to which several processes write.

The tensors are stored in the framework's native format. The names of moments have the same prefixes as in a checkpoint
file. ``run.safetensors`` contains the config, the state of the training run, and the vocabulary. The directory has a
temporary name until all files are written.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from numpy import ndarray

from transformer_spec.checkpoint import Checkpoint, read_training
from transformer_spec.config import TransformerConfig
from transformer_spec.files import FIRST_MOMENT, SECOND_MOMENT, VocabularyFiles, open_file, read_vocabulary, write_file
from transformer_spec.names import check_training_state, check_weights, parameter_shapes
from transformer_spec.training_config import TrainingConfig, TrainingState

RUN = "run.safetensors"
KIND = "sharded checkpoint"
PREFIXES = ("", FIRST_MOMENT, SECOND_MOMENT)  # prefixes of the names of weights and moments

Held = Mapping[str, tuple[tuple[int, ...], str]]  # shape and dtype of each tensor, keyed by name


class Run(NamedTuple):
    """The config, training run, and vocabulary of a sharded checkpoint, without its tensors."""

    config: TransformerConfig
    training: dict[str, Any]
    vocabulary: bytes | VocabularyFiles | None

    @property
    def names(self) -> list[str]:
        """Names of all tensors. A weight has its canonical name, and a moment has its canonical name with a prefix."""
        return [prefix + name for prefix in PREFIXES for name in parameter_shapes(self.config)]

    def joined(self, tensors: Mapping[str, ndarray]) -> Checkpoint:
        """Combine the run and its tensors into a checkpoint.

        Args:
            tensors: Arrays, keyed by name, with one array for each name in ``names``.

        Raises:
            ValueError: If the tensors don't match the config.
        """
        weights, first, second = (
            {name: tensors[prefix + name] for name in parameter_shapes(self.config) if prefix + name in tensors}
            for prefix in PREFIXES
        )
        state = TrainingState(self.training["step"], self.training["seed"], first, second)
        check_weights(self.config, weights)
        check_training_state(self.config, state)
        settings = TrainingConfig.from_dict(self.training["settings"])
        return Checkpoint(self.config, settings, weights, state, self.training["progress"], self.vocabulary)


def read_run(directory: Path) -> Run:
    """Read the config, training run, and vocabulary of a sharded checkpoint, but not its tensors.

    Raises:
        OSError: If ``run.safetensors`` can't be read.
        ValueError: If the directory contains no training run.
    """
    with open_file(directory / RUN, KIND) as (description, file):
        config = TransformerConfig.from_dict(description["config"])
        training, _ = read_training(description)
        return Run(config, training, read_vocabulary(description, file))


def partial_directory(directory: Path) -> Path:
    """Return the temporary name of a directory that is not yet complete."""
    return directory.with_name(f".{directory.name}.partial")


def begin_directory(
    directory: Path, description: Mapping[str, Any], vocabulary: bytes | VocabularyFiles | None = None
) -> None:
    """Create the directory of a sharded checkpoint under its temporary name, and write ``run.safetensors`` into it.

    Raises:
        FileExistsError: If a file or directory with the final name exists.
        OSError: If the directory can't be written.
    """
    if directory.exists():
        raise FileExistsError(f"{directory} already exists; choose a different directory")
    partial = partial_directory(directory)
    shutil.rmtree(partial, ignore_errors=True)  # a killed run may have left this directory
    partial.mkdir()
    write_file(partial / RUN, description, {}, vocabulary)


def check_held(directory: Path, held: Held, needed: Held) -> None:
    """Check that a directory contains the tensors of a trainer.

    Args:
        directory: Path of the directory, for the error message.
        held: Shape and dtype of each tensor in the directory, keyed by name.
        needed: Shape and dtype of each tensor of the trainer, keyed by name.

    Raises:
        ValueError: If a name, a shape, or a dtype differs.
    """
    for name, tensor in needed.items():
        if held.get(name) != tensor:
            raise ValueError(f"{directory} must contain {name} as {_shown(tensor)}: got {_shown(held.get(name))}")
    if unknown := held.keys() - needed.keys():
        raise ValueError(f"{directory} contains tensors that are not in the trainer: {', '.join(sorted(unknown))}")


def _shown(tensor: tuple[tuple[int, ...], str] | None) -> str:
    return "nothing" if tensor is None else f"{tensor[1]} {list(tensor[0])}"
