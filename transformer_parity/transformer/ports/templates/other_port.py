"""A port of my model for `parity`. It wraps reference_numpy, so it agrees with the reference.

Replace reference_numpy with your own model, one method at a time, and rerun the check after each change:

    parity check --port my_port:MyPort
    pytest --parity-port=my_port:MyPort

All methods take and return NumPy arrays. In shapes, B is the batch size, S the source length, T the target length,
and V the size of the target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy import ndarray

import reference_numpy  # replace with your own model
from reference_numpy import TransformerConfig
from transformer_parity.plugin import Gradients, Port, Tap, TrainingConfig


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
        # Kernels are [in, out]. If a layer of your model stores [out, in], assign weights["....kernel"].T. A tied
        # matrix has only one name. You may keep and modify these arrays, because they are copies.
        self.config = config
        self.model = reference_numpy.Transformer.from_weights(config, weights, dtype)

    def forward(self, source_ids: ndarray, target_ids: ndarray, tap: Tap) -> ndarray:
        """Return the logits [B, T, V] for source IDs [B, S] and target IDs [B, T], both padded with ``pad_id``."""
        # Derive the masks from the IDs. In this repository, True means that a position may be attended to. In
        # torch.nn.Transformer and some other libraries, True means the opposite. If your model has no taps, report
        # the values that you have: memory = tap("encoder.output", memory).
        # Convert every value to a NumPy array before you pass it to tap, for example with np.array(value).
        return self.model(source_ids, target_ids, tap=tap)

    def export_weights(self) -> Mapping[str, ndarray]:
        """Return a copy of every parameter in the model's dtype, by canonical name."""
        return self.model.export_weights()

    def gradients(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> Gradients:
        """Return the loss for labels [B, T] and its gradient with respect to each parameter."""
        # The loss is the label-smoothed cross-entropy, averaged over the labels that are not ``pad_id``. To report the
        # gradients at taps too, return Gradients(loss, parameters, taps), in the order in which forward calls the taps.
        return reference_numpy.gradients(self.model, source_ids, target_ids, labels)

    def start_training(self, settings: TrainingConfig) -> None:
        """Create an Adam optimizer."""
        # Add epsilon to the square root of the bias-corrected second moment, as in Algorithm 1 of Kingma and Ba. The
        # first step is step 1. The learning rate of step n is settings.learning_rate(n, self.config.d_model).
        # settings.clip_norm is the maximum norm of the full gradient, or None. settings.accumulation_steps is the
        # number of micro-batches. You may ignore it, because the update must be the one for the full batch.
        self.trainer = reference_numpy.Trainer(self.model, settings)

    def train_step(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> float:
        """Take one step without dropout, and return the loss before the update."""
        return float(self.trainer.train_step(source_ids, target_ids, labels).loss)

    # `parity check-distributed` compares training on multiple devices. It starts the processes as torchrun does. Each
    # process must read only its own rows of every batch, and must return the loss, gradients, and weights of the full
    # batch. To support the command, add these members:
    #
    #     one_process = False  # whether one process controls all devices
    #
    #     def distribute(self, plan):
    #         ...
    #
    #     def parameters_per_device(self):  # if the plan shards parameters or one process controls all devices
    #         ...

    def generate(self, source_ids: ndarray, max_length: int, beam_size: int, length_penalty: float) -> ndarray:
        """Return the best hypothesis of each sentence [B, <= max_length], without BOS, padded with ``pad_id``."""
        # A hypothesis includes its ``eos_id``. Only padding follows it. The search never chooses the padding token.
        if beam_size == 1:
            return reference_numpy.greedy_search(self.model, source_ids, max_length).ids
        return reference_numpy.beam_search(self.model, source_ids, beam_size, length_penalty, max_length).ids
