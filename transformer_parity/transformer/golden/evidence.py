"""Check that a comparison of golden vectors would detect an incorrect program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

import numpy as np

from transformer_parity.engine.outputs import OUTPUT
from transformer_parity.transformer.cases.case import ACTIVATIONS, DECODE, GRADIENTS, STEPS, Case
from transformer_parity.transformer.cases.dependence import VISIBLE, why_nothing_shows
from transformer_parity.transformer.golden.vectors import DTYPES, GoldenDirectory
from transformer_parity.transformer.stages.decode import TOKENS

IDS = ("source_ids", "target_ids", "labels")
# Name patterns that match each stage's main results. B must contain these results in at least half of the cases.
# Otherwise, an incorrect program may pass, because all other tensors may be correct.
RESULTS = {ACTIVATIONS: OUTPUT, GRADIENTS: "of *", STEPS: "step * loss", DECODE: TOKENS}


def gaps(truth: GoldenDirectory, candidate: GoldenDirectory, cases: Sequence[Case]) -> Iterator[str]:
    """Yield the reasons why an incorrect program may pass the comparison.

    Args:
        truth: Directory A, which defines the model and the inputs.
        candidate: Directory B. Cases that B omits are not compared.
        cases: The compared cases of all stages.
    """
    if why := why_nothing_shows(truth.config, truth.weights):
        yield f"A: {why}"
    both = [case for case in cases if any(truth.holds(case, d) and candidate.holds(case, d) for d in DTYPES)]
    for stage in dict.fromkeys(case.stage for case in both):
        of_stage = [case for case in both if case.stage == stage]
        results = [_has_results(case, truth, candidate) for case in of_stage]
        if 2 * sum(results) < len(results):
            yield f"{stage}: B omits {RESULTS[stage]!r} in more than half of the cases of this stage"
        for name in IDS:
            if arrays := [case.inputs[name] for case in of_stage if name in case.inputs]:
                yield from (f"{stage}: {why}" for why in _gaps_of_ids(name, arrays, truth.config.pad_id))
    yield from _gaps_of_results(truth, both)


def _has_results(case: Case, truth: GoldenDirectory, candidate: GoldenDirectory) -> bool:
    """Return whether, in at least one dtype, B contains at least half of a case's main results (``RESULTS``)."""
    for dtype in DTYPES:
        if truth.holds(case, dtype) and candidate.holds(case, dtype):
            names = [name for name in truth.tensors(case, dtype) if fnmatchcase(name, RESULTS[case.stage])]
            held = [name for name in names if name in candidate.tensors(case, dtype)]
            if names and 2 * len(held) >= len(names):
                return True
    return False


def _gaps_of_ids(name: str, arrays: Sequence[np.ndarray], pad_id: int) -> Iterator[str]:
    if not any((ids == pad_id).any() for ids in arrays):
        yield f"{name} have no padding in any case that A and B both contain"
    if not any((ids != ids[:1]).any() for ids in arrays):
        yield f"all rows of {name} are equal in every case that A and B both contain"
    if len(np.unique(np.concatenate([ids[ids != pad_id] for ids in arrays]))) < 2:
        yield f"{name} contain only one distinct token in the cases that A and B both contain"


def _gaps_of_results(truth: GoldenDirectory, cases: Sequence[Case]) -> Iterator[str]:
    held = [(case, truth.tensors(case, dtype)) for case in cases for dtype in DTYPES if truth.holds(case, dtype)]
    found = [tensors[TOKENS] for case, tensors in held if case.stage == DECODE and TOKENS in tensors]
    if found and not any((tokens != tokens[:1]).any() for tokens in found):
        yield f"{DECODE}: every search returns the same tokens for all of its sentences"
    if found and not any(tokens.shape[-1] > 1 for tokens in found):
        yield f"{DECODE}: no search returns more than one token"
    for case, tensors in held:
        moved = [_is_moved(name, tensor, truth) for name, tensor in tensors.items() if " weight " in name]
        if case.stage == STEPS and moved and 2 * sum(moved) < len(moved):
            yield f"{STEPS}: the optimizer changes {sum(moved)} of {len(moved)} weights in {case.name}"


def _is_moved(name: str, tensor: np.ndarray, truth: GoldenDirectory) -> bool:
    initial = truth.weights.get(name.rpartition(" weight ")[2])
    return initial is None or bool(np.abs(tensor - initial).max() > VISIBLE * np.abs(initial).max())
