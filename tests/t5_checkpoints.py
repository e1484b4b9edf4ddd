"""Hugging Face T5 and mT5 checkpoints that the tests create."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from hf_checkpoints import pickle

from transformer_parity.apps.checkpoints.formats import huggingface_families
from transformer_parity.apps.checkpoints.proof import _replace_norms

SIZES = {
    **{"vocab_size": 61, "d_model": 24, "d_kv": 5, "d_ff": 40, "num_layers": 3, "num_decoder_layers": 2},
    **{"num_heads": 4, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20},
    **{"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0},
}


@dataclass(frozen=True)
class T5Form:
    """A model, described by its family, its config fields, and whether its output projection is tied."""

    name: str
    family: str = "t5"
    fields: Mapping[str, object] = field(default_factory=dict)
    is_tied: bool = False
    dtype: torch.dtype = torch.float32
    pickled: bool = False

    def __str__(self) -> str:
        return self.name


GATED = {"feed_forward_proj": "gated-gelu"}
V1_1 = {**GATED, "tie_word_embeddings": False}
FORMS = [
    T5Form("t5", is_tied=True),
    T5Form("v1.1", fields=V1_1),
    T5Form("mt5", "mt5", {"num_decoder_layers": None, "layer_norm_epsilon": 1e-5}),
    T5Form("buckets", fields={**V1_1, "relative_attention_num_buckets": 14, "relative_attention_max_distance": 17}),
    T5Form("scaled but not tied", fields=GATED),
    T5Form("tied but not scaled", fields=V1_1, is_tied=True),
    T5Form("tied mt5", "mt5", is_tied=True),
    T5Form("gelu", fields={"feed_forward_proj": "gelu"}, is_tied=True),
    T5Form("gated exact gelu", fields={**V1_1, "feed_forward_proj": "gated-gelu_python"}),
    T5Form("gated silu", fields={**V1_1, "feed_forward_proj": "gated-silu"}),
    # MADLAD-400 uses different IDs for padding and for the start.
    T5Form("special IDs", fields={**V1_1, "pad_token_id": 1, "eos_token_id": 2}),
    T5Form("deep decoder", fields={**V1_1, "num_decoder_layers": 4}),
    T5Form("float16", fields=V1_1, dtype=torch.float16),
    T5Form("bin", is_tied=True, pickled=True),
]


def made(form: T5Form) -> torch.nn.Module:
    """Return a transformers model with random parameters."""
    import transformers

    family = huggingface_families.FAMILIES[form.family]
    config = getattr(transformers, f"{family.title}Config")(**SIZES | form.fields)
    model = getattr(transformers, family.classes[0])(config).eval()
    if not form.is_tied:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    torch.manual_seed(3)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.normal_(1.0 if "norm" in name else 0.0, 0.4)
        model.lm_head.weight[config.eos_token_id] *= 3.0  # so that translations end after different numbers of tokens
    return model.to(form.dtype)


def saved(form: T5Form, directory: Path) -> torch.nn.Module:
    """Save the model as a user would, and return it in float64, with norms that compute in float64."""
    model = made(form)
    model.save_pretrained(directory)
    if form.pickled:  # as written by releases before 5, in which a tied matrix is stored under each of its names
        pickle(directory, model)
    _replace_norms(model.double())
    return model
