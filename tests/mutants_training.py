"""Known mistakes of training, as data: what each changes in a port, and where it must show.

Those in the loss, the gradients and the optimizer show in a comparison with the reference: in the loss, in the norm of
the gradient, at the first tap from the logits backwards, in a parameter's gradient, in a moment or in a weight. Those
of dropout, modes and seeds show in a check of ``test_dropout``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from mutants import ALL, ATTENDED, Edits, Mistake, instead

from reference_numpy.config import TransformerConfig
from reference_numpy.training_config import TrainingConfig
from transformer_parity.cases import STEPS, Case, gradient_case, tiny
from transformer_parity.ports import PORTS, LoadedPort

# One layer on each side, and few different sizes: JAX compiles every operation for every shape.
_PAPER = gradient_case("paper_base")
GRADIENTS = replace(
    _PAPER,
    config=tiny(
        d_v=8, d_ff=24, num_encoder_layers=1, num_decoder_layers=1, dropout={"embedding": 0.0, "residual": 0.0}
    ),
    inputs={name: ids[:, :7] for name, ids in _PAPER.inputs.items()},
)


def steps(name: str, kind: str = "uniform", **settings: Any) -> Case:
    """Return two steps, the second of them in the cool-down."""
    schedule = {"learning_rate_factor": 0.02, "warmup_steps": 8, "total_steps": 2, "cooldown_steps": 1}
    config = GRADIENTS.config.replace(label_smoothing_kind=kind)
    return replace(GRADIENTS, name=name, rung=STEPS, config=config, settings=TrainingConfig(**schedule, **settings))


CASES = {
    case.name: case
    for case in (
        GRADIENTS,
        steps("steps"),
        steps("steps/off_target", "off_target"),
        steps("steps/off_target_and_pad", "off_target_and_pad"),
        steps("steps/large_epsilon", epsilon=1e-4),  # of the size of a gradient's elements, so that its place matters
        steps("steps/clipped", clip_norm=0.5),
        replace(
            steps("steps/sliced", accumulation_steps=2),
            inputs={name: ids[[0, 1, 2, 3, 0, 0, 3, 1]] for name, ids in GRADIENTS.inputs.items()},
        ),
    )
}

ENCODER = "encoder.layers.0"
TABLE = "source_embedding.table"  # the first parameter
LOSS, NORM = "step 1 loss", "step 1 norm of the gradient"
FIRST, SECOND, WEIGHT = (f"step 1 {what} {TABLE}" for what in ("first moment", "second moment", "weight"))


def later(at: str) -> str:
    """Return the same place one step later: what the first step does not show yet."""
    return at.replace("step 1", "step 2")


def in_training(torch: tuple[str, str] | None, jax: tuple[str, str] | None, tf: tuple[str, str] | None) -> Edits:
    """Return an edit of each port's training: what stands there, and what becomes of it; None where it cannot be."""
    return {port: [("training", *edit)] for port, edit in zip(ALL, (torch, jax, tf), strict=True) if edit}


def also_in_torch(edits: Edits, old: str, new: str) -> Edits:
    """Return the edits and one more: torch counts the tokens of a batch before it computes the loss."""
    return {**edits, "torch": [*edits["torch"], ("training", old, new)]}


def assumed(**settings: Any) -> Edits:
    """Return edits after which a trainer goes by other settings than it was given."""
    other = f"type(settings)(**{{**settings.to_dict(), **{settings!r}}})"
    return instead("training", "self.settings = settings\n", f"self.settings = settings = {other}\n")


def rate(new: str) -> Edits:
    """Return edits of the call of the schedule, in which ``n`` is the number of the step."""
    calls = dict.fromkeys(ALL, "settings.learning_rate(n, self.model.config.d_model)")
    number = {"torch": "self.step", "jax": "step", "tf": "step"}
    old, changed = (
        {port: text.replace("(n", f"({number[port]}") for port, text in texts.items()}
        for texts in (calls, dict.fromkeys(ALL, new))
    )
    return instead("training", old, **changed)


