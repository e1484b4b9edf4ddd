"""Types of arrays with their shapes, for annotations such as ``Float[ndarray, "B S d_model"]``.

Type checkers use the types of jaxtyping. At run time, an annotation is only the type of the array.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
else:

    class Float:
        """An array with a given shape."""

        def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
            """Return the type of the array."""
            return item[0]

    Bool = Int = Float
