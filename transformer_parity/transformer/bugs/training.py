"""Catalog of known bugs in the loss and in the gradients.

For each bug, the catalog specifies the first tensor that must differ from the reference. This tensor is the loss, the
gradient norm, the gradient at a tap, the gradient of a parameter, a moment, or a weight. The gradients at taps are in
the order of the backward pass, which starts with the logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformer_parity.transformer.bugs.bug import ALL, Edits, Table, but, changed, instead, table
from transformer_parity.transformer.bugs.layers import ATTENDED
from transformer_parity.transformer.cases.case import STEPS, Case, tiny
from transformer_parity.transformer.cases.standard import gradient_case
from transformer_spec.training_config import TrainingConfig

# The model has one layer per stack and few different sizes because JAX compiles each operation once per shape.
_PAPER = gradient_case("paper_base")
GRADIENTS = replace(
    _PAPER,
    config=tiny(
        d_v=8, d_ff=24, num_encoder_layers=1, num_decoder_layers=1, dropout={"embedding": 0.0, "residual": 0.0}
    ),
    inputs={name: ids[:, :7] for name, ids in _PAPER.inputs.items()},
)
LATE_START = {**GRADIENTS.inputs, "target_ids": GRADIENTS.inputs["target_ids"].copy()}
LATE_START["target_ids"][:, 0] = GRADIENTS.config.pad_id  # as in Marian, where the BOS token is padding


def steps(name: str, kind: str = "uniform", **settings: Any) -> Case:
    """Return a case with two training steps. The second step is in the cool-down phase of the schedule."""
    schedule: dict[str, Any] = {"learning_rate_factor": 0.02, "warmup_steps": 8, "total_steps": 2, "cooldown_steps": 1}
    config = GRADIENTS.config.replace(label_smoothing_kind=kind)
    return replace(GRADIENTS, name=name, stage=STEPS, config=config, settings=TrainingConfig(**schedule, **settings))


CASES = {
    case.name: case
    for case in (
        GRADIENTS,
        replace(GRADIENTS, name="gradients/starts_with_padding", inputs=LATE_START),
        steps("steps"),
        steps("steps/off_target", "off_target"),
        steps("steps/off_target_and_pad", "off_target_and_pad"),
        # This epsilon is as large as the gradients, so its position in the formula affects the results.
        steps("steps/large_epsilon", epsilon=1e-4),
        steps("steps/clipped", clip_norm=0.5),
        steps("steps/loosely_clipped", clip_norm=1000.0),
        replace(
            steps("steps/sliced", accumulation_steps=2),
            inputs={name: ids[[0, 1, 2, 3, 0, 0, 3, 1]] for name, ids in GRADIENTS.inputs.items()},
        ),
    )
}

TABLE = "source_embedding.table"  # the first parameter
LOSS, NORM = "step 1 loss", "step 1 norm of the gradient"
FIRST, SECOND, WEIGHT = (f"step 1 {what} {TABLE}" for what in ("first moment", "second moment", "weight"))


def later(at: str) -> str:
    """Return the name of the same tensor in step 2, for bugs that have no effect in step 1."""
    return at.replace("step 1", "step 2")


Change = tuple[str, str]  # text that occurs exactly once in a module, and the replacement for this text


def in_training(torch: Change | None, jax: Change | None, tf: Change | None, numpy: Change | None = None) -> Edits:
    """Return edits to each backend's ``training`` module. Pass None for backends that can't have the bug."""
    edits = {"numpy": numpy, "torch": torch, "jax": jax, "tf": tf}
    return changed("training", **{port: edit for port, edit in edits.items() if edit})


def also_in_torch(edits: Edits, *changes: Change) -> Edits:
    """Add edits for PyTorch, where a separate line counts the tokens of a batch before the loss is computed."""
    return {**edits, "torch": [*edits["torch"], *(("training", *change) for change in changes)]}


def assumed(**settings: Any) -> Edits:
    """Return edits that make a trainer override its settings with the given values."""
    other = f"type(settings)(**{{**settings.to_dict(), **{settings!r}}})"
    return instead("training", "self.settings = settings\n", f"self.settings = settings = {other}\n")


def by_hand(edits: Edits, *changes: Change, module: str = "backward") -> Edits:
    """Add the equivalent edits for NumPy, whose backward pass is handwritten instead of derived automatically."""
    return {**edits, "numpy": [*edits.get("numpy", []), *((module, old, new) for old, new in changes)]}


def stopped(torch: str, jax: str, tf: str) -> dict[str, str]:
    """Wrap each framework's expression in the framework's stop-gradient operation, such as ``detach`` in PyTorch."""
    return {
        "torch": f"({torch}).detach()",
        "jax": f"__import__('jax').lax.stop_gradient({jax})",
        "tf": f"__import__('tensorflow').stop_gradient({tf})",
    }


def disguised(module: str, old: Mapping[str, str], kept: Mapping[str, str]) -> Edits:
    """Return edits that keep the value of an expression but replace its gradient.

    The value still equals the value of ``old``, and the gradient is the gradient of ``kept``. For NumPy, use
    ``by_hand`` instead.
    """
    hidden = stopped(**{port: f"({old[port]}) - ({kept[port]})" for port in ALL})
    return instead(module, old, **{port: f"({kept[port]}) + {hidden[port]}" for port in ALL})


ROW = {"torch": "F.embedding(ids, self.weight)", "jax": "super().__call__(ids)", "tf": "self.table(ids)"}
TIED = {
    "torch": "self.weight, self.bias",
    "jax": "self.embedding.attend(x)",
    "tf": "self.embedding.table(x, reverse=True)",
}
WEIGHTS = {
    "torch": "weights.masked_fill(~mask, 0.0).to(scores.dtype)",
    "jax": "jnp.where(mask, weights, 0.0).astype(scores.dtype)",
    "tf": "tf.cast(tf.where(mask, weights, tf.zeros([], wide.dtype)), scores.dtype)",
}
NORMED = {"torch": "super().forward(x)", "jax": "super().__call__(x)", "tf": "super().call(x)"}
SCALE_AND_BIAS = {"jax": ("self.scale[...]", "self.bias[...]"), "tf": ("self.gamma", "self.beta")}
# PyTorch's expression multiplies by 0. In PyTorch, a difference of two gradients would leave rounding errors.
FROZEN = {
    "torch": "weight, bias = (p.detach() + 0.0 * p for p in (self.weight, self.bias))\n"
    "            return F.layer_norm(x, x.shape[-1:], weight, bias, self.eps)",
    **{
        port: f"return ({NORMED[port]} - {bias}) / {scale} * {stopped(scale, scale, scale)[port]}"
        f" + {stopped(bias, bias, bias)[port]}"
        for port, (scale, bias) in SCALE_AND_BIAS.items()
    },
}
SUM = {
    "torch": "losses.masked_fill(~counted, 0.0).sum(), counted.sum()",
    "jax": "jnp.where(counted, losses, 0.0).sum(), counted.sum()",
    "tf": "tf.reduce_sum(losses), tf.math.count_nonzero(counted, dtype=tf.int32)",
}


ENTRIES: dict[str, Table] = {
    "gradient": {
        "loss": {
            "summed over the batch": in_training(
                ("loss = total / tokens.clamp(min=1)\n    found", "loss = total\n    found"),
                ("return total / jnp.maximum(tokens, 1)", "return total"),
                ("loss = total / tf.cast(tf.maximum(tokens, 1), total.dtype)", "loss = total"),
                ("scale = 1 / max(int(tokens), 1)  # multiplying", "scale = 1  # multiplying"),
            )
        },
        f"of {TABLE}": {
            "no gradient through the tied output projection": by_hand(
                instead(
                    "embedding",
                    TIED,
                    torch="self.weight.detach(), self.bias",
                    jax="x @ __import__('jax').lax.stop_gradient(self.embedding.embedding[...].T)",
                    tf="tf.matmul(x, tf.stop_gradient(self.embedding.table.embeddings), transpose_b=True)",
                ),
                ("return dx, dkernel.T", "return dx, 0.0 * dkernel.T"),
                module="embedding",
            ),
            "no gradient through the tied embedding": by_hand(
                disguised("embedding", ROW, {port: f"0.0 * {row}" for port, row in ROW.items()}),
                ("self.multiplier * dvectors", "0.0 * dvectors"),
                module="embedding",
            ),
            "embedding not scaled in the backward pass": by_hand(
                disguised("embedding", {port: f"{row} * self.multiplier" for port, row in ROW.items()}, ROW),
                ("self.multiplier * dvectors", "dvectors"),
                module="embedding",
            ),
        },
        "at source_embedding.output": {
            "no gradient through a residual connection": by_hand(
                instead(
                    "encoder",
                    ATTENDED,
                    **{port: ATTENDED.replace("x +", f"{x} +") for port, x in stopped("x", "x", "x").items()},
                ),
                (
                    "return dtotal + sublayer",
                    'return (isinstance(layer, DecoderLayer) or name == "feed_forward") * dtotal + sublayer',
                ),
            )
        },
        "of decoder.layers.0.feed_forward_norm.bias": {
            "norms are frozen": by_hand(
                instead("layers", {port: f"return {normed}" for port, normed in NORMED.items()}, **FROZEN),
                (
                    'tap("scale", dscale)\n        tap("bias", dbias)',
                    'tap("scale", 0.0 * dscale)\n        tap("bias", 0.0 * dbias)',
                ),
                module="layers",
            )
        },
        "at decoder.layers.0.cross_attention.scores": {
            "softmax passes its gradient through unchanged": by_hand(
                disguised("layers", WEIGHTS, dict.fromkeys(ALL, "scores")),
                ("masked_softmax_backward(weights, dweights)", "dweights"),
                module="attention",
            )
        },
    },
    "loss": {
        (LOSS, "steps"): {
            "label smoothing missing": but(config={"label_smoothing": 0.0}),
            "smoothing excludes the target": but(config={"label_smoothing_kind": "off_target"}),
            "softmax twice": by_hand(
                in_training(
                    ("logits.log_softmax(-1", "logits.softmax(-1).log_softmax(-1"),
                    ("wide = logits.astype(", "wide = jax.nn.softmax(logits).astype("),
                    ("log_softmax(wide)", "log_softmax(tf.nn.softmax(wide))"),
                    ("log_softmax(logits)", "log_softmax(np.exp(log_softmax(logits)))"),
                ),
                (
                    "masked_softmax(logits) - target, 0.0)",
                    "masked_softmax_backward(\n"
                    "        masked_softmax(logits), masked_softmax(masked_softmax(logits)) - target), 0.0)",
                ),
                ("log_softmax, masked_softmax\n", "log_softmax, masked_softmax, masked_softmax_backward\n"),
                module="training",
            ),
            "loss includes padding": by_hand(
                also_in_torch(
                    instead("training", "counted = labels != config.pad_id", "counted = labels >= 0"),
                    ("(batch[2] != config.pad_id)", "(batch[2] >= 0)"),
                ),
                ("counted = (labels != config.pad_id)[", "counted = (labels >= 0)["),
                module="training",
            ),
            "average includes padding": in_training(
                ("(batch[2] != config.pad_id)", "(batch[2] >= 0)"),
                (SUM["jax"], SUM["jax"].replace("counted.sum()", "(labels >= 0).sum()")),
                (SUM["tf"], SUM["tf"].replace("nonzero(counted", "nonzero(labels >= 0")),
                ("counted.sum()", "(labels >= 0).sum()"),
            ),
            "averaged per sentence, then over the sentences": by_hand(
                also_in_torch(
                    in_training(
                        (
                            SUM["torch"],
                            "(losses.masked_fill(~counted, 0.0).sum(1) / counted.sum(1)).sum(), counted.sum()",
                        ),
                        (
                            SUM["jax"],
                            "(jnp.where(counted, losses, 0.0).sum(1) / counted.sum(1)).sum(), counted.any(1).sum()",
                        ),
                        (
                            SUM["tf"],
                            "tf.reduce_sum(tf.reduce_sum(losses, 1)"
                            " / tf.math.count_nonzero(counted, 1, dtype=losses.dtype)), tf.shape(labels)[0]",
                        ),
                        (
                            "np.where(counted, losses, 0.0).sum()), np.asarray(counted.sum()",
                            "(np.where(counted, losses, 0.0).sum(1) / counted.sum(1)).sum()),"
                            " np.asarray(counted.any(1).sum()",
                        ),
                    ),
                    ("pad_id).sum()\n", "pad_id).any(1).sum()\n"),
                ),
                (
                    "masked_softmax(logits) - target, 0.0)",
                    "masked_softmax(logits) - target, 0.0) / counted.sum(1, keepdims=True)",
                ),
                module="training",
            ),
            "labels not shifted": changed(
                "training",
                ("), labels, config)", "), target_ids, config)"),
                numpy=("arguments = logits, labels,", "arguments = logits, target_ids,"),
            ),
        },
        (LOSS, "steps/off_target_and_pad"): {
            "smoothing includes the padding class": but(config={"label_smoothing_kind": "off_target"})
        },
        (LOSS, "steps/off_target"): {
            "smoothing includes the target": but(config={"label_smoothing_kind": "uniform"}),
            "smoothing includes the target, but divides by one class less": by_hand(
                instead("training", "spread = spread - right", "pass"),
                ('(share if kind == "uniform" else 0.0)', "share"),
                ("masked_softmax(logits) - target", "masked_softmax(logits) * target.sum(-1, keepdims=True) - target"),
                module="training",
            ),
        },
    },
}
CATALOG = {part: table(entries) for part, entries in ENTRIES.items()}
