"""Bugs that serve only as candidates for the diagnosis: variants of Adam, clipping, micro-batches, and restarts."""

from __future__ import annotations

from transformer_parity.transformer.bugs.bug import Bug, Edits
from transformer_parity.transformer.bugs.other_optimizers import MATRICES, T, formulas

KEPT = "kept = self.__dict__.setdefault('kept', {{}})"  # dict whose entries persist between steps
LARGEST = f"{KEPT}\nkept[name] = np.maximum(kept.get(name, 0.0), {{largest}})"
IN_KERAS = "step = learning_rate * m_hat / (v_hat**0.5 + epsilon / correction2**0.5)"
MEAN_OF_PARTS = "total, tokens = total + part_total, tokens + part_tokens"
LIMIT_OF_A_SUM = "clipped if the norm of the summed gradient exceeds the limit"
SCALE = "scale = clip_factor(norm, settings.clip_norm) / count"
NORM = "norm = global_norm(gradient) / count\n"
MULTIPLIED = "{{name: {factor} * array for name, array in of_parameters.items()}}"
FUSED = {  # expressions for the name of the fused tensor that contains the tensor ``name``
    "queries, keys and values of self-attention, and keys and values of cross-attention, are fused": (
        r"__import__('re').sub(r'(self_attention\.)(query|key|value)|(cross_attention\.)(key|value)', r'\1\3', name)"
    ),
    "queries, keys and values of every attention block are fused": (
        r"__import__('re').sub(r'(_attention\.)(query|key|value)', r'\1', name)"
    ),
    "keys and values of every attention block are fused": (
        r"__import__('re').sub(r'(_attention\.)(key|value)', r'\1', name)"
    ),
    "kernel and bias of a layer are fused": "name.rpartition('.')[0]",
    "all tensors of an encoder or decoder layer are fused": "'.'.join(name.split('.')[:3])",
}


def corrected(first: str, second: str) -> Edits:
    """Return edits that change the step number in the bias corrections of the first and the second moment.

    The arguments are expressions in the step number ``t``.
    """
    return formulas(
        m_hat=f"{T}\nm_hat = m / (1.0 - beta1 ** ({first}))", v_hat=f"v_hat = v / (1.0 - beta2 ** ({second}))"
    )


def first_gradient(*moments: str, **others: str) -> Edits:
    """Return edits that initialize the given moments with the first gradient (``m``) or its square (``v``)."""
    values = {"m": "g", "v": "g * g"}
    lines = "".join(f"\n    {moment}[...] = {values[moment]}" for moment in moments)
    return formulas(m=f"{T}\nif t == 1:{lines}\n{{m}}", **others)


def largest(of: str, corrected_by: str = "1.0", **others: str) -> Edits:
    """Return edits that make Adam divide by the square root of the largest second moment so far.

    Args:
        of: Expression for the second moment in the current step.
        corrected_by: Expression for the bias correction by which the largest second moment is divided.
        **others: Replacements for other formulas.
    """
    return formulas(v_hat=f"{LARGEST.replace('{largest}', of)}\nv_hat = kept[name] / {corrected_by}", **others)


def reduced_by(value: str, where: str = "1.0") -> Edits:
    """Return edits that add decoupled weight decay that isn't multiplied by the learning rate."""
    return formulas(theta=f"theta *= 1.0 - {value} * {where}\n{{theta}}")


def in_trainer(*changes: tuple[str, str]) -> Edits:
    """Return edits to the reference's ``training`` module."""
    return {"numpy": [("training", *change) for change in changes]}


def clipped_by(norm: str) -> Edits:
    """Return edits that replace the gradient norm, on which clipping is based, with the given expression."""
    return in_trainer((SCALE, SCALE.replace("(norm", f"({norm}")))


def clipped_in_groups(key: str) -> Edits:
    """Return edits that clip each group of gradients separately.

    ``key`` is an expression for the name of the group to which the parameter ``name`` belongs.
    """
    return in_trainer(
        (
            SCALE,
            f"groups, key = {{}}, lambda name: {key}\n"
            "        for name, g in gradient.items():\n"
            "            groups.setdefault(key(name), {})[name] = g / count\n"
            "        factors = {k: clip_factor(global_norm(some), settings.clip_norm) for k, some in groups.items()}\n"
            "        gradient = {name: factors[key(name)] * g for name, g in gradient.items()}\n"
            "        scale = 1.0 / count",
        )
    )


