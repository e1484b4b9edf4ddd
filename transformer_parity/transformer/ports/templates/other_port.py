"""My port, as `parity` sees it. It agrees as it stands: replace the stand-in by your own model, method by method.

    parity check --port my_port:MyPort
    pytest --parity-port=my_port:MyPort

NumPy arrays go in and come out. B batch, S source length, T target length, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy import ndarray

import reference_numpy  # the stand-in
from reference_numpy import TransformerConfig
from transformer_parity.plugin import Gradients, Port, Tap, TrainingConfig


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
        # A kernel is [in, out]: a layer that keeps [out, in] takes weights["....kernel"].T. A tied table has one
        # name. The arrays are yours; the reference has its own.
        self.config = config
        self.model = reference_numpy.Transformer.from_weights(config, weights, dtype)

    def forward(self, source_ids: ndarray, target_ids: ndarray, tap: Tap) -> ndarray:
        """Return the logits [B, T, V] of source ids [B, S] and target ids [B, T], both padded with ``pad_id``."""
        # Derive the masks from the ids. Here True means that a position may be attended to; torch.nn and others mean
        # the opposite. With other names or none in your model, show what you have: tap("encoder.output", memory).
        # Whatever your model is written in, arrays are NumPy's here: np.array(value) copies, as a tap must.
        return self.model(source_ids, target_ids, tap=tap)

    def export_weights(self) -> Mapping[str, ndarray]:
        """Return every parameter by its canonical name, in the model's dtype, as a copy."""
        return self.model.export_weights()

    def gradients(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> Gradients:
        """Return the loss and its gradient at each parameter, of labels [B, T]."""
        # The loss is the label-smoothed cross-entropy, averaged over the labels that are not ``pad_id``. Gradients at
        # taps are optional: Gradients(loss, parameters, taps), in the order in which the taps fire.
        return reference_numpy.gradients(self.model, source_ids, target_ids, labels)

    def start_training(self, settings: TrainingConfig) -> None:
        """Make an Adam optimizer."""
        # Epsilon is added to the root of the corrected second moment, as in Kingma and Ba's Algorithm 1. The rate of
        # step n, counted from 1, is settings.learning_rate(n, self.config.d_model).
        # settings.clip_norm is the largest norm of the whole gradient, or None. settings.accumulation_steps is in how
        # many slices a batch may be computed; the step is that of the whole batch.
        self.trainer = reference_numpy.Trainer(self.model, settings)

    def train_step(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> float:
        """Take one step, still without dropout, and return the loss before it."""
        return float(self.trainer.train_step(source_ids, target_ids, labels).loss)

    # `parity check-distributed` compares training on several devices, in processes that it starts like torchrun.
    # Then each process reads only its rows of every batch, and returns loss, gradient and weights of all. It needs:
    #
    #     one_process = False  # whether one process has all devices
    #
    #     def distribute(self, plan):
    #         ...
    #
    #     def parameters_per_device(self):  # if a plan divides parameters, or if one process has all devices
    #         ...

    def generate(self, source_ids: ndarray, max_length: int, beam_size: int, length_penalty: float) -> ndarray:
        """Return the best hypothesis of each sentence [B, <= max_length], without the start symbol, padded."""
        # After ``eos_id``, which belongs to the hypothesis, come pads only. The padding symbol is never chosen.
        if beam_size == 1:
            return reference_numpy.greedy_search(self.model, source_ids, max_length).ids
        return reference_numpy.beam_search(self.model, source_ids, beam_size, length_penalty, max_length).ids
