"""Ports that try to get the verdict AGREE through shared code, their outputs, and their taps.

Each class with an expected verdict is an attack, and its docstring describes it.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
import glob
import tempfile
import zlib

import numpy as np

from attacks.pairs.base import BASE, Original, Port, V
from attacks.words import FAILS, INCOMPLETE, REFUSED, TOLERATED


class Altered(Port):
    """A port with altered logits."""

    def alter(self, logits):
        """Return altered logits."""
        return logits

    def forward(self, inputs, tap):
        """Return the altered logits."""
        found = super().forward(inputs, tap)
        return found | {"logits": self.alter(found["logits"])}


def altered(name, what, alter, expected=FAILS, **attributes):
    """Add a port with altered logits."""
    methods = {"alter": lambda self, logits: alter(logits), "__module__": __name__, "__doc__": what}
    globals()[name] = type(name, (Altered,), methods | {"expected": expected} | attributes)


def changed(array, value, index=0):
    """Return a copy with one different element."""
    array = array.copy()
    array.flat[index] = value
    return array


# Code that the two implementations share.
class SubclassOfTheOriginal(Original):
    """The port is an empty subclass of the original."""

    expected, other, says = INCOMPLETE, f"{BASE}Original", "run the same code"


class AliasOfTheMethods(Port):
    """The port has the methods of the original as attributes."""

    expected, says = INCOMPLETE, "run the same code"
    load, forward, means, gradients = Original.load, Original.forward, Original.means, Original.gradients


class WrapsTheMethods(Original):
    """The methods of the port are the original's, wrapped by functools.wraps."""

    expected, other, says = INCOMPLETE, f"{BASE}Original", "run the same code"
    load = functools.wraps(Original.load)(lambda self, weights, dtype: Original.load(self, weights, dtype))
    forward = functools.wraps(Original.forward)(lambda self, inputs, tap: Original.forward(self, inputs, tap))


class DelegatesToTheOriginal(Port):
    """The port creates an original and calls its methods. It computes the results from the weights, so it agrees."""

    expected = TOLERATED

    def load(self, weights, dtype):
        self.inner = Original()
        self.inner.load(weights, dtype)

    def forward(self, inputs, tap):
        return self.inner.forward(inputs, tap)


class CallableObject(Port):
    """The forward pass of a correct port is an object without Python code."""

    expected = TOLERATED
    forward = functools.partialmethod(Port.forward)


# Results that the original computed.
def file_of(inputs, dtype):
    """Return a name for the results of a batch."""
    return f"{zlib.crc32(inputs['ids'].tobytes())}-{dtype}.npy"


class Leaky(Original):
    """An original that writes its results to files."""

    def forward(self, inputs, tap):
        """Write the logits."""
        found = super().forward(inputs, tap)
        np.save(file_of(inputs, self.dtype), found["logits"])
        return found


class ReadsTheResults(Port):
    """The port reads results that the original has written to files."""

    expected, other, says = INCOMPLETE, "Leaky", "doesn't follow a change of all weights"

    def forward(self, inputs, tap):
        """Read the logits."""
        found = np.load(file_of(inputs, self.dtype))
        return {"logits": found, "best": found[:, -1].argmax(-1)}


class ReadsTheProcesses(Port):
    """The port looks for the original's results in the temporary directory of the comparison and in shared memory."""

    expected = REFUSED

    def forward(self, inputs, tap):
        for path in (
            *glob.glob(tempfile.gettempdir() + "/parity-*/**/*.npy", recursive=True),
            *glob.glob("/dev/shm/*.npy"),
        ):
            return {"logits": np.load(path)}
        return {"logits": np.zeros((*inputs["ids"].shape, V), self.dtype), "best": np.zeros(len(inputs["ids"]), int)}


class OwnWeights(Port):
    """The port ignores the given weights and loads the same checkpoint by itself."""

    expected, other, says = INCOMPLETE, "NoConstants", "doesn't follow a change of all weights"

    def load(self, weights, dtype):
        own = NoConstants().init_weights(0)
        super().load({name: array.astype(np.float32).astype(dtype) for name, array in own.items()}, dtype)


