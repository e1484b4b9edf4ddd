"""Attacks through gradients, optimizer steps and searches."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy import ndarray

import reference_numpy
from attacks.attack import Sound, attack, inject
from attacks.words import FAILS, REFUSED, TOLERATED
from transformer_parity.transformer.cases.case import DECODE, GRADIENTS, STEPS
from transformer_spec.training_config import Gradients

TABLE, BIAS = "source_embedding.table", "encoder.layers.0.feed_forward.inner_proj.bias"


# Gradients.
def gradients(name: str, what: str, alter: Callable[[Gradients, ndarray], Any], expected: str = FAILS) -> None:
    """Add a port that returns ``alter(gradients, is_label)`` instead of its gradients."""

    def method(self: Sound, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> Any:
        return alter(Sound.gradients(self, source_ids, target_ids, labels), labels != self.config.pad_id)

    inject(__name__, name, expected, what, {"gradients": method}, stages=(GRADIENTS,))


def scaled(found: Gradients, by: float) -> Gradients:
    """Return all gradients multiplied by a factor."""
    parameters, taps = ({name: by * array for name, array in held.items()} for held in (found.parameters, found.taps))
    return replace(found, parameters=parameters, taps=taps)


def changed(name: str, change: Callable[[ndarray], ndarray]) -> Callable[[Gradients, ndarray], Gradients]:
    """Return a function that changes the gradient of one parameter."""
    return lambda found, is_label: replace(found, parameters={**found.parameters, name: change(found.parameters[name])})


gradients(
    "LossOfTheSum",
    "The loss is a sum over the labels instead of a mean.",
    lambda g, m: replace(g, loss=g.loss * m.sum()),
)
gradients(
    "GradientsOfTheSum",
    "The gradients are computed for a sum over the labels instead of a mean.",
    lambda g, m: scaled(g, float(m.sum())),
)
gradients(
    "MeanOverPadding",
    "The loss and gradients are averaged over all positions, including padding.",
    lambda g, m: replace(scaled(g, float(m.mean())), loss=g.loss * float(m.mean())),
)
gradients("NanLoss", "The loss is NaN.", lambda g, m: replace(g, loss=float("nan")))
gradients("NanGradient", "One gradient is NaN.", changed(BIAS, lambda x: np.full_like(x, np.nan)))
gradients("ZeroGradient", "The gradient of the tied embedding matrix is zero.", changed(TABLE, np.zeros_like))
gradients("GradientOfAnAxisMore", "The gradient of a bias has the shape [1, d_ff].", changed(BIAS, lambda x: x[None]))
gradients("GradientOfFloat32", "One gradient is a float32 array.", changed(TABLE, lambda x: x.astype(np.float32)))
gradients(
    "GradientMissing",
    "The gradient of one parameter is missing.",
    lambda g, m: replace(g, parameters={name: x for name, x in g.parameters.items() if name != BIAS}),
)
gradients(
    "NoGradient",
    "The port returns the loss without any gradients.",
    lambda g, m: Gradients(g.loss, {}, {}),
    expected=REFUSED,
)


# Steps of the optimizer.
def steps(name: str, what: str, methods: Mapping[str, Any], expected: str = FAILS) -> None:
    """Add a port with different training methods."""
    inject(__name__, name, expected, what, methods, stages=(STEPS,))


def training_with(**settings: Any) -> dict[str, Any]:
    """Return a method that changes some of the training settings that the port receives."""
    return {"start_training": lambda self, given: Sound.start_training(self, replace(given, **settings))}


def loss_before(self: Sound, *batch: ndarray) -> float:
    """Return the loss without a step."""
    return self.gradients(*batch).loss


def loss_after(self: Sound, *batch: ndarray) -> float:
    """Take a step, and return the loss after it."""
    Sound.train_step(self, *batch)
    return self.gradients(*batch).loss


def train_a_copy(self: Any, settings: Any) -> None:
    """Train a copy of the model."""
    self.untrained = self.model
    self.model = copy.deepcopy(self.model)
    Sound.start_training(self, settings)


def export_untrained(self: Any) -> dict[str, ndarray]:
    """Return the weights from before training."""
    return getattr(self, "untrained", self.model).export_weights()


class ByTensor(reference_numpy.Trainer):
    """A trainer that clips the gradient of each parameter separately."""

    def __init__(self, model: Any, settings: Any) -> None:
        super().__init__(model, replace(settings, clip_norm=None))
        self.most = settings.clip_norm
        self.update = self.optimizer.update
        self.optimizer.update = self.clip_and_update  # type: ignore[method-assign,assignment]

    def clip_and_update(self, gradient: dict[str, ndarray], scale: float, *numbers: Any) -> None:
        """Take a step."""
        for array in gradient.values():
            array *= scale
            if self.most is not None:
                array *= self.most / max(float(np.linalg.norm(array)), self.most)
        self.update(gradient, 1.0, *numbers)


class MeanOfMeans(reference_numpy.Trainer):
    """A trainer that averages over micro-batches, regardless of the number of labels in each."""

    def train_step(self, source_ids: Any, target_ids: Any, labels: Any) -> Any:
        """Take a step."""
        micro_batches = [
            np.split(array, self.settings.accumulation_steps) for array in (source_ids, target_ids, labels)
        ]
        found = [reference_numpy.gradients(self.model, *part) for part in zip(*micro_batches, strict=True)]
        gradient = {name: np.sum([g.parameters[name] for g in found], 0) for name in found[0].parameters}
        self.step += 1
        learning_rate = self.settings.learning_rate(self.step, self.model.config.d_model)
        self.optimizer.update(gradient, 1.0 / len(found), learning_rate, self.settings.bias_corrections(self.step))
        return reference_numpy.StepResult(sum(g.loss for g in found) / len(found), None, None)


def start(trainer: Any) -> dict[str, Any]:
    """Return a method that starts a different trainer."""
    return {"start_training": lambda self, settings: setattr(self, "trainer", trainer(self.model, settings))}


steps("NoStep", "train_step() changes no weights.", {"train_step": loss_before})
steps("LossAfterTheStep", "train_step() returns the loss after the update.", {"train_step": loss_after})
steps(
    "NanLosses",
    "The loss of every step is NaN, but the weights are correct.",
    {"train_step": lambda self, *batch: Sound.train_step(self, *batch) * float("nan")},
)
steps(
    "CopyTrained",
    "The port trains a copy of the model. The losses are correct, but the exported weights don't change.",
    {"start_training": train_a_copy, "export_weights": export_untrained},
)
steps("NoWarmup", "The learning rate has no warmup.", training_with(warmup_steps=1))
steps("NoCooldown", "The learning rate has no cooldown.", training_with(cooldown_steps=0))
steps("OtherEpsilon", "Adam uses an epsilon of 1e-8.", training_with(epsilon=1e-8))
steps("NoClipping", "The gradient isn't clipped.", training_with(clip_norm=None))
steps("ClippedByTensor", "Each parameter's gradient is clipped separately.", start(ByTensor))
steps(
    "MeanOfMeans",
    "Micro-batches have equal weights, although they contain different numbers of labels.",
    start(MeanOfMeans),
)


@attack(FAILS, stages=(STEPS,))
class MomentsKept(Sound):
    """A new optimizer starts with the moments of the previous one, even for a different model."""

    moments: Any = {}

    def start_training(self, settings):
        super().start_training(settings)
        optimizer = self.trainer.optimizer
        for number, held in enumerate((optimizer.first_moment, optimizer.second_moment)):
            for name, array in held.items():
                held[name] = self.moments.setdefault((number, name, array.shape), array)


# Searches.
def hypotheses(
    name: str, what: str, alter: Callable[[ndarray, Any, int], Any], expected: str = FAILS, says: str = ""
) -> None:
    """Add a port that returns ``alter(ids, config, limit)`` instead of its hypotheses."""

    def generate(self: Sound, source_ids: ndarray, max_length: int, *options: Any) -> Any:
        return alter(Sound.generate(self, source_ids, max_length, *options), self.config, max_length)

    inject(__name__, name, expected, what, {"generate": generate}, stages=(DECODE,), says=says)


def search(name: str, what: str, ask: Callable[..., tuple[Any, ...]]) -> None:
    """Add a port that searches with different arguments. ``ask`` returns the arguments of ``generate``."""
    method = {"generate": lambda self, *asked: Sound.generate(self, *ask(*asked))}
    inject(__name__, name, FAILS, what, method, stages=(DECODE,))


def after_the_end(ids: ndarray, config: Any, limit: int) -> ndarray:
    """Return hypotheses in which a token replaces the padding."""
    return np.where(ids == config.pad_id, 7, ids)


def padding_inside(ids: ndarray, config: Any, limit: int) -> ndarray:
    """Return hypotheses whose second token is padding."""
    ids = ids.copy()
    ids[:, 1] = config.pad_id
    return ids


hypotheses(
    "PaddingInside",
    "A hypothesis contains a token after padding, as if the search didn't keep track of finished hypotheses.",
    padding_inside,
    says="token 2: a hypothesis contains padding",
)
hypotheses(
    "PaddedHypotheses",
    "The hypotheses are padded to the maximum length.",
    lambda ids, config, limit: np.pad(ids, ((0, 0), (0, limit - ids.shape[1])), constant_values=config.pad_id),
    expected=TOLERATED,
)
hypotheses(
    "TokensOfUint16",
    "The tokens have the dtype uint16.",
    lambda ids, config, limit: ids.astype(np.uint16),
    expected=TOLERATED,
)
hypotheses("TokensOfFloat64", "The tokens have the dtype float64.", lambda ids, config, limit: ids.astype(float))
hypotheses("TokensAfterTheEnd", "EOS is followed by tokens instead of padding.", after_the_end)
hypotheses(
    "EndMissing",
    "The port doesn't return EOS.",
    lambda ids, config, limit: np.where(ids == config.eos_id, config.pad_id, ids),
)
hypotheses(
    "StartReturned",
    "The port returns BOS.",
    lambda ids, config, limit: np.pad(ids, ((0, 0), (1, 0)), constant_values=config.bos_id),
)
hypotheses("LastTokenMissing", "The last token is missing.", lambda ids, config, limit: ids[:, :-1])
hypotheses("NoToken", "The hypotheses are empty.", lambda ids, config, limit: ids[:, :0])
hypotheses("OneHypothesis", "The port returns one hypothesis for all sentences.", lambda ids, config, limit: ids[:1])
hypotheses("ThreeAxes", "The hypotheses have the shape [B, 1, L].", lambda ids, config, limit: ids[:, None])
hypotheses(
    "OtherSentences",
    "The port returns the hypotheses in the reverse order of the sentences.",
    lambda ids, *_: ids[::-1],
)
hypotheses("NegativeTokens", "The hypotheses are padded with -1.", lambda ids, config, _: np.where(ids > 0, ids, -1))
hypotheses(
    "TokensOutside",
    "The tokens are outside the vocabulary.",
    lambda ids, config, limit: ids + config.target_vocab_size,
)
search(
    "GreedyForBeam",
    "The port runs greedy search instead of beam search.",
    lambda ids, limit, beam, alpha: (ids, limit, 1, alpha),
)
search(
    "NoLengthPenalty",
    "Beam search ignores the length penalty.",
    lambda ids, limit, beam, alpha: (ids, limit, beam, 0.0),
)
search(
    "NoLimit", "The search exceeds the maximum length.", lambda ids, limit, beam, alpha: (ids, 2 * limit, beam, alpha)
)
search(
    "PaddingSearched",
    "The search attends to source padding.",
    lambda ids, *rest: (np.where(ids == 0, 5, ids), *rest),
)
