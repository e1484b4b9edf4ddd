"""The encoder (Vaswani et al., 2017, section 3.1, left half of Figure 1).

B batch, S source length.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from transformer_spec.config import TransformerConfig
from transformer_spec.shapes import Bool, Float
from transformer_spec.taps import Tap, no_tap, within
from transformer_torch.attention import MultiHeadAttention
from transformer_torch.feed_forward import PositionwiseFeedForward
from transformer_torch.layers import Dropout, LayerNorm


class EncoderLayer(nn.Module):
    """Let every source position gather from the others, then transform each on its own.

    Section 3.1: each sub-layer is ``LayerNorm(x + Sublayer(x))``; norm order ``pre`` is
    ``x + Sublayer(LayerNorm(x))`` instead.

    Taps:
        Those of both sub-layers; ``self_attention_norm.output``, ``feed_forward_norm.output``; ``output``.
    """

    def __init__(self, config: TransformerConfig, dtype: torch.dtype | str = "float32") -> None:
        super().__init__()
        self.norm_order = config.norm_order
        self.self_attention = MultiHeadAttention(config, dtype)
        self.self_attention_norm = LayerNorm(config, dtype)
        self.feed_forward = PositionwiseFeedForward(config, dtype)
        self.feed_forward_norm = LayerNorm(config, dtype)
        self.dropout = Dropout(config.dropout.residual)

    def forward(
        self,
        x: Float[Tensor, "B S d_model"],
        mask: Bool[Tensor, "#B #H #S #S"] | None = None,
        tap: Tap = no_tap,
    ) -> Float[Tensor, "B S d_model"]:
        """Return the layer's output for each source position; True in ``mask`` = may attend."""
        if self.norm_order == "post":
            attended = self.self_attention(x, x, mask, within(tap, "self_attention"))
            x = tap("self_attention_norm.output", self.self_attention_norm(x + self.dropout(attended)))
            transformed = self.feed_forward(x, within(tap, "feed_forward"))
            x = tap("feed_forward_norm.output", self.feed_forward_norm(x + self.dropout(transformed)))
        else:
            normed = tap("self_attention_norm.output", self.self_attention_norm(x))
            x = x + self.dropout(self.self_attention(normed, normed, mask, within(tap, "self_attention")))
            normed = tap("feed_forward_norm.output", self.feed_forward_norm(x))
            x = x + self.dropout(self.feed_forward(normed, within(tap, "feed_forward")))
        return tap("output", x)


class EncoderStack(nn.Module):
    """Turn the embedded source into the memory that the decoder reads: a stack of encoder layers.

    Taps:
        Those of each layer under ``layers.{i}``; ``output``.
    """

    def __init__(self, config: TransformerConfig, dtype: torch.dtype | str = "float32") -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(config, dtype) for _ in range(config.num_encoder_layers))
        self.final_norm = LayerNorm(config, dtype) if config.final_norm else None
        self.activation_checkpointing = False  # a Trainer switches it on for a step that is to save memory

    def forward(
        self,
        x: Float[Tensor, "B S d_model"],
        mask: Bool[Tensor, "#B #H #S #S"] | None = None,
        tap: Tap = no_tap,
    ) -> Float[Tensor, "B S d_model"]:
        """Return the memory; True in ``mask`` = may attend."""
        for i, layer in enumerate(self.layers):
            if self.activation_checkpointing and tap is no_tap:
                x = checkpoint(layer, x, mask, use_reentrant=False)
            else:
                x = layer(x, mask, within(tap, f"layers.{i}"))
        if self.final_norm is not None:
            x = self.final_norm(x)
        return tap("output", x)
