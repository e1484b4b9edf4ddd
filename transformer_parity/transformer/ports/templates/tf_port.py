"""My port, as `parity` sees it. It agrees as it stands: replace the stand-in by your own model, method by method.

    parity check --port my_port:MyPort
    pytest --parity-port=my_port:MyPort

NumPy arrays go in and come out. B batch, S source length, T target length, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from numpy import ndarray

import transformer_tf  # the stand-in
from reference_numpy import TransformerConfig
from transformer_parity.plugin import Gradients, Port, Tap, TrainingConfig, no_tap
from transformer_tf.weights import parameters

Tensors = dict[str, tf.Tensor]


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
        self.config = config
        self.model = transformer_tf.Transformer(config, dtype=dtype)  # Keras' dtype is float32 unless it is given
        # One table serves all methods: canonical name -> parameter. The stand-in's attributes have the canonical names;
        # yours may read {"encoder.layers.0.feed_forward.inner_proj.kernel": model.blocks[0].fc1.weight, ...}. A tied
        # table stands in it once.
        self.parameters = parameters(self.model)
        for name, variable in self.parameters.items():
            variable.assign(weights[name])  # a kernel is [in, out] here as in keras.layers.Dense
        self.compiled = tf.function(lambda source, target: self.model(source, target, training=False))

    def forward(self, source_ids: ndarray, target_ids: ndarray, tap: Tap) -> ndarray:
        """Return the logits [B, T, V] of source ids [B, S] and target ids [B, T], both padded with ``pad_id``."""
        # Derive the masks from the ids. Here True means that a position may be attended to; torch.nn and others mean
        # the opposite. With other names or none in your model, show what you have: tap("encoder.output", memory).
        source, target = tf.constant(source_ids), tf.constant(target_ids)
        if tap is no_tap:
            return self.compiled(source, target).numpy()  # as users run it
        # A compiled function has no values to show, so with taps on the model runs eagerly.
        watched = self.model(source, target, tap=lambda name, value: tf.constant(tap(name, value.numpy())))
        return watched.numpy()

    def export_weights(self) -> Mapping[str, ndarray]:
        """Return every parameter by its canonical name, in the model's dtype, as a copy."""
        return {name: variable.numpy() for name, variable in self.parameters.items()}

    def gradients(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> Gradients:
        """Return the loss and its gradient at each parameter, of labels [B, T]."""
        seen: Tensors = {}  # without taps, leave it out
        loss, of_parameters, of_taps = self._differentiate(source_ids, target_ids, labels, seen, tap=seen.setdefault)
        return Gradients(float(loss), _arrays(of_parameters), _arrays(of_taps))

    def _differentiate(
        self, source_ids: ndarray, target_ids: ndarray, labels: ndarray, seen: Tensors, tap: Tap = no_tap
    ) -> tuple[tf.Tensor, Tensors, Tensors]:
        with tf.GradientTape() as tape:
            loss = self._loss(tf.constant(source_ids), tf.constant(target_ids), tf.constant(labels), tap)
        of_parameters, of_taps = tape.gradient(loss, (self.parameters, seen))
        # The gradient of an embedding table may come as IndexedSlices.
        return loss, {name: tf.convert_to_tensor(gradient) for name, gradient in of_parameters.items()}, of_taps

    def _loss(self, source_ids: tf.Tensor, target_ids: tf.Tensor, labels: tf.Tensor, tap: Tap) -> tf.Tensor:
        """Return the label-smoothed cross-entropy per token that is no padding."""
        log_probabilities = tf.nn.log_softmax(self.model(source_ids, target_ids, tap=tap, training=False))  # [B, T, V]
        right = tf.gather(log_probabilities, labels, batch_dims=2)
        smoothing = self.config.label_smoothing
        losses = -(1 - smoothing) * right - smoothing * tf.reduce_mean(log_probabilities, -1)
        return tf.reduce_mean(losses[labels != self.config.pad_id])

    def start_training(self, settings: TrainingConfig) -> None:
        """Make an Adam optimizer."""
        # settings.clip_norm is the largest norm of the whole gradient, or None. settings.accumulation_steps is in how
        # many slices a batch may be computed; the step is that of the whole batch.
        # Not keras.optimizers.Adam: it corrects the moments in float32, which twenty steps in float64 show.
        self.settings, self.step = settings, 0
        self.first = {name: tf.zeros_like(variable) for name, variable in self.parameters.items()}
        self.second = {name: tf.zeros_like(variable) for name, variable in self.parameters.items()}

    def train_step(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> float:
        """Take one step, still without dropout, and return the loss before it."""
        self.step += 1  # the schedule counts from 1
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

    # `parity check-distributed` compares training on several devices, in processes that it starts like torchrun.
    # Then each process reads only its rows of every batch, and returns loss, gradient and weights of all. It needs:
    #
    #     one_process = True  # whether one process has all devices
    #
    #     def distribute(self, plan):
    #         self.strategy = tf.distribute.MirroredStrategy()  # in whose scope the model is made
    #
    #     def parameters_per_device(self):
    #         copies = [self.strategy.experimental_local_results(one) for one in self.parameters.values()]
    #         return [sum(int(tf.size(one)) for one in of_device) for of_device in zip(*copies)]

    def generate(self, source_ids: ndarray, max_length: int, beam_size: int, length_penalty: float) -> ndarray:
        """Return the best hypothesis of each sentence [B, <= max_length], without the start symbol, padded."""
        # After ``eos_id``, which belongs to the hypothesis, come pads only. The padding symbol is never chosen.
        if beam_size == 1:
            return transformer_tf.greedy_search(self.model, source_ids, max_length).ids
        return transformer_tf.beam_search(self.model, source_ids, beam_size, length_penalty, max_length).ids


def _arrays(tensors: Tensors) -> dict[str, ndarray]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}
