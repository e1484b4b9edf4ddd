"""Training (Vaswani et al., 2017, section 5): loss, gradients, and the optimizer step.

Axes: B batch, S source length, T target length, V target vocabulary.
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
from transformer_jax.runtime import as_array, as_placed, check_float64, to_ids, to_numpy
from transformer_jax.transformer import Transformer, check_model
from transformer_jax.weights import check_layers, one_dtype
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
)
from transformer_spec.config import TransformerConfig
from transformer_spec.names import check_training_state, parameter_shapes, rounded, tap_shapes
from transformer_spec.parallel_plan import DROPOUTS
from transformer_spec.shapes import Float, Int
from transformer_spec.taps import no_tap
from transformer_spec.training_config import Gradients, StepResult, TrainingConfig, TrainingState

MIXED_BFLOAT16 = True  # this backend supports bfloat16 computation with float32 weights


def cross_entropy(
    logits: Float[Array, "B T V"], labels: Int[Array, "B T"], config: TransformerConfig
) -> tuple[Float[Array, ""], Int[Array, ""]]:
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
        ValueError: If the labels have the wrong shape or are outside the vocabulary. Under ``jax.jit`` or on a GPU, a
            label outside the vocabulary doesn't raise an error, but its loss is NaN.
    """
    logits, labels = as_array("logits", logits), to_ids("labels", labels, config.target_vocab_size, None)
    check_logits(logits.shape, labels.shape, config.target_vocab_size)
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))  # [B, T, V]
    log_totals = jax.nn.logsumexp(wide, -1)
    right = jnp.take_along_axis(wide, labels[..., None], -1)[..., 0] - log_totals  # [B, T]
    # On a GPU and in traced code, labels haven't been checked. If a label is outside the vocabulary, return NaN.
    right = jnp.where((labels >= 0) & (labels < config.target_vocab_size), right, jnp.nan)
    smoothing = config.label_smoothing
    classes = config.target_vocab_size
    if config.label_smoothing_kind == "off_target_and_pad":  # the logit of padding may be -inf
        wide = jnp.where(jnp.arange(classes) == config.pad_id, 0.0, wide)
        classes -= 1
    spread = wide.sum(-1) - classes * log_totals  # [B, T]
    if config.label_smoothing_kind != "uniform":
        spread = spread - right
        classes -= 1
    losses = -(1.0 - smoothing) * right - (smoothing / classes * spread if smoothing else 0.0)  # [B, T]
    counted = labels != config.pad_id
    return jnp.where(counted, losses, 0.0).sum(), counted.sum()


def gradients(model: Transformer, source_ids: Any, target_ids: Any, labels: Any) -> Gradients:
    """Return the loss per target token of a batch, and its gradients with respect to all parameters and taps.

    Dropout is off. If the batch contains no target tokens, the loss and the gradients are zero. Taps that the model
    doesn't call, for example because you replaced a layer, have no gradient.

    Args:
        model: Model, which is not modified.
        source_ids: Source token IDs [B, S], padded with ``config.pad_id``.
        target_ids: Decoder input [B, T]: BOS and the target tokens except the last, padded with ``config.pad_id``.
        labels: Expected tokens [B, T]: the target tokens including EOS, padded with ``config.pad_id``.

    Raises:
        TypeError: If the model is not a ``Transformer`` of this package, or the IDs are not integers.
        ValueError: If the IDs have the wrong shape or are outside the vocabulary, if a trainable parameter has no
            canonical name, or if two names refer to the same parameter. This error is also raised if the model is an
            ensemble, or if its parameters have only shapes and no values.
    """
    check_model(model)
    check_layers(model)
    batch = _take(model, source_ids, target_ids, labels)
    differentiate = compile_quickly(_gradients, Structure.of(model))
    loss, (of_parameters, of_taps) = differentiate(parameters_of(model), batch)
    # jax.jit sorts the keys of a dict, so restore the order of the names.
    taps = tap_shapes(model.config, len(batch[0]), batch[0].shape[1], batch[1].shape[1])
    return Gradients(
        float(loss),
        {name: np.array(of_parameters[name]) for name in parameter_shapes(model.config)},
        {name: np.array(of_taps[name]) for name in taps if name in of_taps},
    )


