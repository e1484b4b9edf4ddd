"""Attacks through the arrays that a port returns: values, shapes, dtypes, layouts, and subclasses of arrays."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np
from numpy import ndarray

from attacks.attack import Sound, attack, inject, padded, showing
from attacks.words import FAILS, INCOMPLETE, REFUSED, TOLERATED
from reference_numpy.functional import log_softmax
from transformer_parity.transformer.cases.case import ACTIVATIONS, Case
from transformer_spec.config import TransformerConfig

ONE_CASE: dict[str, Any] = {"stages": (ACTIVATIONS,), "cases": padded}
WEIGHTS = "encoder.layers.1.self_attention.weights"  # a tap


def logits(name: str, what: str, alter: Callable[[ndarray], Any], expected: str = FAILS) -> None:
    """Add a port that returns altered logits."""

    def forward(self: Sound, source_ids: ndarray, target_ids: ndarray, tap: Any) -> Any:
        return alter(Sound.forward(self, source_ids, target_ids, tap))

    inject(__name__, name, expected, what, {"forward": forward}, **ONE_CASE)


def taps(name: str, expected: str, what: str, alter: Callable[[str, ndarray], ndarray]) -> None:
    """Add a port that passes altered values to its taps, but continues with the correct ones."""
    forward = showing(lambda tap, name, value: tap(name, alter(name, value)))
    inject(__name__, name, expected, what, {"forward": forward}, **ONE_CASE)


def with_first(array: ndarray, value: float) -> ndarray:
    """Return a copy with a different first element."""
    array = array.copy()
    array.flat[0] = value
    return array


def of_dtype(function: Callable[[ndarray], ndarray]) -> Callable[[ndarray], ndarray]:
    """Return a function whose result has the dtype of its argument."""
    return lambda x: function(x).astype(x.dtype)


# Values.
logits("OneNan", "One logit is NaN.", lambda x: with_first(x, np.nan))
logits("AllNan", "Every logit is NaN.", lambda x: np.full_like(x, np.nan))
logits("OneInfinity", "One logit is infinite.", lambda x: with_first(x, np.inf))
logits("Zeros", "Every logit is zero.", np.zeros_like)
logits("LogProbabilities", "The port returns log-probabilities instead of logits.", log_softmax)
logits("Probabilities", "The port returns probabilities instead of logits.", lambda x: np.exp(log_softmax(x)))
logits(
    "SameRanking",
    "Every logit is 0.1% too large, which changes neither the argmax nor the ranking.",
    of_dtype(lambda x: x * 1.001),
)
logits(
    "SameProbabilities",
    "The port adds a constant to all logits at a position, which doesn't change the probabilities.",
    lambda x: x - x.max(-1, keepdims=True),
)
logits("SixDecimals", "The port rounds the logits to six decimals, as a text file would.", lambda x: x.round(6))
logits(
    "DropoutOn",
    "Random logits are multiplied by 1.1, as if dropout had been left on.",
    of_dtype(lambda x: np.where(np.random.default_rng().random(x.shape) < 0.01, 1.1 * with_first(x, 9.0), x)),
)
logits(
    "DenormalsAdded",
    "The smallest denormal number is added to every logit.",
    lambda x: x + np.nextafter(x.dtype.type(0), x.dtype.type(1)),
    expected=TOLERATED,
)
taps(
    "NanTap",
    FAILS,
    "One attention weight passed to a tap is NaN.",
    lambda n, x: with_first(x, np.nan) if n == WEIGHTS else x,
)
taps(
    "NegativeZeros",
    TOLERATED,
    "Taps receive -0.0 for every zero.",
    lambda n, x: np.where(x == 0.0, x.dtype.type(-0.0), x),
)
taps(
    "DenormalsFlushed",
    TOLERATED,
    "Taps receive zero for values below the smallest normal number.",
    lambda n, x: np.where(np.abs(x) < np.finfo(x.dtype).tiny, x.dtype.type(0.0), x),
)


@attack(TOLERATED, **ONE_CASE)
class NanForAnEmptySentence(Sound):
    """The logits of a sentence with only padding are NaN. No case tests this, so it is listed as NOT TESTED."""

    def forward(self, source_ids, target_ids, tap):
        found = super().forward(source_ids, target_ids, tap)
        found[(source_ids == self.config.pad_id).all(1)] = np.nan
        return found


@dataclass(frozen=True)
class Overflowing(Case):
    """A case with finite weights whose logits overflow float32, but not float64."""

    def load_weights(self) -> dict[str, ndarray]:
        """Return weights for which one term of each logit is about 1e40."""
        weights = {name: array.copy() for name, array in super().load_weights().items()}
        weights[f"decoder.layers.{self.config.num_decoder_layers - 1}.feed_forward_norm.scale"][0] = 1e30
        weights["source_embedding.table"][:, 0] *= 1e10
        return weights


def overflowing(config: TransformerConfig) -> list[Case]:
    """Return one case whose float32 baseline is infinite."""
    (case,) = padded(config)
    return [Overflowing(**{entry.name: getattr(case, entry.name) for entry in fields(Case)})]


@attack(REFUSED, stages=(ACTIVATIONS,), cases=overflowing, says="finite")
class InfiniteBaseline(Sound):
    """Even the reference overflows in float32, so there is neither a float32 baseline nor a tolerance."""


@attack(REFUSED, stages=(ACTIVATIONS,), cases=overflowing)
class GarbageBesideInfinity(Sound):
    """If the reference overflows in float32, the port returns an array of three small integers instead of logits."""

    taps = ()

    def forward(self, source_ids, target_ids, tap):
        found = super().forward(source_ids, target_ids, tap)
        return found if found.dtype == np.float64 else np.arange(3)


# Wrong shapes that could broadcast against the correct one.
logits("FirstSentenceOnly", "The logits have the shape [1, T, V].", lambda x: x[:1])
logits("OneLogitPerPosition", "The logits have the shape [B, T, 1].", lambda x: x[..., :1])
logits("LastPositionOnly", "The port returns only the logits of the last position, [B, V].", lambda x: x[:, -1])
logits("AxisInFront", "The logits have the shape [1, B, T, V].", lambda x: x[None])
logits("AxisBehind", "The logits have the shape [B, T, V, 1].", lambda x: x[..., None])
logits("TimeFirst", "The logits have the shape [T, B, V].", lambda x: x.swapaxes(0, 1))
logits("Flat", "The logits have the shape [B * T, V].", lambda x: x.reshape(-1, x.shape[-1]))
logits("SingleNumber", "The port returns the mean of the logits, a single number.", lambda x: np.asarray(x.mean()))
logits("NoSentence", "The logits have the shape [0, T, V], so no value can differ.", lambda x: x[:0])


# Dtypes.
logits("AlwaysFloat64", "The port returns float64 logits for a float32 model.", lambda x: x.astype(np.float64))
logits("LongDoubles", "The logits have extended precision.", lambda x: x.astype(np.longdouble))
logits("ComplexNumbers", "The logits are complex numbers with the correct real parts.", lambda x: x + 7.0j)
logits(
    "Objects",
    "The logits are an array of Python objects with the correct values.",
    lambda x: x.astype(object),
    INCOMPLETE,
)
logits("Strings", "The logits are strings that contain the correct values.", lambda x: x.astype(str))
logits(
    "Records",
    "The logits are records with one field, which contains the correct values.",
    lambda x: np.ascontiguousarray(x).view([("value", x.dtype)]),
)
logits(
    "BigEndian",
    "The logits have a non-native byte order.",
    lambda x: x.astype(x.dtype.newbyteorder(">")),
    expected=TOLERATED,
)


class OtherPrecision(Sound):
    """A port that computes in one dtype and returns a different one."""

    taps = ()
    inside = "float64"

    def load(self, config, weights, dtype):
        super().load(config, weights, self.inside)
        self.dtype = dtype

    def forward(self, source_ids, target_ids, tap):
        return super().forward(source_ids, target_ids, tap).astype(self.dtype)

    def export_weights(self):
        return {name: array.astype(self.dtype) for name, array in super().export_weights().items()}


@attack(FAILS, **ONE_CASE)
class Float32Inside(OtherPrecision):
    """The port computes everything in float32 and casts the result to float64."""

    inside = "float32"


@attack(TOLERATED, **ONE_CASE)
class Float64Inside(OtherPrecision):
    """The port computes everything in float64 and rounds the result to float32, which doesn't reduce precision."""


