"""Weights and inputs that expose bugs.

With newly initialized weights and no padding, seven bugs from real code don't change the logits. For example, a missing
bias has no effect if all biases are 0, a scale that isn't loaded has no effect if all scales are 1, and a missing mask
has no effect without padding.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping

import numpy as np
from numpy import ndarray

from transformer_spec.config import TransformerConfig
from transformer_spec.init_weights import init_weights

BATCH, SOURCE, TARGET = 4, 9, 7


def generator(name: str) -> np.random.Generator:
    """Return a random generator seeded by a name."""
    return np.random.default_rng(list(name.encode()))


def normal_floats(name: str, *shape: int) -> ndarray:
    """Return standard normal float64 values that are exactly representable in float32."""
    return generator(name).normal(size=shape).astype(np.float32).astype(np.float64)


def token_ids(config: TransformerConfig, source: int = SOURCE, target: int = TARGET) -> dict[str, ndarray]:
    """Return a batch in which both the source and the target have full rows, shorter rows, and a row with one token."""
    rng = generator("ids")
    return {
        "source_ids": padded_ids(
            rng, config.source_vocab_size, config.pad_id, [source, -(-source // 2), 1, source - 1], source
        ),
        "target_ids": padded_ids(
            rng, config.target_vocab_size, config.pad_id, [target, -(-target // 2), 1, target], target
        ),
    }


def padding_mask(length: int, *lengths: int) -> ndarray:
    """Return a mask [B, length] for sequences of the given lengths: False for padding."""
    return np.arange(length) < np.array(lengths)[:, None]


def model_batches(config: TransformerConfig) -> dict[str, dict[str, ndarray]]:
    """Return a dict from names to batches for full models, starting with the hardest batch."""
    ids = token_ids(config)
    empty_source = ids["source_ids"].copy()
    empty_source[1] = config.pad_id
    late_start = ids["target_ids"].copy()
    late_start[1, 0] = config.pad_id
    return {
        "padded": ids,
        "source_as_long_as_target": token_ids(config, TARGET, TARGET),
        "one_token": {name: array[:, :1] for name, array in ids.items()},
        "one_sentence": {name: array[:1] for name, array in ids.items()},
        "source_all_padding": {**ids, "source_ids": empty_source},
        "starts_with_padding": {**ids, "target_ids": late_start},
    }


def with_labels(ids: Mapping[str, ndarray], config: TransformerConfig) -> dict[str, ndarray]:
    """Add labels to a batch. The labels are the target without its first token, followed by EOS and padding."""
    target_ids = ids["target_ids"]
    labels = np.full_like(target_ids, config.pad_id)
    labels[:, :-1] = target_ids[:, 1:]
    ends = np.where((labels == config.pad_id).any(1), (labels == config.pad_id).argmax(1), labels.shape[1] - 1)
    labels[np.arange(len(labels)), ends] = config.eos_id
    return {**ids, "labels": labels}


TINY = 3e-3  # factor that makes the variance of the input to the next norm comparable to that norm's epsilon


def hard_weights(config: TransformerConfig, seed: int = 0) -> dict[str, ndarray]:
    """Return float32 weights for which every known bug changes the results.

    Biases (including relative position biases) and scales are random. Query and key kernels are multiplied by 2 to
    sharpen attention. In a post-norm model, two norms are scaled down: the norm after self-attention in the first
    encoder layer, and the norm after cross-attention in the last decoder layer. In these two layers, the output of the
    feed-forward network is scaled down as well. The variance of the next norm's input is then as small as the norm's
    epsilon.
    """
    rng = np.random.default_rng([seed, 1])
    weights = init_weights(config, seed)
    for name, array in weights.items():
        parent, kind = name.split(".")[-2:] if name.count(".") else ("", name)
        if kind == "scale":
            weights[name] = rng.uniform(0.5, 1.5, array.shape)
        elif kind == "bias":
            weights[name] = rng.normal(0.0, 0.2 if parent.endswith("norm") else 0.1, array.shape)
        elif kind == "kernel" and parent in ("query_proj", "key_proj"):
            weights[name] = 2.0 * array
        elif parent == "relative_bias":
            weights[name] = rng.normal(0.0, 0.5, array.shape)
    shrunk_at = ("encoder.layers.0.self_attention", f"decoder.layers.{config.num_decoder_layers - 1}.cross_attention")
    for block in shrunk_at if config.norm_order == "post" else ():
        layer = block.rpartition(".")[0]
        output_proj = f"{layer}.feed_forward.output_proj"
        for name in (f"{block}_norm.scale", f"{block}_norm.bias", f"{output_proj}.kernel", f"{output_proj}.bias"):
            if name in weights:  # depending on the config, there are no biases
                weights[name] = TINY * weights[name]
        weights[f"{layer}.feed_forward.inner_proj.kernel"] = weights[f"{layer}.feed_forward.inner_proj.kernel"] / TINY
    return {name: array.astype(np.float32) for name, array in weights.items()}


# Factors that enlarge weights so much that a naive exp overflows for scores in float32 and for logits in float64. The
# inner activations of the feed-forward networks exceed 20, which exposes ReLU6.
SHARPER, INNER_WIDER, WIDER, LOUDER = 12, 10, 5, 500


def sharp_weights(config: TransformerConfig, seed: int = 0) -> dict[str, ndarray]:
    """Return ``hard_weights`` in which the queries are scaled up, so that scores exceed 88 and attention saturates."""
    return _scaled(hard_weights(config, seed), {**SHARP, **_wide(config)})


def loud_weights(config: TransformerConfig, seed: int = 0) -> dict[str, ndarray]:
    """Return ``hard_weights`` in which the decoder's last norm is scaled up, so that logits exceed 709."""
    weights = hard_weights(config, seed)
    last = _last_norm(config, weights)
    louder = {f"{last}.*": LOUDER} if last else {}
    return _scaled(weights, {**louder, **_wide(config)})


