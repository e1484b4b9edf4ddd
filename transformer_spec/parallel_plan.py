"""Several devices: along which axes work is divided, and which part of a batch or of a parameter each device has.

A step takes the global batch everywhere. Its loss is the sum over all target tokens divided by their number, and its
gradient is clipped by the norm of the whole gradient, so that a plan changes nothing but the order of sums.

B batch, L length, R rows of a slice that one share has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from transformer_spec.checks import check_integer
from transformer_spec.config import TransformerConfig
from transformer_spec.shapes import Int

AXES = ("data", "fsdp", "tensor")
DROPOUTS = ("global", "local")

# Of the parameters of a layer, which axis is divided over ``tensor``: heads, or units of the feed-forward network. What
# is not named is whole on each device, as are the sums that follow a product whose inputs are divided.
TENSOR_AXES = {
    "query_proj.kernel": 1,
    "query_proj.bias": 0,
    "key_proj.kernel": 1,
    "key_proj.bias": 0,
    "value_proj.kernel": 1,
    "value_proj.bias": 0,
    "inner_proj.kernel": 1,
    "inner_proj.bias": 0,
    "output_proj.kernel": 0,
}


@dataclass(frozen=True)
class Plan:
    """How many devices train one model, and what they divide among them. Frozen; validates itself.

    Attributes:
        data: Copies of the model; each has rows of its own (Goyal et al., 2017).
        fsdp: Parts of each parameter and its moments, gathered where they are needed; each part comes with rows of its
            own (Rajbhandari et al., 2020).
        tensor: Parts of the heads and of the feed-forward network, which compute on the same rows (Shoeybi et al.,
            2019).

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is less than 1.
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            object.__setattr__(self, axis, check_integer(axis, getattr(self, axis), minimum=1))

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Read a plan as it is printed: ``data=2,tensor=2``.

        Raises:
            ValueError: Not of that form, an axis that is unknown or named twice, or a size less than 1.
        """
        sizes: dict[str, int] = {}
        for entry in text.split(","):
            axis, _, size = (piece.strip() for piece in entry.partition("="))
            if axis not in AXES or axis in sizes or not (size.isascii() and size.isdecimal()):
                raise ValueError(f"a plan must be like data=2,fsdp=2,tensor=2: got {text!r}")
            sizes[axis] = int(size)
        return cls(**sizes)

    @classmethod
    def of_axes(cls, sizes: Mapping[str, int]) -> Plan:
        """Return the plan of a framework's mesh, from the size of each of its named axes.

        Raises:
            ValueError: An axis is none of a plan's.
        """
        if unknown := [axis for axis in sizes if axis not in AXES]:
            raise ValueError(f"the axes of a mesh must be some of {', '.join(AXES)}: got {', '.join(unknown)}")
        return cls(**sizes)

    def __str__(self) -> str:
        sizes = dataclasses.asdict(self)
        return ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "data=1"

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return self.data * self.fsdp * self.tensor

    @property
    def shares(self) -> int:
        """How many parts a batch falls into."""
        return self.data * self.fsdp

    def check_devices(self, devices: int, how: str) -> None:
        """Refuse a machine, or a group of processes, with another number of devices; ``how`` says how to get them.

        Raises:
            ValueError: There are more or fewer.
        """
        if devices != self.devices:
            raise ValueError(f"the plan {self} needs {self.devices} devices: got {devices} ({how})")

    def check(self, config: TransformerConfig) -> None:
        """Refuse a model that cannot be divided like this.

        Raises:
            ValueError: The heads or the feed-forward units of a stack do not fall into ``tensor`` equal parts.
        """
        for stack, sizes in (("encoder", config), ("decoder", config.in_decoder)):
            for name, size in (("num_heads", sizes.num_heads), ("d_ff", sizes.d_ff)):
                if size % self.tensor:
                    raise ValueError(f"{name} of the {stack} must be divisible by tensor={self.tensor}: got {size}")


@dataclass(frozen=True)
class Shard:
    """What one device holds of one parameter.

    Attributes:
        device: Its number in the mesh: the position along ``data``, then along ``fsdp``, then along ``tensor``.
        index: Where the part lies in the parameter of canonical shape, as one slice for each axis.
        array: The part.
    """

    device: int
    index: tuple[slice, ...]
    array: ndarray


def tensor_axis(name: str) -> int | None:
    """Return the axis of a parameter of canonical shape that ``tensor`` divides; None: each device has all of it."""
    if ".layers." not in name:
        return None
    return TENSOR_AXES.get(".".join(name.split(".")[-2:]))


def fsdp_axis(name: str, shape: tuple[int, ...], fsdp: int) -> int | None:
    """Return the axis that ``fsdp`` divides into equal parts: the first that ``tensor`` does not; None: there is none.

    Where a framework can divide unequally, any parameter may be divided along its first axis.
    """
    axes = (axis for axis, size in enumerate(shape) if axis != tensor_axis(name) and size % fsdp == 0)
    return next(axes, None)


def spread(ids: Int[ndarray, "B L"], slices: int, shares: int, pad_id: int) -> Int[ndarray, "slices shares R L"]:
    """Return the rows of each share of each slice, in order: slices come first, so that none depends on the plan.

    Where the rows of a slice do not fall into equal parts, rows of padding are added behind them.
    """
    parts = ids.reshape(slices, -1, ids.shape[1])
    rows = -(-parts.shape[1] // shares)
    if missing := rows * shares - parts.shape[1]:
        padding = (0, 0), (0, missing), (0, 0)
        parts = np.pad(parts, padding, constant_values=pad_id)
    return parts.reshape(slices, shares, rows, ids.shape[1])
