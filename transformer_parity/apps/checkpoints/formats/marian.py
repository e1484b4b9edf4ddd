"""Marian ``.npz`` files, which follow the conventions of the ``marian_cpp`` preset. Requires PyYAML.

All matrices have shape [in, out], and all vectors have shape [1, n]. A byte array in the file contains the model's
options as YAML. Marian has no padding token, and its decoder starts from a zero vector. The import therefore appends a
token with a zero embedding, which serves as both the padding token and the BOS token.

Source: marian-nmt/marian-dev at c9f287db, src/models/transformer.h, src/layers/output.cpp, and embedding.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from transformer_parity.apps.checkpoints.expressible import PLAIN_HEADS, check_expressible
from transformer_parity.apps.checkpoints.formats.marian_settings import (
    SETTINGS,
    config_of,
    contradictions,
    read_search,
    read_settings,
    settings_of,
)
from transformer_parity.apps.checkpoints.imported import Imported, Origin, sha256_of
from transformer_parity.apps.checkpoints.name_mapping import AS_IS, ROW, TRANSPOSED, Row, give, same, take
from transformer_parity.apps.checkpoints.options import ReadOptions
from transformer_parity.apps.checkpoints.padding import append_padding, strip_padding, target_table
from transformer_parity.apps.containers import npz
from transformer_parity.apps.text.kinds import checked
from transformer_parity.apps.text.marian import MarianVocabulary, read_marian_vocabulary
from transformer_spec.config import TransformerConfig

IGNORED = (SETTINGS, "special:*", "decoder_c0")

EXPRESSIBLE: dict[str, tuple[object, ...]] = {
    **PLAIN_HEADS,
    "layer_norm_epsilon": (1e-6,),
    "layer_norm_kind": ("standard",),
    "attention_bias": (True,),
    "feed_forward_bias": (True,),
    "activation": ("swish", "relu"),
}
LEARNED: dict[str, tuple[object, ...]] = {"scale_embedding": (False,), "position_offset": (0,)}
SINUSOIDS: dict[str, tuple[object, ...]] = {
    "scale_embedding": (True,),
    "position_layout": ("split",),
    "position_timescale": ("m_minus_1",),
    "position_offset": (0,),
}
ATTENTION = {"self_attention": "self", "cross_attention": "context"}
PROJECTIONS = {"query": "q", "key": "k", "value": "v", "output": "o"}
FEED_FORWARD = {"inner": "1", "output": "2"}


def recognizes(path: Path) -> bool:
    """Return whether the file name has the extension of a Marian model."""
    return path.is_file() and path.suffix == ".npz"


def read(path: Path, options: ReadOptions) -> Imported:
    """Read a model from a ``.npz`` file, and its search settings from ``<name>.decoder.yml`` in the same directory.

    Raises:
        OSError: If a file cannot be read.
        ValueError: If the file is damaged, if the model is not supported, or if the tensors do not match the settings.
    """
    tensors = npz.read(path)
    settings = read_settings(tensors)
    config = config_of(settings, tensors)
    weights = take(rows(config, "Wemb" in tensors, "decoder_ff_logit_out_Wt" in tensors), tensors, config, IGNORED)
    notes = contradictions(settings, tensors)
    if config.norm_order == "pre":
        notes.append(
            "scores agree with marian-scorer, but translations can differ from marian-decoder's, which does not "
            "normalize the keys and values of the decoder's self-attention in pre-norm models"
        )
    vocabulary = None
    if options.vocab:
        vocabulary = checked(
            read_marian_vocabulary([*options.vocab]), config.source_vocab_size, config.target_vocab_size
        )
        config = config.replace(eos_id=vocabulary.target_ids("")[-1])
    config, weights = append_padding(config, weights)
    decoder = path.with_name(f"{path.name}.decoder.yml")
    files = dict.fromkeys([path, *([decoder] if decoder.is_file() else []), *options.vocab])
    return Imported(
        config=config,
        weights=weights,
        vocabulary=vocabulary,
        search=read_search(decoder),
        origin=Origin(format="marian", family="transformer", preset="marian_cpp", files=sha256_of(files)),
        notes=tuple(notes),
    )


def rows(config: TransformerConfig, shared: bool, transposed: bool = False) -> list[Row]:
    """Return the table of parameter names.

    Args:
        config: Config of the model.
        shared: Whether the source and the target share one embedding matrix.
        transposed: Whether the output projection has shape [V, d_model], as in newer versions of Marian.
    """
    suffix = "_pre" if config.norm_order == "pre" else ""
    found = [
        Row("source_embedding.table", "Wemb" if shared else "encoder_Wemb"),
        Row("target_embedding.table", "Wemb" if shared else "decoder_Wemb"),
        Row("source_position.table", "Wpos"),
        Row("target_position.table", "Wpos"),
        Row("output_proj.kernel", f"decoder_ff_logit_out_W{'t' * transposed}", TRANSPOSED if transposed else AS_IS),
        Row("output_proj.bias", "decoder_ff_logit_out_b", ROW),
    ]
    for kind in ("scale", "bias"):
        found += [
            Row(f"{{side}}_embedding_norm.{kind}", f"{{stack}}_emb_ln_{kind}_pre", ROW),
            Row(f"{{stack}}.layers.{{i}}.feed_forward_norm.{kind}", f"{{stack}}_l{{n}}_ffn_ffn_ln_{kind}{suffix}", ROW),
            Row(f"{{stack}}.final_norm.{kind}", f"{{stack}}_top_ln_{kind}", ROW),
        ]
    for block, theirs in ATTENTION.items():
        path, prefix = f"{{stack}}.layers.{{i}}.{block}", f"{{stack}}_l{{n}}_{theirs}"
        found += _linear(f"{path}.", f"{prefix}_", PROJECTIONS)
        found += [Row(f"{path}_norm.{kind}", f"{prefix}_Wo_ln_{kind}{suffix}", ROW) for kind in ("scale", "bias")]
    return found + _linear("{stack}.layers.{i}.feed_forward.", "{stack}_l{n}_ffn_", FEED_FORWARD)


def _linear(path: str, prefix: str, names: Mapping[str, str]) -> list[Row]:
    kernels = [Row(f"{path}{ours}_proj.kernel", f"{prefix}W{theirs}") for ours, theirs in names.items()]
    return kernels + [Row(f"{path}{ours}_proj.bias", f"{prefix}b{theirs}", ROW) for ours, theirs in names.items()]


def write(model: Imported, directory: Path) -> tuple[str, ...]:
    """Write the files that ``marian-decoder`` reads: ``model.npz``, ``model.npz.decoder.yml``, and the vocabularies.

    Returns:
        If Marian does not support this kind of vocabulary, a tuple with one sentence that explains why the vocabulary
        was not written. Otherwise, an empty tuple.

    Raises:
        OSError: If a file cannot be written.
        ValueError: If Marian does not support the model. The message gives the reason.
    """
    from transformer_parity.apps.containers import yaml

    positions = LEARNED if model.config.position_encoding == "learned" else SINUSOIDS
    check_expressible(model.config, {**EXPRESSIBLE, **positions}, "Marian")
    if target_table(model.weights)[model.config.bos_id].any():
        bos_id = model.config.bos_id
        raise ValueError(
            f"the target embedding of bos_id, {bos_id}, must be zero because Marian starts from a vector of zeros: "
            "got nonzero values"
        )
    config, weights = strip_padding(model.config, model.weights)
    shared = config.tie_embeddings == "all" or (
        config.tie_embeddings == "none" and same(weights["source_embedding.table"], target_table(weights))
    )
    tensors = give(rows(config, shared), weights, config)
    settings = yaml.write(settings_of(config, shared)).encode() + b"\0"
    directory.mkdir(parents=True, exist_ok=True)
    npz.write(directory / "model.npz", {**tensors, SETTINGS: np.frombuffer(settings, np.int8)})
    search = model.search
    decoder = {
        "relative-paths": True,
        "models": ["model.npz"],
        "vocabs": _write_vocabulary(model, directory),
        "beam-size": search.beam_size or 1,
        "normalize": float(search.length_penalty) if search.length_penalty_kind == "power" else 0.0,
        "word-penalty": 0,
    }
    (directory / "model.npz.decoder.yml").write_text(yaml.write(decoder), "utf-8")
    said = (
        "the vocabulary is not written because Marian does not support its kind; add a vocabulary that Marian "
        "supports to model.npz.decoder.yml"
    )
    return () if decoder["vocabs"] else (said,)


def _write_vocabulary(model: Imported, directory: Path) -> list[str]:
    """Write the vocabulary files, and return the names of the files that Marian loads for the source and the target.

    If Marian does not support this kind of vocabulary, no files are written and the list is empty.
    """
    if not isinstance(model.vocabulary, MarianVocabulary):
        return []
    files = {name: data for name, data in model.vocabulary.files().items() if not name.startswith("tokenizer")}
    for name, data in files.items():
        (directory / name).write_bytes(data)
    tables = sorted((name for name in files if not name.endswith(".spm")), key=lambda name: name.startswith("target"))
    return (tables * 2)[:2] if tables else ["source.spm", "target.spm"]
