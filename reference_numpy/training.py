"""Training (Vaswani et al., 2017, section 5): loss, gradients, and the optimizer step.

Axes: B batch, S source length, T target length, V target vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy import ndarray

from reference_numpy.backward import transformer_backward
from reference_numpy.backward_checks import check_backward, check_gradients
from reference_numpy.backward_trace import Activations, LayerInputs
from reference_numpy.fast import FastAdam, FastOutputProjection, by_sentence
from reference_numpy.functional import UNDERFLOW, log_softmax, masked_softmax
from reference_numpy.masks import causal_mask, padding_mask, target_padding_mask
from reference_numpy.optimizer import Adam, clip_factor, global_norm
from reference_numpy.parallel import divide, plan_of
from reference_numpy.runtime import to_ids
from reference_numpy.transformer import Transformer, check_model
from reference_numpy.weights import parameters
from transformer_spec.checks import (
    check_accumulation,
    check_choice,
    check_integer,
    check_labels,
    check_logits,
    check_same_batch,
    check_trainable,
    check_type,
    some,
    to_array,
)
from transformer_spec.config import TransformerConfig
from transformer_spec.names import check_training_state
from transformer_spec.parallel_plan import DROPOUTS, Plan
from transformer_spec.shapes import Float, Int
from transformer_spec.taps import Recorder
from transformer_spec.training_config import Gradients, StepResult, TrainingConfig, TrainingState

MIXED_BFLOAT16 = False  # NumPy doesn't support bfloat16


@UNDERFLOW
def cross_entropy(
    logits: Float[ndarray, "B T V"], labels: Int[ndarray, "B T"], config: TransformerConfig
) -> tuple[Float[ndarray, ""], Int[ndarray, ""]]:
    """Return the label-smoothed cross-entropy in nats, summed over the target tokens, and the number of target tokens.

    Label smoothing (section 5.4) takes the probability ``label_smoothing`` from the correct token and distributes it
    equally over all tokens (``uniform``), all incorrect tokens (``off_target``), or all incorrect tokens except padding
    (``off_target_and_pad``). Logarithms are computed in at least float32.

    Args:
        logits: Logits of the next tokens.
        labels: Expected tokens, padded with ``config.pad_id``. Padding doesn't contribute to the loss.
        config: Model configuration, which defines the vocabulary, the padding ID, and the label smoothing.

    Raises:
        TypeError: If the labels are not integers.
        ValueError: If the labels have the wrong shape or are outside the vocabulary.
    """
    check_type("config", config, TransformerConfig)
    logits, labels = to_array("logits", logits), to_ids("labels", labels, config.target_vocab_size, None)
    check_logits(logits.shape, labels.shape, config.target_vocab_size)
    logits = logits.astype(np.promote_types(logits.dtype, np.float32), copy=False)
    log_probabilities = log_softmax(logits)  # [B, T, V]
    classes = config.target_vocab_size
    if config.label_smoothing_kind == "off_target_and_pad":  # padding is excluded, and its logit may be -inf
        log_probabilities = np.where(np.arange(config.target_vocab_size) == config.pad_id, 0.0, log_probabilities)
        classes -= 1
    right = np.take_along_axis(log_probabilities, labels[..., None], -1)[..., 0]  # [B, T]
    smoothing = config.label_smoothing
    spread = log_probabilities.sum(-1)  # [B, T]
    if config.label_smoothing_kind != "uniform":
        spread = spread - right
        classes -= 1
    losses = -(1.0 - smoothing) * right - (smoothing / classes * spread if smoothing else 0.0)  # [B, T]
    counted = labels != config.pad_id
    return np.asarray(np.where(counted, losses, 0.0).sum()), np.asarray(counted.sum())


def cross_entropy_backward(
    logits: Float[ndarray, "B T V"], labels: Int[ndarray, "B T"], config: TransformerConfig
) -> Float[ndarray, "B T V"]:
    """Return the gradient of the summed ``cross_entropy`` with respect to the logits: prediction - target.

    The gradient has this simple form because the target probabilities sum to one.

    Args:
        logits: Logits of the next tokens.
        labels: Expected tokens, padded with ``config.pad_id``.
        config: Model configuration, which defines the vocabulary, the padding ID, and the label smoothing.
    """
    kind, smoothing = config.label_smoothing_kind, config.label_smoothing
    others = {"uniform": 0, "off_target": 1, "off_target_and_pad": 2}[kind]
    share = smoothing / (config.target_vocab_size - others) if smoothing else 0.0
    target = np.full_like(logits, share)
    if kind == "off_target_and_pad":
        target[..., config.pad_id] = 0.0
    right = 1.0 - smoothing + (share if kind == "uniform" else 0.0)
    np.put_along_axis(target, labels[..., None], right, -1)
    counted = (labels != config.pad_id)[..., None]  # [B, T, 1]
    return np.where(counted, masked_softmax(logits) - target, 0.0)


@UNDERFLOW
def gradients(model: Transformer, source_ids: Any, target_ids: Any, labels: Any) -> Gradients:
    """Return the loss per target token of a batch, and its gradients with respect to all parameters and taps.

    Dropout is off. If the batch contains no target tokens, the loss and the gradients are zero.

    Args:
        model: Model, which is not modified.
        source_ids: Source token IDs [B, S], padded with ``config.pad_id``.
        target_ids: Decoder input [B, T]: BOS and the target tokens except the last, padded with ``config.pad_id``.
        labels: Expected tokens [B, T]: the target tokens including EOS, padded with ``config.pad_id``.

    Raises:
        TypeError: If ``model`` is not a ``Transformer``, or the IDs are not integers.
        ValueError: If the IDs have the wrong shape or are outside the vocabulary, the model's parameters don't match
            its config, or a layer overrides only its forward pass.
    """
    batch = _take(model, source_ids, target_ids, labels)
    check_backward(model)  # first, because a changed layer may break the forward pass
    parameters(model)  # raises an error if the model's parameters don't match its config
    total, tokens, of_parameters, of_taps = _backward(model, batch, Activations(), Recorder())
    scale = 1 / max(int(tokens), 1)  # multiplying by a Python number keeps float32
    return Gradients(
        float(total * scale),
        {name: gradient * scale for name, gradient in of_parameters.items()},
        {name: gradient * scale for name, gradient in of_taps.items()},
    )


class Trainer:
    """Trainer that updates a model in place, one batch per step (section 5).

    Each step computes the gradient of the loss per target token, clips it, and updates the parameters using Adam and
    the learning rate of equation (3). Between steps, the model is in inference mode.

    Args:
        model: Model in float32 or float64.
        settings: Optimizer, learning rate schedule, clipping, gradient accumulation, and mixed precision.
        seed: Seed for dropout. The dropout masks of a step depend only on the seed and the step number.
        mesh: Mesh from ``make_mesh``. Each step divides the batch among the mesh's devices. If None, only the model's
            device is used.
        dropout: ``global`` samples the dropout masks of the full batch, so that the result doesn't depend on the number
            of devices. ``local`` samples the masks separately on each device, which is faster.

    Attributes:
        step: Number of steps taken so far.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the model is not in float32 or float64, has no weights yet, has parameters that don't match its
            config, or contains a layer that overrides only its forward pass. This error is also raised if mixed
            precision is combined with float64, if the mesh can't divide the model, or if another argument is invalid.
    """

    def __init__(
        self,
        model: Transformer,
        settings: TrainingConfig,
        seed: int = 0,
        *,
        mesh: Plan | None = None,
        dropout: str = "global",
    ) -> None:
        check_model(model)
        _check_settings(model, settings)
        if not model.source_embedding.table.any():
            raise ValueError("the model has no weights yet; call set_weights(model, init_weights(config, seed)) first")
        seed = check_integer("seed", seed, minimum=0)
        check_choice("dropout", dropout, DROPOUTS)
        self.model = model
        self.settings = settings
        self.seed = seed
        self.step = 0  # number of steps taken
        self.mesh, self.plan, self.dropout = mesh, plan_of(mesh, model.config), dropout
        adam = FastAdam if model.fast else Adam
        check_backward(model)
        self.optimizer = adam(parameters(model), settings)

    @UNDERFLOW
    def train_step(self, source_ids: Any, target_ids: Any, labels: Any) -> StepResult:
        """Take one optimizer step on the loss per target token of a batch, with dropout enabled.

        Args:
            source_ids: Source token IDs [B, S], padded with ``config.pad_id``.
            target_ids: Decoder input [B, T]: BOS and the target tokens except the last, padded with ``config.pad_id``.
            labels: Expected tokens [B, T]: the target tokens including EOS, padded with ``config.pad_id``.

        Returns:
            Loss per target token before the update, number of target tokens, and gradient norm before clipping.

        Raises:
            TypeError: If the IDs are not integers.
            ValueError: If the IDs have the wrong shape or are outside the vocabulary, if ``accumulation_steps`` doesn't
                divide the batch size, or if a parameter can't be updated. In these cases, no parameter is updated.
        """
        settings, config = self.settings, self.model.config
        _check_settings(self.model, settings)
        batch = _take(self.model, source_ids, target_ids, labels)
        check_accumulation(settings.accumulation_steps, len(batch[0]))
        total, tokens, gradient = self._gradient(batch)
        count = max(int(tokens), 1)
        norm = global_norm(gradient) / count
        scale = clip_factor(norm, settings.clip_norm) / count
        learning_rate = settings.learning_rate(self.step + 1, config.d_model)
        found = parameters(self.model)  # a caller may have replaced some of the arrays since the last step
        if missing := [name for name in found if name not in getattr(self.optimizer, "parameters", found)]:
            raise ValueError(f"the optimizer must update all parameters of the model: {some(missing)} missing")
        self.optimizer.parameters, self.optimizer.settings = found, settings
        # Without this check, the update could raise an error after it has changed some of the parameters.
        if not math.isfinite(norm) and "raise" in np.geterr().values():
            raise FloatingPointError(f"gradient norm must be finite: got {norm}; lower the learning rate")
        self.optimizer.update(gradient, scale, learning_rate, settings.bias_corrections(self.step + 1))
        self.step += 1
        return StepResult(total / count, tokens, norm)

    @UNDERFLOW
    def gradient(self, source_ids: Any, target_ids: Any, labels: Any) -> Gradients:
        """Return the loss per target token of a batch, and the gradient that ``train_step`` computes before clipping.

        Dropout, micro-batches, and devices are the same as in ``train_step``. Nothing is updated.

        Args:
            source_ids: Source token IDs [B, S], padded with ``config.pad_id``.
            target_ids: Decoder input [B, T]: BOS and the target tokens except the last, padded with ``config.pad_id``.
            labels: Expected tokens [B, T]: the target tokens including EOS, padded with ``config.pad_id``.

        Raises:
            TypeError: If the IDs are not integers.
            ValueError: If the IDs have the wrong shape or are outside the vocabulary, or ``accumulation_steps`` doesn't
                divide the batch size.
        """
        _check_settings(self.model, self.settings)
        batch = _take(self.model, source_ids, target_ids, labels)
        check_accumulation(self.settings.accumulation_steps, len(batch[0]))
        total, tokens, gradient = self._gradient(batch)
        count = max(int(tokens), 1)
        return Gradients(float(total / count), {name: array / count for name, array in gradient.items()})

    def evaluate(self, source_ids: Any, target_ids: Any, labels: Any) -> tuple[Float[ndarray, ""], Int[ndarray, ""]]:
        """Return the cross-entropy in nats, summed over the target tokens, and the number of target tokens.

        Dropout and label smoothing are off.

        Args:
            source_ids: Source token IDs [B, S], padded with ``config.pad_id``.
            target_ids: Decoder input [B, T]: BOS and the target tokens except the last, padded with ``config.pad_id``.
            labels: Expected tokens [B, T]: the target tokens including EOS, padded with ``config.pad_id``.

        Raises:
            TypeError: If the IDs are not integers.
            ValueError: If the IDs have the wrong shape or are outside the vocabulary.
        """
        source_ids, target_ids, labels = _take(self.model, source_ids, target_ids, labels)
        config = self.model.config.replace(label_smoothing=0.0)
        return cross_entropy(self.model(source_ids, target_ids), labels, config)

    def export_state(self) -> TrainingState:
        """Return a copy of the step number, the seed, and the moments.

        All later steps depend only on this state, the weights, and the arguments of the ``Trainer``.
        """
        first = {name: array.copy() for name, array in self.optimizer.first_moment.items()}
        second = {name: array.copy() for name, array in self.optimizer.second_moment.items()}
        return TrainingState(self.step, self.seed, first, second)

    def load_state(self, state: TrainingState) -> None:
        """Resume from an exported state.

        Args:
            state: State from ``export_state`` or a checkpoint.

        Raises:
            TypeError: If a moment doesn't have a floating-point dtype.
            ValueError: If the moments don't match the model's config or overflow the model's dtype.
        """
        check_training_state(self.model.config, state, self.model.source_embedding.table.dtype.name)
        self.step, self.seed = state.step, state.seed
        for name in state.first_moment:
            self.optimizer.first_moment[name][...] = state.first_moment[name]
            self.optimizer.second_moment[name][...] = state.second_moment[name]

    def _gradient(self, batch):
        """Return the loss, the number of tokens, and the gradient, summed over a batch's micro-batches and shards."""
        total, tokens, gradient = 0.0, 0, dict[str, ndarray]()
        for part, rng in divide(self, batch):
            seen = self._tap(part, rng)
            found = Recorder("**.kernel", "**.bias", "**.scale", "**.table")
            part_total, part_tokens, of_parameters, _ = _backward(self.model, part, seen, found, rng)
            total, tokens = total + part_total, tokens + part_tokens
            for name, array in gradient.items():
                of_parameters[name] += array
            gradient = of_parameters
        return total, tokens, gradient

    def _tap(self, batch, rng):
        """Return a tap for the forward pass that stores the values that the backward pass reads."""
        if not self.settings.activation_checkpointing:
            return Activations()
        (source_ids, target_ids, _), pad_id = batch, self.model.config.pad_id
        source_mask, target_mask = padding_mask(source_ids, pad_id), target_padding_mask(target_ids, pad_id)
        cross_mask, target_mask = source_mask[:, None, None, :], target_mask[:, None, None, :]
        self_mask = causal_mask(target_ids.shape[1]) & target_mask
        return LayerInputs({"encoder": (cross_mask,), "decoder": (self_mask, cross_mask)}, rng)


