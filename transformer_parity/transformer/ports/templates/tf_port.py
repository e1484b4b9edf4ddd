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
from typing import Any

import tensorflow as tf
from numpy import ndarray

import transformer_tf  # placeholder for your model
from reference_numpy import TransformerConfig
from transformer_parity.plugin import Gradients, Port, Tap, TrainingConfig, no_tap
from transformer_tf.weights import parameters

Tensors = dict[str, tf.Tensor]


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
        self.config = config
        self.model = transformer_tf.Transformer(config, dtype=dtype)  # Keras defaults to float32
        # All methods use this dict from canonical names to parameters. The placeholder's attributes already have the
        # canonical names. For your model, write {"encoder.layers.0.feed_forward.inner_proj.kernel":
        # model.blocks[0].fc1.weight, ...}. List a tied embedding matrix only once.
        self.parameters = parameters(self.model)
        for name, variable in self.parameters.items():
            variable.assign(weights[name])  # kernels are [in, out], as in keras.layers.Dense
        self.compiled = tf.function(lambda source, target: self.model(source, target, training=False))

    def forward(self, source_ids: ndarray, target_ids: ndarray, tap: Tap) -> ndarray:
        """Return the logits [B, T, V] of source ids [B, S] and target ids [B, T], both padded with ``pad_id``."""
        # Derive the masks from the ids. In a mask, True means that a position may be attended to. Some libraries, such
        # as torch.nn, use the opposite convention. If your model has no `tap` argument, call `tap` yourself for the
        # values that you can read, for example tap("encoder.output", memory).
        source, target = tf.constant(source_ids), tf.constant(target_ids)
        if tap is no_tap:
            return self.compiled(source, target).numpy()  # compiled, as in normal use
        # Taps can't read concrete values in a compiled function, so the model runs eagerly when taps are on.
        watched = self.model(source, target, tap=lambda name, value: tf.constant(tap(name, value.numpy())))
        return watched.numpy()

    def export_weights(self) -> Mapping[str, ndarray]:
        """Return every parameter by its canonical name, in the model's dtype, as a copy."""
        return {name: variable.numpy() for name, variable in self.parameters.items()}

    def gradients(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> Gradients:
        """Return the loss for labels [B, T] and its gradient with respect to each parameter."""
        seen: Tensors = {}  # remove this if you don't report taps
        loss, of_parameters, of_taps = self._differentiate(source_ids, target_ids, labels, seen, tap=seen.setdefault)
        return Gradients(float(loss), _arrays(of_parameters), _arrays(of_taps))

    def _differentiate(
        self, source_ids: ndarray, target_ids: ndarray, labels: ndarray, seen: Tensors, tap: Tap = no_tap
    ) -> tuple[tf.Tensor, Tensors, Tensors]:
        with tf.GradientTape() as tape:
            loss = self._loss(tf.constant(source_ids), tf.constant(target_ids), tf.constant(labels), tap)
        of_parameters, of_taps = tape.gradient(loss, (self.parameters, seen))
        # The gradient of an embedding matrix may be an IndexedSlices object.
        return loss, {name: tf.convert_to_tensor(gradient) for name, gradient in of_parameters.items()}, of_taps

    def _loss(self, source_ids: tf.Tensor, target_ids: tf.Tensor, labels: tf.Tensor, tap: Tap) -> tf.Tensor:
        """Return the label-smoothed cross-entropy per non-padding token."""
        log_probabilities = tf.nn.log_softmax(self.model(source_ids, target_ids, tap=tap, training=False))  # [B, T, V]
        right = tf.gather(log_probabilities, labels, batch_dims=2)
        smoothing = self.config.label_smoothing
        losses = -(1 - smoothing) * right - smoothing * tf.reduce_mean(log_probabilities, -1)
        return tf.reduce_mean(losses[labels != self.config.pad_id])

    def start_training(self, settings: TrainingConfig) -> None:
        """Create an Adam optimizer."""
        # settings.clip_norm is the maximum norm of the full gradient, or None. settings.accumulation_steps is the
        # number of micro-batches. You may ignore it, because the step must match a step on the full batch.
        # Don't use keras.optimizers.Adam. It computes the bias correction in float32, which causes a visible error
        # after 20 steps in float64.
        self.settings, self.step = settings, 0
        self.first = {name: tf.zeros_like(variable) for name, variable in self.parameters.items()}
        self.second = {name: tf.zeros_like(variable) for name, variable in self.parameters.items()}

    def train_step(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> float:
        """Take one training step without dropout, and return the loss before the update."""
        self.step += 1  # the schedule starts at step 1
        settings, step = self.settings, self.step
        loss, gradients, _ = self._differentiate(source_ids, target_ids, labels, {})
        if settings.clip_norm is not None:
            clipped, _ = tf.clip_by_global_norm([*gradients.values()], settings.clip_norm)
            gradients = dict(zip(gradients, clipped, strict=True))
        rate = settings.learning_rate(step, self.config.d_model)
        for name, gradient in gradients.items():
            self.first[name] += (1 - settings.beta1) * (gradient - self.first[name])
            self.second[name] += (1 - settings.beta2) * (gradient**2 - self.second[name])
            first = self.first[name] / (1 - settings.beta1**step)
            second = self.second[name] / (1 - settings.beta2**step)
            self.parameters[name].assign_sub(rate * first / (tf.sqrt(second) + settings.epsilon))
        return float(loss)

    # `parity check-distributed` compares training on multiple devices. It starts the processes the way torchrun does.
    # Each process then trains on its own rows of every batch and returns the loss, the gradient, and the weights of
    # the full run. To support it, define:
    #
    #     one_process = True  # one process controls all devices
    #
    #     def distribute(self, plan):
    #         self.strategy = tf.distribute.MirroredStrategy()  # then build the model inside its scope
    #
    #     def parameters_per_device(self):
    #         copies = [self.strategy.experimental_local_results(one) for one in self.parameters.values()]
    #         return [sum(int(tf.size(one)) for one in of_device) for of_device in zip(*copies)]

    def generate(self, source_ids: ndarray, max_length: int, beam_size: int, length_penalty: float) -> ndarray:
        """Return the best hypothesis [B, <= max_length] for each sequence, padded and without the BOS token."""
        # A hypothesis includes its ``eos_id``, and every later token is padding. Never generate the padding token.
        if beam_size == 1:
            return transformer_tf.greedy_search(self.model, source_ids, max_length).ids
        return transformer_tf.beam_search(self.model, source_ids, beam_size, length_penalty, max_length).ids


def _arrays(tensors: Tensors) -> dict[str, ndarray]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}
