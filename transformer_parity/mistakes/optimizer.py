"""Mistakes of a training step: accumulation over slices of a batch, clipping, the learning rate, Adam."""

from __future__ import annotations

from transformer_parity.mistakes.mistake import FOUR, Edits, Mistake, Table, changed, instead, table
from transformer_parity.mistakes.training import FIRST, LOSS, NORM, SECOND, WEIGHT, Change, assumed, in_training, later


def rate(new: str) -> Edits:
    """Return edits of the call of the schedule, in which ``n`` is the number of the step."""
    calls = dict.fromkeys(FOUR, "settings.learning_rate(n, self.model.config.d_model)")
    number = {"numpy": "self.step", "torch": "self.step", "jax": "step", "tf": "step"}
    old, changed = (
        {port: text.replace("(n", f"({number[port]}") for port, text in texts.items()}
        for texts in (calls, dict.fromkeys(FOUR, new))
    )
    return instead("training", old, **changed)


# What torch.optim.Adam computes, written out, since the original cannot be edited.
WRITTEN_OUT = """with torch.no_grad():
            for p in self.model.parameters():
                g, m, v = p.grad, self.optimizer.state[p]["exp_avg"], self.optimizer.state[p]["exp_avg_sq"]
                m += (1.0 - settings.beta1) * (g - m)
                v += (1.0 - settings.beta2) * (g * g - v)
                m_hat = m / (1.0 - settings.beta1**self.step)
                v_hat = v / (1.0 - settings.beta2**self.step)
                p -= group["lr"] * m_hat / (v_hat.sqrt() + settings.epsilon)"""


# The same for TensorFlow's kernel.
KERNEL = "tf.raw_ops.ResourceApplyAdam(var=parameter.handle, m=m.handle, v=v.handle, grad=g, **numbers)\n"
TF_WRITTEN_OUT = """m = m.assign_add((1.0 - settings.beta1) * (g - m))
            v = v.assign_add((1.0 - settings.beta2) * (g * g - v))
            parameter.assign_sub(learning_rate * (m / correction1) / (tf.sqrt(v / correction2) + settings.epsilon))
"""


def adam(torch: Change, jax: Change, tf: Change, numpy: Change) -> Edits:
    """Return edits of Adam's formulas."""
    for text, (old, _) in ((WRITTEN_OUT, torch), (TF_WRITTEN_OUT, tf)):
        if text.count(old) != 1:
            raise ValueError(f"Adam must hold {old!r} once")
    return in_training(
        ("self.optimizer.step()", WRITTEN_OUT.replace(*torch)), jax, (KERNEL, TF_WRITTEN_OUT.replace(*tf)), numpy
    )


CLIP = {
    "numpy": "scale *= self.settings.clip_norm / max(norm, self.settings.clip_norm)",
    "torch": "torch._foreach_mul_(gradient, settings.clip_norm / norm.clamp(min=settings.clip_norm))",
    "jax": "settings.clip_norm / jnp.maximum(norm, settings.clip_norm)",
    "tf": "self.settings.clip_norm / tf.maximum(norm, self.settings.clip_norm)",
}


CLIPPED = {"jax": "scale * g, numbers)", "tf": "[g * scale for g in gradient]"}

# In NumPy, gradients are values: only those that are stored are left over.
LEFT_OVER = """        before = getattr(self, "left_over", {})
        gradient = {name: before.get(name, 0.0) + array / max(int(tokens), 1) for name, array in gradient.items()}
        norm = math.sqrt(sum(np.vdot(array, array) for array in gradient.values()))
        scale = 1.0 if self.settings.clip_norm is None else self.settings.clip_norm / max(norm, self.settings.clip_norm)
        self.left_over = {name: array * scale for name, array in gradient.items()}
        self._update({name: array.copy() for name, array in self.left_over.items()}, 1.0)
"""


