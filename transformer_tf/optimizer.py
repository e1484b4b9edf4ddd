"""The optimizer (Vaswani et al., 2017, section 5.3): clipping by the norm of the whole gradient, and Adam."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import tensorflow as tf
from tensorflow import Tensor

from transformer_spec.training_config import TrainingConfig

global_norm = tf.linalg.global_norm


def clip_factor(norm: Tensor, clip_norm: float | None) -> Tensor | float:
    """Return what scales a gradient of some norm to one of at most ``clip_norm`` (Pascanu et al., 2013)."""
    return 1.0 if clip_norm is None else clip_norm / tf.maximum(norm, clip_norm)


class Adam:
    """Algorithm 1 of Kingma and Ba (2015).

    The moments are corrected for their bias, and epsilon is added to the root of the corrected one.

    Args:
        parameters: Variables by canonical name. Frozen ones have no moments.
        settings: Settings, which include both betas and epsilon.
    """

    def __init__(self, parameters: Mapping[str, tf.Variable], settings: TrainingConfig) -> None:
        self.settings = settings
        self.parameters = parameters
        self.first_moment: dict[str, tf.Variable] = {}
        self.second_moment: dict[str, tf.Variable] = {}

    def start(self, names: Iterable[str]) -> None:
        """Begin the moments of these parameters at zero, unless they have moments."""
        for name in names:
            for moments in (self.first_moment, self.second_moment):
                if name not in moments:
                    moments[name] = tf.Variable(tf.zeros_like(self.parameters[name]), trainable=False)

    def update(
        self, gradient: Mapping[str, Tensor], scale: Tensor, learning_rate: Tensor, corrections: tuple[Tensor, Tensor]
    ) -> None:
        """Take a step: change parameters and moments in place.

        Args:
            gradient: By canonical name.
            scale: What the gradient is multiplied by first.
            learning_rate: Of this step.
            corrections: Of this step, as ``settings.bias_corrections`` has them.
        """
        # Not Keras' own, which rounds the betas to float32 in float64 too.
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
