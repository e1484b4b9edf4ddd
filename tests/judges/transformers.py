"""Compare imported models with the Flax and TensorFlow classes of transformers 4.57.

transformers 5 contains only PyTorch classes. Install version 4.57 in a separate environment:

    python3.11 -m venv judge-env
    judge-env/bin/pip install transformers==4.57.6 jax==0.4.38 flax==0.10.2 tensorflow==2.21.0 tf-keras==2.21.0
    python -m tests.judges.transformers --python judge-env/bin/python --json docs/results/transformers.json

For each model in ``transformers_models.py``, transformers 5 writes a directory with random weights. Then the Flax and
TensorFlow classes, in separate processes, and ``parity`` compute logits and translations of the same token IDs.
docs/results/transformers.md shows the results.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from reference_numpy.masks import target_padding_mask
from transformer_parity.apps.checkpoints.formats.huggingface_search import generation_search
from transformer_parity.apps.checkpoints.imported import Imported
from transformer_parity.apps.checkpoints.importer import import_checkpoint
from transformer_parity.engine.system.machine import describe_machine
from transformer_parity.engine.tensors import relative_error
from transformer_parity.engine.tolerances import tolerance
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.ports.registry import PORTS

from .transformers_models import CUT, MODELS, TOKENS, Model, ended, logits_of, write

PROGRAM = Path(__file__).with_name("transformers_program.py")
RUNS = (("tf", "float32"), ("flax", "float64"), ("flax", "float32"))
VARIABLES = {
    **{"TF_CPP_MIN_LOG_LEVEL": "3", "TF_USE_LEGACY_KERAS": "1", "USE_TORCH": "0"},
    "XLA_FLAGS": "--xla_backend_optimization_level=0",  # compile faster
}
OF_COMPILED = ("greedy", "4 beams")  # searches for JAX and TensorFlow, which compile each search
EAGER = ("numpy", "torch")  # backends for all searches
SCORE = 1e-5  # largest relative difference between two equal scores; the judges compute in float32
INSTALL = next(line.strip() for line in (__doc__ or "").splitlines() if "pip install" in line)


class JudgeError(Exception):
    """The interpreter can't be run, or transformers 4.57 failed."""


def run_judge(python: str, framework: str, dtype: str, directories: Sequence[Path]) -> list[dict[str, Any]]:
    """Run the Flax or TensorFlow class of each model in a separate process, and return its results.

    Raises:
        JudgeError: If the interpreter can't be run or the process fails. The message contains its last lines of output.
    """
    command = [python, "-P", str(PROGRAM), framework, dtype, *map(str, directories)]
    variables = {**os.environ, **VARIABLES, "JAX_ENABLE_X64": str(dtype == "float64")}
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", env=variables)
    except OSError as error:
        raise JudgeError(f"--python must name a Python interpreter: got {python} ({error})") from error
    if done.returncode:
        last = " ".join(done.stderr.split("\n--------------------")[0].splitlines()[-3:])
        raise JudgeError(f"{framework} in {dtype}: {last}; create the environment with: {INSTALL}")
    return [json.loads((path / f"{framework}-{dtype}.json").read_text("utf-8")) for path in directories]


def directory_of(parent: Path, name: str) -> Path:
    """Return the directory of a model."""
    return parent / "".join(letter if letter.isalnum() or letter == "." else "-" for letter in name)


