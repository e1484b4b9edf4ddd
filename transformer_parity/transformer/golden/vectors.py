"""Golden vectors: the results of a small model, in files that programs in any language can read and write.

A directory contains the weights and the inputs of a model, and every tensor that was computed from them. The manifest
of the directory lists each file and each tensor. ``docs/reference/golden-vectors.md`` describes the format. Reading the
files requires no framework and executes no code from them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

import safetensors.numpy
from numpy import ndarray
from safetensors import SafetensorError

from transformer_parity.engine.system.errors import printable
from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.stages.registry import STAGES
from transformer_spec.checks import some
from transformer_spec.config import TransformerConfig
from transformer_spec.files import load_weights
from transformer_spec.search import Search
from transformer_spec.training_config import TrainingConfig

FORMAT = "transformer-parity golden vectors"
VERSION = 3
KNOWN_VERSIONS = (2, VERSION)  # in version 2, there is one weight file, and every step uses all rows
MANIFEST = "manifest.json"
WEIGHTS = "weights.safetensors"
DTYPES = ("float64", "float32")
KINDS: dict[type, str] = {str: "a string", dict: "an object", list: "a list"}
Arrays = Mapping[str, ndarray]


@dataclass(frozen=True)
class LeftOut:
    """Tensors that a directory omits, with the reason. In all names, ``*`` matches any number of characters."""

    case: str
    reason: str
    tensors: tuple[str, ...] = ("*",)
    dtype: str = "*"

    def covers(self, case: str, dtype: str) -> bool:
        """Return whether the entry applies to a case in a dtype."""
        return fnmatchcase(case, self.case) and fnmatchcase(dtype, self.dtype)


@dataclass(frozen=True)
class GoldenDirectory:
    """Golden vectors that were read from a directory and checked.

    Attributes:
        path: Directory that contains the files.
        producer: Name of the program that computed the tensors.
        config: Config of the model.
        weights: Parameters of the model, one array per canonical name.
        cases: Cases in the directory. ``case.dtypes`` lists the dtypes in which a case was computed.
        dtypes: All dtypes in the directory.
        left_out: Entries for omitted tensors, with the reasons.
    """

    path: Path
    producer: str
    config: TransformerConfig
    weights: dict[str, ndarray] = field(repr=False)
    cases: tuple[Case, ...]
    dtypes: tuple[str, ...]
    left_out: tuple[LeftOut, ...]
    _computed: Mapping[tuple[str, str], dict[str, ndarray]] = field(repr=False)

    def tensors(self, case: Case, dtype: str) -> dict[str, ndarray]:
        """Return the tensors of a case, in the order of computation.

        Raises:
            ValueError: If the directory doesn't include the case in this dtype.
        """
        if (case.name, dtype) not in self._computed:
            raise ValueError(f"{self.path} has no {dtype} tensors of {case.name}")
        return dict(self._computed[case.name, dtype])

    def holds(self, case: Case, dtype: str) -> bool:
        """Return whether the directory contains tensors of a case in a dtype."""
        return (case.name, dtype) in self._computed

    def why_not(self, case: Case, dtype: str) -> str | None:
        """Return the reason why all tensors of a case are omitted in a dtype, or None if there is no such reason."""
        whole = (entry for entry in self.left_out if "*" in entry.tensors)
        return next((entry.reason for entry in whole if entry.covers(case.name, dtype)), None)


def sha256(content: bytes) -> str:
    """Return the SHA-256 hash of a file as hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def find(path: str | Path) -> dict[str, Path]:
    """Return a dict from model names to the directories that contain their golden vectors.

    If the path itself contains golden vectors, it has the name "". Otherwise, its subdirectories are searched.

    Raises:
        OSError: If the path contains no golden vectors.
    """
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"there is no directory {path}")
    if (path / MANIFEST).is_file():
        return {"": path}
    inside = {child.name: child for child in sorted(path.iterdir()) if (child / MANIFEST).is_file()}
    if not inside:
        raise FileNotFoundError(f"{path} does not contain golden vectors: the directory has no {MANIFEST}")
    return inside


def read(path: str | Path) -> GoldenDirectory:
    """Read golden vectors, and check every file against the manifest.

    Raises:
        OSError: If the path contains no golden vectors, or if a file is missing or can't be read.
        ValueError: If a file is truncated or modified, contradicts the manifest, or has an unsupported version. The
            message includes the file name.
    """
    path = Path(path)
    if not (path / MANIFEST).is_file():
        raise FileNotFoundError(f"{path} does not contain golden vectors: the directory has no {MANIFEST}")
    try:
        return _read(path)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{path} does not contain valid golden vectors: {error}") from error


