"""A trained model loaded from a file, with its vocabulary and search settings."""

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
    """A model for translation, loaded from a weight file or a checkpoint.

    Attributes:
        path: File from which the model was loaded.
        step: Training step of the checkpoint, or None for a weight file.
        config: Config of the model.
        weights: One array per canonical name.
        vocabulary: Vocabulary that converts text to IDs.
        search: Search settings in the file. If the file contains no search settings, the search is greedy.
    """

    path: Path
    step: int | None
    config: TransformerConfig
    weights: Mapping[str, ndarray]
    vocabulary: Vocabulary
    search: Search = field(default_factory=Search)

    def between(self, source: str | None, target: str | None) -> Trained:
        """Return a copy of the model with the given source and target languages.

        Raises:
            ValueError: If a required language is missing, if a language is unknown, or if the vocabulary has no
                languages.
        """
        vocabulary = self.vocabulary.between(source, target)
        search = self.search
        if vocabulary.start_id is not None:
            search = replace(search, start_id=vocabulary.start_id)
        if vocabulary.forced_ids:
            search = replace(search, rules=replace(search.rules, forced_ids=vocabulary.forced_ids))
        return replace(self, vocabulary=vocabulary, search=search)

    def translation(self, source: str) -> list[int]:
        """Translate a sentence with the NumPy reference, and return the token IDs of the translation."""
        model = PORTS["numpy"].load(self.config, self.weights, Placement("float32"))
        found = model.search(pad([self.vocabulary.ids(source)], self.config), self.search).nbest_ids[0, 0]
        return [int(token) for token in found if token != self.config.pad_id]


def read_trained(path: Path) -> Trained:
    """Read a model from a weight file or a checkpoint. A checkpoint's optimizer state is not read.

    Raises:
        OSError: If the file cannot be read.
        UsageError: If a package that the vocabulary requires is not installed.
        ValueError: If the file has a different format or contains no vocabulary, or if the vocabulary does not fit the
            model.
    """
    with open_file(path, "weight file") as (description, file):
        config, weights = read_weights(description, file)
        stored = read_vocabulary(description, file)
        search = read_search(read_notes(description), config)
        step = read_step(description)
    if stored is None:
        raise ValueError(
            f"{path} contains no vocabulary; to add one, rerun `parity import`, which notes the files that it needs, "
            "or call save_weights with vocabulary=load_vocabulary(FILE), where FILE is a weight file written by "
            "`parity train`"
        )
    try:
        vocabulary = build_vocabulary(stored, config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return Trained(path, step, config, weights, vocabulary, search)
