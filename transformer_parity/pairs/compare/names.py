"""Names: which tap of the port corresponds to which tap of the original, with the axes of both."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

import numpy as np
from numpy import ndarray

from transformer_parity.engine.tensors import Tensors
from transformer_parity.pairs.compare.axes import Axes
from transformer_parity.pairs.contract.implementation import Arrays

SAMPLES = 512  # number of elements from which a correlation is computed
ALIKE, RELATED = 0.999, 0.5  # correlations of two tensors that are equal, and of two that probably correspond
HOLES = r"([^{}]|\{[A-Za-z_]\w*\})*"  # form of a name in a map
CERTAIN, SIMILAR = 2.0, 0.25  # the score of equal tensors, and a difference between scores that decides nothing
Way = tuple[float, Axes | None]  # a score and the axes of a match
MOST_NAMES = 6  # number of names that a sentence lists
MOST_AXES = 5  # maximum number of axes for which all orders are tried


@dataclass(frozen=True)
class Counterpart:
    """The port's tap that corresponds to a tap of the original, and the axes if they differ."""

    name: str
    axes: Axes | None = None


@dataclass
class Names:
    """The correspondence between the taps of two implementations.

    Attributes:
        declared: The port's tap for each of the original's taps that the user has mapped, or that have the same name in
            both. The verdict depends on these taps.
        proposed: The same for taps that were matched by their values. They only help to locate a difference.
        problems: The entries of the user's map that match no tap.
    """

    declared: dict[str, Counterpart] = field(default_factory=dict)
    proposed: dict[str, Counterpart] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def all(self) -> dict[str, Counterpart]:
        """All corresponding taps."""
        return self.proposed | self.declared

    def to_original(self, taps: Arrays, shapes: Mapping[str, Sequence[int]]) -> tuple[Tensors, dict[str, str]]:
        """Return the port's tensors under the original's names and axes, and the reason for each that doesn't fit.

        Args:
            taps: The port's tensors, keyed by its names.
            shapes: The shapes of the original's tensors, which determine the sizes of split axes.
        """
        found: Tensors = {}
        unfit = {}
        for name, place in self.all.items():
            if place.name in taps and name in shapes:
                value = taps[place.name]
                try:
                    found[name] = value if place.axes is None else place.axes.to_original(value, shapes[name])
                except ValueError as error:
                    found[name], unfit[name] = value, str(error)
        return {name: found[name] for name in shapes if name in found}, unfit

    def to_port(self, taps: Arrays, shapes: Mapping[str, Sequence[int]]) -> Tensors:
        """Return the original's tensors under the port's names and axes.

        Args:
            taps: The original's tensors, keyed by its names.
            shapes: The shapes of the port's tensors, keyed by the port's names.
        """
        found = {}
        for name, place in self.all.items():
            if name in taps and place.name in shapes:
                value = taps[name]
                found[place.name] = value if place.axes is None else place.axes.to_port(value, shapes[place.name])
        return found

    def written(self) -> dict[str, Any]:
        """Return the correspondence in the form in which users write it."""
        return {
            name: place.name if place.axes is None else [place.name, str(place.axes)]
            for name, place in self.all.items()
        }


def resolve(
    given: Mapping[str, Any], original: Collection[str], port: Collection[str], shared: Collection[str]
) -> Names:
    """Return the correspondence that a user's map declares.

    Args:
        given: The map, from patterns for the original's taps to patterns for the port's, or to pairs of such a pattern
            and an axis string. ``{i}`` stands for a number.
        original: The original's taps.
        port: The port's taps.
        shared: Taps that both call by the same name in the user's code.

    Raises:
        ValueError: If an entry has the wrong form.
    """
    found = Names(declared={name: Counterpart(name) for name in shared})
    for key, value in given.items():
        pattern, axes = parsed(key, value)
        holes = re.findall(r"\{(\w+)\}", key)
        if len(holes) > len({*holes}):
            raise ValueError(f"names: {key!r} uses a number twice; give each number a different name")
        regex = re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>\\d+)", re.escape(key)))
        if unknown := {*re.findall(r"\{(\w+)\}", pattern)} - {*holes}:
            raise ValueError(f"names: {{{', '.join(unknown)}}} in {pattern!r} doesn't occur in {key!r}")
        matched = [match for name in original if (match := regex.fullmatch(name))]
        if not matched:
            found.problems.append(f"names maps {key!r}, but the original has no such tap")
        for match in matched:
            mine = pattern.format(**match.groupdict())
            if mine not in port:
                found.problems.append(f"names maps {match[0]!r} to {mine!r}, but the port has no such tap")
            else:
                found.declared[match[0]] = Counterpart(mine, axes)
    return found


