"""State dicts of PyTorch whose file holds little: the tensors, and what their user adds to them.

A user's TOML file may have three tables: ``[config]`` with fields of the config that no tensor shows, ``[names]`` with
the user's name of each parameter that a format does not name, by its canonical name, and ``[file]`` with ``state``, the
key under which the file holds its state dict, ``prefix``, what stands in front of the format's own names, and
``ignored``, a list of tensors (patterns, as of file names) that are no weights.
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
from transformer_parity.apps.containers.folder import read_bytes
from transformer_spec.config import TransformerConfig

if TYPE_CHECKING:
    from transformer_parity.transformer.sentences.vocabulary import Vocabulary

LARGEST = 2**20  # bytes of a TOML file
KNOWN = {"config": (), "names": (), "file": ("state", "prefix", "ignored")}
ROUNDED = 1e-6  # for each position: angles of float32


@dataclass(frozen=True)
class UserNames:
    """What a user declares about a state dict: see above."""

    config: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    state: str = ""
    prefix: str = ""
    ignored: tuple[str, ...] = ()


def read_names(options: ReadOptions) -> UserNames:
    """Return what the file of names and the options say; the options take precedence.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no TOML, has tables or keys that are not known, or values of the wrong type.
    """
    content: dict[str, Any] = {}
    what = options.names.name if options.names else ""
    if options.names:
        try:
            content = tomllib.loads(read_bytes(options.names, LARGEST).decode())
        except ValueError as error:  # tomllib.TOMLDecodeError and UnicodeDecodeError are
            raise ValueError(f"{what} is not usable TOML: {error}") from error
    for table, keys in content.items():
        if table not in KNOWN or not isinstance(keys, dict):
            raise ValueError(f"{what} may have the tables {', '.join(KNOWN)}: got {table}")
        if KNOWN[table] and (unknown := sorted(set(keys) - set(KNOWN[table]))):
            raise ValueError(f"[{table}] of {what} may have {', '.join(KNOWN[table])}: got {', '.join(unknown)}")
    names, rest = content.get("names", {}), content.get("file", {})
    ignored = rest.get("ignored", [])
    texts = [
        *names.values(),
        rest.get("state", ""),
        rest.get("prefix", ""),
        *(ignored if isinstance(ignored, list) else [0]),
    ]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"the names in {what} must be text, and 'ignored' a list of text")
    fields = {**content.get("config", {}), **options.fields}
    known = {entry.name for entry in dataclasses.fields(TransformerConfig)}
    if unknown := sorted(set(fields) - known):
        alike = [near for name in unknown for near in difflib.get_close_matches(name, known, 1)]
        meant = f"did you mean {', '.join(alike)}?" if alike else f"there are {', '.join(sorted(known))}"
        raise ValueError(f"a config has no field {', '.join(unknown)}: {meant}")
    return UserNames(fields, names, rest.get("state", ""), rest.get("prefix", ""), tuple(ignored))


def read_state(path: Path, key: str = "") -> dict[str, ndarray]:
    """Return the tensors of a safetensors file, or of a file of ``torch.save``, there under a key if one is given.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is damaged or refused, or holds something else.
    """
    if path.suffix == ".safetensors":
        return tensors.read(path)
    content = pickles.read(path)
    for part in filter(None, key.split(".")):
        if not isinstance(content, dict) or part not in content:
            held = ", ".join(map(str, content)) if isinstance(content, dict) else type(content).__name__
            raise ValueError(f"{path.name} must hold {part!r}: got {held}")
        content = content[part]
    return pickles.arrays(content, path.name)


def tensor_names(path: Path) -> list[str]:
    """Return the names of the tensors of a file; errors as in ``read_state``."""
    return tensors.names(path) if path.suffix == ".safetensors" else list(read_state(path))


def needed_fields(said: Mapping[str, Any], needed: Iterable[str], what: str) -> None:
    """Refuse a state dict that lacks a value that no tensor shows.

    Raises:
        ValueError: Fields are missing; the message lists them.
    """
    if missing := [name for name in needed if name not in said]:
        raise ValueError(
            f"{what} does not say {', '.join(missing)}: give each with --set {missing[0]}=VALUE, or under [config] in "
            "a TOML file with --names FILE"
        )


def prefix_of(names: Iterable[str], known: str, said: str) -> str:
    """Return what stands in front of a format's own names: what its user said, or else what the names show.

    Args:
        names: Of the tensors.
        known: A name that the format has in every model.
        said: What its user said; empty is nothing.

    Raises:
        ValueError: Several prefixes would do.
    """
    if said:
        return said
    found = sorted(name.removesuffix(known) for name in names if name == known or name.endswith(f".{known}"))
    if len(found) > 1 and "" not in found:
        listed = ", ".join(found[:5])
        raise ValueError(f'there are several models in the file: say which, as prefix = "..." under [file]: {listed}')
    return found[0] if found else ""


def read_vocabulary(paths: Sequence[Path], config: TransformerConfig) -> Vocabulary | None:
    """Return the vocabulary whose files a user names: ids are those of its files, and ``eos_id`` ends every line.

    Args:
        paths: A ``tokenizer.json``; or sentencepiece models (``.model``, ``.spm``) and tables of ids, as Marian has
            them. Empty is none.
        config: The model.

    Raises:
        OSError: A file cannot be read.
        UsageError: A package is not installed that the vocabulary needs.
        ValueError: These are other files, or they are not of this model.
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
        raise ValueError(
            f"the vocabulary must add eos_id, {config.eos_id}, to a translation, and no other id: got {ends}"
        )
    return kinds.checked(vocabulary, config.source_vocab_size, config.target_vocab_size)


def said_notes(said: Mapping[str, Any], needed: Iterable[str]) -> tuple[str, ...]:
    """Return the note that some values are the user's own: that backends agree does not prove them."""
    own = ", ".join(f"{name} {said[name]}" for name in needed if name in said)
    return (f"not in the file, and taken as given: {own}. A wrong value is not noticed where backends are compared",)


def count_layers(names: Iterable[str], prefix: str) -> int:
    """Return how many layers a stack has, whose tensors are called ``{prefix}{i}.``."""
    numbers = {name.removeprefix(prefix).partition(".")[0] for name in names if name.startswith(prefix)}
    return max((int(number) + 1 for number in numbers if number.isdecimal() and len(number) < 6), default=0)


def check_positions(tensors: Mapping[str, ndarray], names: Iterable[str], config: TransformerConfig) -> None:
    """Refuse stored tables of positions that are not the one that the config describes; they need no place then.

    Raises:
        ValueError: A table has another shape, or other numbers.
    """
    kind = (config.position_layout, config.position_timescale)
    for name in names:
        if name not in tensors:
            continue
        table = tensors[name].reshape(-1, tensors[name].shape[-1] if tensors[name].ndim else 1)
        exact = sinusoidal_encoding(len(table), config.d_model, *kind) if table.shape[1] == config.d_model else None
        error = np.inf if exact is None else np.abs(table.astype(np.float64) - exact).max(initial=0.0)
        if not error <= ROUNDED * max(len(table), 10):
            raise ValueError(f"{name} must be the sinusoids of {' and '.join(kind)}: it is off by {error:.2g}")
