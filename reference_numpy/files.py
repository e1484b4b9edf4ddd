"""The weight file: safetensors, with the config as JSON in its metadata. Nothing in it is ever executed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy, which safetensors looks up by name
from numpy import ndarray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from reference_numpy.checks import check_choice
from reference_numpy.config import TransformerConfig
from reference_numpy.names import FLOAT_DTYPES, check_weights, rounded

METADATA_KEY = "transformer-parity"  # one key only: with several, the bytes of the file depend on hash order
FORMAT_VERSION = 1


def save_weights(
    path: str | Path, config: TransformerConfig, weights: Mapping[str, ndarray], dtype: str | None = None
) -> None:
    """Write config and weights to one file, atomically: whatever fails, an old file stays whole.

    Args:
        path: The file to write or replace.
        config: What the weights are weights of.
        weights: One array per canonical name.
        dtype: How to store them: float64, float32, float16 or bfloat16. None keeps each array's own.

    Raises:
        TypeError: A weight is not of a floating-point dtype.
        ValueError: The weights are not those of the config, or overflow the storage dtype.
        OSError: The file cannot be written.
    """
    check_weights(config, weights)
    if dtype is not None:
        check_choice("dtype", dtype, FLOAT_DTYPES)
    # safetensors writes the memory as it lies, and silently scrambles an array that is not C-contiguous.
    tensors = {name: rounded(name, array, dtype or array.dtype.name) for name, array in weights.items()}
    description = json.dumps({"version": FORMAT_VERSION, "config": config.to_dict()}, sort_keys=True)
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # as the user's umask has it; save_file makes it private
        save_file(tensors, temporary, metadata={METADATA_KEY: description})
        os.chmod(temporary, mode)
        with open(temporary, "r+b") as file:  # Windows syncs only what is open for writing
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except SafetensorError as error:
        raise OSError(f"cannot write {path}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def load_weights(path: str | Path) -> tuple[TransformerConfig, dict[str, ndarray]]:
    """Read config and weights from a file, each array in the dtype it is stored in.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is truncated, corrupt or not ours, or its tensors contradict its config.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no weight file {path}")
    try:
        with safe_open(path, framework="numpy") as file:
            config = _read_config((file.metadata() or {}).get(METADATA_KEY))
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
        check_weights(config, weights)
    except (SafetensorError, TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not a usable weight file: {error}") from error
    return config, weights


def _read_config(description: str | None) -> TransformerConfig:
    if description is None:
        raise ValueError(f"its metadata has no entry {METADATA_KEY!r}")
    content = json.loads(description)
    version = content.get("version") if isinstance(content, dict) else None
    if type(version) is not int or version != FORMAT_VERSION:
        raise ValueError(f"format version must be {FORMAT_VERSION}: got {version!r}")
    return TransformerConfig.from_dict(content.get("config", {}))
