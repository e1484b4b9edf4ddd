"""The optimizer (Vaswani et al., 2017, section 5.3): clipping by the norm of the whole gradient, and Adam."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy import ndarray

from transformer_spec.training_config import TrainingConfig


def global_norm(gradient: Mapping[str, ndarray]) -> float:
    """Return the norm of a gradient, all parameters taken as one vector."""
    return math.sqrt(sum(np.vdot(g, g) for g in gradient.values()))


def clip_factor(norm: float, clip_norm: float | None) -> float:
    """Return what scales a gradient of some norm to one of at most ``clip_norm`` (Pascanu et al., 2013)."""
    return 1.0 if clip_norm is None else clip_norm / max(norm, clip_norm)


class Adam:
    """Algorithm 1 of Kingma and Ba (2015).

    The moments are corrected for their bias, and epsilon is added to the root of the corrected one.

    Args:
        parameters: What is updated; their moments begin at zero.
        settings: Have both betas and epsilon.
    """

    def __init__(self, parameters: Mapping[str, ndarray], settings: TrainingConfig) -> None:
        self.settings = settings
        self.parameters = parameters
        self.first_moment = {name: np.zeros_like(parameter) for name, parameter in parameters.items()}
        self.second_moment = {name: np.zeros_like(parameter) for name, parameter in parameters.items()}

    def update(
        self, gradient: Mapping[str, ndarray], scale: float, learning_rate: float, corrections: tuple[float, float]
    ) -> None:
        """Take a step: change parameters and moments in place.

        Args:
            gradient: By canonical name.
            scale: What the gradient is multiplied by first.
            learning_rate: Of this step.
            corrections: Of this step, as ``settings.bias_corrections`` has them.
        """
        settings = self.settings
        correction1, correction2 = corrections
        for name, theta in self.parameters.items():
            g, m, v = scale * gradient[name], self.first_moment[name], self.second_moment[name]
            m += (1.0 - settings.beta1) * (g - m)
            v += (1.0 - settings.beta2) * (g * g - v)
            m_hat = m / correction1
            v_hat = v / correction2
            theta -= learning_rate * m_hat / (np.sqrt(v_hat) + settings.epsilon)
