"""Save the first wrong block to a directory: its inputs, the values that the port computed, and the correct values.

``block.safetensors`` contains the arrays that the block reads (``inputs/...``), the port's result (``actual``), the
reference's result (``expected``), and the batch (``batch/...``). ``model.safetensors`` contains the config and the
weights, and ``about.json`` contains all other information. Any tool can read these files.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy import ndarray
from safetensors.numpy import load_file

from reference_numpy.backward import transformer_backward
from reference_numpy.training import cross_entropy_backward
from transformer_parity.engine.localization import Evidence
from transformer_parity.engine.outputs import OUTPUT
from transformer_parity.engine.tensors import given
from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.diagnose.evidence.blame import distance
from transformer_parity.transformer.ports.package import LoadedPackage
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.ports.registry import DEFINITION, PORTS
from transformer_parity.transformer.ports.user import PluginPort
from transformer_parity.transformer.stages.gradients import gradients
from transformer_parity.transformer.stages.registry import STAGES
from transformer_spec.files import load_weights, save_tensors, save_weights
from transformer_spec.taps import Recorder

BLOCK, MODEL, ABOUT = "block.safetensors", "model.safetensors", "about.json"
Arrays = Mapping[str, ndarray]


@dataclass(frozen=True)
class SavedBlock:
    """Description of a saved block.

    Attributes:
        port: Name from which the port can be loaded: a backend, or ``module:class``.
        dtype: Working dtype.
        stage: ``activations`` or ``gradients``.
        block: Path of the component that the case runs; empty for the full model.
        name: Name of the wrong tap or gradient.
        replayed: The implementation whose blocks were rerun to locate the wrong block (see ``Blame``).
        error: Relative error of the tap or gradient.
    """

    port: str
    dtype: str
    stage: str
    block: str
    name: str
    replayed: str
    error: float


def save(evidence: Evidence, case: Case, port: str, directory: Path) -> Path:
    """Write the inputs of the first wrong block to a directory, and return the path of the directory.

    If a directory for the same port, dtype, and case exists, it is deleted first.
    """
    blame = evidence.blame
    inputs, weights = (given(arrays, blame.dtype) for arrays in (case.inputs, case.load_weights()))
    mark = next(mark for mark in blame.marks if mark.name == blame.introduced[0])
    saved = SavedBlock(port, blame.dtype, blame.stage, case.block, mark.name, blame.replayed, mark.isolated)
    truth = DEFINITION.load(case.config, weights, Placement("float64"))
    read = _read_by_gradient if STAGES[blame.stage].has_loss else _read_by_tap
    arrays = {
        **{f"inputs/{name}": value for name, value in read(saved, truth, inputs, evidence).items()},
        **{f"batch/{name}": value for name, value in inputs.items()},
        "expected": evidence.wanted.get(mark.name, evidence.expected[mark.name]),
    }
    if mark.name in evidence.isolated:
        arrays["actual"] = evidence.isolated[mark.name]
    target = directory / re.sub(r"[^\w.-]+", "-", f"{port}-{blame.dtype}-{case.name}")
    directory.mkdir(parents=True, exist_ok=True)
    temporary = directory / f".writing-{secrets.token_hex(4)}"
    try:
        temporary.mkdir()
        save_tensors(temporary / BLOCK, {name: np.ascontiguousarray(value) for name, value in arrays.items()})
        save_weights(temporary / MODEL, case.config, dict(weights))
        (temporary / ABOUT).write_text(json.dumps({"format": 1, **asdict(saved)}, indent=1) + "\n", "utf-8")
        shutil.rmtree(target, ignore_errors=True)
        temporary.replace(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def snippet(directory: Path) -> str:
    """Return Python code that prints the arrays of the saved block and reruns it."""
    saved = _about(directory)
    return f"""from transformer_parity.transformer.diagnose.reproduce import load, rerun

