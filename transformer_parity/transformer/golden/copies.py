"""Find tensors in B that were copied from A instead of computed.

Any two programs round some values differently. All values that are computed from these values then differ in their last
bits. Between any two of our five implementations, typically 5% and at most half of the values in a tensor are bitwise
identical. If nearly all values of a tensor are identical in A and B, B did not compute the tensor. This test excludes
tensors that all programs compute exactly (see ``EXACT``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

import numpy as np
from numpy import ndarray

from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.golden.vectors import DTYPES, Arrays, GoldenDirectory

# Minimum number of values for testing a tensor individually. The few values of a single token may be identical if both
# programs call the same library.
MANY = 64
FEW = 8  # minimum total number of values for testing the smaller tensors of a stage together
NEARLY_ALL = 0.9  # a tensor is considered a copy if at least this fraction of its values is identical in A and B
# Tensors that different programs compute with the same few operations from identical values. In step 1, Adam moves each
# weight by the learning rate, regardless of the size of the gradient.
EXACT = (
    "source_embedding.*",
    "target_embedding.*",
    "encoder.layers.0.self_attention*",
    "decoder.layers.0.self_attention*",
    "decoder.layers.0.cross_attention.query",
    "step 1 weight *",
)
MOVED = 0.1  # minimum relative change of a weight in training; weights that change less may round to equal values
Place = tuple[str, str]  # name of a case, and a dtype


def find_copies(truth: GoldenDirectory, candidate: GoldenDirectory, cases: Iterable[Case]) -> dict[Place, list[str]]:
    """Return a dict that maps each pair of case and dtype to the names of B's tensors that are copies of A's tensors.

    A tensor is a copy if nearly all of its values are identical in A and B. Tensors that match ``EXACT`` can be
    identical in a correct B, so they are listed only if another tensor of the same case and dtype is a copy.

    Args:
        truth: Directory A.
        candidate: Directory B.
        cases: The cases that are compared.
    """
    places = [(case, dtype) for case in cases for dtype in DTYPES]
    places = [(case, dtype) for case, dtype in places if truth.holds(case, dtype) and candidate.holds(case, dtype)]
    copied, is_own = set(), False
    small: defaultdict[Place, list[tuple[Place, ndarray]]] = defaultdict(list)  # key: stage and dtype
    for case, dtype in places:
        ours, theirs = truth.tensors(case, dtype), candidate.tensors(case, dtype)
        for name in theirs:
            equal = _equal_numbers(name, ours, theirs, truth.weights)
            if equal.size < MANY:
                small[case.stage, dtype].append(((case.name, dtype), equal))
            elif equal.mean() >= NEARLY_ALL:
                copied.add((case.name, dtype))
            else:
                is_own = True
    for tensors in small.values():
        together = np.concatenate([equal for _, equal in tensors])
        if together.size >= (FEW if is_own else 1) and together.mean() >= NEARLY_ALL:
            copied |= {place for place, equal in tensors if equal.size}
    return {
        (case.name, dtype): _equal_tensors(truth.tensors(case, dtype), candidate.tensors(case, dtype))
        for case, dtype in places
        if (case.name, dtype) in copied
    }


def _equal_numbers(name: str, ours: Arrays, theirs: Arrays, weights: Arrays) -> ndarray:
    """Return, for each number that is subject to rounding errors, whether it is identical in A and B."""
    mine, nothing = theirs[name], np.zeros(0, bool)
    if mine.dtype.kind != "f" or any(fnmatchcase(name, pattern) for pattern in EXACT):
        return nothing
    rounded = (mine != 0.0) & (np.abs(mine) != 1.0)
    if (initial := weights.get(name.rpartition(" weight ")[2])) is not None and initial.shape == mine.shape:
        rounded &= np.abs(mine - initial) > MOVED * np.abs(mine)
    if name not in ours or (ours[name].dtype, ours[name].shape) != (mine.dtype, mine.shape):
        return np.zeros(rounded.sum(), bool)
    numbers, first = np.unique(mine[rounded], return_index=True)  # count repeated numbers only once
    return ours[name][rounded][first] == numbers


def _equal_tensors(ours: Arrays, theirs: Arrays) -> list[str]:
    def is_nearly_equal(name: str) -> bool:
        mine, other = theirs[name], ours.get(name)
        return other is not None and mine.shape == other.shape and bool((mine == other).mean() >= NEARLY_ALL)

    return [name for name in theirs if theirs[name].size and is_nearly_equal(name)]


def copies_in_words(copied: Mapping[Place, list[str]]) -> str:
    """Return a sentence that lists some of the copied tensors and explains how to replace them."""
    (case, dtype), names = next(iter(copied.items()))
    number = sum(map(len, copied.values()))
    return (
        f"{number:,} tensors in {len(copied)} outputs have the same bytes as in A, such as {dtype} {case} "
        f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}: compute them, or declare them in left_out. "
        "If your program really computes the same bytes, regenerate A with a different --backend"
    )
