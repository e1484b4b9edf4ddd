"""Convert arrays between NumPy and the framework of an implementation, without importing a framework."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np
from numpy import ndarray

from transformer_parity.engine.tensors import Tensors, plain
from transformer_parity.pairs.contract.implementation import Arrays

OUTPUT = "output "  # prefix of the names of outputs, because an output and a tap may have the same name
NARROW = ("bfloat16", "float16")  # dtypes that are narrower than float32


def is_float(array: ndarray) -> bool:
    """Return whether an array contains floating-point numbers, including bfloat16."""
    return array.dtype.kind == "f" or array.dtype.name == "bfloat16"


def rounded(arrays: Arrays, dtype: str) -> Tensors:
    """Return the arrays that an implementation receives in a dtype.

    Floating-point arrays are first rounded to float32, so that every dtype wider than float32 describes the same model.
    NumPy has no native bfloat16, so bfloat16 values are stored in float32 arrays.
    """
    return cast(cast(arrays, "float32"), dtype)


def cast(arrays: Arrays, dtype: str) -> Tensors:
    """Return copies of the arrays whose floating-point values have a dtype, without rounding to float32 first."""
    found = {}
    for name, array in arrays.items():
        if not is_float(array):
            found[name] = np.array(array)
        elif dtype == "bfloat16":
            found[name] = array.astype("bfloat16").astype(np.float32)
        else:
            found[name] = array.astype(dtype)
    return found


def varied(arrays: Arrays, size: float, rng: np.random.Generator) -> Tensors:
    """Return the arrays with all floating-point values changed by random relative amounts of up to ``size``."""
    return {
        name: array * (1.0 + size * rng.uniform(-1.0, 1.0, array.shape)) if is_float(array) else array
        for name, array in arrays.items()
    }


def to_numpy(value: Any) -> ndarray:
    """Return an array of any framework as a plain NumPy array.

    Raises:
        TypeError: If the value can't be converted to an array of numbers.
    """
    if isinstance(value, np.ndarray | np.generic):
        found = np.array(value, subok=False)
    elif hasattr(value, "detach"):  # torch
        value = value.detach().cpu()
        found = (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy().copy()
    elif type(value).__module__.partition(".")[0] == "mlx":
        found = np.array(value.astype(sys.modules["mlx.core"].float32) if "bfloat16" in str(value.dtype) else value)
    elif _is_traced(value):
        raise TypeError("the value is traced, as inside jax.jit or jax.vmap; run the model without these functions")
    else:
        found = np.array(value)
    if found.dtype.kind not in "fiub" and found.dtype.name != "bfloat16":
        raise TypeError(f"expected an array of real numbers: got {type(value).__name__} with dtype {found.dtype}")
    return found


def like(array: ndarray, value: Any) -> Any:
    """Return a NumPy array as an array of the same framework, dtype, and device as ``value``."""
    framework = type(value).__module__.partition(".")[0]
    if isinstance(value, np.ndarray | np.generic):
        return array.astype(value.dtype)
    if hasattr(value, "detach"):
        torch = sys.modules["torch"]
        return torch.from_numpy(np.ascontiguousarray(array)).to(device=value.device, dtype=value.dtype)
    if framework == "mlx":
        return sys.modules["mlx.core"].array(array).astype(value.dtype)
    if framework == "tensorflow":
        tensorflow = sys.modules["tensorflow"]
        return tensorflow.cast(tensorflow.convert_to_tensor(array), value.dtype)
    if hasattr(value, "devices"):  # JAX
        return sys.modules["jax"].numpy.asarray(array, value.dtype)
    raise TypeError(f"a tap can't replace a value of the type {type(value).__name__}")


def _is_traced(value: Any) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.core.Tracer)


def shown(values: Any, what: str) -> Tensors:
    """Return the arrays that a method of an implementation returned.

    Raises:
        TypeError: If the method didn't return a dict of arrays.
    """
    if not isinstance(values, Mapping):
        raise TypeError(f"{what} must return a dict of arrays: got {type(values).__name__}")
    found = {}
    for name, value in values.items():
        try:
            found[str(name)] = to_numpy(value)
        except TypeError as error:
            raise TypeError(f"{what} returned {name!r}: {error}") from error
    return plain(found)


def use_dtype(dtype: str) -> None:
    """Let JAX use float64 only if ``dtype`` is float64, because JAX otherwise rounds every array to float32."""
    wide = dtype == "float64"
    os.environ["JAX_ENABLE_X64"] = str(wide)  # read when JAX is imported
    jax = sys.modules.get("jax")
    if jax is not None and jax.config.jax_enable_x64 != wide:
        jax.config.update("jax_enable_x64", wide)


class Taps:
    """The tap that an implementation receives. It stores computed values and returns their replacements.

    Attributes:
        values: The computed values, in the order of computation.
        replacements: The arrays that replace computed values, keyed by tap name.
        captured: The names of taps that the ``capture`` module called, in contrast to taps in the user's code.
    """

    def __init__(self, replacements: Arrays | None = None) -> None:
        self.values: Tensors = {}
        self.replacements = dict(replacements or {})
        self.captured: set[str] = set()

    def __call__(self, name: str, value: Any) -> Any:
        """Store a value, and return its replacement or the value itself.

        Raises:
            TypeError: If the value can't be converted to an array of numbers, or if the name isn't a string.
            ValueError: If the name was used twice in one run, or is reserved.
        """
        if not isinstance(name, str):
            raise TypeError(f"the name of a tap must be a string: got {name!r}")
        if name.startswith(OUTPUT):
            raise ValueError(f"the name of a tap must not start with {OUTPUT!r}: got {name!r}")
        if name in self.values:
            raise ValueError(f"tap {name!r} was called twice in one run; give each value a different name")
        try:
            self.values[name] = to_numpy(value)
        except TypeError as error:
            raise TypeError(f"tap {name!r}: {error}") from error
        if name not in self.replacements:
            return value
        wanted = self.replacements[name]
        if wanted.shape != self.values[name].shape:
            raise ValueError(f"tap {name!r} has shape {list(self.values[name].shape)}: got {list(wanted.shape)}")
        return like(wanted, value)

    def __repr__(self) -> str:
        """Return a short text, because frameworks print the arguments of a call that fails."""
        return "<tap>"

    def capture(self, name: str, value: Any) -> Any:
        """Do the same as ``__call__``, for a value that the ``capture`` module found."""
        self.captured.add(name)
        return self(name, value)
