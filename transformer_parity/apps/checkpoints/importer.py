"""Import and export: which format a path is, what is written of it, and the way back."""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from transformer_parity.apps.checkpoints.imported import Imported, Origin
from transformer_parity.apps.checkpoints.options import ReadOptions
from transformer_parity.apps.checkpoints.unrecognised import seen
from transformer_parity.apps.text.kinds import build_vocabulary
from transformer_parity.engine.processes.children import removed_afterwards
from transformer_spec.checks import check_choice, check_integer
from transformer_spec.config import CHOICES, SWITCHES, TransformerConfig
from transformer_spec.files import (
    VocabularyFiles,
    check_fetched,
    open_file,
    read_notes,
    read_vocabulary,
    read_weights,
    save_weights,
)
from transformer_spec.presets import PRESETS
from transformer_spec.search import Search

# Each format: its module in ``formats``, which has ``recognises``, ``read`` and, where it is also written, ``write``;
# and what it is, in a few words. A path of which several are recognised is read as the first.
FORMATS = {
    "ctranslate2": ("ctranslate2", "a folder of CTranslate2's, with model.bin, in floating point"),
    "hf": ("huggingface", "a folder of Hugging Face's, with config.json"),
    "marian": ("marian", "Marian's model.npz"),
    "fairseq": ("fairseq", "fairseq's checkpoint.pt"),
    "opennmt_py": ("opennmt_py", "OpenNMT-py's checkpoint.pt"),
    "joeynmt": ("joeynmt", "JoeyNMT's checkpoint.ckpt, with config.yaml beside it"),
    "annotated": ("annotated", "the Annotated Transformer's state dict"),
    "keras": ("keras_hub", "a Keras model of keras_hub's layers, .weights.h5 or .keras"),
    "torch": ("torch_nn", "a state dict with torch.nn.Transformer in it, and --names for the rest"),
}
# What is asked for, by format: fields of ``ReadOptions``. To any other format, all of them are refused.
ASKED = {
    **dict.fromkeys(("marian", "fairseq"), ("vocab",)),
    **dict.fromkeys(("annotated", "keras", "torch"), ("vocab", "names", "fields")),
}
FILES_OF_VOCABULARY = {  # what --vocab names, by format
    "marian": "source.spm target.spm",
    "fairseq": "dict.en.txt dict.de.txt bpe.codes",
    **dict.fromkeys(("annotated", "keras", "torch"), "source.model target.model"),
}
EXPORTS = ("hf", "marian", "torch", "ctranslate2")
OURS = "parity"  # the format of weights that were trained here


def import_checkpoint(path: str | Path, as_: str | None = None, options: ReadOptions | None = None) -> Imported:
    """Read a checkpoint of other software. Nothing in it is run, and nothing outside its folder is read.

    Args:
        path: A file or a folder, as the format has it.
        as_: The format, one of ``FORMATS``; None recognises it.
        options: What the checkpoint does not say about itself.

    Raises:
        OSError: A file is missing or cannot be read.
        ValueError: The format is not recognised, or what is read is damaged, contradicts itself, or is no model of
            ours; the message says what, and for a field what is needed.
    """
    path = Path(path)
    if as_ is not None:
        check_choice("format", as_, tuple(FORMATS))
    options = options or ReadOptions()
    if not path.exists():
        raise FileNotFoundError(f"there is no file or folder {path}")
    if not path.is_file() and not path.is_dir():
        raise ValueError(f"{path} must be a file or a folder")
    for other in filter(None, (*options.vocab, options.names)):
        if not other.is_file():
            raise FileNotFoundError(f"there is no file {other}")
    for file in (path, *options.vocab, options.names):
        if file is not None:
            check_fetched(file)
    name = as_ or recognised(path, options)
    check_asked(path, name, options)
    try:
        imported = module_of(name).read(path, options)
        check_search(imported.search, imported.config)
    except (IsADirectoryError, NotADirectoryError) as error:
        raise ValueError(f"{path} cannot be imported as {name}: it must be {FORMATS[name][1]}") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be imported: {error}") from error
    if imported.vocabulary is None and name in FILES_OF_VOCABULARY:
        note = f"no vocabulary: to translate text, give its files, as --vocab {FILES_OF_VOCABULARY[name]}"
        imported = dataclasses.replace(imported, notes=(*imported.notes, note))
    return imported


def check_search(search: Search, config: TransformerConfig) -> None:
    """Refuse a search that a file of ours could not hold, or that names ids which its model does not have.

    Raises:
        ValueError: See above.
    """
    Search.from_dict(search.to_dict())
    start = () if search.start_id is None else (search.start_id,)
    named = {"start_id": start, "forced_ids": search.rules.forced_ids, "banned_ids": search.rules.banned_ids}
    for name, ids in named.items():
        if max(ids, default=0) >= config.target_vocab_size:
            raise ValueError(f"{name} must be in [0, {config.target_vocab_size}): got {max(ids)}")


