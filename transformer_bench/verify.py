"""Verify the results of ``parity bench`` against the float64 reference."""

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
    """Compares the implementations' results with the reference's results."""

    def verify(self, result: Any, show: Callable[[], Any]) -> str:
        """Return a description of the near-ties at which a result differs from the reference; empty if none exist.

        Args:
            result: The result of the timed call.
            show: A function that reruns the workload and returns every step.

        Raises:
            DisagreementError: If the result is wrong.
        """


class ForwardVerifier:
    """Compare logits with the reference's float64 logits, using the same tolerance as ``parity check``."""

    def __init__(self, work: ForwardWork, weights: Mapping[str, ndarray]) -> None:
        self.work = work
        truth, rounded = (
            ref.Transformer.from_weights(work.config, weights, dtype, fast=False)(work.source_ids, work.target_ids)
            for dtype in ("float64", "float32")
        )
        self._counted = work.target_ids != work.config.pad_id  # logits at padding are not compared
        self._counted[:, 0] = True  # position of BOS, which has the same ID as padding in Marian
        self._truth = truth[self._counted]
        usual = relative_error(rounded[self._counted], self._truth)
        self._allowed = tolerance("logits", work.dtype, usual)
        self._accepted: ndarray | None = None

    def verify(self, result: ndarray, show: Callable[[], Any]) -> str:
        """Raise a DisagreementError if the logits differ from the reference."""
        expected = (*self._counted.shape, self._truth.shape[-1])
        if result.shape != expected:
            raise DisagreementError(f"logits must have shape {list(expected)}: got {list(result.shape)}")
        counted = result[self._counted]
        if self._accepted is not None and np.array_equal(counted, self._accepted):
            return ""
        if not np.isfinite(counted).all():
            raise DisagreementError("logits must be finite")
        error = relative_error(counted, self._truth)
        if error > self._allowed:
            raise DisagreementError(f"the error of the logits must be at most {self._allowed:.1e}: got {error:.1e}")
        self._accepted = counted
        return ""


class TrainVerifier:
    """Compare losses with the float64 losses of the reference's trainer.

    This trainer runs a step only when the loss of the step is needed. With dropout, each implementation drops different
    elements, so losses may differ from the reference by a few percent.
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
        """Raise a DisagreementError if the loss of a step (counting from 1) differs from the reference's loss."""
        step, loss = result
        while len(self._losses) < step:
            batch = self.work.source_ids, self.work.target_ids, self.work.labels
            self._losses.append(float(self._trainer.train_step(*batch).loss))
        expected = self._losses[step - 1]
        if not abs(loss - expected) <= self._allowed * expected:  # also true for NaN
            raise DisagreementError(
                f"the loss of step {step} must be {expected:.6f}, with a relative error of at most "
                f"{self._allowed:.0e}: got {loss:.6f}, with an error of {abs(loss - expected) / expected:.1e}"
            )
        return ""


class DecodeVerifier:
    """Compare tokens and scores with the reference's search in float64.

    For bfloat16, the reference's weights are first rounded to bfloat16. A result agrees with the reference under two
    conditions: its tokens differ from the reference's tokens only at near-ties, and its scores match the scores that
    the reference computes for the same tokens, within the tolerance of ``parity check --stage decode``.
    """

    def __init__(self, work: DecodeWork, weights: Mapping[str, ndarray]) -> None:
        self.work = work
        in_dtype = ref.Transformer
        if work.dtype == "bfloat16":
            weights, in_dtype = {name: rounded_to_bfloat16(array) for name, array in weights.items()}, InBfloat16
        self._truth = ref.Transformer.from_weights(work.config, weights, "float64", fast=False)
        self._rounded = in_dtype.from_weights(work.config, weights, "float32", fast=False)
        self._expected = work.search.run(ref, self._truth, work.source_ids).nbest_ids
        # For generated tokens that have been verified: near-ties, expected scores, and the tolerance of the scores.
        self._known: dict[bytes, tuple[str, ndarray, float]] = {}

    def verify(self, result: SearchResult, show: Callable[[], Decoded]) -> str:
        """Return a description of the near-ties at which a result differs from the reference; empty if none exist.

        Args:
            result: The result of the timed call.
            show: A function that reruns the search and returns every step. It is called if the tokens of a beam search
                differ from the reference.

        Raises:
            DisagreementError: If the result is wrong.
        """
        ids, scores = result.nbest_ids, result.nbest_scores
        if ids.shape != self._expected.shape or scores.shape != ids.shape[:2]:
            raise DisagreementError(
                f"ids and scores must have shapes {list(self._expected.shape)} and {list(self._expected.shape[:2])}: "
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
            raise DisagreementError(f"the error of the scores must be at most {allowed:.1e}: got {error:.1e}")
        return near_ties

    def _look_up(self, found: Decoded, show: Callable[[], Decoded]) -> tuple[str, ndarray, float]:
        """Explain the tokens that differ from the reference, and compute the scores of all tokens."""
        work, ids = self.work, found.result.nbest_ids
        if differing(ids, self._expected, work.config.pad_id) and work.beam_size is not None:
            found = show()
            if not np.array_equal(found.result.nbest_ids, ids):
                raise DisagreementError("repeating the search gave different tokens")
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
    """Return the verifier for the results of the given workload."""
    return VERIFIERS[work.task](work, weights)
