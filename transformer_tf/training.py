"""Training (Vaswani et al., 2017, section 5): loss, gradients, and the optimizer step.

Axes: B batch, S source length, T target length, V target vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import keras
import numpy as np
import tensorflow as tf
from tensorflow import Tensor

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
from transformer_spec.names import check_training_state, rounded
from transformer_spec.parallel_plan import DROPOUTS
from transformer_spec.shapes import Float, Int
from transformer_spec.taps import Recorder, no_tap
from transformer_spec.training_config import Gradients, StepResult, TrainingConfig, TrainingState
from transformer_tf.block import check_losses, seed_states, seeded
from transformer_tf.compilation import call_on_devices, check_call, check_scope
from transformer_tf.fast import FastAdam
from transformer_tf.optimizer import Adam, clip_factor, global_norm
from transformer_tf.parallel import check_copies, plan_of, random_bits, spread_rows, summed
from transformer_tf.runtime import as_placed, placed, to_ids
from transformer_tf.weights import parameters, variables

if TYPE_CHECKING:
    from transformer_tf.transformer import Transformer

MIXED_BFLOAT16 = True  # this backend supports bfloat16 computation with float32 weights


def cross_entropy(
    logits: Float[Tensor, "B T V"],
    labels: Int[Tensor, "B T"],
    config: TransformerConfig | None = None,
) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
    """Return the label-smoothed cross-entropy in nats, summed over the target tokens, and the number of target tokens.

    Label smoothing (section 5.4) takes the probability ``label_smoothing`` from the correct token and distributes it
    equally over all tokens (``uniform``), all incorrect tokens (``off_target``), or all incorrect tokens except padding
    (``off_target_and_pad``).

    Args:
        logits: Logits of the next tokens.
        labels: Expected tokens, padded with ``config.pad_id``. Padding doesn't contribute to the loss.
        config: Model configuration, which defines the vocabulary, the padding ID, and the label smoothing.

    Raises:
        TypeError: If the labels are not integers, or Keras calls the function as a loss. Use ``CrossEntropy`` instead.
        ValueError: If the labels have the wrong shape or are outside the vocabulary. In a ``tf.function`` or on a GPU,
            a label outside the vocabulary doesn't raise an error, but its loss is NaN.
    """
    losses, counted = _token_losses(logits, labels, config)
    return tf.reduce_sum(losses), tf.math.count_nonzero(counted, dtype=tf.int32)


def _token_losses(logits, labels, config):
    """Return the loss of each label, which is 0 for padding, and a mask that is False for padding (both [B, T])."""
    if config is None or (tf.is_tensor(labels) and labels.dtype.is_floating):  # Keras converts labels to floats
        got = "no config" if config is None else f"{labels.dtype.name} labels"
        raise TypeError(f"labels must be integers: got {got}; to compile a model, use loss=CrossEntropy(model.config)")
    labels = to_ids("labels", labels, config.target_vocab_size, None)
    check_logits(tuple(logits.shape), tuple(labels.shape), config.target_vocab_size)
    wide = tf.cast(logits, keras.backend.result_type(logits.dtype, "float32"))
    log_probabilities = tf.nn.log_softmax(wide)  # [B, T, V]
    classes = config.target_vocab_size
    if config.label_smoothing_kind == "off_target_and_pad":  # padding is excluded, and its logit may be -inf
        is_padding = tf.range(config.target_vocab_size) == config.pad_id
        log_probabilities = tf.where(is_padding, tf.zeros_like(log_probabilities), log_probabilities)
        classes -= 1
    right = tf.gather(log_probabilities, labels, batch_dims=2)  # [B, T]
    # On a GPU and in traced code, labels haven't been checked. If a label is outside the vocabulary, return NaN.
    right = tf.where((labels >= 0) & (labels < config.target_vocab_size), right, math.nan)
    smoothing = config.label_smoothing
    spread = tf.reduce_sum(log_probabilities, -1)  # [B, T]
    if config.label_smoothing_kind != "uniform":
        spread = spread - right
        classes -= 1
    losses = -(1.0 - smoothing) * right - (smoothing / classes * spread if smoothing else 0.0)  # [B, T]
    counted = labels != config.pad_id
    return tf.where(counted, losses, 0.0), counted


@keras.saving.register_keras_serializable("transformer_tf")
class CrossEntropy(keras.losses.Loss):
    """The ``cross_entropy`` loss for ``model.compile`` and ``fit``, averaged over the target tokens of a batch.

    Args:
        config: Model configuration. Labels equal to ``config.pad_id`` don't contribute to the loss.
        name, kwargs: Arguments of ``keras.losses.Loss``.
    """

    def __init__(self, config: TransformerConfig, name: str = "cross_entropy", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self._dtype = keras.backend.result_type(self.dtype, "float32")  # also the dtype of labels, which must be exact
        self.config = config if isinstance(config, TransformerConfig) else TransformerConfig.from_dict(config)

    def call(self, y_true: Float[Tensor, "B T"], y_pred: Float[Tensor, "B T V"]) -> Float[Tensor, "B T"]:
        """Return the loss of each label, with a Keras mask of the labels that are not padding."""
        losses, mask = _token_losses(y_pred, tf.cast(y_true, tf.int32), self.config)
        losses._keras_mask = mask
        return losses

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments. Keras saves them with the model."""
        return {**super().get_config(), "config": self.config.to_dict()}