# What torch.optim.Adam computes, written out: nobody can make a mistake inside of the original.
WRITTEN_OUT = """with torch.no_grad():
            for p in self.model.parameters():
                g, m, v = p.grad, self.optimizer.state[p]["exp_avg"], self.optimizer.state[p]["exp_avg_sq"]
                m += (1.0 - settings.beta1) * (g - m)
                v += (1.0 - settings.beta2) * (g * g - v)
                m_hat = m / (1.0 - settings.beta1**self.step)
                v_hat = v / (1.0 - settings.beta2**self.step)
                p -= group["lr"] * m_hat / (v_hat.sqrt() + settings.epsilon)"""


def adam(torch: tuple[str, str], jax: tuple[str, str], tf: tuple[str, str]) -> Edits:
    """Return edits of Adam's formulas."""
    if WRITTEN_OUT.count(torch[0]) != 1:
        raise ValueError(f"Adam must hold {torch[0]!r} once")
    return in_training(("self.optimizer.step()", WRITTEN_OUT.replace(*torch)), jax, tf)


def stopped(torch: str, jax: str, tf: str) -> dict[str, str]:
    """Return how each framework says that no gradient goes through an expression."""
    return {
        "torch": f"({torch}).detach()",
        "jax": f"__import__('jax').lax.stop_gradient({jax})",
        "tf": f"__import__('tensorflow').stop_gradient({tf})",
    }


def disguised(module: str, old: Mapping[str, str], kept: Mapping[str, str]) -> Edits:
    """Return edits that leave a value as it is, but give it the gradient of another."""
    hidden = stopped(**{port: f"({old[port]}) - ({kept[port]})" for port in ALL})
    return instead(module, old, **{port: f"({kept[port]}) + {hidden[port]}" for port in ALL})


ROW = {"torch": "F.embedding(ids, self.table)", "jax": "self.table[ids]", "tf": "tf.gather(self.table, ids)"}
TIED = {
    "torch": "self.output_proj(x, self.target_embedding.table)",
    "jax": "self.output_proj(x, self.target_embedding.table[...])",
    "tf": "self.output_proj(x, table=tf.convert_to_tensor(self.target_embedding.table))",
}
WEIGHTS = {
    "torch": "weights.masked_fill(~mask, 0.0).to(scores.dtype)",
    "jax": "jnp.where(mask, weights, 0.0).astype(scores.dtype)",
    "tf": "tf.cast(tf.where(mask, weights, tf.zeros([], wide.dtype)), scores.dtype)",
}
NORMED = {"torch": "super().forward(x)", "jax": "super().__call__(x)", "tf": "super().call(x)"}
SCALE_AND_BIAS = {
    "torch": ("self.weight", "self.bias"),
    "jax": ("self.scale[...]", "self.bias[...]"),
    "tf": ("self.gamma", "self.beta"),
}
FROZEN = {
    port: f"return ({NORMED[port]} - {bias}) / {scale} * {stopped(scale, scale, scale)[port]}"
    f" + {stopped(bias, bias, bias)[port]}"
    for port, (scale, bias) in SCALE_AND_BIAS.items()
}
SUM = {
    "torch": "losses.masked_fill(~counted, 0.0).sum(), counted.sum()",
    "jax": "jnp.where(counted, losses, 0.0).sum(), counted.sum()",
    "tf": "tf.reduce_sum(tf.where(counted, losses, 0.0)), tf.math.count_nonzero(counted, dtype=tf.int32)",
}
CLIP = {
    "torch": "torch._foreach_mul_(gradient, settings.clip_norm / norm.clamp(min=settings.clip_norm))",
    "jax": "settings.clip_norm / jnp.maximum(norm, settings.clip_norm)",
    "tf": "self.settings.clip_norm / tf.maximum(norm, self.settings.clip_norm)",
}
CLIPPED = {"jax": "scale * g, numbers)", "tf": "[g * scale for g in gradient]"}

