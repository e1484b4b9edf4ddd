"""Convert between a config and the options that Marian stores in its model files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy import ndarray

from transformer_parity.apps.checkpoints.name_mapping import matrix
from transformer_parity.apps.containers.directory import read_bytes
from transformer_spec.config import TransformerConfig
from transformer_spec.search import Search
from transformer_spec.search_rules import SearchRules

SETTINGS = "special:model.yml"
EOS_ID, UNK_ID = 0, 1  # Marian's constants Word::DEFAULT_EOS_ID and Word::DEFAULT_UNK_ID

# Supported values of each option, and the reason for the restriction. Old files may lack some of these options, because
# their models do not use the corresponding features.
NEEDED: dict[str, tuple[tuple[object, ...], str]] = {
    "type": (("transformer",), "only Transformers are supported"),
    "transformer-decoder-autoreg": (("self-attention",), "SSRU (rnn) and average attention are not supported"),
    "transformer-ffn-activation": (("swish", "relu"), "Marian's gelu, x * sigmoid(1.702 x), is not supported"),
    "transformer-ffn-depth": ((2,), "a feed-forward block must have two layers"),
    "transformer-decoder-ffn-depth": ((0, 2), "a feed-forward block must have two layers"),
    "transformer-no-projection": ((False,), "attention without an output projection is not supported"),
    "transformer-tied-layers": (([],), "layers that share weights are not supported"),
    "transformer-pool": ((False,), "pooling of the encoder memory is not supported"),
    "transformer-no-bias": ((False,), "layers without biases are not supported"),
    "transformer-no-affine": ((False,), "layer norms without scale and bias are not supported"),
    "transformer-attention-mask": (("default",), "linear attention biases (ALiBi) are not supported"),
    "transformer-disable-position-embeddings": ((False,), "models without positions are not supported"),
    "transformer-postprocess-top": (("", "n", "d", "dn", "nd"), "only a final norm may follow a stack"),
    "transformer-postprocess-emb": (("", "n", "d", "dn", "nd"), "only a norm may follow the embedding"),
    "lemma-dim-emb": ((0,), "factored vocabularies are not supported"),
    "ulr": ((False,), "universal language representations are not supported"),
    "right-left": ((False,), "generation from right to left is not supported"),
}
# Order of the norms for each pair of --transformer-preprocess and --transformer-postprocess, ignoring dropout.
ORDERS = {("", "an"): "post", ("n", "a"): "pre"}

# Other options that Marian saves with a model. Marian's programs fail if one of these options is missing.
DEFAULTS: dict[str, object] = {
    "type": "transformer",
    "version": "v1.12.0",
    "dim-rnn": 1024,
    "enc-type": "bidirectional",
    "enc-cell": "gru",
    "enc-cell-depth": 1,
    "dec-cell": "gru",
    "dec-cell-base-depth": 2,
    "dec-cell-high-depth": 1,
    "skip": False,
    "layer-normalization": False,
    "right-left": False,
    "input-types": [],
    "bert-train-type-embeddings": True,
    "bert-type-vocab-size": 2,
    "factors-combine": "sum",
    "factors-dim-emb": 0,
    "lemma-dependency": "",
    "lemma-dim-emb": 0,
    "ulr": False,
    "ulr-dim-emb": 0,
    "ulr-trainable-transformation": False,
    "transformer-aan-activation": "swish",
    "transformer-aan-depth": 2,
    "transformer-aan-nogate": False,
    "transformer-decoder-autoreg": "self-attention",
    "transformer-decoder-ffn-depth": 0,
    "transformer-dim-aan": 2048,
    "transformer-ffn-depth": 2,
    "transformer-guided-alignment-layer": "last",
    "transformer-no-projection": False,
    "transformer-pool": False,
    "transformer-rnn-projection": False,
    "transformer-tied-layers": [],
}


def read_settings(tensors: Mapping[str, ndarray]) -> dict[str, Any]:
    """Read the options from a model file, and check that they describe a supported model.

    Raises:
        ValueError: If the file contains no options or an option has an unsupported value. The message identifies the
            option and gives the reason.
    """
    from transformer_parity.apps.containers import yaml

    if SETTINGS not in tensors:
        raise ValueError(f"the file does not contain the array {SETTINGS} with Marian's options")
    settings = yaml.read(tensors[SETTINGS].tobytes().rstrip(b"\0"), SETTINGS)
    for option, (values, reason) in NEEDED.items():
        if option in settings and settings[option] not in values:
            allowed = " or ".join(repr(value) for value in values)
            raise ValueError(f"--{option} must be {allowed}: got {settings[option]!r}; {reason}")
    _norm_order(settings)
    return settings


def _norm_order(settings: Mapping[str, Any]) -> str:
    operations = (settings.get("transformer-preprocess", ""), settings.get("transformer-postprocess", "dan"))
    before, after = (str(option).replace("d", "") for option in operations)
    if (before, after) not in ORDERS:
        raise ValueError(
            "--transformer-preprocess and --transformer-postprocess must be '' and 'dan', or 'n' and 'da': "
            f"got {operations[0]!r} and {operations[1]!r}"
        )
    return ORDERS[before, after]


def config_of(settings: Mapping[str, Any], tensors: Mapping[str, ndarray]) -> TransformerConfig:
    """Return the config of a model to which no padding token has been appended yet.

    The tensors determine the vocabulary sizes, ``d_model``, ``d_ff``, and ``tie_embeddings``.

    Raises:
        ValueError: If a tensor that determines a size is missing or the options are invalid.
    """
    tables = [_table(tensors, f"{stack}_Wemb") for stack in ("encoder", "decoder")]
    untied = any(f"decoder_ff_logit_out_{kind}" in tensors for kind in ("W", "Wt"))
    positions = tensors.get("Wpos")
    learned = {"position_encoding": "learned", "scale_embedding": False}
    d_ff, decoder_d_ff = (matrix(tensors, f"{stack}_l1_ffn_W1").shape[1] for stack in ("encoder", "decoder"))
    return TransformerConfig.preset(
        "marian_cpp",
        source_vocab_size=tables[0].shape[0],
        target_vocab_size=tables[1].shape[0],
        d_model=tables[0].shape[1],
        d_ff=d_ff,
        decoder_d_ff=None if decoder_d_ff == d_ff else decoder_d_ff,
        num_heads=settings.get("transformer-heads", 8),
        num_encoder_layers=settings.get("enc-depth", 6),
        num_decoder_layers=settings.get("dec-depth", 6),
        norm_order=_norm_order(settings),
        final_norm="n" in settings.get("transformer-postprocess-top", ""),
        embedding_norm="n" in settings.get("transformer-postprocess-emb", "d"),
        activation=settings.get("transformer-ffn-activation", "swish"),
        tie_embeddings="none" if untied else "all" if tables[0] is tables[1] else "target_output",
        output_bias="decoder_ff_logit_out_b" in tensors,
        pad_id=0,
        bos_id=0,
        eos_id=EOS_ID,
        **({} if positions is None else {**learned, "max_length": len(matrix(tensors, "Wpos"))}),
    )


def _table(tensors: Mapping[str, ndarray], name: str) -> ndarray:
    return matrix(tensors, "Wemb" if "Wemb" in tensors else name)


def contradictions(settings: Mapping[str, Any], tensors: Mapping[str, ndarray]) -> list[str]:
    """Return one sentence for each option that is inconsistent with the tensors.

    The model is imported as the tensors imply, not as these options specify.
    """
    shared = "Wemb" in tensors
    tied = not any(f"decoder_ff_logit_out_{kind}" in tensors for kind in ("W", "Wt"))
    both = settings.get("tied-embeddings-all", False)
    found = {
        "tied-embeddings-src": (bool(both or settings.get("tied-embeddings-src", False)), shared),
        "tied-embeddings": (bool(both or settings.get("tied-embeddings", False)), tied),
        "transformer-train-position-embeddings": (
            bool(settings.get("transformer-train-position-embeddings", False)),
            "Wpos" in tensors,
        ),
        "output-omit-bias": (bool(settings.get("output-omit-bias", False)), "decoder_ff_logit_out_b" not in tensors),
    }
    return [
        f"--{option} is {said}, but the tensors imply {is_so}, which is used"
        for option, (said, is_so) in found.items()
        if said != is_so
    ]


def read_search(path: Path) -> Search:
    """Return the search settings in ``decoder.yml``, or marian-decoder's defaults if the file does not exist.

    Raises:
        ValueError: If the file is not valid YAML or contains unsupported settings.
    """
    from transformer_parity.apps.containers import yaml

    settings = yaml.read(read_bytes(path, yaml.LARGEST), path.name) if path.is_file() else {}
    if settings.get("word-penalty", 0):
        raise ValueError(
            f"word-penalty in {path.name} must be 0 because word penalties are not supported: "
            f"got {settings['word-penalty']}"
        )
    penalty = float(settings.get("normalize", 0))
    unknown = () if settings.get("allow-unk", False) else (UNK_ID,)
    rules = SearchRules.preset("marian", banned_ids=unknown)
    return Search.preset("marian", beam_size=settings.get("beam-size", 12), length_penalty=penalty, rules=rules)


def settings_of(config: TransformerConfig, shared: bool) -> dict[str, object]:
    """Return all options that Marian saves with a model."""
    pre = config.norm_order == "pre"
    return {
        **DEFAULTS,
        "dim-vocabs": [config.source_vocab_size, config.target_vocab_size],
        "dim-emb": config.d_model,
        "enc-depth": config.num_encoder_layers,
        "dec-depth": config.num_decoder_layers,
        "tied-embeddings": config.tie_embeddings == "target_output",
        "tied-embeddings-src": shared and config.tie_embeddings == "none",
        "tied-embeddings-all": config.tie_embeddings == "all",
        "output-omit-bias": not config.output_bias,
        "transformer-heads": config.num_heads,
        "transformer-dim-ffn": config.d_ff,
        "transformer-decoder-dim-ffn": config.decoder_d_ff or 0,
        "transformer-ffn-activation": config.activation,
        "transformer-preprocess": "n" if pre else "",
        "transformer-postprocess": "da" if pre else "dan",
        "transformer-postprocess-emb": "nd" if config.embedding_norm else "d",
        "transformer-postprocess-top": "n" if config.final_norm else "",
        # Marian's command line sets the first option, but src/models/transformer.h reads the second one.
        "transformer-train-position-embeddings": config.position_encoding == "learned",
        "transformer-train-positions": config.position_encoding == "learned",
    }
