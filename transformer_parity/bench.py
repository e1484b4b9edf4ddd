"""What ``parity bench`` measures: the work, whether a result counts, and the statistics of interleaved rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any, Final

import numpy as np
from numpy import ndarray

import reference_numpy as ref
from reference_numpy.config import TransformerConfig
from reference_numpy.search_plan import SearchResult
from transformer_parity.compare import AGREES, DIVERGES, FAILED
from transformer_parity.decoding import Decoded, SearchOptions, differing, explain, score, score_budget, summary
from transformer_parity.hard_inputs import padded_ids
from transformer_parity.policy import relative_error

SIZES: dict[str, dict[str, int]] = {
    name: {
        **dict.fromkeys(("source_vocab_size", "target_vocab_size"), vocabulary),
        "d_model": d_model,
        "num_heads": heads,
        "d_ff": d_ff,
        **dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), layers),
    }
    for name, (d_model, layers, heads, d_ff, vocabulary) in {
        "tiny": (128, 2, 4, 512, 1_000),
        "small": (256, 3, 8, 1024, 8_000),
        "base": (512, 6, 8, 2048, 37_000),  # the paper's
    }.items()
}
DTYPE: Final = "float32"
SEED = 2017
NEVER = -1e4  # a bias that no other logit makes up for


@dataclass(frozen=True)
class Product:
    """One matrix product.

    Attributes:
        left: The shape of the left operand, [..., rows, inner].
        right: The shape of the right one, [..., inner, columns].
        operand: The name of the right one; under the same name it lies in the same place.
    """

    left: tuple[int, ...]
    right: tuple[int, ...]
    operand: str

    @property
    def operations(self) -> int:
        """Its additions and multiplications."""
        return 2 * math.prod(self.left) * self.right[-1]


@dataclass(frozen=True)
class DecodeWork:
    """Sentences to translate, each into the same number of tokens.

    The conventions are those of ``marian``, so that Hugging Face's model of that name can do the very same work.

    Attributes:
        size: One of ``SIZES``.
        batch: How many sentences, B.
        source: The tokens of the longest, S; others are padded.
        tokens: How many tokens are said for each, T.
        beam_size: How many hypotheses are kept, K; None is greedy search.
    """

    size: str = "small"
    batch: int = 8
    source: int = 32
    tokens: int = 64
    beam_size: int | None = None

    @cached_property
    def config(self) -> TransformerConfig:
        """The model."""
        longest = max(512, self.source, self.tokens)
        return TransformerConfig.preset("marian", **SIZES[self.size], max_length=longest)

    @cached_property
    def source_ids(self) -> ndarray:
        """The source sentences [B, S], of S down to S / 2 tokens."""
        lengths = np.linspace(self.source, -(-self.source // 2), self.batch).round().astype(int).tolist()
        rng, config = np.random.default_rng(SEED), self.config
        return padded_ids(rng, config.source_vocab_size, config.pad_id, lengths, self.source)

    @cached_property
    def search(self) -> SearchOptions:
        """How to search. The length penalty is Hugging Face's; at equal lengths it changes no ranking."""
        return SearchOptions(self.beam_size, max_length=self.tokens, length_penalty_kind="power")

    def weights(self) -> dict[str, ndarray]:
        """Return random weights with which sentences vary, and go on until they are cut off.

        Freshly initialised, a model whose embeddings are tied says again what it has just read: scales of random sign
        make it move on. Neither the end symbol nor padding can be said, so nobody has to be kept from saying them.
        """
        config, rng = self.config, np.random.default_rng(SEED)
        weights = ref.init_weights(config, SEED)
        for name, array in weights.items():
            if name.endswith(".scale"):
                weights[name] = array * rng.choice(np.array([-1.0, 1.0], DTYPE), array.shape)
            elif name.endswith(".bias"):
                weights[name] = rng.normal(0.0, 0.1, array.shape).astype(DTYPE)
            elif name.endswith("_attention.output_proj.kernel"):
                weights[name] = array / 2.0  # or all sentences would say what they attend to
        weights["output_proj.bias"][[config.pad_id, config.eos_id]] = NEVER
        return weights

    def products(self) -> Iterator[Product]:
        """Yield every matrix product of the search with a cache, in order, as ``reference_numpy`` takes them."""
        config = self.config
        d_model, d_ff, heads, d_k = config.d_model, config.d_ff, config.num_heads, config.d_k
        beam = self.beam_size or 1
        words, rows = self.batch * self.source, self.batch * beam

        def project(positions: int, block: str, *names: str) -> Iterator[Product]:
            for name in names:
                yield Product((positions, d_model), (d_model, d_model), f"{block}.{name}_proj.kernel")

        def attend(of: tuple[int, int], queries: int, length: int, block: str) -> Iterator[Product]:
            yield Product((*of, queries, d_k), (*of, d_k, length), f"{block}.key")
            yield Product((*of, queries, length), (*of, length, d_k), f"{block}.value")

        def feed_forward(positions: int, layer: str) -> Iterator[Product]:
            yield Product((positions, d_model), (d_model, d_ff), f"{layer}.feed_forward.inner_proj.kernel")
            yield Product((positions, d_ff), (d_ff, d_model), f"{layer}.feed_forward.output_proj.kernel")

        every = ("query", "key", "value", "output")
        for layer in (f"encoder.layers.{i}" for i in range(config.num_encoder_layers)):
            yield from project(words, f"{layer}.self_attention", *every)
            yield from attend((self.batch, heads), self.source, self.source, f"{layer}.self_attention")
            yield from feed_forward(words, layer)
        layers = [f"decoder.layers.{i}" for i in range(config.num_decoder_layers)]
        for layer in layers:
            yield from project(words, f"{layer}.cross_attention", "key", "value")
        for length in range(1, self.tokens + 1):
            for layer in layers:
                yield from project(rows, f"{layer}.self_attention", *every)
                yield from attend((rows, heads), 1, length, f"{layer}.self_attention")
                yield from project(rows, f"{layer}.cross_attention", "query", "output")
                yield from attend((self.batch, heads), beam, self.source, f"{layer}.cross_attention")
                yield from feed_forward(rows, layer)
            yield Product((rows, d_model), (d_model, config.target_vocab_size), "target_embedding.table")

    @property
    def produced(self) -> int:
        """How many tokens are said."""
        return self.batch * self.tokens

    @property
    def title(self) -> str:
        """What is done, in a few words."""
        how = "greedy search" if self.beam_size is None else f"beam search with {self.beam_size} hypotheses"
        return f"decode, {self.size}: {how}, {self.tokens} tokens for each of {self.batch} sentences"

    @property
    def details(self) -> str:
        """The sizes behind the title."""
        config = self.config
        return (
            f"d_model {config.d_model}, {config.num_encoder_layers}+{config.num_decoder_layers} layers, "
            f"{config.num_heads} heads, d_ff {config.d_ff}, vocabulary {config.target_vocab_size:,}, {DTYPE}; "
            f"sources of up to {self.source} tokens"
        )

    @cached_property
    def operations(self) -> int:
        """The additions and multiplications of all matrix products; the rest is not counted."""
        return sum(product.operations for product in self.products())