CATALOGUE = {
    "gradient": [
        Mistake(
            "summed over the batch",
            "loss",
            in_training(
                ("loss = total / tokens.clamp(min=1)\n    named", "loss = total\n    named"),
                ("return total / jnp.maximum(tokens, 1)", "return total"),
                ("loss = total / tf.cast(tf.maximum(tokens, 1), total.dtype)", "loss = total"),
            ),
        ),
        Mistake(
            "no gradient through the tied output projection",
            f"of {TABLE}",
            instead(
                "transformer",
                TIED,
                **{
                    port: TIED[port].replace(table, stopped(table, table, table)[port])
                    for port, table in {
                        "torch": "self.target_embedding.table",
                        "jax": "self.target_embedding.table[...]",
                        "tf": "tf.convert_to_tensor(self.target_embedding.table)",
                    }.items()
                },
            ),
        ),
        Mistake(
            "no gradient through the tied embedding",
            f"of {TABLE}",
            disguised("embedding", ROW, {port: f"0.0 * {row}" for port, row in ROW.items()}),
        ),
        Mistake(
            "embedding not scaled in the backward pass",
            f"of {TABLE}",
            disguised("embedding", {port: f"{row} * self.multiplier" for port, row in ROW.items()}, ROW),
        ),
        Mistake(
            "no gradient through a residual connection",
            "at source_embedding.output",
            instead(
                "encoder",
                ATTENDED,
                **{port: ATTENDED.replace("x +", f"{x} +") for port, x in stopped("x", "x", "x").items()},
            ),
        ),
        Mistake(
            "norms are frozen",
            "of decoder.layers.0.feed_forward_norm.bias",
            instead("layers", {port: f"return {normed}" for port, normed in NORMED.items()}, **FROZEN),
        ),
        Mistake(
            "softmax hands its gradient straight through",
            "at decoder.layers.0.cross_attention.scores",
            disguised("layers", WEIGHTS, dict.fromkeys(ALL, "scores")),
        ),
    ],
    "loss": [
        Mistake("label smoothing missing", LOSS, config={"label_smoothing": 0.0}, case="steps"),
        Mistake("smoothing off the target", LOSS, config={"label_smoothing_kind": "off_target"}, case="steps"),
        Mistake(
            "smoothing on padding too",
            LOSS,
            config={"label_smoothing_kind": "off_target"},
            case="steps/off_target_and_pad",
        ),
        Mistake(
            "smoothing on the target too", LOSS, config={"label_smoothing_kind": "uniform"}, case="steps/off_target"
        ),
        Mistake(
            "smoothing on the target, over one class less",
            LOSS,
            instead("training", "spread = spread - right", "pass"),
            case="steps/off_target",
        ),
        Mistake(
            "softmax twice",
            LOSS,
            in_training(
                ("logits.log_softmax(-1", "logits.softmax(-1).log_softmax(-1"),
                ("log_softmax(wide)", "log_softmax(jax.nn.softmax(wide))"),
                ("log_softmax(wide)", "log_softmax(tf.nn.softmax(wide))"),
            ),
            case="steps",
        ),
        Mistake(
            "padding counts",
            LOSS,
            also_in_torch(
                instead("training", "counted = labels != config.pad_id", "counted = labels >= 0"),
                "(batch[2] != self.model.config.pad_id)",
                "(batch[2] >= 0)",
            ),
            case="steps",
        ),
        Mistake(
            "averaged over padding too",
            LOSS,
            in_training(
                ("(batch[2] != self.model.config.pad_id)", "(batch[2] >= 0)"),
                (SUM["jax"], SUM["jax"].replace("counted.sum()", "(labels >= 0).sum()")),
                (SUM["tf"], SUM["tf"].replace("nonzero(counted", "nonzero(labels >= 0")),
            ),
            case="steps",
        ),
        Mistake(
            "averaged by sentence",
            LOSS,
            also_in_torch(
                in_training(
                    (SUM["torch"], "(losses.masked_fill(~counted, 0.0).sum(1) / counted.sum(1)).sum(), counted.sum()"),
                    (
                        SUM["jax"],
                        "(jnp.where(counted, losses, 0.0).sum(1) / counted.sum(1)).sum(), counted.any(1).sum()",
                    ),
                    (
                        SUM["tf"],
                        "tf.reduce_sum(tf.reduce_sum(tf.where(counted, losses, 0.0), 1)"
                        " / tf.math.count_nonzero(counted, 1, dtype=losses.dtype)), tf.shape(labels)[0]",
                    ),
                ),
                "pad_id).sum()\n",
                "pad_id).any(1).sum()\n",
            ),
            case="steps",
        ),
        Mistake(
            "labels are what the decoder reads",
            LOSS,
            in_training(
                ("tap), labels, model.config)", "tap), target_ids, model.config)"),
                ("tap), labels, model.config)", "tap), target_ids, model.config)"),
                ("cross_entropy(logits, labels,", "cross_entropy(logits, target_ids,"),
            ),
            case="steps",
        ),
    ],
    "accumulation": [
        Mistake(
            "mean of the slices' means",
            LOSS,
            in_training(
                (
                    "total, _ = self._loss(self.model, part)",
                    "total, tokens = self._loss(self.model, part)\n"
                    "        tokens = tokens * self.settings.accumulation_steps",
                ),
                (
                    "return jax.tree.map(jnp.add, sums, (total, tokens, gradient)), None",
                    "mean, of_mean = jax.tree.map(lambda x: x / tokens / slices, (total, gradient))\n"
                    "            return jax.tree.map(jnp.add, sums, (mean, 0, of_mean)), None",
                ),
                (
                    "return (loss, tokens), _differentiate(tape, loss,",
                    "count = tf.cast(tokens * self.settings.accumulation_steps, loss.dtype)\n"
                    "        return (loss / count, tf.constant(0)), _differentiate(tape, loss / count,",
                ),
            ),
            case="steps/sliced",
        ),
        Mistake(
            "only the last slice counts",
            NORM,
            in_training(
                ("        loss.backward()", "        self.optimizer.zero_grad()\n        loss.backward()"),
                (
                    "jnp.add, sums, (total, tokens, gradient))",
                    "jnp.add, (*sums[:2], zeros), (total, tokens, gradient))",
                ),
                (
                    "tf.nest.map_structure(tf.add, sums, self._backward(*part))",
                    "tf.nest.map_structure(tf.add, (sums[0], zeros), self._backward(*part))",
                ),
            ),
            case="steps/sliced",
        ),
        Mistake(
            "gradients of the step before are still there",
            later(NORM),
            in_training(
                ("        self.optimizer.zero_grad()\n", ""),
                None,
                None,  # where gradients are values, nothing is left over
            ),
            case="steps",
        ),
    ],
    "clipping": [
        Mistake("no clipping", FIRST, assumed(clip_norm=None), case="steps/clipped"),
        Mistake(
            "clipped by value",
            FIRST,
            in_training(
                (CLIP["torch"], "torch.nn.utils.clip_grad_value_(self.model.parameters(), settings.clip_norm)"),
                (
                    CLIPPED["jax"],
                    "jnp.clip(g / jnp.maximum(tokens, 1), -settings.clip_norm, settings.clip_norm), numbers)",
                ),
                (
                    CLIPPED["tf"],
                    "[tf.clip_by_value(g / count, -self.settings.clip_norm, self.settings.clip_norm)"
                    " for g in gradient]",
                ),
            ),
            case="steps/clipped",
        ),
        Mistake(
            "every tensor clipped for itself",
            FIRST,
            in_training(
                (
                    CLIP["torch"],
                    "[g.mul_(settings.clip_norm / g.norm().clamp(min=settings.clip_norm)) for g in gradient]",
                ),
                (CLIPPED["jax"], "g / jnp.maximum(tokens, jnp.linalg.norm(g) / settings.clip_norm), numbers)"),
                (CLIPPED["tf"], "[tf.clip_by_norm(g / count, self.settings.clip_norm) for g in gradient]"),
            ),
            case="steps/clipped",
        ),
        Mistake(
            "clipped by the norm of the sum",
            FIRST,
            in_training(
                (CLIP["torch"], CLIP["torch"].replace("norm.clamp", "(norm * tokens).clamp")),
                (CLIP["jax"], CLIP["jax"].replace("(norm", "(norm * tokens")),
                (CLIP["tf"], CLIP["tf"].replace("(norm", "(norm * count")),
            ),
            case="steps/clipped",
        ),
        Mistake(
            "1e-6 added to the norm, as torch does",
            FIRST,
            in_training(
                (CLIP["torch"], "torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip_norm)"),
                (CLIP["jax"], CLIP["jax"].replace("(norm", "(norm + 1e-6")),
                (CLIP["tf"], CLIP["tf"].replace("(norm", "(norm + 1e-6")),
            ),
            case="steps/clipped",
        ),
    ],
    "schedule": [
        Mistake(
            "rate of the next step",
            WEIGHT,
            rate("settings.learning_rate(n + 1, self.model.config.d_model)"),
            case="steps",
        ),
        Mistake(
            "rate of the step before",
            later(WEIGHT),  # the first step has none before it
            rate("settings.learning_rate(max(n - 1, 1), self.model.config.d_model)"),
            case="steps",
        ),
        Mistake(
            "warm-up to the power of -1",
            WEIGHT,
            rate("settings.learning_rate(n, self.model.config.d_model) * settings.warmup_steps**0.5"),
            case="steps",
        ),
        Mistake("not divided by sqrt(d_model)", WEIGHT, rate("settings.learning_rate(n, 1)"), case="steps"),
        Mistake("factor forgotten", WEIGHT, assumed(learning_rate_factor=1.0), case="steps"),
        Mistake("cool-down forgotten", later(WEIGHT), assumed(cooldown_steps=0), case="steps"),
        Mistake(
            "learning rate applied twice",
            WEIGHT,
            adam(
                ('p -= group["lr"]', 'p -= group["lr"] ** 2'),
                ('numbers["learning_rate"] *', 'numbers["learning_rate"] ** 2 *'),
                ("assign_sub(learning_rate *", "assign_sub(learning_rate**2 *"),
            ),
            case="steps",
        ),
    ],
    "Adam": [
        Mistake("beta2 0.999", SECOND, assumed(beta2=0.999), case="steps"),
        Mistake("betas swapped", FIRST, assumed(beta1=0.98, beta2=0.9), case="steps"),
        Mistake("epsilon 1e-8", WEIGHT, assumed(epsilon=1e-8), case="steps"),
        Mistake(
            "epsilon inside the root",
            WEIGHT,
            adam(
                ("(v_hat.sqrt() + settings.epsilon)", "(v_hat + settings.epsilon).sqrt()"),
                ("(jnp.sqrt(v_hat) + settings.epsilon)", "jnp.sqrt(v_hat + settings.epsilon)"),
                ("(tf.sqrt(v / correction2) + settings.epsilon)", "tf.sqrt(v / correction2 + settings.epsilon)"),
            ),
            case="steps",
        ),
        Mistake(
            "epsilon added before the correction, as Keras does",
            WEIGHT,
            adam(
                ("+ settings.epsilon", "+ settings.epsilon / (1.0 - settings.beta2**self.step) ** 0.5"),
                ("+ settings.epsilon", '+ settings.epsilon / numbers["second_correction"] ** 0.5'),
                ("+ settings.epsilon", "+ settings.epsilon / correction2**0.5"),
            ),
            case="steps/large_epsilon",
        ),
        Mistake(
            "first moment not corrected",
            WEIGHT,
            adam(
                ("m / (1.0 - settings.beta1**self.step)", "m"),
                ('m / numbers["first_correction"]', "m"),
                ("(m / correction1)", "m"),
            ),
            case="steps",
        ),
        Mistake(
            "second moment not corrected",
            WEIGHT,
            adam(
                ("v / (1.0 - settings.beta2**self.step)", "v"),
                ('v / numbers["second_correction"]', "v"),
                ("v / correction2", "v"),
            ),
            case="steps",
        ),
        Mistake(
            "second moment of g instead of its square",
            SECOND,
            adam(("(g * g - v)", "(abs(g) - v)"), ("(g * g - v)", "(abs(g) - v)"), ("(g * g -", "(abs(g) -")),
            case="steps",
        ),
        Mistake(
            "second moment never falls, as in AMSGrad",
            later(SECOND),
            adam(
                ("(g * g - v)", "(g * g - v).clamp(min=0.0)"),
                ("(g * g - v)", "jnp.maximum(g * g - v, 0.0)"),
                ("(g * g - self.second_moment[name])", "tf.maximum(g * g - self.second_moment[name], 0.0)"),
            ),
            case="steps",
        ),
        Mistake(
            "weight decay left on",
            FIRST,
            in_training(
                ("fused=True", "fused=True, weight_decay=0.01"),
                ("scale * g, numbers)", "scale * g + 0.01 * parameters[name], numbers)"),
                ("gradient, strict=True):\n", "gradient, strict=True):\n            g = g + 0.01 * parameter\n"),
            ),
            case="steps",
        ),
    ],
}