class Backends:
    """An imported model in all four packages, and the results of its logits and searches.

    Args:
        imported: Model.
        given: Content of ``inputs.json``.
        backends: Names of the backends.
    """

    def __init__(self, imported: Imported, given: dict[str, Any], backends: Iterable[str]) -> None:
        self.imported, self.given, self.backends = imported, given, tuple(backends)
        self.ids = {name: np.array(given[name]) for name in ("source_ids", "target_ids")}
        self.real = target_padding_mask(self.ids["target_ids"], imported.config.pad_id)

    def logits(self, backend: str, dtype: str) -> ndarray:
        """Return the logits at positions without padding."""
        return self._load(backend, dtype).run("", self.ids, taps=False).output[self.real]

    def translate(self, backend: str, name: str, renormalize: bool) -> tuple[list[list[int]], ndarray]:
        """Return the translations of a search, and their scores. NumPy computes in float64."""
        config, settings = self.imported.config, self.given["searches"][name] | {"renormalize_logits": renormalize}
        port = self._load(backend, "float64" if backend == "numpy" else "float32")
        found = port.search(np.array(self.given["sentences"]), generation_search(settings, config))
        return ended(found.ids.tolist(), config.eos_id), np.asarray(found.scores, np.float64)

    def _load(self, backend: str, dtype: str) -> Any:
        gc.collect()  # free the previous model
        return PORTS[backend].load(self.imported.config, self.imported.weights, Placement(dtype))


def compare(name: str, model: Model, theirs: Any, found: dict[tuple[str, str], Any], parent: Path) -> dict[str, Any]:
    """Compare one model with its judges, and return the results in a form that can be written as JSON.

    Args:
        name: Name of the model.
        model: Model.
        theirs: The same model in PyTorch, with transformers 5.
        found: Results of the judges, by framework and dtype.
        parent: Directory that contains the model's directory.
    """
    directory = directory_of(parent, name)
    given = json.loads((directory / "inputs.json").read_text("utf-8"))
    real = target_padding_mask(np.array(given["target_ids"]), theirs.config.pad_token_id)
    judged = {key: np.array(result["logits"])[real] for key, result in found.items()}
    row: dict[str, Any] = {"name": name, "title": model.title, "fields": model.shown}
    in_torch = logits_of(theirs, given)[real]
    row["torch"] = {" ".join(key): relative_error(logits, in_torch) for key, logits in judged.items()}
    imported = import_checkpoint(directory)
    ours = Backends(imported, given, PORTS)
    truth = ours.logits("numpy", "float64")
    errors = {backend: relative_error(ours.logits(backend, "float32"), truth) for backend in PORTS}
    float32 = tolerance("logits", "float32", errors["numpy"])
    # In Flax's T5, the norms compute variances in float32.
    row["allowed"] = {"float64": float32 if model.is_t5 else tolerance("logits", "float64", 0.0), "float32": float32}
    row["backends"] = errors
    row["judges"] = {" ".join(key): relative_error(logits, truth) for key, logits in judged.items()}
    row["searches"] = searches(ours, {judge: found[judge, "float32"] for judge, dtype in found if dtype == "float32"})
    return {**row, "verdict": verdict(row)}


