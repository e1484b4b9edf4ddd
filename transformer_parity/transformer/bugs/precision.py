"""Bugs that lose precision, and equivalent formulations that the comparison must not report as bugs."""

from __future__ import annotations

import numpy as np

from transformer_parity.engine.findings import IMPRECISE
from transformer_parity.transformer.bugs.attention import LOWEST, WIDENED
from transformer_parity.transformer.bugs.bug import (
    ENCODER,
    SELF,
    SOURCE,
    Bug,
    but,
    changed,
    in_ports_alone,
    instead,
    table,
    together,
)
from transformer_parity.transformer.bugs.layers import ADDED, GELU, norm

PRODUCT = {"torch": "query @ key.mT", "jax": "query @ key.mT", "tf": "tf.matmul(query, key, transpose_b=True)"}
ROOT = "math.sqrt(d_k)"
FREQUENCIES = "[:, None] * frequencies"
FLOAT32_FREQUENCIES = changed(
    "embedding",
    (FREQUENCIES, f'{FREQUENCIES}.astype("float32")'),
    torch=(FREQUENCIES, f"{FREQUENCIES}.float().double()"),
    tf=(FREQUENCIES, "[:, None] * tf.cast(tf.cast(frequencies, tf.float32), tf.float64)"),
)
FAST_VARIANCE = in_ports_alone(norm("(x - mean(x)) / (mean(x**2) - mean(x) ** 2 + self.epsilon) ** 0.5"))
TF32 = {  # function that rounds float32 operands to TensorFloat32, as GPUs do, and returns float64 operands unchanged
    "torch": """def tf32(x):
    import torch

    if x.dtype == torch.float64:
        return x
    return ((x.contiguous().view(torch.int32) + 4096) & -8192).view(torch.float32)
""",
    "jax": """def tf32(x):
    from jax import lax

    return x if x.dtype == "float64" else lax.reduce_precision(x, 8, 10)
""",
    "tf": """def tf32(x):
    return x if x.dtype == "float64" else tf.bitcast((tf.bitcast(x, tf.int32) + 4096) & -8192, tf.float32)
""",
}
START = "def scaled_dot_product_attention("

PRECISION = [
    # In these bugs, the formula is mathematically correct, but the dtype isn't precise enough for it.
    *table(
        {
            f"{SELF}.scores": {
                "scores in TensorFloat32": but(
                    together(
                        instead("attention", START, **{port: f"{text}\n\n{START}" for port, text in TF32.items()}),
                        changed(
                            "attention",
                            **dict.fromkeys(("torch", "jax"), ("query @ key.mT", "tf32(query) @ tf32(key).mT")),
                            tf=(PRODUCT["tf"], "tf.matmul(tf32(query), tf32(key), transpose_b=True)"),
                        ),
                    ),
                    unseen=("float64",),
                )
            },
            ("output", "layer_norm/standard"): {
                "variance as E[x^2] - E[x]^2": but(FAST_VARIANCE, unseen=("full/padded",))
            },
            f"{SELF}.context": {
                "context in bfloat16": changed(
                    "attention", torch=("weights @ value", "(weights.bfloat16() @ value.bfloat16()).to(value.dtype)")
                )
            },
            f"{SELF}_norm.output": {
                "mean in float16": in_ports_alone(
                    norm(
                        "(x - mean(x.astype('float16'))) / (mean((x - mean(x)) ** 2) + self.epsilon) ** 0.5",
                        torch="(x - mean(x.half()).to(x.dtype)) / (mean((x - mean(x)) ** 2) + self.eps).sqrt()",
                        tf="(x - tf.cast(mean(tf.cast(x, 'float16')), x.dtype))"
                        " / (mean((x - mean(x)) ** 2) + self.epsilon) ** 0.5",
                    )
                )
            },
            ("output", "embedding/long_positions"): {
                "long positions from float32 frequencies": FLOAT32_FREQUENCIES,
                "long positions from bfloat16 frequencies": but(
                    changed("embedding", torch=(FREQUENCIES, f"{FREQUENCIES}.bfloat16()")), dtype="bfloat16"
                ),
            },
        },
        dtype="float32",
        verdict=IMPRECISE,
    ),
    # With these bugs, parts of a float64 model are computed in float32. In a float32 model, the bugs have no effect.
    *table(
        {
            SOURCE: {
                "positions from float32 frequencies": FLOAT32_FREQUENCIES,
                "position table in float32": instead(
                    "embedding",
                    ADDED,
                    numpy=ADDED["numpy"].replace(".astype(x", ".astype('float32').astype(x"),
                    torch="encoding.float().to(x)",
                    jax='jnp.asarray(encoding.astype("float32"), x.dtype)',
                    tf="tf.cast(tf.cast(encoding, tf.float32), x.dtype)",
                ),
            },
            f"{SELF}.weights": {
                "softmax in float32": instead(
                    "layers", WIDENED, torch="torch.float32", jax="jnp.float32", tf="tf.float32"
                )
            },
            f"{SELF}.scores": {
                "scale in float32": instead(
                    "attention",
                    f"/ {ROOT}",
                    numpy=f"* float(np.float32(1.0 / {ROOT}))",
                    torch=f"* query.new_tensor(1.0 / {ROOT}).float().item()",
                    tf=f"* tf.cast(1.0 / {ROOT}, query.dtype)",  # TensorFlow converts Python numbers to float32
                )
            },
            f"{ENCODER}.feed_forward_norm.output": {  # the first norm with an input whose variance is about epsilon
                "epsilon in float32": but(config={"layer_norm_epsilon": float(np.float32(1e-6))})
            },
            ("inner", "feed_forward/gelu"): {
                "TensorFlow's built-in GELU": {
                    **changed("functional", numpy=("math.sqrt(0.5)", "float(np.float32(math.sqrt(0.5)))")),
                    **changed("layers", tf=(GELU["tf"], '"gelu": tf.nn.gelu,')),
                }
            },
        },
        unseen=("float32",),
    ),
]

CONTROLS = [
    # The comparison must not report these equivalent formulations as bugs.
    Bug(
        "query scaled instead of the scores",
        "",
        instead(
            "attention",
            {port: f"{product} / {ROOT}" for port, product in PRODUCT.items()},
            torch="(query / math.sqrt(d_k)) @ key.mT",
            jax="(query / math.sqrt(d_k)) @ key.mT",
            tf="tf.matmul(query / math.sqrt(d_k), key, transpose_b=True)",
        ),
    ),
    Bug("variance as E[x^2] - E[x]^2", "", FAST_VARIANCE),
    *(
        Bug(
            f"masked scores set to -{score}",
            "",
            instead("layers", LOWEST, torch=f"-{score}", jax=f"-{score}", tf=f"tf.constant(-{score}, wide.dtype)"),
        )
        for score in ("1e4", "1e9", 'float("inf")')
    ),
    Bug(
        "additive mask",
        "",
        changed(
            "layers",
            torch=(f"scores.masked_fill(~mask, {LOWEST['torch']})", "(scores + (~mask) * -1e9)"),
            jax=(f"jnp.where(mask, wide, {LOWEST['jax']})", "wide + (~mask) * -1e9"),
            tf=(f"tf.where(mask, wide, {LOWEST['tf']})", "wide + tf.cast(~mask, wide.dtype) * -1e9"),
        ),
    ),
]