CONTROLS = [
    # Other ways to write the same: no alarm.
    Mistake(
        "Adam written out", "", in_training(("self.optimizer.step()", WRITTEN_OUT), None, None), case="steps/clipped"
    ),
    Mistake("all slices at once", "", assumed(accumulation_steps=1), case="steps/sliced"),
    Mistake(
        "scores less their largest, which has no gradient",
        "",
        instead(
            "layers",
            {"torch": "scores.masked_fill(~mask", "jax": "jnp.where(mask, wide,", "tf": "tf.where(mask, wide,"},
            torch="(scores - scores.amax(-1, keepdim=True).detach()).masked_fill(~mask",
            jax="jnp.where(mask, wide - jax.lax.stop_gradient(wide.max(-1, keepdims=True)),",
            tf="tf.where(mask, wide - tf.stop_gradient(tf.reduce_max(wide, -1, keepdims=True)),",
        ),
    ),
]


@dataclass(frozen=True)
class Misbehaviour:
    """A mistake that no comparison of numbers can show, since dropout is drawn differently in every framework."""

    name: str
    check: tuple[str, ...]  # of test_dropout, and its arguments
    complaint: str  # what it must say
    edits: Edits


SITE, MASKS, INFERENCE, SEED = ("check_sites", "post"), ("check_masks",), ("check_inference",), ("check_seed",)
KEPT_ONE = "* 0.0 + 1.0"
SOURCE_DROPOUT = 'self.dropout(tap("source_embedding.output", x)'
UNSCALED = {
    "torch": ("nn.Dropout", "forward(self, x)", "forward(x)", "1.0 - self.p if self.training else 1.0"),
    "jax": ("nnx.Dropout", "__call__(self, x)", "__call__(x)", "1.0 if self.deterministic else 1.0 - self.rate"),
    "tf": (
        "keras.layers.Dropout",
        "call(self, x, training=False)",
        "call(x, training)",
        "1.0 - self.rate if training else 1.0",
    ),
}
ROUNDED = 'x.astype("bfloat16").astype(x.dtype)'

