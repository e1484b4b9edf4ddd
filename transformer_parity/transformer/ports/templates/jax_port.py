"""A port: the class through which `parity` runs your model and compares it with the reference.

This template passes the check because it wraps a placeholder model. To check your own model:

1. Replace `load` and `forward` first, because they must use the same model. Set `taps` to the names that your `forward`
   reports, or to `()`. Delete the methods that you have not written yet, because they use the placeholder.
2. Check only the forward pass, until it agrees:

       parity check --port my_port:MyPort --stage activations

3. Add `export_weights`, `gradients`, `start_training`, `train_step`, and `generate`, and check everything:

       parity check --port my_port:MyPort
       pytest --parity-port=my_port:MyPort

All methods take and return NumPy arrays. Shapes: B batch, S source length, T target length, V target vocabulary.
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

    # The preset that your model follows (`parity info` lists them), and the config fields in which your model differs,
    # for example {"norm_order": "pre", "layer_norm_epsilon": 1e-5}. The cases use small sizes unless you set them here.
    preset = "paper_base"
    overrides: Mapping[str, Any] = {}
    # In float64, rounding errors are far smaller than the effect of any bug. If you remove float64, the check can't
    # distinguish a wrong convention from a loss of precision.
    dtypes = ("float64", "float32")
    # Taps (named intermediate values) that `forward` reports. `parity info --names` lists all names, and "**.scores"
    # matches every name that ends in ".scores". If your model reports none, set this to `()`.
    taps = ("**",)
    # Cases that your model doesn't support, each with a reason: {"full/one_token": "needs at least two tokens"}.
    # The report lists them as skipped.
    left_out: Mapping[str, str] = {}

    def load(self, config: TransformerConfig, weights: Mapping[str, ndarray], dtype: str) -> None:
        """Build the model, in inference mode, with the given weights."""
        jax.config.update("jax_enable_x64", True)  # otherwise JAX silently converts float64 to float32
        jax.config.update("jax_default_matmul_precision", "highest")  # otherwise GPUs use TF32
        self.config, self.dtype = config, dtype
        self.model = transformer_jax.Transformer(config, dtype, rngs=nnx.Rngs(0))
        self.model.eval()  # turn dropout off
        # All methods use this dict from canonical names to parameters. For your model, write
        # {"encoder.layers.0.feed_forward.inner_proj.kernel": model.blocks[0].fc1.kernel, ...}. List a tied embedding
        # matrix only once.
        self.parameters = {name: parameter_of(self.model, name) for name in weights}
        for name, parameter in self.parameters.items():
            parameter[...] = jnp.array(weights[name], dtype)  # kernels are [in, out], as in nnx.Linear

    def forward(self, source_ids: ndarray, target_ids: ndarray, tap: Tap) -> ndarray:
        """Return the logits [B, T, V] of source ids [B, S] and target ids [B, T], both padded with ``pad_id``."""
        # Derive the masks from the ids. In a mask, True means that a position may be attended to. Some libraries, such
        # as torch.nn, use the opposite convention. If your model has no `tap` argument, call `tap` yourself for the
        # values that you can read, for example tap("encoder.output", memory).
        source, target = jnp.array(source_ids), jnp.array(target_ids)
        if tap is no_tap:
            return np.array(_run(self.model, source, target))  # compiled, as in normal use
        # Taps can't read concrete values in a compiled function, so the model runs uncompiled when taps are on.
        return np.array(self.model(source, target, tap=lambda name, value: jnp.array(tap(name, np.array(value)))))

    def export_weights(self) -> Mapping[str, ndarray]:
        """Return every parameter by its canonical name, in the model's dtype, as a copy."""
        return {name: np.array(parameter[...]) for name, parameter in self.parameters.items()}

    def gradients(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> Gradients:
        """Return the loss for labels [B, T] and its gradient with respect to each parameter."""
        # Add a zero at each tap. Its gradient is the gradient at the tap. Remove the zeros if you don't report taps.
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
        # Identify parameters by object, not by path. A tied embedding matrix has multiple paths, and Flax returns the
        # alphabetically first one.
        found = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(of_model)}
        return loss, {names[id(find(self.model, path))]: array for path, array in found.items()}, of_taps

    def start_training(self, settings: TrainingConfig) -> None:
        """Create an Adam optimizer."""
        # settings.clip_norm is the maximum norm of the full gradient, or None. settings.accumulation_steps is the
        # number of micro-batches. You may ignore it, because the step must match a step on the full batch.
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

    # `parity check-distributed` compares training on multiple devices. It starts the processes the way torchrun does.
    # Each process then trains on its own rows of every batch and returns the loss, the gradient, and the weights of
    # the full run. To support it, define:
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
        # A hypothesis includes its ``eos_id``, and every later token is padding. Never generate the padding token.
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
    """Return the label-smoothed cross-entropy per non-padding token."""
    tap = (lambda name, value: value + zeros[name]) if zeros else no_tap
    log_probabilities = jax.nn.log_softmax(model(source_ids, target_ids, tap=tap))  # [B, T, V]
    right = jnp.take_along_axis(log_probabilities, labels[..., None], axis=-1)[..., 0]
    smoothing = model.config.label_smoothing
    losses = -(1 - smoothing) * right - smoothing * log_probabilities.mean(-1)
    counts = labels != model.config.pad_id
    return jnp.where(counts, losses, 0).sum() / counts.sum()
