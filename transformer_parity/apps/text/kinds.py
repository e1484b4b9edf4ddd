"""Every kind of vocabulary: built from the files that travel with the weights, or read from a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformer_parity.apps.text import marian, moses, multilingual
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
    **{kind: partial(MultilingualVocabulary, kind=kind) for kind in multilingual.FORMS},
}


@dataclass(frozen=True)
class Folder:
    """Which files of a Hugging Face folder make a vocabulary.

    Attributes:
        kind: Of the vocabulary.
        choices: Sets of files; the first that is complete is read.
        optional: Files that may stand beside them.
    """

    kind: str
    choices: tuple[tuple[str, ...], ...]
    optional: tuple[str, ...] = (SETTINGS,)


# By the class of the tokenizer, without ``Tokenizer`` and ``Fast``.
SENTENCEPIECE = ((TOKENIZER,), (MODEL,))
CLASSES = {
    "Marian": Folder(MARIAN, (("source.spm", "target.spm", "vocab.json"),), ("target_vocab.json", SETTINGS)),
    "Nllb": Folder("nllb", SENTENCEPIECE),
    "M2M100": Folder("m2m_100", ((MODEL, TABLE),)),
    "MBart": Folder("mbart", SENTENCEPIECE),
    "MBart50": Folder("mbart50", SENTENCEPIECE),
    "PLBart": Folder("plbart", ((MODEL,),)),
    "FSMT": Folder(MOSES, ((moses.SOURCE_TABLE, moses.TARGET_TABLE, MERGES, SETTINGS),), ()),
    "Bart": Folder(OWN_TEMPLATE, ((TOKENIZER,), (TABLE, MERGES))),
    "Roberta": Folder(OWN_TEMPLATE, ((TOKENIZER,), (TABLE, MERGES))),
    "Pegasus": Folder(OWN_TEMPLATE, ((TOKENIZER,),)),
    "Blenderbot": Folder(OWN_TEMPLATE, ((TOKENIZER,),)),
}
FAMILIES = {
    **{"marian": "Marian", "m2m_100": "M2M100", "nllb": "Nllb", "mbart": "MBart", "mbart50": "MBart50"},
    **{"plbart": "PLBart", "fsmt": "FSMT", "bart": "Bart", "pegasus": "Pegasus", "blenderbot": "Blenderbot"},
}


def build_vocabulary(stored: bytes | VocabularyFiles, config: TransformerConfig) -> Vocabulary:
    """Return the vocabulary that a weight file holds.

    Args:
        stored: As ``load_vocabulary`` returns it.
        config: That of the model.

    Raises:
        UsageError: A package is not installed that this kind of vocabulary needs.
        ValueError: There is no such kind, or the files are not what that kind is made of, or not of this model.
    """
    if isinstance(stored, bytes):
        return Subwords(stored).numbered(config)
    if stored.kind not in KINDS:
        raise ValueError(f"there is no kind of vocabulary called {stored.kind!r}: there are {', '.join(KINDS)}")
    return checked(_built(stored.kind, stored.files), config.source_vocab_size, config.target_vocab_size)


def read_vocabulary_folder(folder: Path, family: str, fields: Mapping[str, Any]) -> Vocabulary:
    """Return the vocabulary of a Hugging Face folder.

    Which one it is, is what ``tokenizer_config.json`` says, or else the family. NLLB's models are of the family m2m_100
    too: they have a table of their own, ``vocab.json``, unless they are NLLB's.

    Args:
        folder: Nothing outside of it is read.
        family: The ``model_type`` of its config.json.
        fields: Everything in its config.json.

    Raises:
        OSError: A file cannot be read.
        UsageError: A package is not installed that this kind of vocabulary needs.
        ValueError: A file is missing, too large, or not what it should be, or the family is not known.
    """
    settings = multilingual.read_json(read_files(folder, (), (SETTINGS,)), SETTINGS)
    said = str(settings.get("tokenizer_class") or fields.get("tokenizer_class") or "")
    name = said.removesuffix("Fast").removesuffix("Tokenizer")
    if name not in CLASSES:
        if family not in FAMILIES:
            raise ValueError(f"{folder}: the vocabulary of a {family} model cannot be read: {', '.join(FAMILIES)} can")
        name = "Nllb" if family == "m2m_100" and not (folder / TABLE).is_file() else FAMILIES[family]
    form = CLASSES[name]
    complete = [names for names in form.choices if all((folder / file).is_file() for file in names)]
    if not complete:
        needed = ", or ".join(" and ".join(names) for names in form.choices)
        raise ValueError(f"{folder} holds no vocabulary of {name}: it needs {needed}")
    vocabulary = _built(form.kind, read_files(folder, complete[0], form.optional))
    size = fields.get("vocab_size")
    source, target = fields.get("src_vocab_size", size), fields.get("tgt_vocab_size", fields.get("decoder_vocab_size"))
    target = source if target is None else target
    return checked(vocabulary, *(one if type(one) is int else max(vocabulary.sizes) for one in (source, target)))


def _built(kind: str, files: Mapping[str, bytes]) -> Vocabulary:
    """Return a vocabulary; refuse files that are not all there, or are no text."""
    try:
        return KINDS[kind](files)
    except KeyError as error:
        raise ValueError(f"a vocabulary of the kind {kind} needs {error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"a file of the vocabulary is not UTF-8 text: {error}") from error


def checked(vocabulary: Vocabulary, source_vocab_size: int, target_vocab_size: int) -> Vocabulary:
    """Refuse a vocabulary with ids that a model does not have.

    Raises:
        ValueError: See above.
    """
    for side, has, needs in zip(
        ("source", "target"), (source_vocab_size, target_vocab_size), vocabulary.sizes, strict=True
    ):
        if needs > has:
            raise ValueError(f"the vocabulary has {needs:,} ids, and the model has {has:,} on the {side} side")
    return vocabulary
