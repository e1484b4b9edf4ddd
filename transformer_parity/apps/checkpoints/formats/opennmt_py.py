"""Checkpoints of OpenNMT-py 2 and 3, with state dicts of the model and the generator, vocabularies, and options.

Source: OpenNMT-py 3.5.1, onmt/models/model_saver.py, onmt/model_builder.py, and onmt/modules/embeddings.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from numpy import ndarray

from transformer_parity.apps.checkpoints.imported import Imported, Origin, sha256_of
from transformer_parity.apps.checkpoints.name_mapping import TRANSPOSED, Row, matrix, same, take
from transformer_parity.apps.checkpoints.options import ReadOptions
from transformer_parity.apps.checkpoints.state_dict import check_positions, count_layers
from transformer_parity.apps.containers import pickles
from transformer_spec.config import TransformerConfig
from transformer_spec.search import Search

OFF: tuple[object, ...] = (None, False, 0, "", [], {})
# Supported values of each option. ``OFF`` lists the values that disable an option.
NEEDED: dict[str, tuple[object, ...]] = {
    **{"encoder_type": ("transformer",), "decoder_type": ("transformer",), "model_task": ("seq2seq",)},
    **{"position_encoding": (True,), "layer_norm": ("standard",), "self_attn_type": ("scaled-dot", "scaled-dot-flash")},
    **{"max_relative_positions": OFF, "relative_positions_buckets": OFF, "parallel_residual": OFF, "copy_attn": OFF},
    **{"num_kv": OFF, "multiquery": OFF, "lora_layers": OFF, "lora_embedding": OFF, "quant_layers": OFF},
    **{"aan_useffn": OFF, "n_src_feats": OFF, "num_experts": OFF},
}
ACTIVATIONS = ("relu", "gelu")  # silu is not supported because it is gated in OpenNMT-py
POSITIONS = {
    "SinusoidalInterleaved": {"position_layout": "interleaved", "position_timescale": "m"},
    "SinusoidalConcat": {"position_layout": "split", "position_timescale": "m_minus_1"},
}
TABLES = {"encoder": "encoder.embeddings.make_embedding", "decoder": "decoder.embeddings.make_embedding"}
PAD, START, END = "<blank>", "<s>", "</s>"

_LINEARS = {"query": "linear_query", "key": "linear_keys", "value": "linear_values", "output": "final_linear"}
_LAYERS = {
    "encoder": ("encoder.transformer.{i}", {"self_attention": "self_attn"}),
    "decoder": ("decoder.transformer_layers.{i}", {"self_attention": "self_attn", "cross_attention": "context_attn"}),
}
_NORMS = {
    "encoder.layers.{i}.self_attention_norm": "encoder.transformer.{i}.layer_norm",
    "decoder.layers.{i}.self_attention_norm": "decoder.transformer_layers.{i}.layer_norm_1",
    "decoder.layers.{i}.cross_attention_norm": "decoder.transformer_layers.{i}.layer_norm_2",
    "{stack}.final_norm": "{stack}.layer_norm",
    **{
        f"{stack}.layers.{{i}}.feed_forward_norm": f"{path}.feed_forward.layer_norm"
        for stack, (path, _) in _LAYERS.items()
    },
}
_KERNELS = {
    **{
        f"{stack}.layers.{{i}}.{ours}.{one}_proj": f"{path}.{theirs}.{linear}"
        for stack, (path, blocks) in _LAYERS.items()
        for ours, theirs in blocks.items()
        for one, linear in _LINEARS.items()
    },
    **{
        f"{stack}.layers.{{i}}.feed_forward.{ours}_proj": f"{path}.feed_forward.{theirs}"
        for stack, (path, _) in _LAYERS.items()
        for ours, theirs in (("inner", "w_1"), ("output", "w_2"))
    },
    "output_proj": "generator",
}
NAMES = [
    *(
        Row(f"{side}_embedding.table", f"{TABLES[stack]}.emb_luts.0.weight")
        for side, stack in (("source", "encoder"), ("target", "decoder"))
    ),
    *(Row(f"{ours}.kernel", f"{theirs}.weight", TRANSPOSED) for ours, theirs in _KERNELS.items()),
    *(Row(f"{ours}.bias", f"{theirs}.bias") for ours, theirs in _KERNELS.items()),
    *(Row(f"{ours}.scale", f"{theirs}.weight") for ours, theirs in _NORMS.items()),
    *(Row(f"{ours}.bias", f"{theirs}.bias") for ours, theirs in _NORMS.items()),
]
TIED = {
    "all": (f"{TABLES['decoder']}.emb_luts.0.weight", "generator.weight"),
    "target_output": ("generator.weight",),
    "none": (),
}


def recognizes(path: Path) -> bool:
    """Return whether a file contains a model, a generator, vocabularies, and options."""
    if not path.is_file() or path.suffix != ".pt":
        return False
    try:
        content = pickles.read(path, pickles.NAMESPACE)
    except ValueError:
        return False
    return isinstance(content, dict) and {"model", "generator", "vocab", "opt"} <= content.keys()


def read(path: Path, options: ReadOptions) -> Imported:
    """Read a model from a checkpoint. As in OpenNMT-py, no EOS token is appended to the source.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is damaged or contains code, if the model is not supported, or if the tensors do not
            match the options.
    """
    content = pickles.read(path, pickles.NAMESPACE)
    if not isinstance(content, dict) or not {"model", "generator", "vocab", "opt"} <= content.keys():
        raise ValueError(f"{path.name} must contain model, generator, vocab, and opt, as written by OpenNMT-py")
    settings = read_settings(content["opt"])
    tensors = pickles.arrays(content["model"], f"'model' in {path.name}")
    generator = pickles.arrays(content["generator"], f"'generator' in {path.name}")
    tensors |= {f"generator.{name.removeprefix('0.')}": array for name, array in generator.items()}
    config = config_of(tensors, settings).replace(**ids_of(content["vocab"]))
    positions = [f"{prefix}.pe.pe" for prefix in TABLES.values()]
    check_positions(tensors, positions, config)
    return Imported(
        config=config,
        weights=take(NAMES, tensors, config, (*positions, *TIED[config.tie_embeddings])),
        vocabulary=None,
        search=Search(),
        origin=Origin(format="opennmt_py", family="transformer", preset="annotated", files=sha256_of([path])),
    )


def read_settings(opt: Any) -> dict[str, Any]:
    """Return the options of a model, and check that the model is supported.

    Raises:
        ValueError: If an option has an unsupported value. The message identifies the option.
    """
    if not isinstance(opt, SimpleNamespace):
        raise ValueError(f"'opt' must contain command-line options: got {type(opt).__name__}")
    settings = pickles.plain(vars(opt))
    for name, values in {
        **NEEDED,
        "pos_ffn_activation_fn": ACTIVATIONS,
        "position_encoding_type": (*POSITIONS,),
    }.items():
        if name in settings and settings[name] not in values:
            allowed = "off" if values is OFF else " or ".join(map(repr, values))
            raise ValueError(f"-{name} must be {allowed}: got {settings[name]!r}")
    return settings


def ids_of(vocabularies: Any) -> dict[str, int]:
    """Return the special IDs from the vocabularies.

    Raises:
        ValueError: If the vocabularies are not lists of tokens, lack a special token, or have different padding IDs.
    """
    sides: list[Any] = [vocabularies.get(side) for side in ("src", "tgt")] if isinstance(vocabularies, dict) else [None]
    if not all(isinstance(tokens, list) for tokens in sides):
        raise ValueError(
            "'vocab' must contain two lists of tokens, 'src' and 'tgt'; torchtext fields, which older versions of "
            "OpenNMT-py store, are not supported"
        )
    source, target = ({token: i for i, token in enumerate(tokens)} for tokens in sides)
    start = vocabularies.get("decoder_start_token") or START
    if missing := [token for token in (PAD, start, END) if token not in target]:
        raise ValueError(f"the target vocabulary must contain {', '.join(missing)}")
    if source.get(PAD) != target[PAD]:
        raise ValueError(f"{PAD} must have the same ID in both vocabularies: got {source.get(PAD)} and {target[PAD]}")
    return {"pad_id": target[PAD], "bos_id": target[start], "eos_id": target[END]}


def config_of(tensors: Mapping[str, ndarray], settings: Mapping[str, Any]) -> TransformerConfig:
    """Return the config of a model. The tensors determine which embeddings are tied.

    Raises:
        ValueError: If a tensor that determines a size is missing or the config is invalid.
    """
    source, target = (matrix(tensors, f"{prefix}.emb_luts.0.weight") for prefix in TABLES.values())
    output = matrix(tensors, "generator.weight")
    return TransformerConfig(
        source_vocab_size=len(source),
        target_vocab_size=len(target),
        d_model=source.shape[1],
        num_heads=settings.get("heads", 8),
        d_ff=len(matrix(tensors, "encoder.transformer.0.feed_forward.w_1.weight")),
        num_encoder_layers=count_layers(tensors, "encoder.transformer."),
        num_decoder_layers=count_layers(tensors, "decoder.transformer_layers."),
        norm_order="pre",
        final_norm=True,
        layer_norm_epsilon=settings.get("norm_eps", 1e-6),
        attention_bias="encoder.transformer.0.self_attn.linear_query.bias" in tensors,
        feed_forward_bias="encoder.transformer.0.feed_forward.w_1.bias" in tensors,
        output_bias="generator.bias" in tensors,
        activation=settings.get("pos_ffn_activation_fn", "relu"),
        tie_embeddings="none" if not same(target, output) else "all" if same(source, target) else "target_output",
        **POSITIONS[settings.get("position_encoding_type", "SinusoidalInterleaved")],  # type: ignore[arg-type]
    )
