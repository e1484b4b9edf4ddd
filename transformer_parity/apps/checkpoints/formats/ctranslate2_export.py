"""Export models to CTranslate2 directories. The ``ctranslate2`` module imports them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy import ndarray

from reference_numpy.embedding import sinusoidal_encoding
from transformer_parity.apps.checkpoints.expressible import PLAIN_HEADS, check_expressible
from transformer_parity.apps.checkpoints.formats.ctranslate2_names import (
    ACTIVATIONS,
    BINARY,
    FUSED,
    NAME,
    NAMES,
    PADDINGS,
    POSITIONS,
    REVISION,
    SETTINGS,
    STACKS,
)
from transformer_parity.apps.checkpoints.imported import Imported
from transformer_parity.apps.checkpoints.name_mapping import give
from transformer_parity.apps.checkpoints.padding import strip_padding, target_table
from transformer_parity.apps.containers import ctranslate2
from transformer_spec.config import TransformerConfig

LEAST_POSITIONS = 1024  # minimum number of sinusoidal positions to write
UNKNOWN = "<unk>"
EXPRESSIBLE: dict[str, tuple[object, ...]] = {
    **{name: values for name, values in PLAIN_HEADS.items() if name != "decoder_num_heads"},
    "layer_norm_kind": ("standard",),
}


def write(model: Imported, directory: Path) -> tuple[str, ...]:
    """Write a directory that ``ctranslate2.Translator`` can load.

    If the model has no vocabulary, the IDs are written as text and used as tokens.

    Returns:
        If the padding token is part of the vocabulary, a tuple with one warning that CTranslate2 may generate this
        token. Otherwise, an empty tuple.

    Raises:
        OSError: If a file cannot be written.
        ValueError: If CTranslate2 does not support the model. The message gives the reason.
    """
    check_expressible(model.config, EXPRESSIBLE, "CTranslate2")
    zeros = not target_table(model.weights)[model.config.bos_id].any()
    config, weights = strip_padding(model.config, model.weights)
    if zeros and config == model.config:  # no token was appended, so BOS is an ordinary vocabulary token
        zeros = False
    learned = config.position_encoding == "learned"
    rows = [row for row in NAMES if learned or "_position." not in row.name]
    tensors = give(rows, weights, config)
    variables = _fused(tensors)
    variables |= _positions_of(config, variables)
    tables = [f"{stack}/{embeddings}/weight" for stack, embeddings in STACKS.items()]
    if config.tie_embeddings == "all":
        variables[tables[1]] = variables[tables[0]]
    if config.tie_embeddings != "none":
        variables["decoder/projection/weight"] = variables[tables[1]]
    heads = {"encoder": config.num_heads, "decoder": config.decoder_num_heads or config.num_heads}
    for stack in STACKS:
        flags = {"pre_norm": config.norm_order == "pre", "activation": ACTIVATIONS[config.activation]}
        flags |= {"scale_embeddings": config.scale_embedding}
        variables |= {f"{stack}/{name}": np.array(value, np.int8) for name, value in flags.items()}
        variables[f"{stack}/num_heads"] = np.array(heads[stack], np.int16)
    variables["encoder/embeddings_merge"] = np.array(0, np.int8)
    variables["decoder/start_from_zero_embedding"] = np.array(zeros, np.int8)
    tokens = [
        _tokens(model, size, side == 0, config == model.config)
        for side, size in enumerate((config.source_vocab_size, config.target_vocab_size))
    ]
    settings = {
        "add_source_bos": False,
        "add_source_eos": False,
        "bos_token": tokens[1][config.eos_id if zeros else config.bos_id],
        "decoder_start_token": tokens[1][config.eos_id if zeros else config.bos_id],
        "eos_token": tokens[1][config.eos_id],
        "layer_norm_epsilon": config.layer_norm_epsilon,
        "multi_query_attention": False,
        "unk_token": UNKNOWN if UNKNOWN in tokens[1] else tokens[1][config.pad_id],
    }
    directory.mkdir(parents=True, exist_ok=True)
    ctranslate2.write(directory / BINARY, ctranslate2.StoredModel(NAME, REVISION, variables))
    texts = {SETTINGS: settings, "source_vocabulary.json": tokens[0], "target_vocabulary.json": tokens[1]}
    for name, content in texts.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    padding = tokens[1][config.pad_id]
    said = (
        f"CTranslate2 has no padding token and may generate {padding}; to prevent this, pass "
        f"suppress_sequences=[[{padding!r}]]"
    )
    return (said,) * (config == model.config)


def _fused(tensors: Mapping[str, ndarray]) -> dict[str, ndarray]:
    """Concatenate the projections that CTranslate2 fuses. This is the inverse of ``ctranslate2._split``."""
    found = dict(tensors)
    for name in tensors:
        path, _, kind = name.rpartition("/")
        layer, _, part = path.rpartition("/")
        for linear, parts in FUSED.get(layer.rpartition("/")[2], {}).items():
            if part == parts[0]:
                found[f"{layer}/{linear}/{kind}"] = np.concatenate(
                    [found.pop(f"{layer}/{one}/{kind}") for one in parts]
                )
    return found


def _positions_of(config: TransformerConfig, tensors: Mapping[str, ndarray]) -> dict[str, ndarray]:
    """Return the position tables of both stacks. Row 0 of each table is the encoding of the first position."""
    names = [POSITIONS.format(stack=stack) for stack in STACKS]
    if config.position_encoding == "learned":
        return {name: np.ascontiguousarray(tensors[name][config.position_offset :]) for name in names}
    kind = (config.position_layout, config.position_timescale, config.position_offset)
    exact = sinusoidal_encoding(max(config.max_length, LEAST_POSITIONS), config.d_model, *kind)
    table = exact.astype(tensors["encoder/embeddings_0/weight"].dtype)
    return dict.fromkeys(names, table)


def _tokens(model: Imported, size: int, source: bool, inside: bool) -> list[str]:
    """Return one distinct token per ID.

    Args:
        model: Model whose vocabulary to write.
        size: Number of tokens.
        source: Whether to return the source tokens instead of the target tokens.
        inside: Whether the padding token is included in ``size``.

    Raises:
        ValueError: If the vocabulary contains a token more than once.
    """
    if model.vocabulary is None:
        padding = model.config.pad_id if inside else -1
        return [PADDINGS[0] if i == padding else str(i) for i in range(size)]
    known = min(size, model.vocabulary.sizes[0 if source else 1])
    tokens = [*model.vocabulary.names(range(known), source=source), *(f"<extra{i}>" for i in range(known, size))]
    if len(set(tokens)) < size:
        raise ValueError("the vocabulary contains duplicate tokens, which CTranslate2 does not support")
    return tokens