class Trainer:
    """Trainer that updates a model in place, one batch per step (section 5).

    Each step computes the gradient of the loss per target token, clips it, and updates the parameters using Adam and
    the learning rate of equation (3). Between steps, the model is in inference mode. JAX compiles the step once per
    batch shape.

    Args:
        model: Model in float32 or float64.
        settings: Optimizer, learning rate schedule, clipping, gradient accumulation, and mixed precision.
        seed: Seed for dropout. The dropout masks of a step depend only on the seed, the step number, and whether
            ``jax_enable_x64`` is enabled.
        mesh: Mesh from ``make_mesh``. Each step divides the batch among the mesh's devices. Pass the full batch in
            every process. If None, only the model's device is used.
        dropout: ``global`` samples the dropout masks of the full batch, so that the result doesn't depend on the number
            of devices. ``local`` samples the masks separately on each device, which is faster.

    Attributes:
        step: Number of steps taken so far.

    Raises:
        TypeError: If the model is not a ``Transformer`` of this package, or another argument has the wrong type.
        ValueError: If the parameters are neither all in float32 nor all in float64, if mixed precision is combined with
            float64, or if the mesh can't divide the model. This error is also raised if a parameter or another variable
            has no canonical name, if two names refer to the same parameter, if the model is an ensemble, if its
            parameters have only shapes and no values, or if another value is invalid.
        RuntimeError: If the model is in float64 and ``jax_enable_x64`` is off.
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
        check_float64(model.source_embedding.embedding.dtype.name)
        check_trainable(one_dtype(parameters_of(model)), settings.mixed_bfloat16, MIXED_BFLOAT16)
        seed = check_integer("seed", seed, minimum=0)
        check_choice("dropout", dropout, DROPOUTS)
        model.eval()
        self.model = model
        self.settings = settings
        self.seed = seed
        self.step = 0  # number of steps taken
        self.mesh, self.plan, self.dropout = mesh, plan_of(mesh, model.config), dropout
        self.has_checked_batches = False
        # Commit the arrays to their devices. The results of a step are committed, so if the inputs of the first step
        # were uncommitted, JAX would recompile the second step.
        parameters = place(jax.tree.map(jnp.asarray, parameters_of(model)), shardings(model.config, mesh))
        put_parameters(model, parameters)
        first, second = (jax.tree.map(jnp.zeros_like, parameters) for _ in range(2))
        self.optimizer = Adam(first, second, settings)
        structure = Structure.of(model, mesh)
        platform = next(iter(model.source_embedding.embedding.devices())).platform
        self._compiled_step = compile_step(_step, structure, settings, platform)
        self._compiled_gradient = compile_quickly(_gradient, structure, settings)
        self._compiled_evaluation = compile_once(_evaluate, structure)

    def train_step(self, source_ids: Any, target_ids: Any, labels: Any) -> StepResult:
        """Take one optimizer step on the loss per target token of a batch, with dropout enabled.

        Args:
            source_ids: Source token IDs [B, S], padded with ``config.pad_id``.
            target_ids: Decoder input [B, T]: BOS and the target tokens except the last, padded with ``config.pad_id``.
            labels: Expected tokens [B, T]: the target tokens including EOS, padded with ``config.pad_id``.

        Returns:
            Loss per target token before the update, number of target tokens, and gradient norm before clipping.

        Raises:
            TypeError: If the IDs are not integers, or the method is called inside ``jax.jit``.
            ValueError: If the IDs have the wrong shape or are outside the vocabulary, ``accumulation_steps`` doesn't
                divide the batch size, or the model is no longer in float32 or float64.
        """
        settings, config = self.settings, self.model.config
        parameters = parameters_of(self.model)
        batch, random_bits = self._take(parameters, source_ids, target_ids, labels)
        # Compute the learning rate and the bias corrections in Python, so that they are exact without JAX's float64.
        numbers = {
            "random_bits": random_bits,
            "learning_rate": settings.learning_rate(self.step + 1, config.d_model),
            "corrections": settings.bias_corrections(self.step + 1),
        }
        optimizer, parameters, result = self._compiled_step(parameters, self.optimizer, batch, numbers)
        if isinstance(result[0], jax.core.Tracer):
            raise TypeError(
                "train_step must not be called inside jax.jit or a similar transformation, because it updates the "
                "trainer; call train_step outside, or train the model with nnx.grad and nnx.Optimizer"
            )
        self.optimizer = optimizer
        put_parameters(self.model, parameters)
        self.step += 1
        return StepResult(*result)

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
                divide the batch size, or the model is no longer in float32 or float64.
        """
        parameters = parameters_of(self.model)
        batch, random_bits = self._take(parameters, source_ids, target_ids, labels)
        total, tokens, gradient = self._compiled_gradient(parameters, batch, random_bits)
        count = max(int(tokens), 1)
        names = parameter_shapes(self.model.config)  # jax.jit sorts the keys, so restore the order
        return Gradients(float(total / count), {name: to_numpy(gradient[name]) / count for name in names})

    def evaluate(self, source_ids: Any, target_ids: Any, labels: Any) -> tuple[Float[Array, ""], Int[Array, ""]]:
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
        batch = divide(self, _take(self.model, source_ids, target_ids, labels), 1)
        return self._compiled_evaluation(parameters_of(self.model), batch)

    def export_state(self) -> TrainingState:
        """Return a copy of the step number, the seed, and the moments.

        All later steps depend only on this state, the weights, and the arguments of the ``Trainer``.

        Raises:
            ValueError: If a layer was replaced with a different type of layer, a trainable parameter has no canonical
                name, or two canonical names refer to the same parameter.
        """
        check_layers(self.model)
        names = parameter_shapes(self.model.config)  # jax.jit sorts the keys, so restore the order
        first = {name: to_numpy(self.optimizer.first_moment[name]) for name in names}
        second = {name: to_numpy(self.optimizer.second_moment[name]) for name in names}
        return TrainingState(self.step, self.seed, first, second)

    def load_state(self, state: TrainingState) -> None:
        """Resume from an exported state, which may come from any of the four packages.

        Args:
            state: State from ``export_state`` or a checkpoint.

        Raises:
            TypeError: If a moment doesn't have a floating-point dtype.
            ValueError: If the moments don't match the model's config or overflow the model's dtype.
            RuntimeError: If the model is in float64 and ``jax_enable_x64`` is off.
        """
        check_float64(self.model.source_embedding.embedding.dtype.name)
        check_training_state(self.model.config, state, self.model.source_embedding.embedding.dtype.name)
        first, second = (
            {
                name: jax.device_put(rounded(name, moment[name], array.dtype.name), array.sharding)
                for name, array in self.optimizer.first_moment.items()
            }
            for moment in (state.first_moment, state.second_moment)
        )
        self.optimizer = Adam(first, second, self.settings)
        self.step, self.seed = int(state.step), int(state.seed)

    def _take(self, parameters, source_ids, target_ids, labels):
        """Check a batch, divide it among the devices, and return it with the random bits for the dropout masks."""
        micro_batches = self.settings.accumulation_steps
        batch = _take(self.model, source_ids, target_ids, labels)
        # The model may have been cast to a different dtype.
        check_trainable(one_dtype(parameters), self.settings.mixed_bfloat16, MIXED_BFLOAT16)
        check_accumulation(micro_batches, len(batch[0]))
        return divide(self, batch, micro_batches), np.random.SeedSequence(
            random_stream(self.seed, self.step)
        ).generate_state(2)


