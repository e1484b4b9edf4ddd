"""Derive a port's learning rate, weight decay, and positional encodings from its tensors.

Adam's first step doesn't depend on the scale of the gradient. If every weight moves in the correct direction, but too
far by the same factor, the learning rate of this step is too large by this factor. ``schedule`` measures the rate of
every step without identifying a cause. In contrast, this module recognizes a constant learning rate, a learning rate
that is multiplied by a constant, and a different number of warmup steps. It can also measure the rate of the first step
if later steps differ for a different reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy import ndarray

from reference_numpy.embedding import sinusoidal_encoding
from transformer_parity.engine.signatures import SAME, is_close, written
from transformer_parity.transformer.bugs.bug import Bug
from transformer_parity.transformer.bugs.candidates.step_variants import reduced_by
from transformer_parity.transformer.bugs.optimizer import rate
from transformer_parity.transformer.bugs.other_optimizers import MATRICES, decoupled
from transformer_parity.transformer.cases.case import ACTIVATIONS, Case
from transformer_parity.transformer.diagnose.candidates.trials import TRUTH, Trials, observed
from transformer_parity.transformer.diagnose.evidence.closeness import best_factor, factor_in_words
from transformer_parity.transformer.stages.steps import SNAPSHOTS
from transformer_spec.config import TransformerConfig

Arrays = Mapping[str, ndarray]
SURE = 1e-4  # maximum relative residual of a measured factor; float64 rounding errors are far smaller
ROUNDED = 1e-6  # relative tolerance for rates that a port computes in float32
SCHEDULE = "check the learning rate, which must be settings.learning_rate(step, d_model)"
RATE, FIRST_RATE = (f"settings.learning_rate({step}, config.d_model)" for step in ("n", "1"))
DECAYED = 1e-6  # relative tolerance for differences between weights, which have large relative rounding errors
ANGLE = 1e-3  # maximum error of sin(x) if x is computed in float32, for 10,000 positions
ADDED = 1e-14  # relative rounding error of a float64 sum; rounding to float32 causes errors up to 6e-8
ANGLES = 6  # number of channels whose angles are listed
DIGITS = 12  # significant digits of a measured factor; rounding affects later digits


def rate_candidates(case: Case, shown: Arrays) -> list[Bug]:
    """Return candidates whose schedules explain the learning rate of the first step.

    Return [] if this learning rate is correct or can't be measured.
    """
    factor = _move_factors(case, shown)[0]
    if not math.isfinite(factor) or factor <= 0.0 or abs(factor - 1.0) <= ROUNDED:
        return []
    settings = case.training
    first = factor * settings.learning_rate(1, case.config.d_model)
    found = {
        f"{RATE} * {factor:.{DIGITS}g}": f"a learning rate multiplied by {factor:.6g}",
        f"{FIRST_RATE} * {factor:.{DIGITS}g}": f"a constant learning rate of {first:.6g}",
    }
    warmup = settings.warmup_steps * factor ** (-2.0 / 3.0)
    if round(warmup) >= 1 and math.isclose(warmup, round(warmup), rel_tol=1e-6):
        other = f"type(settings)(**{{**vars(settings), 'warmup_steps': {round(warmup)}}})"
        words = f"a learning rate that warms up over {round(warmup)} steps instead of {settings.warmup_steps}"
        found[RATE.replace("settings", other)] = words
    return [Bug(name, "", rate(new)) for new, name in found.items()]


def first_step_in_words(case: Case, shown: Arrays) -> str:
    """Report the factor by which the first step is too large or too small, or return "" if there is no such factor."""
    first, *later = _move_factors(case, shown)
    if not math.isfinite(first) or abs(first - 1.0) <= ROUNDED or first <= 0.0 or _losses_agree(case, shown):
        return ""
    factor = f"step 1 moves every weight in the right direction, but {written(first)} times as far as the reference"
    if any(abs(moved - first) > 0.005 for moved in later):
        listed = ", ".join(f"{moved:.2g} times after {step}" for step, moved in zip(SNAPSHOTS[1:], later, strict=True))
        factor += f" (about {listed} steps)"
    cause = "the factor differs in later steps"
    if all(math.isclose(moved, first, rel_tol=0.2) for moved in later):
        cause = SCHEDULE
    return f"in {case.name}, {factor}: {cause}"


def _losses_agree(case: Case, shown: Arrays) -> bool:
    """Return whether all losses are correct. If they are, the port returns different weights than it trains."""
    usual = observed(TRUTH, case) or {}
    names = [name for name in usual if name.endswith(" loss") and name in shown]
    return bool(names) and all(math.isclose(shown[name], usual[name], rel_tol=SAME) for name in names)


def _move_factors(case: Case, shown: Arrays) -> list[float]:
    """Return, for each snapshot, the ratio of the weight changes in the port to the weight changes in the reference.

    For the first snapshot, the ratio is NaN unless it is the same for all weights. For later snapshots, the ratio is a
    least-squares fit over all weights.
    """
    usual, start = observed(TRUTH, case) or {}, case.load_weights() if case.settings is not None else {}
    found = []
    for step in SNAPSHOTS:
        names = {name: f"step {step} weight {name}" for name in start}
        names = {name: tap for name, tap in names.items() if tap in shown and tap in usual}
        if not names or any(shown[tap].shape != start[name].shape for name, tap in names.items()):
            return [math.nan] * len(SNAPSHOTS)
        actual, expected = (
            np.concatenate([np.ravel(tensors[tap] - start[name].astype(np.float64)) for name, tap in names.items()])
            for tensors in (shown, usual)
        )
        factor = best_factor(actual, expected)
        weights = np.concatenate([np.ravel(usual[tap]) for tap in names.values()])
        rounding = np.finfo(np.float64).eps * np.linalg.norm(weights)  # matters only if the weights barely change
        far = np.linalg.norm(actual - factor * expected)
        same = far <= max(SAME * np.linalg.norm(actual), rounding) and far < SURE * np.linalg.norm(actual)
        found.append(factor if same or step > 1 else math.nan)
    return found


def decay_candidates(case: Case, shown: Mapping[str, ndarray]) -> list[Bug]:
    """Return candidates with weight decay, or [] if the port doesn't apply weight decay in the first step.

    The coefficient is measured in the first step.

    Args:
        case: A case with optimizer steps.
        shown: The port's tensors.
    """
    usual = (observed(TRUTH, case) or {}) if case.settings is not None else {}
    parts: dict[bool, list[float]] = {True: [], False: []}  # True for matrices, False for vectors
    for name, array in case.load_weights().items() if usual else ():
        tap, weight = f"step 1 weight {name}", array.astype(np.float64)
        if tap not in shown or tap not in usual or shown[tap].shape != weight.shape:
            continue
        less = usual[tap] - shown[tap]
        part = best_factor(less, weight)
        if np.linalg.norm(less - part * weight) > DECAYED * np.linalg.norm(less) + 1e-15 * np.linalg.norm(weight):
            return []
        parts[weight.ndim > 1].append(part)
    part = float(np.median(parts[True] or [0.0]))
    if not part > 0.0 or not np.allclose(parts[True], part, DECAYED, 0.0):
        return []
    where, but_which = "1.0", ""
    if np.allclose(parts[False], 0.0, 0.0, 1e-3 * part):
        where, but_which = MATRICES, ", except for biases and norms"
    elif not np.allclose(parts[False], part, 1e-3, 0.0):
        return []
    value = f"{part / case.training.learning_rate(1, case.config.d_model):.6g}"
    per_step = f"weight decay of {part:.6g} per step, regardless of the learning rate{but_which}"
    found = [Bug(per_step, "", reduced_by(f"{part:.6g}", where))]
    if value != "0.01":  # the bug catalog already contains this value
        found.append(Bug(f"decoupled weight decay of {value}{but_which}", "", decoupled(value, where)))
    return found


def wavelength_candidates(case: Case, shown: Arrays) -> list[Bug]:
    """Return a candidate with a different base of the wavelengths in the positional encodings.

    The base is measured at the second source position. Return [] if the base is 10000 or can't be measured.
    """
    tap, usual, m = "source_embedding.output", observed(TRUTH, case) or {}, case.config.d_model // 2
    if case.stage != ACTIVATIONS or tap not in usual or tap not in shown or shown[tap].shape != usual[tap].shape:
        return []
    if usual[tap].shape[1] < 2 or m < 2 or not _adds_sines(case.config):
        return []
    row = int((case.inputs["source_ids"] != case.config.pad_id).sum(1).argmax())
    added = (shown[tap] - usual[tap])[row, 1] + _encoding(case.config, 2)[1]
    halves = (added[:m], added[m:]) if case.config.position_layout == "split" else (added[::2], added[1::2])
    angles = np.arctan2(*halves) / (1 + case.config.position_offset)
    if not (np.isfinite(angles).all() and (angles > 0.0).all()):
        return []
    bases = angles[1:] ** (-(m if case.config.position_timescale == "m" else m - 1) / np.arange(1, m))
    base = float(f"{np.median(bases):.6g}")
    if not np.allclose(bases, base, 1e-6, 0.0) or math.isclose(base, 10000.0, rel_tol=1e-6):
        return []
    edits = {"numpy": [("embedding", "10000.0 ** (", f"{base!r} ** (")]}
    return [Bug(f"a base of {base:g} instead of 10000 in the wavelengths", "", edits)]


def _adds_sines(config: TransformerConfig) -> bool:
    return config.position_encoding == "sinusoidal" and not config.embedding_norm


def _encoding(config: TransformerConfig, length: int) -> ndarray:
    layout, timescale, offset = config.position_layout, config.position_timescale, config.position_offset
    return sinusoidal_encoding(length, config.d_model, layout, timescale, offset)


def float32_positions(trials: Trials, first: str, port: str) -> str:
    """Return a message if the positional encoding has only float32 precision, or an empty string otherwise."""
    config, usual = trials.case.config, observed(TRUTH, trials.case)
    if not first.endswith("_embedding.output") or usual is None or not _adds_sines(config):
        return ""
    actual, wanted = trials.actual[first], usual[first]
    if actual.shape != wanted.shape or not np.abs(actual - wanted).max() <= ANGLE:
        return ""
    added = actual - wanted + _encoding(config, wanted.shape[1])
    # At padding, ``actual`` contains the reference's values, which are not rounded to float32.
    rounded = np.where(actual == wanted, added, added.astype(np.float32))
    if not np.abs(added - rounded).max() <= ADDED * np.abs(wanted).max():
        return ""
    return f"the position encoding that {port} adds at {first} has only float32 precision: compute it in float64"


def embedding_factor(trials: Trials, first: str, port: str) -> str:
    """Report that embeddings are scaled by a wrong factor. Positional encodings are subtracted before measuring it."""
    config, usual = trials.case.config, observed(TRUTH, trials.case)
    if not first.endswith("_embedding.output") or usual is None or not _adds_sines(config):
        return ""
    actual, wanted = trials.actual[first], usual[first]
    if actual.shape != wanted.shape:
        return ""
    differs = (actual != wanted).any(-1)  # both tensors contain the reference's values at padding
    encoding = np.broadcast_to(_encoding(config, wanted.shape[1]), wanted.shape)[differs]
    embedded, right = actual[differs] - encoding, wanted[differs] - encoding
    ratio = best_factor(embedded, right)
    if not is_close(embedded, ratio * right):
        return ""
    words = factor_in_words(ratio, config)
    return f"before {port} adds positions at {first}, its embeddings are {written(ratio)} times the correct ones{words}"


def position_angles(trials: Trials, first: str, port: str) -> str:
    """Report wrong angles of the sines and cosines in the positional encoding."""
    config, usual, case = trials.case.config, observed(TRUTH, trials.case), trials.case
    side = first.partition("_")[0]
    if not first.endswith("_embedding.output") or usual is None or not _adds_sines(config) or config.position_offset:
        return ""
    actual, wanted = trials.actual[first], usual[first]
    row = int((case.inputs[f"{side}_ids"] != config.pad_id).sum(1).argmax())
    length = int((case.inputs[f"{side}_ids"][row] != config.pad_id).sum())
    if actual.shape != wanted.shape or length < 3:
        return ""
    added = (actual - wanted)[row, :length] + _encoding(config, length)
    is_sine = _encoding(config, 1)[0] == 0.0
    angles, right = (
        np.where(is_sine, np.arcsin(np.clip(second, -1.0, 1.0)), np.arccos(np.clip(second, -1.0, 1.0)))
        for second in (added[1], _encoding(config, 2)[1])
    )
    waves = np.where(is_sine, np.sin(np.arange(length)[:, None] * angles), np.cos(np.arange(length)[:, None] * angles))
    if not np.abs(waves - added).max() <= 1e-9 or not (angles > 0.0).all():
        return ""
    exponents, usually = (np.abs((-np.log(one) / np.log(10000.0) * config.d_model).round(6)) for one in (angles, right))
    listed, instead = (", ".join(f"{exponent:.3g}" for exponent in one[:ANGLES]) for one in (exponents, usually))
    found = f"for position n, {port} adds sines and cosines at {first} with the angles n / 10000^(k / d_model)"
    if np.ptp(exponents - usually) < 1e-6:  # if all angles are scaled by one factor, the exponents aren't the cause
        return ""
    return f"{found}, where k = {listed}, ... instead of {instead}, ..."
