"""One case: a config, weights, inputs, the part and stage that they are run on, and the calls that come before."""

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
from transformer_spec.search import Search
from transformer_spec.training_config import TrainingConfig

TOKENS = 37  # of either vocabulary
ACTIVATIONS, GRADIENTS, STEPS, DECODE = "activations", "gradients", "steps", "decode"  # names of stages


@dataclass(frozen=True)
class Case:
    """One block of one model, and what goes into it."""

    name: str
    component: str
    config: TransformerConfig
    block: str
    inputs: Mapping[str, ndarray] = field(repr=False)
    weights_file: Path | None = None  # None: the hard weights of the config
    seed: int = 0  # of the hard weights
    magnitude: str = "usual"  # of the hard weights: a key of ``inputs.WEIGHTS``
    fast: bool = True  # run the fast path too; False where attention is as in another case: compiling takes its time
    dtypes: tuple[str, ...] = ALL_DTYPES  # presets differ in conventions, which bfloat16 cannot tell apart
    formulas: bool = False  # load a package with fast=False
    stage: str = ACTIVATIONS
    settings: TrainingConfig | None = None  # of the optimizer, for steps
    search: Search | None = None  # for decode
    snapshots: tuple[int, ...] = ()  # steps after which weights are compared; empty: the usual ones
    compares_padding: bool = True  # whether positions are compared that nothing reads, see ``stages.padding``
    rows: tuple[int, ...] = ()  # numbers of rows that the steps take in turn; empty: each step takes the whole batch
    calls: tuple[int, ...] = ()  # steps after which forward, gradients and generate are called too
    restart: int = 0  # the step after which training is started a second time, with a new optimizer; 0: none
    unlabeled: int = 0  # the step whose batch has no label; 0: none
    rewind: int = 0  # the step after which trainer methods are called, and the state after step 1 is loaded; 0: none
    before: tuple[Case, ...] = ()  # run first: on the same model, or on a second one if the weights differ

    @property
    def training(self) -> TrainingConfig:
        """The settings of the optimizer; ValueError if there are none."""
        if self.settings is None:
            raise ValueError(f"case {self.name} has no training settings")
        return self.settings

    @property
    def options(self) -> Search:
        """The options of the search; ValueError if there are none."""
        if self.search is None:
            raise ValueError(f"case {self.name} has no search options")
        return self.search

    @property
    def is_forward(self) -> bool:
        """Whether the whole model is run forward, with its taps shown."""
        return self.stage == ACTIVATIONS and not self.block

    @property
    def model(self) -> tuple[object, ...]:
        """The key of the model: cases with the same key have the same config and weights, loaded in the same way."""
        return self.config, self.weights_file, self.seed, self.magnitude, self.formulas

    @property
    def is_long(self) -> bool:
        """Whether it has many tokens. No hypothesis is tried on such a case, and golden folders omit it."""
        return any(array.ndim == 2 and array.shape[1] > 256 for array in self.inputs.values())

    def author(self, backend: str, dtype: str) -> Author:
        """Return the author of findings about this case."""
        return Author(backend, dtype, self.name, self.component, self.stage)

    def load_weights(self) -> Mapping[str, ndarray]:
        """Return the weights that every port is given."""
        if self.weights_file is not None:
            return load_weights(self.weights_file)[1]
        return WEIGHTS[self.magnitude](self.config, self.seed)


def in_stages(cases: Iterable[Case], stages: Container[str]) -> list[Case]:
    """Return the cases of some stages, without earlier calls that belong to other stages."""
    return [
        replace(case, before=tuple(earlier for earlier in case.before if earlier.stage in stages))
        for case in cases
        if case.stage in stages
    ]


def tiny(preset: str = "paper_base", **overrides: object) -> TransformerConfig:
    """Return a preset's conventions at the sizes of the standard cases."""
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
    return TransformerConfig.preset(preset, **{**sizes, **overrides})


def shrunk(preset: str) -> TransformerConfig:
    """Return a preset with the widths divided by 16 and the depths by 3, keeping what its row of Table 3 changes."""
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


SENTENCES = "sentences"  # the component of real text
