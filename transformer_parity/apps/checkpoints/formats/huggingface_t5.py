"""Hugging Face's T5 and mT5 families: T5, T5 v1.1, FLAN-T5, mT5, ByT5, and MADLAD-400.

Source: configuration_t5.py, modeling_t5.py, and modeling_mt5.py of transformers 5.23 and 4.57.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from numpy import ndarray

from transformer_parity.apps.checkpoints.expressible import check_expressible
from transformer_parity.apps.checkpoints.formats.huggingface_families import (
    ACTIVATIONS,
    FAMILIES,
    WRITTEN_ACTIVATIONS,
    one_id,
)
from transformer_parity.apps.checkpoints.formats.huggingface_ties import TieNames, settle_tables
from transformer_parity.apps.checkpoints.name_mapping import TRANSPOSED, Row, give, same, take
from transformer_spec.config import TransformerConfig
from transformer_spec.presets import PRESETS

T5_FAMILIES = ("t5", "mt5")
SHARED, OUTPUT = "shared.weight", "lm_head.weight"
ENCODER, DECODER = (f"{stack}.embed_tokens.weight" for stack in ("encoder", "decoder"))
NAMES = TieNames(SHARED, ENCODER, DECODER, OUTPUT)
BIAS = "SelfAttention.relative_attention_bias.weight"
# Old checkpoints contain this tensor, which no release of transformers uses.
IGNORED = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)
SUBLAYERS = {  # maps the sublayers of each stack to their names in transformers, in the order of their indices
    "encoder": {"self_attention": "SelfAttention", "feed_forward": "DenseReluDense"},
    "decoder": {
        **{"self_attention": "SelfAttention", "cross_attention": "EncDecAttention"},
        "feed_forward": "DenseReluDense",
    },
}
ATTENTION = {"query_proj": "q", "key_proj": "k", "value_proj": "v", "output_proj": "o"}
FEED_FORWARD = {"inner_proj": "wi", "output_proj": "wo"}
GATED = {"gate_proj": "wi_0", "inner_proj": "wi_1", "output_proj": "wo"}
# Names of activations after "gated-" in feed_forward_proj. There, transformers interprets "gelu" as the tanh
# approximation, so the exact GELU requires a different name.
WRITTEN_GATED = {**WRITTEN_ACTIVATIONS, "gelu_tanh": "gelu", "gelu": "gelu_python", "swish": "silu"}
# Fields for which T5 supports only the values in the preset
FIXED = ("norm_order", "final_norm", "layer_norm_kind", "position_encoding", "scale_embedding", "scale_scores")

# Fields of the config whose values are entries of config.json with a different name
ENTRIES = {
    "source_vocab_size": "vocab_size",
    "target_vocab_size": "vocab_size",
    "d_k": "d_kv",
    "d_v": "d_kv",
    "num_encoder_layers": "num_layers",
    "relative_buckets": "relative_attention_num_buckets",
    "relative_max_distance": "relative_attention_max_distance",
    "pad_id": "pad_token_id",
}


def table_of(config: TransformerConfig) -> tuple[Row, ...]:
    """Return the table of parameter names."""
    rows = [
        Row("{side}_embedding.table", "{stack}.embed_tokens.weight"),
        Row("{stack}.relative_bias.table", "{stack}.block.0.layer.0." + BIAS),
        Row("{stack}.final_norm.scale", "{stack}.final_layer_norm.weight"),
        Row("output_proj.kernel", OUTPUT, TRANSPOSED),
    ]
    inside = GATED if config.gated_feed_forward else FEED_FORWARD
    for stack, sublayers in SUBLAYERS.items():
        for index, (sublayer, module) in enumerate(sublayers.items()):
            ours, theirs = f"{stack}.layers.{{i}}.{sublayer}", f"{stack}.block.{{i}}.layer.{index}"
            rows.append(Row(f"{ours}_norm.scale", f"{theirs}.layer_norm.weight"))
            names = inside if sublayer == "feed_forward" else ATTENTION
            rows += [
                Row(f"{ours}.{name}.kernel", f"{theirs}.{module}.{other}.weight", TRANSPOSED)
                for name, other in names.items()
            ]
    return tuple(rows)


def convert(
    family: str, fields: Mapping[str, Any], found: Mapping[str, ndarray]
) -> tuple[TransformerConfig, dict[str, ndarray], list[str]]:
    """Convert a model's config.json and tensors.

    Args:
        family: ``t5`` or ``mt5``.
        fields: Content of config.json, with missing fields set to their defaults.
        found: Tensors by name.

    Returns:
        The config, the weights by canonical name, and notes about contradictions.

    Raises:
        ValueError: If a field has an invalid or unsupported value, or if the tensors do not match the config.
        TypeError: If a field has the wrong type.
    """
    if not any(name.startswith("decoder.block.") for name in found):
        raise ValueError("the checkpoint contains no decoder; only models with an encoder and a decoder are supported")
    flags, notes = dict(fields), _notes(family, fields)
    if fields["tie_word_embeddings"] is True and _is_by_5(fields):
        flags["tie_word_embeddings"] = None  # transformers 5 writes true for all models
    tied, found, said = settle_tables(found, NAMES, flags)
    if tied == "none" and same(found[ENCODER], found[DECODER]):
        tied = "source_target"
        del found[DECODER]
    config = _config_of(family, fields, tied)
    return config, take(table_of(config), found, config, IGNORED), notes + said


def _is_by_5(fields: Mapping[str, Any]) -> bool:
    """Return whether release 5 or later of transformers wrote a config.json."""
    major = str(fields.get("transformers_version", "")).partition(".")[0]
    return major.isdecimal() and int(major) >= 5


def _notes(family: str, fields: Mapping[str, Any]) -> list[str]:
    notes = []
    if family == "mt5" and fields["tie_word_embeddings"] is True and not _is_by_5(fields):
        notes.append(
            "tie_word_embeddings is true, so transformers 4 divides the decoder's output by sqrt(d_model); this import "
            "and transformers 5 never divide it for mt5 models"
        )
    tasks = fields.get("task_specific_params")
    prefixes = [
        f'"{task["prefix"][:60]}"'
        for task in (tasks.values() if isinstance(tasks, dict) else [])
        if isinstance(task, dict) and isinstance(task.get("prefix"), str) and task["prefix"]
    ]
    if prefixes:
        notes.append(
            f"config.json lists prefixes for tasks: {', '.join(prefixes)}; `parity translate` does not add a prefix, "
            "so add the prefix of your task to each line"
        )
    return notes


def _config_of(family: str, fields: Mapping[str, Any], tie_embeddings: str) -> TransformerConfig:
    activation, is_gated = _feed_forward_of(fields)
    decoder, start, rate = fields["num_decoder_layers"], fields["decoder_start_token_id"], fields["dropout_rate"]
    scales = fields.get("scale_decoder_outputs", fields["tie_word_embeddings"] is not False)
    changes = {
        **{ours: fields[theirs] for ours, theirs in ENTRIES.items()},
        "d_model": fields["d_model"],
        "num_heads": fields["num_heads"],
        "d_ff": fields["d_ff"],
        "num_decoder_layers": fields["num_layers"] if decoder is None else decoder,
        "layer_norm_epsilon": fields["layer_norm_epsilon"],
        "activation": activation,
        "gated_feed_forward": is_gated,
        "tie_embeddings": tie_embeddings,
        "scale_logits": scales if family == "t5" else False,
        "dropout": dict.fromkeys(PRESETS["t5"]["dropout"], rate),
        "bos_id": fields["pad_token_id"] if start is None else start,
        "eos_id": one_id(fields["eos_token_id"]),
    }
    try:
        return TransformerConfig.preset(family, **changes)
    except (TypeError, ValueError) as error:
        entry = ENTRIES.get(re.split(r"\W", str(error), maxsplit=1)[0])
        if entry is None:
            raise
        raise type(error)(f"{error} ({entry} in config.json)") from error


def _feed_forward_of(fields: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the activation, and whether the feed-forward networks are gated."""
    said = fields["feed_forward_proj"]
    first, _, name = said.rpartition("-") if isinstance(said, str) else ("no text", "", None)
    if first not in ("", "gated"):
        raise ValueError(f"feed_forward_proj must be an activation, such as relu or gated-gelu: got {said!r:.60}")
    entry = "dense_act_fn" if "dense_act_fn" in fields else "feed_forward_proj"
    name = fields.get("dense_act_fn", "gelu_new" if said == "gated-gelu" else name)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"the activation in {entry} must be one of {', '.join(ACTIVATIONS)}: got {name!r:.60}")
    return ACTIVATIONS[name], fields.get("is_gated_act", first == "gated")


