"""The relative position bias of T5 (Raffel et al., 2020, section 2.1).

Axes: H heads, L query length, M memory length.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from transformer_spec.config import TransformerConfig
from transformer_spec.shapes import Float, Int
from transformer_torch.runtime import to_dtype

# This number is larger than the rounding error of a logarithm. Adding it prevents rounding from moving the smallest
# distance of a bucket, such as 16, to the previous bucket.
ROUNDING = 1e-9


def relative_position_bucket(
    distance: Int[Tensor, "*axes"], num_buckets: int, max_distance: int, *, bidirectional: bool
) -> Int[Tensor, "*axes"]:
    """Return the bucket of each distance.

    With N buckets per direction and m = N // 2, each of the distances 0, 1, ..., m - 1 has a separate bucket. The width
    of the other buckets grows exponentially. A distance n >= m is in bucket
    ``m + floor((N - m) log(n / m) / log(max_distance / m))``, or in the last bucket, N - 1, if this number is larger.

    Args:
        distance: Position of the key minus position of the query.
        num_buckets: Number of buckets. If ``bidirectional`` is True, each direction has half of them.
        max_distance: All keys at this distance or farther are in the last bucket of their direction.
        bidirectional: If True, keys after the query have separate buckets, the second half. If False, these keys are in
            the bucket of distance 0, because a mask excludes them.
    """
    if bidirectional:
        num_buckets //= 2
        first, n = num_buckets * (distance > 0), distance.abs()
    else:
        first, n = torch.zeros_like(distance), (-distance).clamp(min=0)
    m = num_buckets // 2
    growth = (n.clamp(min=m).double() / m).log() / math.log(max_distance / m)  # 0 at distance m, 1 at max_distance
    far = (m + (growth * (num_buckets - m) + ROUNDING).long()).clamp(max=num_buckets - 1)
    return first + torch.where(n < m, n, far)


class RelativePositionBias(nn.Embedding):
    """Relative position bias of the attention scores: one learned number per head and bucket of distances.

    All self-attention layers of a stack use the same bias.

    Args:
        config: Model configuration, which defines the number of heads and the buckets.
        dtype: Dtype of the parameters, as a ``torch.dtype`` or its name.
        bidirectional: Whether queries attend to keys after them, as in the encoder.
    """

    def __init__(self, config: TransformerConfig, dtype: torch.dtype | str = "float32", *, bidirectional: bool) -> None:
        self.std = config.d_model**-0.5  # the constructor of nn.Embedding calls reset_parameters
        super().__init__(config.relative_buckets, config.num_heads, dtype=to_dtype(dtype))
        self.max_distance = config.relative_max_distance
        self.bidirectional = bidirectional

    def reset_parameters(self) -> None:
        """Initialize the biases from a normal distribution with standard deviation 1 / sqrt(d_model)."""
        # On the meta device, ``normal_`` would import SymPy without initializing any values.
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, std=self.std)

    def forward(self, distance: Int[Tensor, "L M"]) -> Float[Tensor, "1 H L M"]:
        """Return the bias of each query and key.

        Args:
            distance: Position of the key minus position of the query.
        """
        buckets = relative_position_bucket(
            distance, self.num_embeddings, self.max_distance, bidirectional=self.bidirectional
        )
        return super().forward(buckets).permute(2, 0, 1)[None]

    def extra_repr(self) -> str:
        """Return the settings that ``print(model)`` shows for this module."""
        return f"{super().extra_repr()}, max_distance={self.max_distance}, bidirectional={self.bidirectional}"