def _check_settings(model, settings):
    """Raise an error unless the settings are a ``TrainingConfig`` that supports the dtype of the model."""
    check_type("settings", settings, TrainingConfig)
    check_trainable(model.source_embedding.table.dtype.name, settings.mixed_bfloat16, MIXED_BFLOAT16)


def _take(model, source_ids, target_ids, labels):
    """Check and return a batch that a caller passed."""
    check_model(model)
    config = model.config
    source_ids = to_ids("source_ids", source_ids, config.source_vocab_size, config.max_positions)
    target_ids = to_ids("target_ids", target_ids, config.target_vocab_size, config.max_positions)
    labels = to_ids("labels", labels, config.target_vocab_size, None)
    check_same_batch(source_ids.shape, target_ids.shape)
    check_labels(labels.shape, target_ids.shape)
    return source_ids, target_ids, labels


@UNDERFLOW
def _backward(model, batch, seen, found, rng=None):
    """Return the summed loss, the number of tokens, and the gradients with respect to parameters and recorded taps."""
    source_ids, target_ids, labels = batch
    logits = model(source_ids, target_ids, tap=seen, rng=rng)
    arguments = logits, labels, model.config
    # ``by_sentence`` overwrites the logits. Layers of other classes may have stored the logits for later use.
    if model.fast and type(model.output_proj) is FastOutputProjection:
        (total, tokens), dlogits = by_sentence(cross_entropy, cross_entropy_backward, *arguments)
    else:
        (total, tokens), dlogits = cross_entropy(*arguments), cross_entropy_backward(*arguments)
    of_parameters, of_taps = transformer_backward(model, source_ids, target_ids, dlogits, seen, found)
    check_gradients(of_parameters, model.config)
    return total, tokens, of_parameters, of_taps
