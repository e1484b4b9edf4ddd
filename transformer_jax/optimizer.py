"""The optimizer (Vaswani et al., 2017, section 5.3): clipping by the norm of the whole gradient, and Adam."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array

from transformer_spec.training_config import TrainingConfig

Arrays = dict[str, Array]  # by canonical name


def global_norm(gradient: Arrays) -> Array:
    """Return the norm of a gradient, all parameters taken as one vector."""
    return jnp.sqrt(sum(jnp.tensordot(g, g, g.ndim, precision="highest") for g in gradient.values()))


def clip_factor(norm: Array, clip_norm: float | None) -> Array | float:
    """Return what scales a gradient of some norm to one of at most ``clip_norm`` (Pascanu et al., 2013)."""
    return 1.0 if clip_norm is None else clip_norm / jnp.maximum(norm, clip_norm)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adam:
    """Algorithm 1 of Kingma and Ba (2015).

    The moments are corrected for their bias, and epsilon is added to the root of the corrected one.
    """

    # Not Optax': without x64 it computes 1 - beta^t in float32, by which its updates are off by 7e-7 at a beta2 of 0.98
    # and by 1e-5 at 0.999, where these are off by 1e-7.
    first_moment: Arrays
    second_moment: Arrays
    settings: TrainingConfig = field(metadata={"static": True})

    def update(
        self,
        parameters: Arrays,
        gradient: Arrays,
        scale: Array,
        learning_rate: Array,
        corrections: tuple[Array, Array],
    ) -> tuple[Arrays, Adam]:
        """Take a step: return the new parameters, and the optimizer with new moments.

        Args:
            parameters: By canonical name.
            gradient: By canonical name.
            scale: What the gradient is multiplied by first.
            learning_rate: Of this step.
            corrections: Of this step, as ``settings.bias_corrections`` has them.
        """
        settings = self.settings
        correction1, correction2 = corrections
        updated, first_moment, second_moment = {}, {}, {}
        for name, g in gradient.items():
            theta, m, v = parameters[name], self.first_moment[name], self.second_moment[name]
            g = scale * g
            m = m + (1.0 - settings.beta1) * (g - m)
            v = v + (1.0 - settings.beta2) * (g * g - v)
            m_hat = m / correction1
            v_hat = v / correction2
            updated[name] = theta - learning_rate * m_hat / (jnp.sqrt(v_hat) + settings.epsilon)
            first_moment[name], second_moment[name] = m, v
        return updated, Adam(first_moment, second_moment, settings)
