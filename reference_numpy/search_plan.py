"""What all searches have in common: their limits, how hypotheses of different lengths compare, and what they return."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from reference_numpy.checks import check_choice, check_fields, check_integer, check_number, check_positions
from reference_numpy.config import TransformerConfig
from reference_numpy.shapes import Bool, Float, Int

LENGTH_PENALTIES = ("gnmt", "power")
STOPS = ("attainable", "current", "first")
POOLS = ("num_hypotheses", "beam", "first")
LIMITS = ("cut", "forced", "scored")
LONGEST = 2**31 - 1  # tokens: of so many, int32 has the numbers

OnStep = Callable[[ndarray], None]  # is shown the unfinished hypotheses after each step, [B, K, n]


@dataclass(frozen=True)
class SearchResult:
    """The best hypotheses of each sentence, best first.

    Attributes:
        nbest_ids: The tokens without the start symbol, up to and including ``eos_id``, padded with ``pad_id``. L is the
            length of the longest hypothesis.
        nbest_scores: What they are ranked by: the log-probability in nats, over the length penalty in beam search. -inf
            where there are fewer hypotheses than were asked for.
    """

    nbest_ids: Int[ndarray, "B N L"]
    nbest_scores: Float[ndarray, "B N"]

    @property
    def ids(self) -> Int[ndarray, "B L"]:
        """The tokens of the best hypotheses."""
        return self.nbest_ids[:, 0]

    @property
    def scores(self) -> Float[ndarray, " B"]:
        """The scores of the best hypotheses."""
        return self.nbest_scores[:, 0]


@dataclass(frozen=True, kw_only=True)
class SearchRules:
    """Where published searches differ. The defaults are the paper's; ``preset`` has those of other programs.

    Sources: the paper, section 6.1; Hugging Face ``generate`` (transformers 5); fairseq ``SequenceGenerator``; Marian
    ``BeamSearch`` and ``History``.

    Attributes:
        stop: When the beam search of a sentence ends, at the latest where nothing is unfinished. ``attainable``: no
            unfinished hypothesis could still enter the pool, even if all its further tokens were certain.
            ``current``: none would enter it as long as it is now (Hugging Face, ``early_stopping=False``). ``first``:
            the pool is full (fairseq; Hugging Face, ``early_stopping=True``).
        pool: Which finished hypotheses are kept. ``num_hypotheses``: the best that are asked for. ``beam``: the best
            ``beam_size`` (Hugging Face). ``first``: the first ``beam_size`` (fairseq).
        at_limit: How a hypothesis ends at its maximum length. ``cut``: with the token that is best there. ``forced``:
            with the end symbol, as if it were certain (Hugging Face, ``forced_eos_token_id``). ``scored``: with the
            end symbol and its own log-probability (fairseq).
        beam_shrinks: Whether each finished hypothesis takes up a place of the beam for good (Marian). Then only the
            places that are left are filled: an end outside them does not count.
        forced_ids: What every hypothesis begins with, such as the language to translate into.
        score_forced: Whether it counts with its own log-probability (fairseq), or with 0 (Hugging Face).
        banned_ids: Tokens that are never generated, besides padding.
        renormalize: Whether the probabilities of the tokens that are allowed are scaled to a sum of 1.
        no_repeat_ngram_size: Of the n-grams that no hypothesis contains twice, its start symbol included; 0 is none.
        max_length_factor: Where no maximum length is given, so much times the source length ...
        max_length_extra: ... plus so much.
    """

    stop: str = "attainable"
    pool: str = "num_hypotheses"
    at_limit: str = "cut"
    beam_shrinks: bool = False
    forced_ids: tuple[int, ...] = ()
    score_forced: bool = False
    banned_ids: tuple[int, ...] = ()
    renormalize: bool = False
    no_repeat_ngram_size: int = 0
    max_length_factor: float = 1.0
    max_length_extra: int = 50  # section 6.1: the longest translation is the input length + 50

    def __post_init__(self) -> None:
        """Refuse what is no rule.

        Raises:
            TypeError: A size or an id is no integer, the factor no number, or a switch no bool.
            ValueError: A choice is unknown, a number is negative, or the rules contradict each other.
        """
        for name, choices in (("stop", STOPS), ("pool", POOLS), ("at_limit", LIMITS)):
            check_choice(name, getattr(self, name), choices)
        for name in ("beam_shrinks", "score_forced", "renormalize"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False: got {getattr(self, name)!r}")
        for name in ("forced_ids", "banned_ids"):
            ids = getattr(self, name)
            if not isinstance(ids, list | tuple):
                raise TypeError(f"{name} must be a list of ids: got {ids!r}")
            object.__setattr__(self, name, tuple(check_integer(name, token, minimum=0) for token in ids))
        for name in ("no_repeat_ngram_size", "max_length_extra"):
            object.__setattr__(self, name, check_integer(name, getattr(self, name), minimum=0))
        factor = check_number("max_length_factor", self.max_length_factor, "at least 0", lambda number: number >= 0.0)
        object.__setattr__(self, "max_length_factor", factor)
        if self.beam_shrinks and self.pool == "num_hypotheses":
            raise ValueError("a beam that shrinks needs a pool of its size: got pool 'num_hypotheses'")

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> SearchRules:
        """Return the rules of a program: ``paper``, ``hf``, ``fairseq`` or ``marian``.

        What a model's own settings add, such as the ids that are forced or banned, is given as overrides.

        Raises:
            TypeError: An override is no rule, or has the wrong type.
            ValueError: The name is unknown, or an override makes no sense.
        """
        check_choice("rules", name, tuple(SEARCH_PRESETS))
        return cls(**{**SEARCH_PRESETS[name], **overrides})

    def max_lengths(self, source_lengths: Any) -> Any:
        """Return the most tokens of a hypothesis, ``eos_id`` included, where no maximum length is given."""
        beyond = 2 * LONGEST  # a search refuses it
        factor = min(float(self.max_length_factor), float(beyond))
        multiplied = np.minimum(factor * np.asarray(source_lengths), beyond).astype(int)
        return np.maximum(multiplied + min(self.max_length_extra, beyond), 1)

    def to_dict(self) -> dict[str, Any]:
        """Return every rule as plain values that JSON can hold."""
        return {**dataclasses.asdict(self), "forced_ids": list(self.forced_ids), "banned_ids": list(self.banned_ids)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> SearchRules:
        """Rebuild rules from ``to_dict``; what is missing is as by default.

        Raises:
            TypeError: A field has the wrong type.
            ValueError: A field is unknown, or makes no sense.
        """
        if not isinstance(fields, Mapping):
            raise TypeError(f"rules must be a mapping of field names: got {type(fields).__name__}")
        known = [entry.name for entry in dataclasses.fields(cls)]
        check_fields("rules of a search", fields, [name for name in known if name in fields])
        return cls(**fields)


SEARCH_PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "hf": {"stop": "current", "pool": "beam"},
    # Its limit is of 200 tokens and the end symbol.
    "fairseq": {
        **{"stop": "first", "pool": "first", "at_limit": "scored", "score_forced": True},
        **{"max_length_factor": 0.0, "max_length_extra": 201},
    },
    # Of K places, each hypothesis that ends takes one: as many end as are kept.
    "marian": {
        **{"stop": "first", "pool": "beam", "beam_shrinks": True, "score_forced": True},
        **{"max_length_factor": 3.0, "max_length_extra": 0},
    },
}


class SearchPlan(NamedTuple):
    """The arguments of a search, checked, and what follows from them.

    Attributes:
        pad_id: Never generated; it fills the places behind a hypothesis.
        eos_id: What ends a hypothesis.
        start_id: What the decoder reads first.
        min_length: The fewest tokens of a hypothesis, ``eos_id`` included.
        limits: The most tokens of a hypothesis of each sentence, ``eos_id`` included.
        penalties: What the log-probability of a hypothesis of n tokens is divided by, for n up to the capacity.
        beam_size: How many unfinished hypotheses of each sentence are kept.
        num_hypotheses: How many finished hypotheses of each sentence are returned.
        pool_size: How many of them are kept.
        rules: Which other program's search it is.
    """

    pad_id: int
    eos_id: int
    start_id: int
    min_length: int
    limits: Any  # [B]; an array of NumPy as planned, and of the framework in its loop
    penalties: Any  # [n]; likewise
    beam_size: int
    num_hypotheses: int
    pool_size: int
    rules: SearchRules

    @property
    def capacity(self) -> int:
        """How many steps the longest hypothesis may take: as many target positions are read."""
        return len(self.penalties) - 1


def length_penalty(length: Any, alpha: float, kind: str = "gnmt") -> Any:
    """Return what the log-probability of a hypothesis is divided by, so that long ones can compete.

    Args:
        length: How many tokens the hypothesis has, ``eos_id`` included; a number or an array.
        alpha: 0 compares log-probabilities as they are; the paper uses 0.6.
        kind: ``gnmt`` is ((5 + n) / 6)^alpha (Wu et al., 2016, equation 14; the paper); ``power`` is n^alpha (fairseq,
            Hugging Face).
    """
    return length**alpha if kind == "power" else ((5.0 + length) / 6.0) ** alpha


def plan_search(
    config: TransformerConfig,
    source_mask: Bool[ndarray, "B S"],
    rules: SearchRules | None,
    max_length: int | None,
    min_length: int,
    start_id: int | None,
    beam_size: int = 1,
    num_hypotheses: int = 1,
    alpha: float = 0.0,
    length_penalty_kind: str = "gnmt",
) -> SearchPlan:
    """Check the arguments of a search; errors as in ``beam_search``."""
    if config.eos_id == config.pad_id:
        raise ValueError(f"a search needs an end symbol that is not padding: both are {config.eos_id}")
    beam_size = check_integer("beam_size", beam_size, minimum=1)
    num_hypotheses = check_integer("num_hypotheses", num_hypotheses, minimum=1)
    if num_hypotheses > beam_size:
        raise ValueError(f"num_hypotheses must be at most beam_size: got {num_hypotheses} and {beam_size}")
    alpha = check_number("length_penalty", alpha, "at least 0", lambda number: number >= 0.0)
    check_choice("length_penalty_kind", length_penalty_kind, LENGTH_PENALTIES)
    if start_id is None:
        start_id = config.bos_id
    start_id = check_integer("start_id", start_id, minimum=0)
    if start_id >= config.target_vocab_size:
        raise ValueError(f"start_id must lie in [0, {config.target_vocab_size}): got {start_id}")
    rules = _check_rules(SearchRules() if rules is None else rules, config)
    if max_length is None:
        limits = rules.max_lengths(source_mask.sum(1))
        if config.max_positions is not None:
            limits = np.minimum(limits, config.max_positions)
    else:
        max_length = check_positions("max_length", max_length, config.max_positions)
        limits = np.full(len(source_mask), max_length)
    if limits.max() > LONGEST:
        raise ValueError(f"max_length must be at most {LONGEST}: got {limits.max()}")
    min_length = check_integer("min_length", min_length, minimum=1)
    if min_length > limits.min():
        raise ValueError(f"min_length must be at most max_length: got {min_length} and {limits.min()}")
    if len(rules.forced_ids) >= limits.min():
        raise ValueError(f"forced_ids must be fewer than max_length: got {len(rules.forced_ids)} and {limits.min()}")
    if rules.no_repeat_ngram_size > limits.max():
        rules = dataclasses.replace(rules, no_repeat_ngram_size=0)  # nothing so long occurs twice
    penalties = length_penalty(np.arange(limits.max() + 1, dtype=np.float64), alpha, length_penalty_kind)
    penalties[0] = 1.0  # no hypothesis is that short
    pool_size = num_hypotheses if rules.pool == "num_hypotheses" else beam_size
    ids, sizes = (config.pad_id, config.eos_id, start_id), (beam_size, num_hypotheses, pool_size)
    return SearchPlan(*ids, min_length, limits, penalties, *sizes, rules)


def _check_rules(rules, config):
    if not isinstance(rules, SearchRules):
        raise TypeError(f"rules must be SearchRules, such as SearchRules.preset('hf'): got {type(rules).__name__}")
    for name in ("forced_ids", "banned_ids"):
        for token in getattr(rules, name):
            if token >= config.target_vocab_size:
                raise ValueError(f"{name} must lie in [0, {config.target_vocab_size}): got {token}")
            if token == config.eos_id or (token == config.pad_id and name == "forced_ids"):
                raise ValueError(f"{name} must hold neither end symbol nor padding: got {token}")
    return rules


def pad_search(
    source_ids: Int[ndarray, "B S"],
    source_mask: Bool[ndarray, "B S"],
    plan: SearchPlan,
    max_positions: int | None,
    round_up: Callable[[int], int],
) -> tuple[Int[ndarray, "rows room"], Bool[ndarray, "rows room"], SearchPlan]:
    """Return source and plan with padding behind them, so that there are few sizes to compile for.

    The batch is rounded up to a power of two, by sentences whose limit is 0; lengths as ``round_up`` says, at most to
    ``max_positions``.
    """
    batch, length = source_ids.shape
    rows = (0, power_of_two(batch) - batch)
    room, capacity = (min(round_up(size), max_positions or sys.maxsize) for size in (length, plan.capacity))
    padding, more = (rows, (0, room - length)), (0, capacity - plan.capacity)
    return (
        np.pad(source_ids, padding, constant_values=plan.pad_id),
        np.pad(source_mask, padding),
        plan._replace(limits=np.pad(plan.limits, rows), penalties=np.pad(plan.penalties, more, constant_values=1.0)),
    )


def power_of_two(number: int) -> int:
    """Return the least power of two that is large enough."""
    return 1 << (number - 1).bit_length()


def search_result(
    nbest_ids: Int[ndarray, "B P capacity"], nbest_scores: Float[ndarray, "B P"], pad_id: int, num_hypotheses: int = 1
) -> SearchResult:
    """Return the best that was found, without the columns that no hypothesis needs.

    Raises:
        ValueError: A sentence has no hypothesis, because the model computes NaN or infinity for it.
    """
    nbest_ids, nbest_scores = nbest_ids[:, :num_hypotheses], nbest_scores[:, :num_hypotheses]
    best = nbest_scores[:, 0]
    if not np.isfinite(best).all():
        sentence = int(np.flatnonzero(~np.isfinite(best))[0])
        raise ValueError(f"a hypothesis must have a finite score: the best of sentence {sentence} has {best[sentence]}")
    length = int((nbest_ids != pad_id).any((0, 1)).nonzero()[0].max()) + 1  # no hypothesis has padding inside
    return SearchResult(nbest_ids[:, :, :length], nbest_scores)
