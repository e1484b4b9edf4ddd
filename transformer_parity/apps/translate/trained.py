"""A trained model as its file describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from numpy import ndarray

from transformer_parity.apps.checkpoints.importer import read_search, read_step
from transformer_parity.apps.text.kinds import build_vocabulary
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.ports.registry import PORTS
from transformer_parity.transformer.sentences.vocabulary import Vocabulary, pad
from transformer_spec.config import TransformerConfig
from transformer_spec.files import open_file, read_notes, read_vocabulary, read_weights
from transformer_spec.search import Search


@dataclass(frozen=True)
class Trained:
    """A model that can translate: a weight file, or a checkpoint but for its optimizer state.

    Attributes:
        path: The file.
        step: Of the run that wrote it; None in a weight file.
        config: The model.
        weights: One array per canonical name.
        vocabulary: What cuts a line into ids.
        search: The search settings of the file; greedy search, if it has none.
    """

    path: Path
    step: int | None
    config: TransformerConfig
    weights: Mapping[str, ndarray]
    vocabulary: Vocabulary
    search: Search = field(default_factory=Search)

    def between(self, source: str | None, target: str | None) -> Trained:
        """Return the model for translations from one language into another.

        Raises:
            ValueError: A language is missing or not known, or there are none to choose from.
        """
        vocabulary = self.vocabulary.between(source, target)
        search = self.search
        if vocabulary.start_id is not None:
            search = replace(search, start_id=vocabulary.start_id)
        if vocabulary.forced_ids:
            search = replace(search, rules=replace(search.rules, forced_ids=vocabulary.forced_ids))
        return replace(self, vocabulary=vocabulary, search=search)

    def translation(self, source: str) -> list[int]:
        """Return the ids of the translation of a sentence, as the NumPy reference searches it."""
        model = PORTS["numpy"].load(self.config, self.weights, Placement("float32"))
        found = model.search(pad([self.vocabulary.ids(source)], self.config), self.search).nbest_ids[0, 0]
        return [int(token) for token in found if token != self.config.pad_id]


def read_trained(path: Path) -> Trained:
    """Read a weight file or a checkpoint, whose moments are left unread.

    Raises:
        OSError: The file cannot be read.
        UsageError: A package is not installed that its vocabulary needs.
        ValueError: The file is not ours, or holds no vocabulary, or one that is not of its model.
    """
    with open_file(path, "weight file") as (description, file):
        config, weights = read_weights(description, file)
        stored = read_vocabulary(description, file)
        search = read_search(read_notes(description), config)
        step = read_step(description)
    if stored is None:
        raise ValueError(
            f"{path} holds no vocabulary: `parity train` writes one, `parity import` where the checkpoint has one or "
            "--vocab names its files, and save_weights with vocabulary=load_vocabulary(FILE)"
        )
    try:
        vocabulary = build_vocabulary(stored, config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return Trained(path, step, config, weights, vocabulary, search)
