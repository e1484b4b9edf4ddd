"""OpenNMT-py and JoeyNMT: tiny models built by their own code, and the logits that this code computed.

``tests/data`` contains tensors, settings, IDs, and logits of OpenNMT-py 3.5.1 and JoeyNMT 2.3.0. The logits were
computed in float64, including the positional encoding and the softmax. The tests write the files around these tensors
in the same way as those programs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from imported_models import assert_only_this_computes_it

from transformer_parity.apps.checkpoints.formats import joeynmt, opennmt_py
from transformer_parity.apps.checkpoints.options import ReadOptions

DATA = Path(__file__).parent / "data"
SPECIAL = {"opennmt": ["<unk>", "<blank>", "<s>", "</s>"], "joeynmt": ["<unk>", "<pad>", "<s>", "</s>"]}


class Fixture:
    def __init__(self, name):
        held = np.load(DATA / f"{name}.npz")
        described = json.loads(held["text"].tobytes())
        self.settings = described["settings"]
        self.source, self.target, self.logits = held["source"], held["target"], held["logits"]
        self.tensors, at = {}, 0
        for key, shape in described["tensors"].items():
            size = int(np.prod(shape))
            self.tensors[key] = torch.tensor(held["numbers"][at : at + size].reshape(shape))
            at += size

    def under(self, prefix):
        return {name.removeprefix(prefix): one for name, one in self.tensors.items() if name.startswith(prefix)}


def save_opennmt(directory, name, edit=lambda content: None):
    held = Fixture(name)
    model, generator = held.under("model/"), held.under("generator/")
    sizes = [len(model[f"{stack}.embeddings.make_embedding.emb_luts.0.weight"]) for stack in ("encoder", "decoder")]
    tokens = [[*SPECIAL["opennmt"], *(f"w{i}" for i in range(size - 4))] for size in sizes]
    content = {
        "model": model,
        "generator": generator,
        "vocab": {"src": tokens[0], "tgt": tokens[1], "data_task": "seq2seq"},
        "opt": argparse.Namespace(**json.loads(held.settings)),
        "optim": {"training_step": 3},
    }
    edit(content)
    torch.save(content, directory / "model.pt")
    return held, directory / "model.pt"


def save_joeynmt(directory, name, edit=lambda settings, tensors: None):
    held = Fixture(name)
    settings, tensors = yaml.safe_load(held.settings), held.under("model/")
    edit(settings, tensors)
    torch.save(
        {"model_state": tensors, "optimizer_state": {"state": {}}, "stats_state": {"steps": 3}}, directory / "3.ckpt"
    )
    (directory / "config.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(settings))))
    return held, directory / "3.ckpt"


SAVED = {"opennmt": (save_opennmt, opennmt_py), "joeynmt": (save_joeynmt, joeynmt)}
HEADS = {"num_heads": 2, "decoder_num_heads": 4, "decoder_d_ff": 20}
NO_BIAS = {"feed_forward_bias": False}
CONFIGS = {
    "opennmt-separate": {**NO_BIAS, "tie_embeddings": "none", "attention_bias": True},
    "opennmt-shared": {**NO_BIAS, "tie_embeddings": "all", "attention_bias": False},
    "joeynmt-pre": {**HEADS, "final_norm": True},
    "joeynmt-post": {**HEADS, "final_norm": False},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_imported_logits_match_the_toolkit(name, tmp_path):
    save, module = SAVED[name.partition("-")[0]]
    held, path = save(tmp_path, name)
    assert module.recognizes(path)
    imported = module.read(path, ReadOptions())
    others = [{"layer_norm_epsilon": 1e-5}, {"position_timescale": "m_minus_1"}, {"position_layout": "split"}]
    others += [{"position_offset": 1}, {"scale_embedding": False}, {"activation": "swish"}]
    others.append({"norm_order": "pre" if imported.config.norm_order == "post" else "post"})
    assert_only_this_computes_it(imported, (held.source, held.target), held.logits, others)
    said = {"pad_id": 1, "bos_id": 2, "eos_id": 3, **CONFIGS[name]}
    assert {field: getattr(imported.config, field) for field in said} == said


OPTIONS = {
    "encoder_type": "brnn",
    "max_relative_positions": 20,
    "position_encoding": False,
    "pos_ffn_activation_fn": "silu",
    "layer_norm": "rms",
    "copy_attn": True,
    "num_kv": 2,
    "parallel_residual": True,
    "model_task": "lm",
    "position_encoding_type": "Rotary",
}


def option(name, value):
    return lambda content: vars(content["opt"]).update({name: value})


def flipped(content):
    content["model"]["encoder.embeddings.make_embedding.pe.pe"] = torch.ones(5, 1, 8)


def both(**fields):
    return lambda settings, _: [settings["model"][stack].update(fields) for stack in ("encoder", "decoder")]


WRONG = {
    "opennmt-separate": [
        *((option(name, value), f"-{name} must be .*: got {value!r}") for name, value in OPTIONS.items()),
        (lambda c: c.pop("opt"), "must contain model, generator, vocab, and opt"),
        (lambda c: c["vocab"].update(src=3), "'vocab' must contain two lists of tokens"),
        (lambda c: c["vocab"].update(tgt=["a"]), "the target vocabulary must contain <blank>, <s>, </s>"),
        (lambda c: c["vocab"].update(src=["<blank>"]), "<blank> must have the same ID in both vocabularies: got 0 and"),
        (lambda c: c["model"].pop("decoder.layer_norm.bias"), r"missing decoder.layer_norm.bias \[8\]"),
        (lambda c: c["model"].update({"feats": torch.ones(1)}), r"unexpected feats \[1\]"),
        (flipped, "pe.pe does not contain the sinusoids of position_layout interleaved and position_timescale m: the"),
    ],
    "joeynmt-post": [
        (both(alpha=1.2), "model.encoder.alpha and model.decoder.alpha in config.yaml must be 1.0: got 1.2"),
        (both(type="recurrent"), "model.decoder.type in config.yaml must be 'transformer': got 'recurrent'"),
        (both(activation="tanh"), "activation in config.yaml must be one of relu, gelu, swish: got 'tanh'"),
        (both(layer_norm=None), "layer_norm in config.yaml must be 'pre' in both stacks or 'post' in both stacks: got"),
        (
            lambda s, _: s["model"]["decoder"].update(layer_norm="pre"),
            "layer_norm in config.yaml must be the same for the encoder",
        ),
        (lambda s, _: s.pop("model"), "config.yaml must contain model.encoder.embeddings and model.decoder"),
        (lambda _, t: t.pop("encoder.layers.1.layer_norm.bias"), r"missing encoder.layers.1.layer_norm.bias \[8\]"),
    ],
}


@pytest.mark.parametrize(("name", "edit", "message"), [(name, *row) for name, rows in WRONG.items() for row in rows])
def test_unsupported_models_and_invalid_files_are_rejected(name, edit, message, tmp_path):
    save, module = SAVED[name.partition("-")[0]]
    _, path = save(tmp_path, name, edit)
    with pytest.raises(ValueError, match=message):
        module.read(path, ReadOptions())


def test_joeynmt_version_1_defaults_to_pre_norm(tmp_path):
    held, path = save_joeynmt(tmp_path, "joeynmt-pre", both(layer_norm=None))
    imported = joeynmt.read(path, ReadOptions())
    assert (imported.config.norm_order, imported.config.final_norm) == ("pre", True)
    assert imported.config == joeynmt.read(save_joeynmt(tmp_path, "joeynmt-pre")[1], ReadOptions()).config
    assert held.logits.shape == (3, 5, 15)
