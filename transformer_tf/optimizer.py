"""The optimizer (Vaswani et al., 2017, section 5.3): gradient clipping by global norm, and Adam."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import tensorflow as tf
from tensorflow import Tensor

from transformer_spec.training_config import TrainingConfig

global_norm = tf.linalg.global_norm


def clip_factor(norm: Tensor, clip_norm: float | None) -> Tensor | float:
    """Return the factor that scales a gradient to a norm of at most ``clip_norm`` (Pascanu et al., 2013).

    Args:
        norm: Norm of the gradient.
        clip_norm: Maximum norm. If None, gradients aren't clipped.
    """
    return 1.0 if clip_norm is None else clip_norm / tf.maximum(norm, clip_norm)


class Adam:
    """Adam, Algorithm 1 of Kingma and Ba (2015).

    The moments are corrected for bias. Epsilon is added to the square root of the corrected second moment.

    Args:
        parameters: Variables to update, keyed by canonical name. Frozen variables have no moments.
        settings: Training settings, which define the betas and epsilon.
    """

    def __init__(self, parameters: Mapping[str, tf.Variable], settings: TrainingConfig) -> None:
        self.settings = settings
        self.parameters = parameters
        self.first_moment: dict[str, tf.Variable] = {}
        self.second_moment: dict[str, tf.Variable] = {}

    def start(self, names: Iterable[str]) -> None:
        """Create the moments of these parameters and set them to zero, unless the moments already exist."""
        for name in names:
            for moments in (self.first_moment, self.second_moment):
                if name not in moments:
                    moments[name] = tf.Variable(tf.zeros_like(self.parameters[name]), trainable=False)

    def update(
        self, gradient: Mapping[str, Tensor], scale: Tensor, learning_rate: Tensor, corrections: tuple[Tensor, Tensor]
    ) -> None:
        """Take a step: update parameters and moments in place.

        Args:
            gradient: Gradient of each parameter, keyed by canonical name.
            scale: Factor by which the gradient is multiplied before the moments are updated.
            learning_rate: Learning rate for this step.
            corrections: Bias corrections for this step, from ``settings.bias_corrections``.
        """
        # Keras' Adam rounds the betas to float32, even for float64 models.
        settings = self.settings
        correction1, correction2 = corrections
        for name, g in gradient.items():
            theta, m, v = self.parameters[name], self.first_moment[name], self.second_moment[name]
            g = scale * g
            m.assign_add((1.0 - settings.beta1) * (g - m))
            v.assign_add((1.0 - settings.beta2) * (g * g - v))
            m_hat = m / correction1
            v_hat = v / correction2
            theta.assign_sub(learning_rate * m_hat / (tf.sqrt(v_hat) + settings.epsilon))
