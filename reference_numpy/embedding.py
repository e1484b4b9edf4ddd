"""Embeddings, output projection, and positional encodings (Vaswani et al., 2017, sections 3.4 and 3.5).

Axes: B batch, L length, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy import ndarray

from reference_numpy.functional import linear, linear_backward
from transformer_spec.checks import check_positions
from transformer_spec.config import TransformerConfig, check_sinusoids
from transformer_spec.shapes import Float, Int
from transformer_spec.taps import Tap


def sinusoidal_encoding(
    length: int, d_model: int, layout: str = "interleaved", timescale: str = "m", offset: int = 0
) -> Float[ndarray, "L d_model"]:
    """Return sinusoidal positional encodings, one row per position, in float64 (section 3.5).

    ``PE(pos, 2i) = sin(pos / 10000^(2i/d_model))``, ``PE(pos, 2i+1) = cos(pos / 10000^(2i/d_model))``. In float32, the
    angles would have errors of 4e-5 at position 500.

    Args:
        length: Number of positions.
        d_model: Number of channels. It must be even.
        layout: ``interleaved`` alternates sine and cosine channels, as in the paper. ``split`` puts all sine channels
            first.
        timescale: Spacing of the wavelengths. There are m = d_model / 2 wavelengths, and the shortest is 2 pi. With
            ``m``, as in the paper, the longest wavelength is slightly less than 10000 * 2 pi. With ``m_minus_1``, as in
            tensor2tensor, it is exactly 10000 * 2 pi.
        offset: Index of the first position.

    Raises:
        ValueError: If ``layout`` or ``timescale`` is unknown, or ``d_model`` is odd or too small.
    """
    check_sinusoids(d_model, layout, timescale)
    m = d_model // 2
    steps = m if timescale == "m" else m - 1
    frequencies = 10000.0 ** (-np.arange(m) / steps)
    angles = np.arange(offset, offset + length)[:, None] * frequencies  # [L, m]
    waves = (np.sin(angles), np.cos(angles))
    if layout == "split":
        return np.concatenate(waves, axis=-1)
    return np.stack(waves, axis=-1).reshape(length, d_model)


class TokenEmbedding:
    """Token embedding: one learned vector per token, multiplied by sqrt(d_model) (section 3.4).

    Args:
        vocab_size: Number of tokens in the vocabulary.
        config: Model configuration. If ``config.scale_embedding`` is False, the vectors are not multiplied by
            sqrt(d_model).
        dtype: Dtype of the parameters, ``float32`` or ``float64``.
    """

    def __init__(self, vocab_size: int, config: TransformerConfig, dtype: str = "float32") -> None:
        self.multiplier = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self.table = np.zeros((vocab_size, config.d_model), dtype)

    def __call__(self, ids: Int[ndarray, "B L"]) -> Float[ndarray, "B L d_model"]:
        """Return the embedding of each token.

        Args:
            ids: Token IDs.
        """
        ids = np.asarray(ids)
        return self.table[ids] * self.multiplier

    def backward(
        self, ids: Int[ndarray, "B L"], dvectors: Float[ndarray, "B L d_model"], dtable: Float[ndarray, "V d_model"]
    ) -> None:
        """Add the gradient with respect to the embedding matrix to ``dtable``.

        The gradient with respect to row i of the matrix is the sum of the gradients at all positions whose token ID is
        i, times ``multiplier``.

        Args:
            ids: Token IDs of the forward pass.
            dvectors: Gradient with respect to the embeddings.
            dtable: Array to which the gradient is added in place.
        """
        np.add.at(dtable, ids, self.multiplier * dvectors)


class SinusoidalPosition:
    """Sinusoidal positional encoding, which is added to each vector (section 3.5).

    Args:
        config: Model configuration, which defines the layout, the timescale, and the index of the first position.
        dtype: Not used, because the layer has no parameters.
    """

    def __init__(self, config: TransformerConfig, dtype: str = "float32") -> None:
        self.config = config

    def __call__(self, x: Float[ndarray, "B L d_model"]) -> Float[ndarray, "B L d_model"]:
        """Return ``x`` plus the encoding of each position. Encodings are computed in float64 and rounded once.

        Args:
            x: One vector per position.
        """
        return x + self.vectors(x.shape[1]).astype(x.dtype)

    def vectors(self, length: int) -> Float[ndarray, "L d_model"]:
        """Return the vectors that are added at the first ``length`` positions."""
        config = self.config
        return sinusoidal_encoding(
            length, config.d_model, config.position_layout, config.position_timescale, config.position_offset
        )


class LearnedPosition:
    """Learned positional embedding, which is added to each vector (Table 3, row E).

    Args:
        config: Model configuration, which defines the number of positions and the index of the first position.
        dtype: Dtype of the parameters, ``float32`` or ``float64``.
    """

    def __init__(self, config: TransformerConfig, dtype: str = "float32") -> None:
        self.offset = config.position_offset
        self.table = np.zeros((config.max_length, config.d_model), dtype)

    def __call__(self, x: Float[ndarray, "B L d_model"]) -> Float[ndarray, "B L d_model"]:
        """Return ``x`` plus the learned vector of each position.

        Args:
            x: One vector per position.
        """
        return x + self.vectors(x.shape[1])

    def backward(self, dy: Float[ndarray, "B L d_model"]) -> Float[ndarray, "max_length d_model"]:
        """Return the gradient with respect to the embedding matrix.

        The gradient with respect to ``x`` is ``dy`` itself.

        Args:
            dy: Gradient with respect to the output.
        """
        dtable = np.zeros_like(self.table)
        dtable[self.offset : self.offset + dy.shape[1]] = dy.sum(axis=0)
        return dtable

    def vectors(self, length: int) -> Float[ndarray, "L d_model"]:
        """Return the vectors that are added at the first ``length`` positions."""
        check_positions("length", length, len(self.table) - self.offset)
        return self.table[self.offset : self.offset + length]


class NoPosition:
    """Layer that returns its input, for models with relative position biases instead of positional encodings (T5).

    Args:
        config: Model configuration, which defines the size of the vectors.
        dtype: Not used, because the layer has no parameters.
    """

    def __init__(self, config: TransformerConfig, dtype: str = "float32") -> None:
        self.d_model = config.d_model

    def __call__(self, x: Float[ndarray, "B L d_model"]) -> Float[ndarray, "B L d_model"]:
        """Return ``x``."""
        return x

    def vectors(self, length: int) -> Float[ndarray, "L d_model"]:
        """Return zeros in the shape of the vectors that other layers add at the first ``length`` positions."""
        return np.zeros((length, self.d_model))


POSITIONS: dict[str, Any] = {"sinusoidal": SinusoidalPosition, "learned": LearnedPosition, "relative": NoPosition}


class OutputProjection:
    """Output projection: maps each decoder state to one logit per token of the target vocabulary (section 3.4).

    If ``config.tie_embeddings`` is ``all`` or ``target_output``, the projection uses the transposed embedding matrix.

    Args:
        config: Model configuration.
        embedding: Target embedding. If the projection is tied, it uses the matrix of this embedding.
        dtype: Dtype of the parameters, ``float32`` or ``float64``.
    """

    def __init__(self, config: TransformerConfig, embedding: TokenEmbedding, dtype: str = "float32") -> None:
        tied = config.ties_output
        self.embedding = embedding if tied else None
        self.kernel = None if tied else np.zeros((config.d_model, config.target_vocab_size), dtype)
        self.bias = np.zeros(config.target_vocab_size, dtype) if config.output_bias else None

    def __call__(self, x: Float[ndarray, "B L d_model"]) -> Float[ndarray, "B L V"]:
        """Return the logits of each position.

        Args:
            x: One decoder state per target position.
        """
        return linear(x, self._matrix, self.bias)

    def backward(
        self, x: Float[ndarray, "B L d_model"], dlogits: Float[ndarray, "B L V"], tap: Tap
    ) -> tuple[Float[ndarray, "B L d_model"], Float[ndarray, "V d_model"] | None]:
        """Return the gradients with respect to ``x`` and to the embedding matrix.

        If the output projection isn't tied to the embedding, return None instead of the gradient of the matrix.

        Args:
            x: Decoder states of the forward pass.
            dlogits: Gradient with respect to the logits.
            tap: Callback that receives the gradients with respect to the bias and, for an untied projection, the
                kernel.
        """
        dx, dkernel, dbias = linear_backward(x, self._matrix, dlogits)
        if self.bias is not None:
            tap("bias", dbias)
        if self.kernel is None:
            return dx, dkernel.T
        tap("kernel", dkernel)
        return dx, None

    @property
    def _matrix(self) -> Float[ndarray, "d_model V"]:
        """Matrix that maps a decoder state to logits."""
        return self.embedding.table.T if self.embedding is not None else self.kernel  # type: ignore[return-value]
