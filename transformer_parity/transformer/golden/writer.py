"""Write golden vectors, either completely or not at all."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from transformer_parity.engine.processes.children import removed_afterwards
from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.golden.vectors import FORMAT, MANIFEST, VERSION, WEIGHTS, Arrays, LeftOut, sha256
from transformer_parity.transformer.stages.steps import SNAPSHOTS
from transformer_spec.config import TransformerConfig
from transformer_spec.files import save_weights


def write(
    path: Path,
    producer: Mapping[str, Any],
    config: TransformerConfig,
    weights: Arrays,
    computed: Iterable[tuple[Case, Mapping[str, Arrays]]],
    dtypes: Sequence[str],
    left_out: Iterable[LeftOut] = (),
) -> None:
    """Write golden vectors into an empty directory.

    If an error occurs, the directory is incomplete. To avoid this, write into the temporary directory that ``replaced``
    yields.

    Args:
        path: The directory.
        producer: Description of the program that computed the tensors, with its ``name`` and any additional entries.
        config: Config of the model.
        weights: Parameters of the model, one array per canonical name. If a case doesn't use these parameters, its own
            parameters are written to an additional file.
        computed: Pairs of a case and its tensors. The tensors are keyed by dtype and then by name, in the order of
            computation.
        dtypes: The dtypes to list in the manifest.
        left_out: Entries for omitted tensors, with the reasons.

    Raises:
        OSError: If a file can't be written.
        ValueError: If the weights don't match the config.
    """
    files = _Weights(path, config)
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "producer": dict(producer),
        "config": config.to_dict(),
        "dtypes": list(dtypes),
        "weights": files.saved(weights),
        "cases": [_write_case(path, case, tensors, files) for case, tensors in computed],
        "left_out": [asdict(entry) for entry in left_out],
    }
    text = json.dumps(manifest, indent=1, allow_nan=False)
    # Write each tensor's entry on its own line. The replacement doesn't affect strings, because JSON escapes line
    # breaks inside strings as \n.
    text = re.sub(r"\{[^{}]*\}|\[[^][{}]*\]", lambda match: re.sub(r"\n *", " ", match[0]), text)
    (path / MANIFEST).write_text(text + "\n", "utf-8")


class _Weights:
    """The weight files in a directory, one per distinct set of weights. The first file is named ``WEIGHTS``."""

    def __init__(self, path: Path, config: TransformerConfig) -> None:
        self.path, self.config = path, config
        self.records: list[tuple[Arrays, dict[str, Any]]] = []

    def saved(self, weights: Arrays) -> dict[str, Any]:
        """Return the manifest entry of the file with the given weights. Write the file if it doesn't exist yet."""
        for known, record in self.records:
            if all(np.array_equal(array, known[name]) for name, array in weights.items()):
                return record
        file = f"weights_{len(self.records) + 1}.safetensors" if self.records else WEIGHTS
        save_weights(self.path / file, self.config, weights)
        self.records.append((weights, _describe(self.path, file, weights)))
        return self.records[-1][1]


def _write_case(path: Path, case: Case, computed: Mapping[str, Arrays], files: _Weights) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": case.name, "stage": case.stage}
    if (weights := files.saved(case.load_weights())) != files.records[0][1]:
        entry["weights"] = weights
    if case.settings is not None:
        entry["settings"] = case.settings.to_dict()
        steps = range(1, SNAPSHOTS[-1] + 1)
        entry["learning_rates"] = [case.settings.learning_rate(step, case.config.d_model) for step in steps]
    if case.snapshots:
        entry["snapshots"] = list(case.snapshots)
    if case.rows:
        entry["rows"] = list(case.rows)
    if case.calls:
        entry["other_calls_after_steps"] = list(case.calls)
    if case.restart:
        entry["restart_after_step"] = case.restart
    if case.search is not None:
        entry["search"] = case.search.to_dict()
    entry["inputs"] = _save(path, f"{case.name}/inputs.safetensors", case.inputs)
    entry["outputs"] = {
        dtype: _save(path, f"{case.name}/{dtype}.safetensors", tensors) for dtype, tensors in computed.items()
    }
    return entry


def _save(path: Path, file: str, tensors: Arrays) -> dict[str, Any]:
    contiguous = {name: np.array(array, order="C") for name, array in tensors.items()}
    (path / file).parent.mkdir(parents=True, exist_ok=True)
    (path / file).write_bytes(safetensors.numpy.save(contiguous))
    return _describe(path, file, contiguous)


def _describe(path: Path, file: str, tensors: Arrays) -> dict[str, Any]:
    shapes = [{"name": name, "dtype": x.dtype.name, "shape": list(x.shape)} for name, x in tensors.items()]
    return {"file": file, "sha256": sha256((path / file).read_bytes()), "tensors": shapes}


@contextmanager
def replaced(path: str | Path, *, force: bool = False) -> Iterator[Path]:
    """Yield a temporary directory, and rename it to ``path`` at the end of the ``with`` block.

    If an error occurs, the temporary directory is deleted.

    Args:
        path: The final path of the directory. If it already exists, it must be empty, or ``force`` must be True.
        force: Whether to replace existing golden vectors. Other files are never replaced.

    Raises:
        OSError: If ``path`` must not be replaced, or if the directory can't be written.
    """
    path = Path(os.path.realpath(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no directory {path.parent}")
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{path} must be a directory: got a file")
    if path.is_dir() and any(path.iterdir()):
        if not _is_ours(path):
            raise FileExistsError(
                f"{path} must be empty or contain only golden vectors: got a directory with other files"
            )
        if not force:
            raise FileExistsError(f"{path} already contains golden vectors; use --force to replace them")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir()
    with removed_afterwards(temporary):
        yield temporary
        _swap(temporary, path)


def _is_ours(path: Path) -> bool:
    """Return whether a directory contains only golden vectors, or only subdirectories with golden vectors."""
    if not (path / MANIFEST).is_file():
        return path.is_dir() and all(map(_is_ours, path.iterdir())) and any(path.iterdir())
    try:
        manifest = json.loads((path / MANIFEST).read_text("utf-8"))
    except ValueError:
        return False
    files = [file for file in path.rglob("*") if not file.is_dir()]
    known = all(file.name == MANIFEST or file.suffix == ".safetensors" for file in files)
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT and known


def _swap(temporary: Path, path: Path) -> None:
    """Rename a finished directory to its final path. If an error occurs, restore the old directory."""
    old = temporary.with_suffix(".old")
    if path.exists():
        path.rename(old)
    try:
        temporary.rename(path)
    except BaseException:
        if old.exists():
            old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)
