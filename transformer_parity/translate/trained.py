"""A trained model as its file describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from numpy import ndarray

from reference_numpy.checks import check_integer
from reference_numpy.config import TransformerConfig
from reference_numpy.files import open_file, read_vocabulary, read_weights
from transformer_parity.text.kinds import build_vocabulary
from transformer_parity.text.vocabulary import Vocabulary


@dataclass(frozen=True)
class Trained:
    """What `parity train` wrote: a weight file, or a checkpoint but for its optimizer state."""

    path: Path
    step: int | None  # None in a weight file
    config: TransformerConfig
    weights: Mapping[str, ndarray]
    vocabulary: Vocabulary


def read_trained(path: Path) -> Trained:
    """Read a weight file or a checkpoint, whose moments are left unread.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not ours, or holds no vocabulary.
    """
    with open_file(path, "weight file") as (description, file):
        config, weights = read_weights(description, file)
        stored = read_vocabulary(description, file)
        step = None
        if "training" in description:
            step = description["training"]["step"]
            check_integer("step", step, minimum=0)
    if stored is None:
        raise ValueError(f"{path} holds no vocabulary: parity train writes one, save_weights only when given it")
    try:
        vocabulary = build_vocabulary(stored, config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return Trained(path, step, config, weights, vocabulary)
