"""Check before an export that the other program can represent the model."""

from __future__ import annotations

from collections.abc import Mapping

from transformer_spec.config import TransformerConfig

# Most programs derive the width of a head from d_model, and use the same number of heads in both stacks.
PLAIN_HEADS: dict[str, tuple[object, ...]] = {
    **{f"decoder_{name}": (None,) for name in ("num_heads", "d_k", "d_v")},
    "skip_first_self_attention": (False,),
}


def check_expressible(config: TransformerConfig, needed: Mapping[str, tuple[object, ...]], program: str) -> None:
    """Raise an error if another program does not support a config.

    Args:
        config: Config of the model to export.
        needed: Supported values of each restricted field, by field name. Other fields may have any value.
        program: Name of the program in the error message.

    Raises:
        ValueError: If fields have unsupported values. The message lists all of them.
    """
    width = config.d_model // config.num_heads
    allowed = {**needed, "d_k": needed.get("d_k", (width,)), "d_v": needed.get("d_v", (width,))}
    if problems := [
        f"{name} must be {' or '.join(map(repr, values))}: got {getattr(config, name)!r}"
        for name, values in allowed.items()
        if getattr(config, name) not in values
    ]:
        raise ValueError(f"{program} does not support this model: {'; '.join(problems)}")
