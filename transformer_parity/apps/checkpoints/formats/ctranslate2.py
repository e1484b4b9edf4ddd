"""Unquantized CTranslate2 directories, which consist of ``model.bin``, ``config.json``, and JSON vocabularies.

``model.bin`` contains the position tables and flags for conventions such as the order of the norms. CTranslate2 has no
padding token, so the import appends a padding token with a zero embedding unless the vocabulary already includes one.
If the decoder starts from a zero vector, the appended token also serves as the BOS token.

Source: OpenNMT/CTranslate2, python/ctranslate2/specs/ and src/layers/transformer.cc.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from reference_numpy.embedding import sinusoidal_encoding
from transformer_parity.apps.checkpoints.formats.ctranslate2_export import write as write
from transformer_parity.apps.checkpoints.formats.ctranslate2_names import (
    ACTIVATIONS,
    BINARY,
    DEFAULTS,
    FUSED,
    IGNORED,
    NAME,
    NAMES,
    OFF,
    PADDINGS,
    POSITIONS,
    SETTINGS,
    STACKS,
)
from transformer_parity.apps.checkpoints.imported import Imported, Origin, sha256_of
from transformer_parity.apps.checkpoints.name_mapping import matrix, same, take
from transformer_parity.apps.checkpoints.options import ReadOptions
from transformer_parity.apps.checkpoints.padding import append_padding
from transformer_parity.apps.checkpoints.state_dict import ROUNDED
from transformer_parity.apps.containers import ctranslate2
from transformer_parity.apps.containers.directory import has, member, read_bytes, read_json
from transformer_spec.config import TransformerConfig
from transformer_spec.search import Search


def recognizes(path: Path) -> bool:
    """Return whether a path is a CTranslate2 directory."""
    return path.is_dir() and has(path, BINARY) and has(path, SETTINGS)


def read(path: Path, options: ReadOptions) -> Imported:
    """Read a model from a directory.

    Raises:
        OSError: If a file is missing or cannot be read.
        ValueError: If a file is damaged or the model is not supported.
    """
    binary = ctranslate2.read(member(path, BINARY))
    if binary.name != NAME:
        raise ValueError(f"{BINARY} must contain a {NAME}: got {binary.name}")
    tensors = _split(binary.variables)
    settings = read_json(member(path, SETTINGS))
    config = config_of(tensors, settings)
    copies = {
        "all": ("decoder/embeddings/weight", "decoder/projection/weight"),
        "target_output": ("decoder/projection/weight",),
    }
    ignored = [*IGNORED, *(f"*/{flag}" for flag in OFF), *copies.get(config.tie_embeddings, ())]
    if config.position_encoding == "sinusoidal":
        ignored += [POSITIONS.format(stack=stack) for stack in STACKS]
    weights = take(NAMES, tensors, config, ignored)
    files = [member(path, name) for name in (BINARY, SETTINGS, *_vocabulary_files(path))]
    config, weights = _with_ids(
        path, config, weights, settings, bool(_flag(tensors, "decoder/start_from_zero_embedding", 0))
    )
    return Imported(
        config=config,
        weights=weights,
        vocabulary=None,
        search=Search(),
        origin=Origin(format="ctranslate2", family=NAME, preset="paper_base", files=sha256_of(files)),
    )


def _split(variables: Mapping[str, ndarray]) -> dict[str, ndarray]:
    """Split fused projections into individual variables.

    Raises:
        ValueError: If a variable is quantized or cannot be split.
    """
    found: dict[str, ndarray] = {}
    for name, array in variables.items():
        if name.endswith(("/weight_scale", "/weight_zero")):
            raise ValueError(
                f"the model is quantized (it contains {name}); rerun the converter with --quantization float32"
            )
        path, _, kind = name.rpartition("/")
        layer, _, linear = path.rpartition("/")
        parts = FUSED.get(layer.rpartition("/")[2], {}).get(linear)
        if parts is None:
            name = name.replace("encoder/embeddings/weight", "encoder/embeddings_0/weight")
            found[name] = array
        elif array.ndim < 1 or len(array) % len(parts):
            raise ValueError(
                f"{name} must have a number of rows that is divisible by {len(parts)}: got shape {list(array.shape)}"
            )
        else:
            split = np.split(array, len(parts))
            found |= {f"{layer}/{part}/{kind}": one for part, one in zip(parts, split, strict=True)}
    return found


def _flag(tensors: Mapping[str, ndarray], name: str, default: float) -> float:
    if name not in tensors:
        return default
    if tensors[name].ndim:
        raise ValueError(f"{name} must be a scalar: got shape {list(tensors[name].shape)}")
    return float(tensors[name])


def config_of(tensors: Mapping[str, ndarray], settings: Mapping[str, Any]) -> TransformerConfig:
    """Return the config of a model, with placeholders for the special IDs.

    Raises:
        ValueError: If a variable that determines a size is missing or a flag enables an unsupported feature.
    """
    for name in tensors:
        if name.rpartition("/")[2] in OFF and _flag(tensors, name, 0):
            raise ValueError(f"{name} is not supported: expected 0, got 1")
    source, target = (matrix(tensors, f"{stack}/{embeddings}/weight") for stack, embeddings in STACKS.items())
    output, d_model = matrix(tensors, "decoder/projection/weight"), source.shape[1]
    stacks = {
        name: [_flag(tensors, f"{stack}/{name}", default) for stack in STACKS] for name, default in DEFAULTS.items()
    }
    activations = [
        next((name for name, number in ACTIVATIONS.items() if number == one), None) for one in stacks["activation"]
    ]
    scales = [_is_scaled(tensors, stack, d_model) for stack in STACKS]
    said: dict[str, list[Any]] = {**stacks, "scale_embeddings": scales}
    for name, both in said.items():
        if name != "num_heads" and both[0] != both[1]:
            raise ValueError(f"encoder/{name} and decoder/{name} must be equal: got {both[0]} and {both[1]}")
    if activations[0] is None:
        raise ValueError(
            f"encoder/activation must be one of {list(ACTIVATIONS.values())}: got {stacks['activation'][0]:g}"
        )
    heads = [int(one) for one in stacks["num_heads"]]
    widths = [len(matrix(tensors, f"{stack}/layer_0/ffn/linear_0/weight")) for stack in STACKS]
    epsilon = settings.get("layer_norm_epsilon")
    tied = "none" if not same(target, output) else "all" if same(source, target) else "target_output"
    return TransformerConfig(
        source_vocab_size=len(source),
        target_vocab_size=len(target),
        d_model=d_model,
        num_heads=heads[0],
        decoder_num_heads=None if heads[0] == heads[1] else heads[1],
        d_ff=widths[0],
        decoder_d_ff=None if widths[0] == widths[1] else widths[1],
        num_encoder_layers=_depth(tensors, "encoder"),
        num_decoder_layers=_depth(tensors, "decoder"),
        norm_order="pre" if stacks["pre_norm"][0] else "post",
        final_norm="encoder/layer_norm/gamma" in tensors,
        layer_norm_epsilon=1e-5 if epsilon is None else epsilon,
        embedding_norm="encoder/layernorm_embedding/gamma" in tensors,
        scale_embedding=scales[0],
        tie_embeddings=tied,
        attention_bias="encoder/layer_0/self_attention/query/bias" in tensors,
        feed_forward_bias="encoder/layer_0/ffn/linear_0/bias" in tensors,
        output_bias="decoder/projection/bias" in tensors,
        activation=activations[0],
        pad_id=0,
        bos_id=0,
        eos_id=0,
        **_positions(tensors, d_model),
    )


def _depth(tensors: Mapping[str, ndarray], stack: str) -> int:
    return len(
        {
            name.split("/")[1]
            for name in tensors
            if name.startswith(f"{stack}/layer_") and "norm" not in name.split("/")[1]
        }
    )


def _is_scaled(tensors: Mapping[str, ndarray], stack: str, d_model: int) -> bool:
    """Return whether a stack multiplies its embeddings by sqrt(d_model). The file stores either a flag or the scale."""
    scale = tensors.get(f"{stack}/scale_embeddings", tensors.get(f"{stack}/embeddings/multiply_by_sqrt_depth"))
    if scale is None or scale.dtype == np.int8:
        return scale is None or bool(scale)
    if not (math.isclose(scale, 1.0) or math.isclose(scale, math.sqrt(d_model), rel_tol=1e-3)):
        raise ValueError(f"{stack}/scale_embeddings must be 1 or sqrt(d_model): got {float(scale):g}")
    return not math.isclose(scale, 1.0)


def _positions(tensors: Mapping[str, ndarray], d_model: int) -> dict[str, Any]:
    """Return the config fields for the positional encoding.

    If the file contains position tables that do not match any sinusoids, the encoding is learned.
    """
    names = [POSITIONS.format(stack=stack) for stack in STACKS]
    held = [name for name in names if name in tensors]
    if not held:  # without tables, CTranslate2 computes the same sinusoids as OpenNMT-tf
        return {"position_layout": "split", "position_timescale": "m_minus_1", "position_offset": 1}
    tables = [matrix(tensors, name) for name in names]
    if same(*tables):
        for layout in ("split", "interleaved"):
            for timescale in ("m", "m_minus_1"):
                for offset in range(3):
                    kind = {"position_layout": layout, "position_timescale": timescale, "position_offset": offset}
                    exact = sinusoidal_encoding(len(tables[0]), d_model, layout, timescale, offset)
                    if exact.shape == tables[0].shape and _near(tables[0], exact):
                        return kind
    return {"position_encoding": "learned", "max_length": len(tables[0])}


def _near(table: ndarray, exact: ndarray) -> bool:
    """Return whether a table matches the exact sinusoids up to its dtype's rounding error."""
    rounding = 0.0 if table.dtype == np.float32 else 2.0**-8
    return float(np.abs(table.astype(np.float64) - exact).max(initial=0.0)) <= ROUNDED * len(table) + rounding


