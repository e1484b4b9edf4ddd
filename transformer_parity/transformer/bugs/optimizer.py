"""Bugs in training steps: gradient accumulation, clipping, the learning rate schedule, and Adam."""

from __future__ import annotations

from transformer_parity.transformer.bugs.bug import (
    FOUR,
    Bug,
    Edits,
    Table,
    changed,
    instead,
    table,
    together,
)
from transformer_parity.transformer.bugs.training import (
    FIRST,
    LOSS,
    NORM,
    SECOND,
    WEIGHT,
    Change,
    assumed,
    in_training,
    later,
)


def rate(new: str) -> Edits:
    """Return edits that replace the call to the learning rate schedule.

    ``new`` is an expression that can use the step number ``n``.
    """
    old, new = (text.replace("(n", "(self.step + 1") for text in ("settings.learning_rate(n, config.d_model)", new))
    return instead("training", old, new)


# Adam's update as explicit formulas. In the PyTorch package, bugs edit these formulas, because torch.optim.Adam is not
# part of the package.
WRITTEN_OUT = """with torch.no_grad():
            for theta in group["params"]:
                state = self.state[theta]
                state["step"] += 1
                correction1, correction2 = (1.0 - beta ** int(state["step"]) for beta in group["betas"])
                g, m, v = theta.grad, state["exp_avg"], state["exp_avg_sq"]
                m += (1.0 - group["betas"][0]) * (g - m)
                v += (1.0 - group["betas"][1]) * (g * g - v)
                m_hat = m / correction1
                v_hat = v / correction2
                theta -= learning_rate * m_hat / (v_hat.sqrt() + group["eps"])"""


# Edit that makes TensorFlow's trainer use ``Adam`` instead of ``FastAdam``. Bugs can edit the formulas in ``Adam``, but
# they can't edit TensorFlow's kernel, which ``FastAdam`` calls.
NO_KERNEL = "training", "FastAdam if model.fast or mesh is not None else Adam", "Adam"


def in_adam(usual: Change | None = None, **others: Change) -> Edits:
    """Return edits to the ``optimizer`` module. In TensorFlow, they also make the trainer use Adam's formulas."""
    edits = dict(changed("optimizer", usual, **others))
    if "tf" in edits:
        edits["tf"] = [*edits["tf"], NO_KERNEL]
    return edits


def adam(usual: Change, **others: Change) -> Edits:
    """Return edits that replace part of Adam's formulas."""
    changes = {**dict.fromkeys(FOUR, usual), **others}
    old, _ = changes["torch"]
    if WRITTEN_OUT.count(old) != 1:
        raise ValueError(f"Adam must contain {old!r} once: found {WRITTEN_OUT.count(old)} times")
    changes["torch"] = "self.step()", WRITTEN_OUT.replace(*changes["torch"])
    return in_adam(**changes)


def clipping(old: str, new: str) -> Edits:
    """Return edits to the expression that computes the maximum of the gradient norm and the clip norm.

    They replace ``old`` with ``new`` in this expression.
    """
    largest = {
        **dict.fromkeys(FOUR, "max(norm, clip_norm)"),
        "torch": "norm.clamp(min=clip_norm)",
        "jax": "jnp.maximum(norm, clip_norm)",
        "tf": "tf.maximum(norm, clip_norm)",
    }
    return instead("optimizer", largest, **{port: text.replace(old, new) for port, text in largest.items()})


NOT_AS_A_WHOLE = changed(
    "optimizer",
    ("return 1.0 if clip_norm is None else", "return 1.0 if norm is not None else"),
)
CLIPPED = "torch._foreach_mul_(tensors, clip_factor(norm, settings.clip_norm))"

MICRO_BATCH = "total, _ = self._loss(self.shard.module, part, config)\n            loss = total / tokens.clamp(min=1)\n"
DIFFERENTIATED = "return total, tokens, _differentiate(tape, total, _trained(model, self._variables))"

# NumPy computes new gradients in every step, so the edit must store the gradients of the previous step explicitly.
LEFT_OVER = """before = getattr(self, "left_over", {})
        gradient = {name: before.get(name, 0.0) * count + g for name, g in gradient.items()}
        norm = global_norm(gradient) / count
        scale = clip_factor(norm, settings.clip_norm) / count
        self.left_over = {name: g * scale for name, g in gradient.items()}
"""


