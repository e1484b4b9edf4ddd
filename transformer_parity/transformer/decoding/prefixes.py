"""The reference's log-probabilities of all continuations of given prefixes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np
from numpy import ndarray

from reference_numpy.functional import log_softmax
from reference_numpy.search_rules import apply_rules
from reference_numpy.transformer import Transformer
from transformer_parity.engine.tolerances import EPS, POLICY
from transformer_spec.config import TransformerConfig
from transformer_spec.search import Search, SearchPlan
from transformer_spec.taps import Tap, no_tap

Tokens = tuple[int, ...]  # a hypothesis or a prefix of a hypothesis, without the BOS token and padding


class InBfloat16(Transformer):
    """The float32 reference with every tap rounded to bfloat16, to estimate the rounding noise in bfloat16."""

    def _encode(self, source_ids: ndarray, source_mask: ndarray, tap: Tap = no_tap, rng: Any = None) -> ndarray:
        return super()._encode(source_ids, source_mask, _rounding(tap), rng)

    def _decode(
        self,
        target_ids: ndarray,
        memory: ndarray,
        target_mask: ndarray,
        source_mask: ndarray,
        tap: Tap = no_tap,
        rng: Any = None,
    ) -> ndarray:
        return super()._decode(target_ids, memory, target_mask, source_mask, _rounding(tap), rng)


def _rounding(tap: Tap) -> Tap:
    """Return a tap that rounds values to bfloat16."""
    return lambda name, x: tap(name, rounded_to_bfloat16(x))


def rounded_to_bfloat16(x: ndarray) -> ndarray:
    """Return values rounded to bfloat16."""
    return x.astype("bfloat16").astype(x.dtype)


class Continuations:
    """A set of prefixes, and the continuations of each prefix by every possible token.

    Args:
        prefixes: P unfinished hypotheses.
        exact: Log-probabilities of the prefixes followed by each next token, in float64 [P, V]; -inf for tokens that
            the search must not choose.
        rounded: The same log-probabilities in the working dtype.
        dtype: The working dtype.
    """

    def __init__(self, prefixes: Sequence[Tokens], exact: ndarray, rounded: ndarray, dtype: str) -> None:
        self.rows = {prefix: row for row, prefix in enumerate(prefixes)}
        self.prefixes = prefixes
        self.exact = exact
        self.rounded = rounded
        self.dtype = dtype
        self._order = np.argsort(-exact, axis=None, kind="stable")

    def best(self, count: int, but: int | None = None) -> list[tuple[Tokens, float]]:
        """Return the most likely continuations and their log-probabilities, starting with the most likely one.

        Args:
            count: Maximum number of continuations.
            but: ID of a token. Continuations that end with this token are omitted.
        """
        found: list[tuple[Tokens, float]] = []
        for index in self._order.tolist():
            row, token = divmod(index, self.exact.shape[1])
            if len(found) == count or self.exact[row, token] == -math.inf:
                break
            if token != but:
                found.append(((*self.prefixes[row], token), float(self.exact[row, token])))
        return found

    def total(self, tokens: Tokens) -> float:
        """Return the log-probability of a continuation, or -inf if it doesn't continue any of the prefixes."""
        row = self.rows.get(tokens[:-1])
        return -math.inf if row is None else float(self.exact[row, tokens[-1]])

    def noise(self, candidates: Iterable[Tokens]) -> float:
        """Return the rounding noise in the log-probabilities of the given continuations, in nats.

        The noise is derived from the reference's own error.
        """
        at = [(self.rows[tokens[:-1]], tokens[-1]) for tokens in candidates if tokens[:-1] in self.rows]
        exact = np.array([self.exact[place] for place in at if self.exact[place] > -math.inf])
        largest = np.abs(exact).max(initial=0.0)
        if self.dtype == "float64":
            return POLICY["decode"]["float64"]["tie"] * largest
        if self.dtype == "bfloat16":  # bfloat16 is so coarse that a few values may be exact by chance
            rows = sorted({row for row, _ in at})
            is_allowed = np.isfinite(self.exact[rows])
            errors = self.rounded[rows][is_allowed] - self.exact[rows][is_allowed]
            return POLICY["bench"]["decision_bfloat16"] * float(np.sqrt(np.square(errors).mean()))
        rule = POLICY["decode"]["float32"]
        rounded = np.array([self.rounded[place] for place in at if self.exact[place] > -math.inf])
        error = np.abs(rounded - exact).max(initial=0.0)
        return rule["ratio"] * error + rule["floor_in_eps"] * EPS["float32"] * largest


