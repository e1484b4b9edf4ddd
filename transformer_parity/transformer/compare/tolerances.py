"""The agreement policy, applied: how far apart two tensors are, and how far they may be."""

from __future__ import annotations

import math
import tomllib
from importlib.resources import files
from typing import Any

import numpy as np
from numpy import ndarray

POLICY: dict[str, Any] = tomllib.loads(
    files("transformer_parity.transformer.compare").joinpath("tolerances.toml").read_text("utf-8")
)


EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7}
CHUNK = 1 << 13  # numbers that are compared at a time, so that all copies of them stay in the processor's cache


def relative_error(actual: ndarray, expected: ndarray) -> float:
    """Return the L2 norm of the difference over the L2 norm of the expected tensor, in float64.

    Where nothing but zero is expected, anything else is infinitely wrong.

    Raises:
        ValueError: The shapes differ.
    """
    actual, expected = np.asarray(actual), np.asarray(expected, np.float64)
    if actual.shape != expected.shape:
        raise ValueError(
            f"actual and expected must have one shape: got {list(actual.shape)} and {list(expected.shape)}"
        )
    largest = np.maximum(expected.max(initial=0.0), -expected.min(initial=0.0))
    if largest == 0.0:
        return 0.0 if not actual.any() else float("inf")
    actual, expected = actual.ravel(), expected.ravel()
    difference = norm = 0.0
    for start in range(0, expected.size, CHUNK):
        # In units of the largest value, so that no square over- or underflows.
        right = expected[start : start + CHUNK] / largest
        wrong = actual[start : start + CHUNK].astype(np.float64) / largest - right
        difference += wrong @ wrong
        norm += right @ right
    return float(np.sqrt(difference / norm))


class NotFiniteError(ArithmeticError):
    """The reference itself overflows, so that nothing can be compared with it."""


def finite(baseline: float, name: str) -> float:
    """Return the error of the reference in float32.

    Raises:
        NotFiniteError: It is infinite or NaN: no error would be too large.
    """
    if not 0.0 <= baseline < math.inf:
        raise NotFiniteError(f"the reference is not finite in float32 at {name}")
    return baseline


def tolerance(tap: str, dtype: str, baseline: float, precision: str = "highest", device: str = "cpu") -> float:
    """Return the largest relative error allowed at a tap.

    Args:
        tap: The tap's name; its last part says what kind of value it is.
        dtype: The working dtype.
        baseline: The error that the NumPy reference itself makes at this tap in float32.
        precision: ``highest``, or ``fast``, which allows TF32.
        device: TF32 exists on a ``gpu`` only.
    """
    if dtype == "float64":
        return POLICY["float64"]["tap"]
    if dtype == "bfloat16":
        kind = "scores_and_weights" if tap.rpartition(".")[2] in ("scores", "weights") else "tap"
        return POLICY["bfloat16"][kind]
    rule = POLICY["float32"]
    allowed = rule["ratio"] * finite(baseline, tap) + rule["floor_in_eps"] * EPS["float32"]
    if precision == "fast" and device == "gpu":
        return allowed * POLICY["tensorfloat32"]["eps"] / EPS["float32"]
    return allowed
