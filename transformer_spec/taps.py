"""Taps: named places where an intermediate value can be looked at, or replaced.

A tap is a function ``tap(name, value) -> value``. The model writes ``scores = tap("scores", scores)`` and goes on
with what comes back, so one mechanism records activations, replays a block on given inputs, and (by adding a zero
and differentiating) yields the gradient at that place in any framework.

In training, the reference also shows what each dropout keeps: the name of the tap that is thinned out, and ``_keep``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

Tap = Callable[[str, Any], Any]


def no_tap(name: str, value: Any) -> Any:
    """Return the value untouched: no tap is asked for, so attention may take a fused kernel."""
    return value


def checked(tap: Tap) -> Tap:
    """Return a tap that raises TypeError if the given one returns no array of as many axes, such as None."""
    if tap is no_tap:
        return no_tap
    if not callable(tap):
        raise TypeError(f"tap must be a function of a name and a value: got {type(tap).__name__}")

    def returning(name: str, value: Any) -> Any:
        used = tap(name, value)
        if len(getattr(used, "shape", ())) != len(value.shape):
            got = type(used).__name__
            raise TypeError(f"the tap must return {name} or an array like it: got {got}; end it with `return value`")
        return used

    return returning


def within(tap: Tap, prefix: str) -> Tap:
    """Return a tap for a sub-module, whose names then begin with the sub-module's path."""
    if tap is no_tap:
        return no_tap
    return lambda name, value: tap(f"{prefix}.{name}", value)


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern names a tap: one star is one part of its name, two are any number of parts."""
    return re.fullmatch(_as_regular_expression(pattern), name) is not None


class Recorder(dict[str, Any]):
    """A tap that keeps the values it is shown, by name, in the order they came.

    The output of every decoder layer, for auxiliary losses, and all attention weights of one call::

        seen = Recorder("decoder.layers.*.output", "**.weights")
        logits = model(source_ids, target_ids, tap=seen)
        seen["decoder.layers.0.output"]

    Inside a compiled function, create it there and return ``dict(seen)``.

    Args:
        patterns: Which names to keep: one star stands for one part of a name, two stand for any number of parts. No
            pattern at all keeps everything.
        replace: Values to put in place of what the model computed, by name.
        keep_computed: Keep what the model computed, rather than its replacement.
    """

    def __init__(self, *patterns: str, replace: Mapping[str, Any] | None = None, keep_computed: bool = False) -> None:
        super().__init__()
        self.keep_computed = keep_computed
        self.patterns = [re.compile(_as_regular_expression(pattern)) for pattern in patterns]
        self.replace = dict(replace or {})

    def __call__(self, name: str, value: Any) -> Any:
        """Keep the value if its name matches, and return it or its replacement."""
        used = self.replace.get(name, value)
        if not self.patterns or any(pattern.fullmatch(name) for pattern in self.patterns):
            if name in self:
                raise ValueError(f"tap {name} fired twice: use one Recorder for one call")
            self[name] = value if self.keep_computed else used
        return used

    def __missing__(self, name: str) -> Any:
        similar = get_close_matches(str(name), self, cutoff=0.8) or [*self][:3]
        raise KeyError(
            f"{name} is none of the {len(self)} values that were kept" + f": {', '.join(similar)}" * bool(self)
        )


def _as_regular_expression(pattern: str) -> str:
    parts = re.split(r"(\*\*|\*)", pattern)
    return "".join({"**": ".*", "*": "[^.]*"}.get(part, re.escape(part)) for part in parts)