def _read(path: Path) -> GoldenDirectory:
    manifest = _read_manifest(path / MANIFEST)
    config = TransformerConfig.from_dict(_entry(manifest, "config", dict))
    weights_file = _read_weights(path, _entry(manifest, "weights", dict), config)
    _, weights = load_weights(weights_file)
    dtypes = tuple(_entry(manifest, "dtypes", list))
    if not dtypes or any(dtype not in DTYPES for dtype in dtypes):
        raise ValueError(f"expected dtypes to be a list of {' or '.join(DTYPES)}, got {list(dtypes)}")
    cases: list[Case] = []
    computed: dict[tuple[str, str], dict[str, ndarray]] = {}
    for fields in _entry(manifest, "cases", list):
        case = _read_case(path, fields, config, weights_file)
        if any(case.name == other.name for other in cases):
            raise ValueError(f"duplicate case {case.name!r}")
        if unknown := [dtype for dtype in case.dtypes if dtype not in dtypes]:
            raise ValueError(f"case {case.name} has outputs in {unknown[0]}, which is not one of the manifest's dtypes")
        cases.append(case)
        computed |= {(case.name, dtype): _read_file(path, record) for dtype, record in fields["outputs"].items()}
    return GoldenDirectory(
        path,
        printable(_entry(_entry(manifest, "producer", dict), "name", str)),
        config,
        weights,
        tuple(cases),
        dtypes,
        tuple(_read_left_out(entry) for entry in _entry(manifest, "left_out", list)),
        computed,
    )


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{MANIFEST} is not valid JSON: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{MANIFEST} does not have the format {FORMAT!r}")
    version = manifest.get("version")
    if type(version) is not int or version not in KNOWN_VERSIONS:
        raise ValueError(f"expected format version {' or '.join(map(str, KNOWN_VERSIONS))}, got {version!r}")
    return manifest


def _read_weights(path: Path, record: dict[str, Any], config: TransformerConfig) -> Path:
    """Check a weight file against the manifest and the config, and return its path."""
    _read_file(path, record)
    weights_file = path / record["file"]
    if difference := differing_fields(load_weights(weights_file)[0], config):
        raise ValueError(f"the config in {weights_file.name} differs from the config in {MANIFEST}: {difference}")
    return weights_file


def _read_case(path: Path, fields: dict[str, Any], config: TransformerConfig, weights_file: Path) -> Case:
    name = printable(_entry(fields, "name", str))
    stage = _entry(fields, "stage", str)
    if stage not in STAGES:
        raise ValueError(f"expected the stage of case {name} to be one of {', '.join(STAGES)}, got {stage!r}")
    kind = STAGES[stage]
    search = Search.from_dict(_entry(fields, "search", dict)) if kind.searches else None
    if search is not None and search.num_hypotheses != 1:  # the diagnosis doesn't support multiple hypotheses
        raise ValueError(f"expected num_hypotheses of case {name} to be 1, got {search.num_hypotheses}")
    if "weights" in fields:
        weights_file = _read_weights(path, _entry(fields, "weights", dict), config)
    return Case(
        name,
        kind.component,
        config,
        "",
        _read_file(path, _entry(fields, "inputs", dict)),
        weights_file,
        fast=False,
        dtypes=tuple(_entry(fields, "outputs", dict)),
        stage=stage,
        settings=TrainingConfig.from_dict(_entry(fields, "settings", dict)) if kind.trains else None,
        search=search,
        compares_padding=False,
        snapshots=_read_numbers(name, fields, "snapshots"),
        rows=_read_numbers(name, fields, "rows"),
        calls=_read_numbers(name, fields, "other_calls_after_steps"),
        restart=_entry({"restart_after_step": 0, **fields}, "restart_after_step", int),
    )


def _read_numbers(case: str, fields: dict[str, Any], name: str) -> tuple[int, ...]:
    """Read an optional list of positive integers from the entry of a case."""
    numbers = tuple(_entry({name: [], **fields}, name, list))
    if any(type(number) is not int or number < 1 for number in numbers):
        raise ValueError(f"expected {name} of case {case} to be positive integers, got {list(numbers)}")
    return numbers