def _vocabulary_files(path: Path) -> tuple[str, ...]:
    shared = "shared_vocabulary.json"
    return (shared,) if has(path, shared) else ("source_vocabulary.json", "target_vocabulary.json")


def _with_ids(
    path: Path, config: TransformerConfig, weights: dict[str, ndarray], settings: Mapping[str, Any], zeros: bool
) -> tuple[TransformerConfig, dict[str, ndarray]]:
    """Set the special IDs from the vocabularies, and append a padding token if one is needed.

    Args:
        path: Directory of the model.
        config: Config with placeholders for the special IDs.
        weights: Weights of the model.
        settings: Content of config.json.
        zeros: Whether the decoder starts from a zero vector. If so, the padding token is always appended.

    Returns:
        The config and the weights.
    """
    files, sizes = _vocabulary_files(path), (config.source_vocab_size, config.target_vocab_size)
    vocabularies = [
        _read_tokens(member(path, name), size) for name, size in zip((files[0], files[-1]), sizes, strict=True)
    ]
    source, target = vocabularies

    def find(setting: str, default: str) -> int:
        token = settings.get(setting) or default
        if token not in target:
            raise ValueError(f"{setting} in {SETTINGS} must be in the target vocabulary: got {token!r}")
        return target[token]

    config = config.replace(eos_id=find("eos_token", "</s>"))
    pad_id = next((source[one] for one in PADDINGS if one in source and source[one] == target.get(one)), None)
    if zeros or pad_id is None:
        start = None if zeros else find("decoder_start_token", "<s>")
        config, weights = append_padding(config, weights)
        return config if start is None else config.replace(bos_id=start), weights
    return config.replace(pad_id=pad_id, bos_id=find("decoder_start_token", "<s>")), weights


def _read_tokens(path: Path, size: int) -> dict[str, int]:
    """Return the ID of each token in a vocabulary file."""
    try:
        tokens = json.loads(read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(tokens, list) or len(tokens) != size or not all(isinstance(one, str) for one in tokens):
        raise ValueError(f"{path.name} must be a JSON list of {size:,} strings")
    return {token: i for i, token in enumerate(tokens)}
