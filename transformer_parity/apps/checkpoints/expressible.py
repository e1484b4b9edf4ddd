"""Check before an export whether the target program supports the model."""

from __future__ import annotations

from collections.abc import Mapping

from transformer_spec.config import TransformerConfig

# Most programs derive the head size from d_model and use the same number of heads in the encoder and the decoder.
PLAIN_HEADS: dict[str, tuple[object, ...]] = {
    **{f"decoder_{name}": (None,) for name in ("num_heads", "d_k", "d_v")},
    "skip_first_self_attention": (False,),
}

# Values that all formats except T5 require. The export to T5 specifies its own values for these fields in ``needed``.
NOT_T5: dict[str, tuple[object, ...]] = {
    "position_encoding": ("sinusoidal", "learned"),
    "tie_embeddings": ("none", "target_output", "all"),
    "gated_feed_forward": (False,),
    "scale_scores": (True,),
    "scale_logits": (False,),
}


def check_expressible(config: TransformerConfig, needed: Mapping[str, tuple[object, ...]], program: str) -> None:
    """Check that another program supports a config.

    Args:
        config: Config of the model to export.
        needed: Dict from the name of each restricted field to its supported values. All other fields may have any
            value.
        program: Name of the program, for error messages.

    Raises:
        ValueError: If a field has an unsupported value. The message lists all such fields.
    """
    width = config.d_model // config.num_heads
    allowed = {**NOT_T5, **needed, "d_k": needed.get("d_k", (width,)), "d_v": needed.get("d_v", (width,))}
    if problems := [
        f"{name} must be {' or '.join(map(repr, values))}: got {getattr(config, name)!r}"
        for name, values in allowed.items()
        if getattr(config, name) not in values
    ]:
        raise ValueError(f"{program} does not support this model: {'; '.join(problems)}")
