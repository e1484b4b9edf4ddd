"""What is trained on several devices and on one: batches that no plan divides evenly, and settings that clip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy import ndarray

from transformer_spec.config import DropoutRates, TransformerConfig
from transformer_spec.init_weights import init_weights
from transformer_spec.parallel_plan import Plan
from transformer_spec.training_config import TrainingConfig

DISTRIBUTED = "distributed"  # the stage of these cases, as reports show it
Batch = tuple[ndarray, ndarray, ndarray]  # source_ids, target_ids, labels
LENGTHS = (7, 7, 7, 6, 2, 1, 1, 0)  # of the targets: with two shares, one has most tokens; the last row has none
ON_ONE_SHARE = (7, 0, 0, 0, 5, 0, 0, 0)  # likewise: of two slices, however their rows are divided among shares
SOURCE_LENGTH = 9


@dataclass(frozen=True)
class Probe:
    """A training run: model, settings, and what its first step and all others must give.

    Attributes:
        name: Of the case, as reports show it.
        config: The model; 4 heads and 48 units fall into 2 and into 4 parts.
        settings: Of training; the gradient is always clipped.
        steps: How many are taken.
        seed: Of the dropout.
        dropout: ``global`` or ``local``.
        dtype: Of weights and moments.
        lengths: Of the targets.
        has_empty_rows: Whether a row without labels is padding only. Else it has a source, and the start symbol.
    """

    name: str
    config: TransformerConfig
    settings: TrainingConfig
    steps: int = 20
    seed: int = 3
    dropout: str = "global"
    dtype: str = "float64"
    lengths: Sequence[int] = LENGTHS
    has_empty_rows: bool = True

    @property
    def halfway(self) -> int:
        """How many steps are half of them: from there, a run also goes on elsewhere."""
        return self.steps // 2

    @property
    def exact(self) -> Probe:
        """The same run without rounding: what it is compared with."""
        return replace(self, dtype="float64", settings=replace(self.settings, mixed_bfloat16=False))

    def weights(self) -> dict[str, ndarray]:
        """Return the weights that every process starts with, as float32 holds them: no bias is zero, no scale one."""
        rng = np.random.default_rng(5)
        drawn = {name: array.astype(np.float64) for name, array in init_weights(self.config, 5).items()}
        moved = {
            name: array + 0.1 * rng.normal(size=array.shape) if name.endswith(("bias", "scale")) else array
            for name, array in drawn.items()
        }
        return {name: array.astype(np.float32).astype(self.dtype) for name, array in moved.items()}

    def batch(self, step: int) -> Batch:
        """Return the global batch of a step: other tokens in each, of the same lengths."""
        rng, pad_id, lengths = np.random.default_rng([17, step]), self.config.pad_id, np.array(self.lengths)
        source = rng.integers(3, self.config.source_vocab_size, (len(lengths), SOURCE_LENGTH))
        source[:, 5:] = np.where(np.arange(4) < np.array([[4, 3, 0, 2, 1, 4, 0, 0]]).T, source[:, 5:], pad_id)
        said = rng.integers(3, self.config.target_vocab_size, (len(lengths), max(lengths)))
        there = np.arange(max(lengths)) < lengths[:, None]
        labels = np.where(there, said, pad_id)
        labels[np.arange(len(lengths)), np.maximum(lengths - 1, 0)] = np.where(lengths > 0, self.config.eos_id, pad_id)
        started = np.column_stack([np.full(len(lengths), self.config.bos_id), labels[:, :-1]])
        target = np.where(there, started, pad_id)
        if self.has_empty_rows:
            source[lengths == 0] = pad_id
        else:
            target[:, 0] = self.config.bos_id
        return source, target, labels


def config(tokens: int = 40, **fields: Any) -> TransformerConfig:
    """Return the model of a case: the paper's conventions at sizes that fall into 2 and 4 parts, without dropout."""
    sizes = {"d_model": 32, "num_heads": 4, "d_k": 8, "d_v": 8, "d_ff": 48, "max_length": 16}
    layers = {"num_encoder_layers": 2, "num_decoder_layers": 2}
    dropout = {"embedding": 0.0, "residual": 0.0}
    vocabulary = {"source_vocab_size": tokens, "target_vocab_size": tokens}
    return TransformerConfig.preset("paper_base", **{**sizes, **layers, **vocabulary, "dropout": dropout, **fields})


@cache
def probes() -> dict[str, Probe]:
    """Return the cases in float64 by name: one for each thing that a plan may break."""
    settings: dict[str, Any] = {"clip_norm": 0.5, "warmup_steps": 10, "learning_rate_factor": 0.1}
    sliced: dict[str, Any] = {"accumulation_steps": 2, "activation_checkpointing": True}
    shallow = config(num_encoder_layers=1, num_decoder_layers=1)  # compiled in half the time
    drops = {"embedding": 0.1, "residual": 0.1, "attention": 0.1, "feed_forward": 0.1}
    found = (
        Probe("plain", config(), TrainingConfig(**settings)),
        Probe("short", config(), TrainingConfig(**settings), steps=4),
        Probe(
            "uneven",
            config(37, tie_embeddings="none"),
            TrainingConfig(**settings, **sliced),
            steps=4,
            lengths=ON_ONE_SHARE,
        ),
        Probe("vocabulary of 37", config(37), TrainingConfig(**settings)),
        Probe("untied", config(tie_embeddings="none"), TrainingConfig(**settings), steps=4),
        Probe("accumulated", config(), TrainingConfig(**settings, accumulation_steps=2), steps=4),
        Probe("checkpointing", config(), TrainingConfig(**settings, activation_checkpointing=True), steps=4),
        Probe("dropout", config(dropout=drops), TrainingConfig(**settings, **sliced), steps=4),
        Probe("shallow", shallow, TrainingConfig(**settings), steps=2),
        Probe("shallow dropout", shallow.replace(dropout=DropoutRates(**drops)), TrainingConfig(**settings), steps=2),
    )
    return {probe.name: probe for probe in found}


@cache
def rounded() -> dict[str, Probe]:
    """Return the cases below float64 by name."""
    changes: dict[str, Any] = {"accumulation_steps": 2, "activation_checkpointing": True}
    whole = replace(probes()["short"], name="float32", dtype="float32")
    float32 = replace(whole, settings=replace(whole.settings, **changes))
    mixed = replace(float32, name="mixed bfloat16", settings=replace(float32.settings, mixed_bfloat16=True))
    return {probe.name: probe for probe in (float32, mixed)}


@cache
def port_probes() -> tuple[Probe, ...]:
    """Return the cases of a port of the user's own, without its config: no sentence is padding only."""
    settings = probes()["plain"].settings
    sliced = replace(settings, accumulation_steps=2)
    return (
        Probe("plain", config(), settings, has_empty_rows=False),
        Probe("uneven", config(), sliced, steps=4, lengths=ON_ONE_SHARE, has_empty_rows=False),
    )


# The cases of a check: each thing once, and little to compile.
STAGE = ("plain", "uneven", "dropout", "float32", "mixed bfloat16")
NOT_OFFERED = {"numpy": ("mixed bfloat16",)}
PLANS = tuple(map(Plan.parse, ("data=2", "data=3", "data=4", "fsdp=2", "tensor=2", "data=2,fsdp=2,tensor=2")))