def with_axes(names: Names, original: Arrays, port: Arrays) -> list[str]:
    """Add axes to declared taps whose shapes differ only in the order or the splits of their axes.

    Args:
        names: The correspondence, which is modified.
        original: The original's tensors.
        port: The port's tensors.

    Returns:
        A description of each added axis string.
    """
    found: dict[str, list[str]] = {}
    for name, place in names.declared.items():
        value, theirs = original[name], port[place.name]
        if place.axes is not None or value.shape == theirs.shape or not 2 <= value.size == theirs.size:
            continue
        correlation, axes = max(_correlations(value, theirs), key=lambda one: one[0])
        if axes is not None and correlation > RELATED:
            names.declared[name] = Counterpart(place.name, axes)
            found.setdefault(str(axes), []).append(name)
    return [f"the port's axes of {listed(taps)} were converted by '{axes}'" for axes, taps in found.items()]


def listed(names: Sequence[str]) -> str:
    """Return the first names and the number of the others."""
    return ", ".join(names[:MOST_NAMES]) + (f", and {len(names) - MOST_NAMES} more" * (len(names) > MOST_NAMES))


def parsed(key: str, value: Any) -> tuple[str, Axes | None]:
    """Return the port's pattern and the axes of an entry in a user's map."""
    name = value if isinstance(value, str) else value[0] if isinstance(value, Sequence) and value else ""
    for text in (key, name):
        if not isinstance(text, str) or not re.fullmatch(HOLES, text):
            raise ValueError(f"names must map strings, with numbers as {{i}}: got {key!r} = {value!r}")
    if isinstance(value, str):
        return value, None
    if isinstance(value, Sequence) and len(value) == 2 and all(isinstance(part, str) for part in value):
        return value[0], Axes.parse(value[1])
    raise ValueError(f"names[{key!r}] must be a name, or a name and an axis string: got {value!r}")


def propose(original: Arrays, port: Arrays) -> dict[str, Counterpart]:
    """Match taps by their order, shapes, values, and names.

    The order of the matched taps is the same in both implementations.

    Args:
        original: The original's tensors that have no declared counterpart, in the order of computation.
        port: The port's tensors.
    """
    mine, theirs = list(original), list(port)
    options = {
        (i, j): ways
        for i, name in enumerate(mine)
        for j, other in enumerate(theirs)
        if (ways := _ways(name, original[name], other, port[other]))
    }
    usual = Counter(way[1] for ways in options.values() if (way := _best(ways, {}))[0] >= CERTAIN)
    found = {place: _best(ways, usual) for place, ways in options.items()}
    best = np.zeros((len(mine) + 1, len(theirs) + 1))  # largest total score of a match of the remaining taps
    for i in reversed(range(len(mine))):
        for j in reversed(range(len(theirs))):
            skipped = max(best[i + 1, j], best[i, j + 1])
            best[i, j] = max(skipped, best[i + 1, j + 1] + found[i, j][0] if (i, j) in found else 0.0)
    i = j = 0
    places = {}
    while i < len(mine) and j < len(theirs):
        if (i, j) in found and best[i, j] == best[i + 1, j + 1] + found[i, j][0]:
            places[mine[i]] = Counterpart(theirs[j], found[i, j][1])
            i, j = i + 1, j + 1
        elif best[i, j] == best[i + 1, j]:
            i += 1
        else:
            j += 1
    return places


def _ways(name: str, value: ndarray, other: str, theirs: ndarray) -> list[Way]:
    """Return the scores and axes with which two taps may correspond."""
    if value.size != theirs.size or value.size < 2 or value.dtype.kind != "f" or theirs.dtype.kind != "f":
        return []
    likeness = SequenceMatcher(None, _words(name), _words(other)).ratio()
    return [
        ((CERTAIN if correlation > ALIKE else correlation) + 0.5 * likeness, axes)
        for correlation, axes in _correlations(value, theirs)
        if correlation >= RELATED or (likeness >= 0.8 and axes is None and value.shape == theirs.shape)
    ]


