"""Model bugs that users of published ports have reported (see docs/reported-bugs.md), grouped by model part."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy import ndarray

from transformer_parity.transformer.bugs.attention import ZEROED, forbidden
from transformer_parity.transformer.bugs.bug import (
    ALL,
    CAUSAL,
    CROSS,
    ENCODER,
    SELF,
    SOURCE,
    TARGET,
    Bug,
    Edits,
    Table,
    but,
    changed,
    instead,
    table,
    together,
)
from transformer_parity.transformer.bugs.layers import (
    ANSWERED,
    ATTENDED,
    POSITIONED,
    SUM,
    everywhere,
    everywhere_in_pre_norm,
    norm,
)
from transformer_parity.transformer.bugs.structure import LOGITS, RETURNED

# Each of these source lines is edited by multiple bugs.
ALLOWED = {
    "numpy": "np.where(mask, scores, -np.inf)",
    "torch": "scores.masked_fill(~mask, torch.finfo(scores.dtype).min)",
    "jax": "jnp.where(mask, wide, jnp.finfo(wide.dtype).min)",
    "tf": "tf.where(mask, wide, tf.constant(wide.dtype.min, wide.dtype))",
}
MASKED = "masked_softmax(scores, mask"
CROSS_MASK = "cross_mask = source_mask[:, None, None, :]"
ADD_AND_NORM = {**dict.fromkeys(ALL, ATTENDED), "numpy": f"{SUM}attended)"}
LAST_ROW = "None if self_mask is None else self_mask[:, :, -1:]"  # the last row of the mask, which masks only padding
NORM_TAP = ' x = tap("self_attention_norm.output", '
VECTORS = {
    "numpy": "self.vectors(x.shape[1]).astype",
    "torch": "encoding = self.vectors(x.shape[1])",
    "jax": "encoding = self.vectors(x.shape[1])",
    "tf": "encoding = self.vectors(keras.ops.shape(x)[1])",
}
WAVES = {
    "numpy": "(np.sin(angles), np.cos(angles))",
    "torch": "(angles.sin(), angles.cos())",
    "jax": "(np.sin(angles), np.cos(angles))",
    "tf": "(tf.sin(angles), tf.cos(angles))",
}
OUTPUT = {
    **dict.fromkeys(ALL, "self.output_proj(self.dropout(inner))"),
    "numpy": 'self.output_proj(self.dropout(inner, rng, tap, "inner"))',
}
ACTIVATED_LATE = instead(
    "feed_forward", OUTPUT, **{port: f"ACTIVATIONS[self.activation]({x})" for port, x in OUTPUT.items()}
)
RELU = {"numpy": '"relu": relu,', "torch": '"relu": F.relu', "jax": '"relu": jax.nn.relu', "tf": '"relu": tf.nn.relu'}
LOG_SOFTMAX = {
    "numpy": "log_softmax",
    "torch": "torch.nn.functional.log_softmax",
    "jax": "jax.nn.log_softmax",
    "tf": "tf.nn.log_softmax",
}


def selected(yes: str, no: str, mask: str) -> dict[str, str]:
    """Return one expression per package that selects ``yes`` where a mask [B, L] is True, and ``no`` elsewhere."""
    where = {"numpy": "np.where", "torch": "torch.where", "jax": "jnp.where", "tf": "tf.where"}
    return {port: f"{function}({mask}[..., None], {yes}, {no})" for port, function in where.items()}


def rectified(projection: str, x: str) -> Edits:
    """Return edits that apply a ReLU to one of the attention projections."""
    projected = f"self.{projection}({x})"
    return instead(
        "attention",
        projected,
        numpy=f"np.maximum({projected}, 0.0)",
        torch=f"{projected}.relu()",
        jax=f"jax.nn.relu({projected})",
        tf=f"tf.nn.relu({projected})",
    )


def activated(numpy: str, tf: str, of_x: str) -> Edits:
    """Return edits that replace the ReLU.

    Args:
        numpy: Source code that replaces the ReLU entry in the NumPy package's dict of activations.
        tf: Source code that replaces the ReLU entry in the TensorFlow package's dict of activations.
        of_x: Expression in ``x`` for PyTorch and JAX. The field ``{m}`` is replaced with the name of the module that
            provides the math functions.
    """
    return {
        **instead("functional", RELU, numpy=numpy),
        **instead(
            "layers",
            RELU,
            torch=f'"relu": lambda x: {of_x.format(m="torch")}',
            jax=f'"relu": lambda x: {of_x.format(m="jax.lax")}',
            tf=tf,
        ),
    }


def in_numpy(old: str, new: str) -> Edits:
    """Return an edit that changes only the reference's ``functional`` module."""
    return {"numpy": [("functional", old, new)], **{port: [] for port in ALL}}


