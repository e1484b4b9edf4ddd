"""Search settings, length penalties, and search results, which all types of search share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from transformer_spec.checks import (
    check_choice,
    check_fields,
    check_integer,
    check_number,
    check_positions,
    random_stream,
)
from transformer_spec.config import TransformerConfig
from transformer_spec.search_rules import LONGEST, SearchRules, check_generated, prefix_rows
from transformer_spec.shapes import Bool, Float, Int

LENGTH_PENALTIES = ("gnmt", "power")

OnStep = Callable[[ndarray], None]  # called with the unfinished hypotheses [B, K, n]


def check_start(start_id: Any, config: TransformerConfig) -> int:
    """Return ``start_id`` or, by default, BOS. Raise an error if ``start_id`` is not in the target vocabulary."""
    start_id = config.bos_id if start_id is None else check_integer("start_id", start_id, minimum=0)
    if start_id >= config.target_vocab_size:
        raise ValueError(f"start_id must be in [0, {config.target_vocab_size}): got {start_id}")
    return start_id


class Scores(NamedTuple):
    """The log-probabilities of given translations, in nats.

    Attributes:
        sequences: Log-probability of each translation: the sum over its tokens. -inf for a translation without tokens.
        tokens: Log-probability of each token, given the source and the previous tokens. 0 at padding.
    """

    sequences: Any  # [B] or [B, N]
    tokens: Any  # [B, T] or [B, N, T]


@dataclass(frozen=True)
class SearchResult:
    """The best hypotheses of each sequence, best first, or samples in the order in which they were generated.

    Attributes:
        nbest_ids: Tokens of the hypotheses without BOS, up to and including ``eos_id``, padded with ``pad_id``. L is
            the length of the longest hypothesis.
        nbest_scores: Log-probability of each hypothesis in nats. Beam search divides it by the length penalty. -inf
            marks missing hypotheses, if there are fewer hypotheses than requested.
    """

    nbest_ids: Int[ndarray, "B N L"]
    nbest_scores: Float[ndarray, "B N"]

    @property
    def ids(self) -> Int[ndarray, "B L"]:
        """Tokens of the best hypothesis of each sequence."""
        return self.nbest_ids[:, 0]

    @property
    def scores(self) -> Float[ndarray, " B"]:
        """Score of the best hypothesis of each sequence."""
        return self.nbest_scores[:, 0]

    def cut_from(self, nbest_ids: Any, nbest_scores: Any) -> SearchResult:
        """Cut ``nbest_ids`` and ``nbest_scores`` to the shapes of this object's arrays, and return a new result."""
        batch, count, length = self.nbest_ids.shape
        return SearchResult(nbest_ids[:batch, :count, :length], nbest_scores[:batch, :count])


class SearchPlan(NamedTuple):
    """The validated settings of a search for a batch, and values derived from these settings."""

    pad_id: int  # never generated
    eos_id: int  # ends a hypothesis
    start_id: int  # first token that the decoder reads
    min_length: int  # minimum number of tokens in a hypothesis, including EOS
    limits: Any  # [B], maximum number of tokens, including EOS; a NumPy array, or a framework array after ``to``
    penalties: Any  # [n], length penalty for each number of tokens; the same type of array as ``limits``
    beam_size: int  # number of unfinished hypotheses per sequence
    num_hypotheses: int  # number of finished hypotheses to return per sequence
    pool_size: int  # number of finished hypotheses to store per sequence
    rules: SearchRules
    prefix: Any = ()  # [B, capacity], first tokens of the hypotheses, padded; () if there are none
    uniforms: Any = ()  # [B, K, capacity], random numbers in [0, 1), one per token of each sample; () without sampling
    temperature: float = 1.0  # divisor of the log-probabilities in sampling
    top_k: int = LONGEST  # number of most likely tokens to sample from
    top_p: float = math.inf  # sample from the smallest set of most likely tokens with at least this probability

    @property
    def capacity(self) -> int:
        """Maximum number of steps, which is also the number of target positions that the decoder reads."""
        return len(self.penalties) - 1

    @property
    def has_prefix(self) -> bool:
        """True if hypotheses start with given tokens."""
        return not isinstance(self.prefix, tuple)

    def of(self, sentences: Any) -> SearchPlan:
        """Return the plan for a batch of the sequences with the given indices. The same index may occur repeatedly."""
        arrays = {name: getattr(self, name) for name in ("limits", "prefix", "uniforms")}
        return self._replace(**{name: array[sentences] for name, array in arrays.items() if len(array)})

    def to(self, integers: Callable[[ndarray], Any], floats: Callable[[ndarray], Any]) -> SearchPlan:
        """Return a copy of the plan, converting integer arrays with ``integers`` and float arrays with ``floats``."""
        return self._replace(
            limits=integers(self.limits),
            penalties=floats(self.penalties),
            prefix=integers(self.prefix) if self.has_prefix else (),
            uniforms=floats(self.uniforms) if len(self.uniforms) else (),
        )


