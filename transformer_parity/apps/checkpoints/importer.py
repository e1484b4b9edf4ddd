"""Detect checkpoint formats, import checkpoints, and write them in this project's format or in other formats."""

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
from transformer_parity.apps.checkpoints.unrecognized import seen
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

# For each format: its module in ``formats`` and a short description. All modules define ``recognizes`` and ``read``. A
# module also defines ``write`` if models can be exported to its format. If multiple modules recognize a path, the first
# one in this dict is used.
FORMATS = {
    "ctranslate2": ("ctranslate2", "a CTranslate2 directory with model.bin, not quantized"),
    "hf": ("huggingface", "a Hugging Face directory with config.json"),
    "marian": ("marian", "Marian's model.npz"),
    "fairseq": ("fairseq", "fairseq's checkpoint.pt"),
    "opennmt_py": ("opennmt_py", "OpenNMT-py's checkpoint.pt"),
    "joeynmt": ("joeynmt", "JoeyNMT's checkpoint.ckpt, with config.yaml in the same directory"),
    "annotated": ("annotated", "the Annotated Transformer's state dict"),
    "keras": ("keras_hub", "a Keras model with keras_hub layers, .weights.h5 or .keras"),
    "torch": ("torch_nn", "a state dict that contains torch.nn.Transformer, with --names for the other parameters"),
}
# Fields of ``ReadOptions`` that each format supports. Formats that are not listed here do not support any options.
ASKED = {
    **dict.fromkeys(("marian", "fairseq"), ("vocab",)),
    **dict.fromkeys(("annotated", "keras", "torch"), ("vocab", "names", "fields")),
}
FILES_OF_VOCABULARY = {  # example arguments of --vocab for each format
    "marian": "source.spm target.spm",
    "fairseq": "dict.en.txt dict.de.txt bpe.codes",
    **dict.fromkeys(("annotated", "keras", "torch"), "source.model target.model"),
}
EXPORTS = ("hf", "marian", "torch", "ctranslate2")
OURS = "parity"  # format of models trained with this project


def import_checkpoint(path: str | Path, as_: str | None = None, options: ReadOptions | None = None) -> Imported:
    """Read another program's checkpoint. No code in the checkpoint is run, and no files outside its directory are read.

    Args:
        path: File or directory, depending on the format.
        as_: Name of the format, a key of ``FORMATS``. If None, the format is detected.
        options: The user's options, which provide information that the checkpoint does not contain.

    Raises:
        OSError: If a file is missing or cannot be read.
        ValueError: If the format is not recognized, if the checkpoint is damaged or inconsistent, or if this project
            does not support the model. If a config field has an unsupported value, the message lists the supported
            values.
    """
    path = Path(path)
    if as_ is not None:
        check_choice("format", as_, tuple(FORMATS))
    options = options or ReadOptions()
    if not path.exists():
        raise FileNotFoundError(f"there is no file or directory {path}")
    if not path.is_file() and not path.is_dir():
        raise ValueError(f"{path} must be a regular file or a directory")
    for other in filter(None, (*options.vocab, options.names)):
        if not other.is_file():
            raise FileNotFoundError(f"there is no file {other}")
    for file in (path, *options.vocab, options.names):
        if file is not None:
            check_fetched(file)
    name = as_ or recognized(path, options)
    check_asked(path, name, options)
    try:
        imported = module_of(name).read(path, options)
        check_search(imported.search, imported.config)
    except (IsADirectoryError, NotADirectoryError) as error:
        raise ValueError(f"{path} cannot be imported as {name}: expected {FORMATS[name][1]}") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be imported: {error}") from error
    if imported.vocabulary is None and name in FILES_OF_VOCABULARY:
        note = (
            "the checkpoint contains no vocabulary; to translate text, pass vocabulary files, such as --vocab "
            f"{FILES_OF_VOCABULARY[name]}"
        )
        imported = dataclasses.replace(imported, notes=(*imported.notes, note))
    return imported


def check_search(search: Search, config: TransformerConfig) -> None:
    """Check that search settings can be stored in a weight file and contain only IDs from the model's vocabulary.

    Raises:
        ValueError: If the settings cannot be stored or contain an ID that is not in the vocabulary.
    """
    Search.from_dict(search.to_dict())
    start = () if search.start_id is None else (search.start_id,)
    named = {"start_id": start, "forced_ids": search.rules.forced_ids, "banned_ids": search.rules.banned_ids}
    for name, ids in named.items():
        if max(ids, default=0) >= config.target_vocab_size:
            raise ValueError(f"{name} must be in [0, {config.target_vocab_size}): got {max(ids)}")