class Reference:
    """What the reference finds for some work, and what it says of others' results.

    The truth is its float64 search. Another result agrees if its tokens are the same, or differ by near-ties only, and
    if the scores are those of its tokens, within the budget of ``parity check --rung decode``.
    """

    def __init__(self, work: DecodeWork, weights: Mapping[str, ndarray]) -> None:
        self.work = work
        self._truth = ref.Transformer.from_weights(work.config, weights, "float64")
        self._rounded = ref.Transformer.from_weights(work.config, weights, DTYPE)
        self._expected = work.search.search(ref, self._truth, work.source_ids).nbest_ids
        self._known: dict[bytes, tuple[str, ndarray, float]] = {}  # by tokens: near-ties, scores and their budget

    def judge(self, result: SearchResult, show: Callable[[], Decoded]) -> str:
        """Return which near-ties a result differs by, which is nothing as a rule.

        Args:
            result: What was timed.
            show: Searches again and keeps every step; needed where a beam search found something else.

        Raises:
            DisagreementError: The result is not that of this work.
        """
        ids, scores = result.nbest_ids, result.nbest_scores
        if ids.shape != self._expected.shape or scores.shape != ids.shape[:2]:
            raise DisagreementError(
                f"ids and scores must be {list(self._expected.shape)} and {list(self._expected.shape[:2])}: "
                f"got {list(ids.shape)} and {list(scores.shape)}"
            )
        if not np.isfinite(scores).all():
            raise DisagreementError("scores must be finite")
        key = ids.astype(np.int64).tobytes()
        if key not in self._known:
            self._known[key] = self._look_up(Decoded(result, []), show)
        near_ties, known, allowed = self._known[key]
        error = relative_error(scores, known)
        if error > allowed:
            raise DisagreementError(f"the scores are off by {error:.1e}, and may be by {allowed:.1e}")
        return near_ties

    def _look_up(self, found: Decoded, show: Callable[[], Decoded]) -> tuple[str, ndarray, float]:
        """Follow the search where it found something else, and score its tokens."""
        work, ids = self.work, found.result.nbest_ids
        if differing(ids, self._expected, work.config.pad_id) and work.beam_size is not None:
            found = show()
            if not np.array_equal(found.result.nbest_ids, ids):
                raise DisagreementError("it finds something else when its steps are looked at")
        doubts = explain(self._truth, self._rounded, work.source_ids, found, self._expected, work.search)
        if not all(doubt.is_near_tie for doubt in doubts):
            raise DisagreementError(summary(doubts))
        known = score(self._truth, work.source_ids, ids, work.search)
        usual = score(self._rounded, work.source_ids, ids, work.search)
        return summary(doubts), known, score_budget(known, usual)


