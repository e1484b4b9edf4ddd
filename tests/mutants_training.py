"""Known mistakes of training, as data: what each changes in a port, and where it must show.

Those of loss, gradients and optimizer show in a comparison with the hand-written backward pass: a gradient's in the
loss, or at the first tap from the logits backwards, or in a parameter; a step's in its loss, in the norm of its
gradient, in a moment or in a weight. Those of dropout, modes and seeds show in a check of ``test_dropout``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mutants import ATTENDED, LOGITS, LOWEST, Edits, Mistake, instead, together

from reference_numpy.config import DropoutRates
from reference_numpy.training_config import TrainingConfig
from transformer_parity.cases import GRADIENTS, STEPS, Case, gradient_case, tiny

# One layer on each side and few different sizes: without its compiler, JAX prepares every operation for every shape.
SMALL = gradient_case("paper_base")
SMALL = replace(
    SMALL,
    config=tiny(d_v=8, d_ff=24, num_encoder_layers=1, num_decoder_layers=1).replace(dropout=DropoutRates()),
    inputs={name: ids[:, :7] for name, ids in SMALL.inputs.items()},
)


def smoothed(kind: str) -> Case:
    """Return the gradients of a model with one of the three families of label smoothing."""
    return replace(SMALL, name=f"gradients/{kind}", config=SMALL.config.replace(label_smoothing_kind=kind))


def steps(name: str, **settings: object) -> Case:
    """Return two steps, the second of them in the cool-down."""
    schedule = {"learning_rate_factor": 0.02, "warmup_steps": 8, "total_steps": 2, "cooldown_steps": 1}
    settings = TrainingConfig(**{**schedule, "epsilon": 1e-6, **settings})
    return replace(SMALL, name=name, rung=STEPS, settings=settings)


LOSS, PLAIN, SLICED = "gradients/uniform", "steps/plain", "steps/sliced"
CASES = {
    case.name: case
    for case in (
        smoothed("uniform"),
        smoothed("off_target"),
        smoothed("off_target_and_pad"),
        steps(PLAIN, clip_norm=0.5),
        steps(SLICED, accumulation_steps=2),
    )
}
assert {case.rung for case in CASES.values()} == {GRADIENTS, STEPS}

ENCODER, DECODER = "encoder.layers.0", "decoder.layers.0"
TABLE = "source_embedding.table"
RATE, FIRST, SECOND, WEIGHT = (f"step 1 {what} {TABLE}" for what in ("weight", "first moment", "second moment", "weight"))
LOSSES = "-(1.0 - smoothing) * right - (smoothing / classes * spread if smoothing else 0.0)"


def stopped(x: dict[str, str]) -> dict[str, str]:
    """Return how each framework says that no gradient goes through ``x``."""
    return {
        "torch": f"{x['torch']}.detach()",
        "jax": f"__import__('jax').lax.stop_gradient({x['jax']})",
        "tf": f"tf.stop_gradient({x['tf']})",
    }


def everywhere(x: str) -> dict[str, str]:
    """Return the same expression for every framework."""
    return dict.fromkeys(LOGITS_TABLE, x)


def assumed(**settings: object) -> Edits:
    """Return edits after which a trainer goes by other settings than it was given."""
    line = "        self.settings = settings\n"
    other = f"type(settings)(**{{**settings.to_dict(), **{settings!r}}})"
    return instead("training", line, line.replace("= settings", f"= settings = {other}"))


def rate(new: str) -> Edits:
    """Return edits of the learning rate; ``{step}`` is the number of the step."""
    call = "settings.learning_rate({step}, self.model.config.d_model)"
    step = {"torch": "self.step", "jax": "step", "tf": "step"}
    return instead(
        "training",
        {port: call.format(step=name) for port, name in step.items()},
        **{port: new.format(step=name) for port, name in step.items()},
    )


# Adam as torch's own computes it, written out: a mistake in it cannot be planted in torch.
WRITTEN_OUT = """with torch.no_grad():
            for p in self.model.parameters():
                g, kept = p.grad, self.optimizer.state[p]
                m, v, learning_rate = kept["exp_avg"], kept["exp_avg_sq"], self.optimizer.param_groups[0]["lr"]
                correction1, correction2 = 1.0 - settings.beta1**self.step, 1.0 - settings.beta2**self.step
                m.copy_(m + (1.0 - settings.beta1) * (g - m))
                v.copy_(v + (1.0 - settings.beta2) * (g * g - v))
                p.sub_(learning_rate * (m / correction1) / ((v / correction2).sqrt() + settings.epsilon))"""


def adam(torch: tuple[str, str], jax: tuple[str, str], tf: tuple[str, str]) -> Edits:
    """Return edits of one part of Adam."""
    if torch[0] not in WRITTEN_OUT:
        raise ValueError(f"Adam must hold {torch[0]!r}")
    written_out = WRITTEN_OUT.replace(*torch)
    return {
        "torch": [("training", "self.optimizer.step()", written_out)],
        "jax": [("training", *jax)],
        "tf": [("training", *tf)],
    }


def lines(torch: tuple[str, str], jax: tuple[str, str], tf: tuple[str, str]) -> Edits:
    """Return one edit of the trainer in each port."""
    return {"torch": [("training", *torch)], "jax": [("training", *jax)], "tf": [("training", *tf)]}


LOGITS_TABLE = {
    "torch": "self.output_proj(x, self.target_embedding.table)",
    "jax": "self.output_proj(x, self.target_embedding.table[...])",
    "tf": "table=tf.convert_to_tensor(self.target_embedding.table)",
}
LOOKED_UP = {"torch": "F.embedding(ids, self.table)", "jax": "self.table[ids]", "tf": "tf.gather(self.table, ids)"}
MULTIPLIED = {port: f"{looked_up} * self.multiplier" for port, looked_up in LOOKED_UP.items()}
NORMED = {"torch": "super().forward(x)", "jax": "super().__call__(x)", "tf": "super().call(x)"}
WEIGHTS = {
    "torch": "weights.masked_fill(~mask, 0.0).to(scores.dtype)",
    "jax": "jnp.where(mask, weights, 0.0).astype(scores.dtype)",
    "tf": "tf.cast(tf.where(mask, weights, tf.zeros([], wide.dtype)), scores.dtype)",
}
MASKED = {
    "torch": f"scores.masked_fill(~mask, {LOWEST['torch']}).softmax(-1, dtype)",
    "jax": f"jax.nn.softmax(jnp.where(mask, wide, {LOWEST['jax']}))",
    "tf": f"tf.nn.softmax(tf.where(mask, wide, {LOWEST['tf']}))",
}
SUMMED = {
    "torch": "return losses.masked_fill(~counted, 0.0).sum(), counted.sum()",
    "jax": "return jnp.where(counted, losses, 0.0).sum(), counted.sum()",
    "tf": "return tf.reduce_sum(tf.where(counted, losses, 0.0)), tf.math.count_nonzero(counted, dtype=tf.int32)",
}
ADDED_UP = {
    "torch": "total, _ = self._loss(self.model, *part)",
    "jax": "return jax.tree.map(jnp.add, sums, (value, gradient)), None",
    "tf": "return (loss, tokens), _differentiate(tape, loss, [*parameters(model).values()])",
}
CLIPPED = {
    "torch": "torch._foreach_mul_(gradient, settings.clip_norm / norm.clamp(min=settings.clip_norm))",
    "jax": "settings.clip_norm / jnp.maximum(norm, settings.clip_norm)",
    "tf": "self.settings.clip_norm / tf.maximum(norm, self.settings.clip_norm)",
}

CATALOGUE = {
    "loss": [
        Mistake("label smoothing missing", "loss", config={"label_smoothing": 0.0}, case=LOSS),
        *(
            Mistake(
                f"label smoothing {taken} for {kind}",
                "loss",
                config={"label_smoothing_kind": taken},
                case=f"gradients/{kind}",
            )
            for kind, taken in (
                ("uniform", "off_target"),
                ("off_target", "off_target_and_pad"),
                ("off_target_and_pad", "uniform"),
            )
        ),
        Mistake(
            "the right token's share is not taken off",
            "loss",
            instead("training", "            spread = spread - right\n" if False else "spread = spread - right", "pass"),
            case="gradients/off_target",
        ),
        Mistake(
            "softmax twice",
            "loss",
            lines(
                torch=("logits.log_softmax(-1", "logits.softmax(-1).log_softmax(-1"),
                jax=("jax.nn.log_softmax(wide)", "jax.nn.log_softmax(jax.nn.softmax(wide))"),
                tf=("tf.nn.log_softmax(wide)", "tf.nn.log_softmax(tf.nn.softmax(wide))"),
            ),
            case=LOSS,
        ),
        Mistake(
            "padding counts",
            "loss",
            instead("training", "counted = labels != config.pad_id", "counted = labels >= 0"),
            case=LOSS,
        ),
        Mistake(
            "averaged over padding too",
            "loss",
            instead(
                "training",
                SUMMED,
                torch=SUMMED["torch"].replace("counted.sum()", "(labels >= 0).sum()"),
                jax=SUMMED["jax"].replace("counted.sum()", "(labels >= 0).sum()"),
                tf=SUMMED["tf"].replace("count_nonzero(counted", "count_nonzero(labels >= 0"),
            ),
            case=LOSS,
        ),
        Mistake(
            "averaged by sentence",
            "loss",
            instead(
                "training",
                SUMMED,
                torch="return (losses.masked_fill(~counted, 0.0).sum(1) / counted.sum(1)).sum(), counted.any(1).sum()",
                jax="return (jnp.where(counted, losses, 0.0).sum(1) / counted.sum(1)).sum(), counted.any(1).sum()",
                tf="return tf.reduce_sum(tf.reduce_sum(tf.where(counted, losses, 0.0), 1)"
                " / tf.math.count_nonzero(counted, 1, dtype=losses.dtype)), tf.shape(labels)[0]",
            ),
            case=LOSS,
        ),
        Mistake(
            "labels are what the decoder reads",
            "loss",
            lines(
                torch=("tap), labels, model.config)", "tap), target_ids, model.config)"),
                jax=("cross_entropy(logits, labels, model.config)", "cross_entropy(logits, target_ids, model.config)"),
                tf=("tap=seen), labels, model.config)", "tap=seen), target_ids, model.config)"),
            ),
            case=LOSS,
        ),
    ],
    "gradient": [
        Mistake(
            "no gradient through the tied output projection",
            f"of {TABLE}",
            {
                "torch": [("transformer", "self.output_proj(x, self.target_embedding.table)",
                           "self.output_proj(x, self.target_embedding.table.detach())")],
                "jax": [("transformer", "self.output_proj(x, self.target_embedding.table[...])",
                         "self.output_proj(x, jax.lax.stop_gradient(self.target_embedding.table[...]))")],
                "tf": [("transformer", LOGITS_TABLE["tf"], "table=tf.stop_gradient(self.target_embedding.table)")],
            },
            case=LOSS,
        ),
        Mistake(
            "no gradient through the tied embedding",
            f"of {TABLE}",
            instead("embedding", LOOKED_UP, **stopped(LOOKED_UP)),
            case=LOSS,
        ),
        Mistake(
            "embedding not scaled in the backward pass",
            f"of {TABLE}",
            instead(
                "embedding",
                MULTIPLIED,
                **{
                    port: f"{LOOKED_UP[port]} + {hidden}"
                    for port, hidden in stopped(
                        {port: f"(({x} * self.multiplier) - {x})" for port, x in LOOKED_UP.items()}
                    ).items()
                },
            ),
            case=LOSS,
        ),
        Mistake(
            "no gradient through a residual connection",
            "at source_embedding.output",
            instead(
                "encoder",
                ATTENDED,
                **{port: ATTENDED.replace("(x +", f"({x} +") for port, x in stopped(dict.fromkeys(NORMED, "x")).items()},
            ),
            case=LOSS,
        ),
        Mistake(
            "norms are frozen",
            f"of {DECODER}.feed_forward_norm.bias",
            instead(
                "layers",
                {port: f"return {normed}" for port, normed in NORMED.items()},
                torch=f"return ({NORMED['torch']} - self.bias) / self.weight"
                " * self.weight.detach() + self.bias.detach()",
                jax=f"return ({NORMED['jax']} - self.bias) / self.scale"
                " * jax.lax.stop_gradient(self.scale[...]) + jax.lax.stop_gradient(self.bias[...])",
                tf=f"return ({NORMED['tf']} - self.beta) / self.gamma"
                " * tf.stop_gradient(self.gamma) + tf.stop_gradient(self.beta)",
            ),
            case=LOSS,
        ),
        Mistake(
            "softmax passes its gradient straight through",
            f"at {DECODER}.cross_attention.scores",
            instead(
                "layers",
                WEIGHTS,
                **{
                    port: f"scores + {hidden}"
                    for port, hidden in stopped({port: f"({x} - scores)" for port, x in WEIGHTS.items()}).items()
                },
            ),
            case=LOSS,
        ),
    ],
    "schedule": [
        Mistake("rate of the next step", WEIGHT, rate("settings.learning_rate({step} + 1, self.model.config.d_model)"),
                case=PLAIN),
        Mistake(
            "rate of the step before",
            WEIGHT.replace("step 1", "step 2"),  # a step 0 has the rate of the first
            rate("settings.learning_rate({step} - 1, self.model.config.d_model)"),
            case=PLAIN,
        ),
        Mistake(
            "warm-up to the power of -1",
            WEIGHT,
            rate("settings.learning_rate({step}, self.model.config.d_model) * settings.warmup_steps**0.5"),
            case=PLAIN,
        ),
        Mistake("rate not divided by sqrt(d_model)", WEIGHT, rate("settings.learning_rate({step}, 1)"), case=PLAIN),
        Mistake("factor forgotten", WEIGHT, assumed(learning_rate_factor=1.0), case=PLAIN),
        Mistake("cool-down forgotten", WEIGHT.replace("step 1", "step 2"), assumed(cooldown_steps=0), case=PLAIN),
    ],
    "Adam": [
        Mistake("betas of Kingma and Ba", SECOND, assumed(beta2=0.999), case=PLAIN),
        Mistake("betas swapped", FIRST, assumed(beta1=0.98, beta2=0.9), case=PLAIN),
        Mistake("epsilon of Kingma and Ba", WEIGHT, assumed(epsilon=1e-8), case=PLAIN),
        Mistake(
            "epsilon inside the root",
            WEIGHT,
            adam(
                torch=("((v / correction2).sqrt() + settings.epsilon)", "(v / correction2 + settings.epsilon).sqrt()"),
                jax=("(jnp.sqrt(v / correction2) + settings.epsilon)", "jnp.sqrt(v / correction2 + settings.epsilon)"),
                tf=("(tf.sqrt(v / correction2) + settings.epsilon)", "tf.sqrt(v / correction2 + settings.epsilon)"),
            ),
            case=PLAIN,
        ),
        Mistake(
            "epsilon added before the correction, as in Keras",
            WEIGHT,
            adam(
                torch=("+ settings.epsilon", "+ settings.epsilon / correction2**0.5"),
                jax=("+ settings.epsilon", "+ settings.epsilon / correction2**0.5"),
                tf=("+ settings.epsilon", "+ settings.epsilon / correction2**0.5"),
            ),
            case=PLAIN,
        ),
        Mistake(
            "first moment not corrected",
            WEIGHT,
            adam(torch=("(m / correction1)", "m"), jax=("(m / correction1)", "m"), tf=("(m / correction1)", "m")),
            case=PLAIN,
        ),
        Mistake(
            "second moment not corrected",
            WEIGHT,
            adam(torch=("(v / correction2)", "v"), jax=("(v / correction2)", "v"), tf=("(v / correction2)", "v")),
            case=PLAIN,
        ),
        Mistake(
            "second moment of the gradient's size",
            SECOND,
            adam(torch=("g * g - v", "g.abs() - v"), jax=("g * g - v", "abs(g) - v"), tf=("g * g - v", "abs(g) - v")),
            case=PLAIN,
        ),
        Mistake(
            "second moment never falls",
            SECOND.replace("step 1", "step 2"),
            adam(
                torch=("v.copy_(v + (1.0 - settings.beta2) * (g * g - v))",
                       "v.copy_(v + (1.0 - settings.beta2) * (g * g - v).clamp(min=0.0))"),
                jax=("(g * g - v)", "jnp.maximum(g * g - v, 0.0)"),
                tf=("(g * g - self.second_moment[name])", "tf.maximum(g * g - self.second_moment[name], 0.0)"),
            ),
            case=PLAIN,
        ),
        Mistake(
            "weight decay left on",
            FIRST,
            lines(
                torch=("fused=True", "fused=True, weight_decay=0.01"),
                jax=("g = g * scale.astype(g.dtype)", "g = g * scale.astype(g.dtype) + 0.01 * parameters[name]"),
                tf=("values(), gradient, strict=True)", "values(), gradient, strict=True)"),
            ),
            case=PLAIN,
        ),
        Mistake(
            "learning rate applied twice",
            WEIGHT,
            adam(
                torch=("p.sub_(learning_rate", "p.sub_(learning_rate * learning_rate"),
                jax=("learning_rate * update", "learning_rate * learning_rate * update"),
                tf=("assign_sub(learning_rate", "assign_sub(learning_rate * learning_rate"),
            ),
            case=PLAIN,
        ),
    ],
}
