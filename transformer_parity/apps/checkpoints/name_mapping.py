"""Tables of parameter names. They map each parameter's canonical name to its name and memory layout in another format.

A name may contain placeholders: ``{stack}`` (encoder or decoder), ``{side}`` (source for the encoder, target for the
decoder), ``{i}`` (the zero-based layer index), and ``{n}`` (the one-based layer number). A function that reads weights
must split fused projections before it uses a table.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from transformer_spec.checks import some
from transformer_spec.config import TransformerConfig
from transformer_spec.names import FLOAT_DTYPES, parameter_shapes

AS_IS = "as_is"
TRANSPOSED = "transposed"  # [out, in] in the other format, [in, out] in this project
ROW = "row"  # [1, n] in the other format, [n] in this project
SIDES = {"encoder": "source", "decoder": "target"}
SHOWN = 5  # maximum number of names that a message suggests
COMPARED = 2000  # maximum number of names to compare when searching for similar names
Shape = tuple[int, ...]


class Row(NamedTuple):
    """One row of a table of parameter names.

    Attributes:
        name: Canonical name.
        foreign: Name in the other format.
        form: Memory layout in the other format: ``AS_IS``, ``TRANSPOSED``, or ``ROW``.
    """

    name: str
    foreign: str
    form: str = AS_IS


def spelled_out(table: Iterable[Row], config: TransformerConfig) -> dict[str, Row]:
    """Fill in the placeholders in a table, and return a dict from each parameter's canonical name to its row.

    Raises:
        ValueError: If two rows of the table describe the same parameter.
    """
    shapes = parameter_shapes(config)
    found: dict[str, Row] = {}
    for row in table:
        names = set()
        for stack, layers in (("encoder", config.num_encoder_layers), ("decoder", config.num_decoder_layers)):
            for i in range(layers if "{i}" in row.name else 1):
                fields = {"stack": stack, "side": SIDES[stack], "i": i, "n": i + 1}
                name = row.name.format(**fields)
                if name in shapes and name not in names:
                    if name in found:
                        raise ValueError(f"{name} is mapped to two tensors, {found[name].foreign} and {row.foreign}")
                    found[name] = Row(name, row.foreign.format(**fields), row.form)
                    names.add(name)
    return found


def take(
    table: Iterable[Row], tensors: Mapping[str, ndarray], config: TransformerConfig, ignored: Sequence[str] = ()
) -> dict[str, ndarray]:
    """Convert tensors from another format to canonical weights.

    Args:
        table: Table of parameter names for the format.
        tensors: Dict from names in the other format to arrays.
        config: Config of the model.
        ignored: Glob patterns that match the names of tensors that are not weights.

    Returns:
        One array per canonical name, in canonical order. Some of the arrays are views of ``tensors``.

    Raises:
        ValueError: If tensors are missing or unexpected, or have the wrong shape or dtype. The message uses the other
            format's names.
    """
    layers = config.num_encoder_layers + config.num_decoder_layers
    if layers > len(tensors):  # avoid generating names for an unreasonable number of layers
        raise ValueError(f"the config has {layers:,} layers, but the file contains only {len(tensors):,} tensors")
    rows = spelled_out(table, config)
    shapes = parameter_shapes(config)
    if unnamed := [name for name in shapes if name not in rows]:
        raise ValueError(f"no tensor name is specified for {some(unnamed)}")
    problems = []
    for name, shape in shapes.items():
        _, foreign, form = rows[name]
        needed = foreign_shape(shape, form)
        if foreign not in tensors:
            problems.append(f"missing {foreign} {list(needed)}")
        elif tensors[foreign].shape != needed:
            problems.append(f"expected shape {list(needed)} for {foreign}, got {list(tensors[foreign].shape)}")
        elif tensors[foreign].dtype.name not in FLOAT_DTYPES:
            problems.append(f"expected {' or '.join(FLOAT_DTYPES)} for {foreign}, got {tensors[foreign].dtype.name}")
    known = {row.foreign for row in rows.values()}
    problems += [
        f"unexpected {name} {list(array.shape)}"
        for name, array in tensors.items()
        if name not in known and not any(fnmatchcase(name, pattern) for pattern in ignored)
    ]
    if problems:
        raise ValueError(f"the tensors do not match the config: {some(problems)}")
    return {name: canonical(tensors[rows[name].foreign], rows[name].form) for name in shapes}


def give(table: Iterable[Row], weights: Mapping[str, ndarray], config: TransformerConfig) -> dict[str, ndarray]:
    """Convert canonical weights to another format's names and layout. This is the inverse of ``take``.

    Raises:
        ValueError: If the format has no name for a parameter, or if the format stores two parameters as one tensor but
            the values of the two parameters differ.
    """
    rows = spelled_out(table, config)
    if unnamed := [name for name in parameter_shapes(config) if name not in rows]:
        raise ValueError(f"this format cannot store {some(unnamed)}")
    tensors: dict[str, ndarray] = {}
    for name, row in rows.items():
        array = np.ascontiguousarray(foreign_form(np.asarray(weights[name]), row.form))
        if row.foreign in tensors and not same(tensors[row.foreign], array):
            first = next(other for other, one in rows.items() if one.foreign == row.foreign)
            raise ValueError(f"{first} and {name} must be equal because this format stores only one of them")
        tensors[row.foreign] = array
    return tensors


def matrix(held: Mapping[str, ndarray], name: str) -> ndarray:
    """Return the matrix with the given name. Config fields can be inferred from its shape.

    Raises:
        ValueError: If the tensor is missing or is not a matrix.
    """
    if name not in held:
        raise ValueError(f"there is no tensor {name}; {_there_is(held, name)}")
    if held[name].ndim != 2:
        raise ValueError(f"{name} must be a matrix: got shape {list(held[name].shape)}")
    return held[name]


def _there_is(held: Iterable[str], name: str) -> str:
    """Return a clause that lists the names most similar to ``name``, or the first few names if none is similar."""
    names = list(islice(held, COMPARED))
    alike = difflib.get_close_matches(name, names, SHOWN, 0.5) or names[:SHOWN]
    more = ", ..." if len(names) > len(alike) else ""
    return f"the file contains {', '.join(alike)}{more}" if alike else "the file contains no tensors"


def three_projections(name: str, fused: ndarray) -> dict[str, ndarray]:
    """Split one of PyTorch's fused ``in_proj`` parameters into ``q_proj``, ``k_proj``, and ``v_proj`` parameters.

    Raises:
        ValueError: If the number of rows is not divisible by three.
    """
    path, _, kind = name.rpartition(".in_proj_")
    if fused.ndim < 1 or len(fused) % 3:
        raise ValueError(f"{name} must have a number of rows that is divisible by 3: got shape {list(fused.shape)}")
    return {f"{path}.{one}_proj.{kind}": part for one, part in zip("qkv", np.split(fused, 3), strict=True)}


def foreign_shape(shape: Shape, form: str) -> Shape:
    """Convert a canonical shape to the other format's layout."""
    return {AS_IS: shape, TRANSPOSED: shape[::-1], ROW: (1, *shape)}[form]


def foreign_form(array: ndarray, form: str) -> ndarray:
    """Convert an array from the canonical layout to the other format's layout."""
    return array.T if form == TRANSPOSED else array.reshape(foreign_shape(array.shape, form))


def canonical(array: ndarray, form: str) -> ndarray:
    """Convert an array from the other format's layout to the canonical layout."""
    return array.T if form == TRANSPOSED else array[0] if form == ROW else array


def same(one: ndarray, other: ndarray) -> bool:
    """Return whether two arrays have the same dtype and shape and are bitwise identical."""
    if one is other:
        return True
    alike = one.dtype == other.dtype and one.shape == other.shape
    unsigned = f"u{one.dtype.itemsize}"
    return alike and bool(np.array_equal(one.view(unsigned), other.view(unsigned)))
