"""Comparison of searches: tokens must match unless a near-tie (a decision that depends on rounding errors) occurs.

If a port returns a different hypothesis than the reference, its search made a different decision at some step. To find
this step, the float64 reference computes the best continuations of the prefixes that the port kept at each step. If the
port kept a worse continuation and the difference is at most the rounding noise of the reference in the working dtype,
the decision is a near-tie. A larger difference is a divergence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy import ndarray

from reference_numpy import search
from reference_numpy.transformer import Transformer
from transformer_parity.engine.tensors import relative_error
from transformer_parity.engine.tolerances import EPS, POLICY
from transformer_parity.transformer.decoding.prefixes import Continuations, PrefixScorer, Tokens, score, tokens_of
from transformer_parity.transformer.ports.protocol import Decoded
from transformer_spec.search import Search, SearchPlan


@dataclass(frozen=True)
class Doubt:
    """A decision of a port that differs from the reference's decision.

    Attributes:
        sentence: Row of the batch.
        step: Number of the token; 0 if the decision is about the ranking of finished hypotheses.
        margin: Amount by which the reference's choice is better than the port's choice, as computed by the reference.
            If the decision compares scores, as in the ranking of finished hypotheses, the margin is a difference
            between two scores. Otherwise, it is a difference between two log-probabilities, in nats.
        noise: Largest margin that rounding can explain, in the unit of ``margin``.
        what: Description of the decision.
    """

    sentence: int
    step: int
    margin: float
    noise: float
    what: str

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding explains the decision."""
        return self.margin <= self.noise

    def __str__(self) -> str:
        where = f"sentence {self.sentence}" + (f", token {self.step}" if self.step else "")
        if self.margin == math.inf:  # rounding can't explain the decision
            return f"{where}: {self.what}"
        return f"{where}: {self.what}, margin {self.margin:.1e}, rounding noise {self.noise:.1e}"


def score_tolerance(exact: ndarray, rounded: ndarray | None) -> float:
    """Return the maximum allowed relative error of scores, given the reference's exact and rounded scores."""
    if rounded is None:
        return POLICY["decode"]["float64"]["score"]
    rule = POLICY["decode"]["float32"]
    return rule["ratio"] * relative_error(rounded, exact) + rule["floor_in_eps"] * EPS["float32"]


def differing(ids: ndarray, expected: ndarray, pad_id: int) -> list[int]:
    """Return the sentences for which two searches return different hypotheses or rank them in a different order."""
    width = max(ids.shape[2], expected.shape[2])
    wide, wanted = (
        np.pad(array, ((0, 0), (0, 0), (0, width - array.shape[2])), constant_values=pad_id)
        for array in (ids, expected)
    )
    return np.flatnonzero((wide != wanted).any((1, 2))).tolist()


def summary(doubts: Sequence[Doubt]) -> str:
    """Describe the first decision that rounding doesn't explain or, if there is none, the number of near-ties."""
    if wrong := [doubt for doubt in doubts if not doubt.is_near_tie]:
        return str(wrong[0])
    if not doubts:
        return ""
    largest = max(doubts, key=lambda doubt: doubt.margin)
    return f"{len(doubts)} near-tie{'s' * (len(doubts) > 1)}; {largest}"


def follow(scorer: PrefixScorer, sentence: int, found: Decoded, options: Search) -> list[Doubt]:
    """Follow a port's search for one sentence, and return the decisions that the reference would make differently."""
    config, options = scorer.truth.config, options.of(sentence)
    plan = options.plan(config, (scorer.source != config.pad_id)[None])
    returned = [tokens_of(ids, config) for ids in found.result.nbest_ids[sentence]]
    for tokens in returned:
        if config.pad_id in tokens:
            step = tokens.index(config.pad_id) + 1
            return [Doubt(sentence, step, math.inf, 0.0, f"a hypothesis contains padding before ID {tokens[step]}")]
    if options.beam_size is None:
        return _follow_greedy(scorer, sentence, returned[0], plan)
    if found.result.nbest_scores is None:  # the port returns only the final result of its search
        return _weigh(scorer, sentence, returned[0], options, int(plan.limits[0]))
    alive = [[tokens_of(ids, config) for ids in step[sentence]] for step in found.shown]
    alive = [[tokens for tokens in step if tokens] for step in alive]
    return _BeamFollower(scorer, sentence, plan).follow(alive, [tokens for tokens in returned if tokens])


