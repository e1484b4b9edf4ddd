"""The relative position bias of T5 (Raffel et al., 2020, section 2.1).

Axes: H heads, L query length, M memory length.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from transformer_spec.config import TransformerConfig
from transformer_spec.shapes import Float, Int

# This number is larger than the rounding error of a logarithm. Adding it prevents rounding from moving the smallest
# distance of a bucket, such as 16, to the previous bucket.
ROUNDING = 1e-9


def relative_position_bucket(
    distance: Int[np.ndarray, "*axes"], num_buckets: int, max_distance: int, *, bidirectional: bool
) -> Int[np.ndarray, "*axes"]:
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
        first, n = num_buckets * (distance > 0), np.abs(distance)
    else:
        first, n = np.zeros_like(distance), np.maximum(-distance, 0)
    m = num_buckets // 2
    growth = np.log(np.maximum(n, m) / m) / math.log(max_distance / m)  # 0 at distance m, 1 at max_distance
    far = np.minimum(m + (growth * (num_buckets - m) + ROUNDING).astype(int), num_buckets - 1)
    return first + np.where(n < m, n, far)


class RelativePositionBias(nnx.Embed):
    """Relative position bias of the attention scores: one learned number per head and bucket of distances.

    All self-attention layers of a stack use the same bias.

    Args:
        config: Model configuration, which defines the number of heads and the buckets.
        dtype: Name of the dtype of the parameters, such as ``float32``.
        bidirectional: Whether queries attend to keys after them, as in the encoder.
        rngs: Flax random state for the initial values.
    """

    def __init__(
        self, config: TransformerConfig, dtype: str = "float32", *, bidirectional: bool, rngs: nnx.Rngs
    ) -> None:
        normal = nnx.initializers.normal(config.d_model**-0.5)
        sizes = config.relative_buckets, config.num_heads
        super().__init__(*sizes, param_dtype=dtype, embedding_init=normal, rngs=rngs)
        self.dtype = None  # compute in the dtype of the table, as Flax's other layers do by default
        self.max_distance = config.relative_max_distance
        self.bidirectional = bidirectional

    def __call__(self, distance: Int[Array, "L M"]) -> Float[Array, "1 H L M"]:  # type: ignore[override]
        """Return the bias of each query and key.

        Args:
            distance: Position of the key minus position of the query.
        """
        farthest = self.max_distance
        buckets = relative_position_bucket(
            np.arange(-farthest, farthest + 1), self.num_embeddings, farthest, bidirectional=self.bidirectional
        )
        bucket = jnp.asarray(buckets)[jnp.clip(distance, -farthest, farthest) + farthest]
        return super().__call__(bucket).transpose(2, 0, 1)[None]
