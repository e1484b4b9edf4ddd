"""GELU and swish, forward and backward, match results with 60 digits on [-40, 40], without cancellation."""

from __future__ import annotations

import decimal
from decimal import Decimal

import numpy as np
import pytest

from reference_numpy import functional

EPS = Decimal(float(np.finfo(np.float64).eps))
TINY = Decimal("1e-300")  # smaller float64 values are subnormal and have fewer digits
X = [Decimal(step) / 8 for step in range(-320, 321) if step]
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")


@pytest.fixture(autouse=True)
def digits():
    with decimal.localcontext(prec=60):
        yield


def sigmoid(x):
    return 1 / (1 + (-x).exp())


def phi(x):
    """Return the density of the standard normal distribution."""
    return (-x * x / 2).exp() / (2 * PI).sqrt()


def normal_cdf(x):
    """Return the standard normal CDF, using a power series near zero and a continued fraction elsewhere."""
    if x > 0:
        return 1 - normal_cdf(-x)
    if x > -6:
        term, total, n = x, x, 1
        while abs(term) > Decimal("1e-55"):
            n += 2
            term *= x * x / n
            total += term
        return Decimal("0.5") + phi(x) * total
    fraction = Decimal(0)
    for n in range(400, 0, -1):
        fraction = n / (-x + fraction)
    return phi(x) / (-x + fraction)


# The function and the terms of its derivative, which have opposite signs where the derivative has a root.
EXACT = {
    "swish": (lambda x: x * sigmoid(x), lambda x: (sigmoid(x), x * sigmoid(x) * sigmoid(-x))),
    "gelu": (lambda x: x * normal_cdf(x), lambda x: (normal_cdf(x), x * phi(x))),
}
# The relative error of exp(x) and erfc(x) grows with the rounding error of x, of its square, or of both.
ALLOWED = {"swish": (lambda x: 2, lambda x: 2 + abs(x)), "gelu": (lambda x: 2 + x * x, lambda x: 2 + x * x)}


@pytest.mark.parametrize("name", EXACT)
def test_activations_are_accurate_to_the_last_digits(name):
    activation, exact, allowed = functional.ACTIVATIONS[name], EXACT[name][0], ALLOWED[name][0]
    found = activation(np.array([float(x) for x in X]))
    for x, value in zip(X, found.tolist(), strict=True):
        assert abs(Decimal(value) - exact(x)) <= allowed(x) * EPS * abs(exact(x)) + TINY, x


@pytest.mark.parametrize("name", EXACT)
def test_derivatives_are_accurate_to_the_last_digits(name):
    backward = functional.ACTIVATIONS_BACKWARD[functional.ACTIVATIONS[name]]
    found = backward(np.array([float(x) for x in X]), np.ones(len(X)))
    for x, value in zip(X, found.tolist(), strict=True):
        terms = EXACT[name][1](x)
        error = abs(Decimal(value) - sum(terms))
        assert error <= ALLOWED[name][1](x) * EPS * sum(map(abs, terms)) + TINY, x


@pytest.mark.parametrize("name", EXACT)
def test_activations_of_extreme_values_are_exact(name):
    x = np.array([-1e300, -1e4, -0.0, 1e4, 1e300])
    np.testing.assert_array_equal(functional.ACTIVATIONS[name](x), [0.0, 0.0, 0.0, 1e4, 1e300])
