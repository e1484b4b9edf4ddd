"""Hugging Face directories with config.json, generation_config.json, and weights in safetensors or PyTorch files.

The class of a model, not its config.json, determines conventions such as the order of the norms.
``huggingface_families`` lists the conventions of each class. ``tie_embeddings`` is inferred from the tensors, because
the flags in some published checkpoints do not match their tensors.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from reference_numpy.embedding import sinusoidal_encoding
from transformer_parity.apps.checkpoints.expressible import check_expressible
from transformer_parity.apps.checkpoints.formats import huggingface_t5
from transformer_parity.apps.checkpoints.formats.huggingface_families import (
    FAMILIES,
    config_of,
    family_of,
    fields_of,
    filled_in,
)
from transformer_parity.apps.checkpoints.formats.huggingface_search import read_search, write_search
from transformer_parity.apps.checkpoints.formats.huggingface_t5 import T5_FAMILIES
from transformer_parity.apps.checkpoints.formats.huggingface_ties import TieNames, settle_tables
from transformer_parity.apps.checkpoints.imported import Imported, Origin, sha256_of
from transformer_parity.apps.checkpoints.name_mapping import ROW, TRANSPOSED, Row, give, take
from transformer_parity.apps.checkpoints.options import ReadOptions
from transformer_parity.apps.containers import pickles, tensors
from transformer_parity.apps.containers.directory import has, member, read_bytes, read_json
from transformer_parity.apps.text.kinds import read_vocabulary_directory
from transformer_parity.apps.text.marian import as_marian
from transformer_parity.engine.system.errors import UsageError
from transformer_parity.transformer.sentences.subwords import JointVocabulary
from transformer_spec.config import TransformerConfig
from transformer_spec.names import FLOAT_DTYPES

CONFIG, GENERATION = "config.json", "generation_config.json"
ADAPTER = "adapter_config.json"
# Names of weight files and the functions that read them. The transformers library searches for the files in this order.
WEIGHTS: dict[str, Callable[[Path], dict[str, ndarray]]] = {
    "model.safetensors": tensors.read,
    "model.safetensors.index.json": tensors.read_shards,
    "pytorch_model.bin": pickles.read_tensors,
    "pytorch_model.bin.index.json": lambda path: tensors.read_shards(path, pickles.read_tensors),
}
OTHER_WEIGHTS = {"tf_model.h5": "TensorFlow", "flax_model.msgpack": "Flax", "rust_model.ot": "Rust"}

ATTENTION = {"query_proj": "q_proj", "key_proj": "k_proj", "value_proj": "v_proj", "output_proj": "out_proj"}
LAYER = "{stack}.layers.{i}"
LINEAR = {  # maps the names of projections in this project to their names in transformers
    **{f"{LAYER}.self_attention.{ours}": f"{LAYER}.self_attn.{theirs}" for ours, theirs in ATTENTION.items()},
    **{f"{LAYER}.cross_attention.{ours}": f"{LAYER}.encoder_attn.{theirs}" for ours, theirs in ATTENTION.items()},
    f"{LAYER}.feed_forward.inner_proj": f"{LAYER}.fc1",
    f"{LAYER}.feed_forward.output_proj": f"{LAYER}.fc2",
}
NORMS = {
    f"{LAYER}.self_attention_norm": f"{LAYER}.self_attn_layer_norm",
    f"{LAYER}.cross_attention_norm": f"{LAYER}.encoder_attn_layer_norm",
    f"{LAYER}.feed_forward_norm": f"{LAYER}.final_layer_norm",
    "{stack}.final_norm": "{stack}.layer_norm",
    "{side}_embedding_norm": "{stack}.layernorm_embedding",
}
TABLE = (
    Row("{side}_embedding.table", "model.{stack}.embed_tokens.weight"),
    Row("{side}_position.table", "model.{stack}.embed_positions.weight"),
    Row("output_proj.bias", "final_logits_bias", ROW),
    *(Row(f"{ours}.kernel", f"model.{theirs}.weight", TRANSPOSED) for ours, theirs in LINEAR.items()),
    *(Row(f"{ours}.bias", f"model.{theirs}.bias") for ours, theirs in LINEAR.items()),
    *(Row(f"{ours}.scale", f"model.{theirs}.weight") for ours, theirs in NORMS.items()),
    *(Row(f"{ours}.bias", f"model.{theirs}.bias") for ours, theirs in NORMS.items()),
)
SHARED = "model.shared.weight"
ENCODER, DECODER = (f"model.{stack}.embed_tokens.weight" for stack in ("encoder", "decoder"))
POSITIONS = tuple(f"model.{stack}.embed_positions.weight" for stack in ("encoder", "decoder"))
BIAS = "final_logits_bias"
IGNORED = ("model.encoder.version", "model.decoder.version", "model.*.embed_positions._float_tensor", SHARED)


def output_name(family: str) -> str:
    """Return the name of the output projection's weight in models of a family."""
    return "model.decoder.output_projection.weight" if family == "fsmt" else "lm_head.weight"