MISBEHAVIOUR = [
    Misbehaviour(
        "embedding dropout missing",
        (*SITE, "embedding"),
        f"{ENCODER}.self_attention.query is",
        {
            "torch": [("transformer", f"{SOURCE_DROPOUT})", 'tap("source_embedding.output", x)')],
            "jax": [("transformer", f"{SOURCE_DROPOUT})", 'tap("source_embedding.output", x)')],
            "tf": [("transformer", f"{SOURCE_DROPOUT}, training=training)", 'tap("source_embedding.output", x)')],
        },
    ),
    Misbehaviour(
        "residual dropout missing",
        (*SITE, "residual"),
        f"{ENCODER}.self_attention_norm.output is",
        instead("encoder", ATTENDED, ATTENDED.replace("self.dropout(attended)", "attended")),
    ),
    Misbehaviour(
        "residual dropout behind the norm",
        (*SITE, "residual"),
        f"{ENCODER}.self_attention_norm.output is",
        instead("encoder", ATTENDED, "self.dropout(self.self_attention_norm(x + attended))"),
    ),
    Misbehaviour(
        "feed-forward dropout missing",
        (*SITE, "feed_forward"),
        f"{ENCODER}.feed_forward.output is",
        instead("feed_forward", "self.dropout(inner)", "inner"),
    ),
    Misbehaviour(
        "feed-forward dropout at another rate",
        (*SITE, "feed_forward"),
        f"{ENCODER}.feed_forward.output is",
        instead("feed_forward", "config.dropout.feed_forward", "config.dropout.residual"),
    ),
    Misbehaviour(
        "attention dropout missing",
        (*SITE, "attention"),
        f"{ENCODER}.self_attention.context is",
        instead("attention", "weights = dropout(weights)", "pass"),
    ),
    Misbehaviour(
        "fused attention without dropout",
        (*SITE, "attention"),
        "loss without taps is",
        {"torch": [("attention", "dropout.p if dropout is not None and dropout.training else 0.0", "0.0")]},
    ),
    Misbehaviour(
        "dropout not scaled",
        MASKS,
        "source_embedding.output: not scaled",
        instead(
            "layers",
            {port: f"Dropout = {base}\n" for port, (base, *_) in UNSCALED.items()},
            **{
                port: f"class Dropout({base}):\n    def {head}:\n        return super().{call} * ({factor})\n"
                for port, (base, head, call, factor) in UNSCALED.items()
            },
        ),
    ),
    Misbehaviour(
        "one mask for all heads",
        MASKS,
        f"heads of {ENCODER}.self_attention.weights",
        instead("attention", "dropout(weights)", f"weights * dropout(weights[:, :1] {KEPT_ONE})"),
    ),
    Misbehaviour(
        "one mask for all sentences",
        MASKS,
        f"sentences of {ENCODER}.self_attention.weights",
        instead("attention", "dropout(weights)", f"weights * dropout(weights[:1] {KEPT_ONE})"),
    ),
    Misbehaviour(
        "one mask for all positions",
        MASKS,
        f"positions of {ENCODER}.feed_forward.inner",
        instead("feed_forward", "self.dropout(inner)", f"inner * self.dropout(inner[:, :1] {KEPT_ONE})"),
    ),
    Misbehaviour(
        "one mask for all layers",
        MASKS,
        f"{ENCODER}.self_attention.weights and encoder.layers.1.self_attention.weights",
        in_training(
            None,  # has one generator for all, which goes on by itself
            ("module.rngs = stream", 'module.rngs = nnx.RngStream(key, tag="dropout")'),
            ("tf.unstack(random_bits)", "[random_bits[0]] * len(self._dropout)"),
        ),
    ),
    Misbehaviour(
        "gradients with dropout",
        INFERENCE,
        "loss of gradients before a step is",
        in_training(
            ("_loss(model.eval(), batch, seen)", "_loss(model.train(), batch, seen)"),
            (
                "return total / jnp.maximum(tokens, 1)",
                "model = structure.build(parameters)\n"
                "        for _, module in nnx.iter_modules(model):\n"
                "            if isinstance(module, nnx.Dropout):\n"
                '                module.rngs = nnx.RngStream(jax.random.key(0), tag="dropout")\n'
                "        model.train()\n"
                "        total, tokens = _loss(model, batch, lambda name, value: value + zeros[name])\n"
                "        return total / jnp.maximum(tokens, 1)",
            ),
            ("tap=seen)", "tap=seen, training=True)"),
        ),
    ),
    Misbehaviour(
        "evaluation with dropout",
        INFERENCE,
        "evaluation before a step is",
        in_training(
            ("_logits(self.model.eval(),", "_logits(self.model.train(),"),
            (
                "model.config = model.config.replace(label_smoothing=0.0)",
                "model.config = model.config.replace(label_smoothing=0.0)\n"
                "        for _, module in nnx.iter_modules(model):\n"
                "            if isinstance(module, nnx.Dropout):\n"
                '                module.rngs = nnx.RngStream(jax.random.key(0), tag="dropout")\n'
                "        model.train()",
            ),
            ("self.model(source_ids, target_ids)", "self.model(source_ids, target_ids, training=True)"),
        ),
    ),
    Misbehaviour(
        "evaluation with label smoothing",
        INFERENCE,
        "evaluation before a step is",
        instead("training", ".replace(label_smoothing=0.0)", ""),
    ),
    Misbehaviour(
        "still in training mode after a step",
        INFERENCE,
        "the model after a step is",
        in_training(
            ("        model.eval()\n        generator", "        generator"),
            ("        self.step = step\n", "        self.step = step\n        self.model.train()\n"),
            None,  # Keras has no mode: training is an argument of the call
        ),
    ),
    Misbehaviour(
        "seed ignored",
        SEED,
        "the seed is ignored",
        in_training(
            ("(self.model, self.seed, self.step)", "(self.model, 0, self.step)"),
            ("[self.seed, self.step]", "[0, self.step]"),
            ("[self.seed, self.step]", "[0, self.step]"),
        ),
    ),
    Misbehaviour(
        "the same dropout at every step",
        SEED,
        "the same dropout at every step",
        in_training(
            ("(self.model, self.seed, self.step)", "(self.model, self.seed, 0)"),
            ("[self.seed, self.step]", "[self.seed, 0]"),
            ("[self.seed, self.step]", "[self.seed, 0]"),
        ),
    ),
    Misbehaviour(
        "dropout that goes on where it was",
        SEED,
        "not reproducible",
        {
            "torch": [
                ("training", "generator.manual_seed(int(np", "(int(np"),
                ("training", "generator.set_state(state)", "pass"),
            ],
            "jax": [("training", "[self.seed, self.step]", "np.random.randint(1 << 30)")],
            "tf": [("training", "[self.seed, self.step]", "np.random.randint(1 << 30)")],
        },
    ),
    Misbehaviour(
        "the same dropout in every slice",
        ("check_slices",),
        "both slices have the same dropout",
        in_training(
            (
                "[self._backward(part, tokens) for part",
                "[torch.manual_seed(0) and self._backward(x, tokens) for x",
            ),
            ("jax.random.fold_in(key, number)", "jax.random.fold_in(key, 0)"),
            ("tf.unstack(random_bits)", "tf.unstack(random_bits * 0)"),
        ),
    ),
    Misbehaviour(
        "NumPy's own generator seeded",
        ("check_callers_numbers",),
        "the caller's random numbers are not what they were",
        instead(
            "training",
            "        check_accumulation(settings",
            "        np.random.seed(1)\n        check_accumulation(settings",
        ),
    ),
    Misbehaviour(
        "torch's own generator left where it is",
        ("check_callers_numbers",),
        "the caller's random numbers are not what they were",
        in_training(("        generator.set_state(state)", "        pass"), None, None),
    ),
    Misbehaviour(
        "weights in bfloat16",
        ("check_mixed_precision",),
        "weight: 100% of the values fit in bfloat16",
        in_training(
            (
                "        self.optimizer.step()\n",
                "        self.optimizer.step()\n"
                "        for p in self.model.parameters():\n"
                "            p.data = p.data.bfloat16().to(p.dtype)\n",
            ),
            ("name: new[i] for", f"name: (lambda x: {ROUNDED})(new[i]) for"),
            (
                "(tf.sqrt(v / correction2) + settings.epsilon))",
                "(tf.sqrt(v / correction2) + settings.epsilon))\n"
                "            parameter.assign(tf.cast(tf.cast(parameter, tf.bfloat16), parameter.dtype))",
            ),
        ),
    ),
]


