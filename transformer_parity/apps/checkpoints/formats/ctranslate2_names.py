"""CTranslate2's variable names, and the projections that CTranslate2 fuses into one array.

Source: OpenNMT/CTranslate2, python/ctranslate2/specs/.
"""

from __future__ import annotations

from transformer_parity.apps.checkpoints.name_mapping import TRANSPOSED, Row

BINARY, SETTINGS = "model.bin", "config.json"
NAME, REVISION = "TransformerSpec", 7
ACTIVATIONS = {"relu": 0, "gelu_tanh": 1, "swish": 2, "gelu": 3}
PADDINGS = ("<pad>", "<blank>")
STACKS = {"encoder": "embeddings_0", "decoder": "embeddings"}
POSITIONS = "{stack}/position_encodings/encodings"
FLAGS = ("pre_norm", "activation", "num_heads", "scale_embeddings", "embeddings_merge", "start_from_zero_embedding")
IGNORED = tuple(
    f"*/{flag}" for flag in (*FLAGS, "alignment_heads", "alignment_layer", "embeddings/multiply_by_sqrt_depth")
)
DEFAULTS = {"pre_norm": 1.0, "activation": -1.0, "num_heads": 8.0}
OFF = ("multi_query_attention", "alibi", "alibi_use_positive_positions", "scale_alibi")
_LAYER, _THEIRS = "{stack}.layers.{i}", "{stack}/layer_{i}"
_LINEARS = {
    **{f"self_attention.{one}_proj": f"self_attention/{one}" for one in ("query", "key", "value")},
    **{f"cross_attention.{one}_proj": f"attention/{one}" for one in ("query", "key", "value")},
    "self_attention.output_proj": "self_attention/linear_1",
    "cross_attention.output_proj": "attention/linear_2",
    "feed_forward.inner_proj": "ffn/linear_0",
    "feed_forward.output_proj": "ffn/linear_1",
}
_NORMS = {
    f"{_LAYER}.self_attention_norm": f"{_THEIRS}/self_attention/layer_norm",
    f"{_LAYER}.cross_attention_norm": f"{_THEIRS}/attention/layer_norm",
    f"{_LAYER}.feed_forward_norm": f"{_THEIRS}/ffn/layer_norm",
    "{side}_embedding_norm": "{stack}/layernorm_embedding",
    "{stack}.final_norm": "{stack}/layer_norm",
}
NAMES = [
    *(
        Row(f"{side}_embedding.table", f"{stack}/{STACKS[stack]}/weight")
        for side, stack in (("source", "encoder"), ("target", "decoder"))
    ),
    Row("{side}_position.table", POSITIONS),
    Row("output_proj.kernel", "decoder/projection/weight", TRANSPOSED),
    Row("output_proj.bias", "decoder/projection/bias"),
    *(Row(f"{_LAYER}.{ours}.kernel", f"{_THEIRS}/{theirs}/weight", TRANSPOSED) for ours, theirs in _LINEARS.items()),
    *(Row(f"{_LAYER}.{ours}.bias", f"{_THEIRS}/{theirs}/bias") for ours, theirs in _LINEARS.items()),
    *(Row(f"{ours}.scale", f"{theirs}/gamma") for ours, theirs in _NORMS.items()),
    *(Row(f"{ours}.bias", f"{theirs}/beta") for ours, theirs in _NORMS.items()),
]
FUSED: dict[str, dict[str, tuple[str, ...]]] = {  # projections that are concatenated into one array, in this order
    "self_attention": {"linear_0": ("query", "key", "value")},
    "attention": {"linear_0": ("query",), "linear_1": ("key", "value")},
}
