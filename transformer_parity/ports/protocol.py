"""The port protocol: NumPy arrays go in and come out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from numpy import ndarray

from reference_numpy.checks import check_choice, check_fields, check_integer, check_number
from reference_numpy.config import TransformerConfig
from reference_numpy.search_plan import (
    LENGTH_PENALTIES,
    OnStep,
    SearchPlan,
    SearchResult,
    SearchRules,
    length_penalty,
    plan_search,
)
from reference_numpy.taps import Recorder
from reference_numpy.training_config import Gradients, TrainingConfig
from transformer_parity.system.errors import UsageError


class Placement(NamedTuple):
    """In which dtype, on which device and how precisely a model computes: see ``Transformer.from_weights``."""

    dtype: str = "float32"
    device: str = "cpu"
    precision: str = "highest"


LARGEST = {  # of the sizes of a search that a file asks for
    **{"beam_size": 1000, "num_hypotheses": 1000, "no_repeat_ngram_size": 1000},
    **{"max_length": 2**16, "min_length": 2**16, "max_length_extra": 2**16, "max_length_factor": 100},
}


@dataclass(frozen=True)
class SearchOptions:
    """How to search: what ``greedy_search`` and ``beam_search`` are asked for. A beam size of None is greedy search."""

    beam_size: int | None = None
    length_penalty: float = 0.6
    max_length: int | None = None
    num_hypotheses: int = 1
    length_penalty_kind: str = "gnmt"
    min_length: int = 1
    start_id: int | None = None
    rules: SearchRules = dataclasses.field(default_factory=SearchRules)

    def __post_init__(self) -> None:
        """Refuse what is no search.

        Raises:
            TypeError: A size or an id is no integer, or the rules are of another type.
            ValueError: A size is below 1, an id or the penalty negative, or the kind of penalty not known.
        """
        for name in ("beam_size", "max_length", "num_hypotheses", "min_length"):
            if getattr(self, name) is not None or name == "min_length":
                object.__setattr__(self, name, check_integer(name, getattr(self, name), minimum=1))
        if self.start_id is not None:
            object.__setattr__(self, "start_id", check_integer("start_id", self.start_id, minimum=0))
        penalty = check_number("length_penalty", self.length_penalty, "at least 0", lambda number: number >= 0.0)
        object.__setattr__(self, "length_penalty", penalty)
        check_choice("length_penalty_kind", self.length_penalty_kind, LENGTH_PENALTIES)
        if not isinstance(self.rules, SearchRules):
            kind = type(self.rules).__name__
            raise TypeError(f"rules must be SearchRules, such as SearchRules.preset('hf'): got {kind}")

    @classmethod
    def preset(cls, name: str, rules: SearchRules | Mapping[str, Any] | None = None, **options: Any) -> SearchOptions:
        """Return how a program searches, with its own length penalty, and lengths as it counts them.

        Args:
            name: ``paper``, ``hf``, ``fairseq`` or ``marian``.
            rules: What is otherwise than in ``SearchRules.preset``; or rules to take instead.
            options: What is otherwise than by default.

        Raises:
            TypeError: An option does not exist, or has the wrong type.
            ValueError: The name is unknown, or an option makes no sense.
        """
        usual: dict[str, Any] = {} if name == "paper" else {"length_penalty": 1.0, "length_penalty_kind": "power"}
        if name == "fairseq":  # where an end symbol that stands alone is no hypothesis
            usual["min_length"] = 2
        if not isinstance(rules, SearchRules):
            rules = SearchRules.preset(name, **(rules or {}))
        return cls(**{**usual, **options}, rules=rules)

    def to_dict(self) -> dict[str, Any]:
        """Return every option as plain values that JSON can hold."""
        return {**dataclasses.asdict(self), "rules": self.rules.to_dict()}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> SearchOptions:
        """Rebuild options from ``to_dict``, as a file may hold them; what is missing is as by default.

        Raises:
            TypeError: A field has the wrong type.
            ValueError: A field is unknown, makes no sense, or asks for more memory than any search needs.
        """
        if not isinstance(fields, Mapping):
            raise TypeError(f"search options must be a mapping of field names: got {type(fields).__name__}")
        known = {entry.name for entry in dataclasses.fields(cls)}
        check_fields("search options", fields, known & fields.keys())
        found = cls(**{**fields, "rules": SearchRules.from_dict(fields.get("rules", {}))})
        for name, most in LARGEST.items():
            value = getattr(found if name in known else found.rules, name)
            if value is not None and value > most:
                raise ValueError(f"{name} of a search in a file must be at most {most:,}: got {value:,}")
        return found

    def search(
        self, package: Any, model: Any, source_ids: Any, on_step: Callable[[ndarray], None] | None = None
    ) -> SearchResult:
        """Let a package search."""
        lengths = {"max_length": self.max_length, "min_length": self.min_length}
        options = {**lengths, "start_id": self.start_id, "on_step": on_step, "rules": self.rules}
        if self.beam_size is None:
            return package.greedy_search(model, source_ids, **options)
        return package.beam_search(
            model,
            source_ids,
            self.beam_size,
            self.length_penalty,
            num_hypotheses=self.num_hypotheses,
            length_penalty_kind=self.length_penalty_kind,
            **options,
        )

    def plan(self, config: TransformerConfig, source_mask: ndarray) -> SearchPlan:
        """Return what follows from the options for some sentences; errors as in ``reference_numpy.beam_search``."""
        penalty = (0.0,) if self.beam_size is None else (self.length_penalty, self.length_penalty_kind)
        sizes = self.beam_size or 1, self.num_hypotheses if self.beam_size else 1
        return plan_search(
            config, source_mask, self.rules, self.max_length, self.min_length, self.start_id, *sizes, *penalty
        )

    def limit(self, source_length: int, config: TransformerConfig) -> int:
        """Return the most tokens of a hypothesis."""
        limit = int(self.rules.max_lengths(source_length)) if self.max_length is None else self.max_length
        return min(limit, config.max_positions or limit)

    def penalty(self, length: int) -> float:
        """Return what the log-probability of a hypothesis is divided by."""
        if self.beam_size is None:
            return 1.0
        return float(length_penalty(length, self.length_penalty, self.length_penalty_kind))


@dataclass(frozen=True)
class Decoded:
    """What a port found for a batch, and what it had in hand after each step."""

    result: SearchResult
    shown: list[ndarray]  # [B, K, n]

    @classmethod
    def by(cls, search: Callable[..., SearchResult]) -> Decoded:
        """Run a search and keep what it shows."""
        shown: list[ndarray] = []
        return cls(search(on_step=shown.append), shown)


@dataclass(frozen=True)
class Result:
    """What a block returned, and what its taps saw, in the order they fired."""

    output: ndarray
    taps: dict[str, ndarray]


class LoadedPort(Protocol):
    """A model that holds weights."""

    def export(self) -> dict[str, ndarray]:
        """Return every parameter by its canonical name."""

    def run(
        self, block: str, inputs: Mapping[str, ndarray], *, taps: bool, given: Mapping[str, ndarray] | None = None
    ) -> Result:
        """Run one block in inference mode.

        Args:
            block: The path of the block; empty for the whole model.
            inputs: Arrays by the name of the block's argument. Floats arrive in float64, ids as integers.
            taps: True records every tap; False runs the way a user runs it for speed, and records none.
            given: What to go on with behind a tap, by its name, in place of what was computed and recorded.
        """

    def shows(self, tap: str) -> bool:
        """Whether the port promises to show a tap, where the model has it."""

    def gradients(self, inputs: Mapping[str, ndarray]) -> Gradients:
        """Return the loss of a batch (source_ids, target_ids, labels) and its gradients, in inference mode."""

    def decode_stepwise(self, source_ids: ndarray, target_ids: ndarray) -> ndarray:
        """Return the logits of each target position, decoded one after another with a cache."""

    def search(self, source_ids: ndarray, options: SearchOptions, on_step: OnStep | None = None) -> SearchResult:
        """Return the best hypotheses of a batch, and show those that are unfinished after each step."""

    def trainer(self, settings: TrainingConfig) -> Any:
        """Return what trains this model, with ``train_step``, ``evaluate``, ``export_state`` and ``load_state``."""


class Port(Protocol):
    """An implementation of the model."""

    @property
    def name(self) -> str:
        """What it is called in tables."""

    def load(self, config: TransformerConfig, weights: Mapping[str, ndarray], placement: Placement) -> LoadedPort:
        """Build a model that holds a copy of the weights."""


class MissingAbilityError(Exception):
    """Something that this port does not offer: it is skipped and counted, and never passes."""


class MissingFrameworkError(UsageError):
    """A framework that was asked for is not installed; the message has the install line."""


class Replay(Recorder):
    """A tap that keeps what it is shown, and goes on with something else where that is given."""

    def __call__(self, name: str, value: Any) -> Any:
        """Keep the value, and return it or what is given in its place."""
        return self.replace.get(name, self._keep(name, value))

    def _keep(self, name: str, value: Any) -> Any:
        if name in self:
            raise ValueError(f"tap {name} fired twice")
        self[name] = value
        return value