class DisagreementError(Exception):
    """A result is not what the reference computes; the message says where."""


@dataclass
class Entry:
    """A contestant, and what came of it.

    Attributes:
        name: What it is called in tables.
        has_result: Whether there is anything to agree about; without, it is a yardstick and not a competitor.
        verdict: AGREES as long as every result did.
        problem: Why it does not, or why it could not be timed.
        near_ties: Where its tokens differ, and may.
        environment: Versions, devices and switches of its process.
        first_seconds: How long the first call took, compilation included.
        seconds: How long the call of each round took.
        cores: How many cores it kept busy in each round.
        peak_bytes: The most memory that its process held, from its start to the end of the first call; None where the
            system does not say.
    """

    name: str
    has_result: bool = True
    verdict: str = AGREES
    problem: str = ""
    near_ties: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    first_seconds: float | None = None
    seconds: list[float] = field(default_factory=list)
    cores: list[float] = field(default_factory=list)
    peak_bytes: int | None = None

    @property
    def is_timed(self) -> bool:
        """Whether there are times, and all that they stand for agrees."""
        return self.verdict == AGREES and bool(self.seconds)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; no times without agreement."""
        times = {name: getattr(self, name) for name in ("first_seconds", "seconds", "cores", "peak_bytes")}
        return {
            **{name: value for name, value in vars(self).items() if name not in times},
            **(times if self.is_timed else dict.fromkeys(times)),
            "median_seconds": Spread.of(self.seconds).median if self.is_timed else None,
        }


@dataclass(frozen=True)
class Spread:
    """The middle of some measurements, and their extremes."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise measurements."""
        return cls(min(values), median(values), max(values))


def ratio(entry: Entry, against: Entry) -> Spread:
    """Return how many times as long one takes as the other, from round to round."""
    return Spread.of([ours / theirs for ours, theirs in zip(entry.seconds, against.seconds, strict=False)])


def fastest(entries: Sequence[Entry]) -> Entry | None:
    """Return the competitor with the lowest median; None if none was timed."""
    timed = [entry for entry in entries if entry.is_timed and entry.has_result]
    return min(timed, key=lambda entry: median(entry.seconds), default=None)


def verdict(entries: Sequence[Entry]) -> str:
    """Return the worst: a wrong result before one that is missing."""
    return next((word for word in (DIVERGES, FAILED) if any(entry.verdict == word for entry in entries)), AGREES)
