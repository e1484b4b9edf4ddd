"""The contract of ``parity pair``: the class that wraps one implementation of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy import ndarray

Arrays = Mapping[str, ndarray]
# A function that the model calls with the name of an intermediate value and the value. The model must continue its
# computation with the result, which has the same type, shape, and dtype.
Tap = Callable[[str, Any], Any]


class Implementation:
    """One implementation of a model. ``parity pair`` compares two of them: the one you trust, and your port of it.

    Subclass this class twice, once for each implementation. Every subclass defines ``load`` and ``forward``. The
    implementation that you trust also defines ``init_weights`` and ``inputs``. All other methods are optional, and each
    of them adds a comparison if both classes define it. The methods run in a separate process for each implementation.

    Attributes:
        dtypes: The dtypes in which the model can run. Without float64, the verdict relies on float32 only, and the
            report explains what it can't show.
        fixed_weights: Patterns for the names of weights whose constant values must not be replaced with random values.
            ``*`` matches any number of characters.
    """

    dtypes: Sequence[str] = ("float64", "float32")
    fixed_weights: Sequence[str] = ()

    def init_weights(self, seed: int) -> Arrays:
        """Return the weights of the model by name: random weights, or the weights of a checkpoint.

        Only the implementation that you trust needs this method. Constant weights, such as biases that are all zero,
        are replaced with random values, because they would hide bugs.
        """
        raise NotImplementedError

    def inputs(self, seed: int) -> Arrays:
        """Return the inputs of one batch by name. Different seeds must return different inputs.

        Only the implementation that you trust needs this method. Use more than one sequence, sequences of different
        lengths, and padding, because inputs without them hide bugs.
        """
        raise NotImplementedError

    def load(self, weights: Arrays, dtype: str) -> None:
        """Build the model in inference mode, with these weights.

        Both implementations receive the same arrays under the same names. Floating-point arrays have the dtype
        ``dtype``, except that bfloat16 values are given as float32 arrays. Arrays of integers keep their dtype.
        """
        raise NotImplementedError

    def forward(self, inputs: Arrays, tap: Tap) -> Arrays:
        """Run the model, and return its outputs by name.

        Both implementations must return the same output names. Call ``value = tap("name", value)`` to show an
        intermediate value, and continue with the result. The value may be an array of any framework. The ``capture``
        module calls ``tap`` for all layers of a model.
        """
        raise NotImplementedError

    def gradients(self, inputs: Arrays) -> Arrays:
        """Return the gradients of a scalar loss, one per weight name, and optionally the loss under the name ``loss``.

        Both implementations must use the same loss, for example the mean square of an output.
        """
        raise NotImplementedError

    def next_logits(self, inputs: Arrays, prefix: ndarray) -> ndarray:
        """Return the logits [B, V] of the token that follows a prefix.

        Args:
            inputs: The inputs of a batch, such as a prompt or the source sentences.
            prefix: The tokens [B, t] that were generated so far; t is 0 at the first step.
        """
        raise NotImplementedError

    def next_logits_cached(self, inputs: Arrays, prefix: ndarray, cache: Any) -> tuple[ndarray, Any]:
        """Return the same logits as ``next_logits``, computed with a cache, and the updated cache.

        Args:
            inputs: The inputs of a batch.
            prefix: The tokens [B, t] that were generated so far. Only the last one is new since the previous call.
            cache: The cache that the previous call returned; None at the first step.
        """
        raise NotImplementedError
