"""How a model is trained: the settings, and what a run has to remember between two steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from numpy import ndarray

from transformer_spec.checks import check_fields, check_integer, check_number


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The optimizer and its schedule (Vaswani et al., 2017, section 5.3). Frozen; validates itself.

    The defaults are the paper's. Dropout and label smoothing (section 5.4) belong to the model's config.

    Raises:
        TypeError: A field has the wrong type.
        ValueError: A field's value, or a combination of fields, makes no sense.
    """

    learning_rate_factor: float = 1.0  # times equation (3)
    warmup_steps: int = 4000
    total_steps: int | None = None  # needed for a cool-down only
    cooldown_steps: int = 0  # the last steps of the total, over which the learning rate falls linearly towards zero
    beta1: float = 0.9
    beta2: float = 0.98
    epsilon: float = 1e-9
    clip_norm: float | None = None  # the largest norm of the whole gradient; the paper does not clip
    accumulation_steps: int = 1  # slices of a batch that are computed one after another, to save memory
    mixed_bfloat16: bool = False  # compute in bfloat16, keep weights and moments in float32
    # Keep only each layer's input, and compute the rest of a layer again in the backward pass, to save memory.
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
            raise ValueError(f"cooldown_steps={self.cooldown_steps} needs total_steps, to know when to begin")
        if self.total_steps is not None and self.cooldown_steps > self.total_steps:
            raise ValueError(
                f"cooldown_steps must be at most total_steps {self.total_steps}: got {self.cooldown_steps}"
            )

    def _check(self, name: str, check: Callable[..., Any], *needed: Any) -> None:
        """Check a field, and keep it as Python's own number, which JSON can hold."""
        value = getattr(self, name)
        if value is not None or name not in ("total_steps", "clip_norm"):
            object.__setattr__(self, name, check(name, value, *needed))

    def learning_rate(self, step: int, d_model: int) -> float:
        """Return the learning rate of a step, counted from 1.

        Equation (3): ``d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5)``, times the factor. The cool-down
        starts from the rate of the step before it and falls on a straight line that would reach zero one step after
        the last.
        """
        cooling, held = 1.0, step
        if self.total_steps is not None and self.cooldown_steps and step > self.total_steps - self.cooldown_steps:
            cooling = max(self.total_steps + 1 - step, 0) / (self.cooldown_steps + 1)
            held = max(self.total_steps - self.cooldown_steps, 1)
        rate = min(held**-0.5, held * self.warmup_steps**-1.5)
        return self.learning_rate_factor * d_model**-0.5 * rate * cooling

    def bias_corrections(self, step: int) -> tuple[float, float]:
        """Return what Adam divides the two moments by in a step, counted from 1: ``1 - beta^step``."""
        return 1.0 - self.beta1**step, 1.0 - self.beta2**step

    def to_dict(self) -> dict[str, Any]:
        """Return every field as plain values that JSON can hold."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> TrainingConfig:
        """Rebuild settings from ``to_dict``.

        Raises:
            TypeError: A field has the wrong type.
            ValueError: A field is missing or unknown, or its value makes no sense.
        """
        if not isinstance(fields, Mapping):
            raise TypeError(f"training settings must be a mapping of field names: got {type(fields).__name__}")
        check_fields("training settings", fields, (entry.name for entry in dataclasses.fields(cls)))
        return cls(**fields)


@dataclass(frozen=True)
class TrainingState:
    """What a run has to remember between two steps, beside the weights: the same in every framework."""

    step: int  # steps taken
    seed: int  # the dropout of step n is drawn from (seed, n) alone, so that no generator has to be saved
    first_moment: dict[str, ndarray]  # Adam's m, by the canonical name of the parameter
    second_moment: dict[str, ndarray]  # Adam's v


@dataclass(frozen=True)
class StepResult:
    """What one training step reports; each a scalar of the framework, not yet waited for where that is possible."""

    loss: Any  # label-smoothed cross-entropy per target token, in nats, before the update
    tokens: Any  # target tokens that are not padding
    gradient_norm: Any  # of the whole gradient, before clipping


@dataclass(frozen=True)
class Gradients:
    """The loss of a batch, and what every parameter and every tap contributes to it."""

    loss: float
    parameters: dict[str, ndarray]  # by canonical name
    taps: dict[str, ndarray] = dataclasses.field(default_factory=dict)  # in the order the taps fire
    frozen: tuple[str, ...] = ()  # the parameters that the framework was told not to train, and that have no gradient
