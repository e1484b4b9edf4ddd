"""PyTorch state dicts that contain only tensors. The user specifies missing information in a TOML file.

The TOML file may contain three tables:

- ``[config]`` sets config fields that cannot be inferred from the tensors.
- ``[names]`` maps canonical names to the user's names, for parameters whose names the format does not define.
- ``[file]`` describes the file. ``state`` is the key of the state dict in the file, ``prefix`` is the prefix of the
  format's names, and ``ignored`` is a list of glob patterns for tensors that are not weights.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray

from reference_numpy.embedding import sinusoidal_encoding
from transformer_parity.apps.checkpoints.options import ReadOptions
from transformer_parity.apps.containers import pickles, tensors
from transformer_parity.apps.containers.directory import read_bytes
from transformer_spec.config import TransformerConfig

if TYPE_CHECKING:
    from transformer_parity.transformer.sentences.vocabulary import Vocabulary

LARGEST = 2**20  # maximum size of a TOML file in bytes
KNOWN = {"config": (), "names": (), "file": ("state", "prefix", "ignored")}
ROUNDED = 1e-6  # tolerance per position for sinusoidal tables, whose angles may be rounded to float32


@dataclass(frozen=True)
class UserNames:
    """The user's description of a state dict. The docstring of this module explains the fields."""

    config: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    state: str = ""
    prefix: str = ""
    ignored: tuple[str, ...] = ()


def read_names(options: ReadOptions) -> UserNames:
    """Read the user's TOML file, and merge it with the command-line options. The options take precedence.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is not valid TOML, if it contains an unknown table, key, or field, or if a value has the
            wrong type.
    """
    content: dict[str, Any] = {}
    what = options.names.name if options.names else ""
    if options.names:
        try:
            content = tomllib.loads(read_bytes(options.names, LARGEST).decode())
        except ValueError as error:  # includes tomllib.TOMLDecodeError and UnicodeDecodeError
            raise ValueError(f"{what} is not valid TOML: {error}") from error
    for table, keys in content.items():
        if table not in KNOWN or not isinstance(keys, dict):
            raise ValueError(f"{what} may only contain the tables {', '.join(KNOWN)}: got {table}")
        if KNOWN[table] and (unknown := sorted(set(keys) - set(KNOWN[table]))):
            raise ValueError(
                f"[{table}] in {what} may only contain the keys {', '.join(KNOWN[table])}: got {', '.join(unknown)}"
            )
    names, rest = content.get("names", {}), content.get("file", {})
    ignored = rest.get("ignored", [])
    texts = [
        *names.values(),
        rest.get("state", ""),
        rest.get("prefix", ""),
        *(ignored if isinstance(ignored, list) else [0]),
    ]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"the names in {what} must be strings, and 'ignored' must be a list of strings")
    fields = {**content.get("config", {}), **options.fields}
    known = {entry.name for entry in dataclasses.fields(TransformerConfig)}
    if unknown := sorted(set(fields) - known):
        alike = [near for name in unknown for near in difflib.get_close_matches(name, known, 1)]
        meant = f"did you mean {', '.join(alike)}?" if alike else f"the fields are {', '.join(sorted(known))}"
        raise ValueError(f"unknown config field {', '.join(unknown)}; {meant}")
    return UserNames(fields, names, rest.get("state", ""), rest.get("prefix", ""), tuple(ignored))


def read_state(path: Path, key: str = "") -> dict[str, ndarray]:
    """Read the tensors of a safetensors file or of a file written by ``torch.save``.

    Args:
        path: File to read.
        key: Dotted key of the state dict in a file written by ``torch.save``. Empty if the state dict is the top-level
            object in the file.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is damaged, contains code or unsupported objects, or has no state dict under this key.
    """
    if path.suffix == ".safetensors":
        return tensors.read(path)
    content = pickles.read(path)
    for part in filter(None, key.split(".")):
        if not isinstance(content, dict) or part not in content:
            held = ", ".join(map(str, content)) if isinstance(content, dict) else type(content).__name__
            raise ValueError(f"{path.name} does not contain the key {part!r}: found {held}")
        content = content[part]
    return pickles.arrays(content, path.name)


def tensor_names(path: Path) -> list[str]:
    """Return the names of the tensors in a file. This function raises the same errors as ``read_state``."""
    return tensors.names(path) if path.suffix == ".safetensors" else list(read_state(path))