@as_placed
def _take(model, source_ids, target_ids, labels):
    """Check and return a batch that a caller passed."""
    config = model.config
    source_ids = to_ids("source_ids", source_ids, config.source_vocab_size, config.max_positions)
    target_ids = to_ids("target_ids", target_ids, config.target_vocab_size, config.max_positions)
    labels = to_ids("labels", labels, config.target_vocab_size, None)
    check_same_batch(source_ids.shape, target_ids.shape)
    check_labels(labels.shape, target_ids.shape)
    return source_ids, target_ids, labels


def _loss(model, batch, config, tap=no_tap):
    """Return the summed loss of a batch and the number of target tokens."""
    source_ids, target_ids, labels = batch
    return cross_entropy(model(source_ids, target_ids, tap=tap), labels, config)


def _evaluate(structure, parameters, batch):
    """Return the summed cross-entropy of a batch and the number of target tokens."""
    config = structure.config.replace(label_smoothing=0.0)
    return _loss(structure.build(parameters), batch, config)


def _gradients(structure, parameters, batch):
    """Return the loss per target token, and its gradients with respect to parameters and to zeros added at the taps."""
    fired = set()  # names of the taps that the model calls

    def loss(parameters, zeros):
        def tap(name, value):
            fired.add(name)
            return value + zeros[name]

        model = structure.build(parameters)
        total, tokens = _loss(model, batch, model.config, tap)
        return total / jnp.maximum(tokens, 1).astype(total.dtype)

    dtype = parameters["source_embedding.table"].dtype
    shapes = tap_shapes(structure.config, len(batch[0]), batch[0].shape[1], batch[1].shape[1])
    zeros = {name: jnp.zeros(shape, dtype) for name, shape in shapes.items()}
    value, (of_parameters, of_taps) = jax.value_and_grad(loss, argnums=(0, 1))(parameters, zeros)
    return value, (of_parameters, {name: of_taps[name] for name in fired})


