"""Identify bugs in distributed training from the coefficient of each shard's contribution to the reduced gradient.

The correct gradient of a batch is the sum of all shards' contributions. The reference computes these contributions. If
the gradient is wrong, solving a linear system yields the coefficient of each contribution. These coefficients identify
the bug. For example, (1/2, 1/2) indicates that the gradient is a mean instead of a sum, and (1, 0) indicates that it
was not reduced. A coefficient of N / (W n) indicates that each shard computed its own mean. Here, N is the number of
target tokens in the batch, n is the number of target tokens in the shard, and W is the number of shards.
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

EXACT = 1e-8  # relative tolerance for comparing two numbers
ROUNDED = {"float32": 2.0**-23, "bfloat16": 2.0**-7}  # maximum relative rounding error of each dtype
MOST = 3  # maximum number of groups of tensors in a message
# ``compare`` adds details to messages that end with one of these texts.
LATER, ONE_SHARD = "later steps differ", "the norm of one shard only"
NO_TOKENS = "not finite, as after dividing by the token count of a shard without tokens"
Vectors = Mapping[str, ndarray]


@dataclass(frozen=True)
class Contributions:
    """The contribution of every shard in every micro-batch to the gradient.

    Attributes:
        tokens: Number of target tokens [micro-batches, shards].
        losses: Loss per target token [micro-batches, shards].
        gradients: Contributions to the gradient, divided by the number of tokens in the full batch. The shards of each
            micro-batch are adjacent in the list.
    """

    tokens: ndarray
    losses: ndarray
    gradients: Sequence[Vectors]

    @classmethod
    def of(cls, probe: Probe, weights: Vectors, step: int, rows: ndarray) -> Contributions:
        """Compute the contributions with the reference, without dropout.

        Args:
            probe: Model, settings, and batches.
            weights: Weights of the model.
            step: Number of the step whose batch is used.
            rows: Row numbers of each shard in each micro-batch, as returned by ``divisions``.
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
        """Norm of each contribution [micro-batches, shards]."""
        squares = [sum(float(np.vdot(array, array)) for array in of_part.values()) for of_part in self.gradients]
        return np.sqrt(squares).reshape(self.tokens.shape)

    def explain(self, names: Sequence[str], gradient: Vectors) -> bool:
        """Return True if at least one of the named gradients is a linear combination of the contributions."""
        return any(self.coefficients(name, gradient[name]) is not None for name in names)

    def coefficients(self, name: str, gradient: ndarray) -> ndarray | None:
        """Return the coefficients [micro-batches, shards] of the contributions whose sum is the given gradient.

        If a contribution is zero, its coefficient is NaN. If the gradient isn't a linear combination of the
        contributions, return None.
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


def divisions(rows: int, micro_batches: int, shards: int) -> list[ndarray]:
    """Return the possible ways to divide a batch among micro-batches and shards.

    A trainer may first divide the batch into micro-batches and then assign adjacent rows, or every ``shards``-th row,
    to each shard. Alternatively, it may first divide the batch into shards of adjacent rows. Each division is an array
    of row numbers [micro-batches, shards, R], in which padding rows have the number -1.
    """
    numbers = np.arange(rows)[:, None]
    found = [spread(numbers, micro_batches, shards, -1)]
    found.append(found[0].reshape(micro_batches, -1, shards, 1).swapaxes(1, 2))
    if rows % (micro_batches * shards) == 0 and micro_batches > 1:
        found.append(spread(numbers, shards, micro_batches, -1).swapaxes(0, 1))
    return [each[..., 0] for each in found]


def explain(seen: Seen, expected: Seen, ways: Sequence[Contributions], plan: Plan) -> str:
    """Return a message about the errors in the loss, the gradient, and the norm, and about the bug that explains them.

    The message is empty if the function doesn't recognize the errors.

    Args:
        seen: Results of the process with the largest error.
        expected: Results on one device.
        ways: Contributions of the shards to the first gradient, for each possible division of the rows; empty if the
            run uses dropout.
        plan: The parallelism plan.
    """
    if not seen.losses or not expected.losses or seen.gradient.keys() != expected.gradient.keys():
        return ""
    wrong = _wrong(seen.gradient, expected.gradient)
    contributions = next((known for known in ways if known.explain(wrong, seen.gradient)), ways[0] if ways else None)
    said = [] if wrong else [*_behind_gradient(seen, expected, ways, plan)]
    if wrong and (dtype := _rounded(wrong, seen, expected, contributions)):
        said = [f"{_called(wrong, expected.gradient)}: correct except for rounding: reduced in {dtype}"]
    elif wrong:
        groups: dict[str, list[str]] = {}
        shown: dict[str, str] = {}  # coefficients of the first tensor of each group
        for name in wrong:
            what, coefficients = _of_tensor(name, seen, expected, contributions)
            groups.setdefault(what, []).append(name)
            shown.setdefault(what, coefficients)
        said = [f"{_called(names, expected.gradient)}: {what}{shown[what]}" for what, names in groups.items()]
        said = [*said[:MOST], *([f"and {len(said) - MOST} more"] if len(said) > MOST else [])]
    if seen.tokens[:1] != expected.tokens[:1]:
        if not wrong and seen.tokens[0] == plan.shards * expected.tokens[0]:
            said = ["the gradient is correct: all devices train on all rows"]
        said.insert(0, f"a step has {seen.tokens[0]} target tokens instead of {expected.tokens[0]}")
    return "; ".join(said)


def _wrong(found: Vectors, wanted: Vectors) -> list[str]:
    """Return the names of the parameters whose gradients are wrong."""
    whole = {f"of {name}": array for name, array in wanted.items()}
    whole[WHOLE] = np.concatenate([np.ravel(array) for array in wanted.values()])
    actual = {f"of {name}": array for name, array in found.items()}
    limit = {name: tolerance(f"of {name}", "float64", 0.0, 0.0) for name in wanted}
    return [name for name in wanted if not training_error(f"of {name}", actual, whole) <= limit[name]]


def _rounded(wrong: Sequence[str], seen: Seen, expected: Seen, contributions: Contributions | None) -> str:
    """Return the dtype in which the contributions were summed, if rounding to this dtype explains all errors.

    Return an empty string otherwise.
    """
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
    """Return a description of a wrong gradient and, if known, the coefficients of its contributions as text."""
    if not np.isfinite(seen.gradient[name]).all():
        return NO_TOKENS, ""
    if contributions is None:
        return "different from one device: dropout masks are not drawn for the full micro-batch", ""
    shards = contributions.coefficients(name, seen.gradient[name])
    if shards is None:
        return "not a sum of the shards' gradients: rows, weights, buffers or the backward pass differ", ""
    shown = "; ".join(", ".join(map(_shown, row)) for row in shards)
    counted = seen.tokens[0] / expected.tokens[0] if seen.tokens else None
    return _named(shards, contributions, seen.losses[0] / expected.losses[0], counted), f" ({shown})"


def _named(shards: ndarray, contributions: Contributions, loss: float, counted: float | None) -> str:
    """Identify a bug from the coefficients of the contributions, and return a description of the bug.

    Args:
        shards: Coefficients [micro-batches, shards]. NaN matches any number.
        contributions: The contributions, in the same order as the coefficients.
        loss: Ratio of the loss to the expected loss.
        counted: Ratio of the number of tokens to the expected number; None if unknown.
    """
    (micro_batches, width), tokens = shards.shape, contributions.tokens
    with np.errstate(divide="ignore", invalid="ignore"):  # a shard may have no tokens
        own = tokens.sum() / tokens  # factor that turns a shard's sum into its mean
        of_micro_batches, of_shards = (tokens.sum() / tokens.sum(axis, keepdims=True) for axis in (1, 0))
        clipped = shards.ravel()[0] * contributions.norms.ravel()[0] / contributions.norms
    means = "each shard divided by its own token count, then averaged: a mean of means"
    patterns = (
        ("averaged over the shards after dividing by the number of tokens", 1 / width),
        (means, own / width),
        (means, own / shards.size),
        (means, of_shards / width),
        (
            "each micro-batch divided by its own token count, then averaged: a mean of means",
            of_micro_batches / micro_batches,
        ),
        ("each shard divided by its own token count, then summed", own),
        ("scaled by the number of shards, like the loss" if _near(loss, width) else "reduced twice", width),
        ("each shard clipped by its own norm before the sum", clipped if np.nansum(np.abs(clipped)) else -1.0),
    )
    if what := next((what for what, pattern in patterns if width > 1 and _near(shards, pattern)), ""):
        return what
    present = [shard for shard in range(width) if not _near(shards[:, shard], 0.0)]
    if not present:  # NaN means that the contribution of a shard is zero
        present = [shard for shard in range(width) if np.isnan(shards[:, shard]).all()][:1]
    of_present = width * tokens[:, present].sum() / tokens.sum() if len(present) == 1 else 1.0
    if counted is None:  # estimate the ratio, assuming that all devices have trained on the same shard
        counted = of_present if _near(shards[:, present] * of_present, width) else 1.0
    shards = shards * counted  # number of times that the gradient includes each shard's rows
    if len(shards) > 1 and _near(shards[-1], 1.0):
        return "correct only in the last micro-batch: earlier micro-batches are not reduced"
    if len(present) == 1 and width > 1 and _near(shards[:, present[0]], 1.0):
        return f"only shard {present[0]} contributes: not reduced"
    if len(present) == 1 and _near(shards[:, present[0]], width):
        return f"all devices train on the rows of shard {present[0]}"
    if all(_near(shards[:, shard], 1.0) for shard in present):
        return f"missing the rows of shard {', '.join(str(shard) for shard in range(width) if shard not in present)}"
    return "some shards contribute more than once, or only partly"


def _behind_gradient(seen: Seen, expected: Seen, ways: Sequence[Contributions], plan: Plan) -> Iterator[str]:
    """Yield descriptions of errors in the loss, norm, update, or gathered state of a run whose gradient is correct."""
    factor = seen.norms[0] / expected.norms[0] if seen.norms else 1.0
    loss = seen.losses[0] - expected.losses[0]
    if not math.isfinite(loss):
        yield f"the gradient is correct, but the loss is {NO_TOKENS}"
        return
    if not _near(loss, 0.0):
        reason = _of_loss(seen.losses[0], expected, ways, plan)
        yield f"the gradient is correct, but the loss is off by {loss:+.4g}{reason}"
    if not _near(factor, 1.0):
        said = f"the gradient is correct, but its norm is {factor:.6g} times the expected norm"
        yield f"{said}: {_of_norm(factor, expected, ways, plan)}"
    elif _near(loss, 0.0) and _near(np.array(seen.losses), np.array(expected.losses)):
        yield "every step is correct, but the state gathered from the devices is not"
    elif _near(loss, 0.0):
        begun = "the state from which the run resumes was not fully restored, or the update differs"
        right = "the first gradient and its norm are" if seen.norms else "the first gradient is"
        yield f"{right} correct: {begun if seen.first else LATER}"


def _of_loss(loss: float, expected: Seen, ways: Sequence[Contributions], plan: Plan) -> str:
    """Return a description of a wrong loss, with a leading space, or an empty string if the cause is unknown."""
    right, known = expected.losses[0], {}
    if plan.tensor > 1:
        known[" = log(tensor)"] = right + math.log(plan.tensor)
    for way in ways:
        sums, tokens = (way.tokens * way.losses).sum(0), way.tokens.sum(0)
        for shard, (total, count) in enumerate(zip(sums, tokens, strict=True)):
            known[f" (the loss of shard {shard} per token of that shard)"] = total / max(count, 1)
            known[f" (the contribution of shard {shard} instead of the sum over all shards)"] = total / max(
                tokens.sum(), 1
            )
        known[" (the mean of the per-shard means)"] = (sums / np.maximum(tokens, 1)).mean()
        known[" (the mean of the shards' contributions instead of the sum)"] = right / plan.shards
        known[" (the sum over all tokens, not divided by their number)"] = right * tokens.sum()
        if what := next((what for what, number in known.items() if _near(loss - number, 0.0)), ""):
            return what
    return next((what for what, number in known.items() if _near(loss - number, 0.0)), "")


def _of_norm(factor: float, expected: Seen, ways: Sequence[Contributions], plan: Plan) -> str:
    """Return a description of a wrong norm, given its ratio to the expected norm."""
    squares = {name: float(np.vdot(array, array)) for name, array in expected.gradient.items()}
    replicated = sum(square for name, square in squares.items() if tensor_axis(name) is None) / sum(squares.values())
    known = {
        f"every tensor is included {plan.shards} times": plan.shards**0.5,
        f"tensors that are replicated on {plan.tensor} devices are included {plan.tensor} times": (
            (1.0 + replicated * (plan.tensor - 1)) ** 0.5
        ),
    }
    for shard, norm in enumerate(ways[0].norms.sum(0) if ways else ()):
        known[f"the norm of the contribution of shard {shard} only"] = norm / expected.norms[0]
    part = ONE_SHARD if factor < 1.0 else "the norm includes more than the gradient"
    return next((what for what, times in known.items() if _near(factor, times)), part)


def _shown(number: float) -> str:
    return "-" if math.isnan(number) else f"{number if abs(number) > EXACT else 0.0:.4g}"


def _near(found: ndarray | float, wanted: ndarray | float) -> bool:
    """Return True if all numbers match up to rounding errors. NaN matches any number."""
    return not np.any(np.abs(found - wanted) > EXACT * np.maximum(np.abs(wanted), 1.0))


def _called(names: Sequence[str], every: Iterable[str]) -> str:
    """Return a phrase that describes the named gradients."""
    kinds = {
        "all gradients": lambda name: True,
        "the gradients of the norms": lambda name: "norm." in name,
        "the gradients of the embedding matrices": lambda name: name.endswith(".table"),
        "the gradients of the layers": lambda name: ".layers." in name,
        "the gradients of the tensor-parallel parameters": lambda name: tensor_axis(name) is not None,
        "the gradients of the parameters that tensor replicates": lambda name: tensor_axis(name) is None,
    }
    if len(names) == 1:
        return f"the gradient of {names[0]}"
    for called, belongs in kinds.items():
        if {name for name in every if belongs(name)} == {*names}:
            return called
    return f"{len(names)} of {len([*every])} gradients, starting with {names[0]}"
