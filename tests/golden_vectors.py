"""Ports that write golden vectors, and functions that change golden vectors, for tests."""

import hashlib
import json
import shutil
from dataclasses import replace
from functools import cache
from types import MappingProxyType

import numpy as np
import pytest
import safetensors.numpy

import reference_numpy as ref
from transformer_parity.cli.main import main
from transformer_parity.transformer.golden import vectors
from transformer_parity.transformer.golden.compare import DirectoryPair, compare_directories
from transformer_parity.transformer.ports.user import Port

PADDED, STEPS, GREEDY = "full/padded", "steps/port", "decode/port_greedy"


def moved(array):
    """Return an array with each value replaced by the next larger one, as if computed with different rounding."""
    array = np.asarray(array)
    return np.where(array == 0, array, np.nextafter(array, np.asarray(np.inf, array.dtype)))


class Forward(Port):
    """A minimal port that omits one case."""

    overrides = MappingProxyType({"norm_order": "pre", "final_norm": True})
    taps = ("encoder.**",)
    left_out = MappingProxyType({"full/one_token": "it is not made for that"})

    def load(self, config, weights, dtype):
        self.model = ref.Transformer.from_weights(config, weights, dtype)

    def forward(self, source_ids, target_ids, tap):
        shown = lambda name, value: tap(name, value) if name.startswith("encoder.") else value  # noqa: E731
        return moved(self.model(source_ids, target_ids, tap=shown))


class Full(Port):
    """A port that supports every optional method, but reports gradients only at the output taps."""

    taps = ("**.output",)
    is_used = False

    def load(self, config, weights, dtype):
        self.model = ref.Transformer.from_weights(config, weights, dtype)

    def forward(self, source_ids, target_ids, tap):
        self.is_used = True
        seen = ref.Recorder("**.output")
        logits = moved(self.model(source_ids, target_ids, tap=seen))
        for name, value in seen.items():
            tap(name, value)
        return logits

    def export_weights(self):
        return self.model.export_weights()

    def gradients(self, source_ids, target_ids, labels):
        found = ref.gradients(self.model, source_ids, target_ids, labels)
        return replace(
            found,
            loss=float(moved(found.loss)),
            taps={name: x for name, x in found.taps.items() if name.endswith(".output")},
        )

    def start_training(self, settings):
        if self.is_used:
            raise RuntimeError("steps must have a separate model")
        self.trainer = ref.Trainer(self.model, settings, 0)

    def train_step(self, source_ids, target_ids, labels):
        return float(moved(self.trainer.train_step(source_ids, target_ids, labels).loss))

    def generate(self, source_ids, max_length, beam_size, length_penalty):
        if beam_size == 1:
            return ref.greedy_search(self.model, source_ids, max_length).ids
        return ref.beam_search(self.model, source_ids, beam_size, length_penalty, max_length).ids


class Failing(Forward):
    """A port that raises an error in the middle of a run."""

    def forward(self, source_ids, target_ids, tap):
        if len(source_ids) == 1:
            raise KeyError("head")
        return super().forward(source_ids, target_ids, tap)


class Empty(Forward):
    """A port that supports none of the requested dtypes."""

    dtypes = ()
    left_out = {}


def rounded(directory):
    """Change every computed value by one unit in the last place."""
    for case in manifest_of(directory)["cases"]:
        for dtype in case["outputs"]:
            edit(directory, case["name"], dtype, move)
    return directory


def move(tensors):
    tensors.update({name: moved(array) for name, array in tensors.items() if array.dtype.kind == "f"})


def compare(truth, candidate, *options):
    return main(["compare", str(truth), str(candidate), *map(str, options)])


def findings_of(truth, candidate):
    return list(compare_directories(DirectoryPair("", vectors.read(truth), vectors.read(candidate))))


def manifest_of(directory):
    return json.loads((directory / "manifest.json").read_text())


def edit_manifest(directory, change):
    manifest = manifest_of(directory)
    change(manifest)
    (directory / "manifest.json").write_text(json.dumps(manifest))


def edit(directory, case, dtype, change, *, describe=True):
    """Change the tensors in one file, and update its hash and (if ``describe``) its tensor list in the manifest."""

    def rewrite(manifest):
        entry = next(entry for entry in manifest["cases"] if entry["name"] == case)
        record = entry["inputs"] if dtype == "inputs" else entry["outputs"][dtype]
        found = safetensors.numpy.load((directory / record["file"]).read_bytes())
        tensors = {tensor["name"]: found[tensor["name"]].copy() for tensor in record["tensors"]}
        change(tensors)
        tensors = {name: np.array(array, order="C") for name, array in tensors.items()}
        content = safetensors.numpy.save(tensors)
        (directory / record["file"]).write_bytes(content)
        record["sha256"] = hashlib.sha256(content).hexdigest()
        if describe:
            record["tensors"] = [
                {"name": name, "dtype": x.dtype.name, "shape": list(x.shape)} for name, x in tensors.items()
            ]

    edit_manifest(directory, rewrite)


def set_field(*path, value):
    """Return a function that changes one field of the manifest; ``path`` can refer to a case by name or by index."""

    def change(directory):
        def assign(manifest):
            entry = manifest
            for key in path[:-1]:
                is_case = isinstance(entry, list) and isinstance(key, str)
                entry = next(case for case in entry if case["name"] == key) if is_case else entry[key]
            entry[path[-1]] = value

        edit_manifest(directory, assign)

    return change


def drop(directory, keep):
    def choose(manifest):
        manifest["cases"] = [case for case in manifest["cases"] if keep(case["name"])]

    edit_manifest(directory, choose)


def empty(tensors):
    tensors.update({name: array.reshape(-1)[:0].copy() for name, array in tensors.items()})


@cache
def _truth(directory):
    path = directory / "golden_truth"
    assert main(["golden", "--out", str(path)]) == 0
    return path


@cache
def _of_another_program(directory):
    return rounded(shutil.copytree(_truth(directory), directory / "golden_of_another_program"))


@pytest.fixture(scope="session")
def truth(tmp_path_factory):
    """The golden vectors that `parity golden` writes, created only once for all test files."""
    return _truth(tmp_path_factory.getbasetemp())


@pytest.fixture
def copy(tmp_path_factory, tmp_path):
    """A copy of another program's golden vectors, for one test to change."""
    return shutil.copytree(_of_another_program(tmp_path_factory.getbasetemp()), tmp_path / "copy")
