"""A port: a class through which `parity` runs your model and compares the results with the NumPy reference.

This template already agrees with the reference, because its placeholder is a correct model. To check your own model:

1. Replace the placeholder in both `load` and `forward`, which must use the same model. Set `taps` to the names of the
   intermediate values that your `forward` reports, or to `()` if it reports none. Delete all other methods for now,
   because they still use the placeholder.
2. Check only the forward pass, and fix your port until it agrees with the reference:

       parity check --port my_port:MyPort --stage activations

3. Add `export_weights`, `gradients`, `start_training`, `train_step`, and `generate`. Then check all methods, using
   either `parity` or pytest:

       parity check --port my_port:MyPort
       pytest --parity-port=my_port:MyPort

All methods take and return NumPy arrays. In shapes, B is the batch size, S is the source length, T is the target
length, and V is the size of the target vocabulary.
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

import transformer_jax  # placeholder for your model
from reference_numpy import TransformerConfig
from transformer_jax.weights import parameter_of
from transformer_parity.plugin import Gradients, Port, Tap, TrainingConfig, no_tap
from transformer_spec.names import find, tap_shapes

Arrays = dict[str, jax.Array]


class MyPort(Port):
    """My model."""

    # The preset that your model follows (`parity info` lists all presets), and the config fields in which your model
    # differs from the preset, for example {"norm_order": "pre", "layer_norm_epsilon": 1e-5}. `parity` checks a small
    # model unless you also set the sizes of your model here.
    preset = "paper_base"
    overrides: Mapping[str, Any] = {}
    # The dtypes that your model supports. In float64, rounding errors are far smaller than the effect of any bug. If
    # you remove float64, the check can't distinguish bugs from rounding errors.
    dtypes = ("float64", "float32")
    # Patterns for the names of the taps (named intermediate values) that `forward` reports. `parity info --names` lists
    # all names. "**" matches every name, and "**.scores" matches every name that ends in ".scores". If `forward`
    # doesn't report any taps, set this to `()`.
    taps = ("**",)
    # The test cases that your model doesn't support, and the reason for each of them, for example
    # {"full/one_token": "needs at least two tokens"}. The report lists these cases as skipped.
    left_out: Mapping[str, str] = {}

    def load(self, config: TransformerConfig, weights: Mapping[str, ndarray], dtype: str) -> None:
        """Build the model, load the given weights, and put the model in inference mode."""
        jax.config.update("jax_enable_x64", True)  # otherwise JAX silently converts float64 to float32
        jax.config.update("jax_default_matmul_precision", "highest")  # otherwise GPUs use TF32
        self.config, self.dtype = config, dtype
        self.model = transformer_jax.Transformer(config, dtype, rngs=nnx.Rngs(0))
        self.model.eval()  # turn dropout off
        # A dict from canonical names to the model's parameters. All methods use this dict. To list the names, run
        # `parity info --names`. For your model, write
        # {"encoder.layers.0.feed_forward.inner_proj.kernel": model.blocks[0].fc1.kernel, ...}. List a tied embedding
        # matrix only once.
        self.parameters = {name: parameter_of(self.model, name) for name in weights}
        for name, parameter in self.parameters.items():
            parameter[...] = jnp.array(weights[name], dtype)  # kernels are [in, out], as in nnx.Linear

    def forward(self, source_ids: ndarray, target_ids: ndarray, tap: Tap) -> ndarray:
        """Return the logits [B, T, V] for source IDs [B, S] and target IDs [B, T], both padded with ``pad_id``."""
        # If your model takes masks as arguments, compute the masks from the IDs. In the placeholder's masks, True means
        # that a position may be attended to. Some libraries, such as torch.nn, use the opposite convention.
        # If your model doesn't take a `tap` argument, call `tap` here for all intermediate values that you can access,
        # for example tap("encoder.output", memory).
        source, target = jnp.array(source_ids), jnp.array(target_ids)
        if tap is no_tap:
            return np.array(_run(self.model, source, target))  # run the compiled model, as in normal use
        # In a compiled function, a tap would receive tracers instead of concrete values, so don't compile the model.
        return np.array(self.model(source, target, tap=lambda name, value: jnp.array(tap(name, np.array(value)))))

    def export_weights(self) -> Mapping[str, ndarray]:
        """Return a dict from canonical names to copies of all parameters, in the model's dtype."""
        return {name: np.array(parameter[...]) for name, parameter in self.parameters.items()}

    def gradients(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> Gradients:
        """Return the loss for labels [B, T], and the gradient of the loss with respect to each parameter."""
        # Add an array of zeros to the value at each tap. The gradient with respect to this array is the gradient at the
        # tap. If you don't report taps, set `zeros` to an empty dict.
        (batch, source_length), target_length = source_ids.shape, target_ids.shape[1]
        shapes = tap_shapes(self.config, batch, source_length, target_length)
        zeros = {name: jnp.zeros(shape, self.dtype) for name, shape in shapes.items()}
        loss, of_parameters, of_taps = self._differentiate(source_ids, target_ids, labels, zeros)
        # Restore the order of computation, because JAX sorts the keys of a dict.
        taps = {name: np.array(of_taps[name]) for name in zeros}
        return Gradients(float(loss), {name: np.array(array) for name, array in of_parameters.items()}, taps)

    def _differentiate(
        self, source_ids: ndarray, target_ids: ndarray, labels: ndarray, zeros: Arrays
    ) -> tuple[jax.Array, Arrays, Arrays]:
        ids = jnp.array(source_ids), jnp.array(target_ids), jnp.array(labels)
        loss, (of_model, of_taps) = _loss_and_gradients(self.model, zeros, *ids)
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        # Identify each parameter by its object, not by its path. A tied embedding matrix has multiple paths, and Flax
        # returns only the alphabetically first one.
        found = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(of_model)}
        return loss, {names[id(find(self.model, path))]: array for path, array in found.items()}, of_taps

    def start_training(self, settings: TrainingConfig) -> None:
        """Create an Adam optimizer."""
        # settings.clip_norm is the maximum norm of the gradient of all parameters; None disables clipping.
        # settings.accumulation_steps is the number of micro-batches. You may ignore accumulation_steps and process the
        # batch all at once, because the results must be the same.
        self.settings, self.step = settings, 0
        clip = optax.identity() if settings.clip_norm is None else optax.clip_by_global_norm(settings.clip_norm)
        adam = optax.chain(clip, optax.scale_by_adam(settings.beta1, settings.beta2, settings.epsilon))

        @jax.jit
        def update(arrays: Arrays, state: Any, gradients: Arrays, rate: float) -> tuple[Arrays, Any]:
            steps, state = adam.update(gradients, state)
            return {name: arrays[name] - rate * steps[name] for name in arrays}, state

        self.update, self.state = update, adam.init(self._arrays())

    def train_step(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> float:
        """Take one training step without dropout, and return the loss before the update."""
        self.step += 1  # the schedule starts at step 1
        loss, gradients, _ = self._differentiate(source_ids, target_ids, labels, {})
        rate = self.settings.learning_rate(self.step, self.config.d_model)
        arrays, self.state = self.update(self._arrays(), self.state, gradients, rate)
        for name, parameter in self.parameters.items():
            parameter[...] = arrays[name]
        return float(loss)

    def _arrays(self) -> Arrays:
        return {name: parameter[...] for name, parameter in self.parameters.items()}

    # `parity check-distributed` trains your model on multiple devices and compares the results with the reference's
    # results. It starts processes with the same environment variables as torchrun. Every process receives the full
    # batch, trains on its shard of the rows, and returns the results of the full batch: the loss, the gradient, and the
    # unsharded weights. To support this check, define:
    #
    #     one_process = True  # one process controls all devices
    #
    #     def distribute(self, plan):
    #         self.mesh = jax.make_mesh((plan.data,), ("data",))
    #
    #     def parameters_per_device(self):
    #         parts = [part for x in jax.tree.leaves(nnx.state(self.model)) for part in x.addressable_shards]
    #         return [sum(part.data.size for part in parts if part.device == device) for device in jax.devices()]

    def generate(self, source_ids: ndarray, max_length: int, beam_size: int, length_penalty: float) -> ndarray:
        """Return the best hypothesis [B, <= max_length] for each sequence, padded and without the BOS token."""
        # A hypothesis ends with ``eos_id`` or after ``max_length`` tokens. Pad shorter hypotheses with ``pad_id``. The
        # search itself must never choose the padding token.
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
    """Return the label-smoothed cross-entropy, averaged over the non-padding labels."""
    tap = (lambda name, value: value + zeros[name]) if zeros else no_tap
    log_probabilities = jax.nn.log_softmax(model(source_ids, target_ids, tap=tap))  # [B, T, V]
    right = jnp.take_along_axis(log_probabilities, labels[..., None], axis=-1)[..., 0]
    smoothing = model.config.label_smoothing
    losses = -(1 - smoothing) * right - smoothing * log_probabilities.mean(-1)
    counts = labels != model.config.pad_id
    return jnp.where(counts, losses, 0).sum() / counts.sum()