def clipped_micro_batches(tokens: str, divisor: str = "1.0", *more: tuple[str, str]) -> Edits:
    """Return edits that clip the gradient of each micro-batch separately.

    Args:
        tokens: Expression for the number of tokens by which the gradient norm of a micro-batch is divided.
        divisor: Expression for a factor, for example ``1.0 / of_micro_batch``. The edits multiply the clipped gradient
            by this factor.
        *more: Additional changes to the trainer.
    """
    lines = (
        f"of_micro_batch = max(int({tokens}), 1)",
        "factor = clip_factor(global_norm(of_parameters) / of_micro_batch, self.settings.clip_norm)",
        f"of_parameters = {MULTIPLIED.format(factor=f'factor * {divisor}')}",
        MEAN_OF_PARTS,
    )
    return in_trainer((MEAN_OF_PARTS, f"\n{12 * ' '}".join(lines)), *more)


def kept_on_the_model(what: str) -> list[tuple[str, str]]:
    """Return changes that make a new trainer continue with the step number or the moments of the previous trainer."""
    if what == "step":
        return [
            ("self.step = 0  #", "self.step = model.__dict__.get('_kept_step', 0)  #"),
            ("self.step += 1\n", "self.step += 1\n        self.model._kept_step = self.step\n"),
        ]
    begun = "self.optimizer = adam("
    return [
        (begun, "self.optimizer = model.__dict__.get('_kept_optimizer') or adam("),
        (NORM, f"self.model._kept_optimizer = self.optimizer\n        {NORM}"),
    ]


def of_gradient(*lines: str) -> Edits:
    """Return edits that insert lines after the gradient of a batch is summed and before its norm is computed."""
    return in_trainer((NORM, "".join(f"{line}\n        " for line in lines) + NORM))


