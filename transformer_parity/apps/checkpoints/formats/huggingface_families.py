"""Hugging Face model families that this project supports, with their presets and config.json defaults.

Source: configuration_*.py and modeling_*.py of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from transformer_spec.config import TransformerConfig

# Default values for fields that config.json omits. Each family in ``FAMILIES`` overrides some of these values.
DEFAULTS: dict[str, Any] = {
    **{"d_model": 1024, "max_position_embeddings": 1024, "activation_function": "gelu", "scale_embedding": False},
    **{"encoder_layers": 12, "encoder_attention_heads": 16, "encoder_ffn_dim": 4096},
    **{"decoder_layers": 12, "decoder_attention_heads": 16, "decoder_ffn_dim": 4096},
    **{"dropout": 0.1, "attention_dropout": 0.0, "activation_dropout": 0.0},
    **{"bos_token_id": None, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": None},
    **{"forced_bos_token_id": None, "forced_eos_token_id": 2, "tie_word_embeddings": True},
}
IN_FAIRSEQ = {"bos_token_id": 0, "decoder_start_token_id": 2}
IN_T5 = {
    **{"d_model": 512, "d_kv": 64, "num_decoder_layers": None, "dropout_rate": 0.1, "layer_norm_epsilon": 1e-6},
    **{"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "feed_forward_proj": "relu"},
    **{"pad_token_id": 0, "eos_token_id": 1, "forced_eos_token_id": None},
}


class Family(NamedTuple):
    """A model family, with the corresponding preset of this project and the default values for config.json.

    Attributes:
        preset: Name of the preset in this project.
        title: Prefix of the family's class names.
        defaults: Default values that differ from ``DEFAULTS``.
        flags: Flags that older releases wrote to config.json and that the current classes ignore. The values of the
            flags describe how the current classes behave.
        behind_padding: Whether the position IDs start after the padding ID.
    """

    preset: str
    title: str
    defaults: Mapping[str, Any]
    flags: Mapping[str, bool] = {}
    behind_padding: bool = False

    @property
    def classes(self) -> list[str]:
        """Names of the classes that may have saved a checkpoint, with and without an output projection."""
        kind = "MTModel" if self.title == "Marian" else "ForConditionalGeneration"
        old = ["T5WithLMHeadModel"] if self.title == "T5" else []  # the name before release 4
        return [self.title + kind, f"{self.title}Model", *old]


def _flags(before: bool, embedding: bool, final: bool, static: bool) -> dict[str, bool]:
    """Return the flags that releases before version 4 wrote to config.json."""
    names = ("normalize_before", "normalize_embedding", "add_final_layer_norm", "static_position_embeddings")
    return dict(zip(names, (before, embedding, final, static), strict=True))


FAMILIES = {
    "marian": Family(
        "marian",
        "Marian",
        {
            **{"vocab_size": 58101, "pad_token_id": 58100, "decoder_start_token_id": 58100},
            **{"eos_token_id": 0, "forced_eos_token_id": 0, "share_encoder_decoder_embeddings": True},
        },
        _flags(before=False, embedding=False, final=False, static=True),
    ),
    "m2m_100": Family(
        "m2m_100",
        "M2M100",
        {
            **{"vocab_size": 128112, "activation_function": "relu", "scale_embedding": True, "attention_dropout": 0.1},
            **{**IN_FAIRSEQ, "forced_eos_token_id": None},
        },
        behind_padding=True,
    ),
    "bart": Family(
        "bart",
        "Bart",
        {"vocab_size": 50265, **IN_FAIRSEQ},
        _flags(before=False, embedding=True, final=False, static=False),
    ),
    "mbart": Family(
        "mbart",
        "MBart",
        {"vocab_size": 50265, "bos_token_id": 0},
        _flags(before=True, embedding=True, final=True, static=False),
    ),
    "plbart": Family(
        "plbart",
        "PLBart",
        {
            **{"vocab_size": 50005, "d_model": 768, "encoder_layers": 6, "decoder_layers": 6},
            **{"encoder_attention_heads": 12, "decoder_attention_heads": 12, "encoder_ffn_dim": 3072},
            **{"decoder_ffn_dim": 3072, "attention_dropout": 0.1, "scale_embedding": True, "bos_token_id": 0},
        },
        _flags(before=False, embedding=True, final=False, static=False),
    ),
    "pegasus": Family(
        "pegasus",
        "Pegasus",
        {
            **{"vocab_size": 50265, "pad_token_id": 0, "decoder_start_token_id": 0},
            **{"eos_token_id": 1, "forced_eos_token_id": 1},
        },
        _flags(before=True, embedding=False, final=True, static=True),
    ),
    "blenderbot": Family(
        "blenderbot",
        "Blenderbot",
        {
            **{"vocab_size": 8008, "max_position_embeddings": 128, "d_model": 2560, "encoder_layers": 2},
            **{"encoder_attention_heads": 32, "encoder_ffn_dim": 10240, "decoder_layers": 24},
            **{"decoder_attention_heads": 32, "decoder_ffn_dim": 10240, "pad_token_id": 0, "bos_token_id": 1},
            **{"decoder_start_token_id": 1, "encoder_no_repeat_ngram_size": 3},
        },
        _flags(before=True, embedding=False, final=True, static=False),
    ),
    "fsmt": Family(
        "fairseq",
        "FSMT",
        {
            **{"src_vocab_size": 42024, "tgt_vocab_size": 42024, "activation_function": "relu", **IN_FAIRSEQ},
            **{"scale_embedding": True, "tie_word_embeddings": False},
            **{"num_beams": 5, "max_length": 200, "early_stopping": False, "length_penalty": 1.0},
        },
        behind_padding=True,
    ),
    "t5": Family("t5", "T5", {**IN_T5, "vocab_size": 32128, "d_ff": 2048, "num_layers": 6, "num_heads": 8}),
    "mt5": Family(
        "mt5",
        "MT5",
        {
            **{**IN_T5, "vocab_size": 250112, "d_ff": 1024, "num_layers": 8, "num_heads": 6},
            **{"feed_forward_proj": "gated-gelu", "tie_word_embeddings": None},
        },
    ),
}

_SPARSE = "uses sparse attention"
_SPEECH = "reads audio, using convolutions before its encoder"
_MULTIMODAL = "combines a text model with speech models; a dense NLLB model belongs to the family m2m_100"
OUT_OF_SCOPE = {
    "umt5": "has separate relative position biases in each layer; a T5 model belongs to the family t5 or mt5",
    "switch_transformers": "uses a mixture of experts; a dense T5 model belongs to the family t5",
    "longt5": _SPARSE,
    **dict.fromkeys(("whisper", "speech_to_text", "speecht5", "moonshine"), _SPEECH),
    **dict.fromkeys(("led", "bigbird_pegasus", "pegasus_x"), _SPARSE),
    "blenderbot-small": "normalizes the decoder's embeddings before it adds the positions",
    "nllb-moe": "uses a mixture of experts; a dense NLLB model belongs to the family m2m_100",
    "seamless_m4t": _MULTIMODAL,
    "seamless_m4t_v2": _MULTIMODAL,
    "prophetnet": "predicts multiple tokens at once",
    "mvp": "adds prompts to the layers of BART",
    "encoder-decoder": "combines an encoder and a decoder of arbitrary models",
    "vision-encoder-decoder": "reads images",
    "speech-encoder-decoder": _SPEECH,
}
NOT_DENSE = ("quantization_config", "peft_type", "adapter_config")  # unsupported entries in config.json

ACTIVATIONS = {  # maps the names of activations in transformers to their names in this project
    **{"relu": "relu", "gelu": "gelu", "gelu_python": "gelu", "swish": "swish", "silu": "swish"},
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh"), "gelu_tanh"),
}
WRITTEN_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_new", "swish": "swish"}


def family_of(fields: Mapping[str, Any]) -> str:
    """Return the model family specified in a config.json.

    Raises:
        ValueError: If no family is specified or this project does not support the family. The message gives the reason.
    """
    name = fields.get("model_type")
    known = f"one of {', '.join(FAMILIES)}"
    if not isinstance(name, str):
        raise ValueError(f"model_type in config.json must be {known}: got {name!r}")
    for entry in NOT_DENSE:
        if fields.get(entry):
            raise ValueError(
                f"config.json must not contain {entry}; merge the adapter into the model, or dequantize the "
                "weights to float32 or float16"
            )
    if name not in FAMILIES:
        reason = f", which {OUT_OF_SCOPE[name]}" if name in OUT_OF_SCOPE else ""
        raise ValueError(f"model_type in config.json must be {known}: got {name}{reason}")
    classes = FAMILIES[name].classes
    found = fields.get("architectures") or classes[:1]
    if not isinstance(found, list) or found[0] not in classes:
        reason = ", which has no decoder" if str(found).endswith("EncoderModel']") else ""
        raise ValueError(f"architectures in config.json must be {' or '.join(classes)}: got {found!r:.80}{reason}")
    return name


def filled_in(name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json, with missing fields set to the family's defaults."""
    return {**DEFAULTS, **FAMILIES[name].defaults, **fields}


