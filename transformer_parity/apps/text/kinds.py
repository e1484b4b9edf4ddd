"""Build vocabularies of every kind, either from files that are stored with the weights or from files in a directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformer_parity.apps.text import marian, moses, multilingual, t5
from transformer_parity.apps.text.maps import read_files
from transformer_parity.apps.text.marian import MarianVocabulary
from transformer_parity.apps.text.moses import MosesVocabulary
from transformer_parity.apps.text.multilingual import MERGES, MODEL, TABLE, TOKENIZER, MultilingualVocabulary
from transformer_parity.transformer.sentences.subwords import Subwords
from transformer_parity.transformer.sentences.vocabulary import Vocabulary
from transformer_spec.config import TransformerConfig
from transformer_spec.files import VocabularyFiles

SETTINGS = marian.SETTINGS
MARIAN, MOSES, OWN_TEMPLATE = MarianVocabulary.kind, MosesVocabulary.kind, multilingual.TokenizerVocabulary.kind

KINDS: dict[str, Callable[[Mapping[str, bytes]], Vocabulary]] = {
    MARIAN: MarianVocabulary,
    MOSES: MosesVocabulary,
    OWN_TEMPLATE: multilingual.TokenizerVocabulary,
    t5.T5Vocabulary.kind: t5.T5Vocabulary,
    t5.ByteVocabulary.kind: t5.ByteVocabulary,
    **{kind: partial(MultilingualVocabulary, kind=kind) for kind in multilingual.FORMS},
}


@dataclass(frozen=True)
class Directory:
    """The files in a Hugging Face directory that define a vocabulary.

    Attributes:
        kind: Kind of the vocabulary.
        choices: Alternative sets of files. The first set whose files all exist is read.
        optional: Additional files that are read if they exist.
    """

    kind: str
    choices: tuple[tuple[str, ...], ...]
    optional: tuple[str, ...] = (SETTINGS,)


# Files of each tokenizer class. The keys are class names without the suffixes ``Tokenizer`` and ``TokenizerFast``.
SENTENCEPIECE = ((TOKENIZER,), (MODEL,))
CLASSES = {
    "Marian": Directory(MARIAN, (("source.spm", "target.spm", "vocab.json"),), ("target_vocab.json", SETTINGS)),
    "Nllb": Directory("nllb", SENTENCEPIECE),
    "M2M100": Directory("m2m_100", ((MODEL, TABLE),)),
    "MBart": Directory("mbart", SENTENCEPIECE),
    "MBart50": Directory("mbart50", SENTENCEPIECE),
    "PLBart": Directory("plbart", ((MODEL,),)),
    "FSMT": Directory(MOSES, ((moses.SOURCE_TABLE, moses.TARGET_TABLE, MERGES, SETTINGS),), ()),
    "Bart": Directory(OWN_TEMPLATE, ((TOKENIZER,), (TABLE, MERGES))),
    "Roberta": Directory(OWN_TEMPLATE, ((TOKENIZER,), (TABLE, MERGES))),
    "Pegasus": Directory(OWN_TEMPLATE, ((TOKENIZER,),)),
    "Blenderbot": Directory(OWN_TEMPLATE, ((TOKENIZER,),)),
    "T5": Directory(t5.T5Vocabulary.kind, ((TOKENIZER,), (t5.MODEL,)), (SETTINGS, t5.ADDED)),
    "ByT5": Directory(t5.ByteVocabulary.kind, ((),)),
}
FAMILIES = {
    **{"marian": "Marian", "m2m_100": "M2M100", "nllb": "Nllb", "mbart": "MBart", "mbart50": "MBart50"},
    **{"plbart": "PLBart", "fsmt": "FSMT", "bart": "Bart", "pegasus": "Pegasus", "blenderbot": "Blenderbot"},
    **{"t5": "T5", "mt5": "T5"},
}


def build_vocabulary(stored: bytes | VocabularyFiles, config: TransformerConfig) -> Vocabulary:
    """Build the vocabulary that is stored in a weight file.

    Args:
        stored: Result of ``load_vocabulary``.
        config: Config of the model.

    Raises:
        UsageError: If a package that this kind of vocabulary requires is not installed.
        ValueError: If the kind is unknown, if a file is missing or invalid, or if the vocabulary does not fit the
            model.
    """
    if isinstance(stored, bytes):
        return Subwords(stored).numbered(config)
    if stored.kind not in KINDS:
        raise ValueError(f"the kind of a vocabulary must be one of {', '.join(KINDS)}: got {stored.kind!r}")
    return checked(_built(stored.kind, stored.files), config.source_vocab_size, config.target_vocab_size)


def read_vocabulary_directory(directory: Path, family: str, fields: Mapping[str, Any]) -> Vocabulary:
    """Return the vocabulary in a Hugging Face directory.

    The tokenizer class in ``tokenizer_config.json`` or config.json determines the kind of vocabulary. If neither file
    specifies a tokenizer class, the model family determines the kind of vocabulary. NLLB models also belong to the
    m2m_100 family, but unlike M2M100 models they have no ``vocab.json``.

    Args:
        directory: Directory to read. No files outside the directory are read.
        family: Value of ``model_type`` in the directory's config.json.
        fields: Content of the directory's config.json.

    Raises:
        OSError: If a file cannot be read.
        UsageError: If a package that this kind of vocabulary requires is not installed.
        ValueError: If a file is missing, too large, or invalid, or if the family is unknown.
    """
    settings = multilingual.read_json(read_files(directory, (), (SETTINGS,)), SETTINGS)
    said = str(settings.get("tokenizer_class") or fields.get("tokenizer_class") or "")
    name = said.removesuffix("Fast").removesuffix("Tokenizer")
    if name not in CLASSES:
        if family not in FAMILIES:
            raise ValueError(
                f"the family of the vocabulary in {directory} must be one of {', '.join(FAMILIES)}: got {family}"
            )
        name = "Nllb" if family == "m2m_100" and not (directory / TABLE).is_file() else FAMILIES[family]
    form = CLASSES[name]
    complete = [names for names in form.choices if all((directory / file).is_file() for file in names)]
    if not complete:
        needed = ", or ".join(" and ".join(names) for names in form.choices)
        raise ValueError(f"{directory} does not contain a complete {name} vocabulary: it must contain {needed}")
    kind = OWN_TEMPLATE if name == "T5" and complete[0] == (TOKENIZER,) else form.kind
    vocabulary = _built(kind, read_files(directory, complete[0], form.optional))
    size = fields.get("vocab_size")
    source, target = fields.get("src_vocab_size", size), fields.get("tgt_vocab_size", fields.get("decoder_vocab_size"))
    target = source if target is None else target
    return checked(vocabulary, *(one if type(one) is int else max(vocabulary.sizes) for one in (source, target)))


def _built(kind: str, files: Mapping[str, bytes]) -> Vocabulary:
    """Build a vocabulary from its files. Raise a ``ValueError`` if a file is missing or is not UTF-8 text."""
    try:
        return KINDS[kind](files)
    except KeyError as error:
        raise ValueError(f"a vocabulary of kind {kind} requires {error}") from error
    except UnicodeDecodeError as error:
        name = next((name for name, content in files.items() if content == error.object), kind)
        raise ValueError(f"vocabulary file {name} is not valid UTF-8: {error}") from error


def checked(vocabulary: Vocabulary, source_vocab_size: int, target_vocab_size: int) -> Vocabulary:
    """Check that a vocabulary is not larger than the model's vocabulary sizes, and return the vocabulary.

    Raises:
        ValueError: If the source or target vocabulary is larger than the model's vocabulary size.
    """
    for side, has, needs in zip(
        ("source", "target"), (source_vocab_size, target_vocab_size), vocabulary.sizes, strict=True
    ):
        if needs > has:
            raise ValueError(
                f"the {side} vocabulary must have at most {has:,} IDs, as many as the model: got {needs:,}"
            )
    return vocabulary
