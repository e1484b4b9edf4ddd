"""The ``decode`` stage: compares the tokens and scores of greedy and beam search, and checks decoding with a cache."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import ClassVar

import numpy as np
from numpy import ndarray

from transformer_parity.engine.comparison import Arrays, tolerances
from transformer_parity.engine.findings import Finding
from transformer_parity.engine.outputs import CACHED, FAST, FILES, OUTPUT, Outputs
from transformer_parity.engine.tensors import Tensors, plain, relative_error, structure_problem
from transformer_parity.transformer.cases.case import DECODE, Case
from transformer_parity.transformer.decoding.near_ties import explain, score_tolerance, summary
from transformer_parity.transformer.decoding.prefixes import score
from transformer_parity.transformer.ports.package import LoadedPackage
from transformer_parity.transformer.ports.protocol import Decoded, LoadedPort, Placement, Result
from transformer_parity.transformer.stages.stage import PathTensors, Stage, Way
from transformer_spec.search import SearchResult

TOKENS, SCORES = "tokens", "scores"
STEPS = "steps"  # the unfinished hypotheses after each step
SEARCHED = (TOKENS, SCORES, STEPS)  # tensors from a search; all other tensors are from decoding with a cache


class DecodeStage(Stage):
    """Compares the hypotheses and scores of a search. For greedy search, also compares the taps of each position."""

    name = DECODE
    component = "decoding"
    path = FAST
    searches = True
    reproduces = 1e-12
    optional: ClassVar[Mapping[str, str]] = {SCORES: SCORES}

    def run(self, case: Case, loaded: LoadedPort, outputs: Outputs) -> Iterator[Way]:
        """Yield a run that decodes one position at a time, followed by the search."""
        source_ids = case.inputs["source_ids"]
        if _is_stepwise(case):
            yield CACHED, lambda: _stepwise(loaded.decode_stepwise(source_ids, case.inputs["target_ids"]))
        yield FAST, lambda: _search(case, loaded, outputs)

    def expected(self, case: Case, reference: LoadedPackage, dtype: str) -> Tensors:
        """Return the expected tensors.

        The logits are computed in a single forward pass, and the taps by decoding one position at a time.
        """
        found = Decoded.by(partial(reference.search, case.inputs["source_ids"], case.options))
        searched = {TOKENS: found.result.nbest_ids, SCORES: found.result.nbest_scores, STEPS: _padded(found.shown)}
        if not _is_stepwise(case):
            return searched
        inputs = case.inputs["source_ids"], case.inputs["target_ids"]
        return {**_stepwise(reference.decode_stepwise(*inputs)), OUTPUT: reference.model(*inputs), **searched}

    def diagnosed(self, case: Case, tensors: Tensors) -> Tensors:
        """Return the tensors, with the tokens converted to an array of a fixed shape.

        In this array, padding is 0 and tokens are positive. If a search returned no tokens at all, omit the array,
        because it can neither support nor contradict a candidate of the diagnosis.
        """
        if TOKENS not in tensors or tensors[TOKENS].ndim != 3:
            return tensors
        if not tensors[TOKENS].size:
            return {name: value for name, value in tensors.items() if name != TOKENS}
        ids = tensors[TOKENS]
        wide = np.zeros((*ids.shape[:2], max(case.options.max_length or 0, ids.shape[2])))
        is_behind = np.logical_and.accumulate((ids == case.config.pad_id)[..., ::-1], axis=2)[..., ::-1]
        wide[..., : ids.shape[2]] = np.where(is_behind, 0, ids + 1)
        return {**tensors, TOKENS: wide}

    def tolerances(self, truth: Arrays, baseline: Arrays, placement: Placement) -> dict[str, float]:
        """Return the tolerances for decoding with a cache. The tolerances of a search depend on its result."""
        return tolerances({name: truth[name] for name in truth if name not in SEARCHED}, baseline, *placement)

    def due(self, shown: PathTensors) -> list[str]:
        """Return the names of the tensors to compare.

        These are tokens and scores for a search, and logits and taps for decoding with a cache.
        """
        if shown.path != CACHED:
            return [TOKENS, SCORES]
        return [name for name in shown.expected.tensors if name not in SEARCHED]

    def not_offered(self, due: list[str], shown: PathTensors) -> tuple[list[str], list[str]]:
        """Exclude the scores if the search doesn't return any."""
        if SCORES not in due or SCORES in shown.tensors:
            return due, []
        return [name for name in due if name != SCORES], ["scores are not reported"]

    def compare_tensors(self, names: Sequence[str], shown: PathTensors) -> Iterator[Finding]:
        """Compare the logits and taps of decoding with a cache, or the tokens and scores of a search."""
        yield from super().compare_tensors([name for name in names if name not in SEARCHED], shown)
        if TOKENS in names:
            yield from _compare_search(shown)


def _is_stepwise(case: Case) -> bool:
    """Return True if the case also decodes one position at a time, which must match a single forward pass."""
    return case.options.beam_size is None and "target_ids" in case.inputs


