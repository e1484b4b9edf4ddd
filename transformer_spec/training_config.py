"""Settings for training, and the state of a training run between two steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from numpy import ndarray

from transformer_spec.checks import check_fields, check_integer, check_number


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Optimizer and learning rate settings (section 5.3). Frozen; the constructor validates all fields.

    The defaults are the paper's settings. Dropout and label smoothing (section 5.4) are part of the model's config.

    Attributes:
        learning_rate_factor: Factor by which the learning rate of equation (3) is multiplied.
        warmup_steps: Number of steps during which the learning rate increases.
        total_steps: Number of steps in the run. It is required only for a cool-down.
        cooldown_steps: Number of steps at the end of the run during which the learning rate decreases linearly.
        beta1: Decay rate of Adam's first moment.
        beta2: Decay rate of Adam's second moment.
        epsilon: Number that Adam adds to the square root of the second moment.
        clip_norm: Maximum norm of the gradient of all parameters. If None, gradients aren't clipped, as in the paper.
        accumulation_steps: Number of micro-batches into which a batch is divided to save memory.
        mixed_bfloat16: True computes in bfloat16, but stores weights and moments in float32.
        activation_checkpointing: True stores only the inputs of each layer and recomputes the layer in the backward
            pass, to save memory.

    Raises:
        TypeError: If a field has the wrong type.
        ValueError: If a field has an invalid value, or fields contradict each other.
    """

    learning_rate_factor: float = 1.0  # factor of equation (3)
    warmup_steps: int = 4000
    total_steps: int | None = None  # required only for a cool-down
    cooldown_steps: int = 0  # at the end of the run
    beta1: float = 0.9
    beta2: float = 0.98
    epsilon: float = 1e-9
    clip_norm: float | None = None  # the paper doesn't clip gradients
    accumulation_steps: int = 1  # number of micro-batches
    mixed_bfloat16: bool = False  # weights and moments stay in float32
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        for name in ("warmup_steps", "total_steps", "cooldown_steps", "accumulation_steps"):
            self._check(name, check_integer, 0 if name == "cooldown_steps" else 1)
        for name in ("beta1", "beta2"):
            self._check(name, check_number, "in [0, 1)", lambda x: 0 <= x < 1)
        for name in ("learning_rate_factor", "epsilon", "clip_norm"):
            self._check(name, check_number, "positive", lambda x: x > 0)
        for name in ("mixed_bfloat16", "activation_checkpointing"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False: got {getattr(self, name)!r}")
        if self.cooldown_steps and self.total_steps is None:
            raise ValueError(
                f"cooldown_steps={self.cooldown_steps} requires total_steps, which determines when the cool-down begins"
            )
        if self.total_steps is not None and self.cooldown_steps > self.total_steps:
            raise ValueError(
                f"cooldown_steps must be at most total_steps {self.total_steps}: got {self.cooldown_steps}"
            )

    def _check(self, name: str, check: Callable[..., Any], *needed: Any) -> None:
        """Check a field and convert it to a Python number, which can be converted to JSON."""
        value = getattr(self, name)
        if value is not None or name not in ("total_steps", "clip_norm"):
            object.__setattr__(self, name, check(name, value, *needed))

    def learning_rate(self, step: int, d_model: int) -> float:
        """Return the learning rate of a step.

        Equation (3): ``d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5)``, multiplied by
        ``learning_rate_factor``. During the cool-down, the learning rate decreases linearly from its value in the
        preceding step. It would reach zero one step after the last step.

        Args:
            step: Number of the step, counted from 1.
            d_model: Size of the model's embeddings.
        """
        cooling, held = 1.0, step
        if self.total_steps is not None and self.cooldown_steps and step > self.total_steps - self.cooldown_steps:
            cooling = max(self.total_steps + 1 - step, 0) / (self.cooldown_steps + 1)
            held = max(self.total_steps - self.cooldown_steps, 1)
        rate = min(held**-0.5, held * self.warmup_steps**-1.5)
        return self.learning_rate_factor * d_model**-0.5 * rate * cooling

    def bias_corrections(self, step: int) -> tuple[float, float]:
        """Return the values by which Adam divides the two moments: ``1 - beta1^step`` and ``1 - beta2^step``.

        Args:
            step: Number of the step, counted from 1.
        """
        return 1.0 - self.beta1**step, 1.0 - self.beta2**step

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as a dict that can be converted to JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> TrainingConfig:
        """Create settings from the result of ``to_dict``.

        Args:
            fields: All fields, keyed by name.

        Raises:
            TypeError: If a field has the wrong type.
            ValueError: If a field is missing or unknown, has an invalid value, or contradicts other fields.
        """
        if not isinstance(fields, Mapping):
            raise TypeError(
                f"training settings must be a mapping of field names to values: got {type(fields).__name__}"
            )
        check_fields("training settings", fields, (entry.name for entry in dataclasses.fields(cls)))
        return cls(**fields)


@dataclass(frozen=True)
class TrainingState:
    """The state of a training run between two steps, without weights and settings. All frameworks use the same state.

    Attributes:
        step: Number of steps taken so far.
        seed: Seed for dropout. The dropout in step n depends only on (seed, n), so the state of a random number
            generator doesn't have to be saved.
        first_moment: Adam's first moment, keyed by parameter name.
        second_moment: Adam's second moment, keyed by parameter name.
    """

    step: int  # number of steps taken
    seed: int  # seed for dropout
    first_moment: dict[str, ndarray]  # Adam's m, keyed by parameter name
    second_moment: dict[str, ndarray]  # Adam's v, keyed by parameter name


@dataclass(frozen=True)
class StepResult:
    """The result of a training step, as framework scalars that may be computed asynchronously.

    Attributes:
        loss: Label-smoothed cross-entropy per target token before the update, in nats.
        tokens: Number of target tokens in the batch, without padding.
        gradient_norm: Norm of the gradient of all parameters, before clipping.
    """

    loss: Any  # per target token, in nats, before the update
    tokens: Any  # number of target tokens without padding
    gradient_norm: Any  # global norm before clipping


@dataclass(frozen=True)
class Gradients:
    """The loss of a batch, and the gradients of this loss.

    Attributes:
        loss: Label-smoothed cross-entropy per target token, in nats.
        parameters: Gradient with respect to each parameter, keyed by canonical name.
        taps: Gradient with respect to the value at each tap, keyed by name, in the order in which the taps fire.
        frozen: Names of the frozen parameters, which have no gradient.
    """

    loss: float
    parameters: dict[str, ndarray]  # by canonical name
    taps: dict[str, ndarray] = dataclasses.field(default_factory=dict)  # in the order in which the taps fire
    frozen: tuple[str, ...] = ()  # names of the frozen parameters