def searches(ours: Backends, judges: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare the translations of all searches. Return one entry per judge and search."""
    rows, known, eos_id = [], {}, ours.imported.config.eos_id
    for judge, found in judges.items():
        for name, result in found["searches"].items():
            expected = ended(result["ids"], eos_id)
            # The beam search of FlaxMarianMTModel removes the padding token before it normalizes the probabilities.
            renormalize = judge == "flax" and ours.imported.origin.family == "marian" and name != "greedy"
            chosen = ours.backends if name in OF_COMPILED else EAGER
            for key in ((backend, name, renormalize) for backend in chosen):
                if key not in known:
                    known[key] = ours.translate(*key)
            results = {backend: known[backend, name, renormalize] for backend in chosen}
            mine, scores = results["numpy"]
            # Both judges return a hypothesis that reached the limit only if no hypothesis ended with EOS.
            cut = [len(row) == TOKENS and row[-1] != eos_id for row in mine] if name == CUT else [False] * len(mine)
            rows.append(
                {
                    "judge": judge,
                    "name": name,
                    "sentences": len(expected),
                    "distinct": len(set(map(tuple, expected))),
                    "equal": {backend: same(one, expected) for backend, (one, _) in results.items()},
                    "cut": sum(a != b and is_cut for a, b, is_cut in zip(mine, expected, cut, strict=True)),
                    "score_error": score_error(mine, expected, scores, np.array(result["scores"])),
                    "different": [
                        {"sentence": i, "ours": a, "theirs": b, "cut": cut[i]}
                        for i, (a, b) in enumerate(zip(mine, expected, strict=True))
                        if a != b
                    ][:3],
                }
            )
            if name in found.get("original", {}):
                rows[-1]["original"] = same(mine, ended(found["original"][name]["ids"], eos_id))
    return rows


def same(found: list[list[int]], expected: list[list[int]]) -> int:
    """Return the number of equal translations."""
    return sum(a == b for a, b in zip(found, expected, strict=True))


def score_error(found: list[list[int]], expected: list[list[int]], ours: ndarray, theirs: ndarray) -> float | None:
    """Return the largest relative difference between the scores of equal translations, or None in a greedy search."""
    equal = np.array([a == b for a, b in zip(found, expected, strict=True)])
    if not equal.any() or np.isnan(theirs).any():
        return None
    return float((np.abs(ours - theirs) / np.maximum(np.abs(ours), 1.0))[equal].max())


def verdict(row: dict[str, Any]) -> str:
    """Return ``agrees`` if all logits are within their tolerances, and all translations and scores are equal.

    Translations may differ if ``parity`` returns a hypothesis that was cut off at the maximum length.
    """
    is_near = all(error <= row["allowed"][name.split()[1]] for name, error in row["judges"].items())
    # transformers 5 computes position embeddings and the norms of T5 in float32.
    in_float32 = (*row["backends"].values(), *row["torch"].values())
    is_near &= all(error <= row["allowed"]["float32"] for error in in_float32)
    all_equal = all(
        equal + one["cut"] == one["sentences"] for one in row["searches"] for equal in one["equal"].values()
    )
    scores = [one["score_error"] for one in row["searches"] if one["score_error"] is not None]
    return "agrees" if is_near and all_equal and max(scores) <= SCORE else "differs"


def compare_all(python: str, names: Sequence[str], parent: Path) -> list[dict[str, Any]]:
    """Write the models, run the judges, and return the results of all comparisons.

    Raises:
        JudgeError: If the judges can't be run.
    """
    theirs = {}
    for name in names:
        print(f"write {name}", flush=True)
        theirs[name], _ = write(MODELS[name], directory_of(parent, name))
    found: dict[str, dict[tuple[str, str], Any]] = {name: {} for name in names}
    for framework, dtype in RUNS:
        chosen = [name for name in names if framework in MODELS[name].judges]
        print(f"run {framework} in {dtype}", flush=True)
        results = run_judge(python, framework, dtype, [directory_of(parent, name) for name in chosen]) if chosen else []
        for name, result in zip(chosen, results, strict=True):
            found[name][framework, dtype] = result
    rows = []
    for name in names:
        versions: dict[str, str] = {}
        for result in found[name].values():
            versions |= result["versions"]
        rows.append({**compare(name, MODELS[name], theirs[name], found[name], parent), "versions": versions})
        print(f"{rows[-1]['verdict']:12} {name}", flush=True)
    return rows


def main() -> int:
    """Compare all models, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="compare only these models")
    parser.add_argument("--python", required=True, help="Python interpreter of the environment with transformers 4.57")
    parser.add_argument("--json", type=Path, help="write the results to this file, and replace only the compared ones")
    parser.add_argument("--keep", type=Path, help="write the models to this directory, and don't delete them")
    options = parser.parse_args()
    names = options.names or [*MODELS]
    if unknown := set(names) - {*MODELS}:
        parser.error(f"names must be among {', '.join(MODELS)}: got {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as temporary:
        parent = options.keep or Path(temporary)
        try:
            rows = compare_all(options.python, names, parent)
        except JudgeError as error:
            parser.error(str(error))
    versions: dict[str, str] = {}
    for row in rows:
        versions |= row.pop("versions")
    if options.json:
        kept = json.loads(options.json.read_text("utf-8"))["models"] if options.json.exists() else []
        by_name = {row["name"]: row for row in [*kept, *rows]}
        report = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": describe_machine(),
            "versions": {**versions, "transformers 5": version("transformers")},
            "models": [by_name[name] for name in MODELS if name in by_name],
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    return int(any(row["verdict"] != "agrees" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
