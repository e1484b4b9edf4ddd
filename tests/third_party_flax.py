"""A transcription of Flax's WMT example with our weights. Flax distributes it as an example, not as a package."""

from __future__ import annotations

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from third_party import split_heads_off, timing_signal, under

from reference_numpy import TransformerConfig


class WmtBlock(nn.Module):
    """A layer of the encoder or the decoder in Flax's WMT example: pre-norm, without biases in the attention."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x, mask, memory=None, memory_mask=None):
        attention = {"num_heads": self.config.num_heads, "use_bias": False}
        normed = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(**attention)(normed, mask=mask)
        if memory is not None:
            normed = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(**attention)(normed, memory, mask=memory_mask)
        inner = nn.relu(nn.Dense(self.config.d_ff)(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(inner)


class WmtTransformer(nn.Module):
    """Flax's WMT example with shared embeddings. It divides logits by sqrt(d_model) instead of scaling embeddings."""

    config: TransformerConfig  # only its sizes are used

    @nn.compact
    def __call__(self, source, labels):
        config = self.config
        embed = nn.Embed(config.target_vocab_size, config.d_model, name="shared_embedding")
        x = embed(source) + timing_signal(source.shape[1], config.d_model).numpy()
        mask = nn.make_attention_mask(source > 0, source > 0)
        for i in range(config.num_encoder_layers):
            x = WmtBlock(config, name=f"encoder_{i}")(x, mask)
        memory = nn.LayerNorm(name="encoder_norm")(x)

        target = jnp.pad(labels, ((0, 0), (1, 0)))[:, :-1]
        y = embed(target) + timing_signal(target.shape[1], config.d_model).numpy()
        mask = nn.combine_masks(nn.make_attention_mask(labels > 0, labels > 0), nn.make_causal_mask(labels))
        memory_mask = nn.make_attention_mask(labels > 0, source > 0)
        for i in range(config.num_decoder_layers):
            y = WmtBlock(config, name=f"decoder_{i}")(y, mask, memory, memory_mask)
        y = nn.LayerNorm(name="decoder_norm")(y)
        return embed.attend(y) / jnp.sqrt(config.d_model)


def wmt_parameters(config, weights):
    """Return the parameter tree of WmtTransformer. Its embedding matrix is ours multiplied by sqrt(d_model)."""
    table = weights["source_embedding.table"].astype(np.float64) * math.sqrt(config.d_model)
    tree = {"shared_embedding": {"embedding": table}}
    depths = {"encoder": config.num_encoder_layers, "decoder": config.num_decoder_layers}
    for stack, depth in depths.items():
        tree[f"{stack}_norm"] = under(weights, f"{stack}.final_norm.")
        attentions = ["self_attention", "cross_attention"][: 1 if stack == "encoder" else 2]
        for i in range(depth):
            path = f"{stack}.layers.{i}"
            block = tree[f"{stack}_{i}"] = {
                "Dense_0": under(weights, f"{path}.feed_forward.inner_proj."),
                "Dense_1": under(weights, f"{path}.feed_forward.output_proj."),
            }
            for j, name in enumerate(attentions):
                block[f"MultiHeadDotProductAttention_{j}"] = split_heads_off(
                    weights, f"{path}.{name}", config.num_heads
                )
            for j, name in enumerate([*attentions, "feed_forward"]):
                block[f"LayerNorm_{j}"] = under(weights, f"{path}.{name}_norm.")
    return jax.tree.map(lambda array: jnp.asarray(array, np.float64), tree)
