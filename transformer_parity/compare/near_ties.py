"""Decoding, compared: the same tokens, or a decision that rounding may turn either way.

A search that returns another hypothesis has decided differently somewhere. It is followed step by step: the float64
reference finds the best continuations of the port's own prefixes. Where the port kept a worse one, within the rounding
noise that the reference itself shows in that dtype, it is a near-tie. Anything larger is a divergence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy import ndarray

from reference_numpy import search
from reference_numpy.config import TransformerConfig
from reference_numpy.functional import log_softmax
from reference_numpy.transformer import Transformer
from transformer_parity.compare.tolerances import EPS, POLICY, relative_error
from transformer_parity.ports.protocol import Decoded, SearchOptions

Tokens = tuple[int, ...]  # a hypothesis or its beginning, without start symbol and padding


@dataclass(frozen=True)
class Doubt:
    """A decision that the reference would have taken otherwise.

    Attributes:
        sentence: The row of the batch.
        step: After how many tokens; 0 where finished hypotheses were ranked.
        margin: By how much the reference prefers its own choice: log-probability in nats, or score where hypotheses
            are ranked.
        noise: How much rounding may amount to here, likewise.
        what: The decision in words.
    """

    sentence: int
    step: int
    margin: float
    noise: float
    what: str

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.margin <= self.noise

    def __str__(self) -> str:
        where = f"sentence {self.sentence}" + (f", token {self.step}" if self.step else "")
        return f"{where}: {self.what}, margin {self.margin:.1e}, rounding noise {self.noise:.1e}"


class Continuations:
    """Some prefixes, each with every next token but padding.

    Args:
        prefixes: P hypotheses that have not ended.
        exact: The log-probabilities of the prefixes with each next token in float64, [P, V].
        rounded: Likewise, in ``dtype``, the working dtype.
    """

    def __init__(self, prefixes: Sequence[Tokens], exact: ndarray, rounded: ndarray, dtype: str) -> None:
        self.rows = {prefix: row for row, prefix in enumerate(prefixes)}
        self.prefixes = prefixes
        self.exact = exact
        self.rounded = rounded
        self.dtype = dtype
        self._order = np.argsort(-exact, axis=None, kind="stable")

    def best(self, count: int, but: int | None = None) -> list[tuple[Tokens, float]]:
        """Return the likeliest continuations, and how likely they are, but not those that end with some token."""
        found: list[tuple[Tokens, float]] = []
        for index in self._order.tolist():
            row, token = divmod(index, self.exact.shape[1])
            if len(found) == count or self.exact[row, token] == -math.inf:
                break
            if token != but:
                found.append(((*self.prefixes[row], token), float(self.exact[row, token])))
        return found

    def total(self, tokens: Tokens) -> float:
        """Return the log-probability of a continuation; -inf if it is none."""
        row = self.rows.get(tokens[:-1])
        return -math.inf if row is None else float(self.exact[row, tokens[-1]])

    def noise(self, candidates: Iterable[Tokens]) -> float:
        """Return how many nats rounding may amount to among some continuations: what the reference itself shows."""
        at = [(self.rows[tokens[:-1]], tokens[-1]) for tokens in candidates if tokens[:-1] in self.rows]
        exact = np.array([self.exact[place] for place in at])
        largest = np.abs(exact).max(initial=0.0)
        if self.dtype == "float64":
            return POLICY["decode"]["float64"]["tie"] * largest
        rule = POLICY["decode"]["float32"]
        error = np.abs(np.array([self.rounded[place] for place in at]) - exact).max(initial=0.0)
        return rule["ratio"] * error + rule["floor_in_eps"] * EPS["float32"] * largest


@dataclass
class PrefixScorer:
    """The reference, asked about the prefixes of one sentence.

    Args:
        truth: The reference in float64.
        rounded: Likewise, in the working dtype; None where that is float64.
        source: The ids of the sentence, padded.
    """

    truth: Transformer
    rounded: Transformer | None
    source: ndarray
    _memory: dict[int, ndarray] = field(default_factory=dict)

    def continuations(self, prefixes: Sequence[Tokens]) -> Continuations:
        """Return every way in which some prefixes can go on."""
        exact = self._totals(self.truth, prefixes)
        rounded = exact if self.rounded is None else self._totals(self.rounded, prefixes)
        return Continuations(prefixes, exact, rounded, "float64" if self.rounded is None else "float32")

    def _totals(self, model: Transformer, prefixes: Sequence[Tokens]) -> ndarray:
        if id(model) not in self._memory:
            self._memory[id(model)] = model.encode(self.source[None])
        target = np.array([[model.config.bos_id, *prefix] for prefix in prefixes])
        memory = self._memory[id(model)].repeat(len(target), 0)
        logits = model.decode(target, memory, self.source[None].repeat(len(target), 0))
        log_probabilities = log_softmax(logits)  # [P, n, V]
        so_far = np.take_along_axis(log_probabilities[:, :-1], target[:, 1:, None], -1)[..., 0].sum(1)
        totals = np.asarray(so_far[:, None] + log_probabilities[:, -1], np.float64)
        totals[:, model.config.pad_id] = -math.inf
        return totals


def tokens_of(ids: Iterable[int], config: TransformerConfig) -> Tokens:
    """Return a hypothesis without the padding behind it; padding inside would be a mistake, and stays."""
    tokens = [int(token) for token in ids]
    while tokens and tokens[-1] == config.pad_id:
        tokens.pop()
    return tuple(tokens)


def score(model: Transformer, source_ids: ndarray, nbest_ids: ndarray, options: SearchOptions) -> ndarray:
    """Return the scores that the reference gives hypotheses that are known, [B, N]; -inf where there is none."""
    config, (batch, count, length) = model.config, nbest_ids.shape
    labels = nbest_ids.reshape(batch * count, length)
    target = np.concatenate([np.full((len(labels), 1), config.bos_id), labels[:, :-1]], 1)
    log_probabilities = log_softmax(model(source_ids.repeat(count, 0), target))  # [B * N, L, V]
    is_token = labels != config.pad_id
    right = np.take_along_axis(log_probabilities, labels[..., None], -1)[..., 0]
    lengths = is_token.sum(1)
    penalties = np.array([options.penalty(length) if length else 1.0 for length in lengths.tolist()])
    scores = np.where(lengths == 0, -math.inf, np.where(is_token, right, 0.0).sum(1) / penalties)
    return scores.reshape(batch, count)


def score_tolerance(exact: ndarray, rounded: ndarray | None) -> float:
    """Return the largest relative error allowed to scores, from the reference's in float64 and in the working dtype."""
    if rounded is None:
        return POLICY["decode"]["float64"]["score"]
    rule = POLICY["decode"]["float32"]
    return rule["ratio"] * relative_error(rounded, exact) + rule["floor_in_eps"] * EPS["float32"]