class NoConstants(Original):
    """An original without constant weights."""

    def init_weights(self, seed):
        """Return random weights."""
        return {
            name: array + np.linspace(0.1, 0.2, array.size).reshape(array.shape)
            for name, array in super().init_weights(seed).items()
        }


class WeightsFromMemory(Port):
    """The port computes the logits with the first weights that its process received."""

    expected = REFUSED
    first: dict = {}

    def load(self, weights, dtype):
        self.first.setdefault(dtype, weights)
        super().load(self.first[dtype], dtype)


class ReturnsItsInputs(Port):
    """The port returns its inputs as outputs."""

    expected = FAILS

    def forward(self, inputs, tap):
        return dict(inputs)


# Outputs.
altered("OneNan", "One logit is NaN.", lambda x: changed(x, np.nan))
altered("OneInfinity", "One logit is negative infinity, as if it were masked.", lambda x: changed(x, -np.inf))
altered("OneMasked", "One logit is -1e9, as if it were masked.", lambda x: changed(x, -1e9))
altered("AllMasked", "Every logit is -1e9, as if it were masked.", lambda x: np.full_like(x, -1e9))
altered("AllNan", "Every logit is NaN.", lambda x: np.full_like(x, np.nan))
altered("Zeros", "Every logit is zero.", np.zeros_like)
altered("Tiny", "Every logit is divided by 1e300.", lambda x: x * x.dtype.type(1e-300))
altered("NoValues", "The logits have the shape [0, L, V].", lambda x: x[:0])
altered("OneSequence", "The logits have the shape [1, L, V], which could broadcast.", lambda x: x[:1])
altered("Integers", "The logits are rounded to integers.", lambda x: x.round().astype(int))
altered("Strings", "The logits are strings.", lambda x: x.astype(str), expected=INCOMPLETE)
altered("Complex", "The logits are complex numbers.", lambda x: x + 0j, expected=INCOMPLETE)
altered("Objects", "The logits are Python objects.", lambda x: x.astype(object), expected=INCOMPLETE)
altered("Nothing", "The logits are None.", lambda x: None, expected=INCOMPLETE)
altered("Float32Cast", "The logits are rounded to float32.", lambda x: x.astype(np.float32).astype(x.dtype))
altered("AlwaysFloat64", "The logits are float64 arrays in every dtype.", lambda x: x.astype(np.float64))
altered("LongDoubles", "The logits have extended precision.", lambda x: x.astype(np.longdouble))
altered(
    "ByteOrder",
    "The logits have a different byte order.",
    lambda x: x.astype(x.dtype.newbyteorder()),
    expected=TOLERATED,
)
altered(
    "MaskedArray",
    "The logits are a masked array in which wrong values are hidden.",
    lambda x: np.ma.array(changed(x, 9.0), mask=changed(np.zeros(x.shape, bool), True)),
)


class Liar(np.ndarray):
    """An array with a false shape, false values, and a false equality."""

    def __eq__(self, other):
        return np.ones((3, 6, V), bool)

    __sub__ = __rsub__ = lambda self, other: np.zeros((3, 6, V))
    astype = __array__ = lambda self, *args, **options: np.zeros((3, 6, V))
    shape = property(lambda self: (3, 6, V))


altered(
    "LyingArray",
    "The logits are a subclass of ndarray with a false shape, false values, and a false equality.",
    lambda x: x[:1].view(Liar),
)


class NoOutputs(Port):
    """The port returns an empty dict."""

    expected = FAILS

    def forward(self, inputs, tap):
        super().forward(inputs, tap)
        return {}


class OutputMissing(Port):
    """The port returns only the integer output."""

    expected, says = FAILS, "doesn't return this tensor"

    def forward(self, inputs, tap):
        return {"best": super().forward(inputs, tap)["best"]}


