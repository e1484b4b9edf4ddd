"""Training (Vaswani et al., 2017, section 5): loss, gradients and the optimizer step.

B batch, S source length, T target length, V target vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from transformer_jax.compilation import (
    Structure,
    compile_once,
    compile_quickly,
    compile_step,
    parameters_of,
    put_parameters,
)
from transformer_jax.optimizer import Adam, clip_factor, global_norm
from transformer_jax.parallel import constrain, divide, place, plan_of, shardings
from transformer_jax.runtime import as_placed, to_ids, to_numpy
from transformer_jax.transformer import Transformer, check_model
from transformer_jax.weights import check_layers
from transformer_spec.checks import (
    check_accumulation,
    check_choice,
    check_integer,
    check_labels,
    check_logits,
    check_same_batch,
    check_trainable,
    check_type,
)
from transformer_spec.config import TransformerConfig
from transformer_spec.names import check_training_state, parameter_shapes, rounded, tap_shapes
from transformer_spec.parallel_plan import DROPOUTS
from transformer_spec.shapes import Float, Int
from transformer_spec.taps import no_tap
from transformer_spec.training_config import Gradients, StepResult, TrainingConfig, TrainingState

MIXED_BFLOAT16 = True  # whether this backend can compute in bfloat16 with float32 weights


def cross_entropy(
    logits: Float[Array, "B T V"], labels: Int[Array, "B T"], config: TransformerConfig
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Return the label-smoothed cross-entropy in nats, summed over the target tokens, and their number.

    Section 5.4: the probability ``label_smoothing`` is moved from the right token to all tokens (``uniform``), to the
    wrong tokens (``off_target``), or to the wrong tokens except padding (``off_target_and_pad``). Logarithms are
    computed in at least float32.

    Args:
        logits: Scores of each next token.
        labels: Right next tokens, padded with ``config.pad_id``. Padding has no loss.
        config: Vocabulary, padding ID and label smoothing.

    Raises:
        TypeError: If the labels are not integers.
        ValueError: If the labels have the wrong shape or are outside the vocabulary. Under ``jax.jit`` and on a GPU,
            where values can't be checked, the loss of a label outside the vocabulary is NaN.
    """
    labels = to_ids("labels", labels, config.target_vocab_size, None)
    check_logits(logits.shape, labels.shape, config.target_vocab_size)
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))  # [B, T, V]
    log_totals = jax.nn.logsumexp(wide, -1)
    right = jnp.take_along_axis(wide, labels[..., None], -1)[..., 0] - log_totals  # [B, T]
    # If their values have not been checked (on a GPU, or in traced code), a wrong label must not pass for a free one.
    right = jnp.where((labels >= 0) & (labels < config.target_vocab_size), right, jnp.nan)
    smoothing = config.label_smoothing
    spread = wide.sum(-1) - wide.shape[-1] * log_totals  # [B, T]
    classes = config.target_vocab_size
    if config.label_smoothing_kind != "uniform":
        spread = spread - right
        classes -= 1
    if config.label_smoothing_kind == "off_target_and_pad":
        spread = spread - (wide[..., config.pad_id] - log_totals)
        classes -= 1
    losses = -(1.0 - smoothing) * right - (smoothing / classes * spread if smoothing else 0.0)  # [B, T]
    counted = labels != config.pad_id
    return jnp.where(counted, losses, 0.0).sum(), counted.sum()


def gradients(model: Transformer, source_ids: Any, target_ids: Any, labels: Any) -> Gradients:
    """Return the loss per target token of a batch, and its gradient at every parameter and every tap.

    Dropout is off. A batch without target tokens has zero loss and zero gradients.

    Args:
        model: Model, which is not changed.
        source_ids: Source sentences [B, S], padded with ``config.pad_id``.
        target_ids: Decoder input [B, T], starting with ``config.bos_id``, padded.
        labels: Right next tokens [B, T]: the target sentences, ending with ``config.eos_id``, padded.

    Raises:
        TypeError: If the model is not a Transformer of this package, or the IDs are not integers.
        ValueError: If IDs have the wrong shape or are outside the vocabulary, or if a parameter has no canonical name.
    """
    check_model(model)
    check_layers(model)
    batch = _take(model, source_ids, target_ids, labels)
    differentiate = compile_quickly(_gradients, Structure.of(model))
    loss, (of_parameters, of_taps) = differentiate(parameters_of(model), batch)
    # The names give the order, which jax.jit loses: it sorts the keys of a dict.
    taps = tap_shapes(model.config, len(batch[0]), batch[0].shape[1], batch[1].shape[1])
    return Gradients(
        float(loss),
        {name: np.array(of_parameters[name]) for name in parameter_shapes(model.config)},
        {name: np.array(of_taps[name]) for name in taps},
    )


