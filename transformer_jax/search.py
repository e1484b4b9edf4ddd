"""Search (Vaswani et al., 2017, section 6.1): greedy search, beam search, samples, and scores of given translations.

B batch, K beam size, P pool of finished hypotheses, V target vocabulary, R = B * K rows of the decoder.
"""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from transformer_jax.fast import top_by_blocks
from transformer_jax.runtime import as_array
from transformer_jax.search_loop import run_search
from transformer_jax.search_rules import apply_rules, within_pool
from transformer_jax.transformer import Transformer, check_model
from transformer_spec.checks import check_integer, check_translations
from transformer_spec.search import OnStep, Scores, Search, SearchPlan, SearchResult, check_start
from transformer_spec.search_rules import SearchRules
from transformer_spec.shapes import Bool, Float, Int


def greedy_search(
    model: Transformer,
    source_ids: Any,
    max_length: int | None = None,
    min_length: int = 1,
    start_id: int | None = None,
    source_mask: Any = None,
    on_step: OnStep | None = None,
    *,
    prefix_ids: Any = None,
    rules: SearchRules | None = None,
    as_numpy: bool = True,
) -> SearchResult:
    """Return the translation that takes the likeliest next token in each step, until it is the EOS token.

    Padding is never generated. If two tokens are equally likely, the lower ID is taken.

    Args:
        model: Model to search with.
        source_ids: Source sentences [B, S], padded with ``config.pad_id``.
        max_length: Maximum number of tokens, including EOS. None uses the length of each source + 50.
        min_length: Minimum number of tokens, including EOS.
        start_id: First token that the decoder reads. None uses ``config.bos_id``.
        source_mask: True if a source position holds a token [B, S]. None derives it from the IDs.
        on_step: Function that is called after each step with the tokens so far [B, 1, n], padded after EOS.
        prefix_ids: First tokens of the hypotheses of each sentence [B, P], without BOS, padded. They add 0 to the
            score, or their log-probability if ``rules.score_forced`` is set.
        rules: Search rules of another program. None uses the paper's search.
        as_numpy: False returns JAX arrays on the model's device instead of NumPy arrays.

    Returns:
        One hypothesis per sentence. Its score is its log-probability.

    Raises:
        TypeError: If IDs, sizes or lengths are not integers, or if the mask is not boolean.
        ValueError: If an argument has the wrong shape or value, or if the model computes NaN.
    """
    check_model(model)
    search = Search(
        max_length=max_length,
        min_length=min_length,
        start_id=start_id,
        rules=SearchRules() if rules is None else rules,
        prefix_ids=prefix_ids,
    )
    return run_search(
        FastGreedy if model.fast else Greedy, model, source_ids, source_mask, search, on_step, as_numpy=as_numpy
    )


