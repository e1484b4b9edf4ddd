"""Tolerances: the largest accepted errors, computed from ``tolerances.toml`` and the reference's own error."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

POLICY: dict[str, Any] = tomllib.loads(
    files("transformer_parity.engine").joinpath("tolerances.toml").read_text("utf-8")
)
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7}
ALL_DTYPES = tuple(EPS)


class NotFiniteError(ArithmeticError):
    """The reference itself overflows, so no port can be compared with it in this case."""


def finite(baseline: float, name: str) -> float:
    """Return the reference's own error in float32, after checking that it is finite.

    Raises:
        NotFiniteError: If the error is infinite or NaN. Every port would then be within the tolerance.
    """
    if not 0.0 <= baseline < math.inf:
        raise NotFiniteError(f"the reference is not finite in float32 at {name}")
    return baseline


def by_baseline(rule: Mapping[str, float], baseline: float, eps: float) -> float:
    """Return a tolerance: ``ratio`` times the reference's own error, plus ``floor_in_eps`` times eps.

    Args:
        rule: A section of ``tolerances.toml`` with ``ratio`` and ``floor_in_eps``.
        baseline: The reference's own error.
        eps: The distance from 1 to the next larger number of the dtype.
    """
    return rule["ratio"] * baseline + rule["floor_in_eps"] * eps


def tolerance(name: str, dtype: str, baseline: float, precision: str = "highest", device: str = "cpu") -> float:
    """Return the largest accepted relative error of a tensor.

    Args:
        name: The name of the tensor. In bfloat16, the tolerance can depend on the last part of the name.
        dtype: The working dtype.
        baseline: The reference's own float32 error at this tensor.
        precision: ``highest``, or ``fast``, which allows TF32.
        device: ``cpu`` or ``gpu``. Only a GPU supports TF32.
    """
    rule = POLICY[dtype]
    if dtype == "float64":
        return rule["tap"]
    if dtype == "bfloat16":
        return rule.get(name.rpartition(".")[2], rule["tap"])
    allowed = by_baseline(rule, finite(baseline, name), EPS["float32"])
    if precision == "fast" and device == "gpu":
        return allowed * POLICY["tensorfloat32"]["eps"] / EPS["float32"]
    return allowed
