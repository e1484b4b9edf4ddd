"""Marian's options, as its files hold them: which model they describe, and those of a model that is written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy import ndarray

from transformer_parity.apps.checkpoints.name_mapping import matrix
from transformer_parity.apps.containers.folder import read_bytes
from transformer_spec.config import TransformerConfig
from transformer_spec.search import Search
from transformer_spec.search_rules import SearchRules

SETTINGS = "special:model.yml"
EOS_ID, UNK_ID = 0, 1  # Word::DEFAULT_EOS_ID and DEFAULT_UNK_ID

# Options for which there is one value here, and what else a model would be. What an old file does not have is meant so.
NEEDED: dict[str, tuple[tuple[object, ...], str]] = {
    "type": (("transformer",), "only transformers are read"),
    "transformer-decoder-autoreg": (("self-attention",), "decoders with SSRU (rnn) or average attention are others"),
    "transformer-ffn-activation": (("swish", "relu"), "Marian's gelu is x * sigmoid(1.702 x), which no field names"),
    "transformer-ffn-depth": ((2,), "a feed-forward block has two layers here"),
    "transformer-decoder-ffn-depth": ((0, 2), "a feed-forward block has two layers here"),
    "transformer-no-projection": ((False,), "attention has an output projection here"),
    "transformer-tied-layers": (([],), "layers share no weights here"),
    "transformer-pool": ((False,), "a decoder attends to the whole memory here"),
    "transformer-no-bias": ((False,), "Marian's layers have biases here"),
    "transformer-no-affine": ((False,), "a norm has a scale and a bias here"),
    "transformer-attention-mask": (("default",), "there are no slopes on the attention (ALiBi) here"),
    "transformer-disable-position-embeddings": ((False,), "a model has positions here"),
    "transformer-postprocess-top": (("", "n", "d", "dn", "nd"), "a final norm is all that may follow a stack here"),
    "transformer-postprocess-emb": (("", "n", "d", "dn", "nd"), "a norm is all that may follow the embedding here"),
    "lemma-dim-emb": ((0,), "factored vocabularies are not read"),
    "ulr": ((False,), "universal language representations are not read"),
    "right-left": ((False,), "the target is written from left to right here"),
}
ORDERS = {("", "an"): "post", ("n", "a"): "pre"}  # by --transformer-preprocess and -postprocess, without dropout

# What else Marian saves with a model; its programs stop where an option is missing.
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
    """Return the options that a file holds, and refuse those that describe another model.

    Raises:
        ValueError: There are none, or one has a value that is not supported; the message names it and says why.
    """
    from transformer_parity.apps.containers import yaml

    if SETTINGS not in tensors:
        raise ValueError(f"a model of Marian's must hold its options in {SETTINGS}: got {len(tensors)} arrays without")
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
    """Return the config of a model without its padding: sizes and ties as the tensors have them.

    Raises:
        ValueError: A tensor that determines a size is missing, or the options describe no model.
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
    """Return one sentence for each option that the tensors contradict; the tensors take precedence."""
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
        f"--{option} is {said}, the tensors say {is_so}: taken from the tensors"
        for option, (said, is_so) in found.items()
        if said != is_so
    ]


def read_search(path: Path) -> Search:
    """Return the search that ``decoder.yml`` asks for, or marian-decoder's defaults.

    Raises:
        ValueError: It is no YAML, or asks for what is not a search.
    """
    from transformer_parity.apps.containers import yaml

    settings = yaml.read(read_bytes(path, yaml.LARGEST), path.name) if path.is_file() else {}
    if settings.get("word-penalty", 0):
        raise ValueError(f"{path.name}: word-penalty must be 0: got {settings['word-penalty']}; no search here has one")
    penalty = float(settings.get("normalize", 0))
    unknown = () if settings.get("allow-unk", False) else (UNK_ID,)
    rules = SearchRules.preset("marian", banned_ids=unknown)
    return Search.preset("marian", beam_size=settings.get("beam-size", 12), length_penalty=penalty, rules=rules)


def settings_of(config: TransformerConfig, shared: bool) -> dict[str, object]:
    """Return the options of a model, all that Marian saves with one."""
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
        # The option, and what src/models/transformer.h calls it.
        "transformer-train-position-embeddings": config.position_encoding == "learned",
        "transformer-train-positions": config.position_encoding == "learned",
    }