def preset_of(family: str, config: TransformerConfig) -> str:
    """Return the preset that is most similar to a model."""
    return "t5_v1_1" if family == "t5" and config.gated_feed_forward else family


def check_family(config: TransformerConfig, family: str) -> None:
    """Check that a family supports a config.

    Raises:
        ValueError: If the family does not support the config. The message lists the unsupported fields.
    """
    off = ("attention_bias", "feed_forward_bias", "output_bias", "embedding_norm", "skip_first_self_attention")
    needed: dict[str, tuple[object, ...]] = {name: (PRESETS["t5"][name],) for name in FIXED}
    needed |= dict.fromkeys(off, (False,))
    needed |= {
        "position_offset": (0,),
        "target_vocab_size": (config.source_vocab_size,),
        "tie_embeddings": ("source_target", "all"),
        "d_k": (config.d_k,),
        "d_v": (config.d_k,),
        "gated_feed_forward": (False, True),
        "scale_logits": (False, True) if family == "t5" else (False,),
        "decoder_num_heads": (None, config.num_heads),
        "decoder_d_k": (None, config.d_k),
        "decoder_d_v": (None, config.d_k),
        "decoder_d_ff": (None, config.d_ff),
    }
    check_expressible(config, needed, f"Hugging Face's {FAMILIES[family].classes[0]}")