def beam_search(
    model: Transformer,
    source_ids: Any,
    beam_size: int = 4,
    length_penalty: float = 0.6,
    max_length: int | None = None,
    min_length: int = 1,
    num_hypotheses: int = 1,
    length_penalty_kind: str = "gnmt",
    start_id: int | None = None,
    source_mask: Any = None,
    on_step: OnStep | None = None,
    *,
    prefix_ids: Any = None,
    rules: SearchRules | None = None,
    as_numpy: bool = True,
) -> SearchResult:
    """Return the best translations that beam search finds.

    Each step considers the ``beam_size`` likeliest continuations. If a continuation ends, with EOS or at the maximum
    length, it is ranked by log-probability divided by length penalty. The search of a sentence stops when no unfinished
    hypothesis can still become one of the best ``num_hypotheses``. Padding is never generated.

    Args:
        model: Model to search with.
        source_ids: Source sentences [B, S], padded with ``config.pad_id``.
        beam_size: Number of unfinished hypotheses per sentence.
        length_penalty: Exponent of the length penalty. 0 ranks by log-probability, which favors short hypotheses.
        max_length: Maximum number of tokens, including EOS. None uses the length of each source + 50.
        min_length: Minimum number of tokens, including EOS.
        num_hypotheses: Number of hypotheses to return per sentence, at most ``beam_size``.
        length_penalty_kind: ``gnmt``, ((5 + n) / 6)^alpha as in the paper, or ``power``, n^alpha.
        start_id: First token that the decoder reads. None uses ``config.bos_id``.
        source_mask: True if a source position holds a token [B, S]. None derives it from the IDs.
        on_step: Function that is called after each step with the unfinished hypotheses [B, K, n], best first.
        prefix_ids: First tokens of the hypotheses of each sentence [B, P], without BOS, padded. They add 0 to the
            score, or their log-probability if ``rules.score_forced`` is set.
        rules: Search rules of another program. None uses the paper's search.
        as_numpy: False returns JAX arrays on the model's device instead of NumPy arrays.

    Returns:
        The best hypotheses of each sentence and their scores, best first.

    Raises:
        TypeError: If IDs, sizes or lengths are not integers, or if the mask is not boolean.
        ValueError: If an argument has the wrong shape or value, or if the model computes NaN.
    """
    check_model(model)
    search = Search(
        beam_size=check_integer("beam_size", beam_size, minimum=1),
        length_penalty=length_penalty,
        max_length=max_length,
        num_hypotheses=num_hypotheses,
        length_penalty_kind=length_penalty_kind,
        min_length=min_length,
        start_id=start_id,
        rules=SearchRules() if rules is None else rules,
        prefix_ids=prefix_ids,
    )
    return run_search(
        FastBeam if model.fast else Beam, model, source_ids, source_mask, search, on_step, as_numpy=as_numpy
    )


def sample(
    model: Transformer,
    source_ids: Any,
    num_samples: int = 1,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    max_length: int | None = None,
    min_length: int = 1,
    start_id: int | None = None,
    source_mask: Any = None,
    on_step: OnStep | None = None,
    *,
    prefix_ids: Any = None,
    rules: SearchRules | None = None,
    as_numpy: bool = True,
) -> SearchResult:
    """Sample translations: draw each next token from the model's distribution until the end symbol is drawn.

    The same seed gives the same samples. A sample depends only on the seed, on its own number, and on the row of its
    sentence in the batch, not on the other sentences.

    Args:
        model: The model.
        source_ids: Source sentences [B, S], padded with ``config.pad_id``.
        num_samples: Number of samples per sentence.
        temperature: Divides the log-probabilities before a token is drawn; values below 1 favour likely tokens.
        top_k: Draw only from the ``top_k`` likeliest tokens (Fan et al., 2018). None uses all tokens.
        top_p: Draw only from the smallest set of likeliest tokens whose probabilities sum to at least ``top_p``
            (Holtzman et al., 2020). Applies after ``top_k``. None uses all tokens.
        seed: Seed of the random numbers, at least 0.
        max_length: Maximum number of tokens to generate, including the end symbol. None uses the source length + 50.
        min_length: Minimum number of tokens to generate, including the end symbol.
        start_id: First token that the decoder reads. None uses ``config.bos_id``.
        source_mask: True at source positions that hold a token [B, S]. None derives the mask from the ids.
        on_step: Called after each step with the samples so far [B, K, n], padded after the end symbol.
        prefix_ids: Tokens that the hypotheses of each sentence begin with [B, P], without the start symbol, padded with
            ``config.pad_id``. They add 0 to the score, or their log-probability if ``rules.score_forced`` is set.
        rules: Rules of other programs, for example banned tokens. None uses the paper's.
        as_numpy: False returns JAX arrays on the model's device instead of NumPy arrays.

    Returns:
        ``num_samples`` hypotheses per sentence, in the order in which they are drawn. A score is the log-probability
        that the model assigns to the sample, before temperature, ``top_k`` and ``top_p``.

    Raises:
        TypeError: If ids, sizes or lengths are not integers, or the mask is not boolean.
        ValueError: If ids or mask have the wrong shape, ids are outside the vocabulary, a setting is out of range,
            lengths contradict each other or the model's positions, or the model computes NaN.
    """
    check_model(model)
    search = Search(
        num_hypotheses=check_integer("num_samples", num_samples, minimum=1),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=check_integer("seed", seed, minimum=0),
        min_length=min_length,
        max_length=max_length,
        start_id=start_id,
        rules=SearchRules() if rules is None else rules,
        prefix_ids=prefix_ids,
    )
    return run_search(Sample, model, source_ids, source_mask, search, on_step, as_numpy=as_numpy)


