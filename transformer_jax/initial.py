"""How parameters begin: as random numbers, or as shapes only if a model will load its weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax import Array
from jax.sharding import SingleDeviceSharding


class Places(nnx.Rngs):
    """What a model is built with whose parameters are loaded: each begins as a shape, and no number is drawn for it.

    ``nnx.eval_shape`` would do the same, but trace what is drawn, which takes longer than to build the model.

    Args:
        device: Where the model is bound to be; None is nowhere yet.
    """

    def __init__(self, device: jax.Device | None = None) -> None:
        key = jax.random.key(0)
        super().__init__(dropout=key if device is None else jax.device_put(key, device))
        self.place = None if device is None else SingleDeviceSharding(device)

    def params(self) -> SingleDeviceSharding | None:
        """Return the place of the next parameter, where others return a key."""
        return self.place


def initial(initializer: Callable[..., Array]) -> Callable[..., Any]:
    """Return an initializer that draws with a key, and with a place returns the shape alone."""

    def draw(key: Any, shape: tuple[int, ...], dtype: str) -> Any:
        if isinstance(key, Array):
            return initializer(key, shape, dtype)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=key)

    return draw
