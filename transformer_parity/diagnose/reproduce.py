"""A guilty block alone: what it was given, what it made of that, and what it should have made, in one folder.

``block.safetensors`` holds the arrays that the block reads (``inputs/...``), what the port made of them (``actual``),
what the reference makes of them (``expected``) and the batch (``batch/...``); ``model.safetensors`` has config and
weights, ``about.json`` the rest. Any tool can read them.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy import ndarray
from safetensors.numpy import load_file, save_file

from reference_numpy.backward import cross_entropy_backward, transformer_backward
from reference_numpy.files import load_weights, save_weights
from reference_numpy.taps import Recorder
from transformer_parity.cases.case import ACTIVATIONS, Case
from transformer_parity.compare import training_outputs
from transformer_parity.compare.outputs import OUTPUT
from transformer_parity.diagnose.blame import Evidence, distance
from transformer_parity.ports.package import LoadedPackage
from transformer_parity.ports.protocol import Placement, Replay
from transformer_parity.ports.registry import PORTS
from transformer_parity.ports.user import PluginPort

BLOCK, MODEL, ABOUT = "block.safetensors", "model.safetensors", "about.json"
Arrays = Mapping[str, ndarray]


@dataclass(frozen=True)
class Guilty:
    """Which block it is.

    Attributes:
        port: By what the port can be loaded: the name of a backend, or ``module:class``.
        dtype: The working dtype.
        stage: ``activations`` or ``gradients``.
        block: The path of what the case runs; empty for the whole model.
        name: The tap, or the gradient, that is wrong.
        replayed: Whose block was run on what the other had (see ``Blame``).
        error: What it is wrong by.
    """

    port: str
    dtype: str
    stage: str
    block: str
    name: str
    replayed: str
    error: float


def save(evidence: Evidence, case: Case, inputs: Arrays, weights: Arrays, port: str, folder: Path) -> Path:
    """Write what the first guilty block of a blame was given, and return the folder it is in.

    A folder of the same port and case is replaced, as a whole.
    """
    blame = evidence.blame
    mark = next(mark for mark in blame.marks if mark.name == blame.introduced[0])
    guilty = Guilty(port, blame.dtype, blame.stage, case.block, mark.name, blame.replayed, mark.alone)
    truth = PORTS["numpy"].load(case.config, weights, Placement("float64"))
    read = _read_by_gradient if blame.stage != ACTIVATIONS else _read_by_tap
    arrays = {
        **{f"inputs/{name}": value for name, value in read(guilty, truth, inputs, evidence).items()},
        **{f"batch/{name}": value for name, value in inputs.items()},
        "expected": evidence.wanted.get(mark.name, evidence.expected[mark.name]),
    }
    if mark.name in evidence.alone:
        arrays["actual"] = evidence.alone[mark.name]
    target = folder / re.sub(r"[^\w.-]+", "-", f"{port}-{blame.dtype}-{case.name}")
    folder.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder, prefix=".writing-"))
    try:
        save_file({name: np.ascontiguousarray(value) for name, value in arrays.items()}, temporary / BLOCK)
        save_weights(temporary / MODEL, case.config, dict(weights))
        (temporary / ABOUT).write_text(json.dumps({"format": 1, **asdict(guilty)}, indent=1) + "\n", "utf-8")
        temporary.chmod(0o755)
        shutil.rmtree(target, ignore_errors=True)
        temporary.replace(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def snippet(folder: Path) -> str:
    """Return the lines of Python that run the guilty block alone."""
    guilty = _about(folder)
    return f"""from transformer_parity.reproduce import load, rerun