def _step(structure, settings, parameters, optimizer, batch, numbers):
    """Take a step, and return the new optimizer, the new parameters, and the values to report."""
    total, tokens, gradient = _gradient(structure, settings, parameters, batch, numbers["random_bits"])
    count = jnp.maximum(tokens, 1).astype(total.dtype)
    norm = global_norm(gradient) / count
    scale = clip_factor(norm, settings.clip_norm) / count
    parameters, optimizer = optimizer.update(
        parameters, gradient, scale, numbers["learning_rate"], numbers["corrections"]
    )
    # Return the optimizer first. JAX assigns donated buffers to results of the same shape in order, and the parameters
    # must not get the buffers of the old moments.
    return optimizer, parameters, (total / count, tokens, norm)


def _gradient(structure, settings, parameters, batch, random_bits):
    """Return the loss, the number of tokens, and the gradient, summed over a batch's micro-batches."""
    micro_batches = settings.accumulation_steps
    key = jax.random.wrap_key_data(random_bits, impl="threefry2x32")
    differentiate = jax.value_and_grad(partial(_loss_with_dropout, structure, settings), has_aux=True)

    def add_micro_batch(sums, inputs):
        part, number = inputs
        (total, tokens), gradient = differentiate(parameters, part, jax.random.fold_in(key, number))
        return jax.tree.map(jnp.add, sums, (total, tokens, gradient)), None

    parts = jax.tree.map(lambda ids: ids.reshape(micro_batches, -1, ids.shape[-1]), batch)
    zeros = constrain(jax.tree.map(jnp.zeros_like, parameters), structure.mesh)
    sums = (jnp.zeros((), zeros["source_embedding.table"].dtype), jnp.zeros((), int), zeros)
    return jax.lax.scan(add_micro_batch, sums, (parts, jnp.arange(micro_batches)))[0]


def _loss_with_dropout(structure, settings, parameters, batch, key):
    """Return the loss in training mode. The settings specify the precision, and the key seeds dropout."""
    model = structure.build(parameters)
    model.train()
    for stack in (model.encoder, model.decoder):
        stack.activation_checkpointing = settings.activation_checkpointing
    stream = nnx.RngStream(key, tag="dropout")  # shared, so that each dropout layer uses the next key
    for _, module in nnx.iter_modules(model):
        if isinstance(module, nnx.Dropout):
            module.rngs = stream
        elif settings.mixed_bfloat16 and hasattr(module, "dtype"):
            module.dtype = jnp.bfloat16  # dtype of the computation; Flax casts the parameters
    return _loss(model, batch, model.config)
