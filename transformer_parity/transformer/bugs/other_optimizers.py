"""Bugs in training steps: wrong optimizers, wrong weight decay, wrong clipping, and updates at the wrong time."""

from __future__ import annotations

from transformer_parity.transformer.bugs.bug import Edits, Table, changed, instead, table, together
from transformer_parity.transformer.bugs.optimizer import CLIPPED, WRITTEN_OUT
from transformer_parity.transformer.bugs.training import FIRST, LOSS, SECOND, WEIGHT

# Adam's formulas, keyed by the name of the computed variable. The code defined in NUMBERS gives the hyperparameters the
# same names in NumPy and PyTorch.
ADAM = {
    "g": "g = g",
    "m": "m += (1.0 - beta1) * (g - m)",
    "v": "v += (1.0 - beta2) * (g * g - v)",
    "m_hat": "m_hat = m / correction1",
    "v_hat": "v_hat = v / correction2",
    "step": "step = learning_rate * m_hat / (v_hat**0.5 + epsilon)",
    "theta": "theta -= step",
}
NUMBERS = {
    "numpy": "beta1, beta2, epsilon = settings.beta1, settings.beta2, settings.epsilon",
    "torch": '(beta1, beta2), epsilon = group["betas"], group["eps"]',
}
INDENT = {"numpy": 12 * " ", "torch": 16 * " "}
T = "t = round(__import__('math').log(1.0 - correction1) / __import__('math').log(beta1))"  # step number
# torch.optim.NAdam stores the product of the momentum factors in float32.
MU = (
    "mu = lambda t: beta1 * (1.0 - 0.5 * 0.96 ** (0.004 * t))\nnp = __import__('numpy')\n"
    "mus = float(np.cumprod(np.array([mu(i) for i in range(1, t + 1)], 'float32'))[-1])"
)
RECTIFIED = (
    "most = 2.0 / (1.0 - beta2) - 1.0\nlength = most - 2.0 * t * beta2**t / correction2\n"
    "r = ((length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length)) ** 0.5 if length > 5 else 0.0\n"
    "step = learning_rate * m_hat * (r * correction2**0.5 / (v**0.5 + epsilon) if length > 5 else 1.0)"
)
TRUST = "{step}\nof_theta, of_step = ((x * x).sum() ** 0.5 for x in (theta, step / learning_rate))"
MATRICES = "(theta.ndim > 1)"
NORM_SCALE = "step 1 weight encoder.layers.0.self_attention_norm.scale"  # the first parameter that isn't a matrix
EXPORTED = "        return get_weights(self)\n"
KEPT = "self.model._shown = None\n        self.model._shown = self.model.export_weights()\n        "
UPDATED = {
    "numpy": "self.optimizer.update(gradient, scale, learning_rate, settings.bias_corrections(self.step + 1))",
    "torch": "self.optimizer.update(settings.learning_rate(self.step + 1, config.d_model), self.step)",
}
RETURNED = {
    "numpy": ("return StepResult(total / count,", "return StepResult(self._gradient(batch)[0] / count,"),
    "torch": ("return StepResult(loss,", "return StepResult(self._gradient(batch)[0],"),
}
LARGEST = {
    "numpy": "max(norm, clip_norm)",
    "torch": "norm.clamp(min=clip_norm)",
    "jax": "jnp.maximum(norm, clip_norm)",
    "tf": "tf.maximum(norm, clip_norm)",
}


def formulas(**new: str) -> Edits:
    """Return edits that replace formulas of Adam. A replacement can include an original formula as ``{name}``."""
    lines = {**ADAM, **{name: text.format(**ADAM) for name, text in new.items()}}
    old = {
        "numpy": (
            "m += (1.0 - settings.beta1) * (g - m)\nv += (1.0 - settings.beta2) * (g * g - v)\n"
            "m_hat = m / correction1\nv_hat = v / correction2\n"
            "theta -= learning_rate * m_hat / (np.sqrt(v_hat) + settings.epsilon)"
        ),
        "torch": (
            'm += (1.0 - group["betas"][0]) * (g - m)\nv += (1.0 - group["betas"][1]) * (g * g - v)\n'
            "m_hat = m / correction1\nv_hat = v / correction2\n"
            'theta -= learning_rate * m_hat / (v_hat.sqrt() + group["eps"])'
        ),
    }
    new_text = {port: "\n".join((NUMBERS[port], *lines.values())).replace("\n", f"\n{INDENT[port]}") for port in old}
    old = {port: text.replace("\n", f"\n{INDENT[port]}") for port, text in old.items()}
    written_out = WRITTEN_OUT.replace(old["torch"], new_text["torch"])
    return changed("optimizer", numpy=(old["numpy"], new_text["numpy"]), torch=("self.step()", written_out))


def decoupled(value: str, where: str = "1.0") -> Edits:
    """Return edits that add decoupled weight decay that is multiplied by the learning rate."""
    return formulas(theta=f"theta *= 1.0 - learning_rate * {value} * {where}\n{{theta}}")


def in_gradient(value: str, where: str = "1.0") -> Edits:
    """Return edits that implement weight decay by adding a multiple of each parameter to its gradient."""
    return formulas(g=f"g = g + {value} * {where} * theta")