def differing(ids: ndarray, expected: ndarray, pad_id: int) -> list[int]:
    """Return the sentences of which two searches do not return the same hypotheses in the same order."""
    width = max(ids.shape[2], expected.shape[2])
    wide, wanted = (
        np.pad(array, ((0, 0), (0, 0), (0, width - array.shape[2])), constant_values=pad_id)
        for array in (ids, expected)
    )
    return np.flatnonzero((wide != wanted).any((1, 2))).tolist()


def summary(doubts: Sequence[Doubt]) -> str:
    """Return the first decision that rounding does not explain, or else how many it does; empty if there is none."""
    if wrong := [doubt for doubt in doubts if not doubt.is_near_tie]:
        return str(wrong[0])
    if not doubts:
        return ""
    largest = max(doubts, key=lambda doubt: doubt.margin)
    return f"{len(doubts)} near-tie{'s' * (len(doubts) > 1)}; {largest}"


def follow(scorer: PrefixScorer, sentence: int, found: Decoded, options: SearchOptions) -> list[Doubt]:
    """Return every decision of a port's search of one sentence that the reference would have taken otherwise."""
    config = scorer.truth.config
    limit = options.limit(int((scorer.source != config.pad_id).sum()), config)
    returned = [tokens_of(ids, config) for ids in found.result.nbest_ids[sentence]]
    if options.beam_size is None:
        return _follow_greedy(scorer, sentence, returned[0], limit)
    if found.result.nbest_scores is None:  # a port that is not asked for more than what came out of its beam
        return _weigh(scorer, sentence, returned[0], options, limit)
    alive = [[tokens_of(ids, config) for ids in step[sentence]] for step in found.shown]
    alive = [[tokens for tokens in step if tokens] for step in alive]
    return _BeamFollower(scorer, sentence, options, limit).follow(alive, [tokens for tokens in returned if tokens])


