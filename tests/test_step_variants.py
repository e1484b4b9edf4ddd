"""Ports with a different optimizer whose code differs from the candidate that describes it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from transformer_parity.transformer.bugs.bug import Bug
from transformer_parity.transformer.cases.case import STEPS, Case, tiny
from transformer_parity.transformer.cases.for_ports import port_cases
from transformer_parity.transformer.diagnose.candidates.candidate import Candidate, candidates
from transformer_parity.transformer.diagnose.candidates.trials import TRUTH, Trials, observed
from transformer_parity.transformer.diagnose.diagnosis import EXACT, Diagnosis, diagnose

CASES = {case.name: case for case in port_cases(tiny(d_k=None, d_v=None), (STEPS,))}
KNOWN = candidates(CASES["steps/port"].config, STEPS, forward_agrees=True)
M, V = ("m += (1.0 - settings.beta1) * (g - m)", "v += (1.0 - settings.beta2) * (g * g - v)")
M_HAT, V_HAT = "m_hat = m / correction1", "v_hat = v / correction2"
THETA = "theta -= learning_rate * m_hat"
OWN = "self.__dict__.setdefault('own', {})"


def shown(edits: Sequence[tuple[str, str, str]], case: Case) -> dict:
    """Return the losses and weights that a port with different formulas reports."""
    found = observed(Candidate((Bug("", "", {"numpy": list(edits)}),)), case)
    return {
        name: array
        for name, array in found.items()
        if not name.endswith(("gradient", "noise")) and "moment" not in name
    }


def diagnosed(edits: Sequence[tuple[str, str, str]]) -> Diagnosis:
    """Diagnose the first case that differs, using all training cases."""
    ports = {name: shown(edits, case) for name, case in CASES.items()}
    differing = [name for name in CASES if Trials.of(CASES[name], ports[name]).differing(TRUTH)]
    first = differing[0]
    others = [(CASES[name], ports[name] if name in differing else None) for name in CASES if name != first]
    return diagnose(CASES[first], ports[first], "MyPort", known=KNOWN, others=others)


@pytest.mark.parametrize(
    ("edits", "name"),
    [
        (
            [(V_HAT, f"v_hat = v / correction2; v_hat = {OWN}[name] = np.maximum({OWN}.get(name, v_hat), v_hat)")],
            "the largest corrected second moment so far, as in optax's AMSGrad",
        ),
        (
            [(V_HAT, f"top = {OWN}[name] = np.maximum({OWN}.get(name, v), v); v_hat = top.copy() / correction2")],
            "the largest second moment so far, as in torch's AMSGrad",
        ),
        (
            [
                (M_HAT, "m_hat = m / (1.0 - settings.beta1 * (1.0 - correction1))"),
                (V_HAT, "v_hat = v / (1.0 - settings.beta2 * (1.0 - correction2))"),
            ],
            "bias corrections of step n + 1",
        ),
        (
            [(M, f"if not m.any(): m[...], v[...] = g, g**2\n            {M}")],
            "moments initialized with the first gradient",
        ),
        (
            [(M_HAT, "m_hat = (settings.beta1 * m + (1 - settings.beta1) * g) / correction1")],
            "Nesterov momentum with the correction of this step",
        ),
        (
            [(M, f"was = m + 0.0\n            {M}"), (M_HAT, "m_hat = was / correction1")],
            "the first moment of the previous step",
        ),
        (
            [(THETA, f"theta *= 0.99\n            {THETA}")],
            "weight decay of 0.01 per step, regardless of the learning rate",
        ),
    ],
)
def test_variants_of_adam_are_identified(edits: Sequence[tuple[str, str]], name: str) -> None:
    found = diagnosed([("optimizer", *edit) for edit in edits])
    assert (found.confidence, found.candidates) == (EXACT, (name,))


STEP = "round(np.log(1 - correction1) / np.log(settings.beta1))"
SET_M, SET_V, SET_EPSILON = "(1.0 - settings.beta1)", "(1.0 - settings.beta2)", "settings.epsilon"
CORRECTIONS = "settings.bias_corrections(self.step + 1)"


@pytest.mark.parametrize(
    ("edits", "name"),
    [
        (
            [
                ("optimizer", SET_V, "0.0125"),
                ("training", CORRECTIONS, f"({CORRECTIONS}[0], 1 - 0.9875**(self.step + 1))"),
            ],
            "beta2 0.9875 instead of 0.98",
        ),
        (
            [("optimizer", SET_M, "0.3"), ("training", CORRECTIONS, f"(1 - 0.7**(self.step + 1), {CORRECTIONS}[1])")],
            "beta1 0.7 instead of 0.9",
        ),
        ([("optimizer", SET_EPSILON, "3e-5")], "epsilon 3e-05 instead of 1e-09"),
        ([("optimizer", SET_EPSILON, "1e-9")], "epsilon 1e-09"),
        (
            [("training", "clip_factor(norm, settings.clip_norm)", "clip_factor(norm, settings.clip_norm and 0.23)")],
            "a clip norm of 0.23, if clipping is on",
        ),
        (
            [("optimizer", THETA, f"if name != 'encoder.layers.0.feed_forward.inner_proj.kernel': {THETA}")],
            "encoder.layers.0.feed_forward.inner_proj.kernel never updated",
        ),
        (
            [
                (
                    "optimizer",
                    THETA,
                    f"learning_rate = rate / (1 + (name[-5:] == '.bias'))\n            {THETA}",
                ),
                (
                    "optimizer",
                    "correction1, correction2 = corrections\n",
                    "correction1, correction2 = corrections\n        rate = learning_rate\n",
                ),
            ],
            "steps of all biases multiplied by 0.5",
        ),
        (
            [
                (
                    "optimizer",
                    "for name, theta in self.parameters.items():",
                    f"for count, (name, theta) in enumerate(self.parameters.items(), {STEP}):",
                ),
                ("optimizer", M_HAT, "m_hat = m / (1 - settings.beta1**count)"),
                ("optimizer", V_HAT, "v_hat = v / (1 - settings.beta2**count)"),
            ],
            "a bias-correction counter that increases with every tensor and restarts in every step",
        ),
    ],
)
def test_optimizer_hyperparameters_are_measured(edits: Sequence[tuple[str, str, str]], name: str) -> None:
    """The same values are measured in every case, because each bug hard-codes a value and ignores the settings."""
    found = diagnosed(edits)
    assert found.confidence == EXACT
    assert found.candidates[0] == name
