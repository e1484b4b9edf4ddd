"""Hints that are based on file names and tensor names, for paths whose format is not recognized."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from transformer_parity.apps.checkpoints.formats import torch_nn
from transformer_parity.apps.containers import pickles, tensors
from transformer_parity.apps.containers.directory import has
from transformer_spec.files import open_file

CONFIG = "config.json"
SHOWN = 4  # maximum number of names in a message
LISTED = "`parity import --help` lists the supported formats"


def seen(path: Path) -> tuple[str | None, str]:
    """Return a hint for an error message about a path whose format is not recognized.

    Args:
        path: File or directory whose format is not recognized.

    Returns:
        The format that the tensor names suggest, or None if they suggest no format. The second value is the hint,
        which tells the user what to do.
    """
    if path.is_dir():
        return None, (
            f"the directory contains neither {CONFIG} nor model.bin; if the checkpoint is a single file, pass its path"
        )
    if has(path.parent, CONFIG):
        return None, f"the directory of this file contains {CONFIG}; pass the directory {path.parent} instead"
    try:
        if path.suffix == ".safetensors":
            names = tensors.names(path)
            if _is_ours(path):
                return None, (
                    "the file is already a weight file of this project; use it with `parity translate` or `parity "
                    "export`"
                )
            return _seen_in({"": names})
        content = pickles.read(path)
    except ValueError as error:
        return None, f"{error}; {LISTED}"
    if not isinstance(content, dict):
        return None, f"expected a file with named tensors, got {type(content).__name__}; {LISTED}"
    inside = {key: value for key, value in content.items() if isinstance(key, str) and isinstance(value, dict)}
    return _seen_in({"": content, **inside})


def _is_ours(path: Path) -> bool:
    try:
        with open_file(path, "weight file"):
            return True
    except ValueError:
        return False


def _seen_in(states: dict[str, Iterable[str]]) -> tuple[str | None, str]:
    """Return the format and the hint for a file, given its tensor names under each key ("" is the top level)."""
    for key, held in states.items():
        names = [name for name in held if isinstance(name, str)]
        if any(f".{name}".endswith(f".{torch_nn.FIRST}") for name in names):
            where = f', and set state = "{key}" under [file] in FILE' if key else ""
            return "torch", f"the tensors belong to torch.nn.Transformer; add --as torch --names FILE{where}"
        if any(name.endswith("encoder.layers.0.fc1.weight") for name in names):
            return None, (
                "the tensors belong to fairseq or Hugging Face, but the settings are missing; pass the checkpoint that "
                "fairseq-train wrote, or the directory that save_pretrained wrote"
            )
    names = [str(name) for name in states[""]]
    more = ", ..." if len(names) > SHOWN else ""
    return None, f"the file contains {', '.join(names[:SHOWN]) or 'no tensors'}{more}; {LISTED}"