def _stepwise(found: Result) -> Tensors:
    """Return taps and logits in reverse order. The logits come first, because any bug in a step affects them."""
    return {**dict(reversed(found.taps.items())), OUTPUT: found.output}


def _padded(steps: Sequence[ndarray]) -> ndarray:
    """Pad the hypotheses of each step [B, K, n], and stack them into one array [step, B, K, steps]."""
    return np.stack([np.pad(ids, ((0, 0), (0, 0), (0, len(steps) - ids.shape[2]))) for ids in steps])


def _search(case: Case, loaded: LoadedPort, outputs: Outputs) -> Tensors:
    found = Decoded.by(partial(loaded.search, case.inputs["source_ids"], case.options))
    steps = {f"step {i}": np.asarray(step) for i, step in enumerate(found.shown, 1)}
    outputs.trace = list(plain(steps).values())
    scores = found.result.nbest_scores
    return {TOKENS: found.result.nbest_ids, **({} if scores is None else {SCORES: scores})}


def _compare_search(shown: PathTensors) -> Iterator[Finding]:
    """Compare the tokens, explain every decision that differs from the reference's decision, and compare the scores."""
    author, path, case, expected = shown.author, shown.path, shown.case, shown.expected
    ids, scores = shown.tensors[TOKENS], shown.tensors.get(SCORES)
    if problem := _tokens_problem(case, ids, expected.tensors[TOKENS]):
        yield author.compared(path, TOKENS, math.inf, 0.0, problem=problem)
        return
    ids = ids.astype(np.int64)  # NumPy would convert uint64 to float64 in operations with signed integers
    wrong = "" if scores is None else structure_problem(scores, expected.tensors[SCORES], author.dtype)
    if wrong:
        yield author.compared(path, SCORES, math.inf, 0.0, problem=wrong)
    exact = expected.exact.model
    rounded = None if expected.rounded is None else expected.rounded.model
    source_ids, options = case.inputs["source_ids"], case.options
    # If there are no scores, or if the tokens come from files, the individual search steps are unknown. Therefore,
    # explain only the final result.
    unknown = None if path == FILES or scores is None else scores
    found = Decoded(SearchResult(ids, unknown), shown.outputs.trace)  # type: ignore[arg-type]
    doubts = explain(exact, rounded, source_ids, found, expected.tensors[TOKENS], options)
    worst = max(doubts, key=lambda doubt: (not doubt.is_near_tie, doubt.margin), default=None)
    # Rounding can't explain an infinite margin.
    problem = summary(doubts) if worst and worst.margin == math.inf else ""
    margin, noise = (worst.margin, worst.noise) if worst else (0.0, 0.0)
    if not doubts and unknown is not None and rounded is None:
        # Compare the steps in float64 only. In float32, rounding may affect which hypotheses a beam keeps.
        problem = _steps_problem(found.shown, expected.tensors[STEPS])
        margin = math.inf if problem else 0.0
    yield author.compared(path, TOKENS, margin, noise, problem=problem, detail=summary(doubts))
    if scores is None or wrong:
        return
    truth = score(exact, source_ids, ids, options)
    if not np.isfinite(truth).all():  # a hypothesis contains a forbidden token
        problem = f"scores must be finite: the reference returns {truth.min()} for these tokens"
        yield author.compared(path, SCORES, math.inf, 0.0, problem=problem)
        return
    usual = None if rounded is None else score(rounded, source_ids, ids, options)
    yield author.compared(path, SCORES, relative_error(scores, truth), score_tolerance(truth, usual))


def _steps_problem(shown: Sequence[ndarray], expected: ndarray) -> str:
    """Return an error message if the hypotheses passed to ``on_step`` are wrong, else an empty string."""
    if len(shown) != len(expected):
        return f"on_step must be called {len(expected)} times: got {len(shown)}"
    for n, (ids, truth) in enumerate(zip(shown, expected, strict=True), 1):
        if not np.array_equal(ids, truth[..., :n]):
            return f"on_step must be called with the reference's hypotheses: they differ after step {n}"
    return ""


def _tokens_problem(case: Case, ids: ndarray, truth: ndarray) -> str:
    """Return an error message if the dtype, shape, or range of the tokens is invalid, else an empty string."""
    limit = case.options.limit(case.inputs["source_ids"].shape[1], case.config)
    shape, size = list(truth.shape[:2]), case.config.target_vocab_size
    if ids.dtype.kind not in "iu":
        return f"tokens must be integers: got {ids.dtype.name}"
    if ids.ndim != 3 or list(ids.shape[:2]) != shape:
        return f"shape must be {[*shape, 'length']}: got {list(ids.shape)}".replace("'", "")
    if not 0 < ids.shape[2] <= limit:
        return f"hypotheses must have 1 to {limit} tokens: got {ids.shape[2]}"
    if not ((ids >= 0) & (ids < size)).all():
        return f"tokens must be in 0 to {size - 1}: got {ids.min()} to {ids.max()}"
    return ""