def explain(
    truth: Transformer,
    rounded: Transformer | None,
    source_ids: ndarray,
    found: Decoded,
    expected: ndarray,
    options: SearchOptions,
) -> list[Doubt]:
    """Return why a port does not return what the reference does, for every such sentence.

    Args:
        truth: The reference in float64.
        rounded: The reference in the working dtype; None where that is float64.
        source_ids: The sentences [B, S].
        found: The result of the port.
        expected: The hypotheses of the reference in float64, [B, N, L].
        options: How was searched.
    """
    doubts: list[Doubt] = []
    for row in differing(found.result.nbest_ids, expected, truth.config.pad_id):
        own = follow(PrefixScorer(truth, rounded, source_ids[row]), row, found, options)
        doubts += own or [Doubt(row, 0, math.inf, 0.0, "it returns something else, and no decision explains it")]
    return doubts


def _follow_greedy(scorer: PrefixScorer, sentence: int, tokens: Tokens, limit: int) -> list[Doubt]:
    eos_id, doubts = scorer.truth.config.eos_id, []
    for n in range(1, len(tokens) + 1):
        ways = scorer.continuations([tokens[: n - 1]])
        (best, total), *others = ways.best(2)
        if tokens[:n] != best:
            noise = ways.noise([best, tokens[:n], *(other for other, _ in others)])
            said = f"{tokens[n - 1]} where the reference says {best[-1]}"
            doubts.append(Doubt(sentence, n, total - ways.total(tokens[:n]), noise, said))
    if eos_id in tokens[:-1] or not (len(tokens) == limit or (tokens[-1:] == (eos_id,) and len(tokens) < limit)):
        doubts.append(Doubt(sentence, len(tokens), math.inf, 0.0, "the hypothesis does not end where it should"))
    return doubts


def _weigh(scorer: PrefixScorer, sentence: int, tokens: Tokens, options: SearchOptions, limit: int) -> list[Doubt]:
    """Compare the score of a hypothesis with that of the one which the reference returns."""
    truth, eos_id = scorer.truth, scorer.truth.config.eos_id
    if eos_id in tokens[:-1] or not tokens or (tokens[-1] != eos_id and len(tokens) != limit):
        return [Doubt(sentence, len(tokens), math.inf, 0.0, "the hypothesis does not end where it should")]
    best = options.search(search, truth, scorer.source[None]).ids[0]
    candidates = [tokens, tokens_of(best, truth.config)]
    ids = np.full((1, 2, max(map(len, candidates))), truth.config.pad_id)
    for row, candidate in zip(ids[0], candidates, strict=True):
        row[: len(candidate)] = candidate
    exact = score(truth, scorer.source[None], ids, options)
    usual = None if scorer.rounded is None else score(scorer.rounded, scorer.source[None], ids, options)
    noise = score_tolerance(exact, usual) * float(np.abs(exact).max())
    margin = float(exact[0, 1] - exact[0, 0])
    what = "less" if margin > 0.0 else "more, so that it was not found by such a beam"
    return [Doubt(sentence, 0, abs(margin), noise, f"{_shortened(tokens)} is returned, and scores {what}")]


