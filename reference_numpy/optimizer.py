"""The optimizer (Vaswani et al., 2017, section 5.3): gradient clipping by global norm, and Adam."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy import ndarray

from reference_numpy.weights import check_writable
from transformer_spec.training_config import TrainingConfig


def global_norm(gradient: Mapping[str, ndarray]) -> float:
    """Return the Euclidean norm of a gradient, treating all parameters as one vector."""
    return math.sqrt(sum(np.vdot(g, g) for g in gradient.values()))


def clip_factor(norm: float, clip_norm: float | None) -> float:
    """Return the factor that scales a gradient to a norm of at most ``clip_norm`` (Pascanu et al., 2013).

    Args:
        norm: Norm of the gradient.
        clip_norm: Maximum norm. If None, gradients aren't clipped.
    """
    return 1.0 if clip_norm is None else clip_norm / max(norm, clip_norm)


class Adam:
    """Adam, Algorithm 1 of Kingma and Ba (2015).

    The moments are corrected for bias. Epsilon is added to the square root of the corrected second moment.

    Args:
        parameters: Arrays to update, keyed by canonical name. Their moments start at zero. A ``Trainer`` replaces this
            attribute in every step.
        settings: Training settings, which define the betas and epsilon. A ``Trainer`` replaces this attribute in every
            step, so set ``trainer.settings`` instead.
    """

    def __init__(self, parameters: Mapping[str, ndarray], settings: TrainingConfig) -> None:
        self.settings = settings
        self.parameters = parameters
        self.first_moment = {name: np.zeros_like(parameter) for name, parameter in parameters.items()}
        self.second_moment = {name: np.zeros_like(parameter) for name, parameter in parameters.items()}

    def update(
        self, gradient: Mapping[str, ndarray], scale: float, learning_rate: float, corrections: tuple[float, float]
    ) -> None:
        """Take a step: update parameters and moments in place.

        Args:
            gradient: Gradient of each parameter, keyed by canonical name.
            scale: Factor by which the gradient is multiplied before the moments are updated.
            learning_rate: Learning rate for this step.
            corrections: Bias corrections for this step, from ``settings.bias_corrections``.

        Raises:
            ValueError: If a parameter is read-only, is not a floating-point array, or has a different shape than its
                gradient or moments. In this case, no parameter is updated.
        """
        self.check(gradient)
        settings = self.settings
        correction1, correction2 = corrections
        for name, theta in self.parameters.items():
            g, m, v = scale * gradient[name], self.first_moment[name], self.second_moment[name]
            m += (1.0 - settings.beta1) * (g - m)
            v += (1.0 - settings.beta2) * (g * g - v)
            m_hat = m / correction1
            v_hat = v / correction2
            theta -= learning_rate * m_hat / (np.sqrt(v_hat) + settings.epsilon)

    def check(self, gradient: Mapping[str, ndarray]) -> None:
        """Check that a step can update every parameter, so that an error can't leave a step half done.

        Args:
            gradient: Gradient of each parameter, keyed by canonical name.

        Raises:
            ValueError: If a parameter is read-only, is not a floating-point array, or has a different shape than its
                gradient or moments.
        """
        for name in self.parameters:
            for what, arrays in {"gradient": gradient, "moments": self.first_moment}.items():
                if name not in arrays:
                    raise ValueError(f"{name} must have {what}: got none; create a new Trainer for a different model")
                check_writable(name, self.parameters[name], arrays[name].shape)
