"""Inputs that let nothing hide.

With freshly initialised weights and no padding, seven real mistakes leave the logits exactly as they are: a bias of
zero cannot be missed, a scale of one need not be loaded, and no mask is needed where nothing is padded.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from reference_numpy.config import TransformerConfig
from reference_numpy.weights import init_weights

TINY = 3e-3  # makes the variance of the next norm's input comparable to its epsilon


def hard_weights(config: TransformerConfig, seed: int = 0) -> dict[str, ndarray]:
    """Return float32 weights that make every known mistake visible.

    Biases and scales are random; query and key kernels are doubled, so that attention is sharp. In a post-norm model,
    one norm of the first encoder layer and of the last decoder layer is scaled down, with the feed-forward network
    behind it, so that the next norm sees a variance as small as its epsilon.
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
    shrunk_at = ("encoder.layers.0.self_attention", f"decoder.layers.{config.num_decoder_layers - 1}.cross_attention")
    for block in shrunk_at if config.norm_order == "post" else ():
        layer = block.rpartition(".")[0]
        shrunk = [f"{block}_norm.scale", f"{block}_norm.bias", f"{layer}.feed_forward.output_proj.kernel"]
        if config.feed_forward_bias:
            shrunk.append(f"{layer}.feed_forward.output_proj.bias")
        for name in shrunk:
            weights[name] = TINY * weights[name]
        weights[f"{layer}.feed_forward.inner_proj.kernel"] = weights[f"{layer}.feed_forward.inner_proj.kernel"] / TINY
    return {name: array.astype(np.float32) for name, array in weights.items()}


def padded_ids(rng: np.random.Generator, vocab_size: int, pad_id: int, lengths: list[int], width: int) -> ndarray:
    """Return random token ids, padded behind the given lengths."""
    free = np.array([token for token in range(vocab_size) if token != pad_id])
    ids = np.full((len(lengths), width), pad_id)
    for row, length in enumerate(lengths):
        ids[row, :length] = rng.choice(free, length)
    return ids
