"""What another program cannot compute is refused before it is written."""

from __future__ import annotations

from collections.abc import Mapping

from transformer_spec.config import TransformerConfig

# Sizes that most programs derive: one width of all heads, the same in both stacks.
PLAIN_HEADS: dict[str, tuple[object, ...]] = {
    **{f"decoder_{name}": (None,) for name in ("num_heads", "d_k", "d_v")},
    "skip_first_self_attention": (False,),
}


def check_expressible(config: TransformerConfig, needed: Mapping[str, tuple[object, ...]], program: str) -> None:
    """Refuse a config that another program does not compute.

    Args:
        config: The model.
        needed: The values that a field may have, by its name; a field that is not named may have any.
        program: What the message calls the program.

    Raises:
        ValueError: Fields have other values; the message names them all.
    """
    width = config.d_model // config.num_heads
    allowed = {**needed, "d_k": needed.get("d_k", (width,)), "d_v": needed.get("d_v", (width,))}
    if problems := [
        f"{name} must be {' or '.join(map(repr, values))}: got {getattr(config, name)!r}"
        for name, values in allowed.items()
        if getattr(config, name) not in values
    ]:
        raise ValueError(f"{program} cannot hold this model: {'; '.join(problems)}")