@attack(FAILS, **ONE_CASE)
class HalfPrecisionInside(Sound):
    """A float32 model rounds its weights to float16 when it loads them, but exports the original weights."""

    def load(self, config, weights, dtype):
        self.given = {name: array.astype(dtype) for name, array in weights.items()}
        inside = "float16" if dtype == "float32" else "float32"
        super().load(config, {name: array.astype(inside) for name, array in weights.items()}, dtype)

    def export_weights(self):
        return self.given


# Memory layouts, all harmless.
def read_only(x: ndarray) -> ndarray:
    """Make an array read-only and return it."""
    x.setflags(write=False)
    return x


def strided(x: ndarray) -> ndarray:
    """Return an equal array that is a reversed view of every second element of a larger one."""
    wide = np.full((*x.shape[:-1], 2 * x.shape[-1]), np.nan, x.dtype)
    wide[..., ::2] = x[..., ::-1]
    return wide[..., ::2][..., ::-1]


def unaligned(x: ndarray) -> ndarray:
    """Return a copy that starts at an odd address."""
    view = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


def mapped(x: ndarray) -> ndarray:
    """Return a copy in a memory-mapped file."""
    with tempfile.TemporaryFile() as file:
        found = np.memmap(file, x.dtype, "w+", shape=x.shape)
    found[...] = x
    return found


