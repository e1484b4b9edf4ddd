"""What a path holds that is in no format: what can be done with it, as far as its names tell."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from transformer_parity.apps.checkpoints.formats import torch_nn
from transformer_parity.apps.containers import pickles, tensors
from transformer_parity.apps.containers.folder import has
from transformer_spec.files import open_file

CONFIG = "config.json"
SHOWN = 4  # names that a message lists
LISTED = "`parity import --help` lists what can be read"


def seen(path: Path) -> tuple[str | None, str]:
    """Return the format that the names in a path are those of, if any, and a clause that says what to do with it.

    Args:
        path: A file or a folder that is not recognised.
    """
    if path.is_dir():
        return None, f"the folder has neither {CONFIG} nor model.bin; if the checkpoint is one file in it, give that"
    if has(path.parent, CONFIG):
        return None, f"there is a {CONFIG} beside it, so give the folder: {path.parent}"
    try:
        if path.suffix == ".safetensors":
            names = tensors.names(path)
            if _is_ours(path):
                return None, "it is a weight file of this project, which `parity translate` and `parity export` read"
            return _seen_in({"": names})
        content = pickles.read(path)
    except ValueError as error:
        return None, f"{error}; {LISTED}"
    if not isinstance(content, dict):
        return None, f"it holds no named tensors, but {type(content).__name__}; {LISTED}"
    inside = {key: value for key, value in content.items() if isinstance(key, str) and isinstance(value, dict)}
    return _seen_in({"": content, **inside})


def _is_ours(path: Path) -> bool:
    try:
        with open_file(path, "weight file"):
            return True
    except ValueError:
        return False


def _seen_in(states: dict[str, Iterable[str]]) -> tuple[str | None, str]:
    """Return the same for names of tensors: those of a file, and those under each of its keys."""
    for key, held in states.items():
        names = [name for name in held if isinstance(name, str)]
        if any(f".{name}".endswith(f".{torch_nn.FIRST}") for name in names):
            where = f', with state = "{key}" under [file]' if key else ""
            return "torch", f"its tensors are those of torch.nn.Transformer: add --as torch --names FILE{where}"
        if any(name.endswith("encoder.layers.0.fc1.weight") for name in names):
            return None, (
                "its tensors are those of fairseq or of Hugging Face, without the settings: give the checkpoint that "
                "fairseq-train wrote, or the folder that save_pretrained wrote"
            )
    names = [str(name) for name in states[""]]
    more = ", ..." if len(names) > SHOWN else ""
    return None, f"it holds {', '.join(names[:SHOWN]) or 'nothing'}{more}; {LISTED}"