def needed_fields(said: Mapping[str, Any], needed: Iterable[str], what: str) -> None:
    """Check that the user has specified the config fields that cannot be inferred from the tensors.

    Raises:
        ValueError: If a field is missing. The message lists all missing fields.
    """
    if missing := [name for name in needed if name not in said]:
        raise ValueError(
            f"{what} does not contain {', '.join(missing)}; set each value with an option, such as "
            f"--set {missing[0]}=VALUE, or under [config] in the TOML file that you pass as --names FILE"
        )


def prefix_of(names: Iterable[str], known: str, said: str) -> str:
    """Return the prefix of the tensor names in a file. If the user has not specified the prefix, detect it.

    Args:
        names: Names of the tensors.
        known: Tensor name, without the prefix, that occurs in every model of this format.
        said: Prefix that the user specified, or an empty string if the user has not specified a prefix.

    Raises:
        ValueError: If more than one prefix is possible.
    """
    if said:
        return said
    found = sorted(name.removesuffix(known) for name in names if name == known or name.endswith(f".{known}"))
    if len(found) > 1 and "" not in found:
        listed = ", ".join(found[:5])
        raise ValueError(
            f"the file contains more than one model; set prefix under [file] in the TOML file to one of {listed}"
        )
    return found[0] if found else ""


def read_vocabulary(paths: Sequence[Path], config: TransformerConfig) -> Vocabulary | None:
    """Build the vocabulary from the files that the user specified. The vocabulary must append ``eos_id`` to every line.

    Args:
        paths: A ``tokenizer.json``, or Marian's SentencePiece models (``.model``, ``.spm``) and ID tables. If empty,
            the model has no vocabulary.
        config: Config of the model.

    Raises:
        OSError: If a file cannot be read.
        UsageError: If a package that the vocabulary requires is not installed.
        ValueError: If a file has a different format or the vocabulary does not fit the model.
    """
    from transformer_parity.apps.text import kinds, maps, marian, multilingual

    if not paths:
        return None
    vocabulary: Vocabulary
    if [path.suffix for path in paths] == [".json"]:
        vocabulary = multilingual.TokenizerVocabulary({multilingual.TOKENIZER: maps.read_file(paths[0])})
    else:
        vocabulary = marian.read_marian_vocabulary([*paths])
    if (ends := vocabulary.target_ids("")) != [config.eos_id]:
        raise ValueError(f"the vocabulary must append only eos_id, {config.eos_id}, to a target sentence: got {ends}")
    return kinds.checked(vocabulary, config.source_vocab_size, config.target_vocab_size)


def said_notes(said: Mapping[str, Any], needed: Iterable[str]) -> tuple[str, ...]:
    """Return a note that lists the user's config values. A comparison of backends cannot verify these values."""
    own = ", ".join(f"{name} {said[name]}" for name in needed if name in said)
    return (
        f"the file does not specify these settings, so your values are used: {own}. The comparison of the backends "
        "does not detect a wrong value",
    )


def count_layers(names: Iterable[str], prefix: str) -> int:
    """Return the number of layers in a stack whose tensor names start with ``{prefix}{i}.``."""
    numbers = {name.removeprefix(prefix).partition(".")[0] for name in names if name.startswith(prefix)}
    return max((int(number) + 1 for number in numbers if number.isdecimal() and len(number) < 6), default=0)


def check_positions(tensors: Mapping[str, ndarray], names: Iterable[str], config: TransformerConfig) -> None:
    """Check that stored position tables match the sinusoids that the config specifies, so the tables can be discarded.

    Raises:
        ValueError: If a table has a different shape or its values differ by more than rounding error.
    """
    kind = (config.position_layout, config.position_timescale)
    for name in names:
        if name not in tensors:
            continue
        table = tensors[name].reshape(-1, tensors[name].shape[-1] if tensors[name].ndim else 1)
        exact = sinusoidal_encoding(len(table), config.d_model, *kind) if table.shape[1] == config.d_model else None
        error = np.inf if exact is None else np.abs(table.astype(np.float64) - exact).max(initial=0.0)
        if not error <= ROUNDED * max(len(table), 10):
            raise ValueError(
                f"{name} does not contain the sinusoids of position_layout {kind[0]} and position_timescale {kind[1]}: "
                f"the largest difference is {error:.2g}"
            )