def score(
    model: Transformer, source_ids: Any, target_ids: Any, start_id: int | None = None, source_mask: Any = None
) -> Scores:
    """Return the log-probabilities that the model assigns to given translations, for example to rerank them.

    Dropout is off. To score each token of the hypotheses of a search, pass its ``nbest_ids``.

    Args:
        model: The model.
        source_ids: Source sentences [B, S], padded with ``config.pad_id``.
        target_ids: One translation per sentence [B, T], or N of them [B, N, T], without the start symbol, including
            ``config.eos_id``, padded with ``config.pad_id``.
        start_id: First token that the decoder reads. None uses ``config.bos_id``.
        source_mask: True at source positions that hold a token [B, S]. None derives the mask from the ids.

    Returns:
        The log-probability of each translation [B] or [B, N], and of each of its tokens [B, T] or [B, N, T].

    Raises:
        TypeError: If ids are not integers, or the mask is not boolean.
        ValueError: If ids or mask have the wrong shape, ids are outside the vocabulary, or there are more tokens than
            the model has positions.
    """
    check_model(model)
    model = jax.tree.map(lambda x: x, model)  # a copy, so that the caller's keeps its mode
    model.eval()
    source_ids, source_mask = model._take("source", source_ids, source_mask)  # [B, S]
    target_ids = as_array("target_ids", target_ids)
    check_translations(target_ids.shape, len(source_ids))
    labels, _ = model._take("target", target_ids.reshape(-1, target_ids.shape[-1]), None)  # [B * N, T]
    start = jnp.full_like(labels[:, :1], check_start(start_id, model.config))
    source_ids, source_mask = (x.repeat(len(labels) // len(x), 0) for x in (source_ids, source_mask))
    scores = model(source_ids, jnp.concatenate([start, labels[:, :-1]], 1), source_mask)  # [B * N, T, V]
    scores = jax.nn.log_softmax(scores.astype(jnp.promote_types(scores.dtype, jnp.float32)))
    tokens = jnp.take_along_axis(scores, labels[:, :, None], -1)[:, :, 0]
    is_token = labels != model.config.pad_id
    tokens, is_token = (x.reshape(target_ids.shape) for x in (jnp.where(is_token, tokens, 0.0), is_token))
    return Scores(jnp.where(is_token.any(-1), tokens.sum(-1), -inf), tokens)


def top(values: Float[Array, "B N"], count: int) -> tuple[Float[Array, "B K"], Int[Array, "B K"]]:
    """Return the largest values of each row and their indices. Of equal values, the first comes first."""
    values = jnp.where(jnp.isnan(values), inf, values)  # NaN comes first, so that it is noticed
    best, index = jax.lax.top_k(values, count)  # a list
    return best, index


class Greedy(NamedTuple):
    """How far greedy search has come; K is 1."""

    tokens: Int[Array, "B K"]  # what is read next
    ids: Int[Array, "B K capacity"]
    scores: Float[Array, "B K"]
    unfinished: Bool[Array, "B K"]

    top = staticmethod(top)  # type: ignore[misc]  # no field

    @classmethod
    def start(cls, plan: SearchPlan) -> Greedy:
        """Return the state before the first step: no hypothesis has a token."""
        size = [len(plan.limits), plan.beam_size]
        return cls(  # type: ignore[call-arg]
            tokens=jnp.full(size, plan.start_id, jnp.int32),
            ids=jnp.full([*size, plan.capacity], plan.pad_id, jnp.int32),
            scores=jnp.zeros(size, plan.penalties.dtype),
            unfinished=jnp.broadcast_to((plan.limits > 0)[:, None], size),
        )

    def step(self, logits: Float[Array, "R V"], n: Any, plan: SearchPlan) -> tuple[Greedy, None]:
        """Return the state after the n-th token of each unfinished hypothesis, given the logits; no row moves."""
        log_probabilities = _next_log_probabilities(logits, self.ids, n, plan)  # [R, V]
        index = self.choose(log_probabilities, n, plan)
        best = jnp.take_along_axis(log_probabilities, index[:, None], 1).reshape(self.scores.shape)  # NaN stays NaN
        tokens = jnp.where(self.unfinished, index.reshape(self.scores.shape), plan.pad_id)
        ids = jax.lax.dynamic_update_index_in_dim(self.ids, tokens, n - 1, axis=2)
        scores = self.scores + jnp.where(self.unfinished, best, 0.0)
        unfinished = self.unfinished & (tokens != plan.eos_id) & (n < plan.limits[:, None])
        return self._replace(tokens=tokens, ids=ids, scores=scores, unfinished=unfinished), None

    def choose(self, log_probabilities: Float[Array, "R V"], n: Any, plan: SearchPlan) -> Int[Array, " R"]:
        """Return the likeliest token of each row; of equally likely ones, the first."""
        return self.top(log_probabilities, 1)[1][:, 0]

    def goes_on(self) -> Any:
        """Whether any sentence is unfinished."""
        return self.unfinished.any()

    def best(self) -> tuple[Int[Array, "B K capacity"], Float[Array, "B K"]]:
        """Return the hypotheses of each sentence, and their scores."""
        return self.ids, self.scores


class Sample(Greedy):
    """How far sampling has come."""

    def choose(self, log_probabilities: Float[Array, "R V"], n: Any, plan: SearchPlan) -> Int[Array, " R"]:
        """Return the token of each row that its random number falls on, likely tokens first."""
        values, index = top(log_probabilities, log_probabilities.shape[1])  # [R, V]
        is_in = jnp.arange(values.shape[1]) < plan.top_k
        shares = jax.nn.softmax(jnp.where(is_in, values / plan.temperature, -inf))
        shares = jnp.where(shares.cumsum(-1) - shares < plan.top_p, shares, 0.0)
        sums = shares.cumsum(-1)
        drawn = plan.uniforms[:, :, n - 1].reshape(-1, 1) * sums[:, -1:]  # [R, 1]
        rank = jnp.minimum((sums <= drawn).sum(-1), (shares > 0.0).sum(-1) - 1)  # a product may round up to the sum
        return jnp.take_along_axis(index, rank[:, None], 1)[:, 0]


class Beam(NamedTuple):
    """How far beam search has come."""

    tokens: Int[Array, "B K"]  # what is read next
    ids: Int[Array, "B K capacity"]  # padding where no hypothesis is
    alive: Float[Array, "B K"]  # log-probabilities; -inf is no hypothesis
    finished_ids: Int[Array, "B P capacity"]
    finished: Float[Array, "B P"]  # scores, best first

    top = staticmethod(top)  # type: ignore[misc]  # no field

    @classmethod
    def start(cls, plan: SearchPlan) -> Beam:
        """Return the state before the first step: there is one hypothesis of each sentence, the empty one."""
        shape, kept = [len(plan.limits), plan.beam_size], [len(plan.limits), plan.pool_size]
        is_empty_one = (plan.limits > 0)[:, None] & (jnp.arange(plan.beam_size) == 0)
        return cls(  # type: ignore[call-arg]
            tokens=jnp.full(shape, plan.start_id, jnp.int32),
            ids=jnp.full([*shape, plan.capacity], plan.pad_id, jnp.int32),
            alive=jnp.where(is_empty_one, jnp.zeros(shape, plan.penalties.dtype), -inf),
            finished_ids=jnp.full([*kept, plan.capacity], plan.pad_id, jnp.int32),
            finished=jnp.full(kept, -inf, plan.penalties.dtype),
        )

    def step(self, logits: Float[Array, "R V"], n: Any, plan: SearchPlan) -> tuple[Beam, Int[Array, " R"]]:
        """Return the state after the n-th token of each hypothesis, given the logits, and the row each goes on from."""
        (batch, beam_size), pool_size, vocabulary = self.alive.shape, self.finished.shape[1], logits.shape[1]
        sentence = jnp.arange(batch, dtype=jnp.int32)[:, None]
        # 1. Let each hypothesis go on in every way; twice the beam is enough, since each can end in one way only.
        log_probabilities = _next_log_probabilities(logits, self.ids, n, plan)  # [R, V]
        totals = self.alive[:, :, None] + log_probabilities.reshape(batch, beam_size, vocabulary)  # [B, K, V]
        best, index = self.top(totals.reshape(batch, -1), 2 * beam_size)  # [B, 2K]
        if plan.rules.beam_shrinks:
            best = within_pool(best, self.finished)
        parent, token = index // vocabulary, index % vocabulary
        candidates = self.ids[sentence, parent]  # [B, 2K, capacity]
        candidates = jax.lax.dynamic_update_index_in_dim(candidates, token, n - 1, axis=2)
        ends = (token == plan.eos_id) | (plan.limits == n)[:, None]
        # 2. Of those within the beam that end, keep the best.
        ended = jnp.where(ends, best / plan.penalties[n], -inf)[:, :beam_size]
        if plan.rules.pool == "first":
            ended = within_pool(ended, self.finished)
        finished, rank = self.top(jnp.concatenate([self.finished, ended], 1), pool_size)  # [B, P]
        finished_ids = jnp.concatenate([self.finished_ids, candidates[:, :beam_size]], 1)[sentence, rank]
        # 3. Go on with the best that do not end, unless none of them can still be among the best.
        alive, rank = self.top(jnp.where(~ends, best, -inf), beam_size)  # [B, K]
        longest = n if plan.rules.stop == "current" else plan.limits
        attainable = alive[:, 0] / plan.penalties[longest]  # if all its further tokens were certain
        is_over = finished[:, -1] >= attainable
        if plan.rules.stop == "first":
            is_over = finished[:, -1] != -inf
        alive = jnp.where(~is_over[:, None], alive, -inf)
        ids = jnp.where((alive != -inf)[:, :, None], candidates[sentence, rank], plan.pad_id)
        tokens, parent = token[sentence, rank], parent[sentence, rank]
        rows = (sentence * beam_size + parent).reshape(-1)
        state = self._replace(tokens=tokens, ids=ids, alive=alive, finished_ids=finished_ids, finished=finished)
        return state, rows

    def goes_on(self) -> Any:
        """Whether any hypothesis is unfinished."""
        return (self.alive != -inf).any()

    def best(self) -> tuple[Int[Array, "B P capacity"], Float[Array, "B P"]]:
        """Return the best finished hypotheses of each sentence, best first, and their scores."""
        return self.finished_ids, self.finished


class FastGreedy(Greedy):
    """Greedy search with a faster choice of the best token."""

    top = staticmethod(top_by_blocks)


class FastBeam(Beam):
    """Beam search with a faster choice of the best continuations."""

    top = staticmethod(top_by_blocks)


def _next_log_probabilities(logits, ids, n, plan):
    """Return the log-probability of each next token [R, V], with -inf for tokens that are not allowed."""
    log_probabilities = jax.nn.log_softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)))
    token = jnp.arange(logits.shape[1])
    forbidden = (token == plan.pad_id) | ((n < plan.min_length) & (token == plan.eos_id))
    return apply_rules(jnp.where(~forbidden, log_probabilities, -inf), ids, n, plan)
