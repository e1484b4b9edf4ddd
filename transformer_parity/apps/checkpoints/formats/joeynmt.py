"""JoeyNMT ``.ckpt`` checkpoints with ``config.yaml`` in the same directory. Requires PyYAML.

Source: JoeyNMT 2.3.0, joeynmt/model.py, encoders.py, decoders.py, and transformer_layers.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy import ndarray

from transformer_parity.apps.checkpoints.imported import Imported, Origin, sha256_of
from transformer_parity.apps.checkpoints.name_mapping import TRANSPOSED, Row, matrix, same, take
from transformer_parity.apps.checkpoints.options import ReadOptions
from transformer_parity.apps.checkpoints.state_dict import check_positions, count_layers, read_state
from transformer_parity.apps.containers.directory import has, member, read_bytes
from transformer_spec.config import TransformerConfig
from transformer_spec.search import Search

SETTINGS = "config.yaml"
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "swish"}
IDS = {"pad_id": 1, "bos_id": 2, "eos_id": 3}  # special IDs if the settings do not specify them
POSITIONS = ("encoder.pe.pe", "decoder.pe.pe")
_BLOCKS = {
    "encoder.layers.{i}.self_attention": "encoder.layers.{i}.src_src_att",
    "decoder.layers.{i}.self_attention": "decoder.layers.{i}.trg_trg_att",
    "decoder.layers.{i}.cross_attention": "decoder.layers.{i}.src_trg_att",
}
_KERNELS = {
    **{
        f"{ours}.{one}_proj": f"{theirs}.{one[0]}_layer"
        for ours, theirs in _BLOCKS.items()
        for one in ("query", "key", "value")
    },
    **{f"{ours}.output_proj": f"{theirs}.output_layer" for ours, theirs in _BLOCKS.items()},
    "{stack}.layers.{i}.feed_forward.inner_proj": "{stack}.layers.{i}.feed_forward.pwff_layer.0",
    "{stack}.layers.{i}.feed_forward.output_proj": "{stack}.layers.{i}.feed_forward.pwff_layer.3",
    "output_proj": "decoder.output_layer",
}
_NORMS = {
    "encoder.layers.{i}.self_attention_norm": "encoder.layers.{i}.layer_norm",
    "decoder.layers.{i}.self_attention_norm": "decoder.layers.{i}.x_layer_norm",
    "decoder.layers.{i}.cross_attention_norm": "decoder.layers.{i}.dec_layer_norm",
    "{stack}.layers.{i}.feed_forward_norm": "{stack}.layers.{i}.feed_forward.layer_norm",
    "{stack}.final_norm": "{stack}.layer_norm",
}
NAMES = [
    Row("source_embedding.table", "src_embed.lut.weight"),
    Row("target_embedding.table", "trg_embed.lut.weight"),
    *(Row(f"{ours}.kernel", f"{theirs}.weight", TRANSPOSED) for ours, theirs in _KERNELS.items()),
    *(Row(f"{ours}.bias", f"{theirs}.bias") for ours, theirs in _KERNELS.items()),
    *(Row(f"{ours}.scale", f"{theirs}.weight") for ours, theirs in _NORMS.items()),
    *(Row(f"{ours}.bias", f"{theirs}.bias") for ours, theirs in _NORMS.items()),
]
TIED = {
    "all": ("trg_embed.lut.weight", "decoder.output_layer.weight"),
    "target_output": ("decoder.output_layer.weight",),
    "none": (),
}


def recognizes(path: Path) -> bool:
    """Return whether a file has the extension of a checkpoint and is in the same directory as the settings."""
    return path.is_file() and path.suffix == ".ckpt" and has(path.parent, SETTINGS)


def read(path: Path, options: ReadOptions) -> Imported:
    """Read a model from a checkpoint and the settings file in the same directory.

    Raises:
        OSError: If a file is missing or cannot be read.
        ValueError: If a file is damaged or contains code, if the model is not supported, or if the tensors do not match
            the settings.
    """
    from transformer_parity.apps.containers import yaml

    place = member(path.parent, SETTINGS)
    settings = yaml.read(read_bytes(place), SETTINGS)
    tensors = read_state(path, "model_state")
    config = config_of(tensors, settings)
    check_positions(tensors, POSITIONS, config)
    return Imported(
        config=config,
        weights=take(NAMES, tensors, config, (*POSITIONS, *TIED[config.tie_embeddings])),
        vocabulary=None,
        search=Search(),
        origin=Origin(format="joeynmt", family="transformer", preset="annotated", files=sha256_of([path, place])),
    )


def config_of(tensors: Mapping[str, ndarray], settings: Mapping[str, Any]) -> TransformerConfig:
    """Return the config of a model.

    The tensors determine the vocabulary sizes, ``d_model``, ``d_ff``, the number of layers, and ``tie_embeddings``.

    Raises:
        ValueError: If the model is not supported or a tensor that determines a size is missing.
    """
    model = settings.get("model")
    stacks: list[Any] = [model.get(stack) for stack in ("encoder", "decoder")] if isinstance(model, dict) else [None]
    if not all(isinstance(stack, dict) and isinstance(stack.get("embeddings"), dict) for stack in stacks):
        raise ValueError(f"{SETTINGS} must contain model.encoder.embeddings and model.decoder.embeddings")
    for name, default in (("type", "recurrent"), ("alpha", 1.0)):
        needed = {"type": "transformer", "alpha": 1.0}[name]
        if wrong := [stack.get(name, default) for stack in stacks if stack.get(name, default) != needed]:
            both = f"model.encoder.{name} and model.decoder.{name}"
            raise ValueError(f"{both} in {SETTINGS} must be {needed!r}: got {wrong[0]!r}")
    order = _agreed("layer_norm", [stack.get("layer_norm") for stack in stacks])
    final = "encoder.layer_norm.weight" in tensors
    if order is None and final:
        order = "pre"  # JoeyNMT 1 supports only this order and does not store it in the settings
    if order not in ("pre", "post"):
        raise ValueError(
            f"layer_norm in {SETTINGS} must be 'pre' in both stacks or 'post' in both stacks: got {order!r}"
        )
    activation = _agreed("activation", [stack.get("activation", "relu") for stack in stacks])
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation in {SETTINGS} must be one of {', '.join(ACTIVATIONS)}: got {activation!r}")
    source, target = (matrix(tensors, f"{side}_embed.lut.weight") for side in ("src", "trg"))
    output = matrix(tensors, "decoder.output_layer.weight")
    heads = [stack.get("num_heads", default) for stack, default in zip(stacks, (4, 8), strict=True)]
    widths = [
        len(matrix(tensors, f"{stack}.layers.0.feed_forward.pwff_layer.0.weight")) for stack in ("encoder", "decoder")
    ]
    data = settings.get("data")
    special = (data.get("special_symbols") if isinstance(data, dict) else None) or {}
    return TransformerConfig(
        source_vocab_size=len(source),
        target_vocab_size=len(target),
        d_model=source.shape[1],
        num_heads=heads[0],
        decoder_num_heads=None if heads[0] == heads[1] else heads[1],
        d_ff=widths[0],
        decoder_d_ff=None if widths[0] == widths[1] else widths[1],
        num_encoder_layers=count_layers(tensors, "encoder.layers."),
        num_decoder_layers=count_layers(tensors, "decoder.layers."),
        norm_order=order,
        final_norm=final,
        layer_norm_epsilon=1e-6,
        scale_embedding=_agreed("scale", [stack["embeddings"].get("scale", False) for stack in stacks]),
        attention_bias=True,
        activation=ACTIVATIONS[activation],
        tie_embeddings="none" if not same(target, output) else "all" if same(source, target) else "target_output",
        **{name: special.get(name, default) for name, default in IDS.items()},
    )


def _agreed(name: str, both: list[Any]) -> Any:
    if both[0] != both[1]:
        raise ValueError(
            f"{name} in {SETTINGS} must be the same for the encoder and the decoder: got {both[0]!r} and {both[1]!r}"
        )
    return both[0]
