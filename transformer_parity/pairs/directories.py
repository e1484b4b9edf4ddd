"""Directories of arrays, for ports in other languages or on other machines.

The original writes its weights, inputs, tensors, and tolerances to one directory. A port reads the weights and inputs,
and writes its tensors to another directory. ``docs/how-to/compare-files.md`` describes the format.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from transformer_parity.engine.findings import AGREES
from transformer_parity.engine.system.errors import printable
from transformer_parity.engine.system.files import write_json
from transformer_parity.engine.tensors import Tensors
from transformer_parity.engine.tolerances import POLICY
from transformer_parity.engine.verdict import Author, Coverage
from transformer_parity.pairs.compare.conditions import warnings, without_constants
from transformer_parity.pairs.compare.difference import kept
from transformer_parity.pairs.compare.names import Counterpart, Names, propose, resolve, with_axes
from transformer_parity.pairs.compare.rounding import GROSS, REPRODUCED
from transformer_parity.pairs.compare.stages import FORWARD, OUTPUT, Runs
from transformer_parity.pairs.compare.tensors import compare_tensors
from transformer_parity.pairs.compare.truth import ZERO, Tolerances, Truth
from transformer_parity.pairs.contract.arrays import is_float, rounded
from transformer_parity.pairs.diagnose.locate import first_wrong
from transformer_parity.pairs.result import PairResult, Settings
from transformer_parity.pairs.run.messages import Import
from transformer_parity.pairs.run.side import two_sides

MANIFEST, KIND, FORMAT = "manifest.json", "pair", 1
COPIED = "all tensors of seed {} in {} are bitwise equal to the expected ones, so they were copied, not computed"
EXPECTED, DTYPES = "expected", ("float64", "float32")


@dataclass(frozen=True)
class ArrayDirectory:
    """A directory of arrays.

    Attributes:
        path: The directory.
        manifest: The content of its manifest.
    """

    path: Path
    manifest: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> ArrayDirectory:
        """Return a directory whose manifest is valid.

        Raises:
            OSError: If the manifest can't be read.
            ValueError: If it is not a manifest of this format.
        """
        manifest = json.loads((path / MANIFEST).read_text("utf-8"))
        if not isinstance(manifest, dict) or manifest.get("kind") != KIND or manifest.get("format") != FORMAT:
            raise ValueError(f'{path / MANIFEST} must contain "kind": "{KIND}" and "format": {FORMAT}')
        if not isinstance(manifest.get("producer"), str) or not manifest["producer"]:
            raise ValueError(
                f'{path / MANIFEST} must contain "producer", the name of the program that wrote the arrays'
            )
        return cls(path, manifest)

    @property
    def producer(self) -> str:
        """The name of the program that wrote the arrays."""
        return printable(self.manifest["producer"])

    def dtypes(self, seed: str) -> list[str]:
        """Return the dtypes in which there are arrays for a seed."""
        return [name for name in DTYPES if self._file(seed, name).is_file() or (self.path / seed / name).is_dir()]

    def tensors(self, seed: str, dtype: str) -> Tensors:
        """Return the arrays of a safetensors file, or of a directory of .npy files.

        Raises:
            OSError: If a file can't be read.
            ValueError: If a file is not valid.
        """
        file, directory = self._file(seed, dtype), self.path / seed / dtype
        if file.is_file():
            try:
                return load_file(file)
            except SafetensorError as error:
                raise ValueError(f"{file} is not a valid safetensors file: {error}") from error
        found = {}
        for path in sorted(directory.rglob("*.npy")):
            try:
                array = np.load(path, allow_pickle=False)
            except (EOFError, ValueError) as error:
                raise ValueError(f"{path} is not a valid .npy file: {error}") from error
            if not isinstance(array, ndarray) or array.dtype.kind not in "fiub":
                raise ValueError(f"{path} must contain one array of real numbers")
            found[path.relative_to(directory).as_posix().removesuffix(".npy")] = array
        return found

    def _file(self, seed: str, name: str) -> Path:
        return self.path / seed / f"{name}.safetensors"


def write_original(original: Import, directory: Path, settings: Settings) -> list[str]:
    """Write the weights, inputs, tensors, and tolerances of an original to a new directory.

    Returns:
        The names of the weights whose constant values were replaced.

    Raises:
        OSError: If the directory exists or can't be written.
        RunError: If the original can't run.
    """
    if directory.exists():
        raise FileExistsError(f"{directory} already exists; choose a different name, or delete it")
    with (
        two_sides(original, original, settings.interpreters, settings.timeout) as (side, other),
        ExitStack() as cleanup,
    ):
        side.start()
        weights, replaced = without_constants(side.new("init_weights", 0), side.imported.fixed_weights)
        batches = [rounded(side.new("inputs", seed), "float32") for seed in range(settings.seeds)]
        dtypes = [name for name in DTYPES if name in side.imported.dtypes]
        runs = Runs(batches, Names(), other)
        truth = Truth(side, weights, batches, runs.run)
        runs.names.declared.update({name: Counterpart(name) for name in truth.first_runs()[0].taps})
        tolerances = {dtype: truth.tolerances(FORWARD, dtype) for dtype in dtypes}
        order: list[str] = []
        written = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}.tmp")
        cleanup.callback(shutil.rmtree, written, ignore_errors=True)
        written.mkdir(parents=True)
        save_file(rounded(weights, "float32"), written / "weights.safetensors")
        for seed, batch in enumerate(batches):
            (written / str(seed)).mkdir()
            save_file(batch, written / str(seed) / "inputs.safetensors")
            found = truth.tensors(FORWARD, seed)
            order = list(found)
            arrays = {name: np.ascontiguousarray(value) for name, value in found.items()}
            save_file(arrays, written / str(seed) / f"{EXPECTED}.safetensors")
        manifest = {
            "kind": KIND,
            "format": FORMAT,
            "producer": side.name,
            "versions": side.versions,
            "tensors": order,
            "tolerances": {dtype: allowed.allowed for dtype, allowed in tolerances.items()},
            "zeros": {dtype: allowed.zeros for dtype, allowed in tolerances.items()},
            "notes": warnings(batches),
        }
        write_json(written / MANIFEST, manifest)
        os.replace(written, directory)
    return replaced


def is_pair(directory: Path) -> bool:
    """Return whether a directory has a manifest of this format, in contrast to golden vectors."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and manifest.get("kind") == KIND


