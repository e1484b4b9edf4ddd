"""Search (Vaswani et al., 2017, section 6.1): greedy search, beam search, sampling, and scoring of given translations.

Axes: B batch, K beam size, P pool of finished hypotheses, V target vocabulary, R = B * K rows of the decoder.
"""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from tensorflow import Tensor

from transformer_spec.checks import check_integer, check_translations, to_array
from transformer_spec.search import OnStep, Scores, Search, SearchPlan, SearchResult, check_start
from transformer_spec.search_rules import SearchRules
from transformer_spec.shapes import Bool, Float, Int
from transformer_tf.compilation import check_call
from transformer_tf.fast import top_by_blocks
from transformer_tf.search_loop import run_search
from transformer_tf.search_rules import apply_rules, within_pool
from transformer_tf.transformer import Transformer


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
    """Return the translation that greedy search finds by choosing the most likely token in each step, until EOS.

    Padding is never generated. Ties go to the lower token ID. The score is the log-probability in nats.

    Args:
        model: Model to search with.
        source_ids: Source token IDs [B, S], padded with ``config.pad_id``.
        max_length: Maximum number of tokens, including EOS. By default, ``rules`` limits it to the source length + 50.
        min_length: Minimum number of tokens, including EOS.
        start_id: First token that the decoder reads. If None, ``config.bos_id`` is used.
        source_mask: True for source positions that contain a token [B, S]. If None, it is derived from ``source_ids``.
        on_step: Function that is called after each step with the tokens so far [B, 1, n], padded after EOS.
        prefix_ids: First tokens of each hypothesis, without BOS, as a padded array [B, P]. They don't contribute to the
            score unless ``rules.score_forced`` is True. If None, no prefix is used.
        rules: Search rules, such as ``SearchRules.preset("hf")``. If None, the paper's rules are used.
        as_numpy: If True, return NumPy arrays. If False, return tensors on the model's device.

    Raises:
        TypeError: If IDs, sizes, or lengths are not integers, or the mask is not boolean.
        ValueError: If an argument has an invalid shape or value, or the model computes NaN.
        RuntimeError: If the function is called in a ``tf.function``.
    """
    check_call("greedy_search", model)
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

    Each step extends every unfinished hypothesis by every token and considers the ``beam_size`` most likely extensions.
    If an extension ends with EOS or reaches the maximum length, it is ranked by its log-probability divided by the
    length penalty. The search keeps the ``beam_size`` most likely unfinished extensions. The search of a sequence stops
    when no unfinished hypothesis can become one of the best ``num_hypotheses``. Among extensions, ties go to the
    extension of the better hypothesis, then to the lower token ID. Among finished hypotheses, ties go to the hypothesis
    that finished earlier. Padding is never generated.

    Args:
        model: Model to search with.
        source_ids: Source token IDs [B, S], padded with ``config.pad_id``.
        beam_size: Number of unfinished hypotheses to keep per sequence. It may exceed the vocabulary size.
        length_penalty: Exponent alpha of the length penalty. If it is 0, short hypotheses have an advantage.
        max_length: Maximum number of tokens, including EOS. By default, ``rules`` limits it to the source length + 50.
        min_length: Minimum number of tokens, including EOS.
        num_hypotheses: Number of hypotheses to return per sequence, at most ``beam_size``.
        length_penalty_kind: Penalty for n tokens: ((5 + n) / 6)^alpha for ``gnmt`` (the paper), n^alpha for ``power``.
        start_id: First token that the decoder reads. If None, ``config.bos_id`` is used.
        source_mask: True for source positions that contain a token [B, S]. If None, it is derived from ``source_ids``.
        on_step: Function that is called after each step with the unfinished hypotheses [B, K, n], best first.
        prefix_ids: First tokens of each hypothesis, without BOS, as a padded array [B, P]. They don't contribute to the
            score unless ``rules.score_forced`` is True. If None, no prefix is used.
        rules: Search rules, such as ``SearchRules.preset("hf")``. If None, the paper's rules are used.
        as_numpy: If True, return NumPy arrays. If False, return tensors on the model's device.

    Returns:
        The best hypotheses of each sequence and their scores, best first.

    Raises:
        TypeError: If IDs, sizes, or lengths are not integers, or the mask is not boolean.
        ValueError: If an argument has an invalid shape or value, or the model computes NaN.
        RuntimeError: If the function is called in a ``tf.function``.
    """
    check_call("beam_search", model)
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
    """Return translations that are sampled token by token from the model's distribution, until EOS.

    The random numbers of a sample depend only on the seed, the index of the sample, and the row of its sequence.

    Args:
        model: Model to search with.
        source_ids: Source token IDs [B, S], padded with ``config.pad_id``.
        num_samples: Number of samples per sequence.
        temperature: Divisor of the log-probabilities. Values below 1 favor likely tokens.
        top_k: Number of most likely tokens to sample from (Fan et al., 2018). If None, all tokens are used.
        top_p: Sample only from the smallest set of most likely tokens whose total probability is at least ``top_p``
            (Holtzman et al., 2020). ``top_k`` is applied first. If None, all tokens are used.
        seed: Seed for the random numbers. It must be at least 0.
        max_length: Maximum number of tokens, including EOS. By default, ``rules`` limits it to the source length + 50.
        min_length: Minimum number of tokens, including EOS.
        start_id: First token that the decoder reads. If None, ``config.bos_id`` is used.
        source_mask: True for source positions that contain a token [B, S]. If None, it is derived from ``source_ids``.
        on_step: Function that is called after each step with the samples so far [B, K, n], padded after EOS.
        prefix_ids: First tokens of each hypothesis, without BOS, as a padded array [B, P]. They don't contribute to the
            score unless ``rules.score_forced`` is True. If None, no prefix is used.
        rules: Search rules, such as ``SearchRules.preset("hf")``. If None, the paper's rules are used.
        as_numpy: If True, return NumPy arrays. If False, return tensors on the model's device.

    Returns:
        ``num_samples`` hypotheses per sequence, in the order in which they are sampled. A score is the log-probability
        in nats that the model assigns to the sample, before ``temperature``, ``top_k``, and ``top_p`` are applied.

    Raises:
        TypeError: If IDs, sizes, or lengths are not integers, or the mask is not boolean.
        ValueError: If an argument has an invalid shape or value, or the model computes NaN.
        RuntimeError: If the function is called in a ``tf.function``.
    """
    check_call("sample", model)
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
    """Return the log-probabilities in nats that the model assigns to given translations, for example to rerank them.

    To score each token of the hypotheses of a search, pass ``nbest_ids`` of the search result. Dropout is off.

    Args:
        model: Model to score with.
        source_ids: Source token IDs [B, S], padded with ``config.pad_id``.
        target_ids: One translation per sequence [B, T], or N translations per sequence [B, N, T]. They include EOS but
            not BOS, and are padded with ``config.pad_id``.
        start_id: First token that the decoder reads. If None, ``config.bos_id`` is used.
        source_mask: True for source positions that contain a token [B, S]. If None, it is derived from ``source_ids``.

    Returns:
        The log-probability of each translation [B] or [B, N], and of each of its tokens [B, T] or [B, N, T].

    Raises:
        TypeError: If the IDs are not integers, or the mask is not boolean.
        ValueError: If the IDs or the mask have the wrong shape, an ID is outside the vocabulary, or a translation is
            too long.
        RuntimeError: If the function is called in a ``tf.function``.
    """
    check_call("score", model)
    source_ids, source_mask = model._take("source", source_ids, source_mask)  # [B, S]
    target_ids = to_array("target_ids", target_ids)
    check_translations(target_ids.shape, len(source_ids))
    labels, _ = model._take("target", target_ids.reshape(-1, target_ids.shape[-1]), None)  # [B * N, T]
    start = tf.fill([len(labels), 1], check_start(start_id, model.config))
    source_ids, source_mask = (tf.repeat(x, len(labels) // len(x), 0) for x in (source_ids, source_mask))
    scores = model(source_ids, tf.concat([start, labels[:, :-1]], 1), source_mask, training=False)  # [B * N, T, V]
    scores = tf.nn.log_softmax(tf.cast(scores, keras.backend.result_type(scores.dtype, "float32")))
    tokens = tf.gather(scores, labels, batch_dims=2)
    is_token = labels != model.config.pad_id
    tokens, is_token = (tf.reshape(x, target_ids.shape) for x in (tf.where(is_token, tokens, 0.0), is_token))
    return Scores(tf.where(tf.reduce_any(is_token, -1), tf.reduce_sum(tokens, -1), -inf), tokens)


def top(values: Float[Tensor, "B N"], count: int | Int[Tensor, ""]) -> tuple[Float[Tensor, "B K"], Int[Tensor, "B K"]]:
    """Return the largest values of each row and their indices. Ties go to the lower index."""
    values = tf.where(~tf.math.is_nan(values), values, inf)  # rank NaN first, so that the search raises an error
    return tf.math.top_k(values, count)


class Greedy(NamedTuple):
    """State of greedy search between two steps. K is 1."""

    tokens: Int[Tensor, "B K"]  # input of the next step
    ids: Int[Tensor, "B K capacity"]
    scores: Float[Tensor, "B K"]
    unfinished: Bool[Tensor, "B K"]

    top = staticmethod(top)  # type: ignore[misc]  # not a field

    @classmethod
    def start(cls, plan: SearchPlan) -> Greedy:
        """Return the state before the first step, in which each hypothesis is empty."""
        size = [len(plan.limits), plan.beam_size]
        return cls(  # type: ignore[call-arg]
            tokens=tf.fill(size, plan.start_id),
            ids=tf.fill([*size, plan.capacity], plan.pad_id),
            scores=tf.zeros(size, plan.penalties.dtype),
            unfinished=tf.broadcast_to((plan.limits > 0)[:, None], size),
        )

    def step(self, logits: Float[Tensor, "R V"], n: Any, plan: SearchPlan) -> tuple[Greedy, None]:
        """Given the logits, return the state after step n and None. None means that the rows keep their order."""
        log_probabilities = _next_log_probabilities(logits, self.ids, n, plan)  # [R, V]
        index, size = self.choose(log_probabilities, n, plan), keras.ops.shape(self.scores)
        best = tf.reshape(tf.gather(log_probabilities, index, batch_dims=1), size)  # propagates NaN
        tokens = tf.where(self.unfinished, tf.reshape(index, size), plan.pad_id)
        ids = keras.ops.slice_update(self.ids, [0, 0, n - 1], tokens[:, :, None])
        scores = self.scores + tf.where(self.unfinished, best, 0.0)
        unfinished = self.unfinished & (tokens != plan.eos_id) & (n < plan.limits[:, None])
        return self._replace(tokens=tokens, ids=ids, scores=scores, unfinished=unfinished), None

    def choose(self, log_probabilities: Float[Tensor, "R V"], n: Any, plan: SearchPlan) -> Int[Tensor, " R"]:
        """Return the most likely token of each row. Ties go to the lower token ID."""
        return self.top(log_probabilities, 1)[1][:, 0]

    def goes_on(self) -> Any:
        """Return whether any sequence is unfinished."""
        return tf.reduce_any(self.unfinished)

    def best(self) -> tuple[Int[Tensor, "B K capacity"], Float[Tensor, "B K"]]:
        """Return the hypotheses of each sequence and their scores."""
        return self.ids, self.scores


class Sample(Greedy):
    """State of sampling between two steps."""

    def choose(self, log_probabilities: Float[Tensor, "R V"], n: Any, plan: SearchPlan) -> Int[Tensor, " R"]:
        """Sort the tokens of each row by probability, and return the token at a random quantile."""
        values, index = top(log_probabilities, log_probabilities.shape[1])  # [R, V]
        temperature = tf.maximum(tf.cast(plan.temperature, values.dtype), 1e-30)  # smaller divisors overflow
        probs = tf.nn.softmax(tf.where(tf.range(values.shape[1]) < plan.top_k, values / temperature, -inf))
        probs = tf.where(tf.cumsum(probs, -1) - probs < tf.cast(plan.top_p, probs.dtype), probs, 0.0)
        sums = tf.cumsum(probs, -1)
        drawn = tf.reshape(tf.gather(plan.uniforms, n - 1, axis=2), [-1, 1]) * sums[:, -1:]  # [R, 1]
        below, last = (tf.reduce_sum(tf.cast(x, tf.int32), -1) for x in (sums <= drawn, probs > 0.0))
        rank = tf.minimum(below, last - 1)  # rounding may make ``drawn`` equal to the last sum
        return tf.gather(index, rank, batch_dims=1)


class Beam(NamedTuple):
    """State of beam search between two steps."""

    tokens: Int[Tensor, "B K"]  # input of the next step
    ids: Int[Tensor, "B K capacity"]  # padding for unused entries
    alive: Float[Tensor, "B K"]  # log-probabilities, -inf for unused entries
    finished_ids: Int[Tensor, "B P capacity"]
    finished: Float[Tensor, "B P"]  # scores, best first

    top = staticmethod(top)  # type: ignore[misc]  # not a field

    @classmethod
    def start(cls, plan: SearchPlan) -> Beam:
        """Return the state before the first step: each sequence has one empty hypothesis."""
        shape, kept = [len(plan.limits), plan.beam_size], [len(plan.limits), plan.pool_size]
        is_empty_one = (plan.limits > 0)[:, None] & (tf.range(plan.beam_size) == 0)
        return cls(  # type: ignore[call-arg]
            tokens=tf.fill(shape, plan.start_id),
            ids=tf.fill([*shape, plan.capacity], plan.pad_id),
            alive=tf.where(is_empty_one, tf.zeros(shape, plan.penalties.dtype), -inf),
            finished_ids=tf.fill([*kept, plan.capacity], plan.pad_id),
            finished=tf.zeros(kept, plan.penalties.dtype) - inf,
        )

    def step(self, logits: Float[Tensor, "R V"], n: Any, plan: SearchPlan) -> tuple[Beam, Int[Tensor, " R"]]:
        """Given the logits, return the state after step n and the row that each hypothesis extends."""
        (batch, beam_size), vocabulary = keras.ops.shape(self.alive), logits.shape[1]
        pool_size = keras.ops.shape(self.finished)[1]
        # 1. Extend each hypothesis by every token. 2K extensions are enough, because at most K of them end with EOS.
        log_probabilities = _next_log_probabilities(logits, self.ids, n, plan)  # [R, V]
        totals = self.alive[:, :, None] + tf.reshape(log_probabilities, [batch, beam_size, vocabulary])  # [B, K, V]
        best, index = self.top(tf.reshape(totals, [batch, beam_size * vocabulary]), 2 * beam_size)  # [B, 2K]
        if plan.rules.beam_shrinks:
            best = within_pool(best, self.finished)
        parent, token = index // vocabulary, index % vocabulary
        candidates = tf.gather(self.ids, parent, batch_dims=1)  # [B, 2K, capacity]
        candidates = keras.ops.slice_update(candidates, [0, 0, n - 1], token[:, :, None])
        ends = (token == plan.eos_id) | (plan.limits == n)[:, None]
        # 2. If any of the best K extensions end, add them to the pool, which keeps the best hypotheses.
        ended = tf.where(ends, best / plan.penalties[n], -inf)[:, :beam_size]
        if plan.rules.pool == "first":
            ended = within_pool(ended, self.finished)
        finished, rank = top(tf.concat([self.finished, ended], 1), pool_size)  # [B, P]
        finished_ids = tf.concat([self.finished_ids, candidates[:, :beam_size]], 1)
        finished_ids = tf.gather(finished_ids, rank, batch_dims=1)
        # 3. Continue with the best K extensions that don't end, if at least one of them can still enter the pool.
        alive, rank = top(tf.where(~ends, best, -inf), beam_size)  # [B, K]
        longest = n if plan.rules.stop == "current" else plan.limits
        attainable = alive[:, 0] / tf.gather(plan.penalties, longest)  # score if all further tokens had probability 1
        is_over = finished[:, -1] >= attainable
        if plan.rules.stop == "first":
            is_over = finished[:, -1] != -inf
        alive = tf.where(~is_over[:, None], alive, -inf)
        ids, tokens, parent = (tf.gather(x, rank, batch_dims=1) for x in (candidates, token, parent))
        ids = tf.where((alive != -inf)[:, :, None], ids, plan.pad_id)
        rows = tf.reshape(tf.range(batch)[:, None] * beam_size + parent, [-1])
        state = self._replace(tokens=tokens, ids=ids, alive=alive, finished_ids=finished_ids, finished=finished)
        return state, rows

    def goes_on(self) -> Any:
        """Return whether any hypothesis is unfinished."""
        return tf.reduce_any(self.alive != -inf)

    def best(self) -> tuple[Int[Tensor, "B P capacity"], Float[Tensor, "B P"]]:
        """Return the best finished hypotheses of each sequence and their scores, best first."""
        return self.finished_ids, self.finished


class FastGreedy(Greedy):
    """Greedy search with a faster selection of the most likely token."""

    top = staticmethod(top_by_blocks)


class FastBeam(Beam):
    """Beam search with a faster selection of the best extensions."""

    top = staticmethod(top_by_blocks)


def _next_log_probabilities(logits, ids, n, plan):
    """Return the log-probabilities of the next tokens [R, V], with -inf for tokens that are not allowed."""
    wide = keras.backend.result_type(logits.dtype, "float32")  # bfloat16 is too imprecise for sums
    log_probabilities = tf.nn.log_softmax(tf.cast(logits, wide))
    token = tf.range(logits.shape[1])
    forbidden = (token == plan.pad_id) | ((n < plan.min_length) & (token == plan.eos_id))
    return apply_rules(tf.where(~forbidden, log_probabilities, -inf), ids, n, plan)
