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

from attacks.attack import FAILS, INCOMPLETE, REFUSED, TOLERATED, Sound, attack, padded, plant, showing
from reference_numpy.functional import log_softmax
from transformer_parity.transformer.cases.case import ACTIVATIONS, Case
from transformer_spec.config import TransformerConfig

ONE_CASE: dict[str, Any] = {"stages": (ACTIVATIONS,), "cases": padded}
WEIGHTS = "encoder.layers.1.self_attention.weights"  # a tap


def logits(name: str, what: str, alter: Callable[[ndarray], Any], expected: str = FAILS) -> None:
    """Plant a port that returns altered logits."""

    def forward(self: Sound, source_ids: ndarray, target_ids: ndarray, tap: Any) -> Any:
        return alter(Sound.forward(self, source_ids, target_ids, tap))

    plant(__name__, name, expected, what, {"forward": forward}, **ONE_CASE)


def taps(name: str, expected: str, what: str, alter: Callable[[str, ndarray], ndarray]) -> None:
    """Plant a port that goes on with the right values, and shows altered ones."""
    forward = showing(lambda tap, name, value: tap(name, alter(name, value)))
    plant(__name__, name, expected, what, {"forward": forward}, **ONE_CASE)


def with_first(array: ndarray, value: float) -> ndarray:
    """Return a copy whose first number is another."""
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
logits("LogProbabilities", "Log-probabilities are returned in place of logits.", log_softmax)
logits("Probabilities", "Probabilities are returned in place of logits.", lambda x: np.exp(log_softmax(x)))
logits(
    "SameRanking",
    "Every logit is 0.1 % too large, so that each argmax and each ranking is as it should be.",
    of_dtype(lambda x: x * 1.001),
)
logits(
    "SameProbabilities",
    "A constant is added to all logits of a position, which changes no probability.",
    lambda x: x - x.max(-1, keepdims=True),
)
logits("SixDecimals", "The logits are rounded to six decimals, as in a text file.", lambda x: x.round(6))
logits(
    "DropoutOn",
    "Some logits are multiplied by 1.1 at random, as by a dropout that is left on.",
    of_dtype(lambda x: np.where(np.random.default_rng().random(x.shape) < 0.01, 1.1 * with_first(x, 9.0), x)),
)
logits(
    "DenormalsAdded",
    "The smallest denormal number is added to every logit.",
    lambda x: x + np.nextafter(x.dtype.type(0), x.dtype.type(1)),
    expected=TOLERATED,
)
taps(
    "NanTap", FAILS, "One attention weight is shown as NaN.", lambda n, x: with_first(x, np.nan) if n == WEIGHTS else x
)
taps(
    "NegativeZeros",
    TOLERATED,
    "Every zero among the intermediate values is shown as -0.0.",
    lambda n, x: np.where(x == 0.0, x.dtype.type(-0.0), x),
)
taps(
    "DenormalsFlushed",
    TOLERATED,
    "Intermediate values below the smallest normal number are shown as zero.",
    lambda n, x: np.where(np.abs(x) < np.finfo(x.dtype).tiny, x.dtype.type(0.0), x),
)


@attack(TOLERATED, **ONE_CASE)
class NanForAnEmptySentence(Sound):
    """A sentence that is all padding yields NaN: such sentences are not asked of a port, and listed as not tested."""

    def forward(self, source_ids, target_ids, tap):
        found = super().forward(source_ids, target_ids, tap)
        found[(source_ids == self.config.pad_id).all(1)] = np.nan
        return found


@dataclass(frozen=True)
class Overflowing(Case):
    """A case whose weights are finite, and whose logits overflow float32 but not float64."""

    def load_weights(self) -> dict[str, ndarray]:
        """Return hard weights with which one product in each logit is about 1e40."""
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
    """The weights overflow float32 in the reference too: there is no float32 baseline, and no tolerance."""


@attack(REFUSED, stages=(ACTIVATIONS,), cases=overflowing)
class GarbageBesideInfinity(Sound):
    """Where the reference overflows float32, the port returns three small integers."""

    taps = ()

    def forward(self, source_ids, target_ids, tap):
        found = super().forward(source_ids, target_ids, tap)
        return found if found.dtype == np.float64 else np.arange(3)


# Shapes: a wrong one may broadcast against the right one.
logits("FirstSentenceOnly", "The logits have the shape [1, T, V].", lambda x: x[:1])
logits("OneLogitPerPosition", "The logits have the shape [B, T, 1].", lambda x: x[..., :1])
logits("LastPositionOnly", "The logits of the last position are returned, [B, V].", lambda x: x[:, -1])
logits("AxisInFront", "The logits have the shape [1, B, T, V].", lambda x: x[None])
logits("AxisBehind", "The logits have the shape [B, T, V, 1].", lambda x: x[..., None])
logits("TimeFirst", "The logits have the shape [T, B, V].", lambda x: x.swapaxes(0, 1))
logits("Flat", "The logits have the shape [B T, V].", lambda x: x.reshape(-1, x.shape[-1]))
logits("SingleNumber", "The logits are a single number, their mean.", lambda x: np.asarray(x.mean()))
logits("NoSentence", "The logits have the shape [0, T, V], so that none can differ.", lambda x: x[:0])