def log_probabilities(outside: bool) -> Edits:
    """Return edits that make the model return log-probabilities instead of logits.

    Args:
        outside: Whether the tap ``logits`` still records the logits.
    """
    edits: dict[str, list[tuple[str, str, str]]] = {}
    for port, function in LOG_SOFTMAX.items():
        axis = ", -1" if port == "torch" else ""
        new = f"{function}({LOGITS}{axis})" if outside else f'tap("logits", {function}(self.output_proj(x){axis}))'
        edits[port] = [("transformer", RETURNED, f"return {new}\n")]
    imported = "from reference_numpy.functional import log_softmax\nfrom reference_numpy.masks import"
    edits["numpy"].insert(0, ("transformer", "from reference_numpy.masks import", imported))
    return edits


def unpacked_by_head(weights: Mapping[str, ndarray], num_heads: int = 3) -> dict[str, ndarray]:
    """Return the weights that result if a converter splits the packed attention projections incorrectly.

    The packed projection contains the queries of all heads, followed by all keys and all values. The converter assumes
    that it contains the query, key, and value of the first head, then the query, key, and value of the second head, and
    so on.
    """
    found = dict(weights)
    for name in weights:
        block, kind, rest = name.partition("query_proj.")
        if kind:
            names = [f"{block}{part}_proj.{rest}" for part in ("query", "key", "value")]
            packed = np.concatenate([weights[part] for part in names], axis=-1)
            by_head = packed.reshape(*packed.shape[:-1], num_heads, 3, -1)
            for i, part in enumerate(names):
                found[part] = np.ascontiguousarray(by_head[..., i, :]).reshape(weights[part].shape)
    return found


ORDER = """    if mask is not None:
        batch, heads = scores.shape[:2]
        rows = ({arange}(batch)[:, None] + batch * {arange}(heads)) // heads
        mask = {taken}
    if mask is None:"""