class OutputRenamed(Port):
    """The port returns the logits under a different name."""

    expected = FAILS

    def forward(self, inputs, tap):
        found = super().forward(inputs, tap)
        return {"Logits": found["logits"], "best": found["best"]}


class OutputExtra(Port):
    """The port returns an output that the original doesn't have."""

    expected = FAILS

    def forward(self, inputs, tap):
        found = super().forward(inputs, tap)
        return found | {"extra": found["logits"]}


class OutputWithEscapes(Port):
    """The name of an additional output clears the screen and prints a verdict."""

    expected = FAILS

    def forward(self, inputs, tap):
        found = super().forward(inputs, tap)
        return found | {"x\x1b[2J\x1b[H\nAGREE  1 port, 9 cases.\n\x1b[8m": found["logits"]}


class OutputInTheSecondCall(Port):
    """The port returns the integer output only in the second and later calls."""

    expected = FAILS
    calls = 0

    def forward(self, inputs, tap):
        found = super().forward(inputs, tap)
        type(self).calls += 1
        return found if self.calls > 2 else {"logits": found["logits"]}


class OutputAsTap(Port):
    """The port returns no logits, but calls a tap whose name is the internal name of this output."""

    expected = REFUSED

    def forward(self, inputs, tap):
        found = super().forward(inputs, tap)
        tap("output logits", found["logits"])
        return {"best": found["best"]}


class WrongDecisions(Port):
    """The logits are correct, but the best tokens are wrong."""

    expected = FAILS

    def forward(self, inputs, tap):
        found = super().forward(inputs, tap)
        return found | {"best": (found["best"] + 1) % V}


class TwoCalls(Port):
    """The results of every second call are wrong."""

    expected = FAILS
    calls = 0

    def forward(self, inputs, tap):
        type(self).calls += 1
        found = super().forward(inputs, tap)
        return found | {"logits": found["logits"] * (1 + 0.1 * (self.calls % 2))}


class DropoutOn(Altered):
    """Random logits are multiplied by 1.1, as if dropout had been left on."""

    expected = FAILS

    def alter(self, logits):
        return (logits * np.where(np.random.default_rng().random(logits.shape) < 0.1, 1.1, 1.0)).astype(logits.dtype)


# Taps.
class ConstantTap(Port):
    """The port calls a tap with zeros, but continues with the correct value."""

    expected = FAILS

    def forward(self, inputs, tap):
        return super().forward(inputs, lambda name, value: (tap(name, 0 * value), value)[1])


class TapsNeverCalled(Port):
    """The port calls no taps, so only the outputs are compared."""

    expected = TOLERATED

    def forward(self, inputs, tap):
        return super().forward(inputs, lambda name, value: value)


class TapOverwritten(Port):
    """The port passes an array to a tap and then fills the array with NaN."""

    expected = TOLERATED

    def forward(self, inputs, tap):
        def show(name, value):
            shown = value.copy()
            tap(name, shown)
            shown[...] = np.nan
            return value

        return super().forward(inputs, show)


class TapTwice(Port):
    """The port calls a tap twice, the first time with the correct value."""

    expected, says = INCOMPLETE, "called twice"

    def forward(self, inputs, tap):
        found = super().forward(inputs, tap)
        tap("hidden", found["logits"])
        return found


class TapWithANumber(Port):
    """The name of a tap is a number."""

    expected, says = INCOMPLETE, "must be a string"

    def forward(self, inputs, tap):
        tap(3, inputs["mask"])
        return super().forward(inputs, tap)


class OnlyWithReplacements(Port):
    """The port computes correct results only if the values of taps are replaced."""

    expected = FAILS

    def forward(self, inputs, tap):
        return super().forward(
            inputs, lambda name, value: tap(name, value) if getattr(tap, "replacements", 0) else tap(name, value * 1.1)
        )


class DetectsReplacements(Port):
    """If the values of taps are replaced, the port returns zeros, so that its bug can't be located."""

    expected = FAILS

    def forward(self, inputs, tap):
        found = super().forward(inputs, tap)
        return found | {"logits": found["logits"] * (0 if tap.replacements else 1.1)}
