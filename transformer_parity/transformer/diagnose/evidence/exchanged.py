"""Find gradients and weights that a port returns under the wrong names, and weights that it exports incorrectly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import takewhile

import numpy as np
from numpy import ndarray

from transformer_parity.engine.signatures import SAME, narrowed
from transformer_parity.transformer.cases.case import GRADIENTS
from transformer_parity.transformer.diagnose.evidence.differing import Differing
from transformer_parity.transformer.diagnose.evidence.signatures import signatures
from transformer_spec.config import TransformerConfig

Arrays = Mapping[str, ndarray]
LISTED = 3  # maximum number of blocks per statement, and of statements per message
ENOUGH = 2  # minimum number of distinct values; tensors with fewer values may match by chance


def exchanged(actual: Arrays, right: Arrays, what: str, wrong: Callable[[str], bool]) -> str:
    """Report which tensors have swapped names, or return "" if swapped names don't explain all wrong tensors.

    Args:
        actual: Dict from parameter names to the port's tensors.
        right: Dict from parameter names to the reference's tensors.
        what: The kind of tensor: ``gradient`` or ``exported weight``.
        wrong: Function that takes the name of a tensor and returns whether the tensor is wrong.
    """
    if actual.keys() != right.keys():
        return ""
    largest = max((float(np.abs(array).max(initial=0.0)) for array in right.values()), default=0.0)
    nothing = {name for name, array in right.items() if np.abs(array).max(initial=0.0) <= SAME * largest}

    def is_same(name: str, source: str, array: ndarray) -> bool:
        if actual[name].shape != array.shape or not np.isfinite(actual[name]).all():
            return False
        measure = largest if source in nothing else float(np.abs(array).max())
        return bool(np.abs(actual[name] - array).max(initial=0.0) <= SAME * measure)

    sources: dict[str, str] = {}
    for name in filter(wrong, right):
        turned = ["", ".T"] if right[name].ndim == 2 else [""]
        found = [
            source + turn
            for source, array in right.items()
            for turn in turned
            if source != name and is_same(name, source, array.T if turn else array)
        ]
        # If multiple sources have the same values, for example zeros, prefer a source in the same block as ``name``.
        sources[name] = max(found, key=lambda other: len(_shared(name, other)), default="")
        if not sources[name]:
            return ""
    telling = {source.removesuffix(".T") for source in sources.values()} - nothing
    if not any(np.unique(right[source]).size >= ENOUGH for source in telling):
        return ""
    return _in_words(sources, what)


def exchanged_gradients(differing: Differing) -> str:
    """Report which parameter gradients have swapped names.

    Return an empty string if swapped names don't explain all wrong tensors.
    """
    if (
        differing.case.stage != GRADIENTS
        or differing.misshapen
        or not all(name.startswith("of ") for name in differing.wrong)
    ):
        return ""
    mine, theirs = (
        {name.removeprefix("of "): x for name, x in arrays.items() if name.startswith("of ")}
        for arrays in (differing.actual, differing.truth)
    )
    return exchanged(mine, theirs, "gradient", lambda name: f"of {name}" in differing.wrong)


def returned_in_words(back: Arrays, given: Arrays, config: TransformerConfig) -> str:
    """Report which weights a port exports incorrectly, or return "" if the first error has no recognizable pattern.

    Args:
        back: Dict from parameter names to the exported weights.
        given: Dict from parameter names to the weights that were passed to the port.
        config: Config of the model.
    """
    known = [name for name in given if name in back]
    wrong = [name for name in known if not np.array_equal(back[name], given[name])]
    dtypes = {back[name].dtype.name for name in wrong} - {given[name].dtype.name for name in wrong}
    if dtypes and all(np.array_equal(back[name], given[name].astype(back[name].dtype)) for name in wrong):
        return f"exported weights are in {', '.join(sorted(dtypes))} instead of {given[wrong[0]].dtype.name}"
    if not wrong:
        return ""
    first, right = back[wrong[0]], given[wrong[0]]
    found = next(filter(None, [narrowed(first, right), *signatures(first, right, config)]), "")
    if not found:
        return ""
    more = len(wrong) - 1
    others = f", and {more} more weight{'s are' if more > 1 else ' is'} wrong" if more else ""
    return f"in the exported {wrong[0]}, {found}{others}"


def _shared(name: str, other: str) -> str:
    """Return the path of the smallest component that contains both parameters."""
    both = zip(name.split(".")[:-1], other.split(".")[:-1], strict=False)
    return ".".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], both))


def _in_words(sources: Mapping[str, str], what: str) -> str:
    """Describe the swapped tensors. If a swap occurs in multiple blocks, describe it once and list the blocks."""
    places: dict[str, list[str]] = {}
    done = set()
    for name, source in sources.items():
        if name in done:
            continue
        turned, source = source.endswith(".T"), source.removesuffix(".T")
        shared = _shared(name, source)
        one, other = (text.removeprefix(f"{shared}.") for text in (name, source))
        if not turned and sources.get(source) == name:
            done.add(source)
            one, other = sorted((one, other))
            said = f"the {what}s of {{place}}{one} and {{place}}{other} are exchanged"
        else:
            said = f"the {what} of {{place}}{one} is the {'transposed ' if turned else ''}{what} of {{place}}{other}"
        places.setdefault(said, []).append(shared)
    sentences = []
    for said, where in places.items():
        if len(where) == 1:
            sentences.append(said.format(place=f"{where[0]}." if where[0] else ""))
        else:
            more = f" and {len(where) - LISTED} more" if len(where) > LISTED else ""
            sentences.append(f"{said.format(place='')} in {', '.join(where[:LISTED])}{more}")
    more = f" and {len(sentences) - LISTED} more" if len(sentences) > LISTED else ""
    return "; ".join(sentences[:LISTED]) + more
