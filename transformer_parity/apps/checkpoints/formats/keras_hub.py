"""Keras models with keras_hub layers, saved as ``.weights.h5`` or ``.keras``. Requires h5py.

Keras numbers the layers of each class in the order of ``model.layers``. In a functional model, the source embedding
precedes the target embedding because the source embedding is farther from the output. The attention kernels have a
separate head axis.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from numpy import ndarray

from transformer_parity.apps.checkpoints.imported import Imported, Origin, sha256_of
from transformer_parity.apps.checkpoints.name_mapping import Row, matrix, take
from transformer_parity.apps.checkpoints.options import ReadOptions
from transformer_parity.apps.checkpoints.state_dict import needed_fields, read_names, read_vocabulary, said_notes
from transformer_parity.apps.containers.npz import check_members
from transformer_spec.config import TransformerConfig
from transformer_spec.search import Search

WEIGHTS, DESCRIPTION = "model.weights.h5", "config.json"
LARGEST = 2**24  # maximum size of a model's description in bytes
ASKED = ("pad_id", "bos_id", "eos_id")
ASKED_OF_WEIGHTS = ("norm_order", "activation", "layer_norm_epsilon")
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "silu": "swish", "swish": "swish"}
IGNORED = ("optimizer/*", "*/seed_generator/*", "*/seed_generator_state")
_BLOCKS = {"self_attention": "_self_attention_layer", "cross_attention": "_cross_attention_layer"}
_DENSE = {
    **{
        f"{ours}.{one}_proj": f"{theirs}/{one}_dense"
        for ours, theirs in _BLOCKS.items()
        for one in ("query", "key", "value", "output")
    },
    "feed_forward.inner_proj": "_feedforward_intermediate_dense",
    "feed_forward.output_proj": "_feedforward_output_dense",
}
_NORMS = {
    **{f"{ours}_norm": f"{theirs}_norm" for ours, theirs in _BLOCKS.items()},
    "feed_forward_norm": "_feedforward_layer_norm",
}
NAMES = [
    Row("source_embedding.table", "layers/token_and_position_embedding/token_embedding/vars/0"),
    Row("target_embedding.table", "layers/token_and_position_embedding_1/token_embedding/vars/0"),
    Row("source_position.table", "layers/token_and_position_embedding/position_embedding/vars/0"),
    Row("target_position.table", "layers/token_and_position_embedding_1/position_embedding/vars/0"),
    Row("output_proj.kernel", "layers/dense/vars/0"),
    Row("output_proj.bias", "layers/dense/vars/1"),
]
_PARTS = (
    *((ours, theirs, ("kernel", "bias")) for ours, theirs in _DENSE.items()),
    *((ours, theirs, ("scale", "bias")) for ours, theirs in _NORMS.items()),
)


def recognizes(path: Path) -> bool:
    """Return whether the file name has a Keras extension."""
    return path.is_file() and path.name.endswith((".weights.h5", ".keras"))


def read(path: Path, options: ReadOptions) -> Imported:
    """Read a model from a weight file, or from an archive that also contains a description of the model.

    Raises:
        OSError: If a file cannot be read.
        TypeError: If a field that the user specified has the wrong type.
        ValueError: If the file is damaged, if the model is not supported, or if a required config field is neither
            stored in the file nor specified by the user.
    """
    from transformer_parity.apps.containers import hdf5

    said = read_names(options).config
    described: dict[str, Any] = {}
    if path.suffix == ".keras":
        content, weights = _open(path)
        described = fields_of(content)
        tensors = hdf5.read(path, weights)
    else:
        tensors = hdf5.read(path)
    needed_fields(said, ASKED if described else (*ASKED, *ASKED_OF_WEIGHTS), path.name)
    tensors, heads = _flat(tensors)
    config = config_of(tensors, {"num_heads": heads, **described, **said})
    return Imported(
        config=config,
        weights=take(rows(config), tensors, config, IGNORED),
        vocabulary=read_vocabulary(options.vocab, config),
        search=Search(),
        origin=Origin(format="keras", family="keras_hub", preset="keras_hub", files=sha256_of([path, *options.vocab])),
        notes=(
            "the first of the two embeddings is used for the source, because a functional model stores the source "
            "embedding first",
            *said_notes(said, said),
        ),
    )


def _open(path: Path) -> tuple[Any, bytes]:
    """Return the description and the weights of a ``.keras`` archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            check_members(members, path.stat().st_size)
            sizes = {member.filename: member.file_size for member in members}
            for name, most in ((DESCRIPTION, LARGEST), (WEIGHTS, path.stat().st_size)):
                if name not in sizes:
                    raise ValueError(f"the archive does not contain {name}")
                if not 0 < sizes[name] <= most:
                    raise ValueError(f"expected {name} to have from 1 to {most:,} bytes, got {sizes[name]:,}")
            return json.loads(archive.read(DESCRIPTION)), archive.read(WEIGHTS)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError) as error:
        raise ValueError(f"{path} is not a valid .keras file: {error}") from error


