"""Tiny random models for the comparison with the Flax and TensorFlow classes of transformers 4.57."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy import ndarray
from transformers import GenerationConfig

SIZES = {
    **{"vocab_size": 40, "d_model": 16, "encoder_layers": 2, "decoder_layers": 1, "max_position_embeddings": 40},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 4, "encoder_ffn_dim": 20, "decoder_ffn_dim": 24},
}
T5_SIZES = {
    **{"vocab_size": 40, "d_model": 16, "d_kv": 6, "d_ff": 20, "num_layers": 2, "num_decoder_layers": 1},
    **{"num_heads": 4, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16},
}
MARIAN = {"pad_token_id": 39, "decoder_start_token_id": 39, "eos_token_id": 0}
UNTIED = {"tie_word_embeddings": False}
FIRST = 7
# Settings of ``generate`` for each search, without the IDs of special tokens.
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"num_beams": 1},
    "4 beams": {"num_beams": 4, "early_stopping": False, "length_penalty": 1.0},
    "2 beams, length penalty 0.6": {"num_beams": 2, "early_stopping": False, "length_penalty": 0.6},
    "5 beams, length penalty 2, stop at 5 hypotheses": {"num_beams": 5, "early_stopping": True, "length_penalty": 2.0},
    "4 beams, never stop early": {"num_beams": 4, "early_stopping": "never", "length_penalty": 1.0},
    "4 beams, forced first token, minimum length": {
        **{"num_beams": 4, "early_stopping": False, "length_penalty": 1.0},
        **{"forced_bos_token_id": FIRST, "min_length": 5},
    },
    "4 beams, EOS not forced": {"num_beams": 4, "early_stopping": False, "forced_eos_token_id": None},
}
CUT = "4 beams, EOS not forced"
OF_ALL = ("greedy", "4 beams")  # searches for all models


@dataclass(frozen=True)
class Model:
    """A model for the comparison.

    Attributes:
        title: Prefix of the model's class names.
        fields: Fields of the config, in addition to the sizes.
        searches: Names of the searches.
    """

    title: str
    fields: dict[str, Any] = field(default_factory=dict)
    searches: tuple[str, ...] = OF_ALL

    @property
    def judges(self) -> tuple[str, ...]:
        """Frameworks whose classes support the model.

        Except for T5, the TensorFlow classes ignore ``tie_word_embeddings`` and always tie the output projection.
        """
        return ("flax", "tf") if self.is_tied or self.is_t5 else ("flax",)

    @property
    def is_tied(self) -> bool:
        """Whether the output projection is tied to the embedding."""
        return self.fields.get("tie_word_embeddings", True)

    @property
    def is_t5(self) -> bool:
        """Whether the model is a T5 model, whose config has different names for the sizes."""
        return self.title in ("T5", "MT5")

    @property
    def shown(self) -> str:
        """The fields as text, without the IDs of special tokens."""
        return ", ".join(f"{name}={value}" for name, value in self.fields.items() if not name.endswith("_id"))


MODELS = {
    "marian": Model("Marian", {**MARIAN, "scale_embedding": True, "activation_function": "swish"}),
    "marian, embedding not scaled, 2 decoder layers": Model(
        "Marian", {**MARIAN, "scale_embedding": False, "activation_function": "relu", "decoder_layers": 2}
    ),
    "marian, output not tied": Model("Marian", {**MARIAN, "scale_embedding": True, **UNTIED}),
    "bart": Model("Bart", searches=tuple(SEARCHES)),
    "bart, scaled embedding, 2 decoder layers": Model(
        "Bart", {"scale_embedding": True, "activation_function": "relu", "decoder_layers": 2}
    ),
    "bart, output not tied": Model("Bart", {"activation_function": "swish", **UNTIED}),
    "mbart": Model("MBart", {"scale_embedding": True}),
    "mbart, output not tied": Model("MBart", {"activation_function": "gelu_new", **UNTIED}),
    "pegasus": Model("Pegasus", {"scale_embedding": True, "activation_function": "relu"}),
    "pegasus, output not tied": Model("Pegasus", UNTIED),
    "blenderbot": Model("Blenderbot", {"scale_embedding": True}),
    "t5": Model("T5", {"feed_forward_proj": "relu"}),
    "t5 v1.1": Model("T5", {"feed_forward_proj": "gated-gelu", **UNTIED}),
    "mt5": Model("MT5", {"feed_forward_proj": "gated-gelu", "num_decoder_layers": 2, **UNTIED}),
}
SENTENCES, TOKENS = 80, 20  # number of sentences to translate, and maximum number of tokens in a translation
SEEDS = 30  # number of random models to try; write() keeps the model with the most varied translations


def inputs_of(config: Any, searches: Sequence[str]) -> dict[str, Any]:
    """Return the content of ``inputs.json``: token IDs and settings of searches.

    Args:
        config: Config of transformers 5.
        searches: Names of the searches.
    """
    pad, eos, rng = config.pad_token_id, config.eos_token_id, np.random.default_rng(0)
    words = np.delete(np.arange(config.vocab_size), [pad, eos])

    def sentences(count: int, longest: int) -> ndarray:
        ids = np.full((count, longest), pad)
        for row in ids:
            length = rng.integers(2, longest + 1)
            row[:length] = rng.choice(words, length)
        return ids

    target_ids = sentences(8, 12)
    target_ids[:, 0] = config.decoder_start_token_id
    common = {"pad_token_id": pad, "eos_token_id": eos, "decoder_start_token_id": config.decoder_start_token_id}
    common |= {"suppress_tokens": [pad], "max_length": TOKENS + 1, "forced_eos_token_id": eos}
    settings = {name: {**common, **SEARCHES[name]} for name in searches}
    return {
        "source_ids": sentences(8, 24).tolist(),
        "target_ids": target_ids.tolist(),
        "sentences": sentences(SENTENCES, 9).tolist(),
        "searches": settings,
        # With the same minimum length, Flax allows EOS one step later than PyTorch and TensorFlow.
        "flax": {name: {**one, "min_length": max(one.get("min_length", 0) - 1, 0)} for name, one in settings.items()},
        # TensorFlow's "never" divides integers by a float in compiled functions, which raises an error.
        "tf": {name: one for name, one in settings.items() if one.get("early_stopping") != "never"},
        "original": len(searches) > len(OF_ALL),
    }


def built(model: Model) -> Any:
    """Return a model of transformers 5."""
    config = getattr(transformers, f"{model.title}Config")(**{**(T5_SIZES if model.is_t5 else SIZES), **model.fields})
    if getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.eos_token_id if model.title == "MBart" else config.pad_token_id
    kind = "MTModel" if model.title == "Marian" else "ForConditionalGeneration"
    theirs = getattr(transformers, f"{model.title}{kind}")(config).eval()
    if not model.is_tied:  # transformers 5 ties new T5 models, but not models whose file contains two matrices
        theirs.lm_head.weight = torch.nn.Parameter(theirs.lm_head.weight.detach().clone())
    return theirs


@torch.no_grad()
def draw(theirs: Any, model: Model, seed: int) -> None:
    """Draw all parameters, except for static position tables. Random signs in the norms prevent repeated tokens."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in [*theirs.named_parameters(), *theirs.named_buffers()]:
        if "embed_positions" in name and model.title in ("Marian", "Pegasus"):
            continue
        is_norm = "norm" in name and name.endswith("weight")
        scale = 1.0 if is_norm or name == "final_logits_bias" else 0.2 if name.endswith("bias") else 0.5
        tensor.normal_(0.0, scale, generator=generator)
    base = theirs if model.is_t5 else theirs.model
    for stack in (base.encoder, base.decoder):  # Flax's classes have one embedding for both
        stack.embed_tokens.weight.copy_(base.shared.weight)
    if model.is_t5:
        theirs.lm_head.weight[theirs.config.eos_token_id] *= 1.0 + 2.0 * (seed % 5)
        if not model.is_tied:  # without this factor, the float32 errors of scores are up to 3e-5
            theirs.lm_head.weight.mul_(theirs.config.d_model**-0.5)
    else:
        theirs.final_logits_bias[0, theirs.config.eos_token_id] += 2.0 * (seed % 5)


