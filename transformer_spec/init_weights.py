"""Initial weights, which are identical in all packages."""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from transformer_spec.config import TransformerConfig
from transformer_spec.names import parameter_shapes


def init_weights(config: TransformerConfig, seed: int = 0) -> dict[str, ndarray]:
    """Sample initial weights in float32.

    Kernels are sampled from the Xavier uniform distribution (Glorot and Bengio, 2010), and embedding matrices from a
    normal distribution with variance 1 / d_model. Biases are zero, and layer norm scales are one. If
    ``config.scale_scores`` is False, the query kernels are divided by sqrt(d_k), as in T5.

    Args:
        config: Model configuration.
        seed: Seed of the random numbers.

    Returns:
        One array per canonical parameter name.
    """
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in parameter_shapes(config).items():
        kind = name.rpartition(".")[2]
        if kind == "kernel":
            limit = np.sqrt(6.0 / sum(shape))
            weights[name] = rng.uniform(-limit, limit, shape).astype(np.float32)
            if name.endswith("query_proj.kernel") and not config.scale_scores:
                sizes = config.in_decoder if name.startswith("decoder.") else config
                weights[name] /= np.float32(sizes.d_k**0.5)
        elif kind == "table":
            weights[name] = rng.normal(0.0, config.d_model**-0.5, shape).astype(np.float32)
        else:
            weights[name] = np.full(shape, 1.0 if kind == "scale" else 0.0, np.float32)
    return weights
