"""Attacks on values that no later operation reads, zero gradients and rounded learning rates."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy import ndarray

from attacks.attack import Sound, attack, inject, showing
from attacks.words import FAILS, TOLERATED
from reference_numpy.masks import causal_mask
from transformer_parity.transformer.cases.case import ACTIVATIONS, GRADIENTS, STEPS
from transformer_spec.training_config import TrainingConfig

FORWARD: dict[str, Any] = {"stages": (ACTIVATIONS,)}
KEY_BIAS = "encoder.layers.1.self_attention.key_proj.bias"


def at_padding(name: str, what: str, expected: str, first: int, value: float) -> None:
    """Add a port with different logits from the n-th padding position of each target on."""

    def forward(self: Sound, source_ids: ndarray, target_ids: ndarray, tap: Any) -> ndarray:
        found = Sound.forward(self, source_ids, target_ids, tap)
        lengths = (target_ids != self.config.pad_id).sum(1)[:, None]
        found[np.arange(target_ids.shape[1]) >= lengths + first] = value
        return found

    inject(__name__, name, expected, what, {"forward": forward}, **FORWARD)


at_padding(
    "ZeroAtPadding",
    "The logits at target padding are zero, as they are in a model that packs sequences.",
    TOLERATED,
    0,
    0.0,
)
at_padding("NanAtPadding", "The logits at target padding are NaN.", TOLERATED, 0, np.nan)
at_padding(
    "ZeroAtTheLastToken",
    "The logits at the last token of each target and at the padding that follows are zero.",
    FAILS,
    -1,
    0.0,
)


def shown(name: str, what: str, expected: str, alter: Callable[[str, ndarray, ndarray], Any]) -> None:
    """Add a port that passes altered copies to its taps. ``alter(tap, value, is_source)`` works in place."""

    def forward(self: Sound, source_ids: ndarray, target_ids: ndarray, tap: Any) -> ndarray:
        def show(tap: Any, name: str, value: ndarray) -> None:
            seen = value.copy()
            alter(name, seen, source_ids != self.config.pad_id)
            tap(name, seen)

        return showing(show)(self, source_ids, target_ids, tap)

    inject(__name__, name, expected, what, {"forward": forward}, **FORWARD)


def _memory(name: str, value: ndarray, is_source: ndarray) -> None:
    if name == "encoder.output":
        value[~is_source] = np.nan


def _cross_keys(name: str, value: ndarray, is_source: ndarray) -> None:
    if name.endswith("cross_attention.key"):
        np.moveaxis(value, 1, 2)[~is_source] = 7.0


def _scores(fill: float, offset: int) -> Callable[[str, ndarray, ndarray], None]:
    """Return a function that sets the scores of keys more than ``offset`` positions after the query."""

    def alter(name: str, value: ndarray, is_source: ndarray) -> None:
        if name.startswith("decoder.") and name.endswith("self_attention.scores"):
            value[..., ~np.tril(np.ones(value.shape[-2:], bool), offset)] = fill

    return alter


shown("NanMemoryAtPadding", "The encoder output tap receives NaN at source padding.", TOLERATED, _memory)
shown("KeysAtPadding", "The cross-attention key taps receive the value 7 at source padding.", TOLERATED, _cross_keys)
shown("ScoresBehindTheMask", "The attention score taps receive -1e9 for masked keys.", TOLERATED, _scores(-1e9, 0))
shown("InfiniteScores", "The attention score taps receive -inf for masked keys.", TOLERATED, _scores(-np.inf, 0))
shown(
    "ScoresOfThemselves",
    "The attention score taps receive -1e9 for each position's own key.",
    FAILS,
    _scores(-1e9, -1),
)


@attack(TOLERATED, **FORWARD)
class CausalMaskAlone(Sound):
    """The port doesn't mask target padding, which changes only the results at target padding."""

    def forward(self, source_ids, target_ids, tap):
        return self.model(source_ids, target_ids, None, np.ones(target_ids.shape, bool), tap=tap)


@attack(FAILS, **FORWARD)
class WeightsAtPaddedKeys(Sound):
    """An attention weight tap receives 1e-9 instead of zero for keys that the causal mask excludes."""

    def forward(self, source_ids, target_ids, tap):
        def show(tap, name, value):
            later = ~causal_mask(value.shape[-1]) if name.endswith("decoder.layers.0.self_attention.weights") else False
            tap(name, np.where(later, 1e-9, value))

        return showing(show)(self, source_ids, target_ids, tap)


def key_bias(name: str, what: str, expected: str, noise: float) -> None:
    """Add a port that returns noise as the gradient of a key bias, which is mathematically zero."""

    def gradients(self: Sound, *batch: ndarray) -> Any:
        found = Sound.gradients(self, *batch)
        size = np.sqrt(sum(float((array**2).sum()) for array in found.parameters.values()))
        other = np.full_like(found.parameters[KEY_BIAS], noise * size)
        return replace(found, parameters={**found.parameters, KEY_BIAS: other})

    methods = {"gradients": gradients, "overrides": {"attention_bias": True}}
    inject(__name__, name, expected, what, methods, stages=(GRADIENTS,))


key_bias(
    "NoiseInAKeyBias",
    "Each element of a key bias's gradient is 1e-17 times the norm of the full gradient.",
    TOLERATED,
    1e-17,
)
key_bias(
    "GradientOfAKeyBias",
    "Each element of a key bias's gradient is 1e-8 times the norm of the full gradient.",
    FAILS,
    1e-8,
)


def rates(name: str, what: str, expected: str, rate: Callable[[float, int], float]) -> None:
    """Add a port that trains with the learning rate ``rate(rate, step)``."""

    class Other(TrainingConfig):
        def learning_rate(self, step: int, d_model: int) -> float:
            return rate(super().learning_rate(step, d_model), step)

    def start_training(self: Sound, settings: TrainingConfig) -> None:
        Sound.start_training(self, Other(**settings.to_dict()))

    inject(__name__, name, expected, what, {"start_training": start_training}, stages=(STEPS,))


rates("RatesOfFloat32", "Learning rates are rounded to float32.", TOLERATED, lambda rate, step: float(np.float32(rate)))
rates(
    "RatesComputedInFloat32",
    "Learning rates differ by up to two float32 rounding errors.",
    TOLERATED,
    lambda rate, step: rate * (1 + 5e-8 * (step % 5 - 2)),
)
rates("RatesOfFloat16", "Learning rates are rounded to float16.", FAILS, lambda rate, step: float(np.float16(rate)))
rates(
    "OneRateOff",
    "The learning rate of one step is too large by one part in a million.",
    FAILS,
    lambda r, step: r * (1 + 1e-6 * (step == 7)),
)


@attack(FAILS, stages=(STEPS,))
class OneWeightOff(Sound):
    """After the last of twenty steps, one weight is too large by one part in ten million."""

    steps = 0

    def train_step(self, source_ids, target_ids, labels):
        loss = super().train_step(source_ids, target_ids, labels)
        self.steps += 1
        if self.steps == 20:
            self.model.source_embedding.table.flat[0] *= 1.0 + 1e-7
        return loss
