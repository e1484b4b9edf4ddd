"""Training (Vaswani et al., 2017, section 5): loss, gradients and the optimizer step.

B batch, S source length, T target length, V target vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow import Tensor

from reference_numpy.checks import check_accumulation, check_integer, check_labels, check_same_batch, check_trainable
from reference_numpy.config import TransformerConfig
from reference_numpy.names import check_training_state, rounded
from reference_numpy.taps import Recorder
from reference_numpy.training_config import Gradients, StepResult, TrainingConfig, TrainingState
from transformer_tf.layers import Dropout
from transformer_tf.runtime import to_ids
from transformer_tf.weights import parameters

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from transformer_tf.transformer import Transformer

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
    wide = tf.cast(logits, keras.backend.result_type(logits.dtype, "float32"))
    log_probabilities = tf.nn.log_softmax(wide)  # [B, T, V]
    right = tf.gather(log_probabilities, labels, batch_dims=2)  # [B, T]
    smoothing = config.label_smoothing
    spread = tf.reduce_sum(log_probabilities, -1)  # [B, T]
    classes = config.target_vocab_size
    if config.label_smoothing_kind != "uniform":
        spread = spread - right
        classes -= 1
    if config.label_smoothing_kind == "off_target_and_pad":
        spread = spread - log_probabilities[..., config.pad_id]
        classes -= 1
    losses = -(1.0 - smoothing) * right - (smoothing / classes * spread if smoothing else 0.0)  # [B, T]
    counted = labels != config.pad_id
    return tf.reduce_sum(tf.where(counted, losses, 0.0)), tf.math.count_nonzero(counted, dtype=tf.int32)


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
    source_ids, target_ids, labels = _take(model, source_ids, target_ids, labels)
    named = parameters(model)
    seen = Recorder()
    # Not in a tf.function: one call is over before its trace would be.
    with tf.device(model.device), tf.GradientTape() as tape:
        total, tokens = cross_entropy(model(source_ids, target_ids, tap=seen), labels, model.config)
        loss = total / tf.cast(tf.maximum(tokens, 1), total.dtype)
    of_parameters, of_taps = _differentiate(tape, loss, ([*named.values()], [*seen.values()]))
    return Gradients(
        float(loss),
        {name: gradient.numpy() for name, gradient in zip(named, of_parameters, strict=True)},
        {name: gradient.numpy() for name, gradient in zip(seen, of_taps, strict=True)},
    )


class Trainer:
    """Trains a model in place, one batch a step; between two steps the model is in inference mode.

    Adam is Algorithm 1 of Kingma and Ba (2015): the moments are corrected for their bias, and epsilon is added to the
    root of the corrected one. The learning rate is that of equation (3).

    Args:
        model: The model to train, in float32 or float64.
        settings: Optimizer, schedule, clipping, accumulation and mixed precision.
        seed: With the number of the step, all that the dropout of that step depends on.

    Raises:
        TypeError: The seed is not an integer.
        ValueError: The model's dtype cannot be trained, mixed precision needs float32, or the seed is negative.
    """

    def __init__(self, model: Transformer, settings: TrainingConfig, seed: int = 0) -> None:
        check_trainable(model.variable_dtype, mixed_bfloat16=settings.mixed_bfloat16, supported=MIXED_BFLOAT16)
        check_integer("seed", seed, minimum=0)
        self.model = model
        self.settings = settings
        self.seed = seed
        self.step = 0  # steps taken
        self._dropout = [
            layer.seed_generator.state for layer in _layers(model) if isinstance(layer, Dropout) and layer.rate
        ]
        with tf.device(model.device):
            self.first_moment = {name: _zeros_like(parameter) for name, parameter in parameters(model).items()}
            self.second_moment = {name: _zeros_like(parameter) for name, parameter in parameters(model).items()}
        # One trace for all lengths and scalars. Without jit_compile: XLA compiles anew for each shape, which takes as
        # long as dozens of steps, and on a CPU its steps are no faster.
        batch = (tf.TensorSpec([None, None], tf.int32),) * 3
        random_bits = tf.TensorSpec([settings.accumulation_steps, len(self._dropout), 2], tf.int64)
        scalars = (tf.TensorSpec([], model.variable_dtype),) * 3
        self._compiled_step = tf.function(self._step, [batch, random_bits, scalars], autograph=False)
        self._compiled_evaluation = tf.function(self._evaluation, [batch], autograph=False)

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
        check_accumulation(settings.accumulation_steps, batch[0].shape[0])
        shape = settings.accumulation_steps, len(self._dropout), 2
        random_bits = np.random.SeedSequence([self.seed, self.step]).generate_state(math.prod(shape)).reshape(shape)
        step = self.step + 1
        scalars = (
            settings.learning_rate(step, self.model.config.d_model),
            1.0 - settings.beta1**step,
            1.0 - settings.beta2**step,
        )
        dtype = self.model.variable_dtype
        with tf.device(self.model.device):
            result = self._compiled_step(
                batch, tf.constant(random_bits, tf.int64), tuple(tf.constant(scalar, dtype) for scalar in scalars)
            )
        self.step = step
        return StepResult(*result)

    def evaluate(self, source_ids: Any, target_ids: Any, labels: Any) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
        """Return the cross-entropy in nats summed over the target tokens, and their number: no dropout, no smoothing.

        Arguments and errors as in ``train_step``.
        """
        batch = _take(self.model, source_ids, target_ids, labels)
        with tf.device(self.model.device):
            return self._compiled_evaluation(batch)

    def export_state(self) -> TrainingState:
        """Return a copy of everything that the next step depends on, beside the weights and the settings."""
        first = {name: moment.numpy() for name, moment in self.first_moment.items()}
        second = {name: moment.numpy() for name, moment in self.second_moment.items()}
        return TrainingState(self.step, self.seed, first, second)

    def load_state(self, state: TrainingState) -> None:
        """Go on from a state that any of the four packages exported.

        Raises:
            TypeError: A moment is not of a floating-point dtype.
            ValueError: The moments are not those of the model's config, or overflow its dtype.
        """
        check_training_state(self.model.config, state, self.model.variable_dtype)
        self.step, self.seed = state.step, state.seed
        for moment, values in ((self.first_moment, state.first_moment), (self.second_moment, state.second_moment)):
            for name, variable in moment.items():
                variable.assign(rounded(name, values[name], variable.dtype.name))

    def _step(self, batch, random_bits, scalars):
        """Return loss, tokens and the norm of the gradient of a batch, and take one step on it."""
        (loss, tokens), gradient = self._backward_in_slices(batch, random_bits)
        count = tf.cast(tf.maximum(tokens, 1), loss.dtype)
        norm = tf.linalg.global_norm(gradient) / count
        scale = 1.0 / count
        if self.settings.clip_norm is not None:
            scale *= self.settings.clip_norm / tf.maximum(norm, self.settings.clip_norm)
        self._adam([g * scale for g in gradient], *scalars)
        return loss / count, tokens, norm

    def _backward_in_slices(self, batch, random_bits):
        """Return what ``_backward`` does, summed over the slices of a batch."""
        slices = self.settings.accumulation_steps
        if slices == 1:
            return self._backward(batch, random_bits[0])
        zeros = [tf.zeros_like(parameter) for parameter in parameters(self.model).values()]
        return tf.foldl(
            lambda sums, part: tf.nest.map_structure(tf.add, sums, self._backward(*part)),
            (tuple(tf.reshape(ids, [slices, -1, tf.shape(ids)[1]]) for ids in batch), random_bits),
            ((tf.zeros([], self.model.variable_dtype), tf.constant(0)), zeros),
            parallel_iterations=1,  # to save memory is what the slices are for
        )

    def _backward(self, batch, random_bits):
        """Return the summed loss and the number of tokens of a slice, and the sum's gradient at every parameter."""
        model = self.model
        source_ids, target_ids, labels = batch
        policy = "mixed_bfloat16" if self.settings.mixed_bfloat16 else model.dtype_policy
        # In the scope dropout draws from the given bits, and leaves the model's own generators as they were.
        dropout = keras.StatelessScope(zip(self._dropout, tf.unstack(random_bits), strict=True))
        with _computing_in(policy, model):  # the backward pass too, which may compute layers again
            with tf.GradientTape() as tape, _checkpointing(model, self.settings), dropout:
                logits = model(source_ids, target_ids, training=True)
                loss, tokens = cross_entropy(logits, labels, model.config)
            return (loss, tokens), _differentiate(tape, loss, [*parameters(model).values()])

    def _adam(self, gradient, learning_rate, correction1, correction2):
        """Take one step of Adam (Kingma and Ba, 2015, Algorithm 1); the corrections are 1 - beta^step."""
        # Not Keras' own, which rounds the betas to float32 also in float64, and goes through memory a dozen times:
        # TensorFlow's kernel does so once. Like Keras, it adds epsilon to a root that is not corrected yet, so it is
        # given the epsilon that amounts to the right one. (In float32 it rounds 1 - beta, by 1e-6 at 0.98.)
        settings = self.settings
        root, zero = tf.sqrt(correction2), tf.zeros_like(correction2)
        numbers = {
            "lr": learning_rate * root / correction1,
            "beta1": tf.constant(settings.beta1, root.dtype),
            "beta2": tf.constant(settings.beta2, root.dtype),
            "epsilon": settings.epsilon * root,
            **dict.fromkeys(("beta1_power", "beta2_power"), zero),  # the corrections are in the rate
        }
        for (name, parameter), g in zip(parameters(self.model).items(), gradient, strict=True):
            m, v = self.first_moment[name], self.second_moment[name]
            tf.raw_ops.ResourceApplyAdam(var=parameter.handle, m=m.handle, v=v.handle, grad=g, **numbers)

    def _evaluation(self, batch):
        source_ids, target_ids, labels = batch
        config = self.model.config.replace(label_smoothing=0.0)
        return cross_entropy(self.model(source_ids, target_ids), labels, config)