def _read_left_out(fields: dict[str, Any]) -> LeftOut:
    tensors = _entry({"tensors": ["*"], **fields}, "tensors", list)
    dtype = _entry({"dtype": "*", **fields}, "dtype", str)
    case, reason = (printable(_entry(fields, name, str)) for name in ("case", "reason"))
    return LeftOut(case, reason, tuple(printable(str(tensor)) for tensor in tensors), dtype)


def _read_file(path: Path, record: dict[str, Any]) -> dict[str, ndarray]:
    """Read a file, and raise an error unless it matches the manifest."""
    file = _entry(record, "file", str)
    inside = PurePosixPath(file)
    if inside.is_absolute() or ".." in inside.parts or "\\" in file or ":" in file:
        raise ValueError(f"file {file!r} is not inside the directory of the manifest")
    if not (path / file).is_file():
        raise FileNotFoundError(f"{path} does not contain {file}, which {MANIFEST} lists")
    content = (path / file).read_bytes()
    if (found := sha256(content)) != (needed := _entry(record, "sha256", str)):
        raise ValueError(f"{file} is truncated or modified: expected SHA-256 {needed}, got {found}")
    try:
        tensors = safetensors.numpy.load(content)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is not a safetensors file: {error}") from error
    described = {_entry(tensor, "name", str): tensor for tensor in _entry(record, "tensors", list)}
    problems = [f"missing {name}" for name in described if name not in tensors]
    problems += [f"unexpected {name}" for name in tensors if name not in described]
    for name, tensor in described.items():
        needed = f"{_entry(tensor, 'dtype', str)} {_entry(tensor, 'shape', list)}"
        if name in tensors and (found := f"{tensors[name].dtype.name} {list(tensors[name].shape)}") != needed:
            problems.append(f"{name} is {found} instead of {needed}")
    if len(described) < len(record["tensors"]):
        problems.append("a tensor is listed more than once")
    if problems:
        raise ValueError(f"{file} does not match {MANIFEST}: {some(problems)}")
    for array in tensors.values():
        array.setflags(write=False)
    return {name: tensors[name] for name in described}


def _entry(fields: Any, name: str, kind: type) -> Any:
    value = fields.get(name) if isinstance(fields, dict) else fields
    if not isinstance(value, kind):
        raise ValueError(f"expected {name!r} in {MANIFEST} to be {KINDS[kind]}, got {value!r:.80}")
    return value


def differences(first: GoldenDirectory, second: GoldenDirectory) -> list[str]:
    """Return the differences between the tasks of two directories: config, weights, and inputs of common cases."""
    if fields := differing_fields(first.config, second.config):
        return [f"config: {fields}"]
    found = []
    if other := [name for name in first.weights if not _same(first.weights[name], second.weights[name])]:
        found = [f"weights: {', '.join(other[:3])}" + (f" and {len(other) - 3} more" if len(other) > 3 else "")]
    theirs = {case.name: case for case in second.cases}
    for case in first.cases:
        if case.name in theirs:
            found += _differing_case(case, theirs[case.name])
    return found


def _differing_case(first: Case, second: Case) -> list[str]:
    for what in ("stage", "settings", "search", "snapshots", "rows", "calls", "restart"):
        if getattr(first, what) != getattr(second, what):
            return [f"{what} of {first.name}: {getattr(first, what)} and {getattr(second, what)}"]
    if first.inputs.keys() != second.inputs.keys():
        return [f"inputs of {first.name}: {', '.join(first.inputs)} and {', '.join(second.inputs)}"]
    ours, theirs = first.load_weights(), second.load_weights()
    if other := [name for name, array in ours.items() if not _same(array, theirs[name])]:
        return [f"weights of {first.name}: {', '.join(other[:3])}"]
    other = [name for name, array in first.inputs.items() if not _same(array, second.inputs[name])]
    return [f"inputs of {first.name}: {', '.join(other)}"] * bool(other)


def differing_fields(first: TransformerConfig, second: TransformerConfig) -> str:
    """Return a comma-separated list of the fields that differ between two configs, with both values."""
    ours, theirs = first.to_dict(), second.to_dict()
    return ", ".join(f"{name} {ours[name]} and {theirs[name]}" for name in ours if ours[name] != theirs[name])


def _same(first: ndarray, second: ndarray) -> bool:
    same_kind = (first.dtype, first.shape) == (second.dtype, second.shape)
    return same_kind and first.tobytes() == second.tobytes()