class Trainer:
    """Trains a model in place, one batch per step; between two steps the model is in inference mode.

    A step follows the gradient of the loss per target token with Adam and the learning rate of equation (3). Each step
    is compiled once for each shape of a batch.

    Args:
        model: Model in float32 or float64.
        settings: Optimizer, schedule, clipping, accumulation and mixed precision.
        seed: Determines the dropout of a step, together with the number of the step.
        mesh: Devices that share each step, as ``make_mesh`` returns them. None uses the model's device.
        dropout: ``global`` draws dropout for the whole batch, so any number of devices computes the same; ``local``
            draws it for each device separately, which is faster.

    Raises:
        TypeError: If the model is not a Transformer of this package, or the seed is not an integer.
        ValueError: If the model's dtype cannot be trained, mixed precision needs float32, the seed is negative, the
            mesh can't divide the model, or a trainable parameter has no canonical name.
    """

    def __init__(
        self,
        model: Transformer,
        settings: TrainingConfig,
        seed: int = 0,
        *,
        mesh: Mesh | None = None,
        dropout: str = "global",
    ) -> None:
        check_model(model)
        check_type("settings", settings, TrainingConfig)
        check_layers(model)
        check_trainable(model.source_embedding.embedding.dtype.name, settings.mixed_bfloat16, MIXED_BFLOAT16)
        seed = check_integer("seed", seed, minimum=0)
        check_choice("dropout", dropout, DROPOUTS)
        model.eval()
        self.model = model
        self.settings = settings
        self.seed = seed
        self.step = 0  # steps taken
        self.mesh, self.plan, self.dropout = mesh, plan_of(mesh, model.config), dropout
        self.has_checked_batches = False
        # Bound to their devices, as the results of a step are: else the second step would be compiled again.
        parameters = place(parameters_of(model), shardings(model.config, mesh))
        put_parameters(model, parameters)
        first, second = (jax.tree.map(jnp.zeros_like, parameters) for _ in range(2))
        self.optimizer = Adam(first, second, settings)
        structure = Structure.of(model, mesh)
        platform = next(iter(model.source_embedding.embedding.devices())).platform
        self._compiled_step = compile_step(_step, structure, settings, platform)
        self._compiled_gradient = compile_quickly(_gradient, structure, settings)
        self._compiled_evaluation = compile_once(_evaluate, structure)

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
        settings, config = self.settings, self.model.config
        batch, random_bits = self._take(source_ids, target_ids, labels)
        # What changes from step to step goes in as numbers, exact to the last bit also where JAX has no float64.
        numbers = {
            "random_bits": random_bits,
            "learning_rate": settings.learning_rate(self.step + 1, config.d_model),
            "corrections": settings.bias_corrections(self.step + 1),
        }
        self.optimizer, parameters, result = self._compiled_step(
            parameters_of(self.model), self.optimizer, batch, numbers
        )
        put_parameters(self.model, parameters)
        self.step += 1
        return StepResult(*result)

    def gradient(self, source_ids: Any, target_ids: Any, labels: Any) -> Gradients:
        """Return the loss per target token of a batch and the whole gradient that a step would follow, before clipping.

        Arguments and errors as in ``train_step``, whose dropout, slices and devices it has. Nothing is updated.
        """
        batch, random_bits = self._take(source_ids, target_ids, labels)
        total, tokens, gradient = self._compiled_gradient(parameters_of(self.model), batch, random_bits)
        count = max(int(tokens), 1)
        names = parameter_shapes(self.model.config)  # in their order: jax.jit has sorted the keys
        return Gradients(float(total / count), {name: to_numpy(gradient[name]) / count for name in names})

    def evaluate(self, source_ids: Any, target_ids: Any, labels: Any) -> tuple[Float[Array, ""], Int[Array, ""]]:
        """Return the cross-entropy in nats summed over the target tokens, and their number: no dropout, no smoothing.

        Arguments and errors as in ``train_step``.
        """
        batch = divide(self, _take(self.model, source_ids, target_ids, labels), 1)
        return self._compiled_evaluation(parameters_of(self.model), batch)

    def export_state(self) -> TrainingState:
        """Return a copy of everything that the next step depends on, beside the weights and the settings."""
        check_layers(self.model)
        names = parameter_shapes(self.model.config)  # in their order: jax.jit has sorted the keys
        first = {name: to_numpy(self.optimizer.first_moment[name]) for name in names}
        second = {name: to_numpy(self.optimizer.second_moment[name]) for name in names}
        return TrainingState(self.step, self.seed, first, second)

    def load_state(self, state: TrainingState) -> None:
        """Go on from a state that any of the four packages exported.

        Raises:
            TypeError: A moment is not of a floating-point dtype.
            ValueError: The moments are not those of the model's config, or overflow its dtype.
        """
        check_training_state(self.model.config, state, self.model.source_embedding.embedding.dtype.name)
        first, second = (
            {
                name: jax.device_put(rounded(name, moment[name], array.dtype.name), array.sharding)
                for name, array in self.optimizer.first_moment.items()
            }
            for moment in (state.first_moment, state.second_moment)
        )
        self.optimizer = Adam(first, second, self.settings)
        self.step, self.seed = state.step, state.seed

    def _take(self, source_ids, target_ids, labels):
        """Take the batch of a step, checked and divided over devices, and the random bits of its dropout."""
        slices = self.settings.accumulation_steps
        batch = _take(self.model, source_ids, target_ids, labels)
        check_accumulation(slices, len(batch[0]))
        return divide(self, batch, slices), np.random.SeedSequence([self.seed, self.step]).generate_state(2)


