"""Mistakes of the model that were reported in threads of published ports (see docs/reported-mistakes.md), by part."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy import ndarray

from transformer_parity.transformer.mistakes.attention import ZEROED, forbidden
from transformer_parity.transformer.mistakes.layers import (
    ANSWERED,
    ATTENDED,
    POSITIONED,
    SUM,
    everywhere,
    everywhere_in_pre_norm,
    norm,
)
from transformer_parity.transformer.mistakes.mistake import (
    ALL,
    CAUSAL,
    CROSS,
    ENCODER,
    SELF,
    SOURCE,
    TARGET,
    Edits,
    Mistake,
    Table,
    but,
    changed,
    instead,
    table,
    together,
)
from transformer_parity.transformer.mistakes.structure import LOGITS, RETURNED

# Lines that more than one mistake touches.
ALLOWED = {
    "numpy": "np.where(mask, scores, -np.inf)",
    "torch": "scores.masked_fill(~mask, torch.finfo(scores.dtype).min)",
    "jax": "jnp.where(mask, wide, jnp.finfo(wide.dtype).min)",
    "tf": "tf.where(mask, wide, tf.constant(wide.dtype.min, wide.dtype))",
}
MASKED = "masked_softmax(scores, mask"
CROSS_MASK = "cross_mask = source_mask[:, None, None, :]"
ADD_AND_NORM = {**dict.fromkeys(ALL, ATTENDED), "numpy": f"{SUM}attended)"}
LAST_ROW = "None if self_mask is None else self_mask[:, :, -1:]"  # the last row forbids only padding
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
    """Return how each package takes one expression where a mask [B, L] is True, and another elsewhere."""
    where = {"numpy": "np.where", "torch": "torch.where", "jax": "jnp.where", "tf": "tf.where"}
    return {port: f"{function}({mask}[..., None], {yes}, {no})" for port, function in where.items()}


def rectified(projection: str, x: str) -> Edits:
    """Return edits that apply a ReLU to one of the attention's projections."""
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
    """Return edits that replace the ReLU; ``of_x`` is the formula in the other two packages, with ``{m}`` for math."""
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
    """Return an edit of the reference's functions that no port needs."""
    return {"numpy": [("functional", old, new)], **{port: [] for port in ALL}}


def log_probabilities(outside: bool) -> Edits:
    """Return edits that return log-probabilities, outside or inside of the tap of the logits."""
    edits: dict[str, list[tuple[str, str, str]]] = {}
    for port, function in LOG_SOFTMAX.items():
        axis = ", -1" if port == "torch" else ""
        new = f"{function}({LOGITS}{axis})" if outside else f'tap("logits", {function}(self.output_proj(x){axis}))'
        edits[port] = [("transformer", RETURNED, f"return {new}\n")]
    imported = "from reference_numpy.functional import log_softmax\nfrom reference_numpy.masks import"
    edits["numpy"].insert(0, ("transformer", "from reference_numpy.masks import", imported))
    return edits


