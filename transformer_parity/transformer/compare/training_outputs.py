"""Training as outputs: losses, gradients, and weights and moments after some steps, as tensors with names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy import ndarray

from transformer_parity.transformer.compare.tolerances import EPS, POLICY, finite, relative_error
from transformer_parity.transformer.ports.protocol import MissingAbilityError
from transformer_spec.training_config import TrainingConfig

SNAPSHOTS = (1, 5, 20)  # steps after which weights and moments are compared
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
    if not found.parameters:
        raise ValueError("gradients must hold one array per parameter: got none")
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
    """Return how many steps are taken: to the last snapshot in float64 only (``steps.float32`` in tolerances.toml)."""
    return SNAPSHOTS[-1] if dtype == "float64" else SNAPSHOTS[-2]


def steps(loaded: Any, batches: Sequence[Arrays], settings: TrainingConfig, last: int) -> dict[str, ndarray]:
    """Train a model and return every loss, and weights and moments after the steps of ``SNAPSHOTS``.

    Not the weights of key biases: their gradients are rounding noise (see ``training_error``), which Adam scales up to
    whole steps; what they are changes no output.
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
        name: The name of the tensor.
        dtype: The working dtype.
        baseline: The error that the NumPy reference itself makes here in float32.
        whole: Likewise, for the whole gradient.
    """
    kind = "steps" if name.startswith("step ") else "gradients"
    rule = POLICY[kind][dtype]
    what = LOSS if name.endswith(LOSS) else "whole" if name == WHOLE else "tensor"
    if dtype == "float64" or kind == "steps":
        return rule[what]
    own = max(finite(baseline, name), finite(whole, WHOLE) if what == "tensor" else 0.0)
    return rule["ratio"] * own + rule["floor_in_eps"] * EPS[dtype]
