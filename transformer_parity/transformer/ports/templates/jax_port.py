"""A port of my model for `parity`. It wraps transformer_jax, so it agrees with the reference.

Replace transformer_jax with your own model, one method at a time, and rerun the check after each change:

    parity check --port my_port:MyPort
    pytest --parity-port=my_port:MyPort

All methods take and return NumPy arrays. In shapes, B is the batch size, S the source length, T the target length,
and V the size of the target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from numpy import ndarray

import transformer_jax  # replace with your own model
from reference_numpy import TransformerConfig
from transformer_parity.plugin import Gradients, Port, Tap, TrainingConfig, no_tap
from transformer_spec.names import find, tap_shapes

Arrays = dict[str, jax.Array]


class MyPort(Port):
    """My model."""

    # `preset` names the published conventions that your model follows; `parity info` lists them. `overrides` lists the
    # fields in which your model differs, such as {"norm_order": "pre", "layer_norm_epsilon": 1e-5}. It can also set
    # sizes, which are small by default.
    preset = "paper_base"
    overrides: Mapping[str, Any] = {}
    # Keep float64 if you can. Its rounding errors are much smaller than any bug; without float64, a wrong convention
    # looks like a loss of precision.
    dtypes = ("float64", "float32")
    # The taps (named intermediate values) that `forward` reports. `parity info --names` lists all names. The pattern
    # "**.scores" matches every name that ends with ".scores". Remove the names that your model can't report.
    taps = ("**",)
    # Cases that your model doesn't support, with the reason: {"full/one_token": "the model needs two tokens"}. The
    # report lists them as skipped.
    left_out: Mapping[str, str] = {}

    def load(self, config: TransformerConfig, weights: Mapping[str, ndarray], dtype: str) -> None:
        """Build the model with the given weights, in inference mode."""
        jax.config.update("jax_enable_x64", True)  # otherwise JAX silently converts float64 to float32
        jax.config.update("jax_default_matmul_precision", "highest")  # otherwise GPUs use TF32
        self.config, self.dtype = config, dtype
        self.model = transformer_jax.Transformer(config, dtype, rngs=nnx.Rngs(0))
        self.model.eval()  # disables dropout
        # All methods use this mapping from canonical names to parameters. For your model, it may look like this:
        # {"encoder.layers.0.feed_forward.inner_proj.kernel": model.blocks[0].fc1.weight, ...}. A tied matrix has only
        # one name.
        self.parameters = {name: find(self.model, name) for name in weights}
        for name, parameter in self.parameters.items():
            parameter[...] = jnp.array(weights[name], dtype)  # kernels are [in, out], as in nnx.Linear

    def forward(self, source_ids: ndarray, target_ids: ndarray, tap: Tap) -> ndarray:
        """Return the logits [B, T, V] for source IDs [B, S] and target IDs [B, T], both padded with ``pad_id``."""
        # Derive the masks from the IDs. In this repository, True means that a position may be attended to. In
        # torch.nn.Transformer and some other libraries, True means the opposite. If your model has no taps, report
        # the values that you have: memory = tap("encoder.output", memory).
        source, target = jnp.array(source_ids), jnp.array(target_ids)
        if tap is no_tap:
            return np.array(_run(self.model, source, target))  # without taps, run compiled as users do
        # A compiled function can't report concrete values, so the model runs operation by operation if taps are used.
        return np.array(self.model(source, target, tap=lambda name, value: jnp.array(tap(name, np.array(value)))))

    def export_weights(self) -> Mapping[str, ndarray]:
        """Return a copy of every parameter in the model's dtype, by canonical name."""
        return {name: np.array(parameter[...]) for name, parameter in self.parameters.items()}

    def gradients(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> Gradients:
        """Return the loss for labels [B, T] and its gradient with respect to each parameter."""
        # The gradient at a tap is the gradient with respect to a zero array that is added there. If your model has no
        # taps, remove the zeros.
        (batch, source_length), target_length = source_ids.shape, target_ids.shape[1]
        shapes = tap_shapes(self.config, batch, source_length, target_length)
        zeros = {name: jnp.zeros(shape, self.dtype) for name, shape in shapes.items()}
        loss, of_parameters, of_taps = self._differentiate(source_ids, target_ids, labels, zeros)
        # Restore the order of the taps, because JAX sorts the keys of a dict.
        taps = {name: np.array(of_taps[name]) for name in zeros}
        return Gradients(float(loss), {name: np.array(array) for name, array in of_parameters.items()}, taps)

    def _differentiate(
        self, source_ids: ndarray, target_ids: ndarray, labels: ndarray, zeros: Arrays
    ) -> tuple[jax.Array, Arrays, Arrays]:
        ids = jnp.array(source_ids), jnp.array(target_ids), jnp.array(labels)
        loss, (of_model, of_taps) = _loss_and_gradients(self.model, zeros, *ids)
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        # Look up names by parameter, not by path. A tied matrix has two paths, and Flax returns the one that comes
        # first alphabetically.
        found = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(of_model)}
        return loss, {names[id(find(self.model, path))]: array for path, array in found.items()}, of_taps

    def start_training(self, settings: TrainingConfig) -> None:
        """Create an Adam optimizer."""
        # settings.clip_norm is the maximum norm of the full gradient, or None. settings.accumulation_steps is the
        # number of micro-batches. You may ignore it, because the update must be the one for the full batch.
        self.settings, self.step = settings, 0
        clip = optax.identity() if settings.clip_norm is None else optax.clip_by_global_norm(settings.clip_norm)
        adam = optax.chain(clip, optax.scale_by_adam(settings.beta1, settings.beta2, settings.epsilon))

        @jax.jit
        def update(arrays: Arrays, state: Any, gradients: Arrays, rate: float) -> tuple[Arrays, Any]:
            steps, state = adam.update(gradients, state)
            return {name: arrays[name] - rate * steps[name] for name in arrays}, state

        self.update, self.state = update, adam.init(self._arrays())

    def train_step(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> float:
        """Take one step without dropout, and return the loss before the update."""
        self.step += 1  # the first step of the schedule is step 1
        loss, gradients, _ = self._differentiate(source_ids, target_ids, labels, {})
        rate = self.settings.learning_rate(self.step, self.config.d_model)
        arrays, self.state = self.update(self._arrays(), self.state, gradients, rate)
        for name, parameter in self.parameters.items():
            parameter[...] = arrays[name]
        return float(loss)

    def _arrays(self) -> Arrays:
        return {name: parameter[...] for name, parameter in self.parameters.items()}

    # `parity check-distributed` compares training on multiple devices. It starts the processes as torchrun does. Each
    # process must read only its own rows of every batch, and must return the loss, gradients, and weights of the full
    # batch. To support the command, add these members:
    #
    #     one_process = True  # whether one process controls all devices
    #
    #     def distribute(self, plan):
    #         self.mesh = jax.make_mesh((plan.data,), ("data",))
    #
    #     def parameters_per_device(self):
    #         parts = [part for x in jax.tree.leaves(nnx.state(self.model)) for part in x.addressable_shards]
    #         return [sum(part.data.size for part in parts if part.device == device) for device in jax.devices()]

    def generate(self, source_ids: ndarray, max_length: int, beam_size: int, length_penalty: float) -> ndarray:
        """Return the best hypothesis of each sentence [B, <= max_length], without BOS, padded with ``pad_id``."""
        # A hypothesis includes its ``eos_id``. Only padding follows it. The search never chooses the padding token.
        if beam_size == 1:
            return transformer_jax.greedy_search(self.model, source_ids, max_length).ids
        return transformer_jax.beam_search(self.model, source_ids, beam_size, length_penalty, max_length).ids


@nnx.jit
def _run(model: transformer_jax.Transformer, source_ids: jax.Array, target_ids: jax.Array) -> jax.Array:
    return model(source_ids, target_ids)


@nnx.jit
@partial(nnx.value_and_grad, argnums=(0, 1))
def _loss_and_gradients(
    model: transformer_jax.Transformer, zeros: Arrays, source_ids: jax.Array, target_ids: jax.Array, labels: jax.Array
) -> jax.Array:
    """Return the label-smoothed cross-entropy, averaged over target tokens without padding."""
    tap = (lambda name, value: value + zeros[name]) if zeros else no_tap
    log_probabilities = jax.nn.log_softmax(model(source_ids, target_ids, tap=tap))  # [B, T, V]
    right = jnp.take_along_axis(log_probabilities, labels[..., None], axis=-1)[..., 0]
    smoothing = model.config.label_smoothing
    losses = -(1 - smoothing) * right - smoothing * log_probabilities.mean(-1)
    counts = labels != model.config.pad_id
    return jnp.where(counts, losses, 0).sum() / counts.sum()
