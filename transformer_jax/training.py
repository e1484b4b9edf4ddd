"""Training (Vaswani et al., 2017, section 5): loss, gradients and the optimizer step.

B batch, S source length, T target length, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from reference_numpy.checks import check_accumulation, check_integer, check_labels, check_same_batch, check_trainable
from reference_numpy.config import TransformerConfig
from reference_numpy.names import check_training_state, parameter_shapes, rounded, tap_shapes
from reference_numpy.taps import Tap, no_tap
from reference_numpy.training_config import Gradients, StepResult, TrainingConfig, TrainingState
from transformer_jax.runtime import quick_compilation, to_ids
from transformer_jax.transformer import Transformer
from transformer_jax.weights import find

if TYPE_CHECKING:
    from jaxtyping import Float, Int

Arrays = dict[str, Array]  # by canonical name
Batch = tuple[Array, Array, Array]  # source_ids, target_ids, labels

MIXED_BFLOAT16 = True  # whether this backend can compute in bfloat16 with float32 weights


def cross_entropy(
    logits: Float[Array, "B T V"], labels: Int[Array, "B T"], config: TransformerConfig
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Return the label-smoothed cross-entropy in nats, summed over the target tokens, and their number.

    Section 5.4: the probability ``label_smoothing`` is taken from the right token and spread over all tokens
    (``uniform``), over the wrong ones (``off_target``), or over the wrong ones but padding (``off_target_and_pad``).
    Labels that are ``pad_id`` count for nothing. The logarithms are taken in at least float32.

    Args:
        logits: The scores of each next token.
        labels: The right next tokens, padded with ``config.pad_id``.
        config: Has the padding id and the label smoothing.
    """
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    log_probabilities = jax.nn.log_softmax(wide)  # [B, T, V]
    # A comparison, not take_along_axis: its gradient is one more fused loop, not a scatter into [B, T, V].
    is_right = labels[..., None] == jnp.arange(logits.shape[-1])
    right = jnp.where(is_right, log_probabilities, 0.0).sum(-1)  # [B, T]
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
    return jnp.where(counted, losses, 0.0).sum(), counted.sum()


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
    loss, (of_parameters, of_taps) = _compile_gradients(_Structure.of(model))(_parameters(model), batch)
    # The names give the order, which jax.jit loses: it sorts the keys of a dict.
    taps = _tap_shapes(model.config, batch)
    return Gradients(
        float(loss),
        {name: np.array(of_parameters[name]) for name in parameter_shapes(model.config)},
        {name: np.array(of_taps[name]) for name in taps},
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
        check_trainable(
            model.source_embedding.table.dtype.name, mixed_bfloat16=settings.mixed_bfloat16, supported=MIXED_BFLOAT16
        )
        check_integer("seed", seed, minimum=0)
        model.eval()
        self.model = model
        self.settings = settings
        self.seed = seed
        self.step = 0  # steps taken
        parameters = _parameters(model)
        # A step gives its inputs away, and a clone of the model may hold the same arrays: they are copied once.
        _put_parameters(model, _placed_alike(jnp.copy, parameters))
        self.first_moment = _placed_alike(jnp.zeros_like, parameters)
        self.second_moment = _placed_alike(jnp.zeros_like, parameters)
        structure = _Structure.of(model)
        platform = next(iter(model.source_embedding.table.devices())).platform
        self._compiled_step = _compile_step(structure, settings, platform)
        self._compiled_evaluation = _compile_evaluation(structure)

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
        batch = _take(self.model, source_ids, target_ids, labels)
        settings, step = self.settings, self.step + 1
        check_accumulation(settings.accumulation_steps, len(batch[0]))
        # What changes from step to step goes in as numbers, exact to the last bit also where JAX has no float64.
        numbers = {
            "learning_rate": settings.learning_rate(step, self.model.config.d_model),
            "first_correction": 1.0 - settings.beta1**step,
            "second_correction": 1.0 - settings.beta2**step,
        }
        random_bits = np.random.SeedSequence([self.seed, self.step]).generate_state(2)
        parameters, self.first_moment, self.second_moment, result = self._compiled_step(
            _parameters(self.model), self.first_moment, self.second_moment, batch, random_bits, numbers
        )
        _put_parameters(self.model, parameters)
        self.step = step
        return StepResult(*result)

    def evaluate(self, source_ids: Any, target_ids: Any, labels: Any) -> tuple[Float[Array, ""], Int[Array, ""]]:
        """Return the cross-entropy in nats summed over the target tokens, and their number: no dropout, no smoothing.

        Arguments and errors as in ``train_step``.
        """
        batch = _take(self.model, source_ids, target_ids, labels)
        return self._compiled_evaluation(_parameters(self.model), batch)

    def export_state(self) -> TrainingState:
        """Return a copy of everything that the next step depends on, beside the weights and the settings."""
        names = parameter_shapes(self.model.config)  # in their order: jax.jit has sorted the keys
        first = {name: np.array(self.first_moment[name]) for name in names}
        second = {name: np.array(self.second_moment[name]) for name in names}
        return TrainingState(self.step, self.seed, first, second)

    def load_state(self, state: TrainingState) -> None:
        """Go on from a state that any of the four packages exported.

        Raises:
            TypeError: A moment is not of a floating-point dtype.
            ValueError: The moments are not those of the model's config, or overflow its dtype.
        """
        check_training_state(self.model.config, state, self.model.source_embedding.table.dtype.name)
        self.first_moment, self.second_moment = (
            {
                name: jax.device_put(rounded(name, moment[name], array.dtype.name), array.sharding)
                for name, array in self.first_moment.items()
            }
            for moment in (state.first_moment, state.second_moment)
        )
        self.step, self.seed = state.step, state.seed


def _take(model, source_ids, target_ids, labels):
    """Take a batch from the outside, checked."""
    config = model.config
    source_ids = to_ids("source_ids", source_ids, config.source_vocab_size, config.max_positions)
    target_ids = to_ids("target_ids", target_ids, config.target_vocab_size, config.max_positions)
    labels = to_ids("labels", labels, config.target_vocab_size, None)
    check_same_batch(source_ids.shape, target_ids.shape)
    check_labels(labels.shape, target_ids.shape)
    return source_ids, target_ids, labels


def _tap_shapes(config: TransformerConfig, batch: Batch) -> dict[str, tuple[int, ...]]:
    source_ids, target_ids, _ = batch
    return tap_shapes(config, len(source_ids), source_ids.shape[1], target_ids.shape[1])


def _parameters(model: Transformer) -> Arrays:
    """Return every parameter's array by its canonical name."""
    return {name: find(model, name).get_value() for name in parameter_shapes(model.config)}


def _put_parameters(model: Transformer, parameters: Arrays) -> None:
    """Let a model compute with these arrays, which may be traced."""
    for name, array in parameters.items():
        find(model, name).set_value(array)


def _placed_alike(function: Callable[[Array], Array], arrays: Arrays) -> Arrays:
    """Apply a function to each array; what comes out is bound to the array's device, as the result of a step is.

    Otherwise the second step would differ from the first, and be compiled again.
    """
    return {name: jax.device_put(function(array), array.sharding) for name, array in arrays.items()}


@dataclass(frozen=True)
class _Structure:
    """A model without its arrays: all that compiled code depends on, beside shapes."""

    graph: nnx.GraphDef
    state: nnx.State = field(compare=False)  # shapes and dtypes, which follow from the graph
    config: TransformerConfig

    @classmethod
    def of(cls, model: Transformer) -> _Structure:
        graph, state = nnx.split(model)
        # As jax.eval_shape would have it, which takes as long as nnx.split.
        shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), state)
        return cls(graph, shapes, model.config)

    def build(self, parameters: Arrays) -> Transformer:
        """Return a model in inference mode that computes with these arrays, which may be traced."""
        model = nnx.merge(self.graph, self.state, copy=True)
        _put_parameters(model, parameters)
        model.eval()
        return model