def gradients(model: Transformer, source_ids: Any, target_ids: Any, labels: Any) -> Gradients:
    """Return the loss per target token of a batch, and its gradients with respect to all parameters and taps.

    Dropout is off. If the batch contains no target tokens, the loss and the gradients are zero. Frozen parameters have
    no gradient. The field ``frozen`` of the result lists their names.

    Args:
        model: Model, which is not modified.
        source_ids: Source token IDs [B, S], padded with ``config.pad_id``.
        target_ids: Decoder input [B, T]: BOS and the target tokens except the last, padded with ``config.pad_id``.
        labels: Expected tokens [B, T]: the target tokens including EOS, padded with ``config.pad_id``.

    Raises:
        TypeError: If the model is not a ``Transformer`` of this package, or the IDs are not integers.
        ValueError: If the IDs have the wrong shape or are outside the vocabulary, a trainable parameter has no
            canonical name, or a layer adds a loss.
        RuntimeError: If the function is called in a ``tf.function`` or a ``keras.StatelessScope``.
    """
    check_call("gradients", model)
    check_scope("gradients")
    batch = _take(model, source_ids, target_ids, labels)
    named, seen = variables(model), Recorder()
    trained = _trained(model, named)

    def tap(name, value):
        tape.watch(value)  # otherwise, taps after frozen layers have no gradient
        return seen(name, value)

    # Tracing a tf.function would take longer than one eager call.
    with placed(model.device), tf.GradientTape() as tape:
        total, tokens = _loss(model, batch, model.config, tap)
        check_losses(model.losses)
        loss = total / tf.cast(tf.maximum(tokens, 1), total.dtype)
    of_parameters, of_taps = _differentiate(tape, loss, (trained, dict(seen)))
    return Gradients(
        float(loss),
        {name: of_parameters[name].numpy() for name in trained},
        {name: of_taps[name].numpy() for name in seen},
        tuple(name for name in named if name not in trained),
    )


