"""What the devices of a run hold of each parameter, and whether that is what the plan gives them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from transformer_parity.transformer.distributed.worker import Held, Place, Seen
from transformer_spec.parallel_plan import Plan, fsdp_axis, tensor_axis

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Holdings:
    """The parts of each parameter, by its name: device, place in the whole, and hash of each."""

    parts: Mapping[str, list[Held]]

    @classmethod
    def of(cls, seen: Iterable[Seen]) -> Holdings:
        """Return what all processes have."""
        parts: dict[str, list[Held]] = {}
        for one in seen:
            for name, held in one.shards.items():
                parts.setdefault(name, []).extend(held)
        return cls(parts)

    def places(self, name: str) -> set[Place]:
        """Return the places in a parameter that some device has."""
        return {place for _, place, _ in self.parts[name]}

    def apart(self) -> list[str]:
        """Return the parameters of which two devices have the same part with other numbers."""
        return [
            name
            for name, held in self.parts.items()
            if len({(place, digest) for _, place, digest in held}) > len(self.places(name))
        ]

    def not_divided(self, plan: Plan, shapes: Shapes) -> str:
        """Return why the devices do not have what the plan gives them; empty if they do."""
        devices = {device for held in self.parts.values() for device, _, _ in held}
        if self.parts.keys() != shapes.keys() or len(devices) != plan.devices:
            needed = f"{len(shapes)} parameters on {plan.devices} devices"
            return f"{needed} are needed: got {len(self.parts)} on {len(devices)}"
        for name, shape in shapes.items():
            places = self.places(name)
            if sum(map(_size, places)) != math.prod(shape):
                return f"the parts of {name} do not make up the whole"
            if tensor_axis(name) is not None and len(places) < plan.tensor:
                return f"tensor={plan.tensor} must divide {name}: each device has all of it"
        every = sum(map(math.prod, shapes.values()))
        most = max(map(self._numbers, devices))
        due = sum(math.prod(shape) / _parts(name, shape, plan) for name, shape in shapes.items())
        if most > (due + every) / 2:  # a framework may divide otherwise than the plan's table, but not much less
            return f"a device must hold about {due / every:.0%} of all numbers: one holds {most / every:.0%}"
        return ""

    def _numbers(self, device: int) -> int:
        return sum(_size(place) for held in self.parts.values() for on, place, _ in held if on == device)


def _size(place: Place) -> int:
    return math.prod(stop - start for start, stop in place)


def _parts(name: str, shape: tuple[int, ...], plan: Plan) -> int:
    """Return into how many parts a plan divides a parameter."""
    by_fsdp = plan.fsdp if fsdp_axis(name, shape, plan.fsdp) is not None else 1
    return by_fsdp * (plan.tensor if tensor_axis(name) is not None else 1)