def _loss(model: Transformer, batch: Batch, tap: Tap = no_tap) -> tuple[Array, Array]:
    source_ids, target_ids, labels = batch
    return cross_entropy(model(source_ids, target_ids, tap=tap), labels, model.config)


# The functions below are kept for as long as their compiled code is, by structure: a second trainer of the same kind
# of model compiles nothing. Parameters pass as a flat dict of arrays, not as the model: to take a model of three
# layers apart and put it together again, nnx.jit needs 18 ms a call (and three times that with the moments), and
# jax.jit of nnx.split 12 ms; this needs 3 ms.


@lru_cache(maxsize=8)
def _compile_gradients(structure: _Structure) -> Callable[..., Any]:
    def loss(parameters, zeros, batch):
        total, tokens = _loss(structure.build(parameters), batch, lambda name, value: value + zeros[name])
        return total / jnp.maximum(tokens, 1)

    def run(parameters, batch):
        dtype = parameters["source_embedding.table"].dtype
        zeros = {name: jnp.zeros(shape, dtype) for name, shape in _tap_shapes(structure.config, batch).items()}
        return jax.value_and_grad(loss, argnums=(0, 1))(parameters, zeros, batch)

    # Called once or twice for one model, so nobody waits for the result, only for the compiler.
    return jax.jit(run, compiler_options=quick_compilation())