ENTRIES: dict[str, Table] = {
    "accumulation": {
        (LOSS, "steps/sliced"): {
            "mean of the slices' means": in_training(
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
                    "return (loss, tokens), _differentiate(tape, loss, [*parameters(model).values()])",
                    "count = tf.cast(tokens * self.settings.accumulation_steps, loss.dtype)\n"
                    "            of_sum = _differentiate(tape, loss, [*parameters(model).values()])\n"
                    "            return (loss / count, tf.constant(0)), [g / count for g in of_sum]",
                ),
                (
                    "loss, tokens = loss + part_loss, tokens + part_tokens",
                    "count = max(int(part_tokens), 1) * slices\n"
                    "            of_parameters = {name: array / count for name, array in of_parameters.items()}\n"
                    "            loss = loss + part_loss / count",
                ),
            )
        },
        (NORM, "steps/sliced"): {
            "only the last slice counts": in_training(
                ("        loss.backward()", "        self.optimizer.zero_grad()\n        loss.backward()"),
                (
                    "jnp.add, sums, (total, tokens, gradient))",
                    "jnp.add, (*sums[:2], zeros), (total, tokens, gradient))",
                ),
                (
                    "tf.nest.map_structure(tf.add, sums, self._backward(*part))",
                    "tf.nest.map_structure(tf.add, (sums[0], zeros), self._backward(*part))",
                ),
                ("array += gradient[name]", "pass"),
            )
        },
        (later(NORM), "steps"): {
            "gradients of the step before are still there": in_training(
                ("        self.optimizer.zero_grad()\n", ""),
                None,
                None,  # where gradients are values, nothing is left over
                ("        self._update(gradient, scale)\n", LEFT_OVER),
            )
        },
    },
    "clipping": {
        (FIRST, "steps/clipped"): {
            "no clipping": assumed(clip_norm=None),
            "clipped by value": in_training(
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
                (
                    CLIP["numpy"],
                    "limits = -self.settings.clip_norm / scale, self.settings.clip_norm / scale\n"
                    "            gradient = {name: np.clip(array, *limits) for name, array in gradient.items()}",
                ),
            ),
            "every tensor clipped for itself": in_training(
                (
                    CLIP["torch"],
                    "[g.mul_(settings.clip_norm / g.norm().clamp(min=settings.clip_norm)) for g in gradient]",
                ),
                (CLIPPED["jax"], "g / jnp.maximum(tokens, jnp.linalg.norm(g) / settings.clip_norm), numbers)"),
                (CLIPPED["tf"], "[tf.clip_by_norm(g / count, self.settings.clip_norm) for g in gradient]"),
                (
                    CLIP["numpy"],
                    "limit = self.settings.clip_norm / scale\n"
                    "            gradient = {name: array * (limit / max(np.linalg.norm(array), limit))"
                    " for name, array in gradient.items()}",
                ),
            ),
            "clipped by the norm of the sum": in_training(
                (CLIP["torch"], CLIP["torch"].replace("norm.clamp", "(norm * tokens).clamp")),
                (CLIP["jax"], CLIP["jax"].replace("(norm", "(norm * tokens")),
                (CLIP["tf"], CLIP["tf"].replace("(norm", "(norm * count")),
                (CLIP["numpy"], CLIP["numpy"].replace("(norm", "(norm * int(tokens)")),
            ),
            "1e-6 added to the norm, as torch does": in_training(
                (CLIP["torch"], "torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip_norm)"),
                (CLIP["jax"], CLIP["jax"].replace("(norm", "(norm + 1e-6")),
                (CLIP["tf"], CLIP["tf"].replace("(norm", "(norm + 1e-6")),
                (CLIP["numpy"], CLIP["numpy"].replace("(norm", "(norm + 1e-6")),
            ),
        }
    },
    "schedule": {
        (WEIGHT, "steps"): {
            "rate of the next step": rate("settings.learning_rate(n + 1, self.model.config.d_model)"),
            "warm-up to the power of -1": rate(
                "settings.learning_rate(n, self.model.config.d_model) * settings.warmup_steps**0.5"
            ),
            "not divided by sqrt(d_model)": rate("settings.learning_rate(n, 1)"),
            "factor forgotten": assumed(learning_rate_factor=1.0),
            "learning rate applied twice": adam(
                ('p -= group["lr"]', 'p -= group["lr"] ** 2'),
                ('numbers["learning_rate"] *', 'numbers["learning_rate"] ** 2 *'),
                ("assign_sub(learning_rate *", "assign_sub(learning_rate**2 *"),
                ("-= learning_rate *", "-= learning_rate**2 *"),
            ),
        },
        (later(WEIGHT), "steps"): {
            # The first step has none before it.
            "rate of the step before": rate("settings.learning_rate(max(n - 1, 1), self.model.config.d_model)"),
            "cool-down forgotten": assumed(cooldown_steps=0),
        },
    },
    "Adam": {
        (SECOND, "steps"): {
            "beta2 0.999": assumed(beta2=0.999),
            "second moment of g instead of its square": adam(*4 * [("(g * g - v)", "(abs(g) - v)")]),
        },
        (FIRST, "steps"): {
            "betas swapped": assumed(beta1=0.98, beta2=0.9),
            "weight decay left on": in_training(
                ("fused=True", "fused=True, weight_decay=0.01"),
                ("scale * g, numbers)", "scale * g + 0.01 * parameters[name], numbers)"),
                ("gradient, strict=True):\n", "gradient, strict=True):\n            g = g + 0.01 * parameter\n"),
                ("g *= scale\n", "g = scale * g + 0.01 * theta\n"),
            ),
        },
        (WEIGHT, "steps"): {
            "epsilon 1e-8": assumed(epsilon=1e-8),
            "epsilon inside the root": adam(
                ("(v_hat.sqrt() + settings.epsilon)", "(v_hat + settings.epsilon).sqrt()"),
                ("(jnp.sqrt(v_hat) + settings.epsilon)", "jnp.sqrt(v_hat + settings.epsilon)"),
                ("(tf.sqrt(v / correction2) + settings.epsilon)", "tf.sqrt(v / correction2 + settings.epsilon)"),
                ("(np.sqrt(v_hat) + settings.epsilon)", "np.sqrt(v_hat + settings.epsilon)"),
            ),
            "first moment not corrected": adam(
                ("m / (1.0 - settings.beta1**self.step)", "m"),
                ('m / numbers["first_correction"]', "m"),
                ("(m / correction1)", "m"),
                ("m / (1.0 - settings.beta1**self.step)", "m"),
            ),
            "second moment not corrected": adam(
                ("v / (1.0 - settings.beta2**self.step)", "v"),
                ('v / numbers["second_correction"]', "v"),
                ("v / correction2", "v"),
                ("v / (1.0 - settings.beta2**self.step)", "v"),
            ),
        },
        (WEIGHT, "steps/large_epsilon"): {
            "epsilon added before the correction, as Keras does": adam(
                ("+ settings.epsilon", "+ settings.epsilon / (1.0 - settings.beta2**self.step) ** 0.5"),
                ("+ settings.epsilon", '+ settings.epsilon / numbers["second_correction"] ** 0.5'),
                ("+ settings.epsilon", "+ settings.epsilon / correction2**0.5"),
                ("+ settings.epsilon", "+ settings.epsilon / (1.0 - settings.beta2**self.step) ** 0.5"),
            )
        },
        (later(SECOND), "steps"): {
            "second moment never falls, as in AMSGrad": adam(
                ("(g * g - v)", "(g * g - v).clamp(min=0.0)"),
                ("(g * g - v)", "jnp.maximum(g * g - v, 0.0)"),
                ("(g * g - v)", "tf.maximum(g * g - v, 0.0)"),
                ("(g * g - v)", "np.maximum(g * g - v, 0.0)"),
            )
        },
    },
}
CATALOGUE = {part: table(entries) for part, entries in ENTRIES.items()}

CONTROLS = [
    # Equivalent ways to write the same: no alarm.
    Mistake(
        "Adam written out",
        "",
        in_training(("self.optimizer.step()", WRITTEN_OUT), None, (KERNEL, TF_WRITTEN_OUT)),
        case="steps/clipped",
    ),
    Mistake("all slices at once", "", assumed(accumulation_steps=1), case="steps/sliced"),
    Mistake(
        "scores less their largest, which has no gradient",
        "",
        changed(
            "layers",
            torch=("scores.masked_fill(~mask", "(scores - scores.amax(-1, keepdim=True).detach()).masked_fill(~mask"),
            jax=("mask, wide,", "mask, wide - jax.lax.stop_gradient(wide.max(-1, keepdims=True)),"),
            tf=("mask, wide,", "mask, wide - tf.stop_gradient(tf.reduce_max(wide, -1, keepdims=True)),"),
        ),
    ),
]
