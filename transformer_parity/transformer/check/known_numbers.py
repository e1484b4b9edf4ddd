"""A test that checks that the correct reference is imported and that it computes the values stored in this file.

``PYTHONPATH`` or an old clone in the current directory can shadow ``reference_numpy`` with a different version. If
someone introduced a bug into the installed reference, every port with the same bug would agree with the reference.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable

import numpy as np
from numpy import ndarray

from transformer_parity.engine.processes.provenance import other_reference
from transformer_parity.engine.system.errors import UsageError
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.ports.registry import DEFINITION
from transformer_spec.config import TransformerConfig
from transformer_spec.names import parameter_shapes
from transformer_spec.search import Search
from transformer_spec.training_config import TrainingConfig

CONFIG = TransformerConfig(
    source_vocab_size=11,
    target_vocab_size=11,
    d_model=4,
    num_heads=2,
    d_k=2,
    d_v=3,
    d_ff=6,
    num_encoder_layers=1,
    num_decoder_layers=1,
    max_length=8,
)
KNOWN = {
    "logits": (181.94280911449314, 3039.917146688616),
    "loss": (2.727220077165264,),
    "gradients": (56.780199084573546, -70.53907849623639),
    "greedy search": (66.1705147312971, 6.03356584185417),
    "beam search": (12.380937871064447, -11.33330673570657),
    "optimizer step": (343.227418286648, -283.89645422657406),
}
TOLERANCE = 1e-10  # maximum relative error; it is not 0, because libraries on different machines round differently


def check_reference() -> None:
    """Check where the reference was imported from and which values it computes.

    Raises:
        UsageError: If Python would import a reference that doesn't belong to this package, or if the reference doesn't
            compute the values in ``KNOWN``.
    """
    if why := other_reference([os.getcwd()]):
        raise UsageError(why)
    if wrong := [name for name, numbers in computed().items() if not _are_close(numbers, KNOWN[name])]:
        raise UsageError(
            f"the reference has been modified: {', '.join(wrong)} of a small model must equal the values in {__file__}"
        )


def computed() -> dict[str, tuple[float, ...]]:
    """Return the values that the reference computes for a small model.

    Each group of arrays is represented by two sums. The second sum depends on the order of the elements.
    """
    source = np.array([[3, 4, 5, 6, 2], [7, 8, 2, 0, 0]])
    target = np.array([[1, 9, 3, 10], [1, 5, 0, 0]])
    labels = np.array([[9, 3, 10, 2], [5, 2, 0, 0]])
    batch = {"source_ids": source, "target_ids": target, "labels": labels}
    model = DEFINITION.load(CONFIG, _weights(), Placement("float64"))
    logits = model.run("", {"source_ids": source, "target_ids": target}, taps=False).output
    found = model.gradients(batch)
    greedy = model.search(source, Search(max_length=6))
    beam = model.search(source, Search(beam_size=3, max_length=6))
    model.trainer(TrainingConfig(warmup_steps=4, clip_norm=0.5, epsilon=1e-3)).train_step(**batch)
    return {
        "logits": _sums([logits]),
        "loss": (found.loss,),
        "gradients": _sums(found.parameters.values()),
        "greedy search": _sums([greedy.ids, greedy.scores]),
        "beam search": _sums([beam.ids, beam.scores]),
        "optimizer step": _sums(model.export().values()),
    }


def _weights() -> dict[str, ndarray]:
    """Return weights that are exactly representable in float32."""
    weights = {}
    for i, (name, shape) in enumerate(parameter_shapes(CONFIG).items()):
        numbers = (17 * np.arange(math.prod(shape)) + 11 * i) % 101
        weights[name] = ((numbers - 50) / 32).astype(np.float32).reshape(shape)
    return weights


def _sums(arrays: Iterable[ndarray]) -> tuple[float, float]:
    flat = np.concatenate([np.asarray(array, np.float64).ravel() for array in arrays])
    return float(np.abs(flat).sum()), float((flat * (np.arange(len(flat)) % 97 + 1)).sum())


def _are_close(numbers: Iterable[float], known: Iterable[float]) -> bool:
    return all(math.isclose(a, b, rel_tol=TOLERANCE) for a, b in zip(numbers, known, strict=True))