@dataclass
class PrefixScorer:
    """Computes the reference's log-probabilities for the prefixes of one sentence.

    Args:
        truth: The reference in float64.
        rounded: The reference in the working dtype; None if that is float64.
        source: Token IDs of the sentence, padded.
    """

    truth: Transformer
    rounded: Transformer | None
    source: ndarray
    _memory: dict[int, ndarray] = field(default_factory=dict)

    def continuations(self, prefixes: Sequence[Tokens], plan: SearchPlan) -> Continuations:
        """Return all continuations of the given prefixes, which must have the same length."""
        exact = self._totals(self.truth, prefixes, plan)
        rounded = exact if self.rounded is None else self._totals(self.rounded, prefixes, plan)
        dtype = "bfloat16" if isinstance(self.rounded, InBfloat16) else "float32"
        return Continuations(prefixes, exact, rounded, "float64" if self.rounded is None else dtype)

    def _totals(self, model: Transformer, prefixes: Sequence[Tokens], plan: SearchPlan) -> ndarray:
        if id(model) not in self._memory:
            self._memory[id(model)] = model.encode(self.source[None])
        target = np.array([[plan.start_id, *prefix] for prefix in prefixes])
        memory = self._memory[id(model)].repeat(len(target), 0)
        logits = model.decode(target, memory, self.source[None].repeat(len(target), 0))
        log_probabilities = searched_log_probabilities(logits, target[:, 1:], plan)  # [P, n, V]
        so_far = np.take_along_axis(log_probabilities[:, :-1], target[:, 1:, None], -1)[..., 0].sum(1)
        return np.asarray(so_far[:, None] + log_probabilities[:, -1], np.float64)


def searched_log_probabilities(logits: ndarray, ids: ndarray, plan: SearchPlan) -> ndarray:
    """Return the log-probabilities [R, n, V] that a search uses, given the logits for the first n tokens of R rows.

    Args:
        logits: Logits [R, n, V].
        ids: Token IDs of each row [R, n - 1] or [R, n], without the BOS token.
        plan: Plan of the search, either with one sentence per row or with one sentence that all rows share.
    """
    plan = plan.of(np.broadcast_to(np.arange(len(plan.limits)), len(logits)))
    ids = np.pad(ids, ((0, 0), (0, logits.shape[1] - ids.shape[1])))[:, None]
    log_probabilities = log_softmax(logits)
    log_probabilities[..., plan.pad_id] = -math.inf
    log_probabilities[:, : plan.min_length - 1, plan.eos_id] = -math.inf
    for n in range(1, logits.shape[1] + 1):
        log_probabilities[:, n - 1] = apply_rules(log_probabilities[:, n - 1], ids, n, plan)
    return log_probabilities


def tokens_of(ids: Iterable[int], config: TransformerConfig) -> Tokens:
    """Return a hypothesis without trailing padding. Padding inside the hypothesis is an error and is not removed."""
    tokens = [int(token) for token in ids]
    while tokens and tokens[-1] == config.pad_id:
        tokens.pop()
    return tuple(tokens)


def score(model: Transformer, source_ids: ndarray, nbest_ids: ndarray, options: Search) -> ndarray:
    """Return the reference's scores [B, N] of the given hypotheses. The score of a missing hypothesis is -inf."""
    config, (batch, count, length) = model.config, nbest_ids.shape
    plan = options.plan(config, source_ids != config.pad_id)
    labels = nbest_ids.reshape(batch * count, length)
    target = np.concatenate([np.full((len(labels), 1), plan.start_id), labels[:, :-1]], 1)
    logits = model(source_ids.repeat(count, 0), target)  # [B * N, L, V]
    log_probabilities = searched_log_probabilities(logits, labels, plan.of(np.arange(batch).repeat(count)))
    is_token = labels != config.pad_id
    right = np.take_along_axis(log_probabilities, labels[..., None], -1)[..., 0]
    lengths = is_token.sum(1)
    scores = np.where(lengths == 0, -math.inf, np.where(is_token, right, 0.0).sum(1) / plan.penalties[lengths])
    return scores.reshape(batch, count)
