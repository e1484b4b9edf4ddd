"""The folder of a checkpoint, into which several processes write: what those of all frameworks have in common.

Its tensors are in the framework's own format, moments behind the same prefixes as in the one file. All else that a
checkpoint holds is in ``run.safetensors``. The folder has its name once it is complete.
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
PREFIXES = ("", FIRST_MOMENT, SECOND_MOMENT)  # of the names of weights and moments

Held = Mapping[str, tuple[tuple[int, ...], str]]  # shape and dtype of each tensor, by name


class Run(NamedTuple):
    """All that a folder holds beside tensors."""

    config: TransformerConfig
    training: dict[str, Any]
    vocabulary: bytes | VocabularyFiles | None

    @property
    def names(self) -> list[str]:
        """The canonical names of its weights, and those of its moments behind their prefixes."""
        return [prefix + name for prefix in PREFIXES for name in parameter_shapes(self.config)]

    def joined(self, tensors: Mapping[str, ndarray]) -> Checkpoint:
        """Return the run and its tensors, by ``names``, as a checkpoint.

        Raises:
            ValueError: The tensors are not those of the config.
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


def read_run(folder: Path) -> Run:
    """Read all that a folder holds beside tensors.

    Raises:
        OSError: The file cannot be read.
        ValueError: The folder holds no training run.
    """
    with open_file(folder / RUN, KIND) as (description, file):
        config = TransformerConfig.from_dict(description["config"])
        training, _ = read_training(description)
        return Run(config, training, read_vocabulary(description, file))


def partial_folder(folder: Path) -> Path:
    """Return the name of a folder until it is complete."""
    return folder.with_name(f".{folder.name}.partial")


def begin_folder(
    folder: Path, description: Mapping[str, Any], vocabulary: bytes | VocabularyFiles | None = None
) -> None:
    """Make the folder that is to be renamed, with all but its tensors.

    Raises:
        FileExistsError: There is something of the final name.
        OSError: The folder cannot be written.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists already")
    partial = partial_folder(folder)
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    partial.mkdir()
    write_file(partial / RUN, description, {}, vocabulary)


def check_held(folder: Path, held: Held, needed: Held) -> None:
    """Refuse a folder of other tensors than a trainer has.

    Raises:
        ValueError: A name, a shape or a dtype differs.
    """
    for name, tensor in needed.items():
        if held.get(name) != tensor:
            raise ValueError(f"{folder} must hold {name} as {_shown(tensor)}: got {_shown(held.get(name))}")
    if unknown := held.keys() - needed.keys():
        raise ValueError(f"{folder} holds what the model lacks: {', '.join(sorted(unknown))}")


def _shown(tensor: tuple[tuple[int, ...], str] | None) -> str:
    return "nothing" if tensor is None else f"{tensor[1]} {list(tensor[0])}"
