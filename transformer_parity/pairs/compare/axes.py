"""Axis strings, such as ``b l (h d) -> b h l d``, which convert a port's tensor to the axes of the original's."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

Side = tuple[tuple[str, ...], ...]  # one tuple per axis; an axis that merges several has more than one name


@dataclass(frozen=True)
class Axes:
    """A reordering of axes, as in einops.

    Attributes:
        port: The axes of the port's tensor.
        original: The axes of the original's tensor.
    """

    port: Side
    original: Side

    @classmethod
    def parse(cls, text: str) -> Axes:
        """Return the reordering that a text describes.

        Raises:
            ValueError: If the text is not of the form ``b l (h d) -> b h l d``.
        """
        left, arrow, right = text.partition("->")
        sides = [tuple(_axis(found) for found in re.findall(r"\(([^()]*)\)|(\w+)", side)) for side in (left, right)]
        names = [sorted(name for axis in side for name in axis) for side in sides]
        rest = re.sub(r"\([\w ]*\)|\w+|\s", "", left + right)
        if not arrow or rest or names[0] != names[1] or len({*names[0]}) < len(names[0]):
            raise ValueError(
                f"an axis string must list the same axes on both sides, such as 'b l (h d) -> b h l d': got {text!r}"
            )
        return cls(*sides)

    def __str__(self) -> str:
        return " -> ".join(" ".join(map(_written, side)) for side in (self.port, self.original))

    def to_original(self, value: ndarray, shape: Sequence[int]) -> ndarray:
        """Return the port's tensor with the axes of the original's tensor, which has this shape.

        Raises:
            ValueError: If the axes don't fit the shapes.
        """
        return _moved(value, self.port, self.original, shape)

    def to_port(self, value: ndarray, shape: Sequence[int]) -> ndarray:
        """Return the original's tensor with the axes of the port's tensor, which has this shape."""
        return _moved(value, self.original, self.port, shape)


def _axis(found: tuple[str, str]) -> tuple[str, ...]:
    return tuple((found[0] or found[1]).split())


def _written(axis: tuple[str, ...]) -> str:
    return axis[0] if len(axis) == 1 else f"({' '.join(axis)})"


def _moved(value: ndarray, before: Side, after: Side, shape: Sequence[int]) -> ndarray:
    if len(before) != value.ndim or len(after) != len(shape):
        sides = " and ".join(" ".join(map(_written, side)) for side in (before, after))
        raise ValueError(f"the axes {sides} don't fit the shapes {list(value.shape)} and {list(shape)}")
    known = list(zip((*before, *after), (*value.shape, *shape), strict=True))
    sizes = {axis[0]: size for axis, size in known if len(axis) == 1}
    for axis, size in known:
        unknown = [name for name in axis if name not in sizes]
        if len(unknown) == 1:
            sizes[unknown[0]] = size // max(1, math.prod(sizes[name] for name in axis if name in sizes))
    names = [name for axis in before for name in axis]
    wanted = [name for axis in after for name in axis]
    try:
        split = value.reshape([sizes[name] for name in names])
    except (KeyError, ValueError) as error:
        raise ValueError(f"the shape {list(value.shape)} can't be converted to {list(shape)}") from error
    moved = split.transpose([names.index(name) for name in wanted])
    merged = [math.prod(sizes[name] for name in axis) for axis in after]
    return np.ascontiguousarray(moved).reshape(merged)
