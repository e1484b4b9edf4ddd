"""What training shows: losses, gradients, and weights and moments after some steps, as tensors with names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np
from numpy import ndarray

from reference_numpy.search_plan import SearchResult
from reference_numpy.training_config import TrainingConfig
from transformer_parity.cases.case import ACTIVATIONS, DECODE, GRADIENTS, Case
from transformer_parity.compare.tolerances import EPS, POLICY, relative_error
from transformer_parity.ports.protocol import (
    LoadedPort,
    MissingAbilityError,
    SearchOptions,
)

Tensors = dict[str, ndarray]


def run(case: Case, loaded: LoadedPort, dtype: str) -> Tensors:
    """Return what a case computes, in the order of computation."""
    inputs = {name: array.copy() for name, array in case.inputs.items()}
    if case.stage == ACTIVATIONS:
        result = loaded.run(case.block, inputs, taps=True)
        return {**result.taps, OUTPUT: result.output}
    if case.stage == DECODE:
        if case.search is None:
            raise ValueError("a search needs its options")
        found = loaded.search(inputs["source_ids"], case.search)
        if found.nbest_ids.dtype.kind not in "iu":
            raise TypeError(f"tokens must be integers: got {found.nbest_ids.dtype}")
        scores = {} if found.nbest_scores is None else {SCORES: found.nbest_scores}
        return {TOKENS: found.nbest_ids.astype(np.int64), **scores}
    shown = observe_training(case, loaded, inputs, dtype)
    shown.pop(WHOLE, None)  # which is the others, one after another
    return shown


OUTPUT = "output"  # the name under which a block's return value is compared when no tap is on


TOKENS, SCORES = "tokens", "scores"  # of a search


def searched(result: SearchResult, options: SearchOptions) -> dict[str, ndarray]:
    """Return what a search found as tensors of fixed shapes; padding is 0, and any token above."""
    ids = result.nbest_ids
    tokens = np.zeros((*ids.shape[:2], max(options.max_length or 0, ids.shape[2])))
    tokens[..., : ids.shape[2]] = ids + 1
    return {TOKENS: tokens} if result.nbest_scores is None else {TOKENS: tokens, SCORES: result.nbest_scores}


def observe_training(case: Case, loaded: LoadedPort, inputs: Mapping[str, ndarray], dtype: str) -> dict[str, ndarray]:
    """Return what a case of gradients or optimizer steps shows of a model."""
    if case.stage == GRADIENTS:
        return gradients(loaded, inputs)
    if case.settings is None:
        raise ValueError(f"case {case.name} has no training settings")
    return steps(loaded, shifted(inputs), case.settings, last_step(dtype))


def given(arrays: Mapping[str, ndarray], dtype: str) -> dict[str, ndarray]:
    """Return what a port is given: arrays it cannot write to, rounded to bfloat16 beforehand where that is the dtype.

    Both sides start from the same numbers, and a port that changes its caller's arrays is found out.
    """
    given = {}
    for name, array in arrays.items():
        rounds = dtype == "bfloat16" and array.dtype.kind == "f"
        given[name] = array.astype("bfloat16").astype(array.dtype) if rounds else array.view()
        given[name].setflags(write=False)
    return given


def structure_problem(actual: ndarray, truth: ndarray, dtype: str) -> str:
    """Say what is wrong with a tensor before any number is compared; empty if nothing is."""
    if actual.shape != truth.shape:
        return f"shape must be {list(truth.shape)}: got {list(actual.shape)}"
    if actual.dtype.name != dtype:
        return f"dtype must be {dtype}: got {actual.dtype.name}"
    if not np.isfinite(actual).all():
        return f"{int((~np.isfinite(actual)).sum())} of {actual.size} values are NaN or infinite"
    return ""


def name_problem(actual: Iterable[str], expected: Iterable[str]) -> str:
    """Say in what two different lists of names differ."""
    actual, expected = list(actual), list(expected)
    if missing := [name for name in expected if name not in actual]:
        return f"missing {', '.join(missing[:3])}" + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    if extra := [name for name in actual if name not in expected]:
        return f"unexpected {', '.join(extra[:3])}" + (f" and {len(extra) - 3} more" if len(extra) > 3 else "")
    first = next(i for i, (ours, theirs) in enumerate(zip(actual, expected, strict=True)) if ours != theirs)
    return f"{actual[first]} fired where {expected[first]} was due"


def tensors(loaded: Any, case: Case) -> dict[str, ndarray]:
    """Return all that a case shows of a port in float64, in the order of computation."""
    if case.stage == ACTIVATIONS:
        result = loaded.run(case.block, case.inputs, taps=True)
        return {**result.taps, OUTPUT: result.output}
    if case.stage == GRADIENTS:
        return gradients(loaded, case.inputs)
    if case.stage == DECODE:
        options = case.search or SearchOptions()
        found = searched(loaded.search(case.inputs["source_ids"], options), options)
        if options.beam_size is None:
            found = {"logits": loaded.decode_stepwise(case.inputs["source_ids"], case.inputs["target_ids"]), **found}
        return found
    if case.settings is None:
        raise ValueError(f"case {case.name} has no training settings")
    return steps(loaded, shifted(case.inputs), case.settings, last_step("float64"))


SNAPSHOTS = (1, 5, 20)  # steps after which weights and moments are looked at
LOSS, WHOLE = "loss", "the whole gradient"
OPTIONAL = {  # what a port need not show
    "gradients at taps": lambda name: name.startswith("at "),
    "norms of the gradient": lambda name: name.endswith("norm of the gradient"),
    "moments": lambda name: " moment " in name,
    "weights": lambda name: " weight " in name,
}
Arrays = Mapping[str, ndarray]


def gradients(loaded: Any, inputs: Arrays) -> dict[str, ndarray]:
    """Return loss and gradients in the order of the backward pass: where a mistake is introduced, it shows first."""
    found = loaded.gradients(inputs)
    whole = np.concatenate([np.ravel(found.parameters[name]) for name in sorted(found.parameters)])
    return {
        LOSS: np.asarray(found.loss),
        WHOLE: whole,
        **{f"at {name}": found.taps[name] for name in reversed(found.taps)},
        **{f"of {name}": found.parameters[name] for name in reversed(found.parameters)},
    }


def shifted(inputs: Arrays) -> list[dict[str, ndarray]]:
    """Return another batch for each step, of the same shape: the sentences change places with one another's targets."""
    source_ids = inputs["source_ids"]
    return [{**inputs, "source_ids": np.roll(source_ids, shift, axis=0)} for shift in range(len(source_ids))]


