"""What is wrong with a run on several devices: how much of each share's own gradient is in what was reduced.

The gradient of a batch is the sum of what its shares contribute, each of them known from the reference. Of a gradient
that is wrong, the coefficient of each contribution can be solved for, and they tell the mistake: (1/2, 1/2) is a mean
in place of a sum, (1, 0) is no reduction, N / (W n) a mean of the shares' own means.

N target tokens of the batch, n of a share, W shares.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

import reference_numpy as ref
from transformer_parity.transformer.distributed.cases import Probe
from transformer_parity.transformer.distributed.worker import Seen
from transformer_parity.transformer.stages.gradients import tolerance
from transformer_parity.transformer.stages.training_stage import WHOLE, training_error
from transformer_spec.parallel_plan import Plan, spread, tensor_axis

EXACT = 1e-8  # how well a number must be met to count as that number
ROUNDED = {"float32": 2.0**-23, "bfloat16": 2.0**-7}  # how far rounding moves a number, of its size, at most
MOST = 3  # groups of tensors that are told of
Vectors = Mapping[str, ndarray]


@dataclass(frozen=True)
class Contributions:
    """What each share of each slice of a batch contributes to the gradient.

    Attributes:
        tokens: The target tokens of each [slices, shares].
        losses: Likewise, per target token of each.
        gradients: Of each, slice after slice, already divided by the tokens of the batch.
    """

    tokens: ndarray
    losses: ndarray
    gradients: Sequence[Vectors]

    @classmethod
    def of(cls, probe: Probe, weights: Vectors, step: int, rows: ndarray) -> Contributions:
        """Compute them with the reference; without dropout.

        Args:
            probe: Model, settings and batches.
            weights: Of the model.
            step: Of which batch.
            rows: Those of each share of each slice, as ``divisions`` has them.
        """
        model, pad_id = ref.Transformer.from_weights(probe.config, weights, "float64", fast=False), probe.config.pad_id
        padded = [np.pad(ids, ((0, 1), (0, 0)), constant_values=pad_id) for ids in probe.batch(step)]
        found = [ref.gradients(model, *(ids[own] for ids in padded)) for own in rows.reshape(-1, rows.shape[-1])]
        tokens = (padded[2][rows] != pad_id).sum((-1, -2))
        scaled = [
            {name: array * (count / max(tokens.sum(), 1)) for name, array in of_part.parameters.items()}
            for of_part, count in zip(found, tokens.ravel(), strict=True)
        ]
        return cls(tokens, np.reshape([of_part.loss for of_part in found], tokens.shape), scaled)

    @property
    def norms(self) -> ndarray:
        """The norm of each contribution [slices, shares]."""
        squares = [sum(float(np.vdot(array, array)) for array in of_part.values()) for of_part in self.gradients]
        return np.sqrt(squares).reshape(self.tokens.shape)

    def explain(self, names: Sequence[str], gradient: Vectors) -> bool:
        """Whether the gradient of some of these parameters is made of the contributions."""
        return any(self.coefficients(name, gradient[name]) is not None for name in names)

    def coefficients(self, name: str, gradient: ndarray) -> ndarray | None:
        """Return how much of each contribution is in a gradient [slices, shares]; None if that is not what it is.

        What contributes nothing has NaN.
        """
        basis = np.stack([np.ravel(of_part[name]) for of_part in self.gradients], 1)
        there = np.linalg.norm(basis, axis=0) > EXACT * np.linalg.norm(basis)
        found = np.full(len(there), np.nan)
        wanted = np.ravel(gradient)
        if not np.isfinite(wanted).all():
            return None
        found[there] = np.linalg.lstsq(basis[:, there], wanted, rcond=None)[0]
        rest = wanted - basis[:, there] @ found[there]
        if np.linalg.norm(rest) > EXACT * max(np.linalg.norm(wanted), np.linalg.norm(basis)):
            return None
        return found.reshape(self.tokens.shape)


def divisions(rows: int, slices: int, shares: int) -> list[ndarray]:
    """Return the ways in which trainers divide the rows of a batch: their numbers [slices, shares, R], -1 for padding.

    Slices come first, and a share has neighbours or every so-manieth row; or shares come first, and have neighbours.
    """
    numbers = np.arange(rows)[:, None]
    found = [spread(numbers, slices, shares, -1)]
    found.append(found[0].reshape(slices, -1, shares, 1).swapaxes(1, 2))
    if rows % (slices * shares) == 0 and slices > 1:
        found.append(spread(numbers, shares, slices, -1).swapaxes(0, 1))
    return [each[..., 0] for each in found]


def explain(seen: Seen, expected: Seen, ways: Sequence[Contributions], plan: Plan) -> str:
    """Return what loss, gradient and norm look like, and which mistake that is; empty if nothing can be said.

    Args:
        seen: Of the process that is furthest off.
        expected: The run on one device.
        ways: What the shares contribute to the first gradient, for each way in which they may divide the rows; none
            where dropout makes it unknown.
        plan: The devices.
    """
    if not seen.losses or not expected.losses or seen.gradient.keys() != expected.gradient.keys():
        return ""
    wrong = _wrong(seen.gradient, expected.gradient)
    contributions = next((known for known in ways if known.explain(wrong, seen.gradient)), ways[0] if ways else None)
    said = [] if wrong else [*_behind_gradient(seen, expected, ways, plan)]
    if wrong and (dtype := _rounded(wrong, seen, expected, contributions)):
        said = [f"{_called(wrong, expected.gradient)}: right but for rounding, reduced in {dtype}"]
    elif wrong:
        groups: dict[str, list[str]] = {}
        shown: dict[str, str] = {}  # the coefficients of the first tensor
        for name in wrong:
            what, coefficients = _of_tensor(name, seen, expected, contributions)
            groups.setdefault(what, []).append(name)
            shown.setdefault(what, coefficients)
        said = [f"{_called(names, expected.gradient)}: {what}{shown[what]}" for what, names in groups.items()]
        said = [*said[:MOST], *([f"and {len(said) - MOST} more"] if len(said) > MOST else [])]
    if seen.tokens[:1] != expected.tokens[:1]:
        if not wrong and seen.tokens[0] == plan.shares * expected.tokens[0]:
            said = ["the gradient is right: all devices have all rows"]
        said.insert(0, f"a step counts {seen.tokens[0]} target tokens, not {expected.tokens[0]}")
    return "; ".join(said)


def _wrong(found: Vectors, wanted: Vectors) -> list[str]:
    """Return the tensors whose gradient is not what it should be."""
    whole = {f"of {name}": array for name, array in wanted.items()}
    whole[WHOLE] = np.concatenate([np.ravel(array) for array in wanted.values()])
    actual = {f"of {name}": array for name, array in found.items()}
    limit = {name: tolerance(f"of {name}", "float64", 0.0, 0.0) for name in wanted}
    return [name for name in wanted if not training_error(f"of {name}", actual, whole) <= limit[name]]


def _rounded(wrong: Sequence[str], seen: Seen, expected: Seen, contributions: Contributions | None) -> str:
    """Return the dtype in which contributions were summed, if no element is further off than that explains."""
    if contributions is None:
        return ""
    for dtype, eps in ROUNDED.items():
        near = (
            np.abs(seen.gradient[name] - expected.gradient[name])
            <= eps * sum(np.abs(of_part[name]) for of_part in contributions.gradients)
            for name in wrong
        )
        if all(map(np.all, near)):
            return dtype
    return ""


def _of_tensor(name: str, seen: Seen, expected: Seen, contributions: Contributions | None) -> tuple[str, str]:
    """Return what one gradient that is wrong consists of, and its coefficients, where it is made of contributions."""
    if not np.isfinite(seen.gradient[name]).all():
        return "not finite, as after a division by the tokens of a share that has none", ""
    if contributions is None:
        return "another than on one device: masks of dropout that are not drawn for the whole slice", ""
    shares = contributions.coefficients(name, seen.gradient[name])
    if shares is None:
        return "no sum of what the shares contribute: other rows, weights or buffers, or another backward pass", ""
    shown = "; ".join(", ".join(map(_shown, row)) for row in shares)
    counted = seen.tokens[0] / expected.tokens[0] if seen.tokens else None
    return _named(shares, contributions, seen.losses[0] / expected.losses[0], counted), f" ({shown})"


def _named(shares: ndarray, contributions: Contributions, loss: float, counted: float | None) -> str:
    """Return the mistake that the coefficients of the contributions show.

    Args:
        shares: The coefficients [slices, shares]; NaN fits everything.
        contributions: What they belong to.
        loss: That of the step, over what it should be.
        counted: The tokens of the step, likewise; None where they were not shown.
    """
    (slices, width), tokens = shares.shape, contributions.tokens
    with np.errstate(divide="ignore", invalid="ignore"):  # by what has no tokens
        own = tokens.sum() / tokens  # what makes the sum of a share its mean
        of_slices, of_shares = (tokens.sum() / tokens.sum(axis, keepdims=True) for axis in (1, 0))
        clipped = shares.ravel()[0] * contributions.norms.ravel()[0] / contributions.norms
    means = "each share divided by its own tokens, then averaged: a mean of means"
    patterns = (
        ("averaged over the shares after the division by the number of tokens", 1 / width),
        (means, own / width),
        (means, own / shares.size),
        (means, of_shares / width),
        ("each slice divided by its own tokens, then averaged: a mean of means", of_slices / slices),
        ("each share divided by its own tokens, then summed", own),
        ("scaled by the number of shares, as is the loss" if _near(loss, width) else "reduced twice", width),
        ("each share clipped by its own norm before the sum", clipped if np.nansum(np.abs(clipped)) else -1.0),
    )
    if what := next((what for what, pattern in patterns if width > 1 and _near(shares, pattern)), ""):
        return what
    present = [share for share in range(width) if not _near(shares[:, share], 0.0)]
    if not present:  # what the others contribute
        present = [share for share in range(width) if np.isnan(shares[:, share]).all()][:1]
    of_present = width * tokens[:, present].sum() / tokens.sum() if len(present) == 1 else 1.0
    if counted is None:  # the tokens that were counted, if the rows of one are there several times
        counted = of_present if _near(shares[:, present] * of_present, width) else 1.0
    shares = shares * counted  # how often the rows of each are there
    if len(shares) > 1 and _near(shares[-1], 1.0):
        return "right in the last slice only: the slices before are not reduced"
    if len(present) == 1 and width > 1 and _near(shares[:, present[0]], 1.0):
        return f"that of share {present[0]} alone: not reduced"
    if len(present) == 1 and _near(shares[:, present[0]], width):
        return f"the rows of share {present[0]} on all devices"
    if all(_near(shares[:, share], 1.0) for share in present):
        return f"without the rows of share {', '.join(str(share) for share in range(width) if share not in present)}"
    return "the shares count several times, or in part"


def _behind_gradient(seen: Seen, expected: Seen, ways: Sequence[Contributions], plan: Plan) -> Iterator[str]:
    """Yield what is wrong where the gradient is right: the loss, the norm, the update, or what is gathered."""
    factor = seen.norms[0] / expected.norms[0] if seen.norms else 1.0
    loss = seen.losses[0] - expected.losses[0]
    if not math.isfinite(loss):
        yield "the gradient is right, the loss not finite, as after a division by the tokens of a share that has none"
        return
    if not _near(loss, 0.0):
        yield f"the gradient is right, the loss {loss:+.4g} {_of_loss(seen.losses[0], expected, ways, plan)}off"
    if not _near(factor, 1.0):
        said = f"the gradient is right, its norm {factor:.6g} times what it should be"
        yield f"{said}: {_of_norm(factor, expected, ways, plan)}"
    elif _near(loss, 0.0) and _near(np.array(seen.losses), np.array(expected.losses)):
        yield "every step is right: what is gathered from the devices is not what they have"
    elif _near(loss, 0.0):
        begun = "the state that the run goes on from was not taken over whole, or the update differs"
        right = "the first gradient and its norm are" if seen.norms else "the first gradient is"
        yield f"{right} right: {begun if seen.first else 'what follows differs'}"


def _of_loss(loss: float, expected: Seen, ways: Sequence[Contributions], plan: Plan) -> str:
    """Return what a loss is that is wrong where the gradient is right, in brackets."""
    right, known = expected.losses[0], {}
    if plan.tensor > 1:
        known["= log(tensor) "] = right + math.log(plan.tensor)
    for way in ways:
        sums, tokens = (way.tokens * way.losses).sum(0), way.tokens.sum(0)
        for share, (total, count) in enumerate(zip(sums, tokens, strict=True)):
            known[f"(that of share {share}, over its own tokens) "] = total / max(count, 1)
            known[f"(what share {share} contributes to it, not the sum) "] = total / max(tokens.sum(), 1)
        known["(the mean of the shares' own means) "] = (sums / np.maximum(tokens, 1)).mean()
        known["(the mean over the shares of what they contribute, not the sum) "] = right / plan.shares
        known["(the sum over all tokens, not divided by their number) "] = right * tokens.sum()
        if what := next((what for what, number in known.items() if _near(loss - number, 0.0)), ""):
            return what
    return next((what for what, number in known.items() if _near(loss - number, 0.0)), "")


def _of_norm(factor: float, expected: Seen, ways: Sequence[Contributions], plan: Plan) -> str:
    """Return what a norm is of that is so many times what it should be."""
    squares = {name: float(np.vdot(array, array)) for name, array in expected.gradient.items()}
    replicated = sum(square for name, square in squares.items() if tensor_axis(name) is None) / sum(squares.values())
    known = {
        f"every tensor counts {plan.shares} times": plan.shares**0.5,
        f"what each of {plan.tensor} devices has whole counts {plan.tensor} times": (
            (1.0 + replicated * (plan.tensor - 1)) ** 0.5
        ),
    }
    for share, norm in enumerate(ways[0].norms.sum(0) if ways else ()):
        known[f"that of share {share} alone"] = norm / expected.norms[0]
    part = "that of a part alone" if factor < 1.0 else "that of more than the gradient"
    return next((what for what, times in known.items() if _near(factor, times)), part)


def _shown(number: float) -> str:
    return "-" if math.isnan(number) else f"{number if abs(number) > EXACT else 0.0:.4g}"


def _near(found: ndarray | float, wanted: ndarray | float) -> bool:
    """Whether all numbers are the wanted ones; NaN is any."""
    return not np.any(np.abs(found - wanted) > EXACT * np.maximum(np.abs(wanted), 1.0))


def _called(names: Sequence[str], every: Iterable[str]) -> str:
    """Return what a number of tensors have in common."""
    kinds = {
        "all gradients": lambda name: True,
        "the gradients of the norms": lambda name: "norm." in name,
        "the gradients of the tables": lambda name: name.endswith(".table"),
        "the gradients of the layers": lambda name: ".layers." in name,
        "the gradients of what tensor divides": lambda name: tensor_axis(name) is not None,
        "the gradients of what tensor leaves whole": lambda name: tensor_axis(name) is None,
    }
    if len(names) == 1:
        return f"the gradient of {names[0]}"
    for called, belongs in kinds.items():
        if {name for name in every if belongs(name)} == {*names}:
            return called
    return f"{len(names)} of {len([*every])} gradients, the first is that of {names[0]}"
