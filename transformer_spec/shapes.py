"""Shapes and kinds of arrays in annotations: ``Float[ndarray, "B S d_model"]``.

They are jaxtyping's where code is checked; where it runs, only the type of the array is left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
else:

    class Float:
        """An array of a shape."""

        def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
            """Return the type of the array."""
            return item[0]

    Bool = Int = Float
