"""Training (Vaswani et al., 2017, section 5): loss, gradients, and the optimizer step.

Axes: B batch, S source length, T target length, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import RLock
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
    random_stream,
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
from transformer_torch.parallel import BatchShard, plan_of
from transformer_torch.runtime import dtype_name, to_ids
from transformer_torch.transformer import transformer_of
from transformer_torch.weights import (
    check_complete,
    check_tie,
    computed_with,
    copy_in,
    copy_out,
    is_divided,
    parameters,
)

DRAWING = RLock()  # serializes the use of PyTorch's default generator
TRAINING: list[nn.Module] = []  # models that are in a training step; more than one if a hook trains another model
MIXED_BFLOAT16 = True  # this backend supports bfloat16 computation with float32 weights


def cross_entropy(
    logits: Float[Tensor, "B T V"], labels: Int[Tensor, "B T"], config: TransformerConfig
) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
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
    labels = to_ids("labels", labels, config.target_vocab_size, None, logits.device)
    check_logits(logits.shape, labels.shape, config.target_vocab_size)
    log_probabilities = logits.log_softmax(-1, torch.promote_types(logits.dtype, torch.float32))  # [B, T, V]
    classes = config.target_vocab_size
    if config.label_smoothing_kind == "off_target_and_pad":  # padding is excluded, and its logit may be -inf
        is_padding = torch.arange(config.target_vocab_size, device=logits.device) == config.pad_id
        log_probabilities = log_probabilities.masked_fill(is_padding, 0.0)
        classes -= 1
    spread = log_probabilities.sum(-1)  # [B, T]
    right = log_probabilities.gather(-1, labels[..., None])[..., 0]  # [B, T]
    smoothing = config.label_smoothing
    if config.label_smoothing_kind != "uniform":
        spread = spread - right
        classes -= 1
    losses = -(1.0 - smoothing) * right - (smoothing / classes * spread if smoothing else 0.0)  # [B, T]
    counted = labels != config.pad_id
    return losses.masked_fill(~counted, 0.0).sum(), counted.sum()


def gradients(model: nn.Module, source_ids: Any, target_ids: Any, labels: Any) -> Gradients:
    """Return the loss per target token of a batch, and its gradients with respect to all parameters and taps.

    Dropout is off. If the batch contains no target tokens, the loss and the gradients are zero. Frozen parameters have
    no gradient. The field ``frozen`` of the result lists their names.

    Args:
        model: Model, or a module that wraps a model. Neither is modified.
        source_ids: Source token IDs [B, S], padded with ``config.pad_id``.
        target_ids: Decoder input [B, T]: BOS and the target tokens except the last, padded with ``config.pad_id``.
        labels: Expected tokens [B, T]: the target tokens including EOS, padded with ``config.pad_id``.

    Raises:
        TypeError: If the module contains no ``Transformer``, or the IDs are not integers.
        ValueError: If the IDs have the wrong shape or are outside the vocabulary, the model has adapters or trainable
            parameters without a canonical name, or a mesh shards it.
    """
    transformer, seen = transformer_of(model), Recorder()
    if is_divided(model):
        raise ValueError("the model must not be sharded over a mesh; call Trainer.gradient instead")
    check_complete(transformer)
    batch = _take(model, source_ids, target_ids, labels)
    with inference(model), parametrize.cached():  # a parametrized layer computes its weight only once
        # Without requires_grad_, a tap after frozen layers would have no gradient.
        total, tokens = _loss(model, batch, transformer.config, lambda name, x: seen(name, x.requires_grad_()))
        weights = computed_with(transformer)  # the call above computes the weights of pruned layers
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
    """Trainer that updates a model in place, one batch per step (section 5).

    Each step computes the gradient of the loss per target token, clips it, and updates the parameters using Adam and
    the learning rate of equation (3). Between steps, the model is in inference mode. Frozen parameters don't change and
    have no moments.

    You can wrap the model, for example in ``torch.compile`` or in DistributedDataParallel. With
    DistributedDataParallel, each process computes the gradient of its loss per target token, and PyTorch averages
    the gradients of all processes. The trainer also trains adapters and parametrized layers. In this case,
    ``export_state`` raises an error, because the weights themselves have no moments.

    Each step seeds PyTorch's default generator for dropout, and restores its state afterwards. If another thread uses
    this generator during a step, the thread gets different random numbers.

    With a mesh, the trainer divides the model in place, and all processes must call each method of the trainer
    together. Between steps, a process can call the model. It can also search with the model, unless the mesh shards the
    parameters. If ``dropout`` is ``global``, attention with dropout doesn't use the fused kernel, because each process
    would sample masks for only its own rows. On a GPU, the masks that the kernel samples also differ from the masks of
    the unfused computation. To check that results don't depend on the number of devices, compare them with the results
    of a trainer that has a mesh of one device. Don't compare them with the results of a trainer that has no mesh.

    Args:
        model: Model, or a module that wraps it, in float32 or float64.
        settings: Optimizer, learning rate schedule, clipping, gradient accumulation, and mixed precision.
        seed: Seed for dropout. The dropout masks of a step depend only on the seed and the step number.
        mesh: Mesh from ``make_mesh``. Each step divides the batch among the mesh's devices. Pass the full batch in
            every process. If None, only the model's device is used.
        dropout: ``global`` samples the dropout masks of the full batch, so that the result doesn't depend on the number
            of devices. ``local`` samples the masks separately on each device, which is faster.
        compile: If True, ``torch.compile`` compiles the forward and backward pass. The first steps are slow, but later
            steps are faster.

    Attributes:
        step: Number of steps taken so far.

    Raises:
        TypeError: If the module contains no ``Transformer``, or another argument has the wrong type.
        ValueError: If the model is not in float32 or float64, if mixed precision is combined with float64, or if the
            mesh can't divide the model. This error is also raised if a mesh already shards the model, or if another
            argument is invalid.
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
        self.shard = BatchShard(model, mesh, dropout)
        self.shard.check_same("seed, settings, dropout, and model", (seed, settings, dropout, config))
        self._model = model.eval()
        self.settings = settings
        self.seed = seed
        self.step = 0  # number of steps taken
        self.optimizer = Adam(model.parameters(), settings)
        self._loss = torch.compile(_loss) if compile else _loss

    @property
    def model(self) -> nn.Module:
        """The trained model. To train or evaluate a different model, create a new ``Trainer``."""
        return self._model

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
            ValueError: If the IDs have the wrong shape or are outside the vocabulary, ``accumulation_steps`` doesn't
                divide the batch size, the model is no longer in float32 or float64, or the embedding that is tied to
                the output projection was replaced.
            RuntimeError: If a hook calls this method during a training step of the same model.
        """
        settings, config = self.settings, transformer_of(self.model).config
        batch = _take(self.model, source_ids, target_ids, labels)
        check_accumulation(settings.accumulation_steps, len(batch[0]))
        with _training(self.model, settings, *random_stream(self.seed, self.step), *self.shard.entropy):
            loss, tokens, gradient = self._gradient(batch)
        norm = global_norm(gradient)
        if settings.clip_norm is not None:
            for tensors in by_mesh(gradient):
                torch._foreach_mul_(tensors, clip_factor(norm, settings.clip_norm))
        self.optimizer.update(settings.learning_rate(self.step + 1, config.d_model), self.step)
        self.step += 1
        return StepResult(loss, tokens, norm)

    def gradient(self, source_ids: Any, target_ids: Any, labels: Any) -> Gradients:
        """Return the loss per target token of a batch, and the gradient that ``train_step`` computes before clipping.

        Dropout, micro-batches, and devices are the same as in ``train_step``. Nothing is updated.

        Args:
            source_ids: Source token IDs [B, S], padded with ``config.pad_id``.
            target_ids: Decoder input [B, T]: BOS and the target tokens except the last, padded with ``config.pad_id``.
            labels: Expected tokens [B, T]: the target tokens including EOS, padded with ``config.pad_id``.

        Raises:
            TypeError: If the IDs are not integers.
            ValueError: If the IDs have the wrong shape or are outside the vocabulary, ``accumulation_steps`` doesn't
                divide the batch size, the model is no longer in float32 or float64, or the embedding that is tied to
                the output projection was replaced.
            RuntimeError: If a hook calls this method during a training step of the same model.
        """
        check_complete(transformer_of(self.model))
        named = parameters(transformer_of(self.model))
        batch = _take(self.model, source_ids, target_ids, labels)
        check_accumulation(self.settings.accumulation_steps, len(batch[0]))
        accumulated = [(p, p.grad) for p in self.model.parameters()]  # gradients from the caller's own backward passes
        try:
            with _training(self.model, self.settings, *random_stream(self.seed, self.step), *self.shard.entropy):
                loss, _, _ = self._gradient(batch)
            found = {name: copy_out(name, p.grad) for name, p in named.items() if p.grad is not None}
        finally:
            for p, grad in accumulated:
                p.grad = grad
        return Gradients(loss.item(), found, frozen=tuple(name for name in named if name not in found))

    @torch.no_grad()
    def evaluate(self, source_ids: Any, target_ids: Any, labels: Any) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
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
        batch = _take(self.model, source_ids, target_ids, labels)
        with inference(self.model):
            config = transformer_of(self.model).config.replace(label_smoothing=0.0)
            (part,) = self.shard.micro_batches(batch, 1)
            total, tokens = _loss(self.shard.module, part, config)
        return self.shard.summed(total), self.shard.summed(tokens)

    def export_state(self) -> TrainingState:
        """Return a copy of the step number, the seed, and the moments.

        All later steps depend only on this state, the weights, and the arguments of the ``Trainer``.

        Raises:
            ValueError: If a trainable parameter has no canonical name, for example because it belongs to an adapter.
        """
        transformer, first, second = transformer_of(self.model), dict[str, Any](), dict[str, Any]()
        check_complete(transformer)
        for name, parameter in parameters(transformer).items():
            state = self.optimizer.state.get(parameter, {})  # empty for frozen parameters
            for moments, key in ((first, "exp_avg"), (second, "exp_avg_sq")):
                moments[name] = copy_out(name, state[key] if state else torch.zeros_like(parameter))
        return TrainingState(self.step, self.seed, first, second)

    def load_state(self, state: TrainingState) -> None:
        """Resume from an exported state.

        Args:
            state: State from ``export_state`` or a checkpoint.

        Raises:
            TypeError: If a moment doesn't have a floating-point dtype.
            ValueError: If the moments don't match the model's config or overflow the model's dtype.
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
        """Return the loss, the number of tokens, and the gradient, summed over a batch's micro-batches and shards."""
        settings, config, losses = self.settings, transformer_of(self.model).config, []
        check_trainable(dtype_name(transformer_of(self.model)), settings.mixed_bfloat16, MIXED_BFLOAT16)
        check_tie(transformer_of(self.model))
        known = dict.fromkeys(p for group in self.optimizer.param_groups for p in group["params"])
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if lost := [name for name, p in trained.items() if p not in known]:
            raise ValueError(
                f"the optimizer must contain all trainable parameters: missing {some(lost)}; create a new Trainer"
            )
        tokens = (batch[2] != config.pad_id).sum()
        self.optimizer.zero_grad()
        for part in self.shard.micro_batches(batch, settings.accumulation_steps):
            with torch.autocast(tokens.device.type, torch.bfloat16) if settings.mixed_bfloat16 else nullcontext():
                total, _ = self._loss(self.shard.module, part, config)
            loss = total / tokens.clamp(min=1)
            loss.backward()
            losses.append(loss.detach())
        if lost := [name for name, p in trained.items() if p.grad is None]:  # such as norms before quantized layers
            raise ValueError(f"freeze or remove the trainable parameters that do not affect the loss: {some(lost)}")
        gradient = [p.grad for p in known if p.grad is not None]  # empty for frozen parameters
        return self.shard.summed(torch.stack(losses).sum()), tokens, gradient


