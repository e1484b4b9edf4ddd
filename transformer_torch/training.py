"""Training (Vaswani et al., 2017, section 5): loss, gradients and the optimizer step.

B batch, S source length, T target length, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  the name everybody knows it by
from torch import Tensor

from reference_numpy.checks import check_accumulation, check_integer, check_labels, check_same_batch, check_trainable
from reference_numpy.config import TransformerConfig
from reference_numpy.names import check_training_state
from reference_numpy.taps import Recorder, Tap, no_tap
from reference_numpy.training_config import Gradients, StepResult, TrainingConfig, TrainingState
from transformer_torch.masks import padding_mask, target_padding_mask
from transformer_torch.runtime import dtype_name, to_ids
from transformer_torch.weights import copy_in, copy_out, parameters

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from transformer_torch.transformer import Transformer

MIXED_BFLOAT16 = True  # whether this backend can compute in bfloat16 with float32 weights


def cross_entropy(
    logits: Float[Tensor, "B T V"], labels: Int[Tensor, "B T"], config: TransformerConfig
) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
    """Return the label-smoothed cross-entropy in nats, summed over the target tokens, and their number.

    Section 5.4: the probability ``label_smoothing`` is taken from the right token and spread over all tokens
    (``uniform``), over the wrong ones (``off_target``), or over the wrong ones but padding (``off_target_and_pad``).
    Labels that are ``pad_id`` count for nothing. The logarithms are taken in at least float32.

    Args:
        logits: The scores of each next token.
        labels: The right next tokens, padded with ``config.pad_id``.
        config: Has the padding id and the label smoothing.
    """
    log_probabilities = logits.log_softmax(-1, torch.promote_types(logits.dtype, torch.float32))  # [B, T, V]
    # What gather would pick; the backward pass of nll_loss is twice as fast.
    right = -F.nll_loss(log_probabilities.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)  # [B, T]
    smoothing = config.label_smoothing
    spread = log_probabilities.sum(-1)  # [B, T]
    classes = config.target_vocab_size
    if config.label_smoothing_kind != "uniform":
        spread = spread - right
        classes -= 1
    if config.label_smoothing_kind == "off_target_and_pad":
        spread = spread - log_probabilities[..., config.pad_id]
        classes -= 1
    losses = -(1.0 - smoothing) * right - (smoothing / classes * spread if smoothing else 0.0)  # [B, T]
    counted = labels != config.pad_id
    return losses.masked_fill(~counted, 0.0).sum(), counted.sum()


def gradients(model: Transformer, source_ids: Any, target_ids: Any, labels: Any) -> Gradients:
    """Return the loss per target token of a batch, and its gradient at every parameter and every tap.

    Dropout is off. With no target token at all, loss and gradients are zero.

    Args:
        model: The model, left as it is.
        source_ids: The source sentences [B, S], padded with ``config.pad_id``.
        target_ids: What the decoder reads [B, T], starting with ``config.bos_id``, padded likewise.
        labels: What it should say [B, T]: the target sentences, ending with ``config.eos_id``, padded likewise.

    Raises:
        TypeError: Ids that are not integers.
        ValueError: Ids of the wrong shape or outside the vocabulary.
    """
    batch = _take(model, source_ids, target_ids, labels)
    was_training = model.training
    seen = Recorder()
    try:
        total, tokens = _loss(model.eval(), batch, seen)
    finally:
        model.train(was_training)
    loss = total / tokens.clamp(min=1)
    named = parameters(model)
    of_all = torch.autograd.grad(loss, [*named.values(), *seen.values()])
    of_parameters, of_taps = of_all[: len(named)], of_all[len(named) :]
    return Gradients(
        loss.item(),
        {name: copy_out(name, gradient) for name, gradient in zip(named, of_parameters, strict=True)},
        {name: copy_out(name, gradient) for name, gradient in zip(seen, of_taps, strict=True)},
    )


class Trainer:
    """Trains a model in place, one batch a step; between two steps the model is in inference mode.

    Adam is Algorithm 1 of Kingma and Ba (2015): the moments are corrected for their bias, and epsilon is added to the
    root of the corrected one. The learning rate is that of equation (3).

    Args:
        model: The model to train, in float32 or float64.
        settings: Optimizer, schedule, clipping, accumulation and mixed precision.
        seed: With the number of the step, all that the dropout of that step depends on.
        compile: Hand the forward and backward pass to torch.compile: slow first steps, faster ones after them.

    Raises:
        TypeError: The seed is not an integer.
        ValueError: The model's dtype cannot be trained, mixed precision needs float32, or the seed is negative.
    """

    def __init__(
        self,
        model: Transformer,
        settings: TrainingConfig,
        seed: int = 0,
        *,
        compile: bool = False,  # noqa: A002  torch's own word
    ) -> None:
        check_trainable(
            dtype_name(model.source_embedding.table), mixed_bfloat16=settings.mixed_bfloat16, supported=MIXED_BFLOAT16
        )
        check_integer("seed", seed, minimum=0)
        self.model = model.eval()
        self.settings = settings
        self.seed = seed
        self.step = 0  # steps taken
        self.optimizer = torch.optim.Adam(
            model.parameters(), betas=(settings.beta1, settings.beta2), eps=settings.epsilon, fused=True
        )
        for parameter in model.parameters():  # as the optimizer itself would on its first step
            self.optimizer.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        self._loss = torch.compile(_loss) if compile else _loss

    def train_step(self, source_ids: Any, target_ids: Any, labels: Any) -> StepResult:
        """Take one step of Adam on the loss per target token of a batch, with dropout.

        Args:
            source_ids: The source sentences [B, S], padded with ``config.pad_id``.
            target_ids: What the decoder reads [B, T], starting with ``config.bos_id``, padded likewise.
            labels: What it should say [B, T]: the target sentences, ending with ``config.eos_id``, padded likewise.

        Raises:
            TypeError: Ids that are not integers.
            ValueError: Ids of the wrong shape or outside the vocabulary, or a batch that does not fall into slices.
        """
        settings = self.settings
        batch = _take(self.model, source_ids, target_ids, labels)
        check_accumulation(settings.accumulation_steps, len(batch[0]))
        tokens = (batch[2] != self.model.config.pad_id).sum()
        self.optimizer.zero_grad()
        with _dropout_from(self.model, self.seed, self.step), _checkpointing(self.model, settings):
            parts = zip(*(tensor.chunk(settings.accumulation_steps) for tensor in batch), strict=True)
            loss = torch.stack([self._backward(part, tokens) for part in parts]).sum()
        gradient = [p.grad for p in self.model.parameters() if p.grad is not None]  # a frozen parameter has none
        norm = torch.nn.utils.get_total_norm(gradient)
        if settings.clip_norm is not None:  # clip_grad_norm_ would add 1e-6 to the norm
            torch._foreach_mul_(gradient, settings.clip_norm / norm.clamp(min=settings.clip_norm))
        self.step += 1
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate(self.step, self.model.config.d_model)
        self.optimizer.step()
        return StepResult(loss, tokens, norm)

    @torch.no_grad()
    def evaluate(self, source_ids: Any, target_ids: Any, labels: Any) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
        """Return the cross-entropy in nats summed over the target tokens, and their number: no dropout, no smoothing.

        Arguments and errors as in ``train_step``.
        """
        source_ids, target_ids, labels = _take(self.model, source_ids, target_ids, labels)
        config = self.model.config.replace(label_smoothing=0.0)
        return cross_entropy(_logits(self.model.eval(), source_ids, target_ids), labels, config)

    def export_state(self) -> TrainingState:
        """Return a copy of everything that the next step depends on, beside the weights and the settings."""
        first, second = (
            {name: copy_out(name, self.optimizer.state[p][moment]) for name, p in parameters(self.model).items()}
            for moment in ("exp_avg", "exp_avg_sq")
        )
        return TrainingState(self.step, self.seed, first, second)

    def load_state(self, state: TrainingState) -> None:
        """Go on from a state that any of the four packages exported.

        Raises:
            TypeError: A moment is not of a floating-point dtype.
            ValueError: The moments are not those of the model's config, or overflow its dtype.
        """
        check_training_state(self.model.config, state, dtype_name(self.model.source_embedding.table))
        self.step, self.seed = state.step, state.seed
        for name, parameter in parameters(self.model).items():
            remembered = self.optimizer.state[parameter]
            remembered["step"].fill_(state.step)
            copy_in(name, state.first_moment[name], remembered["exp_avg"])
            copy_in(name, state.second_moment[name], remembered["exp_avg_sq"])

    def _backward(self, part: tuple[Tensor, ...], tokens: Tensor) -> Tensor:
        """Add the gradient of a slice of the batch to the others', and return its share of the loss."""
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.settings.mixed_bfloat16):
            total, _ = self._loss(self.model, part)
        loss = total / tokens.clamp(min=1)
        loss.backward()
        return loss.detach()


