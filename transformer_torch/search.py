"""Search (Vaswani et al., 2017, section 6.1): greedy search, beam search, sampling, and scoring of given translations.

Axes: B batch, K beam size, P pool of finished hypotheses, V target vocabulary, R = B * K rows of the decoder.
"""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_spec.checks import check_integer, check_translations, to_array
from transformer_spec.search import OnStep, Scores, Search, SearchPlan, SearchResult, check_start
from transformer_spec.search_rules import SearchRules
from transformer_spec.shapes import Bool, Float, Int
from transformer_torch.fast import top_by_blocks
from transformer_torch.layers import inference
from transformer_torch.search_loop import run_search
from transformer_torch.search_rules import apply_rules, within_pool
from transformer_torch.transformer import Transformer, transformer_of


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

    Padding is never generated. Ties go to the lower token ID. The result for a sequence doesn't depend on the other
    sequences in the batch.

    Args:
        model: Model, or a module that wraps a model. If you pass ``torch.compile(model)``, the search uses compiled
            code.
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

    Returns:
        One hypothesis per sequence. Its score is its log-probability in nats.

    Raises:
        TypeError: If the module contains no ``Transformer``, if IDs, sizes, or lengths are not integers, or if the mask
            is not boolean.
        ValueError: If an argument has an invalid shape or value, or the model computes NaN.
    """
    search = Search(
        max_length=max_length,
        min_length=min_length,
        start_id=start_id,
        rules=SearchRules() if rules is None else rules,
        prefix_ids=prefix_ids,
    )
    return run_search(Greedy, model, source_ids, source_mask, search, on_step, as_numpy=as_numpy)


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
        model: Model, or a module that wraps a model. If you pass ``torch.compile(model)``, the search uses compiled
            code.
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
        TypeError: If the module contains no ``Transformer``, if IDs, sizes, or lengths are not integers, or if the mask
            is not boolean.
        ValueError: If an argument has an invalid shape or value, or the model computes NaN.
    """
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
    kind = FastBeam if transformer_of(model).fast else Beam
    return run_search(kind, model, source_ids, source_mask, search, on_step, as_numpy=as_numpy)


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
        model: Model, or a module that wraps a model. If you pass ``torch.compile(model)``, the search uses compiled
            code.
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
        TypeError: If the module contains no ``Transformer``, if IDs, sizes, or lengths are not integers, or if the mask
            is not boolean.
        ValueError: If an argument has an invalid shape or value, or the model computes NaN.
    """
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
        model: Model, or a module that wraps a model.
        source_ids: Source token IDs [B, S], padded with ``config.pad_id``.
        target_ids: One translation per sequence [B, T], or N translations per sequence [B, N, T]. They include EOS but
            not BOS, and are padded with ``config.pad_id``.
        start_id: First token that the decoder reads. If None, ``config.bos_id`` is used.
        source_mask: True for source positions that contain a token [B, S]. If None, it is derived from ``source_ids``.

    Returns:
        The log-probability of each translation [B] or [B, N], and of each of its tokens [B, T] or [B, N, T].

    Raises:
        TypeError: If the module contains no ``Transformer``, the IDs are not integers, or the mask is not boolean.
        ValueError: If the IDs or the mask have the wrong shape, an ID is outside the vocabulary, or a translation is
            too long.
    """
    given, model = model, transformer_of(model)
    has_mask = source_mask is not None
    source_ids, source_mask = model._take("source", source_ids, source_mask)  # [B, S]
    target_ids = target_ids if isinstance(target_ids, Tensor) else to_array("target_ids", target_ids)
    check_translations(target_ids.shape, len(source_ids))
    labels, _ = model._take("target", target_ids.reshape(-1, target_ids.shape[-1]), None)  # [B * N, T]
    start = torch.full_like(labels[:, :1], check_start(start_id, model.config))
    count = len(labels) // len(source_ids)
    source_ids, source_mask = (x.repeat_interleave(count, 0) for x in (source_ids, source_mask))
    with inference(given):
        inputs = source_ids, torch.cat([start, labels[:, :-1]], 1)
        scores = given(*inputs, source_mask) if has_mask else given(*inputs)  # [B * N, T, V]
    scores = scores.log_softmax(-1, torch.promote_types(scores.dtype, torch.float32))
    tokens = scores.gather(-1, labels[:, :, None])[:, :, 0]
    is_token = labels != model.config.pad_id
    tokens, is_token = (x.reshape(target_ids.shape) for x in (torch.where(is_token, tokens, 0.0), is_token))
    return Scores(torch.where(is_token.any(-1), tokens.sum(-1), -inf), tokens)


