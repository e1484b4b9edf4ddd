"""A case: one model with one batch of inputs, the block to run, the stage, and any earlier calls."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from numpy import ndarray

from transformer_parity.engine.tolerances import ALL_DTYPES
from transformer_parity.engine.verdict import Author
from transformer_parity.transformer.cases.inputs import WEIGHTS
from transformer_spec.config import TransformerConfig
from transformer_spec.files import load_weights
from transformer_spec.presets import IMPLEMENTATIONS, PRESETS
from transformer_spec.search import Search
from transformer_spec.training_config import TrainingConfig

TOKENS = 37  # size of both vocabularies
ACTIVATIONS, GRADIENTS, STEPS, DECODE = "activations", "gradients", "steps", "decode"  # names of stages


@dataclass(frozen=True)
class Case:
    """A block of a model and the inputs of the block."""

    name: str
    component: str
    config: TransformerConfig
    block: str
    inputs: Mapping[str, ndarray] = field(repr=False)
    weights_file: Path | None = None  # file with the weights; if None, the weights are generated
    seed: int = 0  # seed for generating the weights
    magnitude: str = "usual"  # key in ``inputs.WEIGHTS`` of the function that generates the weights
    fast: bool = True  # also run the fast path; use False to save compile time if another case covers fast attention
    dtypes: tuple[str, ...] = ALL_DTYPES  # dtypes to run; bfloat16 is too coarse to distinguish presets
    formulas: bool = False  # load packages with fast=False
    stage: str = ACTIVATIONS
    settings: TrainingConfig | None = None  # training settings for the steps stage
    search: Search | None = None  # search options for the decode stage
    snapshots: tuple[int, ...] = ()  # steps after which weights are compared; if empty, the default steps
    compares_padding: bool = True  # also compare unused positions (see ``stages.padding``)
    rows: tuple[int, ...] = ()  # batch sizes of the steps, repeated cyclically; if empty, each step uses the full batch
    calls: tuple[int, ...] = ()  # steps after which forward, gradients, and generate are called
    restart: int = 0  # step after which training restarts with a new optimizer; 0 for never
    unlabeled: int = 0  # step whose batch has no labels; 0 for none
    rewind: int = 0  # step after which the trainer evaluates a batch and loads the state of step 1; 0 for never
    before: tuple[Case, ...] = ()  # cases to run first, on the same model or, if the weights differ, on a second model

    @property
    def training(self) -> TrainingConfig:
        """Training settings.

        Raises:
            ValueError: If the case has no training settings.
        """
        if self.settings is None:
            raise ValueError(f"case {self.name} has no training settings")
        return self.settings

    @property
    def options(self) -> Search:
        """Search options.

        Raises:
            ValueError: If the case has no search options.
        """
        if self.search is None:
            raise ValueError(f"case {self.name} has no search options")
        return self.search

    @property
    def is_forward(self) -> bool:
        """True if the case is a forward pass of the full model."""
        return self.stage == ACTIVATIONS and not self.block

    @property
    def model(self) -> tuple[object, ...]:
        """Key that identifies the model. Cases with the same key load the same config and weights in the same way."""
        return self.config, self.weights_file, self.seed, self.magnitude, self.formulas

    @property
    def is_long(self) -> bool:
        """True if a sequence is longer than 256 tokens. The diagnosis and golden vectors skip such cases."""
        return any(array.ndim == 2 and array.shape[1] > 256 for array in self.inputs.values())

    def author(self, backend: str, dtype: str) -> Author:
        """Return the factory for findings about this case."""
        return Author(backend, dtype, self.name, self.component, self.stage)

    def load_weights(self) -> Mapping[str, ndarray]:
        """Return the weights of the model, which are the same for all ports."""
        if self.weights_file is not None:
            return load_weights(self.weights_file)[1]
        return WEIGHTS[self.magnitude](self.config, self.seed)


def in_stages(cases: Iterable[Case], stages: Container[str]) -> list[Case]:
    """Return the cases in the given stages. From ``before``, remove the calls that belong to other stages."""
    return [
        replace(case, before=tuple(earlier for earlier in case.before if earlier.stage in stages))
        for case in cases
        if case.stage in stages
    ]


def tiny(preset: str = "paper_base", **overrides: object) -> TransformerConfig:
    """Return a config that combines a preset's conventions with the sizes of the standard cases."""
    sizes = {
        "source_vocab_size": TOKENS,
        "target_vocab_size": TOKENS,
        "d_model": 24,
        "num_heads": 3,
        "d_k": 8,
        "d_v": 10,
        "d_ff": 40,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "max_length": 32,
    }
    if PRESETS.get(preset, {}).get("position_encoding") == "relative":  # so that the short sequences use all buckets
        sizes["relative_buckets"] = 8
        if "relative_buckets" not in overrides:  # other numbers of buckets may require a larger distance
            sizes["relative_max_distance"] = 12
    return TransformerConfig.preset(preset, **{**sizes, **overrides})


def shrunk(preset: str) -> TransformerConfig:
    """Return a small version of a model in Table 3 of the paper, with all widths divided by 16 and all depths by 3."""
    full = TransformerConfig.preset(preset, source_vocab_size=TOKENS, target_vocab_size=TOKENS)
    return full.replace(
        d_model=full.d_model // 16,
        d_k=full.d_k // 16,
        d_v=full.d_v // 16,
        d_ff=full.d_ff // 16,
        num_encoder_layers=-(-full.num_encoder_layers // 3),
        num_decoder_layers=-(-full.num_decoder_layers // 3),
        max_length=32,
    )


def preset_config(preset: str) -> TransformerConfig:
    """Return the config of a small model with a preset's conventions."""
    # The presets of other implementations differ in conventions, not in sizes, so their cases use the same small sizes.
    return tiny(preset, d_v=8) if preset in IMPLEMENTATIONS else shrunk(preset)


SENTENCES = "sentences"  # the component name of cases with real text