block = load({str(directory)!r})  # {saved.name} of {saved.port}
print({{name: array.shape for name, array in block.items()}})  # inputs, "actual", and "expected"
rerun({str(directory)!r})  # reruns this block of your port on correct inputs
"""


def load(directory: str | Path) -> dict[str, ndarray]:
    """Return the arrays of the saved block: ``inputs/<tap>``, ``batch/<ids>``, ``actual``, and ``expected``."""
    return load_file(Path(directory) / BLOCK)


def rerun(directory: str | Path, show: Callable[[str], None] = print) -> float:
    """Rerun a saved block of the port on correct inputs, and return the relative error of the block's output."""
    directory = Path(directory)
    saved = _about(directory)
    config, weights = load_weights(directory / MODEL)
    arrays = load(directory)
    batch = {name.removeprefix("batch/"): value for name, value in arrays.items() if name.startswith("batch/")}
    port = PORTS[saved.port] if saved.port in PORTS else PluginPort(saved.port)
    loaded = port.load(config, weights, Placement(saved.dtype))
    expected = {saved.name: arrays["expected"]}
    if STAGES[saved.stage].has_loss:
        found = gradients(loaded, batch)
    else:
        truth = DEFINITION.load(config, weights, Placement("float64"))
        right = truth.run(saved.block, batch, taps=True).taps
        result = loaded.run(saved.block, batch, taps=True, given=right if saved.replayed == "port" else {})
        found = {**result.taps, OUTPUT: result.output}
    error = distance(saved.name, found, expected)
    show(f"{saved.name}: error {error:.1e}" + (f", was {saved.error:.1e}" if error != saved.error else ""))
    return error


def _about(directory: Path) -> SavedBlock:
    about = json.loads((directory / ABOUT).read_text("utf-8"))
    return SavedBlock(**{name: value for name, value in about.items() if name != "format"})


def _read_by_tap(saved: SavedBlock, truth: LoadedPackage, inputs: Arrays, evidence: Evidence) -> dict[str, ndarray]:
    """Return the inputs of a block: all taps that affect the block's result."""
    read = {name: value for name, value in evidence.expected.items() if name != OUTPUT}
    if saved.replayed != "port":
        shown = {name: evidence.actual[name] for name in read if name in evidence.actual}
        read = {name: np.asarray(value, np.float64) for name, value in shown.items() if value.shape == read[name].shape}

    def run(values: Arrays) -> ndarray:
        result = truth.run(saved.block, inputs, taps=True, given=values)
        return {**result.taps, OUTPUT: result.output}[saved.name]

    return _making_a_difference(read, run)


def _read_by_gradient(
    saved: SavedBlock, truth: LoadedPackage, inputs: Arrays, evidence: Evidence
) -> dict[str, ndarray]:
    """Return the inputs of a block in the backward pass: gradients at later taps, and values from the forward pass."""
    model, seen, name = truth.model, Recorder(), saved.name.partition(" ")[2]
    logits = model(inputs["source_ids"], inputs["target_ids"], tap=seen)
    tokens = max(int((inputs["labels"] != model.config.pad_id).sum()), 1)
    of_logits = cross_entropy_backward(logits, inputs["labels"], model.config) / tokens
    gradients = {
        tap.removeprefix("at "): np.asarray(value, np.float64)
        for tap, value in evidence.actual.items()
        if tap.startswith("at ") and tap in evidence.expected and value.shape == evidence.expected[tap].shape
    }

    def run(of_taps: Arrays, values: Arrays) -> ndarray:
        found = Recorder(replace=of_taps, keep_computed=True)
        transformer_backward(model, inputs["source_ids"], inputs["target_ids"], of_logits, values, found)
        return found[name]

    behind = _making_a_difference(gradients, lambda values: run(values, seen))
    before = _making_a_difference(dict(seen), lambda values: run(gradients, values))
    return {**{f"at {tap}": value for tap, value in behind.items()}, **before}


def _making_a_difference(given: dict[str, ndarray], run: Callable[[Arrays], ndarray]) -> dict[str, ndarray]:
    usual = run(given).tobytes()
    return {name: value for name, value in given.items() if run({**given, name: 1.5 * value + 0.25}).tobytes() != usual}