def top(values: Float[Tensor, "B N"], count: int) -> tuple[Float[Tensor, "B K"], Int[Tensor, "B K"]]:
    """Return the largest values of each row and their indices. Ties go to the lower index."""
    values = torch.where(values.isnan(), inf, values)  # rank NaN first, so that the search raises an error
    best, index = values.sort(dim=-1, descending=True, stable=True)
    return best[:, :count], index[:, :count]


class Greedy(NamedTuple):
    """State of greedy search between two steps. K is 1."""

    tokens: Int[Tensor, "B K"]  # input of the next step
    ids: Int[Tensor, "B K capacity"]
    scores: Float[Tensor, "B K"]
    unfinished: Bool[Tensor, "B K"]

    @classmethod
    def start(cls, plan: SearchPlan) -> Greedy:
        """Return the state before the first step, in which each hypothesis is empty."""
        size = [len(plan.limits), plan.beam_size]
        return cls(
            tokens=plan.limits.new_full(size, plan.start_id),
            ids=plan.limits.new_full([*size, plan.capacity], plan.pad_id),
            scores=plan.penalties.new_zeros(size),
            unfinished=(plan.limits > 0)[:, None].expand(size),
        )

    def step(self, logits: Float[Tensor, "R V"], n: Any, plan: SearchPlan) -> tuple[Greedy, None]:
        """Given the logits, return the state after step n and None. None means that the rows keep their order."""
        log_probabilities = _next_log_probabilities(logits, self.ids, n, plan)  # [R, V]
        index = self.choose(log_probabilities, n, plan)
        best = log_probabilities.gather(1, index[:, None]).reshape(self.scores.shape)
        tokens = torch.where(self.unfinished, index.reshape(self.scores.shape), plan.pad_id)
        ids = self.ids
        ids[:, :, n - 1] = tokens
        scores = self.scores + torch.where(self.unfinished, best, 0.0)
        unfinished = self.unfinished & (tokens != plan.eos_id) & (n < plan.limits[:, None])
        return self._replace(tokens=tokens, ids=ids, scores=scores, unfinished=unfinished), None

    def choose(self, log_probabilities: Float[Tensor, "R V"], n: Any, plan: SearchPlan) -> Int[Tensor, " R"]:
        """Return the most likely token of each row. Ties go to the lower token ID."""
        return log_probabilities.argmax(-1)

    def goes_on(self) -> Any:
        """Return whether any sequence is unfinished."""
        return self.unfinished.any()

    def best(self) -> tuple[Int[Tensor, "B K capacity"], Float[Tensor, "B K"]]:
        """Return the hypotheses of each sequence and their scores."""
        return self.ids, self.scores