def compare_arrays(first: Path, second: Path, given: Mapping[str, Any]) -> PairResult:
    """Compare the arrays of a port with the arrays of the original.

    Args:
        first: The directory of the original.
        second: The directory of the port.
        given: The port's name of each of the original's taps, for taps with different names or axes.

    Raises:
        OSError: If a file can't be read.
        ValueError: If a file is not valid.
    """
    original, port = ArrayDirectory.read(first), ArrayDirectory.read(second)
    order = [str(name) for name in original.manifest.get("tensors", ())]
    result = PairResult(
        original.producer, port.producer, notes=[printable(str(note)) for note in original.manifest.get("notes", ())]
    )
    seeds = sorted((path.name for path in first.iterdir() if path.name.isdecimal()), key=int)
    if not seeds or not order:
        raise ValueError(f"{first} contains no tensors of an original; write it with `parity pair --out`")
    dtypes = [name for name in DTYPES if any(name in port.dtypes(seed) for seed in seeds)]
    if not dtypes:
        raise ValueError(f"{second} contains no tensors: write {second}/{seeds[0]}/float32.safetensors, for example")
    if "float64" not in dtypes:
        result.notes.append(f"{port.producer} has no float64 tensors, so a bug below the rounding errors can't be seen")
    planned = {(FORWARD, dtype): len(seeds) for dtype in dtypes}
    copied = []
    for dtype in dtypes:
        tolerances = _tolerances(original, dtype)
        if dtype == "float32" and "float64" in dtypes and all(entry.verdict == AGREES for entry in result.findings):
            tolerances = tolerances.if_float64_agrees()
        for seed in seeds:
            author = Author(port.producer, dtype, f"seed {seed}", FORWARD, FORWARD)
            if dtype not in port.dtypes(seed):
                result.findings.append(author.failed("files", f"{second} has no {dtype} tensors of seed {seed}"))
                continue
            expected = original.tensors(seed, EXPECTED)
            if missing := [name for name in order if name not in expected]:
                raise ValueError(f"{first}/{seed}/{EXPECTED} lacks {', '.join(missing[:3])}")
            if missing := [name for name in order if is_float(expected[name]) and name not in tolerances.allowed]:
                raise ValueError(f"{first / MANIFEST} lacks the {dtype} tolerance of {', '.join(missing[:3])}")
            expected, theirs = {name: expected[name] for name in order}, port.tensors(seed, dtype)
            largest = max(float(np.linalg.norm(value[kept(value)])) for value in expected.values())
            if wrong := [name for name, size in tolerances.zeros.items() if size > ZERO * largest]:
                raise ValueError(f"{wrong[0]} in {first / MANIFEST} is too large for a tensor of rounding errors")
            actual = _renamed(expected, theirs, given, result)
            computed = [name for name in actual if name in expected and is_float(expected[name])]
            if computed and all(_is_copy(actual[name], expected[name]) for name in computed):
                copied.append(COPIED.format(seed, dtype))
            compared = list(compare_tensors(author, tolerances, actual, expected, result.names, {}))
            result.findings += [
                entry.finding(math.inf if dtype == "float64" or entry.error > GROSS else REPRODUCED)
                for entry in compared
            ]
            wrong = [entry.name for entry in compared if entry.is_wrong and entry.name in expected]
            if wrong and not result.located:
                result.located.append(first_wrong(FORWARD, dtype, int(seed), wrong))
    result.asked = [Coverage(port.producer, (FORWARD,), dtypes, pairs=True, planned=planned, unproven=copied)]
    return result


