"""The relative position bias of T5 (Raffel et al., 2020, section 2.1).

Axes: H heads, L query length, M memory length.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import tensorflow as tf
from tensorflow import Tensor

from transformer_spec.config import TransformerConfig
from transformer_spec.shapes import Float, Int
from transformer_tf.block import Block, initial

# This number is larger than the rounding error of a logarithm. Adding it prevents rounding from moving the smallest
# distance of a bucket, such as 16, to the previous bucket.
ROUNDING = 1e-9


def relative_position_bucket(
    distance: Int[Tensor, "*axes"], num_buckets: int, max_distance: int, *, bidirectional: bool
) -> Int[Tensor, "*axes"]:
    """Return the bucket of each distance, computed in float64.

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
        first, n = num_buckets * tf.cast(distance > 0, distance.dtype), tf.abs(distance)
    else:
        first, n = tf.zeros_like(distance), tf.maximum(-distance, 0)
    m = num_buckets // 2
    ratio = tf.cast(tf.maximum(n, m), tf.float64) / m
    growth = tf.math.log(ratio) / math.log(max_distance / m)  # 0 at distance m, 1 at max_distance
    far = tf.minimum(m + tf.cast(growth * (num_buckets - m) + ROUNDING, n.dtype), num_buckets - 1)
    return first + tf.where(n < m, n, far)


class RelativePositionBias(Block):
    """Relative position bias of the attention scores: one learned number per head and bucket of distances.

    All self-attention layers of a stack use the same bias.

    Args:
        config: Model configuration, which defines the number of heads and the buckets.
        dtype: Dtype or dtype policy of the layer. If None, the global Keras policy is used.
        bidirectional: Whether queries attend to keys after them, as in the encoder.
        kwargs: Additional arguments of ``keras.layers.Layer``, such as ``name``.
    """

    def __init__(
        self, config: TransformerConfig, dtype: str | None = None, *, bidirectional: bool, **kwargs: Any
    ) -> None:
        super().__init__(dtype=dtype, **kwargs)
        self.max_distance = config.relative_max_distance
        self.bidirectional = bidirectional
        normal = initial(keras.initializers.RandomNormal(stddev=config.d_model**-0.5))
        options = {"embeddings_initializer": normal, "dtype": self.dtype_policy, "name": self.name}
        self.table = keras.layers.Embedding(config.relative_buckets, config.num_heads, **options)
        self.table.build()

    def call(self, distance: Int[Tensor, "L M"]) -> Float[Tensor, "1 H L M"]:
        """Return the bias of each query and key.

        Args:
            distance: Position of the key minus position of the query.
        """
        bucket = relative_position_bucket(
            distance, self.table.input_dim, self.max_distance, bidirectional=self.bidirectional
        )
        return tf.transpose(self.table(bucket), [2, 0, 1])[None]