class Trainer:
    """Trainer that updates a model in place, one batch per step (section 5).

    Each step computes the gradient of the loss per target token, clips it, and updates the parameters using Adam and
    the learning rate of equation (3). Between steps, the model is in inference mode. Parameters with
    ``trainable=False`` and their moments don't change.

    Args:
        model: Model in float32 or float64.
        settings: Optimizer, learning rate schedule, clipping, gradient accumulation, and mixed precision.
        seed: Seed for dropout. The dropout masks of a step depend only on the seed and the step number.
        mesh: Strategy from ``make_mesh`` that divides the full batch. If None, only the model's device is used.
        dropout: ``global`` samples the dropout masks of the full batch, so that the result doesn't depend on the number
            of devices. ``local`` samples the masks separately on each device, which is faster.
        compile: If True, XLA compiles the step once per batch shape. Each compilation takes as long as dozens of steps.
            This option can't be combined with a mesh, and changes the random numbers of dropout.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a value is invalid, or the model can't be trained with these settings on this mesh.
    """

    def __init__(
        self,
        model: Transformer,
        settings: TrainingConfig,
        seed: int = 0,
        *,
        mesh: tf.distribute.Strategy | None = None,
        dropout: str = "global",
        compile: bool = False,  # noqa: A002
    ) -> None:
        check_type("settings", settings, TrainingConfig)
        check_call("Trainer", model)
        check_trainable(model.variable_dtype, settings.mixed_bfloat16, MIXED_BFLOAT16)
        seed = check_integer("seed", seed, minimum=0)
        check_choice("dropout", dropout, DROPOUTS)
        self.model = model
        self.settings = settings
        self.seed = seed
        self.step = 0  # number of steps taken
        self.mesh, self.plan, self.dropout = mesh, plan_of(mesh, model.config), dropout
        if compile and mesh is not None:
            raise ValueError(
                "compile=True does not support a mesh, because XLA cannot compile its sums; remove compile or mesh"
            )
        self.has_checked_batches = False
        self._compile = compile
        self._variables = variables(model)
        if mesh is not None:
            model.device = None  # each device uses its own copy
        adam = FastAdam if model.fast or mesh is not None else Adam  # only FastAdam supports a mesh
        self.optimizer = adam(parameters(model), settings)
        self.start(_trained(model, self._variables))
        check_copies(self)
        self._traced: dict[tuple[Any, ...], Any] = {}  # keys: function, settings, trained parameters, layers

    def __reduce__(self) -> NoReturn:
        """Raise a TypeError, because a copied optimizer would not update the variables of a copied model."""
        raise TypeError(
            "a Trainer cannot be copied; copy the model, and load this Trainer's export_state() into a new Trainer"
        )

    def start(self, names: Iterable[str]) -> None:
        """Create the moments of these parameters and set them to zero, unless the moments already exist."""
        with placed(self.model.device) if self.mesh is None else self.mesh.scope():
            self.optimizer.start(names)

    def train_step(self, source_ids: Any, target_ids: Any, labels: Any) -> StepResult:
        """Take one optimizer step on the loss per target token of a batch, with dropout enabled.

        Args:
            source_ids: Source token IDs [B, S], padded with ``config.pad_id``.
            target_ids: Decoder input [B, T]: BOS and the target tokens except the last, padded with ``config.pad_id``.
            labels: Expected tokens [B, T]: the target tokens including EOS, padded with ``config.pad_id``.

        Raises:
            TypeError: If the IDs are not integers.
            ValueError: If the IDs have an invalid shape or value, if ``accumulation_steps`` doesn't divide the batch
                size, if the trainable variables changed, or if a layer adds a loss or updates a variable.
        """
        check_call("train_step", self.model)
        settings, config = self.settings, self.model.config
        batch = _take(self.model, source_ids, target_ids, labels)
        learning_rate = settings.learning_rate(self.step + 1, config.d_model)
        numbers = learning_rate, settings.bias_corrections(self.step + 1)
        self.start(_trained(self.model, self._variables))
        self.optimizer.settings = settings  # a caller may have replaced the settings
        with placed(self.model.device):
            numbers = tf.nest.map_structure(lambda number: tf.constant(number, self.model.variable_dtype), numbers)
            result = call_on_devices(self, self._step, self._part(batch), numbers, by_xla=self._compile)
        self.step += 1
        return StepResult(*result)

    def gradient(self, source_ids: Any, target_ids: Any, labels: Any) -> Gradients:
        """Return the loss per target token of a batch, and the gradient that ``train_step`` computes before clipping.

        Arguments, dropout, micro-batches, devices, and errors are the same as in ``train_step``. Nothing is updated.
        """
        check_call("gradient", self.model)
        batch = _take(self.model, source_ids, target_ids, labels)
        with placed(self.model.device):
            total, tokens, gradient = call_on_devices(self, self._gradient, self._part(batch), by_xla=self._compile)
        count = max(int(tokens), 1)
        frozen = tuple(name for name in self._variables if name not in gradient)
        return Gradients(float(total) / count, {name: g.numpy() / count for name, g in gradient.items()}, {}, frozen)

    def evaluate(self, source_ids: Any, target_ids: Any, labels: Any) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
        """Return the cross-entropy in nats, summed over the target tokens, and the number of target tokens.

        Dropout and label smoothing are off. Arguments and errors are the same as in ``train_step``.
        """
        batch = _take(self.model, source_ids, target_ids, labels)
        with placed(self.model.device):
            return call_on_devices(self, self._evaluation, (spread_rows(self, batch, 1),))

    def export_state(self) -> TrainingState:
        """Return a copy of the step number, the seed, and the moments."""

        def exported(moments):  # moments of frozen parameters are zero
            found = ((name, moments.get(name), x) for name, x in self.optimizer.parameters.items())
            return {name: np.zeros(x.shape, x.dtype.name) if m is None else m.numpy() for name, m, x in found}

        first, second = exported(self.optimizer.first_moment), exported(self.optimizer.second_moment)
        return TrainingState(self.step, self.seed, first, second)

    def load_state(self, state: TrainingState) -> None:
        """Resume from an exported state, which may come from any of the four packages.

        Raises:
            TypeError: If a moment doesn't have a floating-point dtype.
            ValueError: If the moments don't match the model's config or overflow the model's dtype.
        """
        check_training_state(self.model.config, state, self.model.variable_dtype)
        self.step, self.seed = state.step, state.seed
        first, second = self.optimizer.first_moment, self.optimizer.second_moment
        self.start(name for name in state.first_moment if state.first_moment[name].any())
        for name in first:
            for moment, values in ((first, state.first_moment), (second, state.second_moment)):
                moment[name].assign(rounded(name, values[name], moment[name].dtype.name))

    def _part(self, batch):
        """Return the rows of a batch and the random bits for dropout. On a mesh, the first axis is the device axis."""
        micro_batches = self.settings.accumulation_steps
        check_accumulation(micro_batches, batch[0].shape[0])
        return spread_rows(self, batch, micro_batches), tf.constant(random_bits(self, len(seed_states(self.model))))

    def _step(self, batch, random_bits, numbers):
        """Take one step on a batch. Return the loss, the number of tokens, and the norm of the gradient."""
        settings = self.settings
        total, tokens, gradient = self._gradient(batch, random_bits)
        count = tf.cast(tf.maximum(tokens, 1), total.dtype)
        norm = tf.cast(global_norm([*gradient.values()]), total.dtype) / count
        scale = clip_factor(norm, settings.clip_norm) / count
        self.optimizer.update(gradient, scale, *numbers)
        return total / count, tokens, norm

    def _gradient(self, batch, random_bits):
        """Return the loss, the number of tokens, and the gradient, summed over a batch's micro-batches and shards."""
        micro_batches = self.settings.accumulation_steps
        if micro_batches == 1:
            return summed(self, self._gradient_of_micro_batch(batch, random_bits[0]))
        zeros = {name: tf.zeros_like(parameter) for name, parameter in _trained(self.model, self._variables).items()}
        found = tf.foldl(
            lambda sums, part: tf.nest.map_structure(tf.add, sums, self._gradient_of_micro_batch(*part)),
            (tuple(tf.reshape(ids, [micro_batches, -1, tf.shape(ids)[1]]) for ids in batch), random_bits),
            (tf.zeros([], self.model.variable_dtype), tf.constant(0), zeros),
            parallel_iterations=1,  # one at a time, to save memory
        )
        return summed(self, found)

    def _gradient_of_micro_batch(self, batch, random_bits):
        model = self.model
        with _training(model, self.settings):  # includes the backward pass, which may recompute layers
            # Dropout uses the given bits and doesn't change the model's own generators.
            with tf.GradientTape() as tape, seeded(model, tf.unstack(random_bits)):
                total, tokens = _loss(model, batch, model.config, training=True)
            return total, tokens, _differentiate(tape, total, _trained(model, self._variables))

    def _evaluation(self, batch):
        return summed(self, _loss(self.model, batch, self.model.config.replace(label_smoothing=0.0)))