def check_asked(path: Path, name: str, options: ReadOptions) -> None:
    """Refuse what a format does not ask for, and would be ignored.

    Raises:
        ValueError: See above.
    """
    flags = {"vocab": "--vocab", "names": "--names", "fields": "--set"}
    asked = ASKED.get(name, ())
    if ignored := [flag for field, flag in flags.items() if getattr(options, field) and field not in asked]:
        takes = ", ".join(flags[field] for field in asked) or "none of these options"
        raise ValueError(f"{path} is read as {name}, which takes {takes}: leave out {', '.join(ignored)}")


def recognised(path: Path, options: ReadOptions | None = None) -> str:
    """Return the format of a path.

    Args:
        path: A file or a folder.
        options: With names of tensors in them, a file is one of those that need such names.

    Raises:
        ValueError: It is none that can be recognised; the message says what was found there.
    """
    for name in FORMATS:
        if module_of(name).recognises(path):
            return name
    named, hint = seen(path)
    if named and options and options.names:
        return named
    raise ValueError(f"the format of {path} is not recognised: {hint}")


def module_of(name: str) -> ModuleType:
    """Return the module of a format."""
    return import_module(f"transformer_parity.apps.checkpoints.formats.{FORMATS[name][0]}")


def save(path: str | Path, imported: Imported, dtype: str | None = None) -> None:
    """Write an imported checkpoint to one file of ours: weights, vocabulary, search and origin.

    Args:
        path: The file to write or replace, atomically.
        imported: What to write.
        dtype: How to store the weights; None keeps each as it was stored.

    Raises:
        ValueError: A weight overflows the dtype, or is not finite.
        OSError: The file cannot be written.
    """
    vocabulary = imported.vocabulary
    files = VocabularyFiles(vocabulary.kind, vocabulary.files()) if vocabulary else None
    notes = {"search": imported.search.to_dict(), "origin": imported.origin.to_dict()}
    save_weights(path, imported.config, imported.weights, dtype=dtype, vocabulary=files, notes=notes)


def load(path: str | Path) -> Imported:
    """Read a weight file of ours, imported or trained here, or a checkpoint but for its optimizer state.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not ours, or is damaged.
    """
    with open_file(path, "weight file") as (description, file):
        config, weights = read_weights(description, file)
        stored = read_vocabulary(description, file)
        notes = read_notes(description)
        origin = Origin(format=OURS, family=OURS, preset="paper_base", files={})
        return Imported(
            config=config,
            weights=weights,
            vocabulary=None if stored is None else build_vocabulary(stored, config),
            search=read_search(notes, config),
            origin=Origin.from_dict(notes["origin"]) if "origin" in notes else origin,
            part=description.get("part"),
            step=read_step(description),
        )


def read_search(notes: Mapping[str, Any], config: TransformerConfig) -> Search:
    """Return the search in the notes of a file of ours, or greedy search.

    Raises:
        TypeError: A setting has the wrong type.
        ValueError: A setting is out of range, or names an id that the model does not have.
    """
    search = Search.from_dict(notes.get("search", {}))
    check_search(search, config)
    return search


def read_step(description: Mapping[str, Any]) -> int | None:
    """Return the step of a checkpoint of a training run, from the description in its file; None in a weight file.

    Raises:
        TypeError: The step is no integer.
        ValueError: It is negative.
    """
    if "training" not in description:
        return None
    step = description["training"]["step"]
    check_integer("step", step, minimum=0)
    return step


def export_checkpoint(model: Imported, format_: str, folder: str | Path) -> tuple[str, ...]:
    """Write a model in the format of other software.

    Args:
        model: As ``import_checkpoint`` or ``load`` returns it.
        format_: One of ``EXPORTS``.
        folder: It is made, whole or not at all; an empty one may be there.

    Returns:
        What could not be said there: one sentence each.

    Raises:
        OSError: A file cannot be written.
        ValueError: The software does not compute such a model, and the message says what it computes otherwise; or the
            folder is not empty.
    """
    check_choice("format", format_, EXPORTS)
    folder = Path(os.path.realpath(folder))
    check_empty(folder)
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir()
    with removed_afterwards(temporary):
        notes = module_of(format_).write(model, temporary) or ()
        os.replace(temporary, folder)
    return notes


def check_empty(folder: Path) -> None:
    """Refuse a folder to write that holds anything, or that has no folder above it.

    Raises:
        OSError: The folder above is not there.
        ValueError: The folder holds something, or is none.
    """
    if not folder.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {folder.parent}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} must be a new folder, or an empty one")


def differences(config: TransformerConfig, preset: str) -> dict[str, tuple[object, object]]:
    """Return the conventions in which a config is not its preset: by name, the preset's value and its own.

    Sizes, ids and the settings of training are no conventions.
    """
    usual = {
        **TransformerConfig.preset("paper_base", source_vocab_size=9, target_vocab_size=9).to_dict(),
        **PRESETS[preset],
    }
    names = [*CHOICES, *SWITCHES, "layer_norm_epsilon", "position_offset"]
    names.remove("label_smoothing_kind")
    return {name: (usual[name], getattr(config, name)) for name in names if usual[name] != getattr(config, name)}
