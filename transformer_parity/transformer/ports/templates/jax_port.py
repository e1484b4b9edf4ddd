"""My port, as `parity` sees it. It agrees as it stands: replace the stand-in by your own model, method by method.

    parity check --port my_port:MyPort
    pytest --parity-port=my_port:MyPort

NumPy arrays go in and come out. B batch, S source length, T target length, V target vocabulary.
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

import transformer_jax  # the stand-in
from reference_numpy import TransformerConfig
from transformer_parity.plugin import Gradients, Port, Tap, TrainingConfig, no_tap
from transformer_spec.names import find, tap_shapes

Arrays = dict[str, jax.Array]


class MyPort(Port):
    """My model."""

    # The published conventions that your model follows (`parity info` lists them), and where it differs: for instance
    # {"norm_order": "pre", "layer_norm_epsilon": 1e-5}. Sizes are small ones, unless you give others here.
    preset = "paper_base"
    overrides: Mapping[str, Any] = {}
    # In float64, rounding is far below any mistake: without it, a wrong convention looks like a loss of precision.
    dtypes = ("float64", "float32")
    # Names as in `parity info --names`; "**.scores" is every name that ends so. Leave out what you cannot show.
    taps = ("**",)
    # Cases that your model is not made for, and why: {"full/one_token": "it needs two tokens"}. They count as skipped.
    left_out: Mapping[str, str] = {}

    def load(self, config: TransformerConfig, weights: Mapping[str, ndarray], dtype: str) -> None:
        """Build the model, in inference mode, with the given weights."""
        jax.config.update("jax_enable_x64", True)  # or float64 silently becomes float32
        jax.config.update("jax_default_matmul_precision", "highest")  # or a GPU multiplies in TF32
        self.config, self.dtype = config, dtype
        self.model = transformer_jax.Transformer(config, dtype, rngs=nnx.Rngs(0))
        self.model.eval()  # or dropout goes on
        # One table serves all methods: canonical name -> parameter. The stand-in's attributes have the canonical names;
        # yours may read {"encoder.layers.0.feed_forward.inner_proj.kernel": model.blocks[0].fc1.weight, ...}. A tied
        # table stands in it once.
        self.parameters = {name: find(self.model, name) for name in weights}
        for name, parameter in self.parameters.items():
            parameter[...] = jnp.array(weights[name], dtype)  # a kernel is [in, out] here as in nnx.Linear

    def forward(self, source_ids: ndarray, target_ids: ndarray, tap: Tap) -> ndarray:
        """Return the logits [B, T, V] of source ids [B, S] and target ids [B, T], both padded with ``pad_id``."""
        # Derive the masks from the ids. Here True means that a position may be attended to; torch.nn and others mean
        # the opposite. With other names or none in your model, show what you have: tap("encoder.output", memory).
        source, target = jnp.array(source_ids), jnp.array(target_ids)
        if tap is no_tap:
            return np.array(_run(self.model, source, target))  # as users run it: compiled
        # A compiled function has no values to show, so with taps on the model runs operation by operation.
        return np.array(self.model(source, target, tap=lambda name, value: jnp.array(tap(name, np.array(value)))))

    def export_weights(self) -> Mapping[str, ndarray]:
        """Return every parameter by its canonical name, in the model's dtype, as a copy."""
        return {name: np.array(parameter[...]) for name, parameter in self.parameters.items()}

    def gradients(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> Gradients:
        """Return the loss and its gradient at each parameter, of labels [B, T]."""
        # The gradient at a tap is the gradient of a zero that is added there; without taps, leave them out.
        (batch, source_length), target_length = source_ids.shape, target_ids.shape[1]
        shapes = tap_shapes(self.config, batch, source_length, target_length)
        zeros = {name: jnp.zeros(shape, self.dtype) for name, shape in shapes.items()}
        loss, of_parameters, of_taps = self._differentiate(source_ids, target_ids, labels, zeros)
        # In the order of the zeros: JAX sorts the keys of a dict.
        taps = {name: np.array(of_taps[name]) for name in zeros}
        return Gradients(float(loss), {name: np.array(array) for name, array in of_parameters.items()}, taps)

    def _differentiate(
        self, source_ids: ndarray, target_ids: ndarray, labels: ndarray, zeros: Arrays
    ) -> tuple[jax.Array, Arrays, Arrays]:
        ids = jnp.array(source_ids), jnp.array(target_ids), jnp.array(labels)
        loss, (of_model, of_taps) = _loss_and_gradients(self.model, zeros, *ids)
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        # By the parameter and not by its path: of the two paths to a tied table, Flax gives the first in the alphabet.
        found = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(of_model)}
        return loss, {names[id(find(self.model, path))]: array for path, array in found.items()}, of_taps

    def start_training(self, settings: TrainingConfig) -> None:
        """Make an Adam optimizer."""
        # settings.clip_norm is the largest norm of the whole gradient, or None. settings.accumulation_steps is in how
        # many slices a batch may be computed; the step is that of the whole batch.
        self.settings, self.step = settings, 0
        clip = optax.identity() if settings.clip_norm is None else optax.clip_by_global_norm(settings.clip_norm)
        adam = optax.chain(clip, optax.scale_by_adam(settings.beta1, settings.beta2, settings.epsilon))

        @jax.jit
        def update(arrays: Arrays, state: Any, gradients: Arrays, rate: float) -> tuple[Arrays, Any]:
            steps, state = adam.update(gradients, state)
            return {name: arrays[name] - rate * steps[name] for name in arrays}, state

        self.update, self.state = update, adam.init(self._arrays())

    def train_step(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> float:
        """Take one step, still without dropout, and return the loss before it."""
        self.step += 1  # the schedule counts from 1
        loss, gradients, _ = self._differentiate(source_ids, target_ids, labels, {})
        rate = self.settings.learning_rate(self.step, self.config.d_model)
        arrays, self.state = self.update(self._arrays(), self.state, gradients, rate)
        for name, parameter in self.parameters.items():
            parameter[...] = arrays[name]
        return float(loss)

    def _arrays(self) -> Arrays:
        return {name: parameter[...] for name, parameter in self.parameters.items()}

    # `parity check-distributed` compares training on several devices, in processes that it starts like torchrun.
    # Then each process reads only its rows of every batch, and returns loss, gradient and weights of all. It needs:
    #
    #     one_process = True  # whether one process has all devices
    #
    #     def distribute(self, plan):
    #         self.mesh = jax.make_mesh((plan.data,), ("data",))
    #
    #     def parameters_per_device(self):
    #         parts = [part for x in jax.tree.leaves(nnx.state(self.model)) for part in x.addressable_shards]
    #         return [sum(part.data.size for part in parts if part.device == device) for device in jax.devices()]

    def generate(self, source_ids: ndarray, max_length: int, beam_size: int, length_penalty: float) -> ndarray:
        """Return the best hypothesis of each sentence [B, <= max_length], without the start symbol, padded."""
        # After ``eos_id``, which belongs to the hypothesis, come pads only. The padding symbol is never chosen.
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
    """Return the label-smoothed cross-entropy per token that is no padding."""
    tap = (lambda name, value: value + zeros[name]) if zeros else no_tap
    log_probabilities = jax.nn.log_softmax(model(source_ids, target_ids, tap=tap))  # [B, T, V]
    right = jnp.take_along_axis(log_probabilities, labels[..., None], axis=-1)[..., 0]
    smoothing = model.config.label_smoothing
    losses = -(1 - smoothing) * right - smoothing * log_probabilities.mean(-1)
    counts = labels != model.config.pad_id
    return jnp.where(counts, losses, 0).sum() / counts.sum()
