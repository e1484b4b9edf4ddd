"""State dicts of models that contain torch.nn.Transformer, with the user's own names for all other parameters.

In a TOML file (see ``state_dict``), the user specifies the names of the embeddings and the output projection. The file
must also specify everything that cannot be inferred from the tensors: the number of heads, the order of the norms, the
activation, the positional encoding, the embedding scale, and the special IDs. The import never guesses any of these
values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from transformer_parity.apps.checkpoints import state_dict
from transformer_parity.apps.checkpoints.expressible import PLAIN_HEADS, check_expressible
from transformer_parity.apps.checkpoints.imported import Imported, Origin, sha256_of
from transformer_parity.apps.checkpoints.name_mapping import (
    AS_IS,
    TRANSPOSED,
    Row,
    give,
    matrix,
    same,
    take,
    three_projections,
)
from transformer_parity.apps.checkpoints.options import ReadOptions
from transformer_parity.apps.checkpoints.state_dict import UserNames
from transformer_parity.apps.containers import tensors as safetensors
from transformer_spec.config import TransformerConfig
from transformer_spec.files import replacing
from transformer_spec.search import Search

ASKED = (
    *("num_heads", "norm_order", "activation", "scale_embedding", "position_encoding", "position_offset"),
    *("pad_id", "bos_id", "eos_id"),
)
ASKED_OF_SINUSOIDS = ("position_layout", "position_timescale")
FIRST = "encoder.layers.0.linear1.weight"  # present in every state dict of torch.nn.Transformer
FORMS = {"output_proj.kernel": TRANSPOSED}
OWN = (  # parameters outside torch.nn.Transformer; their names depend on the user's code
    *("source_embedding.table", "target_embedding.table", "source_position.table", "target_position.table"),
    *(f"{side}_embedding_norm.{kind}" for side in ("source", "target") for kind in ("scale", "bias")),
    *("output_proj.kernel", "output_proj.bias"),
)
POSITIONS = ("source_position.table", "target_position.table")
_LAYER = "{stack}.layers.{i}"
_BLOCKS = {"self_attention": "self_attn", "cross_attention": "multihead_attn"}
_LINEARS = {
    **{
        f"{ours}.{one}_proj": f"{theirs}.{one[0]}_proj"
        for ours, theirs in _BLOCKS.items()
        for one in ("query", "key", "value")
    },
    **{f"{ours}.output_proj": f"{theirs}.out_proj" for ours, theirs in _BLOCKS.items()},
    "feed_forward.inner_proj": "linear1",
    "feed_forward.output_proj": "linear2",
}
_NORMS = {
    "encoder.layers.{i}.self_attention_norm": "encoder.layers.{i}.norm1",
    "encoder.layers.{i}.feed_forward_norm": "encoder.layers.{i}.norm2",
    "decoder.layers.{i}.self_attention_norm": "decoder.layers.{i}.norm1",
    "decoder.layers.{i}.cross_attention_norm": "decoder.layers.{i}.norm2",
    "decoder.layers.{i}.feed_forward_norm": "decoder.layers.{i}.norm3",
    "{stack}.final_norm": "{stack}.norm",
}
NAMES = [
    *(Row(f"{_LAYER}.{ours}.kernel", f"{_LAYER}.{theirs}.weight", TRANSPOSED) for ours, theirs in _LINEARS.items()),
    *(Row(f"{_LAYER}.{ours}.bias", f"{_LAYER}.{theirs}.bias") for ours, theirs in _LINEARS.items()),
    *(Row(f"{ours}.scale", f"{theirs}.weight") for ours, theirs in _NORMS.items()),
    *(Row(f"{ours}.bias", f"{theirs}.bias") for ours, theirs in _NORMS.items()),
]
EXPRESSIBLE: dict[str, tuple[object, ...]] = {
    **PLAIN_HEADS,
    "decoder_d_ff": (None,),
    "final_norm": (True,),
    "layer_norm_kind": ("standard",),
    "attention_bias": (True,),
    "feed_forward_bias": (True,),
    "activation": ("relu", "gelu"),
}


def recognizes(path: Path) -> bool:
    """Return False, because the tensor names do not determine the model."""
    return False


def read(path: Path, options: ReadOptions) -> Imported:
    """Read a model from a state dict and the user's TOML file.

    Raises:
        OSError: If a file cannot be read.
        TypeError: If a field that the user specified has the wrong type.
        ValueError: If a file is damaged or contains code, if a required name or field is not specified, or if the
            tensors are inconsistent.
    """
    said = state_dict.read_names(options)
    tensors = state_dict.read_state(path, said.state)
    state_dict.needed_fields(said.config, ASKED, path.name)
    if said.config["position_encoding"] == "sinusoidal":
        state_dict.needed_fields(said.config, ASKED_OF_SINUSOIDS, path.name)
    if unknown := sorted(set(said.names) - set(OWN)):
        raise ValueError(f"[names] may only contain the keys {', '.join(OWN)}: got {', '.join(unknown)}")
    prefix = state_dict.prefix_of(tensors, FIRST, said.prefix)
    said = replace(said, prefix=prefix)
    split = _split(tensors, prefix)
    config = config_of(split, said)
    sinusoidal = config.position_encoding == "sinusoidal"
    fixed = [said.names[name] for name in POSITIONS if sinusoidal and name in said.names]
    state_dict.check_positions(split, fixed, config)
    return Imported(
        config=config,
        weights=take(rows(said), split, config, (*fixed, *said.ignored, *_copies(said, config))),
        vocabulary=state_dict.read_vocabulary(options.vocab, config),
        search=Search(),
        origin=Origin(
            format="torch",
            family="torch.nn.Transformer",
            preset="torch",
            files=sha256_of([path, *options.vocab]),
        ),
        notes=state_dict.said_notes(said.config, (*ASKED, *ASKED_OF_SINUSOIDS)),
    )


def rows(said: UserNames) -> list[Row]:
    """Return the table of parameter names, including the names that the user specified."""
    own = [Row(ours, theirs, FORMS.get(ours, AS_IS)) for ours, theirs in said.names.items()]
    return own + [row._replace(foreign=said.prefix + row.foreign) for row in NAMES]


def config_of(tensors: Mapping[str, ndarray], said: UserNames) -> TransformerConfig:
    """Return the config, based on the tensor shapes and the fields that the user specified.

    Embedding matrices and the output projection are tied if their tensors are equal.

    Raises:
        TypeError: If a field has the wrong type.
        ValueError: If a tensor that determines a size is missing, if the user has not specified the name of a required
            tensor, or if the config is invalid.
    """
    names, p = said.names, said.prefix
    if missing := [name for name in ("source_embedding.table", "target_embedding.table") if name not in names]:
        raise ValueError(
            f"[names] must contain {', '.join(missing)}; if source and target share one embedding, set "
            "source_embedding.table and target_embedding.table to the same tensor name"
        )
    source, target = (matrix(tensors, names[f"{side}_embedding.table"]) for side in ("source", "target"))
    output = matrix(tensors, names["output_proj.kernel"]) if "output_proj.kernel" in names else target
    shown: dict[str, Any] = {
        "source_vocab_size": len(source),
        "target_vocab_size": len(target),
        "d_model": source.shape[1],
        "d_ff": len(matrix(tensors, f"{p}encoder.layers.0.linear1.weight")),
        "num_encoder_layers": state_dict.count_layers(tensors, f"{p}encoder.layers."),
        "num_decoder_layers": state_dict.count_layers(tensors, f"{p}decoder.layers."),
        "final_norm": f"{p}encoder.norm.weight" in tensors,
        "attention_bias": f"{p}encoder.layers.0.self_attn.q_proj.bias" in tensors,
        "feed_forward_bias": f"{p}encoder.layers.0.linear1.bias" in tensors,
        "output_bias": "output_proj.bias" in names,
        "embedding_norm": "source_embedding_norm.scale" in names,
        "tie_embeddings": "none" if not same(target, output) else "all" if same(source, target) else "target_output",
    }
    if said.config["position_encoding"] == "learned":
        if missing := [name for name in POSITIONS if name not in names]:
            raise ValueError(f"[names] must contain {', '.join(missing)} because the positions are learned")
        shown["max_length"] = len(matrix(tensors, names["source_position.table"]))
    return TransformerConfig.preset("torch", **{**shown, **said.config})


def _copies(said: UserNames, config: TransformerConfig) -> list[str]:
    """Return the names of the user's tensors that are copies of a tied parameter."""
    tied = {
        "all": ("target_embedding.table", "output_proj.kernel"),
        "target_output": ("output_proj.kernel",),
        "none": (),
    }
    return [said.names[name] for name in tied[config.tie_embeddings] if name in said.names]


