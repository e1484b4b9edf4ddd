"""A buffer of the values that an explorer page shows.

All values are stored as float32 in one buffer. For better compression, each of the port's values is XORed with the
corresponding reference value, so that few bits are nonzero. In addition, bytes of the same significance are stored next
to each other.
"""

from __future__ import annotations

import base64
import zlib

import numpy as np
from numpy import ndarray


class Buffer:
    """A buffer that stores float32 values and encodes them as text."""

    def __init__(self) -> None:
        self.parts: list[ndarray] = []
        self.size = 0

    def add(self, values: ndarray, relative_to: ndarray | None = None) -> int:
        """Append values, XORed with ``relative_to`` if given, and return the offset of the first value."""
        bits = _bits(values)
        place, self.size = self.size, self.size + bits.size
        self.parts.append(bits if relative_to is None else bits ^ _bits(relative_to))
        return place

    def encoded(self) -> str:
        """Return the compressed content as base64. The least significant bytes of all values come first."""
        bits = np.concatenate([*self.parts, np.zeros(0, "<u4")])
        planes = bits.view(np.uint8).reshape(-1, 4).T.tobytes()
        return base64.b64encode(zlib.compress(planes, 9)).decode()


def _bits(values: ndarray) -> ndarray:
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(values, "<f4").ravel().view("<u4")
