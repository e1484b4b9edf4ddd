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

from numpy import ndarray

import reference_numpy  # placeholder for your model
from reference_numpy import TransformerConfig
from transformer_parity.plugin import Gradients, Port, Tap, TrainingConfig


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
        # `weights` maps canonical names to float32 arrays. Kernels have the shape [in, out], so if your layers store
        # [out, in], load weights["....kernel"].T. A tied embedding matrix has only one entry. You may keep or modify
        # the arrays, because they are copies.
        self.config = config
        self.model = reference_numpy.Transformer.from_weights(config, weights, dtype)

    def forward(self, source_ids: ndarray, target_ids: ndarray, tap: Tap) -> ndarray:
        """Return the logits [B, T, V] for source IDs [B, S] and target IDs [B, T], both padded with ``pad_id``."""
        # If your model takes masks as arguments, compute the masks from the IDs. In the placeholder's masks, True means
        # that a position may be attended to. Some libraries, such as torch.nn, use the opposite convention.
        # If your model doesn't take a `tap` argument, call `tap` here for all intermediate values that you can access,
        # for example tap("encoder.output", memory). A tap requires a NumPy array, so convert your framework's arrays
        # using np.array(value).
        return self.model(source_ids, target_ids, tap=tap)

    def export_weights(self) -> Mapping[str, ndarray]:
        """Return a dict from canonical names to copies of all parameters, in the model's dtype."""
        return self.model.export_weights()

    def gradients(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> Gradients:
        """Return the loss for labels [B, T], and the gradient of the loss with respect to each parameter."""
        # The loss is the label-smoothed cross-entropy, averaged over the non-padding labels. If you also compute
        # gradients at taps, return Gradients(loss, parameters, taps), with the taps in the order of computation.
        return reference_numpy.gradients(self.model, source_ids, target_ids, labels)

    def start_training(self, settings: TrainingConfig) -> None:
        """Create an Adam optimizer."""
        # Add epsilon to the square root of the bias-corrected second moment, as in Algorithm 1 of Kingma and Ba. The
        # learning rate of step n is settings.learning_rate(n, self.config.d_model), where n is 1 for the first step.
        # settings.clip_norm is the maximum norm of the gradient of all parameters; None disables clipping.
        # settings.accumulation_steps is the number of micro-batches. You may ignore accumulation_steps and process the
        # batch all at once, because the results must be the same.
        self.trainer = reference_numpy.Trainer(self.model, settings)

    def train_step(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> float:
        """Take one training step without dropout, and return the loss before the update."""
        return float(self.trainer.train_step(source_ids, target_ids, labels).loss)

    # `parity check-distributed` trains your model on multiple devices and compares the results with the reference's
    # results. It starts processes with the same environment variables as torchrun. Every process receives the full
    # batch, trains on its shard of the rows, and returns the results of the full batch: the loss, the gradient, and the
    # unsharded weights. To support this check, define:
    #
    #     one_process = False  # True if one process controls all devices
    #
    #     def distribute(self, plan):
    #         ...
    #
    #     def parameters_per_device(self):  # required only if parameters are sharded, or if one_process is True
    #         ...

    def generate(self, source_ids: ndarray, max_length: int, beam_size: int, length_penalty: float) -> ndarray:
        """Return the best hypothesis [B, <= max_length] for each sequence, padded and without the BOS token."""
        # A hypothesis ends with ``eos_id`` or after ``max_length`` tokens. Pad shorter hypotheses with ``pad_id``. The
        # search itself must never choose the padding token.
        if beam_size == 1:
            return reference_numpy.greedy_search(self.model, source_ids, max_length).ids
        return reference_numpy.beam_search(self.model, source_ids, beam_size, length_penalty, max_length).ids