def config_of(name: str, fields: Mapping[str, Any], tie_embeddings: str, rows: int | None) -> TransformerConfig:
    """Return the config of a model.

    Args:
        name: Family of the model.
        fields: Content of config.json, with missing fields set to their defaults.
        tie_embeddings: Value of ``tie_embeddings``, as determined from the tensors.
        rows: Number of rows of the learned position table, or None if the positions are sinusoidal.

    Raises:
        ValueError: If a field has an invalid or unsupported value.
        TypeError: If a field has the wrong type.
    """
    family = FAMILIES[name]
    activation = fields["activation_function"]
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(f"activation_function must be one of {', '.join(ACTIVATIONS)}: got {activation!r}")
    source = fields["src_vocab_size"] if name == "fsmt" else fields["vocab_size"]
    target = fields["tgt_vocab_size"] if name == "fsmt" else source
    if not fields.get("share_encoder_decoder_embeddings", True):
        target = fields.get("decoder_vocab_size") or source
    start = fields["decoder_start_token_id"]
    heads, sizes = ("encoder_attention_heads", "decoder_attention_heads"), ("encoder_ffn_dim", "decoder_ffn_dim")
    changes: dict[str, Any] = {
        "source_vocab_size": source,
        "target_vocab_size": target,
        "d_model": fields["d_model"],
        "num_heads": fields[heads[0]],
        "decoder_num_heads": fields[heads[1]] if fields[heads[1]] != fields[heads[0]] else None,
        "d_ff": fields[sizes[0]],
        "decoder_d_ff": fields[sizes[1]] if fields[sizes[1]] != fields[sizes[0]] else None,
        "num_encoder_layers": fields["encoder_layers"],
        "num_decoder_layers": fields["decoder_layers"],
        "max_length": fields["max_position_embeddings"] if rows is None else rows,
        "activation": ACTIVATIONS[activation],
        "scale_embedding": fields["scale_embedding"],
        "tie_embeddings": tie_embeddings,
        "dropout": {
            **{"embedding": fields["dropout"], "residual": fields["dropout"]},
            **{"attention": fields["attention_dropout"], "feed_forward": fields["activation_dropout"]},
        },
        "pad_id": fields["pad_token_id"],
        "bos_id": fields["bos_token_id"] if start is None else start,
        "eos_id": one_id(fields["eos_token_id"]),
    }
    if family.behind_padding and isinstance(changes["pad_id"], int):
        changes["position_offset"] = changes["pad_id"] + 1
    return TransformerConfig.preset(family.preset, **changes)