def unpacked_by_head(weights: Mapping[str, ndarray], num_heads: int = 3) -> dict[str, ndarray]:
    """Read a packed projection [all queries, all keys, all values] as if each head had its three side by side."""
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
            "heads and sentences taken for each other when merged": changed(
                "attention",
                ("x.transpose(0, 2, 1, 3).reshape(", "x.transpose(1, 0, 2, 3).reshape("),
                torch=("x.transpose(1, 2).reshape(", "x.transpose(0, 1).reshape("),
                tf=("tf.transpose(x, [0, 2, 1, 3])", "tf.transpose(x, [1, 0, 2, 3])"),
            )
        },
        f"{CROSS}.query": {
            "the cross-attention's query is not normed": instead(
                "decoder", "self.cross_attention(x, memory,", "self.cross_attention(attended, memory,"
            )
        },
        (f"{CROSS}.key", "full/source_as_long_as_target"): {
            "cross-attention reads the target": instead(
                "decoder", "self.cross_attention(x, memory,", "self.cross_attention(x, x,"
            )
        },
    },
    "mask": {
        f"{CAUSAL}.weights": {
            "the target's padding mask over the queries": instead(
                "transformer", " & target_mask[:, None, None, :]", " & target_mask[:, None, :, None]"
            )
        },
        f"{SELF}.weights": {
            "the source's padding mask over the queries": changed(
                "transformer",
                ("self.encoder(x, source_mask[:, None, None, :]", "self.encoder(x, source_mask[:, None, :, None]"),
                tf=("self.encoder(x, mask=source_mask", "self.encoder(x, source_mask[:, None, :, None]"),
            ),
            "padding mask negated": changed(
                "transformer",
                ("self.encoder(x, source_mask[", "self.encoder(x, (~source_mask)["),
                tf=("self.encoder(x, mask=source_mask", "self.encoder(x, mask=~source_mask"),
            ),
            "no mask has an effect": instead("attention", MASKED, "masked_softmax(scores, None"),
            "a boolean mask added as numbers": {
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
            "forbidden scores are -1e-9": forbidden("-1e-9"),
            "masks repeated in another order than the heads": {
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
            "cross-attention has the target's padding mask": instead(
                "transformer", CROSS_MASK, CROSS_MASK.replace("source", "target")
            ),
            "cross-attention is causal": instead(
                "transformer", CROSS_MASK, f"{CROSS_MASK} & causal_mask(target_ids.shape[1])"
            ),
        },
        "encoder.layers.1.self_attention.weights": {
            "only the first layer has the mask": changed(
                "encoder",
                ("layer(x, mask, within", "layer(x, None if i else mask, within"),
                tf=("layer(x, mask, tap", "layer(x, None if i else mask, tap"),
            )
        },
    },
    "norm": {
        f"{SELF}_norm.output": {
            "normalised over the whole sentence": norm(
                "(x - x.mean((1, 2), keepdims=True)) / (x.var((1, 2), keepdims=True) + self.epsilon) ** 0.5",
                torch="(x - x.mean((1, 2), True)) / (x.var((1, 2), correction=0, keepdim=True) + self.eps).sqrt()",
                tf="(x - tf.reduce_mean(x, (1, 2), True))"
                " / (tf.math.reduce_variance(x, (1, 2), True) + self.epsilon) ** 0.5",
            ),
            "normalised over the positions": norm(
                "(x - x.mean(1, keepdims=True)) / (x.var(1, keepdims=True) + self.epsilon) ** 0.5",
                torch="(x - x.mean(1, True)) / (x.var(1, correction=0, keepdim=True) + self.eps).sqrt()",
                tf="(x - tf.reduce_mean(x, 1, True)) / (tf.math.reduce_variance(x, 1, True) + self.epsilon) ** 0.5",
            ),
            "normed twice": instead(
                "encoder",
                ADD_AND_NORM,
                **{port: f"self.self_attention_norm({text})" for port, text in ADD_AND_NORM.items()},
            ),
        },
        f"{CROSS}_norm.output": {
            "one norm for two sub-layers": instead("decoder", "self.cross_attention_norm(x + ", SUM)
        },
        (f"{SELF}.key", "full/deeper_decoder"): {
            "only the query is normed": instead(
                "encoder", "self.self_attention(normed, normed, mask", "self.self_attention(normed, x, mask"
            )
        },
    },
    "residual": {
        f"{SELF}_norm.output": {
            "a sub-layer's output added to itself": instead("encoder", SUM, "self.self_attention_norm(attended + "),
            # The tap is that of the norm alone.
            "norm before the sum, in its tap too": instead(
                "encoder",
                {port: f"{NORM_TAP}{text}" for port, text in ADD_AND_NORM.items()},
                f"{NORM_TAP.replace('=', '= x +')}self.self_attention_norm(attended)",
            ),
        },
        f"{ENCODER}.feed_forward_norm.output": {
            "feed-forward adds what was not normed": together(
                instead("encoder", f"{NORM_TAP}{SUM}", f" y = x + attended\n            {NORM_TAP.lstrip()}{SUM}"),
                instead("encoder", "self.feed_forward_norm(x + ", "self.feed_forward_norm(y + "),
            ),
            "pre-norm that adds the normed input": but(
                changed(
                    "encoder",
                    ("x = x + self.dropout(self.self_attention", "x = normed + self.dropout(self.self_attention"),
                    numpy=("x = x + self.dropout(attended", "x = normed + self.dropout(attended"),
                ),
                case="full/deeper_decoder",
            ),
        },
    },
    "embedding": {
        SOURCE: {
            "each channel has a wavelength of its own": together(
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
            # The factor of the exponent, -log(10000) / d_model, floored to -1.
            "wavelengths from a floored exponent": instead("embedding", "10000.0 ** (", "math.exp(2.0 * steps) ** ("),
            "positions count the sentences": instead(
                "embedding",
                VECTORS,
                numpy="self.vectors(x.shape[0])[:, None].astype",
                torch="encoding = self.vectors(x.shape[0])[:, None]",
                jax="encoding = self.vectors(x.shape[0])[:, None]",
                tf="encoding = self.vectors(keras.ops.shape(x)[0])[:, None]",
            ),
            "every position is that of the length": instead(
                "embedding",
                VECTORS,
                numpy="self.vectors(x.shape[1] + 1)[-1].astype",
                torch="encoding = self.vectors(x.shape[1] + 1)[-1]",
                jax="encoding = self.vectors(x.shape[1] + 1)[-1]",
                tf="encoding = self.vectors(keras.ops.shape(x)[1] + 1)[-1]",
            ),
            "padding has no position": together(
                instead(
                    "transformer",
                    POSITIONED,
                    **selected(POSITIONED, "self.source_embedding(source_ids)", "source_mask"),
                ),
                instead(
                    "transformer", ANSWERED, **selected(ANSWERED, "self.target_embedding(target_ids)", "target_mask")
                ),
            ),
            "the cosine of what already is a sine": but(
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
            "the start symbol has a zero vector": instead(
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
            "logits over sqrt(d_model)": instead(
                "transformer", RETURNED, RETURNED.replace("(x)", "(x * self.config.d_model**-0.5)")
            )
        },
    },
    "feed-forward": {
        f"{ENCODER}.feed_forward.inner": {
            "activation after the second matrix": together(
                instead("feed_forward", "ACTIVATIONS[self.activation](self.inner_proj(x))", "self.inner_proj(x)"),
                ACTIVATED_LATE,
            ),
            # Its constants are rounded to float32.
            "Keras' GELU for ReLU": together(
                activated('"relu": gelu,', '"relu": tf.nn.gelu', "x * (0.5 * (1.0 + {m}.erf(x * 0.7071067690849304)))"),
                in_numpy("-math.sqrt(0.5) * x", "-0.7071067690849304 * x"),
            ),
            "Keras' tanh-GELU for ReLU": together(
                activated(
                    '"relu": gelu_tanh,',
                    '"relu": lambda x: tf.nn.gelu(x, approximate=True)',
                    "0.5 * x * (1.0 + {m}.tanh(0.7978845608028654 * (x + 0.044714998453855515 * x * x * x)))",
                ),
                in_numpy("(x + 0.044715 * x", "(x + 0.044714998453855515 * x"),
            ),
        },
        f"{ENCODER}.feed_forward.output": {"activation after both matrices": ACTIVATED_LATE},
    },
}
CATALOGUE = {part: table(entries) for part, entries in ENTRIES.items()}

STRUCTURE_ENTRIES: dict[str, Table] = {
    "weights": {
        (f"{SELF}.query", "preset/torch"): {
            # With three heads its own inverse.
            "packed projections taken apart by head": but(convert=unpacked_by_head)
        }
    },
    "edge cases": {
        (SOURCE, "full/large_vocabulary"): {
            # TensorFlow refuses what becomes negative.
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
        "output": {"log-probabilities for logits": log_probabilities(outside=True)},
        "logits": {"log-probabilities for logits, in their tap too": log_probabilities(outside=False)},
    },
}
STRUCTURE = {part: table(entries) for part, entries in STRUCTURE_ENTRIES.items()}


# What is planted in one place above: whole models have it in all. Only hypotheses.
EVERYWHERE = [
    Mistake(
        "norm before the sum, in every sub-layer and its tap",
        "",
        everywhere('x + tap("{name}_norm.output", {norm}({y}))', 'tap("{name}_norm.output", {norm}(x + {y}))'),
    ),
    Mistake("every sub-layer's output added to itself", "", everywhere("{norm}({y} + {y})")),
    Mistake("normed twice, in every sub-layer", "", everywhere("{norm}({norm}(x + {y}))")),
    Mistake(  # in the layers, so that it can be limited to some of them
        "no causal mask",
        "",
        {
            "numpy": [
                ("decoder", f"self.self_attention({x}, {x}, self_mask,", f"self.self_attention({x}, {x}, {LAST_ROW},")
                for x in ("x", "normed")
            ]
        },
    ),
    Mistake("all padding masks negated", "", changed("masks", numpy=("return ids != pad_id", "return ids == pad_id"))),
    Mistake(
        "pre-norm that adds the normed input, in every sub-layer",
        "",
        everywhere_in_pre_norm("normed + "),
        case="full/deeper_decoder",
    ),
]
