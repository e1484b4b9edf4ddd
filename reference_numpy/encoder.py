"""The encoder (Vaswani et al., 2017, section 3.1, left half of Figure 1).

Axes: B batch, S source length.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from reference_numpy.attention import MultiHeadAttention
from reference_numpy.feed_forward import make_feed_forward
from reference_numpy.layers import Dropout, make_norm
from reference_numpy.relative_position import RelativePositionBias
from transformer_spec.config import TransformerConfig
from transformer_spec.shapes import Bool, Float
from transformer_spec.taps import Tap, no_tap, within


class EncoderLayer:
    """Encoder layer: self-attention followed by a feed-forward network (section 3.1).

    The output of each sublayer is ``LayerNorm(x + Sublayer(x))`` if ``config.norm_order`` is ``post``, as in the paper,
    and ``x + Sublayer(LayerNorm(x))`` if it is ``pre``.

    Args:
        config: Model configuration.
        dtype: Dtype of the parameters, ``float32`` or ``float64``.

    Taps:
        self_attention, feed_forward: Prefixes of the sublayers' taps.
        self_attention_norm.output, feed_forward_norm.output: Outputs of the layer norms.
        output: Output of the layer.
    """

    def __init__(self, config: TransformerConfig, dtype: str = "float32") -> None:
        self.norm_order = config.norm_order
        self.self_attention = MultiHeadAttention(config, dtype)
        self.self_attention_norm = make_norm(config, dtype)
        self.feed_forward = make_feed_forward(config, dtype)
        self.feed_forward_norm = make_norm(config, dtype)
        self.dropout = Dropout(config.dropout.residual)

    def __call__(
        self,
        x: Float[ndarray, "B S d_model"],
        mask: Bool[ndarray, "#B #H #S #S"] | None = None,
        tap: Tap = no_tap,
        rng: np.random.Generator | None = None,
        bias: Float[ndarray, "1 H S S"] | None = None,
    ) -> Float[ndarray, "B S d_model"]:
        """Return the output of the layer for each source position.

        Args:
            x: One vector per source position.
            mask: True if a query position may attend to a key position. If None, no mask is applied.
            tap: Callback that is called as ``tap(name, value)`` with each named intermediate value. Its return value
                replaces the intermediate value.
            rng: Random generator for dropout. If None, dropout is disabled (inference).
            bias: Relative position bias of self-attention. If None, no bias is added.
        """
        if self.norm_order == "post":
            attended = self.self_attention(x, x, mask, within(tap, "self_attention"), rng, bias=bias)
            attended = self.dropout(attended, rng, tap, "self_attention.output")
            x = tap("self_attention_norm.output", self.self_attention_norm(x + attended))
            transformed = self.feed_forward(x, within(tap, "feed_forward"), rng)
            transformed = self.dropout(transformed, rng, tap, "feed_forward.output")
            x = tap("feed_forward_norm.output", self.feed_forward_norm(x + transformed))
        else:
            normed = tap("self_attention_norm.output", self.self_attention_norm(x))
            attended = self.self_attention(normed, normed, mask, within(tap, "self_attention"), rng, bias=bias)
            x = x + self.dropout(attended, rng, tap, "self_attention.output")
            normed = tap("feed_forward_norm.output", self.feed_forward_norm(x))
            transformed = self.feed_forward(normed, within(tap, "feed_forward"), rng)
            x = x + self.dropout(transformed, rng, tap, "feed_forward.output")
        return tap("output", x)


class EncoderStack:
    """Encoder stack: a sequence of encoder layers that maps the embedded source to the encoder memory.

    Args:
        config: Model configuration, which defines the number of layers and whether the stack ends with a layer norm.
        dtype: Dtype of the parameters, ``float32`` or ``float64``.

    Taps:
        relative_bias.output: Relative position bias, if ``config.position_encoding`` is ``relative``.
        layers.{i}: Prefix of the taps of layer i.
        output: Output of the stack, before dropout.
    """

    def __init__(self, config: TransformerConfig, dtype: str = "float32") -> None:
        is_relative = config.position_encoding == "relative"
        self.relative_bias = RelativePositionBias(config, dtype, bidirectional=True) if is_relative else None
        self.layers = [EncoderLayer(config, dtype) for _ in range(config.num_encoder_layers)]
        self.final_norm = make_norm(config, dtype) if config.final_norm else None
        self.dropout = Dropout(config.dropout.final)

    def __call__(
        self,
        x: Float[ndarray, "B S d_model"],
        mask: Bool[ndarray, "#B #H #S #S"] | None = None,
        tap: Tap = no_tap,
        rng: np.random.Generator | None = None,
    ) -> Float[ndarray, "B S d_model"]:
        """Return the encoder memory: one vector per source position.

        Args:
            x: One embedding per source position.
            mask: True if a query position may attend to a key position. If None, no mask is applied.
            tap: Callback that is called as ``tap(name, value)`` with each named intermediate value. Its return value
                replaces the intermediate value.
            rng: Random generator for dropout. If None, dropout is disabled (inference).
        """
        bias = None
        if self.relative_bias is not None:
            positions = np.arange(x.shape[1])
            bias = tap("relative_bias.output", self.relative_bias(positions - positions[:, None]))  # [1, H, S, S]
        for i, layer in enumerate(self.layers):
            x = layer(x, mask, within(tap, f"layers.{i}"), rng, bias)
        if self.final_norm is not None:
            x = self.final_norm(x)
        return self.dropout(tap("output", x), rng, tap, "output")
