"""Whether a result of ``parity bench`` counts: it is held against the float64 reference, or it gets no time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy import ndarray

import reference_numpy as ref
from transformer_bench.measurements import DisagreementError
from transformer_bench.workload import SEED, DecodeWork, ForwardWork, TrainWork, Work
from transformer_parity.engine.tensors import relative_error
from transformer_parity.engine.tolerances import POLICY, tolerance
from transformer_parity.transformer.decoding.near_ties import differing, explain, score_tolerance, summary
from transformer_parity.transformer.decoding.prefixes import InBfloat16, rounded_to_bfloat16, score
from transformer_parity.transformer.ports.protocol import Decoded
from transformer_spec.search import SearchResult


class Verifier(Protocol):
    """The results of the reference for some work, and the comparison of other results with them."""

    def verify(self, result: Any, show: Callable[[], Any]) -> str:
        """Return the near-ties by which a result differs; empty if there is none.

        Args:
            result: What was timed.
            show: Repeats the work and returns every step.

        Raises:
            DisagreementError: The result is not that of this work.
        """


class ForwardVerifier:
    """The truth is the reference's logits in float64; the tolerance is that of ``parity check`` for them."""

    def __init__(self, work: ForwardWork, weights: Mapping[str, ndarray]) -> None:
        self.work = work
        truth, rounded = (
            ref.Transformer.from_weights(work.config, weights, dtype, fast=False)(work.source_ids, work.target_ids)
            for dtype in ("float64", "float32")
        )
        self._counted = work.target_ids != work.config.pad_id  # logits at padding are not compared
        self._counted[:, 0] = True  # the start symbol, which Marian spells like padding
        self._truth = truth[self._counted]
        usual = relative_error(rounded[self._counted], self._truth)
        self._allowed = tolerance("logits", work.dtype, usual)
        self._accepted: ndarray | None = None

    def verify(self, result: ndarray, show: Callable[[], Any]) -> str:
        """Refuse logits that are not the reference's."""
        expected = (*self._counted.shape, self._truth.shape[-1])
        if result.shape != expected:
            raise DisagreementError(f"logits must be {list(expected)}: got {list(result.shape)}")
        counted = result[self._counted]
        if self._accepted is not None and np.array_equal(counted, self._accepted):
            return ""
        if not np.isfinite(counted).all():
            raise DisagreementError("logits must be finite")
        error = relative_error(counted, self._truth)
        if error > self._allowed:
            raise DisagreementError(f"the logits are off by {error:.1e}, and may be by {self._allowed:.1e}")
        self._accepted = counted
        return ""


class TrainVerifier:
    """The truth is the losses of the reference's trainer in float64, step by step; it trains as far as is asked.

    With dropout, each implementation drops other elements: losses may differ from the reference's by a few percent.
    """

    def __init__(self, work: TrainWork, weights: Mapping[str, ndarray]) -> None:
        self.work = work
        model = ref.Transformer.from_weights(work.config, weights, "float64", fast=False)
        self._trainer = ref.Trainer(model, replace(work.settings, mixed_bfloat16=False), SEED)
        self._losses: list[float] = []
        policy = POLICY["bench"]
        rounding = policy["loss_bfloat16"] if work.dtype == "bfloat16" else policy["loss"]
        self._allowed = policy["loss_with_dropout"] if work.dropout else rounding

    def verify(self, result: tuple[int, float], show: Callable[[], Any]) -> str:
        """Refuse the loss of a step, counted from 1, that is not the reference's."""
        step, loss = result
        while len(self._losses) < step:
            batch = self.work.source_ids, self.work.target_ids, self.work.labels
            self._losses.append(float(self._trainer.train_step(*batch).loss))
        expected = self._losses[step - 1]
        if not abs(loss - expected) <= self._allowed * expected:  # NaN is not either
            raise DisagreementError(
                f"the loss of step {step} is {loss:.6f} where the reference has {expected:.6f}: "
                f"off by {abs(loss - expected) / expected:.1e}, and may be by {self._allowed:.0e}"
            )
        return ""


class DecodeVerifier:
    """The truth is the reference's search in float64; in bfloat16, with weights that were rounded beforehand.

    Another result agrees if its tokens are the same, or differ by near-ties only, and if the scores are those of its
    tokens, within the tolerance of ``parity check --stage decode``.
    """

    def __init__(self, work: DecodeWork, weights: Mapping[str, ndarray]) -> None:
        self.work = work
        in_dtype = ref.Transformer
        if work.dtype == "bfloat16":
            weights, in_dtype = {name: rounded_to_bfloat16(array) for name, array in weights.items()}, InBfloat16
        self._truth = ref.Transformer.from_weights(work.config, weights, "float64", fast=False)
        self._rounded = in_dtype.from_weights(work.config, weights, "float32", fast=False)
        self._expected = work.search.run(ref, self._truth, work.source_ids).nbest_ids
        self._known: dict[bytes, tuple[str, ndarray, float]] = {}  # by tokens: near-ties, scores and their tolerance

    def verify(self, result: SearchResult, show: Callable[[], Decoded]) -> str:
        """Return which near-ties a result differs by.

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
        return summary(doubts), known, score_tolerance(known, usual)


VERIFIERS: dict[str, Callable[[Any, Mapping[str, ndarray]], Verifier]] = {
    "forward": ForwardVerifier,
    "train": TrainVerifier,
    "decode": DecodeVerifier,
}


def verifier_of(work: Work, weights: Mapping[str, ndarray]) -> Verifier:
    """Return what verifies the results of some work."""
    return VERIFIERS[work.task](work, weights)
