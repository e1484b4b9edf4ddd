"""The relative position bias of T5 (Raffel et al., 2020, section 2.1).

Axes: H heads, L query length, M memory length.
"""

from __future__ import annotations

import math

import numpy as np
from numpy import ndarray

from transformer_spec.config import TransformerConfig
from transformer_spec.shapes import Float, Int

# This number is larger than the rounding error of a logarithm. Adding it prevents rounding from moving the smallest
# distance of a bucket, such as 16, to the previous bucket.
ROUNDING = 1e-9


def relative_position_bucket(
    distance: Int[ndarray, "*axes"], num_buckets: int, max_distance: int, *, bidirectional: bool
) -> Int[ndarray, "*axes"]:
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
        first, n = np.where(distance > 0, num_buckets, 0), np.abs(distance)
    else:
        first, n = np.zeros_like(distance), np.maximum(-distance, 0)
    m = num_buckets // 2
    growth = np.log(np.maximum(n, m) / m) / math.log(max_distance / m)  # 0 at distance m, 1 at max_distance
    far = np.minimum(m + (growth * (num_buckets - m) + ROUNDING).astype(int), num_buckets - 1)
    return first + np.where(n < m, n, far)


class RelativePositionBias:
    """Relative position bias of the attention scores: one learned number per head and bucket of distances.

    All self-attention layers of a stack use the same bias.

    Args:
        config: Model configuration, which defines the number of heads and the buckets.
        dtype: Dtype of the parameters, ``float32`` or ``float64``.
        bidirectional: Whether queries attend to keys after them, as in the encoder.
    """

    def __init__(self, config: TransformerConfig, dtype: str = "float32", *, bidirectional: bool) -> None:
        self.max_distance = config.relative_max_distance
        self.bidirectional = bidirectional
        self.table = np.zeros((config.relative_buckets, config.num_heads), dtype)

    def __call__(self, distance: Int[ndarray, "L M"]) -> Float[ndarray, "1 H L M"]:
        """Return the bias of each query and key.

        Args:
            distance: Position of the key minus position of the query.
        """
        return self.table[self._bucket(distance)].transpose(2, 0, 1)[None]

    def backward(
        self, distance: Int[ndarray, "L M"], dbias: Float[ndarray, "1 H L M"]
    ) -> Float[ndarray, "num_buckets H"]:
        """Return the gradient with respect to the table: for each bucket, the sum of the gradients of its biases.

        Args:
            distance: Distances of the forward pass.
            dbias: Gradient with respect to the bias.
        """
        dtable = np.zeros_like(self.table)
        np.add.at(dtable, self._bucket(distance), dbias[0].transpose(1, 2, 0))
        return dtable

    def _bucket(self, distance):
        return relative_position_bucket(distance, len(self.table), self.max_distance, bidirectional=self.bidirectional)