def table_of(family: str) -> tuple[Row, ...]:
    """Return the table of parameter names for a model family."""
    return (*TABLE, Row("output_proj.kernel", output_name(family), TRANSPOSED))


def recognizes(path: Path) -> bool:
    """Return whether a path is a directory that contains a config.json or an adapter_config.json."""
    return path.is_dir() and (has(path, CONFIG) or has(path, ADAPTER))


def read(path: Path, options: ReadOptions) -> Imported:
    """Read a model from a directory. No files outside the directory are read.

    Raises:
        OSError: If a file is missing or cannot be read.
        TypeError: If a field has the wrong type.
        ValueError: If a file is damaged, if the family is not supported, or if the tensors do not match the config.
    """
    if has(path, ADAPTER):
        raise ValueError(
            f"the directory contains an adapter (LoRA, {ADAPTER}), not a model; merge the adapter into its base "
            "model, save the merged model, and import the merged model"
        )
    given = read_json(member(path, CONFIG))
    family = family_of(given)
    fields = filled_in(family, given)
    files, found = _read_weights(path)
    convert = huggingface_t5.convert if family in T5_FAMILIES else _convert
    config, weights, notes = convert(family, fields, found)
    notes = _flag_notes(family, given) + notes
    generation = read_json(member(path, GENERATION)) if has(path, GENERATION) else fields
    search, said = read_search(generation, config)
    notes += said
    files += [path / name for name in (CONFIG, GENERATION) if has(path, name)]
    vocabulary = None
    try:
        vocabulary = read_vocabulary_directory(path, family, fields)
        files += [path / name for name in vocabulary.files() if has(path, name)]
    except (OSError, UsageError, ValueError) as error:
        notes.append(f"no vocabulary: {error}")
    preset = huggingface_t5.preset_of(family, config) if family in T5_FAMILIES else FAMILIES[family].preset
    return Imported(
        config=config,
        weights=weights,
        vocabulary=vocabulary,
        search=search,
        origin=Origin(format="hf", family=family, preset=preset, files=sha256_of(files), license=_license(path)),
        notes=tuple(notes),
    )


def _convert(
    family: str, fields: Mapping[str, Any], found: dict[str, ndarray]
) -> tuple[TransformerConfig, dict[str, ndarray], list[str]]:
    """Convert a model's config.json and tensors, and return the config, the weights, and notes.

    Raises:
        ValueError: If a field has an invalid or unsupported value, or if the tensors do not match the config.
        TypeError: If a field has the wrong type.
    """
    if not any(name.startswith("model.") for name in found):  # saved from the base class, without an output projection
        found = {
            name if name == BIAS or name.startswith("lm_head.") else f"model.{name}": one for name, one in found.items()
        }
    tied, found, notes = settle_tables(found, TieNames(SHARED, ENCODER, DECODER, output_name(family)), fields)
    learned = TransformerConfig.preset(FAMILIES[family].preset, source_vocab_size=9, target_vocab_size=9)
    rows = None
    if learned.position_encoding == "learned":
        rows = len(found[POSITIONS[0]]) if POSITIONS[0] in found else None
    config = config_of(family, fields, tied, rows)
    if rows is None:
        found = _without_positions(found, config)
    if config.output_bias and BIAS not in found:
        found[BIAS] = np.zeros((1, config.target_vocab_size), found[DECODER if DECODER in found else ENCODER].dtype)
        notes.append(f"{BIAS} is missing and is set to zero, as in transformers")
    return config, take(table_of(family), found, config, IGNORED), notes


