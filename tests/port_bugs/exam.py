"""Run ``parity pair`` on all port bugs, next to the rules that people use to compare ports.

Usage: ``python tests/port_bugs/exam.py [NAME ...] [--json FILE]``. docs/results/port-bugs.md shows the results.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from transformer_parity.engine.system.machine import processor
from transformer_parity.pairs.check import compare_pair
from transformer_parity.pairs.compare.conditions import without_constants
from transformer_parity.pairs.contract.arrays import cast, rounded
from transformer_parity.pairs.contract.source import Source
from transformer_parity.pairs.run.messages import Import
from transformer_parity.pairs.run.side import RunError, SideModel, two_sides

HERE = Path(__file__).parent
RULES = {
    "allclose 1e-5": lambda mine, theirs: np.allclose(mine, theirs, rtol=1e-5, atol=1e-5),
    "allclose 1e-3": lambda mine, theirs: np.allclose(mine, theirs, rtol=1e-3, atol=1e-3),
    "NMSE 1e-4": lambda mine, theirs: np.square(mine - theirs).sum() <= 1e-4 * np.square(theirs).sum(),
    "cosine 0.999": lambda mine, theirs: (mine * theirs).sum() >= 0.999 * np.linalg.norm(mine) * np.linalg.norm(theirs),
}


def examples(names: list[str]) -> list[str]:
    """Return the names of the examples, or of all if no names are given."""
    files = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in ("exam", "__init__"))
    return [name for name in files if not names or name in names]


def facts(name: str) -> dict[str, Any]:
    """Return the constants that describe an example, without importing its frameworks."""
    tree = ast.parse((HERE / f"{name}.py").read_text("utf-8"))
    found = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper()
        if _is_literal(node.value)
    }
    kinds = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    return {**found, "what": (ast.get_docstring(tree) or "").splitlines()[0], "has_fixed": "Fixed" in kinds}


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True


def rules(name: str, kind: str, stage: str) -> dict[str, bool | None]:
    """Return whether each rule accepts a port in float32, with weights that hide nothing."""
    original, port = (Import(Source.parse(f"{HERE / name}.py:{one}", one)) for one in ("Original", kind))
    with two_sides(original, port, {}, 600.0) as sides:
        for side in sides:
            side.start()
        weights, _ = without_constants(sides[0].new("init_weights", 0), sides[0].imported.fixed_weights)
        inputs = cast(rounded(sides[0].new("inputs", 0), "float32"), "float32")
        try:
            theirs, mine = (
                _results(side.model(rounded(weights, "float32"), "float32"), inputs, stage) for side in sides
            )
        except RunError:
            return dict.fromkeys(RULES)
    shapes = theirs.keys() == mine.keys() and all(value.shape == mine[key].shape for key, value in theirs.items())
    return {
        rule: shapes and all(bool(accepts(mine[key], value)) for key, value in theirs.items())
        for rule, accepts in RULES.items()
    }


def _results(model: SideModel, inputs: Mapping[str, ndarray], stage: str) -> dict[str, ndarray]:
    """Return the outputs or gradients. People rarely compare the logits of cached decoding, so outputs stand for it."""
    found = model.gradients(inputs).outputs if stage == "gradients" else model.forward(inputs).outputs
    return {key: np.asarray(value, np.float64) for key, value in found.items()}


def trial(name: str, kind: str) -> dict[str, Any]:
    """Compare one port of an example, and return the expected and the actual result."""
    about = facts(name)
    is_bug = about["KIND"] == "bug" and kind == "Port"
    path, started = f"{HERE / name}.py", time.monotonic()
    names = Source.parse(path, "names")
    result = compare_pair(
        Import(Source.parse(path, "Original"), names=names), Import(Source.parse(f"{path}:{kind}", kind))
    )
    kinds = [named.kind for named in result.named]
    wanted = about["NAME"].split("/")[0]
    return {
        "name": name,
        "port": kind,
        "what": about["what"],
        "source": about["SOURCE"],
        "is_bug": is_bug,
        "stage": about["STAGE"],
        "verdict": result.verdict.word,
        "introduced": result.introduced,
        "blocks": about["BLOCKS"],
        "is_found": (result.verdict.word in ("DIVERGE", "IMPRECISE")) == is_bug and result.verdict.word != "INCOMPLETE",
        "is_located": not (is_bug and about["BLOCKS"])
        or result.introduced[:1] in [[block] for block in about["BLOCKS"]],
        "kind": about["NAME"],
        "kinds": kinds,
        "is_named": not (is_bug and wanted) or any(kind.startswith(wanted) for kind in kinds),
        "causes": [named.sentence for named in result.named],
        "rules": rules(name, kind, about["STAGE"]),
        "versions": result.versions,
        "seconds": round(time.monotonic() - started, 1),
    }


def main() -> int:
    """Run the exam, print a line per port, and return 0 if all ports are judged correctly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="run only these examples")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    found = []
    for name in examples(options.names):
        for kind in ["Port"] + ["Fixed"] * facts(name)["has_fixed"]:
            found.append(one := trial(name, kind))
            flags = "".join(letter if one[key] else "-" for key, letter in FLAGS.items())
            print(
                f"{flags} {name}:{kind} {one['verdict']} {one['introduced'][:1]} {one['kinds']} {one['seconds']} s",
                flush=True,
            )
            if options.json:
                options.json.write_text(json.dumps({"processor": processor(), "ports": found}, indent=1) + "\n")
    bugs = [one for one in found if one["is_bug"]]
    for key in FLAGS:
        print(f"{key}: {sum(one[key] for one in bugs)} of {len(bugs)} bugs")
    print(f"false alarms: {sum(not one['is_found'] for one in found if not one['is_bug'])} of {len(found) - len(bugs)}")
    return 0 if all(one["is_found"] for one in found) else 1


FLAGS = {"is_found": "F", "is_located": "L", "is_named": "N"}

if __name__ == "__main__":
    sys.exit(main())