def last_step(dtype: str) -> int:
    """Return how many steps are taken: to the last snapshot in float64 only (``steps.float32`` in policy.toml)."""
    return SNAPSHOTS[-1] if dtype == "float64" else SNAPSHOTS[-2]


def steps(loaded: Any, batches: Sequence[Arrays], settings: TrainingConfig, last: int) -> dict[str, ndarray]:
    """Train a model and return every loss, and weights and moments after the steps of ``SNAPSHOTS``.

    But not the weights of key biases: their gradients are rounding noise (see ``error``), which Adam scales up to whole
    steps; what they are changes no output.
    """
    trainer = loaded.trainer(settings)
    found = {}
    for step in range(1, last + 1):
        result = trainer.train_step(**batches[step % len(batches)])
        found[f"step {step} {LOSS}"] = np.asarray(float(result.loss))
        if result.gradient_norm is not None:
            found[f"step {step} norm of the gradient"] = np.asarray(float(result.gradient_norm))
        if step in SNAPSHOTS:
            state = trainer.export_state()
            for what, tensors in (
                ("first moment", state.first_moment if state else {}),
                ("second moment", state.second_moment if state else {}),
                ("weight", _weights(loaded)),
            ):
                found |= {
                    f"step {step} {what} {name}": tensor
                    for name, tensor in tensors.items()
                    if what != "weight" or not _is_noise(name)
                }
    return found


def _weights(loaded: Any) -> Mapping[str, ndarray]:
    try:
        return loaded.export()
    except MissingAbilityError:  # losses are still to be seen
        return {}


def training_error(name: str, actual: Arrays, expected: Arrays) -> float:
    """Return how far a tensor is from what is expected of it.

    The gradient of a key bias is zero: adding the same to every score changes no weight. What is left is rounding
    noise, which is measured by the gradient of the query bias. Other gradients are zero now and then, as those of
    scores are where there is one key: noise in them is measured by the whole gradient.
    """
    if not _is_noise(name):
        whole = expected.get(WHOLE)
        if whole is None or expected[name].any() or expected[name].shape != np.shape(actual[name]):
            return relative_error(actual[name], expected[name])
        noise = np.linalg.norm(np.asarray(actual[name], np.float64))
        return float(noise / np.linalg.norm(whole)) if noise else 0.0
    difference = np.linalg.norm(np.asarray(actual[name], np.float64) - expected[name])
    scale = np.linalg.norm(expected[name.replace("key_proj.bias", "query_proj.bias")])
    return float(difference / scale) if difference else 0.0


def _is_noise(name: str) -> bool:
    return name.endswith("key_proj.bias")


def training_tolerance(name: str, dtype: str, baseline: float, whole: float) -> float:
    """Return the largest error allowed.

    Args:
        name: What is looked at.
        dtype: The working dtype.
        baseline: The error that the NumPy reference itself makes here in float32.
        whole: Likewise, for the whole gradient.
    """
    kind = "steps" if name.startswith("step ") else "gradients"
    rule = POLICY[kind][dtype]
    what = LOSS if name.endswith(LOSS) else "whole" if name == WHOLE else "tensor"
    if dtype == "float64" or kind == "steps":
        return rule[what]
    return rule["ratio"] * max(baseline, whole if what == "tensor" else 0.0) + rule["floor_in_eps"] * EPS[dtype]