def tensors_of(config: TransformerConfig, weights: Mapping[str, ndarray]) -> dict[str, ndarray]:
    """Return a model's tensors under their names in transformers."""
    found = give(table_of(config), weights, config)
    found[SHARED] = found.pop(ENCODER)
    if not _is_tied(config):
        found.setdefault(OUTPUT, found[SHARED])
    return found


def _is_tied(config: TransformerConfig) -> bool:
    """Return the value of ``tie_word_embeddings``, from which transformers 4 also infers ``scale_logits``."""
    return config.ties_output and config.scale_logits


def fields_of(config: TransformerConfig, family: str) -> dict[str, Any]:
    """Return the content of a model's config.json."""
    gated = f"gated-{WRITTEN_GATED[config.activation]}"
    return {
        "architectures": FAMILIES[family].classes[:1],
        "model_type": family,
        "is_encoder_decoder": True,
        "vocab_size": config.source_vocab_size,
        "d_model": config.d_model,
        "num_heads": config.num_heads,
        "d_kv": config.d_k,
        "d_ff": config.d_ff,
        "num_layers": config.num_encoder_layers,
        "num_decoder_layers": config.num_decoder_layers,
        "relative_attention_num_buckets": config.relative_buckets,
        "relative_attention_max_distance": config.relative_max_distance,
        "layer_norm_epsilon": config.layer_norm_epsilon,
        "feed_forward_proj": gated if config.gated_feed_forward else WRITTEN_ACTIVATIONS[config.activation],
        "dropout_rate": config.dropout.residual,
        "pad_token_id": config.pad_id,
        "eos_token_id": config.eos_id,
        "decoder_start_token_id": config.bos_id,
        "tie_word_embeddings": _is_tied(config),
        **({"scale_decoder_outputs": config.scale_logits} if family == "t5" else {}),
    }