def _read_weights(path: Path) -> tuple[list[Path], dict[str, ndarray]]:
    """Return the weight files in a directory and the tensors that they contain."""
    for name, reader in WEIGHTS.items():
        if has(path, name):
            first = member(path, name)
            found = reader(first)
            return [first, *(tensors.shards(first) if name.endswith(".json") else [])], found
    if other := [f"{title} ({name})" for name, title in OTHER_WEIGHTS.items() if has(path, name)]:
        raise ValueError(f"{path} must contain {' or '.join(WEIGHTS)}: got only weights for {', '.join(other)}")
    raise FileNotFoundError(f"{path} contains no weights; the directory must contain {' or '.join(WEIGHTS)}")


def _flag_notes(family: str, given: Mapping[str, Any]) -> list[str]:
    """Return one sentence for each flag that an older release wrote and that contradicts the current class."""
    return [
        f"{name} is {given[name]} in {CONFIG}, but {family} models ignore this flag and always use {value}"
        for name, value in FAMILIES[family].flags.items()
        if given.get(name) is not None and given[name] != value
    ]


def _without_positions(found: Mapping[str, ndarray], config: TransformerConfig) -> dict[str, ndarray]:
    """Return the tensors without the sinusoidal position tables, which this project computes from the config.

    Raises:
        ValueError: If a table differs from the config's sinusoids by more than the rounding error of its values and
            angles.
    """
    for name in POSITIONS:
        if name not in found:
            continue
        table = found[name]
        if table.ndim != 2 or table.shape[1] != config.d_model or table.dtype.name not in FLOAT_DTYPES:
            raise ValueError(
                f"{name} must be a floating-point matrix with {config.d_model} columns: "
                f"got {table.dtype} {list(table.shape)}"
            )
        exact = sinusoidal_encoding(len(table), config.d_model, config.position_layout, config.position_timescale)
        if config.position_offset:
            exact[config.pad_id] = 0.0
        step = {"float64": 1e-12, "float32": 2.0**-24, "float16": 2.0**-12}.get(table.dtype.name, 2.0**-9)
        angles = 2e-7 * len(table) if config.position_timescale == "m_minus_1" else 0.0
        worst = float(np.abs(table.astype(np.float64) - exact).max(initial=0.0))
        if not worst <= 1.01 * step + angles:
            raise ValueError(f"{name} does not contain this family's sinusoids: the largest difference is {worst:.2g}")
    return {name: array for name, array in found.items() if name not in POSITIONS}


def _license(path: Path) -> str | None:
    """Return the license in the front matter of README.md, or None if the front matter does not specify a license."""
    if not has(path, "README.md"):
        return None
    text = read_bytes(member(path, "README.md"), 2**22).decode("utf-8", "replace")
    first, *lines = text.splitlines() or [""]
    if first.rstrip() != "---":
        return None
    front = takewhile(lambda line: not line.startswith("---"), lines)
    found = (line.removeprefix("license:").strip() for line in front if line.startswith("license:"))
    return next(found, "")[:200] or None


def family_for(config: TransformerConfig) -> str:
    """Return the first family that supports a config.

    Raises:
        ValueError: If no family supports the config. The message lists the fields that the most similar family does
            not support.
    """
    problems = {}
    for family in FAMILIES:
        try:
            check_family(config, family)
        except ValueError as error:
            problems[family] = str(error)
        else:
            return family
    raise ValueError(min(problems.values(), key=lambda said: said.count(";")))


def check_family(config: TransformerConfig, family: str) -> None:
    """Check that a family supports a config.

    Raises:
        ValueError: If the family does not support the config. The message lists the unsupported fields.
    """
    if family in T5_FAMILIES:
        huggingface_t5.check_family(config, family)
        return
    sizes = {"source_vocab_size": config.source_vocab_size, "target_vocab_size": config.target_vocab_size}
    special = {name: getattr(config, name) for name in ("d_model", "num_heads", "pad_id", "bos_id", "eos_id")}
    more = {"max_length": config.max_length, "label_smoothing": 0.0, "tie_embeddings": "none"}
    model = TransformerConfig.preset(FAMILIES[family].preset, **sizes, **special, **more)
    offset = config.pad_id + 1 if FAMILIES[family].behind_padding else model.position_offset
    fixed = ["norm_order", "final_norm", "embedding_norm", "layer_norm_epsilon", "layer_norm_kind", "position_encoding"]
    fixed += ["attention_bias", "feed_forward_bias", "output_bias", "skip_first_self_attention"]
    if model.position_encoding == "sinusoidal":
        fixed += ["position_layout", "position_timescale"]
    needed: dict[str, tuple[object, ...]] = {name: (getattr(model, name),) for name in fixed}
    needed["position_offset"] = (offset,)
    heads = config.decoder_num_heads
    width = None if heads is None else config.d_model // heads
    needed |= {"decoder_d_k": (None, width), "decoder_d_v": (None, width)}
    if family not in ("marian", "fsmt"):
        needed["target_vocab_size"] = (config.source_vocab_size,)
    check_expressible(config, needed, f"Hugging Face's {FAMILIES[family].classes[0]}")