def explain(
    truth: Transformer,
    rounded: Transformer | None,
    source_ids: ndarray,
    found: Decoded,
    expected: ndarray,
    options: Search,
) -> list[Doubt]:
    """For each sentence with a wrong result, return the decisions that explain why the port's result differs.

    Args:
        truth: The reference in float64.
        rounded: The reference in the working dtype; None if that is float64.
        source_ids: The sentences [B, S].
        found: The port's result.
        expected: The hypotheses of the float64 reference [B, N, L].
        options: The search options.
    """
    doubts: list[Doubt] = []
    if options.seed is not None:  # sampling is compared only in float64, where rounding doesn't affect the samples
        return [
            Doubt(row, 0, math.inf, 0.0, "the port samples different tokens")
            for row in differing(found.result.nbest_ids, expected, truth.config.pad_id)
        ]
    for row in differing(found.result.nbest_ids, expected, truth.config.pad_id):
        own = follow(PrefixScorer(truth, rounded, source_ids[row]), row, found, options)
        doubts += own or [
            Doubt(row, 0, math.inf, 0.0, "the tokens differ, but no decision of the search explains the difference")
        ]
    return doubts


def _follow_greedy(scorer: PrefixScorer, sentence: int, tokens: Tokens, plan: SearchPlan) -> list[Doubt]:
    eos_id, limit, doubts = plan.eos_id, int(plan.limits[0]), []
    for n in range(1, len(tokens) + 1):
        ways = scorer.continuations([tokens[: n - 1]], plan)
        (best, total), *others = ways.best(2)
        if tokens[:n] != best:
            noise = ways.noise([best, tokens[:n], *(other for other, _ in others)])
            said = f"ID {tokens[n - 1]} instead of {best[-1]}"
            doubts.append(Doubt(sentence, n, total - ways.total(tokens[:n]), noise, said))
            if doubts[-1].margin == math.inf:  # the search must not choose this token, so later steps can't be checked
                return doubts
    if eos_id in tokens[:-1] or not (len(tokens) == limit or (tokens[-1:] == (eos_id,) and len(tokens) < limit)):
        doubts.append(
            Doubt(
                sentence,
                len(tokens),
                math.inf,
                0.0,
                "the hypothesis must end at its first EOS token or at the maximum length",
            )
        )
    return doubts


def _weigh(scorer: PrefixScorer, sentence: int, tokens: Tokens, options: Search, limit: int) -> list[Doubt]:
    """Compare the score of a port's hypothesis with the score of the reference's best hypothesis."""
    truth, eos_id = scorer.truth, scorer.truth.config.eos_id
    if eos_id in tokens[:-1] or not tokens or (tokens[-1] != eos_id and len(tokens) != limit):
        return [
            Doubt(
                sentence,
                len(tokens),
                math.inf,
                0.0,
                "the hypothesis must end at its first EOS token or at the maximum length",
            )
        ]
    best = options.run(search, truth, scorer.source[None]).ids[0]
    candidates = [tokens, tokens_of(best, truth.config)]
    ids = np.full((1, 2, max(map(len, candidates))), truth.config.pad_id)
    for row, candidate in zip(ids[0], candidates, strict=True):
        row[: len(candidate)] = candidate
    exact = score(truth, scorer.source[None], ids, options)
    if exact[0, 0] == -math.inf:
        return [Doubt(sentence, 0, math.inf, 0.0, f"{_shortened(tokens)} is returned, but contains a forbidden token")]
    usual = None if scorer.rounded is None else score(scorer.rounded, scorer.source[None], ids, options)
    noise = score_tolerance(exact, usual) * float(np.abs(exact).max())
    margin = float(exact[0, 1] - exact[0, 0])
    what = "below" if margin > 0.0 else "too high for a beam of this size, above"
    return [
        Doubt(sentence, 0, abs(margin), noise, f"the score of {_shortened(tokens)} is {what} the reference's score")
    ]