def _take(model, source_ids, target_ids, labels):
    """Check and return a batch that a caller passed."""
    config, device = transformer_of(model).config, transformer_of(model).device
    source_ids = to_ids("source_ids", source_ids, config.source_vocab_size, config.max_positions, device)
    target_ids = to_ids("target_ids", target_ids, config.target_vocab_size, config.max_positions, device)
    labels = to_ids("labels", labels, config.target_vocab_size, None, device)
    check_same_batch(source_ids.shape, target_ids.shape)
    check_labels(labels.shape, target_ids.shape)
    return source_ids, target_ids, labels


def _loss(model, batch, config, tap=no_tap):
    """Return the summed loss of a batch and the number of target tokens."""
    source_ids, target_ids, labels = batch
    taps = {} if tap is no_tap else {"tap": tap}  # a wrapper's forward method may accept only IDs
    return cross_entropy(model(source_ids, target_ids, **taps), labels, config)


@contextmanager
def _training(model: nn.Module, settings: TrainingConfig, *entropy: int) -> Iterator[None]:
    """Enable dropout, seeded with the given numbers. If the settings specify activation checkpointing, also enable it.

    Compiled code, fused kernels, and custom layers use PyTorch's default generator. All trainers in a process share
    this generator. This context seeds it and restores its state afterwards. Therefore, steps of different trainers
    can't run at the same time. A hook can train a different model during a step.
    """
    transformer = transformer_of(model)
    device, stacks = transformer.device, (transformer.encoder, transformer.decoder)
    # torch.manual_seed would seed the generators of all devices.
    generator = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]
    with DRAWING:
        if any(transformer is other for other in TRAINING):
            raise RuntimeError("a hook must not start a training step of the model that is being trained")
        state = generator.get_state()
        generator.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]))
        model.train()
        for stack in stacks:
            stack.activation_checkpointing = settings.activation_checkpointing
        TRAINING.append(transformer)
        try:
            yield
        finally:
            TRAINING.pop()
            for stack in stacks:
                stack.activation_checkpointing = False
            model.eval()
            generator.set_state(state)