@as_placed
def _take(model, source_ids, target_ids, labels):
    """Check and return a batch that a caller passed."""
    config = model.config
    source_ids = to_ids("source_ids", source_ids, config.source_vocab_size, config.max_positions)
    target_ids = to_ids("target_ids", target_ids, config.target_vocab_size, config.max_positions)
    labels = to_ids("labels", labels, config.target_vocab_size, None)
    check_same_batch(tuple(source_ids.shape), tuple(target_ids.shape))
    check_labels(tuple(labels.shape), tuple(target_ids.shape))
    return source_ids, target_ids, labels


def _loss(model, batch, config, tap=no_tap, training=False):
    """Return the summed loss of a batch and the number of target tokens."""
    source_ids, target_ids, labels = batch
    return cross_entropy(model(source_ids, target_ids, tap=tap, training=training), labels, config)


def _trained(model, named):
    """Return the trainable TensorFlow variables. Raise a ValueError for regularizers and constraints."""
    trained = {name: variable for name, variable in named.items() if variable.trainable and model.trainable}
    for name, variable in trained.items():
        for kind in ("regularizer", "constraint"):
            if getattr(variable, kind) is not None:
                raise ValueError(f"{name} has a {kind}; remove the {kind}, or train with compile and fit instead")
    return {name: variable.value for name, variable in trained.items()}


def _differentiate(tape, loss, places):
    """Return the gradients as dense tensors. TensorFlow returns the gradient of an embedding as rows and indices."""
    found = tape.gradient(loss, places, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    return tf.nest.map_structure(tf.convert_to_tensor, found)


@contextmanager
def _training(model: Transformer, settings: TrainingConfig) -> Iterator[None]:
    """Within the context, apply the settings for precision and activation checkpointing to the model."""
    layers = model._flatten_layers() if settings.mixed_bfloat16 else []
    policies = [(layer, layer.dtype_policy, getattr(layer, "reverse_dtype", None)) for layer in layers]
    stacks = model.encoder, model.decoder
    for layer, *_ in policies:
        layer.dtype_policy, layer.reverse_dtype = "mixed_bfloat16", "bfloat16"  # tied outputs use the latter
    for stack in stacks:
        stack.activation_checkpointing = settings.activation_checkpointing
    try:
        yield
    finally:
        for stack in stacks:
            stack.activation_checkpointing = False
        for layer, policy, reverse_dtype in policies:
            layer.dtype_policy, layer.reverse_dtype = policy, reverse_dtype