class _BeamFollower:
    """Repeats a port's beam search with the reference. Each step starts with the beam that the port kept."""

    def __init__(self, scorer: PrefixScorer, sentence: int, plan: SearchPlan) -> None:
        self.scorer = scorer
        self.sentence = sentence
        self.plan = plan
        self.limit = int(plan.limits[0])
        self.doubts: list[Doubt] = []
        self.finished: dict[Tokens, float] = {}  # scores of the finished hypotheses to keep, including near-ties
        self.inside: dict[Tokens, float] = {}  # margin of each hypothesis, in nats; negative outside the beam
        self.noise = 0.0  # largest rounding noise so far

    def follow(self, alive: Sequence[Sequence[Tokens]], returned: Sequence[Tokens]) -> list[Doubt]:
        beam: Sequence[Tokens] = [()]
        for n, kept in enumerate([*alive, []], 1):  # no hypothesis continues after the last step
            if not beam or not all(doubt.is_near_tie for doubt in self.doubts):
                break
            ways = self.scorer.continuations(beam, self.plan)
            best = ways.best(2 * self.plan.beam_size + 1)
            self.noise = max(self.noise, ways.noise([*kept, *(tokens for tokens, _ in best)]))
            # If the rules let the beam shrink, its size is the number of hypotheses that the port kept in the previous
            # step.
            width = len(beam) if self.plan.rules.beam_shrinks and n > 1 else self.plan.beam_size
            last_in = best[min(width, len(best)) - 1][1]
            first_out = best[width][1] if len(best) > width else -math.inf
            self._finish(best, (last_in, first_out), n)
            going_on = self._going_on(ways, best[:width]) if n < self.limit else {}
            if kept:
                self._compare_beam(ways, going_on, kept, (last_in, first_out))
            self._compare_stop(going_on, n, stops=not kept)
            beam = kept
        if all(doubt.is_near_tie for doubt in self.doubts):  # after a wrong decision, the ranking is irrelevant
            self._compare_ranking(returned)
        return self.doubts

    def _penalty(self, length: int) -> float:
        return float(self.plan.penalties[length])

    def _doubt(self, step: int, margin: float, what: str, length: int = 0) -> None:
        """Record a decision. If ``length`` is not 0, the margin is a difference between two scores of this length."""
        noise = self.noise / (self._penalty(length) if length else 1.0)
        self.doubts.append(Doubt(self.sentence, step, margin, noise, what))

    def _going_on(self, ways: Continuations, within: Sequence[tuple[Tokens, float]]) -> dict[Tokens, float]:
        """Return the hypotheses that continue: the best unfinished hypotheses that fit into the beam."""
        if self.plan.rules.beam_shrinks:
            return {tokens: total for tokens, total in within if tokens[-1] != self.plan.eos_id}
        return dict(ways.best(self.plan.beam_size, but=self.plan.eos_id))

    def _finish(self, best: Sequence[tuple[Tokens, float]], edges: tuple[float, float], n: int) -> None:
        """Record the hypotheses that end at this step, if they are in both the beam and the pool up to rounding."""
        last_in, first_out = edges
        ended = [(tokens, total) for tokens, total in best if tokens[-1] == self.plan.eos_id or n == self.limit]
        places, doubtful = len(ended), 0.0
        if self.plan.rules.pool == "first":  # near-ties in earlier steps may determine whether the pool is full
            unsure = [abs(inside) for inside in self.inside.values() if abs(inside) <= self.noise]
            places, doubtful = self.plan.pool_size - len(self.inside), max(unsure, default=0.0)
            left = places + len(unsure)
            if len(ended) > left:
                last_in, first_out = max(last_in, ended[left - 1][1]), max(first_out, ended[left][1])
        for place, (tokens, total) in enumerate(ended):
            if total >= last_in - self.noise:
                inside = total - first_out if total > first_out else total - last_in
                self.finished[tokens] = total / self._penalty(n)
                self.inside[tokens] = min(inside, doubtful) if place >= places and doubtful else inside

    def _compare_beam(
        self, ways: Continuations, going_on: dict[Tokens, float], kept: Sequence[Tokens], edges: tuple[float, float]
    ) -> None:
        n, shrinks = len(kept[0]), self.plan.rules.beam_shrinks
        dropped = [tokens for tokens in going_on if tokens not in kept]
        instead = [tokens for tokens in kept if tokens not in going_on]
        has_ended = any(tokens[-1] == self.plan.eos_id or n >= self.limit for tokens in instead)
        if has_ended or (len(kept) > len(going_on) and not shrinks):
            self._doubt(n, math.inf, "the beam keeps a finished hypothesis")
        elif dropped or instead:
            better = max((going_on[tokens] for tokens in dropped), default=-math.inf)
            worse = min((ways.total(tokens) for tokens in instead), default=math.inf)
            if shrinks:  # the other hypotheses don't affect whether a hypothesis is in the beam
                margin = max(better - edges[1] if dropped else 0.0, edges[0] - worse)
            else:
                margin = better - worse if instead else math.inf
            where = (dropped or instead)[0]
            said = "lacks" if dropped else "contains"
            self._doubt(n, margin, f"the beam {said} ID {where[-1]} after {_shortened(where[:-1])}")

    def _compare_stop(self, going_on: dict[Tokens, float], n: int, *, stops: bool) -> None:
        """Check that the search doesn't stop too early, and that it doesn't stop so late that the result may change."""
        stop = self.plan.rules.stop
        length = n if stop == "current" else self.limit
        attainable = max(going_on.values(), default=-math.inf) / self._penalty(length)
        needed = -math.inf if stop == "first" else attainable  # the search stops if all scores in the pool exceed this
        worst = self._worst_of_pool(-math.inf if stops else self.noise)
        if stops and attainable > worst and not worst > needed:
            self._doubt(n, attainable - worst, "the search stops although it could find a better hypothesis", length)
        elif not stops and stop != "attainable":  # under the rule "attainable", more steps don't change the result
            if worst > needed:
                self._doubt(n, worst - needed, "the search continues although its results are final", length)
            elif self._worst_of_pool(0.0) > needed:
                closest = min(inside for inside in self.inside.values() if inside >= 0.0)
                self._doubt(n, closest, "the search continues although its results may be final")

    def _worst_of_pool(self, least: float) -> float:
        """Return the worst score in the pool, or -inf if the pool isn't full. Ignore margins smaller than ``least``."""
        scores = [score for tokens, score in self.finished.items() if self.inside[tokens] >= least]
        size = self.plan.pool_size
        return sorted(scores, reverse=True)[size - 1] if len(scores) >= size else -math.inf

    def _compare_ranking(self, returned: Sequence[Tokens]) -> None:
        if len(set(returned)) < len(returned):
            self._doubt(0, math.inf, "a hypothesis is returned twice")
        if unknown := [tokens for tokens in returned if tokens not in self.finished]:
            self._doubt(0, math.inf, f"{_shortened(unknown[0])} is returned, but was never in the beam")
        if any(doubt.margin == math.inf for doubt in self.doubts):
            return
        for tokens in returned:
            if self.inside[tokens] < 0.0:
                what = f"{_shortened(tokens)} is finished although it was outside the beam"
                self._doubt(len(tokens), -self.inside[tokens], what)
        scores = [self.finished[tokens] for tokens in returned]
        worst = min(scores, default=-math.inf) if len(scores) == self.plan.num_hypotheses else -math.inf
        for tokens in self.finished.keys() - set(returned):
            better = self.finished[tokens] - worst
            # The port may have ranked this hypothesis too low, or may have dropped it at the edge of the beam.
            if self.inside[tokens] >= 0.0 < better:
                noise = self.noise / self._penalty(len(tokens))
                margin = better if better <= noise else self.inside[tokens]
                what = f"{_shortened(tokens)} is better, but is not returned"
                self._doubt(len(tokens), margin, what, len(tokens) * (better <= noise))
        for tokens, (first, second) in zip(returned, pairwise(scores), strict=False):
            if second > first:
                self._doubt(0, second - first, "the hypotheses are not sorted by score", len(tokens))


def _shortened(tokens: Tokens) -> str:
    return "... " * (len(tokens) > 5) + " ".join(map(str, tokens[-5:]))
