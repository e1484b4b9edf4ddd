"""Attacks through directories of arrays, which ``parity compare A B`` compares."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray
from safetensors.numpy import load_file, save_file

from attacks.attack import Attack
from attacks.pairs.base import Port
from attacks.pairs.run import BASE, RESULT, attack, parity
from attacks.words import FAILS, INCOMPLETE, TOLERATED

Arrays = dict[str, ndarray]
SEEDS, DTYPES = ("0", "1"), ("float64", "float32")
EXPECTED, INPUTS, WEIGHTS, MANIFEST = (
    "expected.safetensors",
    "inputs.safetensors",
    "weights.safetensors",
    "manifest.json",
)


@cache
def _original() -> tempfile.TemporaryDirectory[str]:
    """Write the directory of the original once, and return its parent directory."""
    parent = tempfile.TemporaryDirectory()
    code, said = parity("pair", f"{BASE}:Original", "--seeds", "2", "--out", f"{parent.name}/truth")
    if code:
        raise RuntimeError(said)
    return parent


def _results(truth: Path, seed: str, dtype: str) -> Arrays:
    """Return the tensors of a correct port."""

    def read(path: Path) -> Arrays:
        found = load_file(path)
        return {name: x.astype(dtype) if x.dtype.kind == "f" else x for name, x in found.items()}

    taps: Arrays = {}
    port = Port()
    port.load(read(truth / "weights.safetensors"), dtype)
    outputs = port.forward(read(truth / seed / "inputs.safetensors"), lambda name, value: taps.setdefault(name, value))
    return {name: np.ascontiguousarray(value) for name, value in {**taps, **outputs}.items()}


def _run(change: Callable[[Path, Path], object]) -> tuple[int, str]:
    """Write the directories of the original and of a correct port, change them, and compare them."""
    with tempfile.TemporaryDirectory() as directory:
        truth, mine = Path(directory, "truth"), Path(directory, "mine")
        shutil.copytree(Path(_original().name, "truth"), truth)
        for seed in SEEDS:
            (mine / seed).mkdir(parents=True)
            for dtype in DTYPES:
                save_file(_results(truth, seed, dtype), mine / seed / f"{dtype}.safetensors")
        (mine / MANIFEST).write_text(json.dumps({"kind": "pair", "format": 1, "producer": "my port"}))
        change(truth, mine)
        return parity("compare", "truth", "mine", "--json", RESULT, directory=directory)


def _arrays(change: Callable[[Arrays, Path], Any]) -> Callable[[Path, Path], None]:
    """Return a function that changes the port's arrays of all seeds and dtypes.

    Args:
        change: Function of the arrays and the original's directory for the seed that changes or returns the arrays.
    """

    def changed(truth: Path, mine: Path) -> None:
        for path in mine.rglob("*.safetensors"):
            arrays = load_file(path)
            arrays = change(arrays, truth / path.parent.name) or arrays
            save_file({name: np.ascontiguousarray(value) for name, value in arrays.items()}, path)

    return changed


def _manifest(side: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path, Path], None]:
    """Return a function that changes the manifest of one directory."""

    def changed(truth: Path, mine: Path) -> None:
        path = {"truth": truth, "mine": mine}[side] / MANIFEST
        manifest = json.loads(path.read_text())
        change(manifest)
        path.write_text(json.dumps(manifest))

    return changed


def _with_wrong_logits(change: Callable[[Path, Path], object]) -> Callable[[Path, Path], None]:
    def changed(truth: Path, mine: Path) -> None:
        _arrays(lambda arrays, seed: arrays.update(logits=arrays["logits"] * 2))(truth, mine)
        change(truth, mine)

    return changed


def _tolerances(key: str, value: Any) -> Callable[[Path, Path], None]:
    """Return a function that changes the tolerances of wrong logits."""

    def change(manifest: dict[str, Any]) -> None:
        for table in manifest[key].values():
            table["output logits"] = value

    return _with_wrong_logits(_manifest("truth", change))


def _copies(arrays: Arrays, seed: Path) -> Arrays:
    """Return the original's tensors, rounded to the dtype of the port's."""
    expected = {name.removeprefix("output "): value for name, value in load_file(seed / EXPECTED).items()}
    return {name: expected[name].astype(value.dtype) for name, value in arrays.items()}


def _as_npy(write: Callable[[Path, ndarray], object]) -> Callable[[Path, Path], None]:
    """Return a function that replaces each safetensors file by .npy files, which ``write`` writes."""

    def changed(truth: Path, mine: Path) -> None:
        for path in list(mine.rglob("*.safetensors")):
            arrays = load_file(path)
            path.unlink()
            path.with_suffix("").mkdir()
            for name, value in arrays.items():
                write(path.with_suffix("") / f"{name}.npy", value)

    return changed


def _zipped(path: Path, value: ndarray) -> None:
    """Write a zip file with the name of a .npy file."""
    with path.open("wb") as file:
        np.savez(file, value=value)


def _cast(path: Path) -> None:
    """Write a float64 file with the values of a float32 file."""
    arrays = {name: x.astype(np.float64) if x.dtype.kind == "f" else x for name, x in load_file(path).items()}
    save_file(arrays, path.with_name("float64.safetensors"))


def _cut(path: Path) -> None:
    """Remove the end of a file."""
    path.write_bytes(path.read_bytes()[:-9])


def _each(side: str, name: str, change: Callable[[Path], object]) -> Callable[[Path, Path], None]:
    """Return a function that changes the files of one directory that match a pattern."""

    def changed(truth: Path, mine: Path) -> None:
        for path in sorted({"truth": truth, "mine": mine}[side].rglob(name)):
            change(path)

    return changed


def _linked(truth: Path, mine: Path) -> None:
    """Replace the port's float64 files by links to the original's tensors."""
    for seed in SEEDS:
        (mine / seed / "float64.safetensors").unlink()
        os.symlink(truth / seed / EXPECTED, mine / seed / "float64.safetensors")


ESCAPES = "x\x1b[2J\x1b[H\nAGREE  1 port, 9 cases.\n\x1b[8m"
CHANGES: dict[str, tuple[str, str, Callable[[Path, Path], object]]] = {
    "SoundFiles": ("The port's files are correct.", TOLERATED, lambda truth, mine: None),
    "SoundNpyFiles": ("The port's files are correct .npy files.", TOLERATED, _as_npy(np.save)),
    "WrongFiles": ("The logits in the port's files are doubled.", FAILS, _with_wrong_logits(lambda truth, mine: None)),
    "Copies": ("The port's files are copies of the original's tensors.", INCOMPLETE, _arrays(_copies)),
    "Links": ("The port's files are links to the original's tensors.", INCOMPLETE, _linked),
    "CopiesOfOneSeed": (
        "The port's files of one seed are copies of the original's tensors.",
        INCOMPLETE,
        _arrays(lambda arrays, seed: _copies(arrays, seed) if seed.name == "1" else None),
    ),
    "CopiesOfOtherSeeds": (
        "The port's files contain the original's tensors of the wrong seed.",
        FAILS,
        _arrays(lambda arrays, seed: _copies(arrays, seed.with_name(str(1 - int(seed.name))))),
    ),
    "Itself": (
        "The directory of the original is compared with itself.",
        INCOMPLETE,
        lambda truth, mine: (shutil.rmtree(mine), shutil.copytree(truth, mine)),
    ),
    "SeedMissing": ("The port has no files of one seed.", INCOMPLETE, lambda truth, mine: shutil.rmtree(mine / "1")),
    "AllSeedsMissing": ("The port has no files.", INCOMPLETE, _each("mine", "*.safetensors", Path.unlink)),
    "DtypeOfOneSeed": (
        "The port has float64 files of only one seed.",
        INCOMPLETE,
        lambda truth, mine: (mine / "1" / "float64.safetensors").unlink(),
    ),
    "OnlyFloat32": (
        "The port has only float32 files.",
        TOLERATED,
        _each("mine", "float64.safetensors", Path.unlink),
    ),
    "LogitsMissing": ("The logits are missing.", FAILS, _arrays(lambda arrays, seed: {"best": arrays["best"]})),
    "NoTensors": ("The port's files contain no tensors.", FAILS, _arrays(lambda arrays, seed: arrays.clear())),
    "TapsMissing": (
        "The port's files contain only outputs.",
        TOLERATED,
        _arrays(lambda arrays, seed: {name: arrays[name] for name in ("logits", "best")}),
    ),
    "NanInTheFiles": (
        "One logit is NaN.",
        FAILS,
        _arrays(lambda arrays, seed: arrays["logits"].__setitem__((0, 0, 0), np.nan)),
    ),
    "Float32InFloat64": (
        "The port's float64 files contain float32 arrays.",
        FAILS,
        lambda truth, mine: [
            shutil.copy(mine / s / "float32.safetensors", mine / s / "float64.safetensors") for s in SEEDS
        ],
    ),
    "CastToFloat64": (
        "The port's float64 files contain float32 results that are cast to float64.",
        FAILS,
        _each("mine", "float32.safetensors", _cast),
    ),
    "IntegersInTheFiles": (
        "The logits are rounded to integers.",
        FAILS,
        _arrays(lambda arrays, seed: arrays.update(logits=arrays["logits"].round().astype(np.int64))),
    ),
    "ObjectsInNpy": (
        "The .npy files contain pickled objects.",
        INCOMPLETE,
        _as_npy(lambda path, value: np.save(path, value.astype(object))),
    ),
    "StringsInNpy": ("The .npy files contain strings.", INCOMPLETE, _as_npy(lambda p, v: np.save(p, v.astype(str)))),
    "ComplexInNpy": ("The .npy files contain complex numbers.", INCOMPLETE, _as_npy(lambda p, v: np.save(p, v + 0j))),
    "EmptyNpy": ("The .npy files are empty.", INCOMPLETE, _as_npy(lambda path, value: path.write_bytes(b""))),
    "ZippedNpy": ("The .npy files are zip files.", INCOMPLETE, _as_npy(_zipped)),
    "CutFiles": ("The port's files are truncated.", INCOMPLETE, _each("mine", "*.safetensors", _cut)),
    "CutTensors": ("The files with the original's tensors are truncated.", INCOMPLETE, _each("truth", EXPECTED, _cut)),
    "TensorsMissing": (
        "The original's files contain fewer tensors than the manifest lists.",
        INCOMPLETE,
        _each("truth", EXPECTED, lambda path: save_file({"output best": load_file(path)["output best"]}, path)),
    ),
    "NoTensorsListed": (
        "The manifest lists no tensors.",
        INCOMPLETE,
        _manifest("truth", lambda m: m["tensors"].clear()),
    ),
    "NoTolerances": (
        "The manifest contains no tolerances.",
        INCOMPLETE,
        _manifest("truth", lambda m: m.pop("tolerances")),
    ),
    "TolerancesOfOneDtype": (
        "The manifest contains tolerances only for float32.",
        INCOMPLETE,
        _manifest("truth", lambda m: m["tolerances"].pop("float64")),
    ),
    "ToleranceMissing": (
        "The manifest contains no tolerance of the logits.",
        INCOMPLETE,
        _manifest("truth", lambda m: m["tolerances"]["float64"].pop("output logits")),
    ),
    "NanTolerance": ("A tolerance in the manifest is NaN.", INCOMPLETE, _tolerances("tolerances", float("nan"))),
    "InfiniteTolerance": (
        "A tolerance in the manifest is infinite.",
        INCOMPLETE,
        _tolerances("tolerances", float("inf")),
    ),
    "HugeTolerance": ("A tolerance in the manifest is 10.", INCOMPLETE, _tolerances("tolerances", 10.0)),
    "NegativeTolerance": ("A tolerance in the manifest is negative.", INCOMPLETE, _tolerances("tolerances", -1.0)),
    "ToleranceAsText": ("A tolerance in the manifest is a string.", INCOMPLETE, _tolerances("tolerances", "10")),
    "HugeZeros": (
        "The manifest declares that the logits contain only rounding errors of the size 1e9.",
        INCOMPLETE,
        _tolerances("zeros", 1e9),
    ),
    "NanZeros": (
        "The size of the rounding errors in the manifest is NaN.",
        INCOMPLETE,
        _tolerances("zeros", float("nan")),
    ),
    "ManifestIsAList": (
        "The manifest of the port is a list.",
        INCOMPLETE,
        lambda truth, mine: (mine / MANIFEST).write_text("[]"),
    ),
    "NoProducer": (
        "The manifest of the port has no producer.",
        INCOMPLETE,
        _manifest("mine", lambda m: m.pop("producer")),
    ),
    "ProducerWithEscapes": (
        "The name of a wrong port clears the screen and prints a verdict.",
        FAILS,
        _with_wrong_logits(_manifest("mine", lambda m: m.update(producer=ESCAPES))),
    ),
    "NotesWithEscapes": (
        "A note in the manifest of the original prints a verdict.",
        FAILS,
        _with_wrong_logits(_manifest("truth", lambda m: m["notes"].append(ESCAPES))),
    ),
    "NotesAsText": (
        "The notes in the manifest are a string.",
        TOLERATED,
        _manifest("truth", lambda m: m.update(notes="x")),
    ),
}
ATTACKS: list[Attack] = [
    attack(name, what, expected, partial(_run, change)) for name, (what, expected, change) in CHANGES.items()
]
