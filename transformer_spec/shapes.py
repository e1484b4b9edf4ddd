"""Array types with shapes, for annotations such as ``Float[ndarray, "B S d_model"]``.

Type checkers import these types from jaxtyping. At run time, an annotation evaluates to the array type, without the
shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
else:

    class Float:
        """An array type with a shape."""

        def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
            """Return the array type without the shape."""
            return item[0]

    Bool = Int = Float
