"""A table of names: what a format calls each canonical parameter, and how the array lies there.

A name may hold ``{stack}`` (encoder or decoder), ``{side}`` (source or target, of the same stack), ``{i}`` (the layer,
counted from 0) and ``{n}`` (the same, counted from 1). What a format stores fused is split before its table is used.
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
TRANSPOSED = "transposed"  # [out, in] there, [in, out] here
ROW = "row"  # [1, n] there, [n] here
SIDES = {"encoder": "source", "decoder": "target"}
SHOWN = 5  # names that a message suggests
COMPARED = 2000  # names among which similar ones are looked for
Shape = tuple[int, ...]


class Row(NamedTuple):
    """One canonical name, what a format calls it, and how the array lies there: one of the constants above."""

    name: str
    foreign: str
    form: str = AS_IS


def spelled_out(table: Iterable[Row], config: TransformerConfig) -> dict[str, Row]:
    """Return the row of each parameter of a config that a table names, by the parameter's canonical name.

    Raises:
        ValueError: Two rows of the table name one parameter.
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
                        raise ValueError(f"two rows of the table name {name}: {found[name].foreign} and {row.foreign}")
                    found[name] = Row(name, row.foreign.format(**fields), row.form)
                    names.add(name)
    return found


def take(
    table: Iterable[Row], tensors: Mapping[str, ndarray], config: TransformerConfig, ignored: Sequence[str] = ()
) -> dict[str, ndarray]:
    """Return the canonical weights that a format's tensors hold.

    Args:
        table: The names.
        tensors: The arrays under the format's names.
        config: What they are weights of.
        ignored: Patterns, as of file names, of tensors that are no weights.

    Returns:
        One array per canonical name, in order; some are views of the tensors.

    Raises:
        ValueError: Tensors are missing, unknown, or not of the shape or a dtype that the config needs; the message has
            the format's names.
    """
    layers = config.num_encoder_layers + config.num_decoder_layers
    if layers > len(tensors):  # before the names of that many layers are spelled out
        raise ValueError(f"{len(tensors)} tensors are too few for the config's {layers:,} layers")
    rows = spelled_out(table, config)
    shapes = parameter_shapes(config)
    if unnamed := [name for name in shapes if name not in rows]:
        raise ValueError(f"this format has no name for {some(unnamed)}")
    problems = []
    for name, shape in shapes.items():
        _, foreign, form = rows[name]
        needed = foreign_shape(shape, form)
        if foreign not in tensors:
            problems.append(f"missing {foreign} {list(needed)}")
        elif tensors[foreign].shape != needed:
            problems.append(f"{foreign} must have shape {list(needed)}: got {list(tensors[foreign].shape)}")
        elif tensors[foreign].dtype.name not in FLOAT_DTYPES:
            problems.append(f"{foreign} must be one of {', '.join(FLOAT_DTYPES)}: got {tensors[foreign].dtype.name}")
    known = {row.foreign for row in rows.values()}
    problems += [
        f"unexpected {name} {list(array.shape)}"
        for name, array in tensors.items()
        if name not in known and not any(fnmatchcase(name, pattern) for pattern in ignored)
    ]
    if problems:
        raise ValueError(f"the tensors do not fit the config: {some(problems)}")
    return {name: canonical(tensors[rows[name].foreign], rows[name].form) for name in shapes}


def give(table: Iterable[Row], weights: Mapping[str, ndarray], config: TransformerConfig) -> dict[str, ndarray]:
    """Return the weights of a config under a format's names: what ``take`` takes.

    Raises:
        ValueError: The format has no name for a parameter, or one name for two that differ.
    """
    rows = spelled_out(table, config)
    if unnamed := [name for name in parameter_shapes(config) if name not in rows]:
        raise ValueError(f"this format has no place for {some(unnamed)}")
    tensors: dict[str, ndarray] = {}
    for name, row in rows.items():
        array = np.ascontiguousarray(foreign_form(np.asarray(weights[name]), row.form))
        if row.foreign in tensors and not same(tensors[row.foreign], array):
            first = next(other for other, one in rows.items() if one.foreign == row.foreign)
            raise ValueError(f"this format has one table for {first} and {name}, and they differ here")
        tensors[row.foreign] = array
    return tensors


def matrix(held: Mapping[str, ndarray], name: str) -> ndarray:
    """Return a tensor that determines a size.

    Raises:
        ValueError: It is missing, or no matrix.
    """
    if name not in held:
        raise ValueError(f"there is no tensor {name}: {_there_is(held, name)}")
    if held[name].ndim != 2:
        raise ValueError(f"{name} must be a matrix: got {list(held[name].shape)}")
    return held[name]


def _there_is(held: Iterable[str], name: str) -> str:
    """Return a clause that lists the names most like one, or else the first ones."""
    names = list(islice(held, COMPARED))
    alike = difflib.get_close_matches(name, names, SHOWN, 0.5) or names[:SHOWN]
    more = ", ..." if len(names) > len(alike) else ""
    return f"there is {', '.join(alike)}{more}" if alike else "there are no tensors at all"


def three_projections(name: str, fused: ndarray) -> dict[str, ndarray]:
    """Return query, key and value of a fused projection of PyTorch's: ``q_proj``, ``k_proj``, ``v_proj`` in its place.

    Raises:
        ValueError: It does not have the rows of three.
    """
    path, _, kind = name.rpartition(".in_proj_")
    if fused.ndim < 1 or len(fused) % 3:
        raise ValueError(f"{name} must have the rows of three projections: got {list(fused.shape)}")
    return {f"{path}.{one}_proj.{kind}": part for one, part in zip("qkv", np.split(fused, 3), strict=True)}


def foreign_shape(shape: Shape, form: str) -> Shape:
    """Return the shape that a format has an array in."""
    return {AS_IS: shape, TRANSPOSED: shape[::-1], ROW: (1, *shape)}[form]


def foreign_form(array: ndarray, form: str) -> ndarray:
    """Return an array as a format has it."""
    return array.T if form == TRANSPOSED else array.reshape(foreign_shape(array.shape, form))


def canonical(array: ndarray, form: str) -> ndarray:
    """Return an array of a format as it is here."""
    return array.T if form == TRANSPOSED else array[0] if form == ROW else array


def same(one: ndarray, other: ndarray) -> bool:
    """Return whether two arrays hold the same bytes, of the same dtype and shape."""
    if one is other:
        return True
    alike = one.dtype == other.dtype and one.shape == other.shape
    unsigned = f"u{one.dtype.itemsize}"
    return alike and bool(np.array_equal(one.view(unsigned), other.view(unsigned)))
