"""Golden vectors as dictionaries, which tests can alter in every way in which files can be altered."""

from __future__ import annotations

import copy
import hashlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from numpy import ndarray

from transformer_parity.transformer.cases.case import Case, tiny
from transformer_parity.transformer.golden.produce import compute, golden_cases
from transformer_parity.transformer.golden.vectors import DTYPES
from transformer_parity.transformer.golden.writer import write
from transformer_parity.transformer.ports.registry import PORTS
from transformer_spec.files import save_weights

MANIFEST = "manifest.json"
Tensors = dict[str, ndarray]


@dataclass
class Vectors:
    """One model's golden vectors.

    Attributes:
        manifest: Content of the manifest. ``write`` updates the checksums, dtypes and shapes.
        files: Tensors of each file by their names, for each path.
        metadata: safetensors metadata of each file, for each path.
    """

    manifest: dict[str, Any]
    files: dict[str, Tensors]
    metadata: dict[str, dict[str, str] | None]

    @classmethod
    def read(cls, directory: Path) -> Vectors:
        """Read a directory of golden vectors."""
        vectors = cls(json.loads((directory / MANIFEST).read_text("utf-8")), {}, {})
        for record in vectors.records():
            with safetensors.safe_open(directory / record["file"], "numpy") as file:
                # The order of the tensors is in the manifest, because a file doesn't preserve it.
                tensors = {entry["name"]: file.get_tensor(entry["name"]) for entry in record["tensors"]}
                vectors.files[record["file"]], vectors.metadata[record["file"]] = tensors, file.metadata()
        return vectors

    def write(self, directory: Path) -> None:
        """Write a directory and update the checksums, dtypes and shapes in the manifest."""
        for record in self.records():
            tensors = {name: np.array(array, order="C") for name, array in self.files[record["file"]].items()}
            content = safetensors.numpy.save(tensors, self.metadata[record["file"]])
            path = directory / record["file"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            shapes = [{"name": name, "dtype": x.dtype.name, "shape": list(x.shape)} for name, x in tensors.items()]
            record.update(sha256=hashlib.sha256(content).hexdigest(), tensors=shapes)
        (directory / MANIFEST).write_text(json.dumps(self.manifest), "utf-8")

    def records(self) -> list[dict[str, Any]]:
        """Return the manifest entries of all files."""
        cases = self.manifest["cases"]
        outputs = [record for case in cases for record in case["outputs"].values()]
        return [self.manifest["weights"], *(case["inputs"] for case in cases), *outputs]

    def case(self, name: str) -> dict[str, Any]:
        """Return the manifest entry of a case."""
        return next(case for case in self.manifest["cases"] if case["name"] == name)

    def keep(self, *names: str) -> None:
        """Remove all cases except the named ones."""
        self.manifest["cases"] = [self.case(name) for name in names]

    def inputs(self, case: str) -> Tensors:
        """Return the inputs of a case."""
        return self.files[self.case(case)["inputs"]["file"]]

    def outputs(self, case: str = "", dtype: str = "") -> list[Tensors]:
        """Return the outputs of a case in a dtype. An empty string selects all cases or all dtypes."""
        return [
            self.files[record["file"]]
            for entry in self.manifest["cases"]
            for name, record in entry["outputs"].items()
            if case in ("", entry["name"]) and dtype in ("", name)
        ]

    def alter(self, change: Callable[[ndarray], Any], case: str = "", dtype: str = "", only: str = "") -> None:
        """Change the floating-point outputs of a case in a dtype, or only one of them. An empty string selects all."""
        for tensors in self.outputs(case, dtype):
            for name, array in tensors.items():
                if array.dtype.kind == "f" and only in ("", name):
                    tensors[name] = np.asarray(change(array))

    def drop(self, is_dropped: Callable[[str], bool], case: str = "", dtype: str = "") -> None:
        """Remove outputs by name."""
        for tensors in self.outputs(case, dtype):
            for name in [name for name in tensors if is_dropped(name)]:
                del tensors[name]


def made(
    weight: Callable[[str, ndarray], Any] = lambda name, array: array,
    change: Callable[[Case], Case] = lambda case: case,
) -> Vectors:
    """Return the reference's golden vectors, optionally with changed weights or cases."""
    cases = [change(case) for case in golden_cases(tiny("paper_base", d_k=None, d_v=None))]
    config = cases[0].config
    weights = {name: np.asarray(weight(name, array)) for name, array in cases[0].load_weights().items()}
    with tempfile.TemporaryDirectory() as directory:
        given = Path(directory) / "given.safetensors"
        save_weights(given, config, weights)
        cases = [replace(case, weights_file=given) for case in cases]
        computed, left_out = compute(PORTS["numpy"], cases, DTYPES, "cpu", lambda doing: None)
        write(Path(directory), {"name": "numpy"}, config, weights, computed, DTYPES, left_out)
        return Vectors.read(Path(directory))


@cache
def _truth() -> Vectors:
    return made()


def truth() -> Vectors:
    """Return the reference's golden vectors."""
    return copy.deepcopy(_truth())


def computed() -> Vectors:
    """Return the vectors of a correct port: every nonzero number differs from the reference's by rounding."""
    vectors = truth()
    vectors.manifest["producer"] = {"name": "mine"}
    vectors.alter(rounded)
    return vectors


def rounded(array: ndarray) -> ndarray:
    """Return an array in which the next larger number replaces every nonzero number."""
    return np.where(array == 0.0, array, np.nextafter(array, array.dtype.type(np.inf)))
