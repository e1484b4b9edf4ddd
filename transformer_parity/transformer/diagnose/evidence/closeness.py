"""Closeness: whether two float64 tensors are equal except for rounding, and multiples of each other."""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from reference_numpy.attention import merge_heads

SAME = 1e-9  # relative error that rounding in float64 stays below


def is_close(actual: ndarray, wanted: ndarray, far: float = SAME) -> bool:
    """Whether every element is right, with errors relative to the largest element."""
    if actual.shape != wanted.shape:
        return False
    largest = max(float(np.abs(wanted).max(initial=0.0)), 1e-300)
    return bool(np.abs(actual - wanted).max(initial=0.0) <= far * largest)


def best_factor(actual: ndarray, wanted: ndarray) -> float:
    """Return the factor by which ``wanted`` comes closest to ``actual``, in the sense of least squares."""
    return float(np.vdot(wanted, actual) / max(np.vdot(wanted, wanted), 1e-300))


def without_heads(array: ndarray) -> ndarray:
    """Return [B, H, L, d] as [B, L, H * d], and any other array as it is."""
    return merge_heads(array) if array.ndim == 4 else array