block = load({str(folder)!r})  # {guilty.name} of {guilty.port}
print({{name: array.shape for name, array in block.items()}})  # what it reads, what it made, what it should have made
rerun({str(folder)!r})  # runs your port again with right inputs, and prints the error of this block alone
"""


def load(folder: str | Path) -> dict[str, ndarray]:
    """Return the arrays of the guilty block: ``inputs/<tap>``, ``batch/<ids>``, ``actual`` and ``expected``."""
    return load_file(Path(folder) / BLOCK)


def rerun(folder: str | Path, show: Callable[[str], None] = print) -> float:
    """Run the guilty block of the port again, from right inputs, and return its relative error."""
    folder = Path(folder)
    guilty = _about(folder)
    config, weights = load_weights(folder / MODEL)
    arrays = load(folder)
    batch = {name.removeprefix("batch/"): value for name, value in arrays.items() if name.startswith("batch/")}
    port = PORTS[guilty.port] if guilty.port in PORTS else PluginPort(guilty.port)
    loaded = port.load(config, weights, Placement(guilty.dtype))
    expected = {guilty.name: arrays["expected"]}
    if guilty.stage != ACTIVATIONS:
        found = training_outputs.gradients(loaded, batch)
    else:
        truth = PORTS["numpy"].load(config, weights, Placement("float64"))
        right = truth.run(guilty.block, batch, taps=True).taps
        given = right if guilty.replayed == "port" else {}
        result = loaded.run(guilty.block, batch, taps=True, given=given)
        found = {**result.taps, OUTPUT: result.output}
    error = distance(guilty.name, found, expected)
    show(f"{guilty.name}: error {error:.1e}" + (f", was {guilty.error:.1e}" if error != guilty.error else ""))
    return error


def _about(folder: Path) -> Guilty:
    about = json.loads((folder / ABOUT).read_text("utf-8"))
    return Guilty(**{name: value for name, value in about.items() if name != "format"})


def _read_by_tap(guilty: Guilty, truth: LoadedPackage, inputs: Arrays, evidence: Evidence) -> dict[str, ndarray]:
    """Return what a block reads: the taps that make a difference to it."""
    given = {name: value for name, value in evidence.expected.items() if name != OUTPUT}
    if guilty.replayed != "port":
        shown = {name: evidence.actual[name] for name in given if name in evidence.actual}
        given = {
            name: np.asarray(value, np.float64) for name, value in shown.items() if value.shape == given[name].shape
        }

    def run(values: Arrays) -> ndarray:
        result = truth.run(guilty.block, inputs, taps=True, given=values)
        return {**result.taps, OUTPUT: result.output}[guilty.name]

    return _making_a_difference(given, run)


def _read_by_gradient(guilty: Guilty, truth: LoadedPackage, inputs: Arrays, evidence: Evidence) -> dict[str, ndarray]:
    """Return what a block reads backwards: the gradients behind it, and the values of the forward pass."""
    model, seen, name = truth.model, Recorder(), guilty.name.partition(" ")[2]
    logits = model(inputs["source_ids"], inputs["target_ids"], tap=seen)
    tokens = max(int((inputs["labels"] != model.config.pad_id).sum()), 1)
    of_logits = cross_entropy_backward(logits, inputs["labels"], model.config) / tokens
    gradients = {
        tap.removeprefix("at "): np.asarray(value, np.float64)
        for tap, value in evidence.actual.items()
        if tap.startswith("at ") and tap in evidence.expected and value.shape == evidence.expected[tap].shape
    }

    def run(of_taps: Arrays, values: Arrays) -> ndarray:
        found = Replay(replace=of_taps)
        transformer_backward(model, inputs["source_ids"], inputs["target_ids"], of_logits, values, found)
        return found[name]

    behind = _making_a_difference(gradients, lambda values: run(values, seen))
    before = _making_a_difference(dict(seen), lambda values: run(gradients, values))
    return {**{f"at {tap}": value for tap, value in behind.items()}, **before}


def _making_a_difference(given: dict[str, ndarray], run: Callable[[Arrays], ndarray]) -> dict[str, ndarray]:
    usual = run(given).tobytes()
    return {name: value for name, value in given.items() if run({**given, name: 1.5 * value + 0.25}).tobytes() != usual}
