"""Padding of a search to a few sizes, for frameworks that compile a program for each size."""

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
) -> tuple[Int[ndarray, "rows room"], Bool[ndarray, "rows room"], SearchPlan]:
    """Return source and plan with padding behind them, so that there are few sizes to compile for.

    The batch is rounded up to a power of two, by sentences whose limit is 0; lengths as ``round_up`` says, at most to
    ``max_positions``.
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
    """Return the least power of two that is large enough."""
    return 1 << (number - 1).bit_length()
