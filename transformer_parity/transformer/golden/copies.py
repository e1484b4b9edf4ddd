"""Copies: tensors of B that have the bits of A's.

Two programs round differently somewhere, and every number that is computed from a rounded one then differs in its last
bits. Between any two of our five implementations, 5% of the numbers of a tensor are equal bit by bit, and never more
than half of them. So a tensor with nearly all bits of A's was not computed, unless it is exact by nature.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

import numpy as np
from numpy import ndarray

from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.golden.vectors import DTYPES, Arrays, GoldenFolder

MANY = 32  # numbers of a tensor that is judged by itself
FEW = 8  # numbers of all smaller tensors of a stage, which are judged together
NEARLY_ALL = 0.9  # a fraction of these numbers
# Tensors that several programs compute from the same bits by the same few operations. A first step of Adam moves each
# weight by the learning rate, whatever the gradient.
EXACT = (
    "source_embedding.*",
    "target_embedding.*",
    "encoder.layers.0.self_attention*",
    "decoder.layers.0.self_attention*",
    "decoder.layers.0.cross_attention.query",
    "step 1 weight *",
)
MOVED = 0.1  # the change of a weight by training, relative to the weight, above which rounding shows in its bits
Place = tuple[str, str]  # the name of a case, and a dtype


def find_copies(truth: GoldenFolder, candidate: GoldenFolder, cases: Iterable[Case]) -> dict[Place, list[str]]:
    """Return the names of the tensors of B that are copies of A's, by case and dtype.

    If a case has one, every tensor of the case that equals A's is listed, among them those that are exact by nature.

    Args:
        truth: A.
        candidate: B.
        cases: The cases that are compared.
    """
    places = [(case, dtype) for case in cases for dtype in DTYPES]
    places = [(case, dtype) for case, dtype in places if truth.holds(case, dtype) and candidate.holds(case, dtype)]
    copied, is_own = set(), False
    small: defaultdict[Place, list[tuple[Place, ndarray]]] = defaultdict(list)  # by stage and dtype
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
    """Return for each number of a tensor that is rounded in some way whether it equals A's."""
    mine, nothing = theirs[name], np.zeros(0, bool)
    if mine.dtype.kind != "f" or any(fnmatchcase(name, pattern) for pattern in EXACT):
        return nothing
    rounded = (mine != 0.0) & (np.abs(mine) != 1.0)
    if (initial := weights.get(name.rpartition(" weight ")[2])) is not None and initial.shape == mine.shape:
        rounded &= np.abs(mine - initial) > MOVED * np.abs(mine)
    if name not in ours or (ours[name].dtype, ours[name].shape) != (mine.dtype, mine.shape):
        return np.zeros(rounded.sum(), bool)
    numbers, first = np.unique(mine[rounded], return_index=True)  # a mask, or one key, makes many of them one
    return ours[name][rounded][first] == numbers


def _equal_tensors(ours: Arrays, theirs: Arrays) -> list[str]:
    def is_nearly_equal(name: str) -> bool:
        mine, other = theirs[name], ours.get(name)
        return other is not None and mine.shape == other.shape and bool((mine == other).mean() >= NEARLY_ALL)

    return [name for name in theirs if theirs[name].size and is_nearly_equal(name)]


def copies_in_words(copied: Mapping[Place, list[str]]) -> str:
    """Return a sentence that names some copies, and says how to get rid of them."""
    (case, dtype), names = next(iter(copied.items()))
    number = sum(map(len, copied.values()))
    return (
        f"{number:,} tensors in {len(copied)} outputs have the bytes of A's, such as {dtype} {case} "
        f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}: compute them, or declare them in left_out; "
        "if your program does compute these bytes, write A with another --backend"
    )