@dataclass(frozen=True)
class Retrained:
    """A port whose model is ours, and whose training has a mistake in it."""

    name: str
    package: Any
    config: Mapping[str, Any]  # what it assumes instead

    def load(
        self, config: TransformerConfig, weights: Mapping[str, Any], dtype: str, device: str, precision: str
    ) -> LoadedPort:
        model = self.package.Transformer.from_weights(config.replace(**self.config), weights, dtype, device, precision)
        return PORTS[self.name].loaded(self.package, model, dtype)

    def import_package(self) -> Any:
        return self.package


@contextmanager
def retrained(mistake: Mistake, backend: str) -> Iterator[Retrained]:
    """Yield a port with a mistake in a copy of its training, or in its config; the model is not loaded once more."""
    package = PORTS[backend].import_package()
    original = importlib.import_module(f"{package.__name__}.training")
    text = Path(original.__file__).read_text("utf-8")
    for module, old, new in mistake.edits[backend]:
        if module != "training" or (found := text.count(old)) != 1:
            raise ValueError(f"{package.__name__}.{module} must hold {old!r} once: found {found} times")
        text = text.replace(old, new)
    mistaken = ModuleType("mistaken_training")
    sys.modules[mistaken.__name__] = mistaken  # where dataclasses look for their module
    try:
        exec(compile(text, original.__file__, "exec"), vars(mistaken))
        names = {name: getattr(mistaken, name) for name in ("Trainer", "cross_entropy", "gradients")}
        yield Retrained(backend, SimpleNamespace(**{**vars(package), **names}), mistake.config)
    finally:
        del sys.modules[mistaken.__name__]