def large_weights(config: TransformerConfig, seed: int = 0) -> dict[str, ndarray]:
    """Return ``hard_weights`` in which both the queries and the last norm are scaled up."""
    return _scaled(loud_weights(config, seed), SHARP)


LIKELIER = 0.45  # increase of the EOS logit, in nats


def ending_weights(config: TransformerConfig, seed: int = 0) -> dict[str, ndarray]:
    """Return ``hard_weights`` with a higher probability of EOS, so that hypotheses of many lengths compete.

    A multiple of the last norm's bias, if it has one, is added to the EOS row of the embedding matrix or, if the output
    projection isn't tied, to the EOS column of the output projection.
    """
    weights = hard_weights(config, seed)
    last = _last_norm(config, weights)
    table = {"all": "source_embedding.table", "target_output": "target_embedding.table"}.get(config.tie_embeddings)
    if f"{last}.bias" in weights:
        bias = weights[f"{last}.bias"]
        rows = weights[table] if table else weights["output_proj.kernel"].T
        rows[config.eos_id] += np.float32(LIKELIER) * bias / (bias @ bias)
    return weights


def _last_norm(config: TransformerConfig, weights: Mapping[str, ndarray]) -> str:
    """Return the name of the norm before the output projection, or an empty string if there is none."""
    if config.norm_order != "post" and not config.final_norm:
        return ""
    scales = [name for name in weights if name.startswith("decoder.") and name.endswith("norm.scale")]
    return scales[-1].removesuffix(".scale")


# Sharp attention amplifies the rounding errors of its inputs, so only the attention in the first layers is sharpened.
SHARP = {"*.layers.0.*_attention.query_proj.kernel": SHARPER}


def _wide(config: TransformerConfig) -> dict[str, int]:
    """Return factors that scale up weights so that activations exceed 100.

    If the encoder doesn't end with a norm, the encoder's weights are not scaled, because otherwise all cross-attention
    scores would become large.
    """
    is_normalized = config.norm_order == "post" or config.final_norm
    feed_forward = f"{'' if is_normalized else 'decoder'}*.feed_forward"
    return {f"{feed_forward}.inner_proj.*": INNER_WIDER, f"{feed_forward}.output_proj.*": WIDER}


WEIGHTS = {
    "usual": hard_weights,
    "sharp": sharp_weights,
    "loud": loud_weights,
    "large": large_weights,
    "ending": ending_weights,
}


def _scaled(weights: Mapping[str, ndarray], factors: Mapping[str, int]) -> dict[str, ndarray]:
    """Return the weights after multiplying each weight whose name matches a pattern by the factor of that pattern."""
    found = dict(weights)
    for pattern, factor in factors.items():
        found |= {name: np.float32(factor) * weights[name] for name in fnmatch.filter(weights, pattern)}
    return found


def padded_ids(rng: np.random.Generator, vocab_size: int, pad_id: int, lengths: list[int], width: int) -> ndarray:
    """Return random token ids with the given lengths, padded to a fixed width."""
    free = np.array([token for token in range(vocab_size) if token != pad_id])
    ids = np.full((len(lengths), width), pad_id)
    for row, length in enumerate(lengths):
        ids[row, :length] = rng.choice(free, length)
    return ids
