"""Plans that divide the training of one model among several devices.

In each step, every device receives the complete global batch. The loss is the sum of the losses of all target tokens,
divided by the number of target tokens, and the gradient is clipped based on its global norm. Therefore, a plan changes
only the order in which terms of the loss and the gradient are summed.

Axes: B batch, L length, R rows of a micro-batch in one shard.
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

# For each layer parameter that ``tensor`` divides, the axis along which it is divided. This axis consists of attention
# heads or units of the feed-forward network. Each device stores a full copy of all other parameters, and of the outputs
# of ``output_proj``. These outputs are summed across the devices.
TENSOR_AXES = {
    "query_proj.kernel": 1,
    "query_proj.bias": 0,
    "key_proj.kernel": 1,
    "key_proj.bias": 0,
    "value_proj.kernel": 1,
    "value_proj.bias": 0,
    "gate_proj.kernel": 1,
    "gate_proj.bias": 0,
    "inner_proj.kernel": 1,
    "inner_proj.bias": 0,
    "output_proj.kernel": 0,
    "relative_bias.table": 1,
}


@dataclass(frozen=True)
class Plan:
    """Number of devices along each axis of the mesh for training a model. Frozen; the constructor validates all fields.

    Attributes:
        data: Number of copies of the model. Each copy processes different rows of the batch (Goyal et al., 2017).
        fsdp: Number of shards into which each parameter and its moments are divided. The devices gather a parameter
            when they need it. Devices that store different shards also process different rows of the batch (Rajbhandari
            et al., 2020).
        tensor: Number of parts into which the attention heads and the feed-forward networks are divided. Devices that
            store different parts of a layer process the same rows (Shoeybi et al., 2019).

    Raises:
        TypeError: If a size is not an integer.
        ValueError: If a size is less than 1.
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            object.__setattr__(self, axis, check_integer(axis, getattr(self, axis), minimum=1))

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Create a plan from a string, such as ``data=2,tensor=2``.

        Args:
            text: Comma-separated sizes. Missing axes have size 1.

        Raises:
            ValueError: If the text is malformed, an axis is unknown or repeated, or a size is less than 1.
        """
        sizes: dict[str, int] = {}
        for entry in text.split(","):
            axis, _, size = (piece.strip() for piece in entry.partition("="))
            if axis not in AXES or axis in sizes or not (size.isascii() and size.isdecimal()):
                raise ValueError(f"a plan must have the form data=2,fsdp=2,tensor=2: got {text!r}")
            sizes[axis] = int(size)
        return cls(**sizes)

    @classmethod
    def of_axes(cls, sizes: Mapping[str, int]) -> Plan:
        """Create the plan of a framework's mesh from the sizes of its named axes.

        Args:
            sizes: Size of each axis, keyed by name.

        Raises:
            ValueError: If an axis is unknown.
        """
        if unknown := [axis for axis in sizes if axis not in AXES]:
            raise ValueError(f"mesh axes must be named {', '.join(AXES[:-1])}, or {AXES[-1]}: got {', '.join(unknown)}")
        return cls(**sizes)

    def __str__(self) -> str:
        sizes = dataclasses.asdict(self)
        return ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "data=1"

    @property
    def devices(self) -> int:
        """Total number of devices."""
        return self.data * self.fsdp * self.tensor

    @property
    def shards(self) -> int:
        """Number of shards of a batch."""
        return self.data * self.fsdp

    def check_devices(self, devices: int, how: str) -> None:
        """Check the number of available devices or processes.

        Args:
            devices: Number of available devices.
            how: Text for the error message that explains how to get the required number of devices.

        Raises:
            ValueError: If the number of devices doesn't match the plan.
        """
        if devices != self.devices:
            raise ValueError(f"plan {self} requires exactly {self.devices} devices: got {devices}; {how}")

    def check(self, config: TransformerConfig) -> None:
        """Check that a model can be divided as the plan specifies.

        Args:
            config: Model configuration.

        Raises:
            ValueError: If ``tensor`` doesn't divide the number of heads or the inner size of the feed-forward networks.
        """
        for stack, sizes in (("encoder", config), ("decoder", config.in_decoder)):
            for name, size in (("num_heads", sizes.num_heads), ("d_ff", sizes.d_ff)):
                if size % self.tensor:
                    raise ValueError(f"{name} of the {stack} must be divisible by tensor={self.tensor}: got {size}")


@dataclass(frozen=True)
class Shard:
    """The part of one parameter that one device stores.

    Attributes:
        device: Index of the device in the mesh, in row-major order of the axes ``data``, ``fsdp``, and ``tensor``.
        index: Position of the shard within the parameter's canonical shape, as one slice per axis.
        array: Values of the shard.
    """

    device: int
    index: tuple[slice, ...]
    array: ndarray


def tensor_axis(name: str) -> int | None:
    """Return the axis along which ``tensor`` divides a parameter, or None if the parameter isn't divided."""
    if name.startswith("output_proj."):  # the output projection of the model
        return None
    return TENSOR_AXES.get(".".join(name.split(".")[-2:]))


def fsdp_axis(name: str, shape: tuple[int, ...], fsdp: int) -> int | None:
    """Return the first axis whose size is a multiple of ``fsdp``, except the axis that ``tensor`` divides.

    If there is no such axis, return None. A framework that supports unequal shards may divide any parameter along its
    first axis instead.
    """
    axes = (axis for axis, size in enumerate(shape) if axis != tensor_axis(name) and size % fsdp == 0)
    return next(axes, None)


def spread(
    ids: Int[ndarray, "B L"], micro_batches: int, shards: int, pad_id: int
) -> Int[ndarray, "micro_batches shards R L"]:
    """Divide a batch into micro-batches, and each micro-batch into shards. Return the rows of all shards in order.

    The batch is divided into micro-batches first, so the micro-batches don't depend on the plan. If the rows of a
    micro-batch can't be divided equally among the shards, padding rows are added at the end of the micro-batch.

    Args:
        ids: Token IDs of the batch.
        micro_batches: Number of micro-batches.
        shards: Number of shards of each micro-batch.
        pad_id: ID of the padding token.
    """
    parts = ids.reshape(micro_batches, -1, ids.shape[1])
    rows = -(-parts.shape[1] // shards)
    if missing := rows * shards - parts.shape[1]:
        padding = (0, 0), (0, missing), (0, 0)
        parts = np.pad(parts, padding, constant_values=pad_id)
    return parts.reshape(micro_batches, shards, rows, ids.shape[1])