logits("ReadOnly", "The logits are read-only.", read_only, expected=TOLERATED)
logits("FortranOrder", "The logits are in Fortran order.", np.asfortranarray, expected=TOLERATED)
logits(
    "Strided", "The logits are a reversed view of every second element of a larger array.", strided, expected=TOLERATED
)
logits("Unaligned", "The logits start at an odd memory address.", unaligned, expected=TOLERATED)
logits("MemoryMap", "The logits are a memory-mapped file.", mapped, expected=TOLERATED)


# Subclasses of ndarray, and objects that aren't arrays.
class Lying(ndarray):
    """Zeros that compare as if they were correct."""

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function is np.broadcast_arrays:
            return args[1], args[1]
        return super().__array_function__(function, types, args, kwargs)

    def __array_ufunc__(self, ufunc: Any, method: Any, *inputs: Any, **kwargs: Any) -> Any:
        constant = {np.isfinite: True, np.subtract: 0.0}.get(ufunc)
        if constant is not None:
            return np.full(np.shape(inputs[0]), constant)
        return super().__array_ufunc__(ufunc, method, *map(np.asarray, inputs), **kwargs)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.zeros(self.shape)

    def __eq__(self, other: object) -> Any:
        return np.ones(self.shape, bool)

    def any(self, *args: Any, **kwargs: Any) -> Any:
        """Return False, as if all elements were zero."""
        return False

    def copy(self, order: Any = "C") -> Any:
        """Return the array itself."""
        return self


class Misshapen(ndarray):
    """An array that reports its shape without the first axis."""

    shape = property(lambda self: ndarray.shape.__get__(self)[1:])


class Mistyped(ndarray):
    """An array that reports the dtype float32."""

    dtype = property(lambda self: np.dtype(np.float32))


class Lazy:
    """An object that NumPy can convert to an array."""

    def __init__(self, value: ndarray) -> None:
        self.__array__ = lambda dtype=None, copy=None: value


logits(
    "LyingArray",
    "The logits are zeros, in a subclass of ndarray that reports a difference of zero from any array.",
    lambda x: np.zeros_like(x).view(Lying),
)
logits(
    "LyingShape",
    "The logits have the shape [1, B, T, V], in a subclass of ndarray that reports [B, T, V].",
    lambda x: x[None].view(Misshapen),
)
logits(
    "LyingDtype",
    "The logits of a float32 model are float16, in a subclass of ndarray that reports float32.",
    lambda x: x if x.dtype == np.float64 else x.astype(np.float16).view(Mistyped),
)
logits(
    "MaskedGarbage",
    "The logits are a masked array with one wrong value, which is masked.",
    lambda x: np.ma.masked_equal(with_first(x, 1e3), 1e3),
)
logits(
    "MaskedNan",
    "The logits are a masked array with one NaN, which is masked.",
    lambda x: np.ma.masked_invalid(with_first(x, np.nan)),
)
not_an_array = partial(logits, expected=INCOMPLETE)
not_an_array("NestedLists", "The logits are nested lists with the correct values.", ndarray.tolist)
not_an_array("Pair", "The port returns a tuple of the logits and a cache.", lambda x: (x, {}))
not_an_array("Nothing", "The forward pass returns None.", lambda x: None)
not_an_array("LazyArray", "The logits are an object that NumPy can convert to an array.", Lazy)
