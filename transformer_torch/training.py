"""Training (Vaswani et al., 2017, section 5): loss, gradients and the optimizer step.

B batch, S source length, T target length, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import parametrize

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
)
from transformer_spec.config import TransformerConfig
from transformer_spec.names import check_training_state
from transformer_spec.parallel_plan import DROPOUTS
from transformer_spec.shapes import Float, Int
from transformer_spec.taps import Recorder, no_tap
from transformer_spec.training_config import Gradients, StepResult, TrainingConfig, TrainingState
from transformer_torch.layers import inference
from transformer_torch.optimizer import Adam, by_mesh, clip_factor, global_norm
from transformer_torch.parallel import Share, plan_of
from transformer_torch.runtime import dtype_name, to_ids
from transformer_torch.transformer import transformer_of
from transformer_torch.weights import check_complete, computed_with, copy_in, copy_out, is_divided, parameters

DRAWING = Lock()  # of dropout from the default generator
MIXED_BFLOAT16 = True  # whether this backend can compute in bfloat16 with float32 weights


def cross_entropy(
    logits: Float[Tensor, "B T V"], labels: Int[Tensor, "B T"], config: TransformerConfig
) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
    """Return the label-smoothed cross-entropy in nats, summed over the target tokens, and their number.

    Section 5.4: the probability ``label_smoothing`` is moved from the right token to all tokens (``uniform``), to the
    wrong ones (``off_target``), or to the wrong ones except padding (``off_target_and_pad``). Logarithms are computed
    in at least float32.

    Args:
        logits: Scores of each next token.
        labels: Right next tokens, padded with ``config.pad_id``; padding has no loss.
        config: Vocabulary, padding id and label smoothing.

    Raises:
        TypeError: If labels are not integers.
        ValueError: If labels have the wrong shape or are outside the vocabulary.
    """
    labels = to_ids("labels", labels, config.target_vocab_size, None, logits.device)
    check_logits(logits.shape, labels.shape, config.target_vocab_size)
    log_probabilities = logits.log_softmax(-1, torch.promote_types(logits.dtype, torch.float32))  # [B, T, V]
    spread = log_probabilities.sum(-1)  # [B, T]
    right = log_probabilities.take_along_dim(labels[..., None], -1)[..., 0]  # [B, T]
    smoothing = config.label_smoothing
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


def gradients(model: nn.Module, source_ids: Any, target_ids: Any, labels: Any) -> Gradients:
    """Return the loss per target token of a batch, and its gradient at every parameter and every tap.

    Dropout is off. Without any target token, loss and gradients are zero.

    Args:
        model: The model, or a module around it. It is not changed.
        source_ids: Source sentences [B, S], padded with ``config.pad_id``.
        target_ids: Decoder inputs [B, T], starting with ``config.bos_id``, padded with ``config.pad_id``.
        labels: Right next tokens [B, T]: the target sentences, ending with ``config.eos_id``, padded.

    Raises:
        TypeError: If the model contains no Transformer, or ids are not integers.
        ValueError: If ids have the wrong shape or are outside the vocabulary, or the model has adapters or trainable
            parameters without a canonical name.
    """
    transformer, seen = transformer_of(model), Recorder()
    if is_divided(model):
        raise ValueError("the model is divided over a mesh: Trainer.gradient has the gradients of its parameters")
    check_complete(transformer)
    batch = _take(model, source_ids, target_ids, labels)
    with inference(model), parametrize.cached():  # what a parametrized layer computes with is then one tensor
        # A tap behind frozen parts has a gradient because it asks for one.
        total, tokens = _loss(model, batch, transformer.config, lambda name, x: seen(name, x.requires_grad_()))
        weights = computed_with(transformer)  # by now: a pruned layer computes its own as it is called
    trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
    loss = total / tokens.clamp(min=1)
    found = iter(torch.autograd.grad(loss, [*trained.values(), *seen.values()]))
    return Gradients(
        loss.item(),
        {name: copy_out(name, next(found)) for name in trained},
        {name: copy_out(name, next(found)) for name in seen},
        tuple(name for name in weights if name not in trained),
    )


class Trainer:
    """Trains a model in place, one batch per step; between two steps the model is in inference mode.

    A step follows the gradient of the loss per target token with Adam and the learning rate of equation (3). Frozen
    parameters don't change and have no moments.

    The model may be wrapped, for example by torch.compile or DistributedDataParallel, which averages the gradients that
    its processes compute per target token. Adapters and parametrized layers are trained, but ``export_state`` raises:
    they have no moments of the weights.

    Dropout is drawn from PyTorch's default generator, which each step seeds; afterwards its state is as before. Code in
    other threads that draws from it during a step gets different numbers.

    A mesh divides the model in place; its processes call each method together. Between steps they may call the model,
    and search with it unless its parameters are divided. If dropout is ``global``, attention with dropout doesn't use
    the fused kernel, which draws only for what it computes. On a GPU, where the two draw other numbers, one device
    needs a mesh of one to compute the same as several.

    Args:
        model: The model to train, in float32 or float64.
        settings: Optimizer, schedule, clipping, accumulation and mixed precision.
        seed: Together with the number of the step, determines the dropout of that step.
        mesh: Devices that share each step, from ``make_mesh``; each process is given the full batch. None is the
            model's device.
        dropout: ``global`` draws dropout for the full batch, so the number of devices doesn't matter; ``local`` draws
            it for each device's rows separately, which is faster.
        compile: True hands the forward and backward pass to torch.compile: the first steps are slow, later ones faster.

    Raises:
        TypeError: If the model contains no Transformer, the seed is not an integer, or the mesh is not a DeviceMesh.
        ValueError: If the model's dtype cannot be trained, mixed precision needs float32, the seed is negative, the
            mesh has an unknown axis or can't divide the model, or dropout is unknown.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: TrainingConfig,
        seed: int = 0,
        *,
        mesh: DeviceMesh | None = None,
        dropout: str = "global",
        compile: bool = False,  # noqa: A002
    ) -> None:
        config = transformer_of(model).config
        check_type("settings", settings, TrainingConfig)
        check_trainable(dtype_name(transformer_of(model)), settings.mixed_bfloat16, MIXED_BFLOAT16)
        seed = check_integer("seed", seed, minimum=0)
        check_choice("dropout", dropout, DROPOUTS)
        self.mesh, self.plan, self.dropout = mesh, plan_of(mesh, config), dropout
        self.share = Share(model, mesh, dropout)
        self.share.check_same("seed, settings, dropout and model", (seed, settings, dropout, config))
        self.model = model.eval()
        self.settings = settings
        self.seed = seed
        self.step = 0  # steps taken
        self.optimizer = Adam(model.parameters(), settings)
        self._loss = torch.compile(_loss) if compile else _loss

    def train_step(self, source_ids: Any, target_ids: Any, labels: Any) -> StepResult:
        """Take one step of Adam on the loss per target token of a batch, with dropout.

        Args:
            source_ids: The source sentences [B, S], padded with ``config.pad_id``.
            target_ids: What the decoder reads [B, T], starting with ``config.bos_id``, padded likewise.
            labels: The right next tokens [B, T]: the target sentences, ending with ``config.eos_id``, padded likewise.

        Raises:
            TypeError: Ids that are not integers.
            ValueError: Ids of the wrong shape or outside the vocabulary, or a batch that does not fall into slices.
        """
        settings, config = self.settings, transformer_of(self.model).config
        batch = _take(self.model, source_ids, target_ids, labels)
        check_accumulation(settings.accumulation_steps, len(batch[0]))
        with _training(self.model, settings, self.seed, self.step, *self.share.entropy):
            loss, tokens, gradient = self._gradient(batch)
        norm = global_norm(gradient)
        if settings.clip_norm is not None:
            for tensors in by_mesh(gradient):
                torch._foreach_mul_(tensors, clip_factor(norm, settings.clip_norm))
        self.optimizer.update(settings.learning_rate(self.step + 1, config.d_model), self.step)
        self.step += 1
        return StepResult(loss, tokens, norm)

    def gradient(self, source_ids: Any, target_ids: Any, labels: Any) -> Gradients:
        """Return the loss per target token of a batch and the whole gradient that a step would follow, before clipping.

        Arguments and errors as in ``train_step``, whose dropout, slices and devices it has. Nothing is updated.
        """
        check_complete(transformer_of(self.model))
        named = parameters(transformer_of(self.model))
        batch = _take(self.model, source_ids, target_ids, labels)
        check_accumulation(self.settings.accumulation_steps, len(batch[0]))
        with _training(self.model, self.settings, self.seed, self.step, *self.share.entropy):
            loss, _, _ = self._gradient(batch)
        found = {name: copy_out(name, p.grad) for name, p in named.items() if p.grad is not None}
        self.model.zero_grad()
        return Gradients(loss.item(), found, frozen=tuple(name for name in named if name not in found))

    @torch.no_grad()
    def evaluate(self, source_ids: Any, target_ids: Any, labels: Any) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
        """Return the cross-entropy in nats summed over the target tokens, and their number: no dropout, no smoothing.

        Arguments and errors as in ``train_step``.
        """
        batch = _take(self.model, source_ids, target_ids, labels)
        with inference(self.model):
            config = transformer_of(self.model).config.replace(label_smoothing=0.0)
            (part,) = self.share.slices(batch, 1)
            total, tokens = _loss(self.share.module, part, config)
        return self.share.summed(total), self.share.summed(tokens)

    def export_state(self) -> TrainingState:
        """Return a copy of everything that the next step depends on, beside the weights and the settings.

        Raises:
            ValueError: If there are trainable parameters without a canonical name, such as those of an adapter.
        """
        transformer, first, second = transformer_of(self.model), dict[str, Any](), dict[str, Any]()
        check_complete(transformer)
        for name, parameter in parameters(transformer).items():
            state = self.optimizer.state.get(parameter, {})  # a frozen parameter has none
            for moments, key in ((first, "exp_avg"), (second, "exp_avg_sq")):
                moments[name] = copy_out(name, state[key] if state else torch.zeros_like(parameter))
        return TrainingState(self.step, self.seed, first, second)

    def load_state(self, state: TrainingState) -> None:
        """Resume from an exported state.

        Raises:
            TypeError: If a moment is not of a floating-point dtype.
            ValueError: If the moments don't match the model's config, or overflow its dtype.
        """
        transformer = transformer_of(self.model)
        check_training_state(transformer.config, state, dtype_name(transformer))
        named = parameters(transformer)
        self.step, self.seed = state.step, state.seed
        for name, parameter in named.items():
            first, second = state.first_moment[name], state.second_moment[name]
            if parameter in self.optimizer.state or parameter.requires_grad or np.any(first) or np.any(second):
                remembered = self.optimizer.moments(parameter, state.step)
                remembered["step"].fill_(state.step)
                copy_in(name, first, remembered["exp_avg"])
                copy_in(name, second, remembered["exp_avg_sq"])

    def _gradient(self, batch):
        """Return loss, tokens and gradient, summed over the shares of all slices of a batch."""
        settings, config, losses = self.settings, transformer_of(self.model).config, []
        known = dict.fromkeys(p for group in self.optimizer.param_groups for p in group["params"])
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if lost := [name for name, p in trained.items() if p not in known]:
            raise ValueError(f"the optimizer must have all trainable parameters: make a new Trainer for {some(lost)}")
        tokens = (batch[2] != config.pad_id).sum()
        self.optimizer.zero_grad()
        for part in self.share.slices(batch, settings.accumulation_steps):
            with torch.autocast(tokens.device.type, torch.bfloat16) if settings.mixed_bfloat16 else nullcontext():
                total, _ = self._loss(self.share.module, part, config)
            loss = total / tokens.clamp(min=1)
            loss.backward()
            losses.append(loss.detach())
        if lost := [name for name, p in trained.items() if p.grad is None]:  # such as those before a quantized layer
            raise ValueError(f"the loss must depend on all trainable parameters: freeze or remove {some(lost)}")
        gradient = [p.grad for p in known if p.grad is not None]  # a frozen parameter has none
        return self.share.summed(torch.stack(losses).sum()), tokens, gradient