def _take(model, source_ids, target_ids, labels):
    """Take a batch from the outside, checked."""
    config, device = model.config, model.device
    source_ids = to_ids("source_ids", source_ids, config.source_vocab_size, config.max_positions, device)
    target_ids = to_ids("target_ids", target_ids, config.target_vocab_size, config.max_positions, device)
    labels = to_ids("labels", labels, config.target_vocab_size, None, device)
    check_same_batch(source_ids.shape, target_ids.shape)
    check_labels(labels.shape, target_ids.shape)
    return source_ids, target_ids, labels


def _logits(model: Transformer, source_ids: Tensor, target_ids: Tensor, tap: Tap = no_tap) -> Tensor:
    """Call the model on ids that are checked: to look at their values once more, the host would wait for a GPU."""
    source_mask = padding_mask(source_ids, model.config.pad_id)
    target_mask = target_padding_mask(target_ids, model.config.pad_id)
    memory = model._encode(source_ids, source_mask, tap)
    return model._decode(target_ids, memory, source_mask, target_mask, tap)


def _loss(model: Transformer, batch: tuple[Tensor, ...], tap: Tap = no_tap) -> tuple[Tensor, Tensor]:
    source_ids, target_ids, labels = batch
    return cross_entropy(_logits(model, source_ids, target_ids, tap), labels, model.config)


@contextmanager
def _dropout_from(model: Transformer, *entropy: int) -> Iterator[None]:
    """Switch dropout on, drawn from the given numbers alone; leave torch's own random numbers as they were."""
    device = model.device
    # Not torch.manual_seed: that would seed the generators of all devices.
    generator = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]
    state = generator.get_state()
    generator.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]))
    model.train()
    try:
        yield
    finally:
        model.eval()
        generator.set_state(state)


@contextmanager
def _checkpointing(model: Transformer, settings: TrainingConfig) -> Iterator[None]:
    """Let the layers of a model save memory, if the settings say so."""
    stacks = model.encoder, model.decoder
    for stack in stacks:
        stack.activation_checkpointing = settings.activation_checkpointing
    try:
        yield
    finally:
        for stack in stacks:
            stack.activation_checkpointing = False