def fields_of(content: Any) -> dict[str, Any]:
    """Return the config fields that the model description in a ``.keras`` file specifies.

    Raises:
        ValueError: If the model contains unsupported layers or settings. The message lists the unsupported layers.
    """
    layers = content.get("config", {}).get("layers", []) if isinstance(content, dict) else []
    found: dict[str, list[dict[str, Any]]] = {}
    for layer in layers if isinstance(layers, list) else []:
        found.setdefault(str(layer.get("class_name")), []).append(layer.get("config", {}))
    known = {
        "InputLayer": 2,
        "TokenAndPositionEmbedding": 2,
        "Dense": 1,
        "TransformerEncoder": 0,
        "TransformerDecoder": 0,
    }
    if other := sorted(set(found) - set(known)):
        raise ValueError(f"{DESCRIPTION} may only contain the layers {', '.join(known)}: got {', '.join(other)}")
    if missing := [name for name in known if name not in found]:
        raise ValueError(f"{DESCRIPTION} does not contain the layers {', '.join(missing)}")
    for name, count in known.items():
        if count and len(found[name]) != count:
            raise ValueError(f"{DESCRIPTION} must contain {count} {name} layers: got {len(found[name])}")
    stacks = [*found["TransformerEncoder"], *found["TransformerDecoder"]]
    said = {
        key: {str(layer.get(key)) for layer in stacks}
        for key in ("activation", "layer_norm_epsilon", "normalize_first")
    }
    for key, values in said.items():
        if len(values) > 1:
            raise ValueError(
                f"all layers in {DESCRIPTION} must have the same {key}: got {' and '.join(sorted(values))}"
            )
    first = stacks[0]
    if first.get("activation") not in ACTIVATIONS:
        raise ValueError(
            f"activation in {DESCRIPTION} must be one of {', '.join(ACTIVATIONS)}: got {first.get('activation')!r}"
        )
    return {
        "norm_order": "pre" if first.get("normalize_first") else "post",
        "activation": ACTIVATIONS[first["activation"]],
        "layer_norm_epsilon": first.get("layer_norm_epsilon"),
    }


def rows(config: TransformerConfig) -> list[Row]:
    """Return the table of parameter names.

    In Keras, the name of the first layer in each stack does not contain a number.
    """
    depths = {"encoder": config.num_encoder_layers, "decoder": config.num_decoder_layers}
    return NAMES + [
        Row(f"{stack}.layers.{i}.{ours}.{kind}", f"layers/transformer_{stack}{f'_{i}' * (i > 0)}/{theirs}/vars/{j}")
        for stack, depth in depths.items()
        for i in range(depth)
        for ours, theirs, kinds in _PARTS
        for j, kind in enumerate(kinds)
    ]


def _flat(tensors: Mapping[str, ndarray]) -> tuple[dict[str, ndarray], int]:
    """Merge the head axis of attention kernels into the feature axis. Return the tensors and the number of heads."""
    flat, heads = dict(tensors), 0
    for name, array in tensors.items():
        layer, _, number = name.rpartition("/vars/")
        block, _, dense = layer.rpartition("/")
        if block.endswith(tuple(_BLOCKS.values())) and dense.endswith("_dense"):
            if dense == "output_dense" and number == "0" and array.ndim == 3:
                flat[name] = array.reshape(-1, array.shape[-1])
            elif dense != "output_dense" and array.ndim == (3 if number == "0" else 2):
                flat[name], heads = array.reshape(*array.shape[:-2], -1), array.shape[-2]
    return flat, heads or 1


def config_of(tensors: Mapping[str, ndarray], said: Mapping[str, Any]) -> TransformerConfig:
    """Return the config, based on the shapes of the tensors and on the fields in ``said``.

    ``said`` contains fields from the model's description and from the user.

    Raises:
        TypeError: If a field has the wrong type.
        ValueError: If a tensor that determines a size is missing, or the config is invalid.
    """
    tables = [matrix(tensors, NAMES[j].foreign) for j in range(3)]
    shown = {
        "source_vocab_size": len(tables[0]),
        "target_vocab_size": len(tables[1]),
        "max_length": len(tables[2]),
        "d_model": tables[0].shape[1],
        "d_ff": matrix(tensors, "layers/transformer_encoder/_feedforward_intermediate_dense/vars/0").shape[1],
        "num_encoder_layers": _count(tensors, "encoder"),
        "num_decoder_layers": _count(tensors, "decoder"),
        "output_bias": "layers/dense/vars/1" in tensors,
    }
    return TransformerConfig.preset("keras_hub", **{**shown, **said})


def _count(names: Iterable[str], stack: str) -> int:
    return len({name.split("/")[1] for name in names if name.startswith(f"layers/transformer_{stack}")})