def one_id(ids: Any) -> Any:
    """Return the only ID in a list. A value that is not a list is returned unchanged.

    Raises:
        ValueError: If the list does not contain exactly one ID.
    """
    if isinstance(ids, list):
        if len(ids) != 1:
            raise ValueError(f"eos_token_id must be a single ID: got {ids!r:.60}")
        return ids[0]
    return ids


def fields_of(config: TransformerConfig, name: str) -> dict[str, Any]:
    """Return the content of a model's config.json."""
    tied, decoder = config.tie_embeddings, config.in_decoder
    behind = config.position_offset if config.position_encoding == "learned" else 0
    fields: dict[str, Any] = {
        "architectures": FAMILIES[name].classes[:1],
        "model_type": name,
        "is_encoder_decoder": True,
        "d_model": config.d_model,
        "encoder_layers": config.num_encoder_layers,
        "decoder_layers": config.num_decoder_layers,
        "encoder_attention_heads": config.num_heads,
        "decoder_attention_heads": decoder.num_heads,
        "encoder_ffn_dim": config.d_ff,
        "decoder_ffn_dim": decoder.d_ff,
        "max_position_embeddings": config.max_length - behind,
        "activation_function": WRITTEN_ACTIVATIONS[config.activation],
        "scale_embedding": config.scale_embedding,
        "dropout": config.dropout.residual,
        "attention_dropout": config.dropout.attention,
        "activation_dropout": config.dropout.feed_forward,
        "pad_token_id": config.pad_id,
        "eos_token_id": config.eos_id,
        "decoder_start_token_id": config.bos_id,
        "forced_eos_token_id": None,
        "tie_word_embeddings": tied == "all",
    }
    if name == "fsmt":
        sizes = {"src_vocab_size": config.source_vocab_size, "tgt_vocab_size": config.target_vocab_size}
        return {**fields, **sizes, "langs": ["source", "target"]}
    fields["vocab_size"] = config.source_vocab_size
    if name == "marian":
        fields |= {"share_encoder_decoder_embeddings": tied == "all", "tie_word_embeddings": tied != "none"}
        fields |= {"decoder_vocab_size": config.target_vocab_size}
    return fields
