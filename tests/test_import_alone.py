"""Readers and writers of other formats don't require a framework. The tests use a process that can't import any."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import random_weights, tiny_config
from imported_models import ours
from safetensors.torch import load_file

from transformer_parity.apps.checkpoints.formats import ctranslate2, marian, torch_nn
from transformer_parity.apps.checkpoints.padding import append_padding

BLOCKED = ("torch", "transformers", "tensorflow", "keras", "jax", "flax", "fairseq", "ctranslate2")
SCRIPT = f"""
import sys
from pathlib import Path
sys.modules.update(dict.fromkeys({BLOCKED}))
from transformer_parity.apps.checkpoints.importer import export_checkpoint, import_checkpoint, save
from transformer_parity.apps.checkpoints.options import ReadOptions
directory = Path(sys.argv[1])
fields = {{"num_heads": 3, "norm_order": "post", "activation": "relu", "layer_norm_epsilon": 1e-5}}
fields |= {{"pad_id": 0, "bos_id": 1, "eos_id": 2}}
for name, as_, fields, names in (
    ("marian/model.npz", None, {{}}, None),
    ("ctranslate2", None, {{}}, None),
    ("torch/model.safetensors", "torch", {{}}, directory / "torch/names.toml"),
    ("torch.pt", "torch", {{}}, directory / "torch/names.toml"),
    ("fairseq.pt", None, {{}}, None),
    ("model.weights.h5", None, fields, None),
):
    model = import_checkpoint(directory / name, as_, ReadOptions(fields=fields, names=names))
    save(directory / "out.safetensors", model)
    print(model.origin.format, len(model.weights), model.config.d_model)
export_checkpoint(import_checkpoint(directory / "marian/model.npz"), "marian", directory / "again")
export_checkpoint(import_checkpoint(directory / "marian/model.npz"), "ctranslate2", directory / "other")
print(any(sys.modules.get(name) for name in {BLOCKED}))
"""


def keras_file(path: Path) -> None:
    """Write the file that Keras would write, without using Keras."""
    import h5py

    d, heads, width = 12, 3, 4
    attention = {f"{one}_dense": [(d, heads, width), (heads, width)] for one in ("query", "key", "value")}
    attention["output_dense"] = [(heads, width, d), (d,)]
    rest = {
        "_feedforward_intermediate_dense": [(d, 20), (20,)],
        "_feedforward_output_dense": [(20, d), (d,)],
        "_feedforward_layer_norm": [(d,), (d,)],
    }
    with h5py.File(path, "w") as file:
        for stack, blocks in (("encoder", ("self",)), ("decoder", ("self", "cross"))):
            parts = dict(rest)
            for block in blocks:
                parts |= {f"_{block}_attention_layer/{name}": shapes for name, shapes in attention.items()}
                parts[f"_{block}_attention_layer_norm"] = [(d,), (d,)]
            for name, shapes in parts.items():
                for j, shape in enumerate(shapes):
                    file[f"layers/transformer_{stack}/{name}/vars/{j}"] = np.ones(shape, np.float32)
        for number in ("", "_1"):
            for table in ("token", "position"):
                name = f"layers/token_and_position_embedding{number}/{table}_embedding/vars/0"
                file[name] = np.ones((19, d), np.float32)
        file["layers/dense/vars/0"], file["layers/dense/vars/1"] = np.ones((d, 19), np.float32), np.ones(19, np.float32)


def fairseq_file(path: Path) -> None:
    d, linears = 8, {"self_attn.out_proj": (8, 8), "fc1": (16, 8), "fc2": (8, 16)}
    state = {
        f"{stack}.embed_tokens.weight": torch.full((9, d), 1.0 + (stack == "decoder"))
        for stack in ("encoder", "decoder")
    }
    for stack, blocks in (("encoder", ["self_attn"]), ("decoder", ["self_attn", "encoder_attn"])):
        prefix = f"{stack}.layers.0"
        shapes = {f"{block}.{one}_proj": (d, d) for block in blocks for one in ("q", "k", "v", "out")}
        for name, shape in {**shapes, **linears}.items():
            state |= {f"{prefix}.{name}.weight": torch.ones(shape), f"{prefix}.{name}.bias": torch.ones(shape[0])}
        for norm in (*(f"{block}_layer_norm" for block in blocks), "final_layer_norm"):
            state |= {f"{prefix}.{norm}.{kind}": torch.ones(d) for kind in ("weight", "bias")}
    state["decoder.output_projection.weight"] = torch.full((9, d), 3.0)
    args = argparse.Namespace(encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2)
    torch.save({"args": args, "model": state}, path)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("formats")
    for module, name, preset in (
        (marian, "marian", "marian_cpp"),
        (ctranslate2, "ctranslate2", "bart"),
        (torch_nn, "torch", "torch"),
    ):
        config = tiny_config(preset)
        weights = random_weights(config)
        if preset == "marian_cpp":
            config, weights = append_padding(config.replace(pad_id=0, bos_id=0), weights)
        module.write(ours(config, weights), directory / name)
    torch.save(load_file(directory / "torch/model.safetensors"), directory / "torch.pt")
    fairseq_file(directory / "fairseq.pt")
    keras_file(directory / "model.weights.h5")
    return directory


def test_checkpoint_formats_require_no_framework(directory):
    done = subprocess.run([sys.executable, "-c", SCRIPT, directory], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [
        *("marian", "ctranslate2", "torch", "torch", "fairseq", "keras"),
        "False",
    ]
    assert (directory / "again/model.npz").read_bytes() == (directory / "marian/model.npz").read_bytes()
