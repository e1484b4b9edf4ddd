"""The encoder (Vaswani et al., 2017, section 3.1, left half of Figure 1).

Axes: B batch, S source length.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from transformer_spec.config import TransformerConfig
from transformer_spec.shapes import Bool, Float
from transformer_spec.taps import Tap, no_tap, within
from transformer_torch.attention import MultiHeadAttention
from transformer_torch.feed_forward import make_feed_forward
from transformer_torch.layers import Dropout, make_norm
from transformer_torch.relative_position import RelativePositionBias


class EncoderLayer(nn.Module):
    """Encoder layer: self-attention followed by a feed-forward network (section 3.1).

    The output of each sublayer is ``LayerNorm(x + Sublayer(x))`` if ``config.norm_order`` is ``post``, as in the paper,
    and ``x + Sublayer(LayerNorm(x))`` if it is ``pre``.

    Args:
        config: Model configuration.
        dtype: Dtype of the parameters, as a ``torch.dtype`` or its name.

    Taps:
        self_attention, feed_forward: Prefixes of the sublayers' taps.
        self_attention_norm.output, feed_forward_norm.output: Outputs of the layer norms.
        output: Output of the layer.
    """

    def __init__(self, config: TransformerConfig, dtype: torch.dtype | str = "float32") -> None:
        super().__init__()
        self.norm_order = config.norm_order
        self.self_attention = MultiHeadAttention(config, dtype)
        self.self_attention_norm = make_norm(config, dtype)
        self.feed_forward = make_feed_forward(config, dtype)
        self.feed_forward_norm = make_norm(config, dtype)
        self.dropout = Dropout(config.dropout.residual)

    def forward(
        self,
        x: Float[Tensor, "B S d_model"],
        mask: Bool[Tensor, "#B #H #S #S"] | None = None,
        tap: Tap = no_tap,
        bias: Float[Tensor, "1 H S S"] | None = None,
    ) -> Float[Tensor, "B S d_model"]:
        """Return the output of the layer for each source position.

        Args:
            x: One vector per source position.
            mask: True if a query position may attend to a key position. If None, no mask is applied.
            tap: Callback that is called as ``tap(name, value)`` with each named intermediate value. Its return value
                replaces the intermediate value.
            bias: Relative position bias of self-attention. If None, no bias is added.
        """
        if self.norm_order == "post":
            attended = self.self_attention(x, x, mask, within(tap, "self_attention"), bias=bias)
            x = tap("self_attention_norm.output", self.self_attention_norm(x + self.dropout(attended)))
            transformed = self.feed_forward(x, within(tap, "feed_forward"))
            x = tap("feed_forward_norm.output", self.feed_forward_norm(x + self.dropout(transformed)))
        else:
            normed = tap("self_attention_norm.output", self.self_attention_norm(x))
            attended = self.self_attention(normed, normed, mask, within(tap, "self_attention"), bias=bias)
            x = x + self.dropout(attended)
            normed = tap("feed_forward_norm.output", self.feed_forward_norm(x))
            x = x + self.dropout(self.feed_forward(normed, within(tap, "feed_forward")))
        return tap("output", x)


class EncoderStack(nn.Module):
    """Encoder stack: a sequence of encoder layers that maps the embedded source to the encoder memory.

    Args:
        config: Model configuration, which defines the number of layers and whether the stack ends with a layer norm.
        dtype: Dtype of the parameters, as a ``torch.dtype`` or its name.

    Taps:
        relative_bias.output: Relative position bias, if ``config.position_encoding`` is ``relative``.
        layers.{i}: Prefix of the taps of layer i.
        output: Output of the stack, before dropout.
    """

    def __init__(self, config: TransformerConfig, dtype: torch.dtype | str = "float32") -> None:
        super().__init__()
        is_relative = config.position_encoding == "relative"
        self.relative_bias = RelativePositionBias(config, dtype, bidirectional=True) if is_relative else None
        self.layers = nn.ModuleList(EncoderLayer(config, dtype) for _ in range(config.num_encoder_layers))
        self.final_norm = make_norm(config, dtype) if config.final_norm else None
        self.dropout = Dropout(config.dropout.final)
        self.activation_checkpointing = False  # a Trainer can set this to True during a step, to save memory

    def forward(
        self,
        x: Float[Tensor, "B S d_model"],
        mask: Bool[Tensor, "#B #H #S #S"] | None = None,
        tap: Tap = no_tap,
    ) -> Float[Tensor, "B S d_model"]:
        """Return the encoder memory: one vector per source position.

        Args:
            x: One embedding per source position.
            mask: True if a query position may attend to a key position. If None, no mask is applied.
            tap: Callback that is called as ``tap(name, value)`` with each named intermediate value. Its return value
                replaces the intermediate value.
        """
        bias = None
        if self.relative_bias is not None:
            positions = torch.arange(x.shape[1], device=x.device)
            bias = tap("relative_bias.output", self.relative_bias(positions - positions[:, None]))  # [1, H, S, S]
        for i, layer in enumerate(self.layers):
            if self.activation_checkpointing and tap is no_tap:
                x = checkpoint(layer, x, mask, bias=bias, use_reentrant=False)
            else:
                x = layer(x, mask, within(tap, f"layers.{i}"), bias)
        if self.final_norm is not None:
            x = self.final_norm(x)
        return self.dropout(tap("output", x))
