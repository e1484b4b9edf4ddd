"""Determine a port's minimum length and repetition penalty in searches, based on the tokens that the port returned."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy import ndarray

from reference_numpy.functional import log_softmax
from transformer_parity.transformer.bugs.bug import Bug
from transformer_parity.transformer.bugs.search import NGRAMS, planned, repetition_penalty
from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.decoding.prefixes import searched_log_probabilities
from transformer_parity.transformer.diagnose.evidence.properties import output
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.ports.registry import DEFINITION
from transformer_parity.transformer.stages.decode import TOKENS
from transformer_spec.config import TransformerConfig

LISTED = 3  # the bug catalog contains minimum lengths up to this value
PENALTIES = [round(1.0 + hundredths / 100, 2) for hundredths in range(1, 201)]
IN_PLACE = {  # conditions for applying a repetition penalty to log-probabilities instead of logits
    "logits": "False",
    "log-probabilities": "True",
    "logits, or log-probabilities in beam search": "ids.shape[1] > 1",  # as in Hugging Face Transformers
}


def returned(case: Case, shown: Mapping[str, ndarray]) -> ndarray | None:
    """Return the padded tokens [B, T] of the best hypothesis for each sentence, or None if there are no valid tokens.

    Args:
        case: A case with a search.
        shown: The port's tensors.
    """
    if case.search is None or TOKENS not in shown or shown[TOKENS].ndim != 3:
        return None
    # ``TOKENS`` contains each token's ID plus 1. Elements after the last token are 0.
    ids = shown[TOKENS][:, 0].astype(np.int64) - 1
    if ids.max(initial=0) >= case.config.target_vocab_size:  # the decoder would reject such an ID
        return None
    return np.where(ids < 0, case.config.pad_id, ids)


def read_before(case: Case, ids: ndarray) -> ndarray:
    """Return the decoder input before each token [B, T]: the BOS token, followed by the preceding tokens."""
    plan = case.options.plan(case.config, case.inputs["source_ids"] != case.config.pad_id)
    return np.concatenate([np.full((len(ids), 1), plan.start_id), ids[:, :-1]], 1)


def search_candidates(case: Case, shown: Mapping[str, ndarray]) -> list[Bug]:
    """Return candidates with a minimum length or a repetition penalty that is consistent with the tokens.

    Args:
        case: A case with a search.
        shown: The port's tensors.
    """
    ids = returned(case, shown)
    if ids is None:
        return []
    shortest = int((ids != case.config.pad_id).sum(1).min())
    found = []
    if shortest > LISTED:
        minimum = planned(f"plan = plan._replace(min_length={shortest})")
        found.append(Bug(f"a minimum length of {shortest}", "", minimum))
    if case.options.beam_size is not None:
        return found
    inputs = {"source_ids": case.inputs["source_ids"], "target_ids": read_before(case, ids)}
    logits = output(DEFINITION.load(case.config, case.load_weights(), Placement("float64")), inputs, case.config)
    for what, in_place in IN_PLACE.items():
        scores = log_softmax(logits) if in_place == "True" else logits
        if penalty := _fitted_penalty(case, ids, scores):
            words = f"a repetition penalty of {penalty:g} on {what}"
            found.append(Bug(words, "", repetition_penalty(penalty, in_place)))
    return found


def _fitted_penalty(case: Case, ids: ndarray, scores: ndarray) -> float | None:
    """Return the repetition penalty that reproduces the tokens of a greedy search, or None if there is none.

    If multiple penalties reproduce them, return the penalty with the fewest digits.

    Args:
        case: A case with a greedy search.
        ids: The returned tokens [B, T].
        scores: The logits or log-probabilities of all possible tokens at each position [B, T, V].
    """
    config = case.config
    plan = case.options.plan(config, case.inputs["source_ids"] != config.pad_id)
    before = read_before(case, ids)
    held = np.array([[np.isin(np.arange(scores.shape[2]), row[: n + 1]) for n in range(len(row))] for row in before])
    counts = before_the_end(ids, config)

    def agrees(penalty: float) -> bool:
        penalized = np.where(held, np.where(scores < 0.0, scores * penalty, scores / penalty), scores)
        return bool((searched_log_probabilities(penalized, ids, plan).argmax(-1) == ids)[counts].all())

    if agrees(1.0):
        return None
    fits = [penalty for penalty in PENALTIES if agrees(penalty)]
    return min(fits, key=lambda penalty: len(f"{penalty:g}"), default=None)


def before_the_end(ids: ndarray, config: TransformerConfig) -> ndarray:
    """Return a mask [B, T] of the tokens up to and including the first EOS."""
    ended = np.isin(ids, (config.pad_id, config.eos_id)).cumsum(1)
    return (ended == 0) | ((ended == 1) & (ids == config.eos_id))


def facts(case: Case, ids: ndarray, best: ndarray, departs: ndarray) -> list[str]:
    """Return observations that hold for every token at which a greedy search first departs from ``forward``.

    Each observation suggests a search rule, for example that sentences must not repeat n-grams.

    Args:
        case: A case with a greedy search.
        ids: The tokens that the search returned [B, T].
        best: The allowed tokens to which ``forward`` assigns the highest probability [B, T].
        departs: Mask [B, T] that marks, in each sentence, the first returned token to which ``forward`` assigns a lower
            probability than to the token in ``best``.
    """
    config, places = case.config, np.argwhere(departs).tolist()
    counts = before_the_end(ids, config)
    everywhere = "in the only such place" if len(places) == 1 else f"in all {len(places)} such places"
    found, before = [], read_before(case, ids)

    def repeats(sentence: int, n: int, token: int, size: int) -> bool:
        row = [*before[sentence, : n + 1].tolist(), token]
        return any(row[i : i + size] == row[-size:] for i in range(len(row) - size))

    for size, words in NGRAMS.items():
        if all(repeats(sentence, n, best[sentence, n], size) for sentence, n in places):
            said = f"the token that `forward` prefers would repeat a {words} {everywhere}"
            if not any(repeats(sentence, n, ids[sentence, n], size) for sentence, n in np.argwhere(counts).tolist()):
                found = [f"{said}, and no returned sentence repeats one"]
                break
            if size == 1:
                found = [said]
    last = case.options.plan(config, case.inputs["source_ids"] != config.pad_id).limits
    if all(ids[place] == config.eos_id for place in map(tuple, places)):
        at_limit = all(n + 1 == last[sentence] for sentence, n in places)
        found.append(f"the search ends the sentence {everywhere}{', at the maximum length' if at_limit else ''}")
    if all(best[place] == config.eos_id for place in map(tuple, places)):
        shortest = counts.sum(1).min()
        found.append(
            f"`forward` would end the sentence {everywhere}, but the search ends no sentence before token {shortest}"
        )
    return found