ENTRIES: dict[str, Table] = {
    "attention": {
        f"{SELF}.query": {
            "ReLU on the projections": together(
                rectified("query_proj", "query"), rectified("key_proj", "memory"), rectified("value_proj", "memory")
            )
        },
        f"{SELF}.output": {
            "head and batch axes confused when heads are merged": changed(
                "attention",
                ("x.transpose(0, 2, 1, 3).reshape(", "x.transpose(1, 0, 2, 3).reshape("),
                torch=("x.transpose(1, 2).reshape(", "x.transpose(0, 1).reshape("),
                tf=("tf.transpose(x, [0, 2, 1, 3])", "tf.transpose(x, [1, 0, 2, 3])"),
            )
        },
        f"{CROSS}.query": {
            "cross-attention query not normalized": instead(
                "decoder", "self.cross_attention(x, memory,", "self.cross_attention(attended, memory,"
            )
        },
        (f"{CROSS}.key", "full/source_as_long_as_target"): {
            "cross-attention attends to the target": instead(
                "decoder", "self.cross_attention(x, memory,", "self.cross_attention(x, x,"
            )
        },
    },
    "mask": {
        f"{CAUSAL}.weights": {
            "target padding mask applied to queries instead of keys": instead(
                "transformer", " & target_mask[:, None, None, :]", " & target_mask[:, None, :, None]"
            )
        },
        f"{SELF}.weights": {
            "source padding mask applied to queries instead of keys": changed(
                "transformer",
                ("self.encoder(x, source_mask[:, None, None, :]", "self.encoder(x, source_mask[:, None, :, None]"),
                tf=("self.encoder(x, mask=source_mask", "self.encoder(x, source_mask[:, None, :, None]"),
            ),
            "padding mask negated": changed(
                "transformer",
                ("self.encoder(x, source_mask[", "self.encoder(x, (~source_mask)["),
                tf=("self.encoder(x, mask=source_mask", "self.encoder(x, mask=~source_mask"),
            ),
            "all masks ignored": instead("attention", MASKED, "masked_softmax(scores, None"),
            "boolean mask added to the scores": {
                **together(
                    instead(
                        "layers",
                        {port: ALLOWED[port] for port in ALL},
                        torch="(scores + mask)",
                        jax="wide + mask",
                        tf="wide + tf.cast(mask, wide.dtype)",
                    ),
                    instead("layers", ZEROED, "weights"),
                ),
                **instead("functional", ALLOWED, numpy="scores + mask"),
            },
            "mask applied after the softmax": {
                **instead("layers", {port: ALLOWED[port] for port in ALL}, torch="scores", jax="wide", tf="wide"),
                "numpy": [
                    ("functional", ALLOWED["numpy"], "scores + 0.0"),
                    (
                        "functional",
                        "    return weights / np.maximum(",
                        "    return (1.0 if mask is None else mask) * weights / np.maximum(",
                    ),
                ],
            },
            "masked scores set to -1e-9": forbidden("-1e-9"),
            "masks repeated in a different order from the heads": {
                **instead(
                    "layers",
                    "    if mask is None:",
                    torch=ORDER.format(arange="torch.arange", taken="mask[rows, 0]"),
                    jax=ORDER.format(arange="jnp.arange", taken="mask[rows, 0]"),
                    tf=ORDER.format(arange="tf.range", taken="tf.gather(mask[:, 0], rows)"),
                ),
                **changed(
                    "functional",
                    numpy=(
                        "np.where(mask, scores",
                        "np.where(mask[(np.arange(len(scores))[:, None] + len(scores) * np.arange(scores.shape[1]))"
                        " // scores.shape[1], 0], scores",
                    ),
                ),
            },
        },
        (f"{CROSS}.weights", "full/source_as_long_as_target"): {
            "cross-attention uses the target's padding mask": instead(
                "transformer", CROSS_MASK, CROSS_MASK.replace("source", "target")
            ),
            "cross-attention is causal": instead(
                "transformer", CROSS_MASK, f"{CROSS_MASK} & causal_mask(target_ids.shape[1])"
            ),
        },
        "encoder.layers.1.self_attention.weights": {
            "mask applied only in the first layer": changed(
                "encoder",
                ("layer(x, mask, within", "layer(x, None if i else mask, within"),
                tf=("layer(x, mask, tap", "layer(x, None if i else mask, tap"),
            )
        },
    },
    "norm": {
        f"{SELF}_norm.output": {
            "normalized over the entire sequence": norm(
                "(x - x.mean((1, 2), keepdims=True)) / (x.var((1, 2), keepdims=True) + self.epsilon) ** 0.5",
                torch="(x - x.mean((1, 2), True)) / (x.var((1, 2), correction=0, keepdim=True) + self.eps).sqrt()",
                tf="(x - tf.reduce_mean(x, (1, 2), True))"
                " / (tf.math.reduce_variance(x, (1, 2), True) + self.epsilon) ** 0.5",
            ),
            "normalized over the positions": norm(
                "(x - x.mean(1, keepdims=True)) / (x.var(1, keepdims=True) + self.epsilon) ** 0.5",
                torch="(x - x.mean(1, True)) / (x.var(1, correction=0, keepdim=True) + self.eps).sqrt()",
                tf="(x - tf.reduce_mean(x, 1, True)) / (tf.math.reduce_variance(x, 1, True) + self.epsilon) ** 0.5",
            ),
            "normalized twice": instead(
                "encoder",
                ADD_AND_NORM,
                **{port: f"self.self_attention_norm({text})" for port, text in ADD_AND_NORM.items()},
            ),
        },
        f"{CROSS}_norm.output": {
            "one norm shared by two sub-layers": instead("decoder", "self.cross_attention_norm(x + ", SUM)
        },
        (f"{SELF}.key", "full/deeper_decoder"): {
            "only the query normalized": instead(
                "encoder", "self.self_attention(normed, normed, mask", "self.self_attention(normed, x, mask"
            )
        },
    },
    "residual": {
        f"{SELF}_norm.output": {
            "a sub-layer's output added to itself": instead("encoder", SUM, "self.self_attention_norm(attended + "),
            # The residual is added after the norm. The tap records the norm's output, before this addition.
            "norm before the sum, also in its tap": instead(
                "encoder",
                {port: f"{NORM_TAP}{text}" for port, text in ADD_AND_NORM.items()},
                f"{NORM_TAP.replace('=', '= x +')}self.self_attention_norm(attended)",
            ),
        },
        f"{ENCODER}.feed_forward_norm.output": {
            "feed-forward residual adds the unnormalized input": together(
                instead("encoder", f"{NORM_TAP}{SUM}", f" y = x + attended\n            {NORM_TAP.lstrip()}{SUM}"),
                instead("encoder", "self.feed_forward_norm(x + ", "self.feed_forward_norm(y + "),
            ),
            "pre-norm residual adds the normalized input": but(
                instead("encoder", "x = x + self.dropout(attended", "x = normed + self.dropout(attended"),
                case="full/deeper_decoder",
            ),
        },
    },
    "embedding": {
        SOURCE: {
            "different wavelength for each channel": together(
                instead("embedding", " / steps)", " * 2 / steps)"),
                instead(
                    "embedding",
                    WAVES,
                    numpy="(np.sin(angles), np.cos(angles * 10000.0 ** (-1 / steps)))",
                    torch="(angles.sin(), (angles * 10000.0 ** (-1 / steps)).cos())",
                    jax="(np.sin(angles), np.cos(angles * 10000.0 ** (-1 / steps)))",
                    tf="(tf.sin(angles), tf.cos(angles * tf.constant(10000.0 ** (-1 / steps), tf.float64)))",
                ),
            ),
            # This bug rounds a factor in the exponent, -log(10000) / d_model, down to -1.
            "wavelengths from a floored exponent": instead("embedding", "10000.0 ** (", "math.exp(2.0 * steps) ** ("),
            "positions enumerate the batch instead of the sequence": instead(
                "embedding",
                VECTORS,
                numpy="self.vectors(x.shape[0])[:, None].astype",
                torch="encoding = self.vectors(x.shape[0])[:, None]",
                jax="encoding = self.vectors(x.shape[0])[:, None]",
                tf="encoding = self.vectors(keras.ops.shape(x)[0])[:, None]",
            ),
            "every position uses the sequence length": instead(
                "embedding",
                VECTORS,
                numpy="self.vectors(x.shape[1] + 1)[-1].astype",
                torch="encoding = self.vectors(x.shape[1] + 1)[-1]",
                jax="encoding = self.vectors(x.shape[1] + 1)[-1]",
                tf="encoding = self.vectors(keras.ops.shape(x)[1] + 1)[-1]",
            ),
            "no position added to padding": together(
                instead(
                    "transformer",
                    POSITIONED,
                    **selected(POSITIONED, "self.source_embedding(source_ids)", "source_mask"),
                ),
                instead(
                    "transformer", ANSWERED, **selected(ANSWERED, "self.target_embedding(target_ids)", "target_mask")
                ),
            ),
            "cosine applied to sine channels": but(
                instead(
                    "embedding",
                    WAVES,
                    numpy="(np.sin(angles), np.cos(np.hstack([np.sin(angles[:, 1::2]), angles[:, m // 2 :]])))",
                    torch="(angles.sin(), torch.hstack([angles[:, 1::2].sin(), angles[:, m // 2 :]]).cos())",
                    jax="(np.sin(angles), np.cos(np.hstack([np.sin(angles[:, 1::2]), angles[:, m // 2 :]])))",
                    tf="(tf.sin(angles), tf.cos(tf.concat([tf.sin(angles[:, 1::2]), angles[:, m // 2 :]], -1)))",
                ),
                case="preset/marian",
            ),
        },
        TARGET: {
            "BOS embeds to zero": instead(
                "transformer",
                "self.target_embedding(target_ids)",
                numpy="self.target_embedding(target_ids) * (np.arange(target_ids.shape[1]) > 0)[:, None]",
                torch="self.target_embedding(target_ids) * (torch.arange(target_ids.shape[1]) > 0)[:, None]",
                jax="self.target_embedding(target_ids) * (jnp.arange(target_ids.shape[1]) > 0)[:, None]",
                tf="self.target_embedding(target_ids)"
                " * tf.cast(tf.range(target_ids.shape[1]) > 0, self.compute_dtype)[:, None]",
            )
        },
        "logits": {
            "logits divided by sqrt(d_model)": instead(
                "transformer", RETURNED, RETURNED.replace("(x)", "(x * self.config.d_model**-0.5)")
            )
        },
    },
    "feed-forward": {
        f"{ENCODER}.feed_forward.inner": {
            "activation after the second projection instead of the first": together(
                instead("feed_forward", "ACTIVATIONS[self.activation](self.inner_proj(x))", "self.inner_proj(x)"),
                ACTIVATED_LATE,
            ),
            # Keras rounds the constants in its GELU to float32, so the reference must use the rounded constants.
            "Keras's GELU instead of ReLU": together(
                activated('"relu": gelu,', '"relu": tf.nn.gelu', "x * (0.5 * (1.0 + {m}.erf(x * 0.7071067690849304)))"),
                in_numpy("-math.sqrt(0.5) * x", "-0.7071067690849304 * x"),
            ),
            "Keras's tanh-GELU instead of ReLU": together(
                activated(
                    '"relu": gelu_tanh,',
                    '"relu": lambda x: tf.nn.gelu(x, approximate=True)',
                    "0.5 * x * (1.0 + {m}.tanh(0.7978845608028654 * (x + 0.044714998453855515 * x * x * x)))",
                ),
                in_numpy("(x + 0.044715 * x", "(x + 0.044714998453855515 * x"),
            ),
        },
        f"{ENCODER}.feed_forward.output": {"activation after both projections": ACTIVATED_LATE},
    },
}
CATALOG = {part: table(entries) for part, entries in ENTRIES.items()}

