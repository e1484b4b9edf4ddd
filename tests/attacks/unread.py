"""Attacks where nothing reads a value, where a gradient is zero, and where a rate is rounded; and next to these."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy import ndarray

from attacks.attack import FAILS, TOLERATED, Sound, attack, plant, showing
from reference_numpy.masks import causal_mask
from transformer_parity.transformer.cases.case import ACTIVATIONS, GRADIENTS, STEPS
from transformer_spec.training_config import TrainingConfig

FORWARD: dict[str, Any] = {"stages": (ACTIVATIONS,)}
KEY_BIAS = "encoder.layers.1.self_attention.key_proj.bias"


def at_padding(name: str, what: str, expected: str, first: int, value: float) -> None:
    """Plant a port with other logits at target positions: from the n-th position of padding on, if any."""

    def forward(self: Sound, source_ids: ndarray, target_ids: ndarray, tap: Any) -> ndarray:
        found = Sound.forward(self, source_ids, target_ids, tap)
        lengths = (target_ids != self.config.pad_id).sum(1)[:, None]
        found[np.arange(target_ids.shape[1]) >= lengths + first] = value
        return found

    plant(__name__, name, expected, what, {"forward": forward}, **FORWARD)


at_padding("ZeroAtPadding", "The logits at target padding are zero, as of packed sentences.", TOLERATED, 0, 0.0)
at_padding("NanAtPadding", "The logits at target padding are NaN.", TOLERATED, 0, np.nan)
at_padding("ZeroAtTheLastToken", "The logits at the last token of shorter targets are zero.", FAILS, -1, 0.0)


def shown(name: str, what: str, expected: str, alter: Callable[[str, ndarray, ndarray], Any]) -> None:
    """Plant a port that shows other values at its taps: ``alter(tap, value, is_source)`` changes a copy in place."""

    def forward(self: Sound, source_ids: ndarray, target_ids: ndarray, tap: Any) -> ndarray:
        def show(tap: Any, name: str, value: ndarray) -> None:
            seen = value.copy()
            alter(name, seen, source_ids != self.config.pad_id)
            tap(name, seen)

        return showing(show)(self, source_ids, target_ids, tap)

    plant(__name__, name, expected, what, {"forward": forward}, **FORWARD)


def _memory(name: str, value: ndarray, is_source: ndarray) -> None:
    if name == "encoder.output":
        value[~is_source] = np.nan


def _cross_keys(name: str, value: ndarray, is_source: ndarray) -> None:
    if name.endswith("cross_attention.key"):
        np.moveaxis(value, 1, 2)[~is_source] = 7.0


def _scores(fill: float, offset: int) -> Callable[[str, ndarray, ndarray], None]:
    """Return what fills the scores of keys that are later than a query by more than some positions."""

    def alter(name: str, value: ndarray, is_source: ndarray) -> None:
        if name.startswith("decoder.") and name.endswith("self_attention.scores"):
            value[..., ~np.tril(np.ones(value.shape[-2:], bool), offset)] = fill

    return alter


shown("NanMemoryAtPadding", "The encoder's output is shown as NaN where the source is padded.", TOLERATED, _memory)
shown("KeysAtPadding", "Keys of the source's padding are shown as 7.", TOLERATED, _cross_keys)
shown("ScoresBehindTheMask", "Scores are shown with -1e9 where the mask forbids.", TOLERATED, _scores(-1e9, 0))
shown("InfiniteScores", "Scores are shown with -inf where the mask forbids.", TOLERATED, _scores(-np.inf, 0))
shown("ScoresOfThemselves", "Scores of each position with itself are shown as -1e9.", FAILS, _scores(-1e9, -1))


@attack(TOLERATED, **FORWARD)
class CausalMaskAlone(Sound):
    """The target has no padding mask, which only changes what is computed at its padding."""

    def forward(self, source_ids, target_ids, tap):
        return self.model(source_ids, target_ids, None, np.ones(target_ids.shape, bool), tap=tap)


@attack(FAILS, **FORWARD)
class WeightsAtPaddedKeys(Sound):
    """Attention weights are shown as 1e-9 where the mask forbids, which values are multiplied by."""

    def forward(self, source_ids, target_ids, tap):
        def show(tap, name, value):
            later = ~causal_mask(value.shape[-1]) if name.endswith("decoder.layers.0.self_attention.weights") else False
            tap(name, np.where(later, 1e-9, value))

        return showing(show)(self, source_ids, target_ids, tap)


def key_bias(name: str, what: str, expected: str, noise: float) -> None:
    """Plant a port whose gradient of a key bias, which is zero, is noise relative to all gradients."""

    def gradients(self: Sound, *batch: ndarray) -> Any:
        found = Sound.gradients(self, *batch)
        size = np.sqrt(sum(float((array**2).sum()) for array in found.parameters.values()))
        other = np.full_like(found.parameters[KEY_BIAS], noise * size)
        return replace(found, parameters={**found.parameters, KEY_BIAS: other})

    methods = {"gradients": gradients, "overrides": {"attention_bias": True}}
    plant(__name__, name, expected, what, methods, stages=(GRADIENTS,))


key_bias("NoiseInAKeyBias", "The gradient of a key bias is 1e-17 of all gradients.", TOLERATED, 1e-17)
key_bias("GradientOfAKeyBias", "The gradient of a key bias is 1e-8 of all gradients.", FAILS, 1e-8)


def rates(name: str, what: str, expected: str, rate: Callable[[float, int], float]) -> None:
    """Plant a port that trains by other learning rates: ``rate(rate, step)``."""

    class Other(TrainingConfig):
        def learning_rate(self, step: int, d_model: int) -> float:
            return rate(super().learning_rate(step, d_model), step)

    def start_training(self: Sound, settings: TrainingConfig) -> None:
        Sound.start_training(self, Other(**settings.to_dict()))

    plant(__name__, name, expected, what, {"start_training": start_training}, stages=(STEPS,))


rates("RatesOfFloat32", "Learning rates are rounded to float32.", TOLERATED, lambda rate, step: float(np.float32(rate)))
rates(
    "RatesComputedInFloat32",
    "Learning rates are off by up to two roundings of float32.",
    TOLERATED,
    lambda rate, step: rate * (1 + 5e-8 * (step % 5 - 2)),
)
rates("RatesOfFloat16", "Learning rates are rounded to float16.", FAILS, lambda rate, step: float(np.float16(rate)))
rates(
    "OneRateOff", "One learning rate is one millionth too large.", FAILS, lambda r, step: r * (1 + 1e-6 * (step == 7))
)


@attack(FAILS, stages=(STEPS,))
class OneWeightOff(Sound):
    """In the last of twenty steps, one weight moves by another ten-millionth of itself."""

    steps = 0

    def train_step(self, source_ids, target_ids, labels):
        loss = super().train_step(source_ids, target_ids, labels)
        self.steps += 1
        if self.steps == 20:
            self.model.source_embedding.table.flat[0] *= 1.0 + 1e-7
        return loss