def _best(ways: Sequence[Way], usual: Mapping[Axes | None, int]) -> Way:
    """Return the most likely way in which two taps correspond.

    The values of a wrong tensor may fit several orders of axes. The usual order of the other taps is the most likely,
    or the order that exchanges the fewest axes.
    """
    best = max(ways, key=lambda way: (way[0], way[1] is None))
    near = [way for way in ways if way[0] >= best[0] - SIMILAR]
    return (
        best if best[0] >= CERTAIN else max(near, key=lambda way: (usual.get(way[1], 0), -_exchanged(way[1]), way[0]))
    )


def _exchanged(axes: Axes | None) -> int:
    """Return the number of pairs of axes whose order differs."""
    names = [name for axis in axes.port for name in axis] if axes else []
    order = [name for axis in axes.original for name in axis] if axes else []
    return sum(order.index(one) > order.index(two) for one, two in itertools.combinations(names, 2))


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z]+|\d+", name.lower())


def _correlations(value: ndarray, theirs: ndarray) -> Iterator[tuple[float, Axes | None]]:
    """Yield the correlation of two tensors for each order of axes with which their shapes are compatible."""
    chosen = np.random.default_rng(0).permutation(value.size)[:SAMPLES]
    sample, flat = value.ravel()[chosen], theirs.ravel()
    if value.shape == theirs.shape:
        yield _correlation(sample, flat[chosen]), None
    index = np.unravel_index(chosen, value.shape)
    if max(value.ndim, theirs.ndim) > MOST_AXES:
        return
    if theirs.ndim > value.ndim:  # the port splits an axis
        for correlation, axes in _correlations(theirs, value):
            yield correlation, None if axes is None else Axes(axes.original, axes.port)
        return
    for order in itertools.permutations(range(value.ndim)):
        shape = [value.shape[axis] for axis in order]
        axes = _grouped(order, shape, theirs.shape)
        if axes is not None and axes.port != axes.original:
            places = np.ravel_multi_index([index[axis] for axis in order], shape)
            yield _correlation(sample, flat[places]), axes
    yield 0.0, None


def _grouped(order: Sequence[int], shape: Sequence[int], target: Sequence[int]) -> Axes | None:
    """Return the axes of a tensor whose axes are merges of reordered axes, or None if the sizes don't allow this."""
    letters, groups, position = "abcdefgh", [], 0
    for size in target:
        group: list[str] = []
        total = 1
        while position < len(shape) and (not group or total < size):
            group.append(letters[order[position]])
            total *= shape[position]
            position += 1
        if total != size:
            return None
        groups.append(tuple(group))
    if position < len(shape):
        return None
    return Axes(tuple(groups), tuple((letter,) for letter in letters[: len(shape)]))


def _correlation(first: ndarray, second: ndarray) -> float:
    first, second = (np.asarray(array, np.float64) - np.mean(array, dtype=np.float64) for array in (first, second))
    size = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(first @ second) / size if 0.0 < size < np.inf else 0.0


def as_toml(names: Mapping[str, Any]) -> str:
    """Return a map of names as TOML. ``{i}`` replaces numbers if the pattern describes the same taps."""
    rest, lines = dict(names), []
    for key, value in names.items():
        if key not in rest:
            continue
        pattern, found = key, value
        parts = [value, ""] if isinstance(value, str) else list(value)
        for number in re.findall(r"(?<![\w])\d+(?![\w])", key):
            general = [re.sub(rf"(?<!\w){number}(?!\w)", "{i}", text, count=1) for text in (key, parts[0])]
            if "{i}" not in general[1]:
                continue
            regex = re.compile(re.escape(general[0]).replace(r"\{i\}", r"(\d+)"))
            like = {name: match[1] for name in names if (match := regex.fullmatch(name))}
            wanted = {name: general[1].replace("{i}", i) for name, i in like.items()}
            if len(like) > 1 and all(names[name] in (mine, [mine, parts[1]]) for name, mine in wanted.items()):
                pattern, found = general[0], general[1] if isinstance(value, str) else [general[1], parts[1]]
                for name in like:
                    rest.pop(name, None)
                break
        rest.pop(key, None)
        lines.append(f"{json.dumps(pattern)} = {json.dumps(found)}")
    return "\n".join(lines) + "\n"
