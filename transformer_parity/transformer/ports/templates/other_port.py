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

from numpy import ndarray

import reference_numpy  # placeholder for your model
from reference_numpy import TransformerConfig
from transformer_parity.plugin import Gradients, Port, Tap, TrainingConfig


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
        # Kernels are [in, out]. If your layer stores [out, in], load weights["....kernel"].T. A tied embedding matrix
        # has only one name. You may keep or modify the arrays, because the reference has its own copy.
        self.config = config
        self.model = reference_numpy.Transformer.from_weights(config, weights, dtype)

    def forward(self, source_ids: ndarray, target_ids: ndarray, tap: Tap) -> ndarray:
        """Return the logits [B, T, V] of source ids [B, S] and target ids [B, T], both padded with ``pad_id``."""
        # Derive the masks from the ids. In a mask, True means that a position may be attended to. Some libraries, such
        # as torch.nn, use the opposite convention. If your model has no `tap` argument, call `tap` yourself for the
        # values that you can read, for example tap("encoder.output", memory).
        # Convert your framework's values to NumPy using np.array(value), because a tap requires a copy.
        return self.model(source_ids, target_ids, tap=tap)

    def export_weights(self) -> Mapping[str, ndarray]:
        """Return every parameter by its canonical name, in the model's dtype, as a copy."""
        return self.model.export_weights()

    def gradients(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> Gradients:
        """Return the loss for labels [B, T] and its gradient with respect to each parameter."""
        # The loss is the label-smoothed cross-entropy, averaged over the non-padding labels. To report
        # gradients at taps as well, return Gradients(loss, parameters, taps), with taps in the order of computation.
        return reference_numpy.gradients(self.model, source_ids, target_ids, labels)

    def start_training(self, settings: TrainingConfig) -> None:
        """Create an Adam optimizer."""
        # Add epsilon to the square root of the bias-corrected second moment, as in Algorithm 1 of Kingma and Ba. The
        # learning rate of step n is settings.learning_rate(n, self.config.d_model), and the first step is 1.
        # settings.clip_norm is the maximum norm of the full gradient, or None. settings.accumulation_steps is the
        # number of micro-batches. You may ignore it, because the step must match a step on the full batch.
        self.trainer = reference_numpy.Trainer(self.model, settings)

    def train_step(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> float:
        """Take one training step without dropout, and return the loss before the update."""
        return float(self.trainer.train_step(source_ids, target_ids, labels).loss)

    # `parity check-distributed` compares training on multiple devices. It starts the processes the way torchrun does.
    # Each process then trains on its own rows of every batch and returns the loss, the gradient, and the weights of
    # the full run. To support it, define:
    #
    #     one_process = False  # True if one process controls all devices
    #
    #     def distribute(self, plan):
    #         ...
    #
    #     def parameters_per_device(self):  # only if a plan shards parameters or one process controls all devices
    #         ...

    def generate(self, source_ids: ndarray, max_length: int, beam_size: int, length_penalty: float) -> ndarray:
        """Return the best hypothesis [B, <= max_length] for each sequence, padded and without the BOS token."""
        # A hypothesis includes its ``eos_id``, and every later token is padding. Never generate the padding token.
        if beam_size == 1:
            return reference_numpy.greedy_search(self.model, source_ids, max_length).ids
        return reference_numpy.beam_search(self.model, source_ids, beam_size, length_penalty, max_length).ids