def clipped_by(condition: str) -> Edits:
    """Return edits after which clipping depends on the norm of only some gradients.

    The norm includes the gradients that satisfy the condition. The condition can use the gradient ``g`` and the name
    ``name`` of its parameter.
    """
    return changed(
        "training",
        numpy=(
            "clip_factor(norm, settings.clip_norm)",
            f"clip_factor(global_norm({{name: g for name, g in gradient.items() if {condition}}}) / count,"
            " settings.clip_norm)",
        ),
        torch=(
            CLIPPED,
            "of_name = {id(p.grad): name for name, p in parameters(transformer_of(self.model)).items()}\n"
            "                chosen = [(of_name[id(g)], g) for g in gradient]\n"
            f"                norm_of_some = global_norm([g for name, g in chosen if {condition}])\n"
            "                torch._foreach_mul_(tensors, clip_factor(norm_of_some, settings.clip_norm))",
        ),
    )


def skipped(numpy: dict[str, str], torch: dict[str, str]) -> Edits:
    """Return edits that skip the update in the first step.

    Args:
        numpy: Additional replacements in the code that calls NumPy's optimizer, as a dict from old to new text.
        torch: Additional replacements in the code that calls PyTorch's optimizer, as a dict from old to new text.
    """
    new = {}
    for port, replaced in (("numpy", numpy), ("torch", torch)):
        call = UPDATED[port]
        for old, text in replaced.items():
            call = call.replace(old, text)
        new[port] = f"if self.step > 0:\n            {call}"
    return instead("training", UPDATED, numpy=new["numpy"], torch=new["torch"])


def twice() -> Edits:
    """Return edits that update the first parameter, which is an embedding matrix, twice in each step."""
    parameters = 'for theta in group["params"]:', 'state["step"] += 1'
    again = 'for i, theta in [*enumerate(group["params"]), (-1, group["params"][0])]:', 'state["step"] += float(i >= 0)'
    text = WRITTEN_OUT
    for old, new in zip(parameters, again, strict=True):
        text = text.replace(old, new)
    items = "self.parameters.items()"
    return changed(
        "optimizer", numpy=(f"in {items}:", f"in [*{items}, *list({items})[:1]]:"), torch=("self.step()", text)
    )


ENTRIES: dict[str, Table] = {
    "Adam": {
        (WEIGHT, "steps"): {
            "Nesterov momentum": formulas(
                m_hat="m_hat = beta1 * m / (1.0 - beta1 * (1.0 - correction1)) + (1.0 - beta1) * g / correction1"
            ),
            "Nesterov momentum with a schedule, as in torch's NAdam": formulas(
                m_hat=f"{T}\n{MU}\nm_hat = mu(t + 1) * m / (1.0 - mus * mu(t + 1)) + (1.0 - mu(t)) * g / (1.0 - mus)"
            ),
            "step rectified, as in RAdam": formulas(step=f"{T}\n{RECTIFIED}"),
            "step scaled by the norm of the parameter, as in LAMB": formulas(
                step=f"{TRUST}\nstep = step * (of_theta / of_step if of_theta > 0 and of_step > 0 else 1.0)"
            ),
            "decoupled weight decay left on, except for biases and norms": decoupled("0.01", MATRICES),
            "weights are exported before the update": together(
                instead(
                    "part",
                    EXPORTED,
                    **dict.fromkeys(UPDATED, EXPORTED.replace("return", "return self.__dict__.get('_shown') or")),
                ),
                instead("training", UPDATED, **{port: f"{KEPT}{call}" for port, call in UPDATED.items()}),
            ),
        },
        (FIRST, "steps"): {
            "the first step is skipped": skipped({}, {}),
            "the first step is skipped and not counted": skipped(
                {"learning_rate,": "settings.learning_rate(self.step, config.d_model),", "self.step + 1": "self.step"},
                {"self.step + 1": "self.step", ", self.step)": ", self.step - 1)"},
            ),
            "the first step is skipped and counted by the learning rate only": skipped(
                {"bias_corrections(self.step + 1)": "bias_corrections(self.step)"}, {", self.step)": ", self.step - 1)"}
            ),
            "a tied embedding matrix is updated twice": twice(),
            **{f"weight decay {value} in the gradient": in_gradient(value) for value in ("0.1", "0.0001", "1e-05")},
            **{
                f"weight decay {value} in the gradient, except for biases and norms": in_gradient(value, MATRICES)
                for value in ("0.01", "0.0001", "1e-05")
            },
        },
        (SECOND, "steps"): {
            "infinity norm, as in AdaMax": formulas(
                v="larger = abs(g) + epsilon\nv += (beta2 * v + larger + abs(beta2 * v - larger)) / 2.0 - v",
                v_hat="v_hat = v * v",
            ),
        },
        (NORM_SCALE, "steps"): {
            "biases and norms are not updated": formulas(theta=f"theta -= {MATRICES} * step"),
        },
        (LOSS, "steps"): {"loss is computed after the update": changed("training", **RETURNED)},
    },
    "clipping": {
        (FIRST, "steps/clipped"): {
            "clipped by the norm of the matrices' gradients": clipped_by("g.ndim > 1"),
            "clipped by the norm without the embeddings": clipped_by('not name.endswith("embedding.table")'),
        },
        (FIRST, "steps/loosely_clipped"): {
            "small gradients are scaled up to the limit": instead("optimizer", LARGEST, "norm"),
        },
    },
}
CATALOG = {part: table(entries) for part, entries in ENTRIES.items()}