@torch.no_grad()
def logits_of(theirs: Any, given: dict[str, Any]) -> ndarray:
    """Return the logits of a model of transformers 5, in the dtype of the model."""
    pad = theirs.config.pad_token_id
    source, target = (torch.tensor(given[name]) for name in ("source_ids", "target_ids"))
    seen, real = source != pad, target != pad
    real[:, 0] = True
    masks = {"attention_mask": seen, "decoder_attention_mask": real}
    return theirs(input_ids=source, decoder_input_ids=target, **masks).logits.numpy()


@torch.no_grad()
def translations(theirs: Any, given: dict[str, Any], name: str, count: int = SENTENCES) -> list[list[int]]:
    """Return the translations of a model of transformers 5."""
    ids = torch.tensor(given["sentences"][:count])
    found = theirs.generate(
        ids, GenerationConfig(**given["searches"][name]), attention_mask=ids != theirs.config.pad_token_id
    )
    return ended(found[:, 1:].tolist(), theirs.config.eos_token_id)


def ended(rows: list[list[int]], eos_id: int) -> list[list[int]]:
    """Return the tokens of each translation up to EOS. Programs write different tokens after EOS."""
    return [row[: row.index(eos_id) + 1] if eos_id in row else row for row in rows]


def variety(found: list[list[int]]) -> int:
    """Return the number of different translations times the number of different lengths."""
    return len(set(map(tuple, found))) * len(set(map(len, found)))


def write(model: Model, directory: Path) -> tuple[Any, dict[str, Any]]:
    """Write a model and ``inputs.json`` to a directory.

    Returns:
        The model that transformers 5 loads from the directory, in float64, and the content of ``inputs.json``.
    """
    theirs = built(model)
    given, found = inputs_of(theirs.config, model.searches), {}
    for seed in range(SEEDS):
        draw(theirs, model, seed)
        found[seed] = variety(translations(theirs, given, "4 beams", 12))
    draw(theirs, model, max(found, key=found.__getitem__))
    theirs.save_pretrained(directory)
    fields = json.loads((directory / "config.json").read_text("utf-8"))
    fields["tie_word_embeddings"] = model.is_tied  # transformers 5 writes true for all T5 models
    (directory / "config.json").write_text(json.dumps(fields, indent=2), "utf-8")
    (directory / "inputs.json").write_text(json.dumps(given), "utf-8")
    return type(theirs).from_pretrained(directory).eval().double(), given