def _is_copy(actual: ndarray, expected: ndarray) -> bool:
    return actual.tobytes() == expected.astype(actual.dtype).tobytes()


def _renamed(expected: Tensors, theirs: Tensors, given: Mapping[str, Any], result: PairResult) -> Tensors:
    """Return the port's tensors under the original's names and axes. The prefix of an output's name is optional."""
    outputs = [name for name in expected if name.startswith(OUTPUT)]
    found = {name: theirs[key] for name in outputs for key in (name.removeprefix(OUTPUT), name) if key in theirs}
    taps = {name: value for name, value in theirs.items() if not name.startswith(OUTPUT)}
    names = resolve(given, list(expected), list(taps), [name for name in expected if name in taps])
    result.notes = list(dict.fromkeys([*result.notes, *with_axes(names, expected, taps)]))
    names.proposed = propose(
        {name: value for name, value in expected.items() if name not in names.declared and name not in outputs},
        {name: value for name, value in taps.items() if name not in {place.name for place in names.declared.values()}},
    )
    result.names = names
    shapes = {name: value.shape for name, value in expected.items() if name not in outputs}
    renamed, unfit = names.to_original(taps, shapes)
    names.problems += [f"names: {name!r}: {why}" for name, why in unfit.items() if name in names.declared]
    return renamed | found


def _tolerances(original: ArrayDirectory, dtype: str) -> Tolerances:
    """Return the tolerances in a manifest.

    Raises:
        ValueError: If one of them isn't a number, or is so large that it would hide bugs.
    """
    tables: list[Mapping[str, Any]] = []
    for key in ("tolerances", "zeros"):
        table = original.manifest.get(key)
        if not isinstance(table, Mapping) or not isinstance(table.get(dtype), Mapping):
            raise ValueError(f"{original.path / MANIFEST} must contain {key} for {dtype}")
        tables.append(table[dtype])
    allowed, zeros = tables
    rule = POLICY["pair"]["float64" if dtype == "float64" else "rounded"]["most"]
    most = rule if dtype == "float64" else rule[dtype]
    for name, value in (*allowed.items(), *zeros.items()):
        if not isinstance(value, float | int) or not 0.0 <= value < math.inf or (value > most and name not in zeros):
            raise ValueError(
                f"the tolerance of {name} in {original.path / MANIFEST} must be at most {most:g}: got {value}"
            )
    return Tolerances(dict(allowed), dict(zeros))