def check_asked(path: Path, name: str, options: ReadOptions) -> None:
    """Check that the user has not specified options that the format would ignore.

    Raises:
        ValueError: If the format would ignore an option. The message lists all ignored options.
    """
    flags = {"vocab": "--vocab", "names": "--names", "fields": "--set"}
    asked = ASKED.get(name, ())
    if ignored := [flag for field, flag in flags.items() if getattr(options, field) and field not in asked]:
        takes = f"only supports {', '.join(flags[field] for field in asked)}" if asked else "supports no options"
        raise ValueError(f"{path} has the format {name}, which {takes}; remove {', '.join(ignored)}")


def recognized(path: Path, options: ReadOptions | None = None) -> str:
    """Detect the format of a file or directory, and return the format's name.

    Args:
        path: File or directory.
        options: The user's options. State dicts of ``torch.nn.Transformer`` are recognized only if ``options.names`` is
            set.

    Raises:
        ValueError: If the format is not recognized. The message describes the content of the path.
    """
    for name in FORMATS:
        if module_of(name).recognizes(path):
            return name
    named, hint = seen(path)
    if named and options and options.names:
        return named
    raise ValueError(f"the format of {path} is not recognized: {hint}")


def module_of(name: str) -> ModuleType:
    """Return the module that implements a format."""
    return import_module(f"transformer_parity.apps.checkpoints.formats.{FORMATS[name][0]}")


def save(path: str | Path, imported: Imported, dtype: str | None = None) -> None:
    """Write an imported checkpoint to a weight file, including its vocabulary, search settings, and origin.

    Args:
        path: File to create or overwrite. The write is atomic.
        imported: Checkpoint to write.
        dtype: Dtype of the stored weights. If None, each array keeps its dtype.

    Raises:
        ValueError: If a weight is not finite or overflows the dtype.
        OSError: If the file cannot be written.
    """
    vocabulary = imported.vocabulary
    files = VocabularyFiles(vocabulary.kind, vocabulary.files()) if vocabulary else None
    notes = {"search": imported.search.to_dict(), "origin": imported.origin.to_dict()}
    save_weights(path, imported.config, imported.weights, dtype=dtype, vocabulary=files, notes=notes)


def load(path: str | Path) -> Imported:
    """Read one of this project's weight files or training checkpoints. A checkpoint's optimizer state is not read.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is damaged or has a different format.
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
    """Return the search settings in a weight file's metadata. If the metadata has no settings, the search is greedy.

    Raises:
        TypeError: If a setting has the wrong type.
        ValueError: If a setting is out of range or contains an ID that is not in the model's vocabulary.
    """
    search = Search.from_dict(notes.get("search", {}))
    check_search(search, config)
    return search


def read_step(description: Mapping[str, Any]) -> int | None:
    """Return the training step in a checkpoint's metadata, or None for a weight file.

    Raises:
        TypeError: If the step is not an integer.
        ValueError: If the step is negative.
    """
    if "training" not in description:
        return None
    step = description["training"]["step"]
    check_integer("step", step, minimum=0)
    return step


def export_checkpoint(model: Imported, format_: str, directory: str | Path) -> tuple[str, ...]:
    """Write a model in another program's format.

    Args:
        model: Model returned by ``import_checkpoint`` or ``load``.
        format_: Name of the format, a key of ``EXPORTS``.
        directory: Output directory, which must either be empty or not exist. If the export fails, the directory is not
            created.

    Returns:
        One sentence for each setting that the format cannot store.

    Raises:
        OSError: If a file cannot be written.
        ValueError: If the program does not support the model or the directory is not empty. For an unsupported model,
            the message lists the unsupported config fields.
    """
    check_choice("format", format_, EXPORTS)
    directory = Path(os.path.realpath(directory))
    check_empty(directory)
    temporary = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir()
    with removed_afterwards(temporary):
        notes = module_of(format_).write(model, temporary) or ()
        os.replace(temporary, directory)
    return notes


def check_empty(directory: Path) -> None:
    """Check that a path can be used as an output directory.

    The parent directory must exist, and the directory itself must either be empty or not exist.

    Raises:
        OSError: If the parent directory does not exist.
        ValueError: If the path is a file, or if it is a directory that is not empty.
    """
    if not directory.parent.is_dir():
        raise FileNotFoundError(f"there is no directory {directory.parent}")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} already exists and is not an empty directory")


def differences(config: TransformerConfig, preset: str) -> dict[str, tuple[object, object]]:
    """Return the config fields that differ from a preset, excluding sizes, IDs, and training settings.

    Returns:
        Dict from the name of each differing field to a pair of its values: first the preset's value, then the config's.
    """
    usual = {
        **TransformerConfig.preset("paper_base", source_vocab_size=9, target_vocab_size=9).to_dict(),
        **PRESETS[preset],
    }
    names = [*CHOICES, *SWITCHES, "layer_norm_epsilon", "position_offset", "relative_buckets", "relative_max_distance"]
    names.remove("label_smoothing_kind")
    return {name: (usual[name], getattr(config, name)) for name in names if usual[name] != getattr(config, name)}