class _BeamFollower:
    """Goes through a beam search beside a port, always on from the port's own beam."""

    def __init__(self, scorer: PrefixScorer, sentence: int, options: SearchOptions, limit: int) -> None:
        self.scorer = scorer
        self.eos_id = scorer.truth.config.eos_id
        self.sentence = sentence
        self.options = options
        self.limit = limit
        self.beam_size = options.beam_size or 1
        self.doubts: list[Doubt] = []
        self.finished: dict[Tokens, float] = {}  # the score of each hypothesis that the port may have finished
        self.inside: dict[Tokens, float] = {}  # by how many nats it is within the beam; below zero: only by rounding
        self.noise = 0.0  # the largest so far

    def follow(self, alive: Sequence[Sequence[Tokens]], returned: Sequence[Tokens]) -> list[Doubt]:
        beam: Sequence[Tokens] = [()]
        for n, kept in enumerate([*alive, []], 1):  # behind the last step, nothing goes on
            if not beam or not all(doubt.is_near_tie for doubt in self.doubts):
                break
            ways = self.scorer.continuations(beam)
            best = ways.best(2 * self.beam_size + 1)
            self.noise = max(self.noise, ways.noise([*kept, *(tokens for tokens, _ in best)]))
            self._finish(best, n)
            going_on = dict(ways.best(self.beam_size, but=self.eos_id)) if n < self.limit else {}
            if kept:
                self._compare_beam(ways, going_on, kept, n)
            else:
                self._compare_stop(going_on, n)
            beam = kept
        if all(doubt.is_near_tie for doubt in self.doubts):  # what a mistake led to is of no interest
            self._compare_ranking(returned)
        return self.doubts

    def _doubt(self, step: int, margin: float, what: str, length: int = 0) -> None:
        """Note a decision; about scores, if the length of the hypothesis is given."""
        noise = self.noise / (self.options.penalty(length) if length else 1.0)
        self.doubts.append(Doubt(self.sentence, step, margin, noise, what))

    def _finish(self, best: Sequence[tuple[Tokens, float]], n: int) -> None:
        """Note what ends here, if it is within the beam for certain or by rounding."""
        last_in = best[min(self.beam_size, len(best)) - 1][1]
        first_out = best[self.beam_size][1] if len(best) > self.beam_size else -math.inf
        for tokens, total in best:
            if (tokens[-1] == self.eos_id or n == self.limit) and total >= last_in - self.noise:
                self.finished[tokens] = total / self.options.penalty(n)
                self.inside[tokens] = total - first_out if total > first_out else total - last_in

    def _compare_beam(self, ways: Continuations, going_on: dict[Tokens, float], kept: Sequence[Tokens], n: int) -> None:
        dropped = [tokens for tokens in going_on if tokens not in kept]
        instead = [tokens for tokens in kept if tokens not in going_on]
        if any(tokens[-1] == self.eos_id or n >= self.limit for tokens in instead) or len(kept) > len(going_on):
            self._doubt(n, math.inf, "the beam keeps what has ended")
        elif dropped:
            better = max(going_on[tokens] for tokens in dropped)
            worse = min((ways.total(tokens) for tokens in instead), default=-math.inf)
            self._doubt(n, better - worse, f"the beam lacks {dropped[0][-1]} after {_shortened(dropped[0][:-1])}")

    def _compare_stop(self, going_on: dict[Tokens, float], n: int) -> None:
        """Check that nothing could have become better."""
        wanted = self.options.num_hypotheses
        scores = sorted(self.finished.values(), reverse=True)
        worst = scores[wanted - 1] if len(scores) >= wanted else -math.inf
        attainable = max(going_on.values(), default=-math.inf) / self.options.penalty(self.limit)
        if attainable > worst:
            self._doubt(n, attainable - worst, "the search stops, though a better hypothesis may come", self.limit)

    def _compare_ranking(self, returned: Sequence[Tokens]) -> None:
        if len(set(returned)) < len(returned):
            self._doubt(0, math.inf, "a hypothesis is returned twice")
        if unknown := [tokens for tokens in returned if tokens not in self.finished]:
            self._doubt(0, math.inf, f"{_shortened(unknown[0])} is returned, and never was in the beam")
        if any(doubt.margin == math.inf for doubt in self.doubts):
            return
        for tokens in returned:
            if self.inside[tokens] < 0.0:
                what = f"{_shortened(tokens)} ends, though not within the beam"
                self._doubt(len(tokens), -self.inside[tokens], what)
        scores = [self.finished[tokens] for tokens in returned]
        worst = min(scores, default=-math.inf) if len(scores) == self.options.num_hypotheses else -math.inf
        for tokens in self.finished.keys() - set(returned):
            better = self.finished[tokens] - worst
            if self.inside[tokens] >= 0.0 < better:  # left out by its rank, or by the edge of the beam
                noise = self.noise / self.options.penalty(len(tokens))
                margin = better if better <= noise else self.inside[tokens]
                what = f"{_shortened(tokens)} is better, and is not returned"
                self._doubt(len(tokens), margin, what, len(tokens) * (better <= noise))
        for tokens, (first, second) in zip(returned, pairwise(scores), strict=False):
            if second > first:
                self._doubt(0, second - first, "the hypotheses are not in the order of their scores", len(tokens))


def _shortened(tokens: Tokens) -> str:
    return "... " * (len(tokens) > 5) + " ".join(map(str, tokens[-5:]))