ENTRIES: dict[str, Table] = {
    "accumulation": {
        (LOSS, "steps/sliced"): {
            "mean of the micro-batch means": in_training(
                (
                    MICRO_BATCH,
                    "total, count = self._loss(self.shard.module, part, config)\n"
                    "            loss = total / (count * settings.accumulation_steps)\n",
                ),
                (
                    "return jax.tree.map(jnp.add, sums, (total, tokens, gradient)), None",
                    "mean, of_mean = jax.tree.map(lambda x: x / tokens / micro_batches, (total, gradient))\n"
                    "        return jax.tree.map(jnp.add, sums, (mean, 0, of_mean)), None",
                ),
                (
                    DIFFERENTIATED,
                    "count = tf.cast(tokens * self.settings.accumulation_steps, total.dtype)\n"
                    f"            total, _, of_sum = {DIFFERENTIATED.removeprefix('return ')}\n"
                    "            return total / count, tf.constant(0), {name: g / count for name, g in of_sum.items()}",
                ),
                (
                    "total, tokens = total + part_total, tokens + part_tokens",
                    "count = max(int(part_tokens), 1) * self.settings.accumulation_steps\n"
                    "            of_parameters = {name: array / count for name, array in of_parameters.items()}\n"
                    "            total = total + part_total / count",
                ),
            )
        },
        (NORM, "steps/sliced"): {
            "only the last micro-batch used": in_training(
                ("loss.backward()", "self.optimizer.zero_grad()\n            loss.backward()"),
                (
                    "jnp.add, sums, (total, tokens, gradient))",
                    "jnp.add, (*sums[:2], zeros), (total, tokens, gradient))",
                ),
                (
                    "tf.nest.map_structure(tf.add, sums, self._gradient_of_micro_batch(*part))",
                    "tf.nest.map_structure(tf.add, (*sums[:2], zeros), self._gradient_of_micro_batch(*part))",
                ),
                ("of_parameters[name] += array", "pass"),
            )
        },
        (later(NORM), "steps"): {
            "gradients of the previous step not reset": in_training(
                ("        self.optimizer.zero_grad()\n", ""),
                None,
                None,  # JAX and TensorFlow don't keep gradients between steps
                ("norm = global_norm(gradient) / count\n", LEFT_OVER),
            )
        },
    },
    "clipping": {
        (FIRST, "steps/clipped"): {
            "no clipping": assumed(clip_norm=None),
            "clipped by value": {
                **together(
                    NOT_AS_A_WHOLE,
                    in_adam(
                        numpy=(
                            "g, m, v = scale * gradient[name],",
                            "limit = settings.clip_norm\n"
                            "            g, m, v = np.clip(scale * gradient[name], -limit, limit),",
                        ),
                        jax=("g = scale * g", "g = jnp.clip(scale * g, -settings.clip_norm, settings.clip_norm)"),
                        tf=(
                            "g = scale * g",
                            "g = tf.clip_by_value(scale * g, -settings.clip_norm, settings.clip_norm)",
                        ),
                    ),
                ),
                **in_training(
                    (CLIPPED, "torch.nn.utils.clip_grad_value_(self.model.parameters(), settings.clip_norm)"),
                    None,
                    None,
                ),
            },
            "every tensor clipped separately": {
                **together(
                    NOT_AS_A_WHOLE,
                    in_adam(
                        numpy=(
                            "g, m, v = scale * gradient[name],",
                            "largest = max(scale * np.linalg.norm(gradient[name]), settings.clip_norm)\n"
                            "            g, m, v = settings.clip_norm / largest * scale * gradient[name],",
                        ),
                        jax=(
                            "g = scale * g",
                            "g = scale * g / jnp.maximum(scale * jnp.linalg.norm(g) / settings.clip_norm, 1.0)",
                        ),
                        tf=("g = scale * g", "g = tf.clip_by_norm(scale * g, settings.clip_norm)"),
                    ),
                ),
                **in_training(
                    (
                        CLIPPED,
                        "[g.mul_(settings.clip_norm / g.norm().clamp(min=settings.clip_norm)) for g in tensors]",
                    ),
                    None,
                    None,
                ),
            },
            "clipped by the norm of the summed gradient": changed(
                "training",
                ("clip_factor(norm,", "clip_factor(norm * count,"),
                torch=("clip_factor(norm,", "clip_factor(norm * tokens,"),
            ),
            "1e-6 added to the norm, as torch does": {
                **clipping("(norm", "(norm + 1e-6"),
                **changed("optimizer", torch=("norm.clamp", "(norm + 1e-6).clamp")),
            },
        }
    },
    "schedule": {
        (WEIGHT, "steps"): {
            "learning rate of the next step": rate("settings.learning_rate(n + 1, config.d_model)"),
            "warm-up to the power of -1": rate(
                "settings.learning_rate(n, config.d_model) * settings.warmup_steps**0.5"
            ),
            "not divided by sqrt(d_model)": rate("settings.learning_rate(n, 1)"),
            "learning rate factor ignored": assumed(learning_rate_factor=1.0),
            "learning rate applied twice": adam(("learning_rate * m_hat", "learning_rate**2 * m_hat")),
        },
        (later(WEIGHT), "steps"): {
            # The first step uses its own learning rate because there is no previous step.
            "learning rate of the previous step": rate("settings.learning_rate(max(n - 1, 1), config.d_model)"),
            "cool-down ignored": assumed(cooldown_steps=0),
        },
    },
    "Adam": {
        (SECOND, "steps"): {
            "beta2 0.999": assumed(beta2=0.999),
            "second moment of g instead of its square": adam(("(g * g - v)", "(abs(g) - v)")),
        },
        (FIRST, "steps"): {
            "betas swapped": assumed(beta1=0.98, beta2=0.9),
            "weight decay left on": in_adam(
                ("g = scale * g", "g = scale * g + 0.01 * theta"),
                numpy=("scale * gradient[name],", "scale * gradient[name] + 0.01 * theta,"),
                torch=("fused=True", "fused=True, weight_decay=0.01"),
            ),
        },
        (WEIGHT, "steps"): {
            "epsilon 1e-8": assumed(epsilon=1e-8),
            "epsilon inside the root": adam(
                ("(np.sqrt(v_hat) + settings.epsilon)", "np.sqrt(v_hat + settings.epsilon)"),
                torch=('(v_hat.sqrt() + group["eps"])', '(v_hat + group["eps"]).sqrt()'),
                jax=("(jnp.sqrt(v_hat) + settings.epsilon)", "jnp.sqrt(v_hat + settings.epsilon)"),
                tf=("(tf.sqrt(v_hat) + settings.epsilon)", "tf.sqrt(v_hat + settings.epsilon)"),
            ),
            "first moment not corrected": adam(("m / correction1", "m")),
            "second moment not corrected": adam(("v / correction2", "v")),
        },
        (WEIGHT, "steps/large_epsilon"): {
            "epsilon added before the correction, as Keras does": adam(
                ("+ settings.epsilon", "+ settings.epsilon / correction2**0.5"),
                torch=('+ group["eps"]', '+ group["eps"] / correction2**0.5'),
            )
        },
        (later(SECOND), "steps"): {
            "second moment never falls, as in AMSGrad": adam(
                ("(g * g - v)", "np.maximum(g * g - v, 0.0)"),
                torch=("(g * g - v)", "(g * g - v).clamp(min=0.0)"),
                jax=("(g * g - v)", "jnp.maximum(g * g - v, 0.0)"),
                tf=("(g * g - v)", "tf.maximum(g * g - v, 0.0)"),
            )
        },
    },
}
CATALOG = {part: table(entries) for part, entries in ENTRIES.items()}

CONTROLS = [
    # The comparison must not report these equivalent formulations as bugs.
    Bug(
        "Adam written out",
        "",
        {**changed("optimizer", torch=("self.step()", WRITTEN_OUT)), "tf": [NO_KERNEL]},
        case="steps/clipped",
    ),
    Bug("all micro-batches at once", "", assumed(accumulation_steps=1), case="steps/sliced"),
    Bug(
        "scores minus their maximum, without its gradient",
        "",
        changed(
            "layers",
            torch=("scores.masked_fill(~mask", "(scores - scores.amax(-1, keepdim=True).detach()).masked_fill(~mask"),
            jax=("mask, wide,", "mask, wide - jax.lax.stop_gradient(wide.max(-1, keepdims=True)),"),
            tf=("mask, wide,", "mask, wide - tf.stop_gradient(tf.reduce_max(wide, -1, keepdims=True)),"),
        ),
    ),
]