def write(model: Imported, directory: Path) -> tuple[str, ...]:
    """Write a directory that ``from_pretrained`` can load. The weights keep their dtypes.

    Args:
        model: Model to write. A model that was imported from Hugging Face keeps its family.
        directory: Directory to write to. Existing files with the same names are overwritten.

    Returns:
        One sentence for each setting that the format cannot store.

    Raises:
        OSError: If a file cannot be written.
        ValueError: If no family supports the model. The message lists the unsupported config fields.
    """
    config = model.config
    origin = model.origin
    family = origin.family if origin.format == "hf" and origin.family in FAMILIES else family_for(config)
    check_family(config, family)
    if family in T5_FAMILIES:
        found, fields = huggingface_t5.tensors_of(config, model.weights), huggingface_t5.fields_of(config, family)
    else:
        found, fields = _tensors_and_fields(config, model.weights, family)
    kinds = {array.dtype.name for array in found.values()}
    fields["dtype"] = kinds.pop() if len(kinds) == 1 else "float32"
    generation, notes = write_search(model.search, config)
    rates = config.dropout
    if family in T5_FAMILIES:
        if len({*dataclasses.astuple(rates)}) > 1:
            notes.append("transformers uses one rate for all kinds of dropout, so the residual rate is written")
    elif rates.embedding != rates.residual:
        notes.append("transformers uses one rate for embedding and residual dropout, so the residual rate is written")
    if family not in T5_FAMILIES and rates.final:
        notes.append(f"{family} has no dropout after the stacks, so the rate dropout.final is not written")
    if config.scale_logits and not config.ties_output:
        notes.append("transformers 4 computes different logits for this model; load it with transformers 5")
    directory.mkdir(parents=True, exist_ok=True)
    tensors.write(directory / "model.safetensors", found)
    for name, content in ((CONFIG, fields), (GENERATION, generation)):
        (directory / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", "utf-8")
    vocabulary = model.vocabulary
    if isinstance(vocabulary, JointVocabulary):  # a vocabulary that `parity train` built
        vocabulary = as_marian(vocabulary) if family == "marian" else None
        if vocabulary is None:
            notes.append(
                f"the vocabulary is not written because {family} tokenizers do not support vocabularies of `parity "
                "train`"
            )
    for file, stored in (vocabulary.files() if vocabulary else {}).items():
        (directory / file).write_bytes(stored)
    return tuple(notes)


def _tensors_and_fields(
    config: TransformerConfig, weights: Mapping[str, ndarray], family: str
) -> tuple[dict[str, ndarray], dict[str, Any]]:
    """Return a model's tensors under their names in transformers, and the content of its config.json."""
    found = give(table_of(family), weights, config)
    fields = fields_of(config, family)
    output = output_name(family)
    # If ``tie_word_embeddings`` is false, the transformers library loads a separate array for each parameter, so tied
    # parameters are written multiple times.
    if not fields["tie_word_embeddings"]:
        found.setdefault(DECODER, found[ENCODER])
        found.setdefault(output, found[DECODER])
        if family not in ("marian", "fsmt"):
            found[SHARED] = found[ENCODER]
    elif config.tie_embeddings == "all" and family != "fsmt":
        found[SHARED] = found.pop(ENCODER)
    elif family == "fsmt":
        found[DECODER] = found.pop(ENCODER)
    if family in ("pegasus", "fsmt"):  # these classes load their position tables instead of computing them
        found |= dict.fromkeys(POSITIONS, _positions(config))
    return found, fields


def _positions(config: TransformerConfig) -> ndarray:
    """Return the sinusoidal position table for classes that load the table from the weight file."""
    rows = config.max_length + config.position_offset
    table = sinusoidal_encoding(rows, config.d_model, config.position_layout, config.position_timescale)
    if config.position_offset:
        table[config.pad_id] = 0.0
    return table.astype(np.float32)
