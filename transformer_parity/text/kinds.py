"""Every kind of vocabulary: built from the files that travel with the weights, or read from a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reference_numpy.config import TransformerConfig
from reference_numpy.files import VocabularyFiles
from transformer_parity.text.subwords import Subwords
from transformer_parity.text.vocabulary import Vocabulary


def build_vocabulary(stored: bytes | VocabularyFiles, config: TransformerConfig) -> Vocabulary:
    """Return the vocabulary that a weight file holds.

    Args:
        stored: As ``load_vocabulary`` returns it.
        config: That of the model.

    Raises:
        ValueError: There is no such kind, or the files are not what that kind is made of, or not of this model.
    """
    if isinstance(stored, bytes):
        return Subwords(stored).numbered(config)
    raise ValueError(f"there is no kind of vocabulary that is called {stored.kind!r}")


def read_vocabulary_folder(folder: Path, family: str, fields: Mapping[str, Any]) -> Vocabulary:
    """Return the vocabulary of a Hugging Face folder.

    Args:
        folder: Nothing outside of it is read.
        family: The ``model_type`` of its config.json.
        fields: Everything in its config.json.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file is missing, too large, or not what it should be, or the family is not known.
    """
    raise ValueError(f"the vocabulary of a {family} model cannot be read")
