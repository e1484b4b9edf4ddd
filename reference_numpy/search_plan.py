"""What all searches have in common: their limits, how hypotheses of different lengths compare, and what they return."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy import ndarray

from reference_numpy.checks import check_choice, check_integer, check_number, check_positions
from reference_numpy.config import TransformerConfig

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

LENGTH_PENALTIES = ("gnmt", "power")
EXTRA_LENGTH = 50  # section 6.1: the longest translation is the input length + 50

OnStep = Callable[[ndarray], None]  # is shown the unfinished hypotheses after each step, [B, K, n]


@dataclass(frozen=True)
class SearchResult:
    """The best hypotheses of each sentence, best first.

    Attributes:
        nbest_ids: The tokens without the start symbol, up to and including ``eos_id``, padded with ``pad_id``. L is the
            length of the longest hypothesis.
        nbest_scores: What they are ranked by: the log-probability in nats, over the length penalty in beam search. -inf
            where there are fewer hypotheses than were asked for.
    """

    nbest_ids: Int[ndarray, "B N L"]
    nbest_scores: Float[ndarray, "B N"]

    @property
    def ids(self) -> Int[ndarray, "B L"]:
        """The tokens of the best hypotheses."""
        return self.nbest_ids[:, 0]

    @property
    def scores(self) -> Float[ndarray, " B"]:
        """The scores of the best hypotheses."""
        return self.nbest_scores[:, 0]


class SearchPlan(NamedTuple):
    """The arguments of a search, checked, and what follows from them.

    Attributes:
        pad_id: What is never said, and stands where nothing is said.
        eos_id: What ends a hypothesis.
        start_id: What the decoder reads first.
        min_length: The fewest tokens of a hypothesis, ``eos_id`` included.
        limits: The most tokens of a hypothesis of each sentence, ``eos_id`` included.
        penalties: What the log-probability of a hypothesis of n tokens is divided by, for n up to the capacity.
        beam_size: How many unfinished hypotheses of each sentence are kept.
        num_hypotheses: How many finished hypotheses of each sentence are kept.
    """

    pad_id: int
    eos_id: int
    start_id: int
    min_length: int
    limits: Any  # [B]; an array of NumPy as planned, and of the framework in its loop
    penalties: Any  # [n]; likewise
    beam_size: int
    num_hypotheses: int

    @property
    def capacity(self) -> int:
        """How many steps the longest hypothesis may take: as many target positions are read."""
        return len(self.penalties) - 1


def length_penalty(length: Any, alpha: float, kind: str = "gnmt") -> Any:
    """Return what the log-probability of a hypothesis is divided by, so that long ones can compete.

    Args:
        length: How many tokens the hypothesis has, ``eos_id`` included; a number or an array.
        alpha: 0 compares log-probabilities as they are; the paper uses 0.6.
        kind: ``gnmt`` is ((5 + n) / 6)^alpha (Wu et al., 2016, equation 14; the paper); ``power`` is n^alpha (fairseq,
            Hugging Face).
    """
    return length**alpha if kind == "power" else ((5.0 + length) / 6.0) ** alpha


def plan_search(
    config: TransformerConfig,
    source_mask: Bool[ndarray, "B S"],
    max_length: int | None,
    min_length: int,
    start_id: int | None,
    beam_size: int = 1,
    num_hypotheses: int = 1,
    alpha: float = 0.0,
    length_penalty_kind: str = "gnmt",
) -> SearchPlan:
    """Check the arguments of a search; errors as in ``beam_search``."""
    if config.eos_id == config.pad_id:
        raise ValueError(f"a search needs an end symbol that is not padding: both are {config.eos_id}")
    beam_size = check_integer("beam_size", beam_size, minimum=1)
    num_hypotheses = check_integer("num_hypotheses", num_hypotheses, minimum=1)
    if num_hypotheses > beam_size:
        raise ValueError(f"num_hypotheses must be at most beam_size: got {num_hypotheses} and {beam_size}")
    alpha = check_number("length_penalty", alpha, "at least 0", lambda number: number >= 0.0)
    check_choice("length_penalty_kind", length_penalty_kind, LENGTH_PENALTIES)
    if start_id is None:
        start_id = config.bos_id
    start_id = check_integer("start_id", start_id, minimum=0)
    if start_id >= config.target_vocab_size:
        raise ValueError(f"start_id must lie in [0, {config.target_vocab_size}): got {start_id}")
    if max_length is None:
        limits = source_mask.sum(1) + EXTRA_LENGTH
        if config.max_positions is not None:
            limits = np.minimum(limits, config.max_positions)
    else:
        max_length = check_positions("max_length", max_length, config.max_positions)
        limits = np.full(len(source_mask), max_length)
    min_length = check_integer("min_length", min_length, minimum=1)
    if min_length > limits.min():
        raise ValueError(f"min_length must be at most max_length: got {min_length} and {limits.min()}")
    penalties = length_penalty(np.arange(limits.max() + 1, dtype=np.float64), alpha, length_penalty_kind)
    penalties[0] = 1.0  # no hypothesis is that short
    return SearchPlan(config.pad_id, config.eos_id, start_id, min_length, limits, penalties, beam_size, num_hypotheses)


def pad_search(
    source_ids: Int[ndarray, "B S"],
    source_mask: Bool[ndarray, "B S"],
    plan: SearchPlan,
    max_positions: int | None,
    round_up: Callable[[int], int],
) -> tuple[Int[ndarray, "rows room"], Bool[ndarray, "rows room"], SearchPlan]:
    """Return source and plan with padding behind them, so that there are few sizes to compile for.

    The batch is rounded up to a power of two, by sentences whose limit is 0; lengths as ``round_up`` says, at most to
    ``max_positions``.
    """
    batch, length = source_ids.shape
    rows = (0, power_of_two(batch) - batch)
    room, capacity = (min(round_up(size), max_positions or sys.maxsize) for size in (length, plan.capacity))
    padding, more = (rows, (0, room - length)), (0, capacity - plan.capacity)
    return (
        np.pad(source_ids, padding, constant_values=plan.pad_id),
        np.pad(source_mask, padding),
        plan._replace(limits=np.pad(plan.limits, rows), penalties=np.pad(plan.penalties, more, constant_values=1.0)),
    )


def power_of_two(number: int) -> int:
    """Return the least power of two that is large enough."""
    return 1 << (number - 1).bit_length()


def search_result(
    nbest_ids: Int[ndarray, "B N capacity"], nbest_scores: Float[ndarray, "B N"], pad_id: int
) -> SearchResult:
    """Return what was found, without the columns that no hypothesis needs.

    Raises:
        ValueError: A sentence has no hypothesis, because the model computes NaN or infinity for it.
    """
    best = nbest_scores[:, 0]
    if not np.isfinite(best).all():
        sentence = int(np.flatnonzero(~np.isfinite(best))[0])
        raise ValueError(f"a hypothesis must have a finite score: the best of sentence {sentence} has {best[sentence]}")
    length = int((nbest_ids != pad_id).any((0, 1)).nonzero()[0].max()) + 1  # no hypothesis has padding inside
    return SearchResult(nbest_ids[:, :, :length], nbest_scores)