BATCH_TOKENS = "(batch[2] != self.model.config.pad_id).sum()"
BEFORE = "before = self.__dict__.get('_before', {name: {first} for name, g in gradient.items()})"
HELD = "self._before = {name: g / count for name, g in gradient.items()}"
FORMULAS: dict[str, Edits] = {
    "the largest second moment so far, as in torch's AMSGrad": largest("v", "correction2"),
    "the largest corrected second moment so far, as in optax's AMSGrad": largest("v / correction2"),
    "the largest second moment so far and epsilon before the correction, as in Keras' AMSGrad": largest(
        "v", "correction2", step=IN_KERAS
    ),
    "the largest second moment so far, and neither moment corrected": largest("v", m_hat="m_hat = m"),
    "the largest second moment so far, which isn't corrected": largest("v"),
    **{
        f"bias corrections of {words}": corrected(first, second)
        for words, (first, second) in {
            "step n + 1": ("t + 1", "t + 1"),
            "step n - 1, but at least step 1": ("max(t - 1, 1)", "max(t - 1, 1)"),
            "the first step in all steps": ("1", "1"),
            "step n + 1 for the first moment": ("t + 1", "t"),
            "step n + 1 for the second moment": ("t", "t + 1"),
            "step n - 1 for the first moment": ("max(t - 1, 1)", "t"),
            "step n - 1 for the second moment": ("t", "max(t - 1, 1)"),
        }.items()
    },
    "bias corrections of the two moments swapped": formulas(
        m_hat="m_hat = m / correction2", v_hat="v_hat = v / correction1"
    ),
    "bias corrections that multiply": formulas(m_hat="m_hat = m * correction1", v_hat="v_hat = v * correction2"),
    "the root of the second moment divided by the correction": formulas(v_hat="v_hat = v / correction2**2"),
    "the second moment divided by the root of the correction": formulas(v_hat="v_hat = v / correction2**0.5"),
    **{
        f"{words} with the first gradient{suffix}": first_gradient(*moments, **others)
        for words, moments in {
            "moments initialized": ("m", "v"),
            "a first moment initialized": ("m",),
            "a second moment initialized": ("v",),
        }.items()
        for suffix, others in {
            "": {},
            ", and neither moment corrected": {"m_hat": "m_hat = m", "v_hat": "v_hat = v"},
            ", which isn't corrected": {f"{moments[0]}_hat": f"{moments[0]}_hat = {moments[0]}"},
        }.items()
        if len(moments) == 1 or "which" not in suffix
    },
    "epsilon squared, inside the root": formulas(step="step = learning_rate * m_hat / (v_hat + epsilon**2) ** 0.5"),
    "epsilon inside the root, before the correction": formulas(
        v_hat="v_hat = (v + epsilon) / correction2", step="step = learning_rate * m_hat / v_hat**0.5"
    ),
    "epsilon inside the root and outside": formulas(v_hat="{v_hat} + epsilon"),
    "epsilon multiplied by the root of the correction": formulas(
        step="step = learning_rate * m_hat / (v_hat**0.5 + epsilon * correction2**0.5)"
    ),
    "the larger of epsilon and the root": formulas(
        step="step = learning_rate * m_hat / np.maximum(v_hat**0.5, epsilon)"
    ),
    "no epsilon": formulas(step="step = learning_rate * m_hat / (v_hat**0.5 + 1e-300)"),
    "Nesterov momentum with the correction of this step": formulas(
        m_hat="m_hat = (beta1 * m + (1.0 - beta1) * g) / correction1"
    ),
    "Nesterov momentum, corrected by this step and the next": formulas(
        m_hat=f"{T}\nm_hat = beta1 * m / (1.0 - beta1 ** (t + 1)) + (1.0 - beta1) * g / correction1"
    ),
    "the first moment of the previous step": formulas(m="old = m.copy()\n{m}", m_hat="m_hat = old / correction1"),
    "the second moment of the previous step": formulas(v="old = v.copy()\n{v}", v_hat="v_hat = old / correction2"),
    "no first moment, as in RMSprop": formulas(m_hat="m_hat = g", v_hat="v_hat = v"),
    "no first moment, and the second corrected": formulas(m_hat="m_hat = g"),
    "a centered second moment, as in RMSprop": formulas(v_hat="v_hat = np.maximum(v / correction2 - m_hat**2, 0.0)"),
    "a second moment of the deviation from the first, as in AdaBelief": formulas(
        v="v += (1.0 - beta2) * ((g - m) ** 2 - v) + epsilon"
    ),
    "a second moment of the deviation from the first": formulas(v="v += (1.0 - beta2) * ((g - m) ** 2 - v)"),
    "a first moment that sums gradients": formulas(m="m += g - (1.0 - beta1) * m"),
    "a second moment that sums squares": formulas(v="v += g * g - (1.0 - beta2) * v"),
    "moments that sum gradients and squares": formulas(
        m="m += g - (1.0 - beta1) * m", v="v += g * g - (1.0 - beta2) * v"
    ),
    "a sum of all squares, as in Adagrad": formulas(v="v += g * g", m_hat="m_hat = g", v_hat="v_hat = v"),
    "no moments, as in gradient descent": formulas(step="step = learning_rate * g"),
    "momentum only": formulas(m="m += g - (1.0 - beta1) * m", step="step = learning_rate * m"),
    "Nesterov momentum only": formulas(m="m += g - (1.0 - beta1) * m", step="step = learning_rate * (g + beta1 * m)"),
    "an averaged gradient only": formulas(step="step = learning_rate * m"),
    "the sign of the first moment, as in Lion": formulas(
        m="sign = np.sign(beta1 * m + (1.0 - beta1) * g)\nm += (1.0 - beta2) * (g - m)",
        step="step = learning_rate * sign",
    ),
    "moments that start at zero in every step": formulas(m="m[...] = 0.0\nv[...] = 0.0\n{m}"),
    "moments of the first step in every step": formulas(
        m="m[...] = 0.0\nv[...] = 0.0\n{m}", m_hat="m_hat = g", v_hat="v_hat = g * g"
    ),
    "decoupled weight decay of 0.01 after the step": formulas(theta="{theta}\ntheta *= 1.0 - learning_rate * 0.01"),
    **{
        f"weight decay of {value} per step, regardless of the learning rate{words}": reduced_by(value, where)
        for value in ("0.01", "0.0001")
        for words, where in {"": "1.0", ", except for biases and norms": MATRICES}.items()
    },
    **{
        f"{words} rounded to {dtype}": formulas(**{key: text.replace("DTYPE", dtype) for key, text in new.items()})
        for dtype in ("float32", "bfloat16", "float16")
        for words, new in {
            "weights after each step": {"theta": "{theta}\ntheta[...] = theta.astype('DTYPE')"},
            "gradients": {"g": "g = g.astype('DTYPE').astype(g.dtype)"},
            "moments": {
                "m": "{m}\nm[...] = m.astype('DTYPE')",
                "v": "{v}\nv[...] = v.astype('DTYPE')",
            },
            "the first moment": {"m": "{m}\nm[...] = m.astype('DTYPE')"},
            "the second moment": {"v": "{v}\nv[...] = v.astype('DTYPE')"},
            "steps": {"step": "{step}\nstep = step.astype('DTYPE').astype(g.dtype)"},
        }.items()
    },
}
AROUND: dict[str, Edits] = {
    "clipped by the square of the norm": clipped_by("norm**2"),
    LIMIT_OF_A_SUM: in_trainer(
        (
            SCALE,
            "limit = settings.clip_norm or np.inf\n"
            "        scale = limit / (norm * count) if norm * count > limit else 1.0 / count",
        )
    ),
    "clipping limit rounded to float32": in_trainer(
        (SCALE, SCALE.replace("settings.clip_norm", "settings.clip_norm and float(np.float32(settings.clip_norm))"))
    ),
    "clipped by the norm with the first embedding matrix counted twice": clipped_by(
        "(norm**2 + np.vdot(table := gradient['source_embedding.table'] / count, table)) ** 0.5"
    ),
    "clipped by the largest element": clipped_by("max(np.abs(g).max() for g in gradient.values()) / count"),
    "clipped by the sum of absolute values": clipped_by("sum(np.abs(g).sum() for g in gradient.values()) / count"),
    "clipped by the largest norm of a tensor": clipped_by("max(np.linalg.norm(g) for g in gradient.values()) / count"),
    "clipped by the sum of the tensors' norms": clipped_by("sum(np.linalg.norm(g) for g in gradient.values()) / count"),
    "clipped by the root mean square": clipped_by("norm / sum(g.size for g in gradient.values()) ** 0.5"),
    "clipped by the norm without the biases": clipped_by(
        "global_norm({name: g for name, g in gradient.items() if not name.endswith('.bias')}) / count"
    ),
    "clipped by the norm without the norms' parameters": clipped_by(
        "global_norm({name: g for name, g in gradient.items() if '_norm.' not in name}) / count"
    ),
    **{
        f"clipped by the norm of the {side} only": clipped_by(
            f"global_norm({{name: g for name, g in gradient.items() if name.startswith('{side}.')}}) / count"
        )
        for side in ("encoder", "decoder")
    },
    "every tensor clipped by its own norm, if clipping is on": clipped_in_groups("name"),
    **{f"every tensor clipped by its own norm, if {words}": clipped_in_groups(key) for words, key in FUSED.items()},
    "every micro-batch clipped before the sum, and the sum clipped too": clipped_micro_batches(BATCH_TOKENS),
    "every micro-batch clipped before the sum": clipped_micro_batches(
        BATCH_TOKENS, "1.0", (SCALE, "scale = 1.0 / count")
    ),
    "mean of micro-batches clipped by the norm per micro-batch token": clipped_micro_batches(
        "part_tokens",
        "(1.0 / of_micro_batch / self.settings.accumulation_steps)",
        (SCALE, "scale = 1.0"),
    ),
    "sum of micro-batches clipped by the norm per micro-batch token": clipped_micro_batches(
        "part_tokens",
        "(1.0 / of_micro_batch)",
        (SCALE, "scale = 1.0"),
    ),
    "the loss of the last micro-batch only": in_trainer(
        (MEAN_OF_PARTS, MEAN_OF_PARTS.replace("total + part_total", "part_total", 1))
    ),
    "the gradient of the first micro-batch only": in_trainer(
        ("of_parameters[name] += array", "of_parameters[name] = array")
    ),
    "unclipped gradients of all previous steps not reset": of_gradient(
        BEFORE.replace("{first}", "0.0"),
        "gradient = {name: before[name] * count + g for name, g in gradient.items()}",
        HELD,
    ),
    "unclipped gradients of all previous steps not reset, even when training restarts": of_gradient(
        BEFORE.replace("{first}", "0.0").replace("self.", "self.model."),
        "gradient = {name: before[name] * count + g for name, g in gradient.items()}",
        HELD.replace("self.", "self.model."),
    ),
    "the gradient of the previous step": of_gradient(
        BEFORE.replace("{first}", "0.0 * g"), HELD, "gradient = {name: before[name] * count for name in gradient}"
    ),
    "the gradient of the previous step, starting at step 2": of_gradient(
        BEFORE.replace("{first}", "g / count"), HELD, "gradient = {name: before[name] * count for name in gradient}"
    ),
    "step number kept from the previous training": in_trainer(*kept_on_the_model("step")),
    "moments kept from the previous training": in_trainer(*kept_on_the_model("moments")),
    "moments and step number kept from the previous training": in_trainer(
        *kept_on_the_model("step"), *kept_on_the_model("moments")
    ),
}
STEP_VARIANTS = [Bug(name, "", {"numpy": list(edits["numpy"])}) for name, edits in {**FORMULAS, **AROUND}.items()]
