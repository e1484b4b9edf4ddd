"""State dicts of the Annotated Transformer. They store neither the number of heads nor the special IDs.

Source: harvardnlp/annotated-transformer, the_annotated_transformer.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy import ndarray

from transformer_parity.apps.checkpoints import state_dict
from transformer_parity.apps.checkpoints.imported import Imported, Origin, sha256_of
from transformer_parity.apps.checkpoints.name_mapping import TRANSPOSED, Row, matrix, take
from transformer_parity.apps.checkpoints.options import ReadOptions
from transformer_spec.config import TransformerConfig
from transformer_spec.search import Search

POSITIONS = ("src_embed.1.pe", "tgt_embed.1.pe")
FIRST = "src_embed.0.lut.weight"  # present in every state dict of this model
_LAYER = "{stack}.layers.{i}"
_BLOCKS = {"self_attention": "self_attn", "cross_attention": "src_attn"}
_LINEARS = {
    **{
        f"{ours}.{one}_proj": f"{theirs}.linears.{j}"
        for ours, theirs in _BLOCKS.items()
        for j, one in enumerate(("query", "key", "value", "output"))
    },
    "feed_forward.inner_proj": "feed_forward.w_1",
    "feed_forward.output_proj": "feed_forward.w_2",
}
_NORMS = {
    "encoder.layers.{i}.self_attention_norm": "encoder.layers.{i}.sublayer.0.norm",
    "encoder.layers.{i}.feed_forward_norm": "encoder.layers.{i}.sublayer.1.norm",
    "decoder.layers.{i}.self_attention_norm": "decoder.layers.{i}.sublayer.0.norm",
    "decoder.layers.{i}.cross_attention_norm": "decoder.layers.{i}.sublayer.1.norm",
    "decoder.layers.{i}.feed_forward_norm": "decoder.layers.{i}.sublayer.2.norm",
    "{stack}.final_norm": "{stack}.norm",
}
NAMES = [
    Row("source_embedding.table", "src_embed.0.lut.weight"),
    Row("target_embedding.table", "tgt_embed.0.lut.weight"),
    Row("output_proj.kernel", "generator.proj.weight", TRANSPOSED),
    Row("output_proj.bias", "generator.proj.bias"),
    *(Row(f"{_LAYER}.{ours}.kernel", f"{_LAYER}.{theirs}.weight", TRANSPOSED) for ours, theirs in _LINEARS.items()),
    *(Row(f"{_LAYER}.{ours}.bias", f"{_LAYER}.{theirs}.bias") for ours, theirs in _LINEARS.items()),
    *(Row(f"{ours}.scale", f"{theirs}.a_2") for ours, theirs in _NORMS.items()),
    *(Row(f"{ours}.bias", f"{theirs}.b_2") for ours, theirs in _NORMS.items()),
]


def recognizes(path: Path) -> bool:
    """Return whether a file contains a state dict of the Annotated Transformer."""
    if not path.is_file() or path.suffix not in (".pt", ".pth", ".bin", ".safetensors"):
        return False
    try:
        return any(name == FIRST or name.endswith(f".{FIRST}") for name in state_dict.tensor_names(path))
    except ValueError:
        return False


def read(path: Path, options: ReadOptions) -> Imported:
    """Read a model from a state dict. The user must specify ``num_heads`` in the TOML file or as an option.

    Raises:
        OSError: If a file cannot be read.
        ValueError: If the file is damaged or contains code, if its tensors are inconsistent, or if ``num_heads`` is not
            specified.
    """
    said = state_dict.read_names(options)
    tensors = state_dict.read_state(path, said.state)
    prefix = state_dict.prefix_of(tensors, FIRST, said.prefix)
    tensors = {name.removeprefix(prefix): array for name, array in tensors.items()}
    state_dict.needed_fields(said.config, ["num_heads"], path.name)
    config = config_of(tensors, said.config)
    state_dict.check_positions(tensors, POSITIONS, config)
    return Imported(
        config=config,
        weights=take(NAMES, tensors, config, (*POSITIONS, *said.ignored)),
        vocabulary=state_dict.read_vocabulary(options.vocab, config),
        search=Search(),
        origin=Origin(
            format="annotated", family="annotated", preset="annotated", files=sha256_of([path, *options.vocab])
        ),
        notes=state_dict.said_notes(said.config, said.config),
    )


def config_of(tensors: Mapping[str, ndarray], said: Mapping[str, Any]) -> TransformerConfig:
    """Return the config, based on the tensor shapes and the fields that the user specified.

    Raises:
        TypeError: If a field has the wrong type.
        ValueError: If a tensor that determines a size is missing, or the config is invalid.
    """
    source, target = (matrix(tensors, f"{side}_embed.0.lut.weight") for side in ("src", "tgt"))
    shown = {
        "source_vocab_size": len(source),
        "target_vocab_size": len(target),
        "d_model": source.shape[1],
        "d_ff": len(matrix(tensors, "encoder.layers.0.feed_forward.w_1.weight")),
        "num_encoder_layers": state_dict.count_layers(tensors, "encoder.layers."),
        "num_decoder_layers": state_dict.count_layers(tensors, "decoder.layers."),
    }
    return TransformerConfig.preset("annotated", **{**shown, **said})