STRUCTURE_ENTRIES: dict[str, Table] = {
    "weights": {
        (f"{SELF}.query", "preset/torch"): {
            # The conversion is its own inverse, because the model in this case has three heads.
            "packed projections split by head": but(convert=unpacked_by_head)
        }
    },
    "edge cases": {
        (SOURCE, "full/large_vocabulary"): {
            # TensorFlow isn't included, because large IDs overflow to negative IDs and TensorFlow rejects negative IDs.
            "ids in int16": but(
                changed(
                    "embedding",
                    numpy=("self.table[ids]", 'self.table[ids.astype("int16")]'),
                    torch=("F.embedding(ids, self.weight)", "self.weight[ids.short().long()]"),
                    jax=("super().__call__(ids)", 'super().__call__(ids.astype("int16").astype("int32"))'),
                ),
                unseen=("full/padded",),
            )
        }
    },
    "structure": {
        "output": {"log-probabilities instead of logits": log_probabilities(outside=True)},
        "logits": {"log-probabilities instead of logits, also in their tap": log_probabilities(outside=False)},
    },
}
STRUCTURE = {part: table(entries) for part, entries in STRUCTURE_ENTRIES.items()}


# These bugs correspond to the bugs above but affect the full model. They serve only as candidates for the diagnosis.
EVERYWHERE = [
    Bug(
        "norm before the sum, in every sub-layer and its tap",
        "",
        everywhere('x + tap("{name}_norm.output", {norm}({y}))', 'tap("{name}_norm.output", {norm}(x + {y}))'),
    ),
    Bug("every sub-layer's output added to itself", "", everywhere("{norm}({y} + {y})")),
    Bug("normalized twice, in every sub-layer", "", everywhere("{norm}({norm}(x + {y}))")),
    # This bug edits the mask in each layer, not in the model, so the diagnosis can also try it in individual layers.
    Bug(
        "no causal mask",
        "",
        {
            "numpy": [
                ("decoder", call, call.replace("self_mask", LAST_ROW))
                for call in (
                    "self.self_attention(x, x, self_mask,",
                    "self.self_attention(\n                    normed, normed, self_mask,",
                )
            ]
        },
    ),
    Bug("all padding masks negated", "", changed("masks", numpy=("return ids != pad_id", "return ids == pad_id"))),
    Bug(
        "pre-norm residual adds the normalized input, in every sub-layer",
        "",
        everywhere_in_pre_norm("normed + "),
        case="full/deeper_decoder",
    ),
]