class Sample(Greedy):
    """State of sampling between two steps."""

    def choose(self, log_probabilities: Float[Tensor, "R V"], n: Any, plan: SearchPlan) -> Int[Tensor, " R"]:
        """Sort the tokens of each row by probability, and return the token at a random quantile."""
        values, index = top(log_probabilities, log_probabilities.shape[1])  # [R, V]
        is_in = torch.arange(values.shape[1], device=values.device) < plan.top_k
        probs = torch.where(is_in, values / plan.temperature, -inf).softmax(-1)
        probs = torch.where(probs.cumsum(-1) - probs < plan.top_p, probs, 0.0)
        sums = probs.cumsum(-1)
        drawn = plan.uniforms[:, :, n - 1].reshape(-1, 1) * sums[:, -1:]  # [R, 1]
        # Rounding may make ``drawn`` equal to the last sum. If the probabilities are NaN, the rank is 0.
        rank = torch.minimum((sums <= drawn).sum(-1), (probs > 0.0).sum(-1) - 1).clamp(min=0)
        return index.gather(1, rank[:, None])[:, 0]


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
        is_empty_one = (plan.limits > 0)[:, None] & (torch.arange(plan.beam_size, device=plan.limits.device) == 0)
        return cls(  # type: ignore[call-arg]
            tokens=plan.limits.new_full(shape, plan.start_id),
            ids=plan.limits.new_full([*shape, plan.capacity], plan.pad_id),
            alive=torch.where(is_empty_one, plan.penalties.new_zeros(shape), -inf),
            finished_ids=plan.limits.new_full([*kept, plan.capacity], plan.pad_id),
            finished=plan.penalties.new_full(kept, -inf),
        )

    def step(self, logits: Float[Tensor, "R V"], n: Any, plan: SearchPlan) -> tuple[Beam, Int[Tensor, " R"]]:
        """Given the logits, return the state after step n and the row that each hypothesis extends."""
        (batch, beam_size), pool_size, vocabulary = self.alive.shape, self.finished.shape[1], logits.shape[1]
        sentence = torch.arange(batch, device=logits.device)[:, None]
        # 1. Extend each hypothesis by every token. 2K extensions are enough, because at most K of them end with EOS.
        log_probabilities = _next_log_probabilities(logits, self.ids, n, plan)  # [R, V]
        totals = self.alive[:, :, None] + log_probabilities.reshape(batch, beam_size, vocabulary)  # [B, K, V]
        best, index = self.top(totals.reshape(batch, -1), 2 * beam_size)  # [B, 2K]
        if plan.rules.beam_shrinks:
            best = within_pool(best, self.finished)
        parent, token = index // vocabulary, index % vocabulary
        candidates = self.ids[sentence, parent]  # [B, 2K, capacity]
        candidates[:, :, n - 1] = token
        ends = (token == plan.eos_id) | (plan.limits == n)[:, None]
        # 2. If any of the best K extensions end, add them to the pool, which keeps the best hypotheses.
        ended = torch.where(ends, best / plan.penalties[n], -inf)[:, :beam_size]
        if plan.rules.pool == "first":
            ended = within_pool(ended, self.finished)
        finished, rank = self.top(torch.concatenate([self.finished, ended], 1), pool_size)  # [B, P]
        finished_ids = torch.concatenate([self.finished_ids, candidates[:, :beam_size]], 1)[sentence, rank]
        # 3. Continue with the best K extensions that don't end, if at least one of them can still enter the pool.
        alive, rank = self.top(torch.where(~ends, best, -inf), beam_size)  # [B, K]
        longest = n if plan.rules.stop == "current" else plan.limits
        attainable = alive[:, 0] / plan.penalties[longest]  # score if all further tokens had probability 1
        is_over = finished[:, -1] >= attainable
        if plan.rules.stop == "first":
            is_over = finished[:, -1] != -inf
        alive = torch.where(~is_over[:, None], alive, -inf)
        ids = torch.where((alive != -inf)[:, :, None], candidates[sentence, rank], plan.pad_id)
        tokens, parent = token[sentence, rank], parent[sentence, rank]
        rows = (sentence * beam_size + parent).reshape(-1)
        state = self._replace(tokens=tokens, ids=ids, alive=alive, finished_ids=finished_ids, finished=finished)
        return state, rows

    def goes_on(self) -> Any:
        """Return whether any hypothesis is unfinished."""
        return (self.alive != -inf).any()

    def best(self) -> tuple[Int[Tensor, "B P capacity"], Float[Tensor, "B P"]]:
        """Return the best finished hypotheses of each sequence and their scores, best first."""
        return self.finished_ids, self.finished


class FastBeam(Beam):
    """Beam search with a faster selection of the best extensions."""

    top = staticmethod(top_by_blocks)


def _next_log_probabilities(logits, ids, n, plan):
    """Return the log-probabilities of the next tokens [R, V], with -inf for tokens that are not allowed."""
    log_probabilities = logits.log_softmax(-1, torch.promote_types(logits.dtype, torch.float32))
    log_probabilities[:, plan.pad_id] = -inf
    if n < plan.min_length:
        log_probabilities[:, plan.eos_id] = -inf
    return apply_rules(log_probabilities, ids, n, plan)
