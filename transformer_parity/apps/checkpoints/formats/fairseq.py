"""Checkpoints of fairseq (``.pt``), which contain command-line options and a state dict.

Source: facebookresearch/fairseq, the classes in fairseq/models/transformer/ and their ``upgrade_state_dict_named``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from numpy import ndarray

from transformer_parity.apps.checkpoints.imported import Imported, Origin, sha256_of
from transformer_parity.apps.checkpoints.name_mapping import TRANSPOSED, Row, matrix, same, take, three_projections
from transformer_parity.apps.checkpoints.options import ReadOptions
from transformer_parity.apps.containers import pickles
from transformer_parity.apps.text import moses
from transformer_parity.apps.text.kinds import checked
from transformer_parity.apps.text.maps import read_file
from transformer_parity.transformer.sentences.vocabulary import Vocabulary
from transformer_spec.config import TransformerConfig
from transformer_spec.search import Search

PAD_ID, EOS_ID = 1, 2  # IDs in fairseq's Dictionary; EOS also serves as the target's BOS token
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "swish": "swish",
}
OFF = (False, None, 0, 0.0, "")
# Unsupported options of fairseq's Transformer, with a description of each feature.
REFUSED = {
    "adaptive_softmax_cutoff": "adaptive softmax",
    "adaptive_input": "adaptive input",
    "char_inputs": "character input",
    "cross_self_attention": "joint attention to source and target",
    "no_cross_attention": "a decoder without cross-attention",
    "no_token_positional_embeddings": "a model without positions",
    "merge_src_tgt_embed": "one embedding matrix for two vocabularies",
    "base_layers": "BASE layers",
    "encoder_layers_to_keep": "a model with pruned layers",
    "decoder_layers_to_keep": "a model with pruned layers",
}
IGNORED = ("*.version", "*.embed_positions._float_tensor", "*.embed_positions.weights")
TIED = {  # tensors that are copies of a tied parameter
    "all": ("decoder.embed_tokens.weight", "decoder.output_projection.weight"),
    "target_output": ("decoder.output_projection.weight",),
    "none": (),
}
NORMS = {"0": "self_attn_layer_norm", "1": "encoder_attn_layer_norm", "2": "final_layer_norm"}

NAMES = [
    Row("{side}_embedding.table", "{stack}.embed_tokens.weight"),
    Row("{side}_position.table", "{stack}.embed_positions.weight"),
    Row("output_proj.kernel", "decoder.output_projection.weight", TRANSPOSED),
]
for _ours, _theirs in (("scale", "weight"), ("bias", "bias")):
    _layer = "{stack}.layers.{i}"
    NAMES += [
        Row(f"{{side}}_embedding_norm.{_ours}", f"{{stack}}.layernorm_embedding.{_theirs}"),
        Row(f"{_layer}.self_attention_norm.{_ours}", f"{_layer}.self_attn_layer_norm.{_theirs}"),
        Row(f"{_layer}.cross_attention_norm.{_ours}", f"{_layer}.encoder_attn_layer_norm.{_theirs}"),
        Row(f"{_layer}.feed_forward_norm.{_ours}", f"{_layer}.final_layer_norm.{_theirs}"),
        Row(f"{{stack}}.final_norm.{_ours}", f"{{stack}}.layer_norm.{_theirs}"),
    ]
for _path, _prefix in (
    *((f"self_attention.{one}", f"self_attn.{one[0]}_proj") for one in ("query", "key", "value")),
    *((f"cross_attention.{one}", f"encoder_attn.{one[0]}_proj") for one in ("query", "key", "value")),
    *(("self_attention.output", "self_attn.out_proj"), ("cross_attention.output", "encoder_attn.out_proj")),
    *(("feed_forward.inner", "fc1"), ("feed_forward.output", "fc2")),
):
    NAMES += [
        Row(f"{_layer}.{_path}_proj.kernel", f"{_layer}.{_prefix}.weight", TRANSPOSED),
        Row(f"{_layer}.{_path}_proj.bias", f"{_layer}.{_prefix}.bias"),
    ]


def recognizes(path: Path) -> bool:
    """Return whether a file contains a model and the command-line options of fairseq."""
    if not path.is_file() or path.suffix != ".pt":
        return False
    try:
        content = pickles.read(path, pickles.NAMESPACE)
    except ValueError:
        return False
    return isinstance(content, dict) and "model" in content and not {"args", "cfg"}.isdisjoint(content)


def read(path: Path, options: ReadOptions) -> Imported:
    """Read a model from a checkpoint.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is damaged or contains code, if the model is not supported, or if the tensors do not
            match the options.
    """
    content = pickles.read(path, pickles.NAMESPACE)
    settings = read_settings(content)
    tensors = upgraded(pickles.arrays(content.get("model"), f"'model' in {path.name}"))
    config, notes = config_of(settings, tensors)
    weights = take(NAMES, tensors, config, (*IGNORED, *TIED[config.tie_embeddings]))
    family = str(settings.get("arch") or settings.get("_name") or "transformer")
    return Imported(
        config=config,
        weights=weights,
        vocabulary=read_vocabulary(options.vocab, settings, config) if options.vocab else None,
        search=Search.preset("fairseq", beam_size=5),
        origin=Origin(format="fairseq", family=family, preset="fairseq", files=sha256_of([path, *options.vocab])),
        notes=notes,
    )


def read_settings(content: Any) -> dict[str, Any]:
    """Return a model's options as a flat dict.

    fairseq stores the options in ``args`` up to version 0.9 and in ``cfg`` since version 0.10.

    Raises:
        ValueError: If there are no options or an option enables an unsupported feature. The message identifies the
            option.
    """
    if not isinstance(content, dict):
        raise ValueError(f"a fairseq checkpoint must be a dict: got {type(content).__name__}")
    if "model" not in content:
        raise ValueError("a fairseq checkpoint must contain the weights under the key 'model'")
    found = content.get("args") or (content.get("cfg") or {}).get("model")
    fields = vars(found) if isinstance(found, SimpleNamespace) else found
    if not isinstance(fields, dict):
        raise ValueError(
            "the checkpoint does not contain the options of fairseq-train, neither as 'args' nor in 'cfg'; if the "
            "options were removed, load the file, set content['args'] = argparse.Namespace(encoder_attention_heads=8, "
            "...), and save content with torch.save"
        )
    settings = {key: value for key, value in fields.items() if not isinstance(value, dict)}
    for stack in ("encoder", "decoder"):
        part = fields.get(stack)
        settings |= {f"{stack}_{key}": value for key, value in part.items()} if isinstance(part, dict) else {}
    settings = pickles.plain(settings)
    for option, what in REFUSED.items():
        if settings.get(option) not in OFF:
            raise ValueError(f"--{option.replace('_', '-')} is {settings[option]!r}: {what} is not supported")
    if (activation := settings.get("activation_fn", "relu")) not in ACTIVATIONS:
        raise ValueError(f"--activation-fn must be one of {', '.join(ACTIVATIONS)}: got {activation!r}")
    for option in ("embed_dim", "normalize_before", "learned_pos"):
        both = [settings.get(f"{stack}_{option}", False) for stack in ("encoder", "decoder")]
        dashed = option.replace("_", "-")
        if f"decoder_{option}" in settings and both[0] != both[1]:
            raise ValueError(
                f"--encoder-{dashed} and --decoder-{dashed} must be equal: got {both[0]!r} and {both[1]!r}"
            )
    return settings


def upgraded(tensors: Mapping[str, ndarray]) -> dict[str, ndarray]:
    """Convert tensors of older fairseq versions, which fuse projections and number the norms, to the current format.

    Raises:
        ValueError: If a fused projection cannot be split into three.
    """
    found: dict[str, ndarray] = {}
    for name, array in tensors.items():
        if ".in_proj_" in name:
            found |= three_projections(name, array)
        elif numbered := re.fullmatch(r"((?:en|de)coder)(\.layers\.\d+)\.layer_norms\.(\d)(\..*)", name):
            new = "final_layer_norm" if numbered[1] + numbered[3] == "encoder1" else NORMS.get(numbered[3], name)
            found[f"{numbered[1]}{numbered[2]}.{new}{numbered[4]}"] = array
        else:
            found["decoder.output_projection.weight" if name == "decoder.embed_out" else name] = array
    return found


def config_of(settings: Mapping[str, Any], tensors: Mapping[str, ndarray]) -> tuple[TransformerConfig, tuple[str, ...]]:
    """Return the config of a model.

    The tensors determine the vocabulary sizes, ``d_model``, ``d_ff``, and ``tie_embeddings``.

    Returns:
        The config and the notes, which are empty unless the options contradict the tensors.

    Raises:
        ValueError: If a tensor that determines a size is missing or the model is not supported.
    """
    source, target = (matrix(tensors, f"{stack}.embed_tokens.weight") for stack in ("encoder", "decoder"))
    output = tensors.get("decoder.output_projection.weight", target)
    tied = (
        "all" if same(source, target) and same(target, output) else "target_output" if same(target, output) else "none"
    )
    shared = settings.get("share_all_embeddings", False)
    said = "all" if shared else "target_output" if settings.get("share_decoder_input_output_embed", False) else "none"
    notes = (f"tied embeddings are {said!r} in the options, but the tensors imply {tied!r}, which is used",)
    norms = [f"{stack}.layer_norm.weight" in tensors for stack in ("encoder", "decoder")]
    if norms[0] != norms[1]:
        raise ValueError(
            "the file contains only one of encoder.layer_norm and decoder.layer_norm; it must contain both or neither"
        )
    learned = bool(settings.get("encoder_learned_pos", False))
    table = matrix(tensors, "encoder.embed_positions.weight") if learned else None
    heads = [settings.get(f"{stack}_attention_heads", 8) for stack in ("encoder", "decoder")]
    widths = [matrix(tensors, f"{stack}.layers.0.fc1.weight").shape[0] for stack in ("encoder", "decoder")]
    config = TransformerConfig.preset(
        "fairseq",
        source_vocab_size=source.shape[0],
        target_vocab_size=target.shape[0],
        d_model=source.shape[1],
        num_heads=heads[0],
        decoder_num_heads=None if heads[0] == heads[1] else heads[1],
        d_ff=widths[0],
        decoder_d_ff=None if widths[0] == widths[1] else widths[1],
        num_encoder_layers=settings.get("encoder_layers", 6),
        num_decoder_layers=settings.get("decoder_layers", 6),
        norm_order="pre" if settings.get("encoder_normalize_before", False) else "post",
        final_norm=norms[0],
        embedding_norm="encoder.layernorm_embedding.weight" in tensors,
        scale_embedding=not settings.get("no_scale_embedding", False),
        activation=ACTIVATIONS[settings.get("activation_fn", "relu")],
        tie_embeddings=tied,
        pad_id=PAD_ID,
        bos_id=EOS_ID,
        eos_id=EOS_ID,
        **({} if table is None else {"position_encoding": "learned", "max_length": len(table)}),
    )
    return config, notes if said != tied else ()


def read_vocabulary(paths: Sequence[Path], settings: Mapping[str, Any], config: TransformerConfig) -> Vocabulary:
    """Build the vocabulary of a model from its dictionaries and, optionally, a subword model.

    Args:
        paths: One or two dictionaries (``.txt``), source first, and at most one SentencePiece model (``.model``) or
            file of byte-pair encoding merges.
        settings: Options of the model, including its languages.
        config: Config of the model.

    Raises:
        OSError: If a file cannot be read.
        UsageError: If a package that the vocabulary requires is not installed.
        ValueError: If a file has an unsupported format or the vocabulary does not fit the model.
    """
    lists = [path for path in paths if path.suffix == ".txt"]
    others = [path for path in paths if path.suffix != ".txt"]
    if not 1 <= len(lists) <= 2 or len(others) > 1:
        names = ", ".join(path.name for path in paths)
        raise ValueError(
            "a fairseq vocabulary must consist of one or two dict.txt files and, optionally, a file with BPE codes "
            f"or a .model file: got {names}"
        )
    for path in lists:  # parse each file here so that an error message identifies the user's file
        moses.read_dictionary(read_file(path), path.name)
    files = dict(zip((moses.SOURCE_LIST, moses.TARGET_LIST), map(read_file, (lists[0], lists[-1])), strict=True))
    for path in others:
        files[moses.MODEL if path.suffix == ".model" else moses.CODES] = read_file(path)
    languages = [settings.get(f"{side}_lang") for side in ("source", "target")]
    if all(languages):
        files[moses.SETTINGS] = json.dumps({"langs": languages}).encode()
    return checked(moses.MosesVocabulary(files), config.source_vocab_size, config.target_vocab_size)
