"""Compare all pairs with ``parity pair``: ``python -m tests.wild.run [NAME ...] --json FILE``.

docs/results/wild-pairs.md shows the results. Pairs that are in the file already aren't compared again.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
from pathlib import Path
from typing import Any

from transformer_parity.engine.system.machine import processor
from transformer_parity.pairs.check import compare_pair
from transformer_parity.pairs.contract.source import Source
from transformer_parity.pairs.result import Settings
from transformer_parity.pairs.run.messages import Import

MODULES = {"mlx_pairs": "mlx-lm", "mlx_more_pairs": "mlx-lm", "keras_pairs": "keras-hub"}


def trial(module: Any, name: str) -> dict[str, Any]:
    """Compare one pair."""
    started = time.monotonic()
    place = [Source(os.getcwd(), module.__name__, f"{name}{side}") for side in ("Original", "Port")]
    # The taps are matched by their values, because the libraries name their layers differently.
    result = compare_pair(Import(place[0]), Import(place[1]), Settings(seeds=2), {})
    worst = max(result.findings, key=lambda finding: finding.ratio)
    return {
        "name": name,
        "library": MODULES[module.__name__.rpartition(".")[2]],
        "verdict": result.verdict.word,
        "introduced": result.introduced[:3],
        "causes": [named.sentence for named in result.named][:2],
        "error": str(worst.error),
        "tolerance": str(worst.tolerance),
        "dtype": worst.dtype,
        "detail": next((one.detail for one in result.findings if one.verdict == "failed"), "")[:400],
        "versions": result.versions,
        "seconds": round(time.monotonic() - started, 1),
    }


def main() -> None:
    """Compare the pairs, and write the results after each of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="compare only these pairs")
    parser.add_argument("--json", type=Path, required=True, help="write the results to this file")
    options = parser.parse_args()
    found = json.loads(options.json.read_text())["pairs"] if options.json.exists() else []
    done = {(one["library"], one["name"]) for one in found}
    for file, library in MODULES.items():
        module = importlib.import_module(f"tests.wild.{file}")
        for name in module.TABLE:
            if (library, name) in done or (options.names and name not in options.names):
                continue
            found.append(one := trial(module, name))
            print(
                one["library"],
                name,
                one["verdict"],
                one["introduced"][:1],
                one["error"],
                one["detail"][:80],
                flush=True,
            )
            options.json.write_text(json.dumps({"processor": processor(), "pairs": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