@lru_cache(maxsize=8)
def _compile_evaluation(structure: _Structure) -> Callable[..., Any]:
    def run(parameters, batch):
        model = structure.build(parameters)
        model.config = model.config.replace(label_smoothing=0.0)
        return _loss(model, batch)

    return jax.jit(run)


@lru_cache(maxsize=8)
def _compile_step(structure: _Structure, settings: TrainingConfig, platform: str) -> Callable[..., Any]:
    slices = settings.accumulation_steps

    def loss(parameters, batch, key):
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
        return _loss(model, batch)

    def gradient_of_sum(parameters, batch, key):
        """Return loss, tokens and gradient, summed over the slices of a batch."""

        def add_slice(sums, inputs):
            part, number = inputs
            key_of_slice = jax.random.fold_in(key, number)
            (total, tokens), gradient = jax.value_and_grad(loss, has_aux=True)(parameters, part, key_of_slice)
            return jax.tree.map(jnp.add, sums, (total, tokens, gradient)), None

        parts = jax.tree.map(lambda ids: ids.reshape(slices, -1, ids.shape[1]), batch)
        zeros = jax.tree.map(jnp.zeros_like, parameters)
        sums = (jnp.zeros((), zeros["source_embedding.table"].dtype), jnp.zeros((), int), zeros)
        return jax.lax.scan(add_slice, sums, (parts, jnp.arange(slices)))[0]

    def adam(parameter, m, v, g, numbers):
        m = m + (1.0 - settings.beta1) * (g - m)
        v = v + (1.0 - settings.beta2) * (g * g - v)
        m_hat = m / numbers["first_correction"]
        v_hat = v / numbers["second_correction"]
        return parameter - numbers["learning_rate"] * m_hat / (jnp.sqrt(v_hat) + settings.epsilon), m, v

    def step(parameters, first_moment, second_moment, batch, random_bits, numbers):
        key = jax.random.wrap_key_data(random_bits, impl="threefry2x32")
        total, tokens, gradient = gradient_of_sum(parameters, batch, key)
        scale = 1.0 / jnp.maximum(tokens, 1).astype(total.dtype)
        norm = scale * jnp.sqrt(sum(jnp.vdot(g, g) for g in gradient.values()))
        loss = total * scale
        if settings.clip_norm is not None:
            scale *= settings.clip_norm / jnp.maximum(norm, settings.clip_norm)
        updated = {
            name: adam(parameters[name], first_moment[name], second_moment[name], scale * g, numbers)
            for name, g in gradient.items()
        }
        parameters, first_moment, second_moment = ({name: new[i] for name, new in updated.items()} for i in range(3))
        return parameters, first_moment, second_moment, (loss, tokens, norm)

    options = {}
    if settings.activation_checkpointing and platform == "cpu":
        # Where XLA compiles for a CPU, this pass takes nnx.remat's barriers away before the order is settled in which
        # to compute: a layer would be computed again at once, and all of it kept.
        options["xla_disable_hlo_passes"] = "cse_barrier_expander"
    # Old parameters and moments make room for the new ones.
    return jax.jit(step, donate_argnums=(0, 1, 2), compiler_options=options)
