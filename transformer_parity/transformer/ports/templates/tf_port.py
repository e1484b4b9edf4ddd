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
        self.config = config
        self.model = transformer_tf.Transformer(config, dtype=dtype)  # Keras defaults to float32
        # A dict from canonical names to the model's parameters. All methods use this dict. To list the names, run
        # `parity info --names`. The placeholder's parameters already have the canonical names. For your model, write
        # {"encoder.layers.0.feed_forward.inner_proj.kernel": model.blocks[0].fc1.kernel, ...}. List a tied embedding
        # matrix only once.
        self.parameters = parameters(self.model)
        for name, variable in self.parameters.items():
            variable.assign(weights[name])  # kernels are [in, out], as in keras.layers.Dense
        self.compiled = tf.function(lambda source, target: self.model(source, target, training=False))

    def forward(self, source_ids: ndarray, target_ids: ndarray, tap: Tap) -> ndarray:
        """Return the logits [B, T, V] for source IDs [B, S] and target IDs [B, T], both padded with ``pad_id``."""
        # If your model takes masks as arguments, compute the masks from the IDs. In the placeholder's masks, True means
        # that a position may be attended to. Some libraries, such as torch.nn, use the opposite convention.
        # If your model doesn't take a `tap` argument, call `tap` here for all intermediate values that you can access,
        # for example tap("encoder.output", memory).
        source, target = tf.constant(source_ids), tf.constant(target_ids)
        if tap is no_tap:
            return self.compiled(source, target).numpy()  # run the compiled model, as in normal use
        # In a compiled function, a tap would receive symbolic tensors without values, so run the model eagerly.
        watched = self.model(source, target, tap=lambda name, value: tf.constant(tap(name, value.numpy())))
        return watched.numpy()

    def export_weights(self) -> Mapping[str, ndarray]:
        """Return a dict from canonical names to copies of all parameters, in the model's dtype."""
        return {name: variable.numpy() for name, variable in self.parameters.items()}

    def gradients(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> Gradients:
        """Return the loss for labels [B, T], and the gradient of the loss with respect to each parameter."""
        seen: Tensors = {}  # if you don't report taps, remove `seen` everywhere
        loss, of_parameters, of_taps = self._differentiate(source_ids, target_ids, labels, seen, tap=seen.setdefault)
        return Gradients(float(loss), _arrays(of_parameters), _arrays(of_taps))

    def _differentiate(
        self, source_ids: ndarray, target_ids: ndarray, labels: ndarray, seen: Tensors, tap: Tap = no_tap
    ) -> tuple[tf.Tensor, Tensors, Tensors]:
        with tf.GradientTape() as tape:
            loss = self._loss(tf.constant(source_ids), tf.constant(target_ids), tf.constant(labels), tap)
        of_parameters, of_taps = tape.gradient(loss, (self.parameters, seen))
        # The gradient of an embedding matrix may be an IndexedSlices object, which must be converted to a tensor.
        return loss, {name: tf.convert_to_tensor(gradient) for name, gradient in of_parameters.items()}, of_taps

    def _loss(self, source_ids: tf.Tensor, target_ids: tf.Tensor, labels: tf.Tensor, tap: Tap) -> tf.Tensor:
        """Return the label-smoothed cross-entropy, averaged over the non-padding labels."""
        log_probabilities = tf.nn.log_softmax(self.model(source_ids, target_ids, tap=tap, training=False))  # [B, T, V]
        right = tf.gather(log_probabilities, labels, batch_dims=2)
        smoothing = self.config.label_smoothing
        losses = -(1 - smoothing) * right - smoothing * tf.reduce_mean(log_probabilities, -1)
        return tf.reduce_mean(losses[labels != self.config.pad_id])

    def start_training(self, settings: TrainingConfig) -> None:
        """Create an Adam optimizer."""
        # settings.clip_norm is the maximum norm of the gradient of all parameters; None disables clipping.
        # settings.accumulation_steps is the number of micro-batches. You may ignore accumulation_steps and process the
        # batch all at once, because the results must be the same.
        # Don't use keras.optimizers.Adam. Even in float64, it computes the bias correction in float32, which causes a
        # visible error after 20 steps.
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

    # `parity check-distributed` trains your model on multiple devices and compares the results with the reference's
    # results. It starts processes with the same environment variables as torchrun. Every process receives the full
    # batch, trains on its shard of the rows, and returns the results of the full batch: the loss, the gradient, and the
    # unsharded weights. To support this check, define:
    #
    #     one_process = True  # one process controls all devices
    #
    #     def distribute(self, plan):
    #         self.strategy = tf.distribute.MirroredStrategy()  # then build the model in self.strategy.scope()
    #
    #     def parameters_per_device(self):
    #         copies = [self.strategy.experimental_local_results(one) for one in self.parameters.values()]
    #         return [sum(int(tf.size(one)) for one in of_device) for of_device in zip(*copies)]

    def generate(self, source_ids: ndarray, max_length: int, beam_size: int, length_penalty: float) -> ndarray:
        """Return the best hypothesis [B, <= max_length] for each sequence, padded and without the BOS token."""
        # A hypothesis ends with ``eos_id`` or after ``max_length`` tokens. Pad shorter hypotheses with ``pad_id``. The
        # search itself must never choose the padding token.
        if beam_size == 1:
            return transformer_tf.greedy_search(self.model, source_ids, max_length).ids
        return transformer_tf.beam_search(self.model, source_ids, beam_size, length_penalty, max_length).ids


def _arrays(tensors: Tensors) -> dict[str, ndarray]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}
