"""Hugging Face checkpoints that the tests create."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import ml_dtypes  # noqa: F401  registers bfloat16
import pytest
import torch

from transformer_parity.apps.checkpoints.formats import huggingface_families

SIZES = {
    **{"d_model": 16, "encoder_layers": 2, "decoder_layers": 1, "max_position_embeddings": 40},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 4, "encoder_ffn_dim": 20, "decoder_ffn_dim": 24},
}


@dataclass(frozen=True)
class Form:
    """A model family, its config fields, and options for saving the checkpoint."""

    family: str
    fields: dict = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    shard: str = "5GB"
    pickled: bool = False

    def __str__(self) -> str:
        kinds = {"bin": self.pickled, "shards": self.shard != "5GB", "float16": self.dtype != torch.float32}
        return "-".join([self.family, *(f"{value}" for value in self.fields.values()), *filter(kinds.get, kinds)])


def made(form: Form) -> torch.nn.Module:
    """Return a transformers model with random parameters and buffers, except for static position tables."""
    import transformers

    family = huggingface_families.FAMILIES[form.family]
    sizes = {"src_vocab_size": 31, "tgt_vocab_size": 31} if form.family == "fsmt" else {"vocab_size": 31}
    special = {"pad_token_id": 30, "decoder_start_token_id": 30} if form.family == "marian" else {}
    scaled = {} if form.family == "fsmt" else {"scale_embedding": True, "activation_function": "swish"}
    fields = {**SIZES, **sizes, **special, **scaled, **form.fields}
    config = getattr(transformers, f"{family.title}Config")(**fields)
    torch.manual_seed(3)
    model = getattr(transformers, family.classes[0])(config).eval()
    static = form.family in ("marian", "pegasus", "fsmt")
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not (static and "embed_positions" in name) and not name.endswith("embed_positions.weights"):
                tensor.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.4)
    return model.to(form.dtype)


def saved(form: Form, directory: Path) -> torch.nn.Module:
    """Save the model as a user would, and return it in float64."""
    model = made(form)
    model.save_pretrained(directory, max_shard_size=form.shard)
    if form.pickled:  # as written by releases before 5, in which a tied matrix is stored under each of its names
        pickle(directory, model)
    return model.double()


def pickle(directory: Path, model: torch.nn.Module) -> None:
    """Write the weights as torch files: one file, or one per shard."""
    files, state = sorted(directory.glob("*.safetensors")), model.state_dict()
    names = list(state)
    places = {name: f"pytorch_model-{at * len(files) // len(names)}.bin" for at, name in enumerate(names)}
    places = places if len(files) > 1 else dict.fromkeys(names, "pytorch_model.bin")
    for place in set(places.values()):
        torch.save({name: state[name] for name in names if places[name] == place}, directory / place)
    if len(files) > 1:
        (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    for path in [*files, *directory.glob("*.safetensors.index.json")]:
        path.unlink()


@cache
def _marian(directory: Path) -> Path:
    saved(Form("marian"), directory / "marian")
    return directory / "marian"


@pytest.fixture
def directory(tmp_path_factory, tmp_path) -> Path:
    """A copy of one model that a test can change."""
    return shutil.copytree(_marian(tmp_path_factory.getbasetemp()), tmp_path / "model")