def _take(model, source_ids, target_ids, labels):
    """Take a batch from the outside, checked."""
    config, device = transformer_of(model).config, transformer_of(model).device
    source_ids = to_ids("source_ids", source_ids, config.source_vocab_size, config.max_positions, device)
    target_ids = to_ids("target_ids", target_ids, config.target_vocab_size, config.max_positions, device)
    labels = to_ids("labels", labels, config.target_vocab_size, None, device)
    check_same_batch(source_ids.shape, target_ids.shape)
    check_labels(labels.shape, target_ids.shape)
    return source_ids, target_ids, labels


def _loss(model, batch, config, tap=no_tap):
    """Return the summed loss of a batch, and the number of its target tokens."""
    source_ids, target_ids, labels = batch
    return cross_entropy(model(source_ids, target_ids, tap=tap), labels, config)


@contextmanager
def _training(model: nn.Module, settings: TrainingConfig, *entropy: int) -> Iterator[None]:
    """Switch dropout on, drawn from the given numbers only, and activation checkpointing if the settings say so.

    Compiled code, fused kernels and the caller's own layers draw from the default generator. A step seeds it, and
    restores its state. Steps of different trainers therefore wait for each other.
    """
    transformer = transformer_of(model)
    device, stacks = transformer.device, (transformer.encoder, transformer.decoder)
    # Not torch.manual_seed: that would seed the generators of all devices.
    generator = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]
    with DRAWING:
        state = generator.get_state()
        generator.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]))
        model.train()
        for stack in stacks:
            stack.activation_checkpointing = settings.activation_checkpointing
        try:
            yield
        finally:
            for stack in stacks:
                stack.activation_checkpointing = False
            model.eval()
            generator.set_state(state)
