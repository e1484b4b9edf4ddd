"""Transcriptions of the searches in fairseq and Marian that process one sentence at a time, using plain lists.

fairseq: ``SequenceGenerator`` of fairseq/sequence_generator.py (0.10). Marian: ``BeamSearch`` and ``History`` of
src/translator/beam_search.cpp and history.h (1.12). Neither program has a wheel that can be installed together with our
other dependencies.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class Symbols:
    """The token IDs with a special meaning in both programs, which never generate the token ``never``."""

    start: int
    end: int
    never: int


def repeated(said, size):
    """Return the tokens that would repeat an n-gram of the given size."""
    followers = {}
    for place in range(len(said) - size + 1):
        followers.setdefault(tuple(said[place : place + size - 1]), set()).add(said[place + size - 1])
    return followers.get(tuple(said[len(said) - size + 1 :]), set())


def fairseq_search(scores_after, symbols, beam, max_len, prefix=(), no_repeat_ngram=0):
    """Return the (score, tokens) pairs that fairseq finalizes, best first, given ``--min-len 1`` and ``--lenpen 1``.

    ``max_len`` excludes the EOS token, which is the only token allowed in the step after ``max_len`` tokens.
    """
    active, finalized = [(0.0, [])], []
    for step in range(max_len + 1):
        candidates = []
        for total, tokens in active:
            scores = {token: score for token, score in enumerate(scores_after(tokens)) if token != symbols.never}
            if step >= max_len:
                scores = {symbols.end: scores[symbols.end]}
            if step < len(prefix) and step < max_len:
                scores = {prefix[step]: scores[prefix[step]]}
            elif step < 1:
                del scores[symbols.end]
            if no_repeat_ngram:
                for token in repeated([symbols.start, *tokens], no_repeat_ngram):
                    scores.pop(token, None)
            candidates += [(total + score, [*tokens, token]) for token, score in scores.items()]
        candidates = sorted(candidates, key=lambda candidate: -candidate[0])[: 2 * beam]
        for total, tokens in candidates[:beam]:
            if tokens[-1] == symbols.end and len(finalized) < beam:
                finalized.append((total / (step + 1), tokens))
        if len(finalized) == beam:
            break
        active = [candidate for candidate in candidates if candidate[1][-1] != symbols.end][:beam]
    return sorted(finalized, key=lambda hypothesis: -hypothesis[0])


def marian_search(scores_after, symbols, beam, max_length, normalize):
    """Return the (score, tokens) pair of every hypothesis in Marian's history for one sentence, best first."""
    survivors, history, step = [(0.0, [])] * beam, [], 0
    while survivors:
        step += 1
        parents = survivors[:1] if step == 1 else survivors  # in the first step, all hypotheses are identical
        expanded = [
            (total + score, [*tokens, token])
            for total, tokens in parents
            for token, score in enumerate(scores_after(tokens))
            if token != symbols.never
        ]
        best = sorted(expanded, key=lambda candidate: -candidate[0])[: len(survivors)]
        survivors = [(total, tokens) for total, tokens in best if tokens[-1] != symbols.end]
        if step == max_length:
            survivors, ended = [], best
        else:
            ended = [(total, tokens) for total, tokens in best if tokens[-1] == symbols.end]
        history += [(total / step**normalize, tokens) for total, tokens in ended if total > -inf]
    return sorted(history, key=lambda hypothesis: -hypothesis[0])