# Dtypes.
logits("AlwaysFloat64", "The logits are of float64 in float32 too.", lambda x: x.astype(np.float64))
logits("LongDoubles", "The logits are of extended precision.", lambda x: x.astype(np.longdouble))
logits("ComplexNumbers", "The logits are complex numbers whose real parts are right.", lambda x: x + 7.0j)
logits("Objects", "The logits are Python objects with the right values.", lambda x: x.astype(object), INCOMPLETE)
logits("Strings", "The logits are strings with the right values.", lambda x: x.astype(str))
logits(
    "Records",
    "The logits are records of one field with the right values.",
    lambda x: np.ascontiguousarray(x).view([("value", x.dtype)]),
)
logits(
    "BigEndian",
    "The logits are in the other byte order.",
    lambda x: x.astype(x.dtype.newbyteorder(">")),
    expected=TOLERATED,
)


class OtherPrecision(Sound):
    """A port that computes in another dtype than it returns."""

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
    """Everything is computed in float32, and cast to float64 at the end."""

    inside = "float32"


@attack(TOLERATED, **ONE_CASE)
class Float64Inside(OtherPrecision):
    """Everything is computed in float64, and rounded to float32 at the end: nothing is less precise."""


@attack(FAILS, **ONE_CASE)
class HalfPrecisionInside(Sound):
    """In float32, the weights are rounded to float16 on the way in, and come back as they were given."""

    def load(self, config, weights, dtype):
        self.given = {name: array.astype(dtype) for name, array in weights.items()}
        inside = "float16" if dtype == "float32" else "float32"
        super().load(config, {name: array.astype(inside) for name, array in weights.items()}, dtype)

    def export_weights(self):
        return self.given


# Layouts: all of them are harmless.
def read_only(x: ndarray) -> ndarray:
    """Return an array that cannot be written to."""
    x.setflags(write=False)
    return x


def strided(x: ndarray) -> ndarray:
    """Return a view of every second number of another array, from the last to the first."""
    wide = np.full((*x.shape[:-1], 2 * x.shape[-1]), np.nan, x.dtype)
    wide[..., ::2] = x[..., ::-1]
    return wide[..., ::2][..., ::-1]


def unaligned(x: ndarray) -> ndarray:
    """Return an array that begins at an odd address."""
    view = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


def mapped(x: ndarray) -> ndarray:
    """Return an array that is a file."""
    with tempfile.TemporaryFile() as file:
        found = np.memmap(file, x.dtype, "w+", shape=x.shape)
    found[...] = x
    return found


logits("ReadOnly", "The logits cannot be written to.", read_only, expected=TOLERATED)
logits("FortranOrder", "The logits lie in Fortran order.", np.asfortranarray, expected=TOLERATED)
logits("Strided", "The logits are a view of every second number, backwards.", strided, expected=TOLERATED)
logits("Unaligned", "The logits begin at an odd address.", unaligned, expected=TOLERATED)
logits("MemoryMap", "The logits are a memory map of a file.", mapped, expected=TOLERATED)


# Subclasses of arrays, and what is no array.
class Lying(ndarray):
    """Zeros that answer every question as if they were right."""

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
        """Deny that any number differs from zero."""
        return False

    def copy(self, order: Any = "C") -> Any:
        """Return the array itself."""
        return self


class Misshapen(ndarray):
    """An array that states a shape without its first axis."""

    shape = property(lambda self: ndarray.shape.__get__(self)[1:])


class Mistyped(ndarray):
    """An array that states to be of float32."""

    dtype = property(lambda self: np.dtype(np.float32))


class Lazy:
    """What becomes an array when NumPy asks for one."""

    def __init__(self, value: ndarray) -> None:
        self.__array__ = lambda dtype=None, copy=None: value


logits(
    "LyingArray",
    "The logits are zeros in a subclass of ndarray whose differences from anything are zero.",
    lambda x: np.zeros_like(x).view(Lying),
)
logits(
    "LyingShape",
    "The logits have the shape [1, B, T, V] in a subclass of ndarray that states [B, T, V].",
    lambda x: x[None].view(Misshapen),
)
logits(
    "LyingDtype",
    "In float32, the logits are of float16 in a subclass of ndarray that states float32.",
    lambda x: x if x.dtype == np.float64 else x.astype(np.float16).view(Mistyped),
)
logits(
    "MaskedGarbage",
    "The logits are a masked array: one is wrong, and masked.",
    lambda x: np.ma.masked_equal(with_first(x, 1e3), 1e3),
)
logits(
    "MaskedNan",
    "The logits are a masked array whose NaN are masked.",
    lambda x: np.ma.masked_invalid(with_first(x, np.nan)),
)
not_an_array = partial(logits, expected=INCOMPLETE)
not_an_array("NestedLists", "The logits are nested lists with the right values.", ndarray.tolist)
not_an_array("Pair", "The logits come with a cache, as a pair.", lambda x: (x, {}))
not_an_array("Nothing", "The forward pass returns None.", lambda x: None)
not_an_array("LazyArray", "The logits are an object that is computed when NumPy asks for it.", Lazy)