@as_placed
def _take(model, source_ids, target_ids, labels):
    """Take a batch from the outside, checked."""
    config = model.config
    source_ids = to_ids("source_ids", source_ids, config.source_vocab_size, config.max_positions)
    target_ids = to_ids("target_ids", target_ids, config.target_vocab_size, config.max_positions)
    labels = to_ids("labels", labels, config.target_vocab_size, None)
    check_same_batch(source_ids.shape, target_ids.shape)
    check_labels(labels.shape, target_ids.shape)
    return source_ids, target_ids, labels


def _loss(model, batch, config, tap=no_tap):
    """Return the summed loss of a batch, and the number of its target tokens."""
    source_ids, target_ids, labels = batch
    return cross_entropy(model(source_ids, target_ids, tap=tap), labels, config)


def _evaluate(structure, parameters, batch):
    """Return the summed cross-entropy of a batch, and the number of its target tokens."""
    config = structure.config.replace(label_smoothing=0.0)
    return _loss(structure.build(parameters), batch, config)


def _gradients(structure, parameters, batch):
    """Return the loss per target token, and its gradients at parameters and taps: at zeros added to the latter."""

    def loss(parameters, zeros):
        model = structure.build(parameters)
        total, tokens = _loss(model, batch, model.config, lambda name, value: value + zeros[name])
        return total / jnp.maximum(tokens, 1).astype(total.dtype)

    dtype = parameters["source_embedding.table"].dtype
    shapes = tap_shapes(structure.config, len(batch[0]), batch[0].shape[1], batch[1].shape[1])
    zeros = {name: jnp.zeros(shape, dtype) for name, shape in shapes.items()}
    return jax.value_and_grad(loss, argnums=(0, 1))(parameters, zeros)


def _step(structure, settings, parameters, optimizer, batch, numbers):
    """Return optimizer and parameters after a step, and what it reports."""
    total, tokens, gradient = _gradient(structure, settings, parameters, batch, numbers["random_bits"])
    count = jnp.maximum(tokens, 1).astype(total.dtype)
    norm = global_norm(gradient) / count
    scale = clip_factor(norm, settings.clip_norm) / count
    parameters, optimizer = optimizer.update(
        parameters, gradient, scale, numbers["learning_rate"], numbers["corrections"]
    )
    # The optimizer first: JAX gives what is donated to the results of the same shape in their order, and the parameters
    # would get the room of the old moments.
    return optimizer, parameters, (total / count, tokens, norm)


def _gradient(structure, settings, parameters, batch, random_bits):
    """Return loss, tokens and gradient, summed over the slices of a batch."""
    slices = settings.accumulation_steps
    key = jax.random.wrap_key_data(random_bits, impl="threefry2x32")
    differentiate = jax.value_and_grad(partial(_loss_with_dropout, structure, settings), has_aux=True)

    def add_slice(sums, inputs):
        part, number = inputs
        (total, tokens), gradient = differentiate(parameters, part, jax.random.fold_in(key, number))
        return jax.tree.map(jnp.add, sums, (total, tokens, gradient)), None

    parts = jax.tree.map(lambda ids: ids.reshape(slices, -1, ids.shape[-1]), batch)
    zeros = constrain(jax.tree.map(jnp.zeros_like, parameters), structure.mesh)
    sums = (jnp.zeros((), zeros["source_embedding.table"].dtype), jnp.zeros((), int), zeros)
    return jax.lax.scan(add_slice, sums, (parts, jnp.arange(slices)))[0]


def _loss_with_dropout(structure, settings, parameters, batch, key):
    """Return the loss in training mode, in the precision of the settings, with the dropout of a key."""
    model = structure.build(parameters)
    model.train()
    for stack in (model.encoder, model.decoder):
        stack.activation_checkpointing = settings.activation_checkpointing
    stream = nnx.RngStream(key, tag="dropout")  # one for all: each call of a dropout draws the next key from it
    for _, module in nnx.iter_modules(model):
        if isinstance(module, nnx.Dropout):
            module.rngs = stream
        elif settings.mixed_bfloat16 and hasattr(module, "dtype"):
            module.dtype = jnp.bfloat16  # of the computation; Flax rounds the parameters where they are used
    return _loss(model, batch, model.config)