def _take(model, source_ids, target_ids, labels):
    """Take a batch from the outside, checked."""
    config = model.config
    source_ids = to_ids("source_ids", source_ids, config.source_vocab_size, config.max_positions)
    target_ids = to_ids("target_ids", target_ids, config.target_vocab_size, config.max_positions)
    labels = to_ids("labels", labels, config.target_vocab_size, None)
    check_same_batch(tuple(source_ids.shape), tuple(target_ids.shape))
    check_labels(tuple(labels.shape), tuple(target_ids.shape))
    return source_ids, target_ids, labels


def _differentiate(tape, loss, places):
    """Return the gradient at each place as a dense tensor: a looked-up table's comes as the rows it concerns."""
    found = tape.gradient(loss, places, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    return tf.nest.map_structure(tf.convert_to_tensor, found)


@contextmanager
def _computing_in(policy: Any, model: Transformer) -> Iterator[None]:
    """Let every layer of a model compute as a Keras dtype policy says, on the variables it has, while it is traced."""
    own = [(layer, layer.dtype_policy) for layer in _layers(model)]
    for layer, _ in own:
        layer.dtype_policy = policy
    try:
        yield
    finally:
        for layer, policy in own:
            layer.dtype_policy = policy


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


def _layers(model):
    return model._flatten_layers()  # Keras' public ``layers`` are only the outermost


def _zeros_like(variable):
    return tf.Variable(tf.zeros_like(variable), trainable=False)
