"""Taps: named intermediate values that a callback can read or replace.

A tap callback is a function ``tap(name, value) -> value``. The model calls ``scores = tap("scores", scores)`` and
continues with the result. In any framework, you can use taps to record activations, to run a block on given inputs, and
to compute the gradient at a tap. To compute the gradient, add an array of zeros to the value, and differentiate with
respect to this array.

In training, the reference also has a tap for each dropout mask. Its name is the name of the tap that precedes the
dropout, followed by ``_keep``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

Tap = Callable[[str, Any], Any]


def no_tap(name: str, value: Any) -> Any:
    """Return the value unchanged. With this default tap, attention may use a fused kernel.

    Args:
        name: Name of the tap.
        value: Intermediate value.
    """
    return value


def checked(tap: Tap) -> Tap:
    """Wrap a tap so that it raises a TypeError unless it returns an array with as many axes as it receives."""
    if tap is no_tap:
        return no_tap
    if not callable(tap):
        raise TypeError(f"tap must be a function of a name and a value: got {type(tap).__name__}")

    def returning(name: str, value: Any) -> Any:
        used = tap(name, value)
        if len(getattr(used, "shape", ())) != len(value.shape):
            got = type(used).__name__
            raise TypeError(
                f"the tap must return the value of {name}, or an array with the same number of axes: got {got}; end "
                "the tap with `return value`"
            )
        return used

    return returning


def within(tap: Tap, prefix: str) -> Tap:
    """Return a tap for a submodule. It adds the submodule's path to the names.

    Args:
        tap: Tap of the module.
        prefix: Path of the submodule in the module.
    """
    if tap is no_tap:
        return no_tap
    return lambda name, value: tap(f"{prefix}.{name}", value)


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a name.

    ``*`` matches one part of the name, and ``**`` matches any number of parts.
    """
    return re.fullmatch(_as_regular_expression(pattern), name) is not None


class Recorder(dict[str, Any]):
    """A tap that stores intermediate values, keyed by name, in the order in which the taps fire.

    This example stores the output of every decoder layer and all attention weights of one call::

        seen = Recorder("decoder.layers.*.output", "**.weights")
        logits = model(source_ids, target_ids, tap=seen)
        seen["decoder.layers.0.output"]

    In a compiled function, create the recorder inside the function and return ``dict(seen)``.

    Args:
        patterns: Patterns that match the names of the values to store. ``*`` matches one part of a name, and ``**``
            matches any number of parts. Without patterns, all values are stored.
        replace: Values that replace the computed values, keyed by name. If None, no values are replaced.
        keep_computed: Whether to store the computed values instead of their replacements.
    """

    def __init__(self, *patterns: str, replace: Mapping[str, Any] | None = None, keep_computed: bool = False) -> None:
        super().__init__()
        self.keep_computed = keep_computed
        self.patterns = [re.compile(_as_regular_expression(pattern)) for pattern in patterns]
        self.replace = dict(replace or {})

    def __call__(self, name: str, value: Any) -> Any:
        """Store the value if its name matches a pattern, and return the value or its replacement.

        Args:
            name: Name of the tap.
            value: Intermediate value.

        Raises:
            ValueError: If a value with this name is already stored.
        """
        used = self.replace.get(name, value)
        if not self.patterns or any(pattern.fullmatch(name) for pattern in self.patterns):
            if name in self:
                raise ValueError(f"tap {name} was recorded twice; use a new Recorder for each call of the model")
            self[name] = value if self.keep_computed else used
        return used

    def __missing__(self, name: str) -> Any:
        similar = get_close_matches(str(name), self, cutoff=0.8) or [*self][:3]
        raise KeyError(f"{name} is not one of the {len(self)} recorded taps" + f": {', '.join(similar)}" * bool(self))


def _as_regular_expression(pattern: str) -> str:
    parts = re.split(r"(\*\*|\*)", pattern)
    return "".join({"**": ".*", "*": "[^.]*"}.get(part, re.escape(part)) for part in parts)
