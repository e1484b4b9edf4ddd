"""A port of my model for `parity`. It wraps transformer_tf, so it agrees with the reference.

Replace transformer_tf with your own model, one method at a time, and rerun the check after each change:

    parity check --port my_port:MyPort
    pytest --parity-port=my_port:MyPort

All methods take and return NumPy arrays. In shapes, B is the batch size, S the source length, T the target length,
and V the size of the target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from numpy import ndarray

import transformer_tf  # replace with your own model
from reference_numpy import TransformerConfig
from transformer_parity.plugin import Gradients, Port, Tap, TrainingConfig, no_tap
from transformer_tf.weights import parameters

Tensors = dict[str, tf.Tensor]


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
        self.config = config
        self.model = transformer_tf.Transformer(config, dtype=dtype)  # the default dtype of Keras is float32
        # All methods use this mapping from canonical names to parameters. For your model, it may look like this:
        # {"encoder.layers.0.feed_forward.inner_proj.kernel": model.blocks[0].fc1.weight, ...}. A tied matrix has only
        # one name.
        self.parameters = parameters(self.model)
        for name, variable in self.parameters.items():
            variable.assign(weights[name])  # kernels are [in, out], as in keras.layers.Dense
        self.compiled = tf.function(lambda source, target: self.model(source, target, training=False))

    def forward(self, source_ids: ndarray, target_ids: ndarray, tap: Tap) -> ndarray:
        """Return the logits [B, T, V] for source IDs [B, S] and target IDs [B, T], both padded with ``pad_id``."""
        # Derive the masks from the IDs. In this repository, True means that a position may be attended to. In
        # torch.nn.Transformer and some other libraries, True means the opposite. If your model has no taps, report
        # the values that you have: memory = tap("encoder.output", memory).
        source, target = tf.constant(source_ids), tf.constant(target_ids)
        if tap is no_tap:
            return self.compiled(source, target).numpy()  # without taps, run compiled as users do
        # A compiled function can't report concrete values, so the model runs eagerly if taps are used.
        watched = self.model(source, target, tap=lambda name, value: tf.constant(tap(name, value.numpy())))
        return watched.numpy()

    def export_weights(self) -> Mapping[str, ndarray]:
        """Return a copy of every parameter in the model's dtype, by canonical name."""
        return {name: variable.numpy() for name, variable in self.parameters.items()}

    def gradients(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> Gradients:
        """Return the loss for labels [B, T] and its gradient with respect to each parameter."""
        seen: Tensors = {}  # values at the taps; empty if your model has no taps
        loss, of_parameters, of_taps = self._differentiate(source_ids, target_ids, labels, seen, tap=seen.setdefault)
        return Gradients(float(loss), _arrays(of_parameters), _arrays(of_taps))

    def _differentiate(
        self, source_ids: ndarray, target_ids: ndarray, labels: ndarray, seen: Tensors, tap: Tap = no_tap
    ) -> tuple[tf.Tensor, Tensors, Tensors]:
        with tf.GradientTape() as tape:
            loss = self._loss(tf.constant(source_ids), tf.constant(target_ids), tf.constant(labels), tap)
        of_parameters, of_taps = tape.gradient(loss, (self.parameters, seen))
        # The gradient of an embedding matrix can be tf.IndexedSlices.
        return loss, {name: tf.convert_to_tensor(gradient) for name, gradient in of_parameters.items()}, of_taps

    def _loss(self, source_ids: tf.Tensor, target_ids: tf.Tensor, labels: tf.Tensor, tap: Tap) -> tf.Tensor:
        """Return the label-smoothed cross-entropy, averaged over target tokens without padding."""
        log_probabilities = tf.nn.log_softmax(self.model(source_ids, target_ids, tap=tap, training=False))  # [B, T, V]
        right = tf.gather(log_probabilities, labels, batch_dims=2)
        smoothing = self.config.label_smoothing
        losses = -(1 - smoothing) * right - smoothing * tf.reduce_mean(log_probabilities, -1)
        return tf.reduce_mean(losses[labels != self.config.pad_id])

    def start_training(self, settings: TrainingConfig) -> None:
        """Create an Adam optimizer."""
        # settings.clip_norm is the maximum norm of the full gradient, or None. settings.accumulation_steps is the
        # number of micro-batches. You may ignore it, because the update must be the one for the full batch.
        # Don't use keras.optimizers.Adam here. It corrects the moments in float32, which is not accurate enough for
        # twenty steps in float64.
        self.settings, self.step = settings, 0
        self.first = {name: tf.zeros_like(variable) for name, variable in self.parameters.items()}
        self.second = {name: tf.zeros_like(variable) for name, variable in self.parameters.items()}

    def train_step(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> float:
        """Take one step without dropout, and return the loss before the update."""
        self.step += 1  # the first step of the schedule is step 1
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

    # `parity check-distributed` compares training on multiple devices. It starts the processes as torchrun does. Each
    # process must read only its own rows of every batch, and must return the loss, gradients, and weights of the full
    # batch. To support the command, add these members:
    #
    #     one_process = True  # whether one process controls all devices
    #
    #     def distribute(self, plan):
    #         self.strategy = tf.distribute.MirroredStrategy()  # build the model in its scope
    #
    #     def parameters_per_device(self):
    #         copies = [self.strategy.experimental_local_results(one) for one in self.parameters.values()]
    #         return [sum(int(tf.size(one)) for one in of_device) for of_device in zip(*copies)]

    def generate(self, source_ids: ndarray, max_length: int, beam_size: int, length_penalty: float) -> ndarray:
        """Return the best hypothesis of each sentence [B, <= max_length], without BOS, padded with ``pad_id``."""
        # A hypothesis includes its ``eos_id``. Only padding follows it. The search never chooses the padding token.
        if beam_size == 1:
            return transformer_tf.greedy_search(self.model, source_ids, max_length).ids
        return transformer_tf.beam_search(self.model, source_ids, beam_size, length_penalty, max_length).ids


def _arrays(tensors: Tensors) -> dict[str, ndarray]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}
