"""Test cases for training on multiple devices. Shards contain different numbers of tokens. Gradients are clipped."""

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

DISTRIBUTED = "distributed"  # name of the stage in reports
Batch = tuple[ndarray, ndarray, ndarray]  # source_ids, target_ids, labels
LENGTHS = (7, 7, 7, 6, 2, 1, 1, 0)  # target lengths; with two shards, the first shard has most of the tokens
ON_ONE_SHARD = (7, 0, 0, 0, 5, 0, 0, 0)  # target lengths; in each micro-batch, all tokens are in the same shard
SOURCE_LENGTH = 9


@dataclass(frozen=True)
class Probe:
    """A training run that serves as a test case.

    Attributes:
        name: Name of the case in reports.
        config: Config of the model. The numbers of heads (4) and hidden units (48) are divisible by 2 and 4.
        settings: Training settings. The gradient is always clipped.
        steps: Number of steps.
        seed: Seed for dropout.
        dropout: Dropout mode of the trainer: ``global`` or ``local``.
        dtype: Dtype of the weights and moments.
        lengths: Length of each target in tokens; 0 for rows without labels.
        has_empty_rows: True if rows without labels consist only of padding. Otherwise, these rows contain source tokens
            and the BOS token.
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
        """Half the number of steps. After this step, a different framework resumes the run."""
        return self.steps // 2

    @property
    def exact(self) -> Probe:
        """The same run in float64. Its results are the expected results."""
        return replace(self, dtype="float64", settings=replace(self.settings, mixed_bfloat16=False))

    def weights(self) -> dict[str, ndarray]:
        """Return the initial weights, rounded to float32. Biases are not 0, and scales are not 1."""
        rng = np.random.default_rng(5)
        drawn = {name: array.astype(np.float64) for name, array in init_weights(self.config, 5).items()}
        moved = {
            name: array + 0.1 * rng.normal(size=array.shape) if name.endswith(("bias", "scale")) else array
            for name, array in drawn.items()
        }
        return {name: array.astype(np.float32).astype(self.dtype) for name, array in moved.items()}

    def batch(self, step: int) -> Batch:
        """Return the global batch for a step. All batches have the same sequence lengths but different tokens."""
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


def config(tokens: int = 40, preset: str = "paper_base", **fields: Any) -> TransformerConfig:
    """Return the config of a case, with the conventions of a preset, sizes divisible by 2 and 4, and no dropout."""
    sizes = {"d_model": 32, "num_heads": 4, "d_k": 8, "d_v": 8, "d_ff": 48, "max_length": 16}
    layers = {"num_encoder_layers": 2, "num_decoder_layers": 2}
    dropout = {"embedding": 0.0, "residual": 0.0}
    vocabulary = {"source_vocab_size": tokens, "target_vocab_size": tokens}
    return TransformerConfig.preset(preset, **{**sizes, **layers, **vocabulary, "dropout": dropout, **fields})


@cache
def probes() -> dict[str, Probe]:
    """Return a dict from names to float64 cases. Each case uses a feature that may not work in distributed training."""
    settings: dict[str, Any] = {"clip_norm": 0.5, "warmup_steps": 10, "learning_rate_factor": 0.1}
    sliced: dict[str, Any] = {"accumulation_steps": 2, "activation_checkpointing": True}
    shallow = config(num_encoder_layers=1, num_decoder_layers=1)  # fewer layers, which halves the compile time
    relative = {"relative_buckets": 8, "relative_max_distance": 12, "num_encoder_layers": 1, "num_decoder_layers": 1}
    drops = {"embedding": 0.1, "residual": 0.1, "attention": 0.1, "feed_forward": 0.1}
    found = (
        Probe("plain", config(), TrainingConfig(**settings)),
        Probe("short", config(), TrainingConfig(**settings), steps=4),
        Probe(
            "uneven",
            config(37, tie_embeddings="none"),
            TrainingConfig(**settings, **sliced),
            steps=4,
            lengths=ON_ONE_SHARD,
        ),
        Probe("vocabulary of 37", config(37), TrainingConfig(**settings)),
        Probe("untied", config(tie_embeddings="none"), TrainingConfig(**settings), steps=4),
        Probe("accumulated", config(), TrainingConfig(**settings, accumulation_steps=2), steps=4),
        Probe("checkpointing", config(), TrainingConfig(**settings, activation_checkpointing=True), steps=4),
        Probe(
            "T5",
            config(preset="t5_v1_1", **relative, dropout={**drops, "final": 0.1}),
            TrainingConfig(**settings, **sliced),
            steps=2,
        ),
        Probe("dropout", config(dropout=drops), TrainingConfig(**settings, **sliced), steps=4),
        Probe("shallow", shallow, TrainingConfig(**settings), steps=2),
        Probe("shallow dropout", shallow.replace(dropout=DropoutRates(**drops)), TrainingConfig(**settings), steps=2),
    )
    return {probe.name: probe for probe in found}


@cache
def rounded() -> dict[str, Probe]:
    """Return a dict from names to cases with float32 and with mixed bfloat16 precision."""
    changes: dict[str, Any] = {"accumulation_steps": 2, "activation_checkpointing": True}
    whole = replace(probes()["short"], name="float32", dtype="float32")
    float32 = replace(whole, settings=replace(whole.settings, **changes))
    mixed = replace(float32, name="mixed bfloat16", settings=replace(float32.settings, mixed_bfloat16=True))
    return {probe.name: probe for probe in (float32, mixed)}


@cache
def port_probes() -> tuple[Probe, ...]:
    """Return the cases for user ports. No sequence consists only of padding.

    The configs are placeholders, because each port uses its own config.
    """
    settings = probes()["plain"].settings
    sliced = replace(settings, accumulation_steps=2)
    return (
        Probe("plain", config(), settings, has_empty_rows=False),
        Probe("uneven", config(), sliced, steps=4, lengths=ON_ONE_SHARD, has_empty_rows=False),
    )


# Names of the cases that a check runs. They cover every feature at least once and require little compilation.
STAGE = ("plain", "uneven", "T5", "dropout", "float32", "mixed bfloat16")
NOT_OFFERED = {"numpy": ("mixed bfloat16",)}
PLANS = tuple(map(Plan.parse, ("data=2", "data=3", "data=4", "fsdp=2", "tensor=2", "data=2,fsdp=2,tensor=2")))
