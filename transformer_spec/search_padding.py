"""Pad search inputs to one of a few sizes, for frameworks that compile a program for each size."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
from numpy import ndarray

from transformer_spec.search import SearchPlan
from transformer_spec.shapes import Bool, Int


def pad_search(
    source_ids: Int[ndarray, "B S"],
    source_mask: Bool[ndarray, "B S"],
    plan: SearchPlan,
    max_positions: int | None,
    round_up: Callable[[int], int],
) -> tuple[Int[ndarray, "rows capacity"], Bool[ndarray, "rows capacity"], SearchPlan]:
    """Pad the source IDs, the source mask, and the plan, so that only a few different sizes occur, and return them.

    The batch size is rounded up to a power of two by adding sequences with a maximum length
    of 0. The lengths are rounded up by ``round_up`` and then limited to ``max_positions``.

    Args:
        source_ids: Source token IDs.
        source_mask: True for source positions that contain a token.
        plan: Plan of the search.
        max_positions: Maximum length of a sequence, or None if there is no limit.
        round_up: Function that rounds up a length.
    """
    batch, length = source_ids.shape
    rows = (0, power_of_two(batch) - batch)
    room, capacity = (min(round_up(size), max_positions or sys.maxsize) for size in (length, plan.capacity))
    padding, more = (rows, (0, room - length)), (0, capacity - plan.capacity)
    limits, penalties = np.pad(plan.limits, rows), np.pad(plan.penalties, more, constant_values=1.0)
    prefix, uniforms = plan.prefix, plan.uniforms
    if plan.has_prefix:
        prefix = np.pad(prefix, (rows, more), constant_values=plan.pad_id)
    if len(uniforms):
        uniforms = np.pad(uniforms, (rows, (0, 0), more))
    return (
        np.pad(source_ids, padding, constant_values=plan.pad_id),
        np.pad(source_mask, padding),
        plan._replace(limits=limits, penalties=penalties, prefix=prefix, uniforms=uniforms),
    )


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least ``number``."""
    return 1 << (number - 1).bit_length()