def _split(tensors: Mapping[str, ndarray], prefix: str) -> dict[str, ndarray]:
    """Split fused projections, reshape learned positions to a matrix, and add zero biases to norms without a bias."""
    found: dict[str, ndarray] = {}
    for name, array in tensors.items():
        if ".in_proj_" in name:
            found |= three_projections(name, array)
        else:
            found[name] = array.reshape(-1, array.shape[-1]) if array.ndim == 3 else array
    for name in [*found]:  # with bias=False, the norms of torch.nn.Transformer have no bias either
        path = name.removesuffix(".weight")
        if name.startswith(prefix) and path.rpartition(".")[2] in ("norm", "norm1", "norm2", "norm3"):
            found.setdefault(f"{path}.bias", np.zeros_like(found[name]))
    return found


def write(model: Imported, directory: Path) -> None:
    """Write ``model.safetensors`` and ``names.toml``.

    The names of the tensors that belong to torch.nn.Transformer start with ``transformer.``.

    Raises:
        OSError: If a file cannot be written.
        ValueError: If torch.nn.Transformer does not support the model. The message gives the reason.
    """
    check_expressible(model.config, EXPRESSIBLE, "torch.nn.Transformer")
    config, shapes = model.config, model.weights
    names = {name: f"{name.rpartition('.')[0]}.{_torch_kind(name)}" for name in OWN if name in shapes}
    if config.tie_embeddings == "all":
        names["target_embedding.table"] = names["source_embedding.table"]
    said = UserNames(names=names, prefix="transformer.")
    split = give(rows(said), model.weights, config)
    fused: dict[str, ndarray] = {}
    for name, array in split.items():
        path, found, kind = name.partition(".q_proj.")
        if found:
            fused[f"{path}.in_proj_{kind}"] = np.concatenate([split[f"{path}.{one}_proj.{kind}"] for one in "qkv"])
        elif ".k_proj." not in name and ".v_proj." not in name:
            fused[name] = array
    asked = (*ASKED, *(ASKED_OF_SINUSOIDS if config.position_encoding == "sinusoidal" else ()))
    asked = (*asked, "layer_norm_epsilon", "max_length")
    tables = {
        "config": {name: getattr(config, name) for name in asked},
        "names": names,
        "file": {"prefix": said.prefix},
    }
    text = "\n".join(
        f"[{table}]\n" + "".join(f"{json.dumps(key)} = {json.dumps(value)}\n" for key, value in entries.items())
        for table, entries in tables.items()
    )
    directory.mkdir(parents=True, exist_ok=True)
    with replacing(directory / "model.safetensors") as temporary:
        safetensors.write(temporary, fused)
    (directory / "names.toml").write_text(text, "utf-8")


def _torch_kind(name: str) -> str:
    """Return the last part of a parameter's name in PyTorch, either ``bias`` or ``weight``."""
    return "bias" if name.endswith(".bias") else "weight"