LARGEST = {  # maximum values of these fields in a search that is read from a file
    **{"beam_size": 1000, "num_hypotheses": 1000, "no_repeat_ngram_size": 1000},
    **{"max_length": 2**16, "min_length": 2**16, "max_length_extra": 2**16, "max_length_factor": 100},
}


@dataclass(frozen=True)
class Search:
    """Settings for a search: the arguments of ``beam_search``, ``greedy_search``, or ``sample``. Frozen.

    If ``seed`` is set, the search samples. If only ``beam_size`` is set, the search is a beam search. If neither is
    set, the search is greedy.

    Attributes:
        beam_size: Number of unfinished hypotheses to keep per sequence. If None, the search isn't a beam search.
        length_penalty: Exponent alpha of the length penalty. If it is 0, short hypotheses have an advantage.
        max_length: Maximum number of tokens, including EOS. If None, the limit in ``rules`` is used.
        num_hypotheses: Number of hypotheses or samples to return per sequence. Without a seed, at most ``beam_size``.
        length_penalty_kind: For n tokens, ``gnmt`` is ((5 + n) / 6)^alpha, and ``power`` is n^alpha.
        min_length: Minimum number of tokens, including EOS.
        start_id: First token that the decoder reads. If None, ``config.bos_id`` is used.
        rules: Rules of the search. The defaults are the paper's rules.
        prefix_ids: First tokens of each sequence's hypotheses, without BOS, as a padded array. None means no prefix.
        temperature: Divisor of the log-probabilities in sampling. Values below 1 favor likely tokens.
        top_k: Number of most likely tokens to sample from. If None, all tokens are used.
        top_p: Sample only from the smallest set of most likely tokens whose total probability is at least ``top_p``.
            ``top_k`` is applied first. If None, all tokens are used.
        seed: Seed of the random numbers. If None, the search doesn't sample.

    Raises:
        TypeError: If a field has the wrong type.
        ValueError: If a field has an invalid value, or fields contradict each other.
    """

    beam_size: int | None = None
    length_penalty: float = 0.6
    max_length: int | None = None
    num_hypotheses: int = 1
    length_penalty_kind: str = "gnmt"
    min_length: int = 1
    start_id: int | None = None
    rules: SearchRules = field(default_factory=SearchRules)
    prefix_ids: Any = None  # one row of IDs per sequence, stored as tuples
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        """Validate all fields."""
        for name in ("beam_size", "max_length", "num_hypotheses", "min_length"):
            if getattr(self, name) is not None or name not in ("beam_size", "max_length"):
                object.__setattr__(self, name, check_integer(name, getattr(self, name), minimum=1))
        for name, minimum in {"start_id": 0, "seed": 0, "top_k": 1}.items():
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check_integer(name, getattr(self, name), minimum))
        check_number("temperature", self.temperature, "greater than 0 and at most 1e+30", lambda x: 0.0 < x <= 1e30)
        if self.top_p is not None:
            check_number("top_p", self.top_p, "greater than 0 and at most 1", lambda number: 0.0 < number <= 1.0)
        if self.prefix_ids is not None:
            object.__setattr__(self, "prefix_ids", prefix_rows(self.prefix_ids))
        penalty = check_number("length_penalty", self.length_penalty, "at least 0", lambda number: number >= 0.0)
        object.__setattr__(self, "length_penalty", penalty)
        check_choice("length_penalty_kind", self.length_penalty_kind, LENGTH_PENALTIES)
        beam, number = self.beam_size, self.num_hypotheses
        if number > 1 and beam is None and self.seed is None:
            raise ValueError(f"num_hypotheses={number} requires beam search or sampling; set beam_size or seed")
        if beam is not None and number > beam:
            raise ValueError(f"num_hypotheses must be at most beam_size: got {number} and {beam}")
        if not isinstance(self.rules, SearchRules):
            kind = type(self.rules).__name__
            raise TypeError(f"rules must be SearchRules, such as SearchRules.preset('hf'): got {kind}")
        if self.prefix_ids is not None and self.rules.forced_ids:
            raise ValueError("prefix_ids and rules.forced_ids are mutually exclusive; remove one of them")
        if self.seed is not None and self.beam_size is not None:
            raise ValueError(f"sampling does not use a beam; remove seed={self.seed} or beam_size={self.beam_size}")
        if self.seed is None and (self.temperature, self.top_k, self.top_p) != (1.0, None, None):
            raise ValueError("temperature, top_k, and top_p apply only to sampling; set a seed to enable sampling")

    @classmethod
    def preset(cls, name: str, rules: SearchRules | Mapping[str, Any] | None = None, **options: Any) -> Search:
        """Return the search settings of a program: its rules, length penalty, and minimum length.

        Args:
            name: ``paper``, ``hf`` (Hugging Face), ``fairseq``, or ``marian``.
            rules: Fields to change in ``SearchRules.preset(name)``, or a ``SearchRules`` object that replaces it.
            options: Other fields of ``Search`` to set.

        Raises:
            TypeError: If an option is unknown or has the wrong type.
            ValueError: If the name is unknown, or an option has an invalid value.
        """
        usual: dict[str, Any] = {} if name == "paper" else {"length_penalty": 1.0, "length_penalty_kind": "power"}
        if name == "fairseq":  # in fairseq, a hypothesis can't consist of only EOS
            usual["min_length"] = 2
        if not isinstance(rules, SearchRules):
            rules = SearchRules.preset(name, **(rules or {}))
        return cls(**{**usual, **options}, rules=rules)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as a dict that can be converted to JSON."""
        return {**dataclasses.asdict(self), "rules": self.rules.to_dict()}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Search:
        """Create a search from the result of ``to_dict``, for example from a file. Missing fields get default values.

        Args:
            fields: Fields, keyed by name.

        Raises:
            TypeError: If a field has the wrong type.
            ValueError: If a field is unknown, has an invalid value, or exceeds its maximum in ``LARGEST``.
        """
        if not isinstance(fields, Mapping):
            raise TypeError(f"search options must be a mapping of field names to values: got {type(fields).__name__}")
        known = {entry.name for entry in dataclasses.fields(cls)}
        check_fields("search options", fields, known & fields.keys())
        found = cls(**{**fields, "rules": SearchRules.from_dict(fields.get("rules", {}))})
        for name, most in LARGEST.items():
            value = getattr(found if name in known else found.rules, name)
            if value is not None and value > most:
                raise ValueError(f"{name} in the search settings of a file must be at most {most:,}: got {value:,}")
        return found

    def run(self, package: Any, model: Any, source_ids: Any, on_step: OnStep | None = None) -> SearchResult:
        """Run this search with one of the four packages.

        Args:
            package: Module of the package, such as ``reference_numpy``.
            model: Model of this package.
            source_ids: Source token IDs [B, S], padded with ``config.pad_id``.
            on_step: Function that is called after each step with the unfinished hypotheses [B, K, n], or None.
        """
        usual = Search(beam_size=4)
        given = {name: value for name, value in vars(self).items() if value != getattr(usual, name)}
        if self.beam_size is not None:
            return package.beam_search(model, source_ids, on_step=on_step, **given)
        common = {"max_length", "min_length", "start_id", "rules", "prefix_ids"}
        if self.seed is None:
            of_greedy = {name: given[name] for name in given.keys() & common}
            return package.greedy_search(model, source_ids, on_step=on_step, **of_greedy)
        of_sample = {name: given[name] for name in given.keys() & {*common, "temperature", "top_k", "top_p", "seed"}}
        return package.sample(model, source_ids, self.num_hypotheses, on_step=on_step, **of_sample)

    def of(self, sentence: int) -> Search:
        """Return the search for sequence ``sentence`` of a batch. Samples use the random numbers of sequence 0."""
        prefix_ids = None if self.prefix_ids is None else self.prefix_ids[sentence : sentence + 1]
        return dataclasses.replace(self, prefix_ids=prefix_ids)

    def plan(self, config: TransformerConfig, source_mask: Bool[ndarray, "B S"]) -> SearchPlan:
        """Return the validated settings of this search for a batch. Raise the same errors as ``beam_search``.

        Args:
            config: Model configuration.
            source_mask: True for source positions that contain a token.
        """
        if config.eos_id == config.pad_id:
            raise ValueError(f"eos_id must differ from pad_id in a search: both are {config.eos_id}")
        start_id = check_start(self.start_id, config)
        self.rules.check_ids(config)
        limits = self._limits(config, source_mask)
        if self.min_length > limits.min():
            raise ValueError(f"min_length must be at most max_length: got {self.min_length} and {limits.min()}")
        rules = self.rules
        if rules.no_repeat_ngram_size > limits.max():
            rules = dataclasses.replace(rules, no_repeat_ngram_size=0)  # no hypothesis is that long
        beam_size, num_hypotheses = (self.beam_size, self.num_hypotheses) if self.beam_size else (1, 1)
        uniforms: Any = ()
        if self.seed is not None:
            beam_size = num_hypotheses = self.num_hypotheses
            # Each sample of each sequence has a separate generator, so samples don't depend on the rest of the batch.
            streams = [random_stream(self.seed, row, draw) for row in range(len(limits)) for draw in range(beam_size)]
            draws = [np.random.default_rng(stream).random(limits.max()) for stream in streams]
            uniforms = np.reshape(draws, [len(limits), beam_size, -1])
        return SearchPlan(
            pad_id=config.pad_id,
            eos_id=config.eos_id,
            start_id=start_id,
            min_length=self.min_length,
            limits=limits,
            penalties=self._penalties(int(limits.max())),
            beam_size=beam_size,
            num_hypotheses=num_hypotheses,
            pool_size=num_hypotheses if rules.pool == "num_hypotheses" else beam_size,
            rules=rules,
            prefix=self._prefix(config, limits),
            uniforms=uniforms,
            temperature=float(self.temperature),
            top_k=config.target_vocab_size if self.top_k is None else min(self.top_k, config.target_vocab_size),
            top_p=math.inf if self.top_p is None else float(self.top_p),
        )

    def _prefix(self, config: TransformerConfig, limits: Int[ndarray, " B"]) -> Any:
        """Return the padded prefixes of the sequences [B, capacity], or () if no sequence has a prefix."""
        name = "forced_ids" if self.prefix_ids is None else "prefix_ids"
        rows = (self.rules.forced_ids,) * len(limits) if self.prefix_ids is None else self.prefix_ids
        if len(rows) != len(limits):
            raise ValueError(f"prefix_ids must have one row per sequence: got {len(rows)} for {len(limits)} sequences")
        prefix = np.full([len(limits), limits.max()], config.pad_id)
        for row, (tokens, limit) in enumerate(zip(rows, limits.tolist(), strict=True)):
            tokens = tokens[: max((n for n, token in enumerate(tokens, 1) if token != config.pad_id), default=0)]
            check_generated(name, tokens, config)
            if len(tokens) >= limit:
                raise ValueError(f"{name} must contain fewer tokens than max_length: got {len(tokens)} and {limit}")
            prefix[row, : len(tokens)] = tokens
        return prefix if (prefix != config.pad_id).any() else ()

    def _limits(self, config: TransformerConfig, source_mask: Bool[ndarray, "B S"]) -> Int[ndarray, " B"]:
        """Return the maximum hypothesis length for each sequence."""
        if self.max_length is None:
            limits = self.rules.max_lengths(source_mask.sum(1))
            if config.max_positions is not None:
                limits = np.minimum(limits, config.max_positions)
        else:
            max_length = check_positions("max_length", self.max_length, config.max_positions)
            limits = np.full(len(source_mask), max_length)
        if limits.max() > LONGEST:
            raise ValueError(f"max_length must be at most {LONGEST}: got {limits.max()}")
        return limits

    def _penalties(self, longest: int) -> Float[ndarray, " n"]:
        """Return the length penalty for each number of tokens from 0 to the maximum length."""
        if self.beam_size is None:
            return np.ones(longest + 1)
        lengths = np.arange(longest + 1, dtype=np.float64)
        with np.errstate(over="ignore"):
            penalties = length_penalty(lengths, self.length_penalty, self.length_penalty_kind)
        if penalties[-1] > np.finfo(np.float32).max:
            raise ValueError(f"length_penalty must not overflow: got {self.length_penalty} for {longest} tokens")
        penalties[0] = 1.0  # no hypothesis has 0 tokens
        return penalties

    def limit(self, source_length: int, config: TransformerConfig) -> int:
        """Return the maximum number of tokens in a hypothesis.

        Args:
            source_length: Number of source tokens.
            config: Model configuration.
        """
        limit = int(self.rules.max_lengths(source_length)) if self.max_length is None else self.max_length
        return min(limit, config.max_positions or limit)

    def penalty(self, length: int) -> float:
        """Return the length penalty for a hypothesis with ``length`` tokens."""
        if self.beam_size is None:
            return 1.0
        return float(length_penalty(length, self.length_penalty, self.length_penalty_kind))


def length_penalty(length: Any, alpha: float, kind: str = "gnmt") -> Any:
    """Return the length penalty.

    Beam search divides log-probabilities by the length penalty, so that it doesn't favor short hypotheses.

    Args:
        length: Number of tokens in the hypothesis, including EOS; a number or an array.
        alpha: Exponent of the penalty. 0 gives no penalty; the paper uses 0.6.
        kind: For n tokens, ``gnmt`` is ((5 + n) / 6)^alpha (Wu et al., 2016, equation 14; the paper), and ``power`` is
            n^alpha (fairseq, Hugging Face).
    """
    return length**alpha if kind == "power" else ((5.0 + length) / 6.0) ** alpha


def search_result(
    nbest_ids: Int[ndarray, "B P capacity"], nbest_scores: Float[ndarray, "B P"], pad_id: int, num_hypotheses: int = 1
) -> SearchResult:
    """Return the best hypotheses without all-padding columns. Raise a ValueError if a best score is NaN or infinite."""
    nbest_ids, nbest_scores = nbest_ids[:, :num_hypotheses], nbest_scores[:, :num_hypotheses]
    best = nbest_scores[:, 0]
    if not np.isfinite(best).all():
        row = int(np.flatnonzero(~np.isfinite(best))[0])
        remedy = "; relax the rules or min_length, which may allow no token" if best[row] == -math.inf else ""
        raise ValueError(f"the best score of each sequence must be finite: got {best[row]} in row {row}{remedy}")
    length = int((nbest_ids != pad_id).any((0, 1)).nonzero()[0].max()) + 1  # padding occurs only at the end
    return SearchResult(nbest_ids[:, :, :length], nbest_scores)
