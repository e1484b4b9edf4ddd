"""`parity check --port` identifies the differences between third-party ports and the reference without any hints."""

from __future__ import annotations

import re
from dataclasses import replace

import others
import pytest

from reference_numpy import PRESETS
from transformer_parity.engine.findings import AGREES, DIVERGES, SKIPPED
from transformer_parity.transformer.bugs.bug import Bug, Edits, together
from transformer_parity.transformer.bugs.catalog import FORWARD
from transformer_parity.transformer.cases.for_ports import model_cases, port_config
from transformer_parity.transformer.cases.standard import preset_case
from transformer_parity.transformer.compare.comparator import compare
from transformer_parity.transformer.diagnose.diagnosis import EXACT, LIKELY, UNKNOWN
from transformer_parity.transformer.diagnose.investigate import Investigation
from transformer_parity.transformer.ports.protocol import Placements
from transformer_parity.transformer.ports.user import PluginPort
from transformer_parity.transformer.selftest.buggy_ports import injected

SETTING = Placements(("float64",))
KNOWN = {bug.name: bug for part in FORWARD.values() for bug in part}
PRE, FINAL, EPSILON = "norm_order='pre'", "final_norm=True", "layer_norm_epsilon=1e-05"
UNSCALED, SPLIT, SWISH = "scale_embedding=False", "position_layout='split'", "activation='swish'"
SEEDS = range(20)

# Bugs that no published implementation has, injected into our port.
UNHEARD_OF: dict[str, Edits] = {
    "ReLU from 0.1 on": {
        "torch": [
            (
                "feed_forward",
                "ACTIVATIONS[self.activation](self.inner_proj(x))",
                "nn.functional.threshold(self.inner_proj(x), 0.1, 0.0)",
            )
        ]
    },
    "the first head subtracts": {
        "torch": [
            ("attention", "weights @ value", "weights @ value * value.new_tensor([-1.0, 1.0, 1.0])[:, None, None]")
        ]
    },
}


def check(kind, cases=None):
    """Compare a port from ``others`` as `parity check` does, and return the findings and failure reports."""
    port = PluginPort(f"others:{kind.__name__}")
    cases, kept = model_cases(port_config(port))[:2] if cases is None else cases, {}
    findings = list(compare(cases, port, SETTING, kept=kept))
    return findings, list(Investigation(port, SETTING, port.reference).failures(findings, kept, cases))


def diagnosis_of(kind):
    """Return the diagnosis of a port that diverges."""
    findings, (report,) = check(kind)
    assert DIVERGES in {finding.verdict for finding in findings}
    return report.diagnosis


def assert_recognized(diagnosis, names):
    """Check that exactly one candidate reproduces everything and that no other candidate comes close."""
    assert diagnosis.confidence == EXACT
    assert len(diagnosis.candidates) == 1
    assert diagnosis.candidates[0] in diagnosis.sentence
    rest = re.sub(r" \(the conventions of \w+\)", "", diagnosis.candidates[0])
    for name in names:
        assert name in rest
        rest = rest.replace(name, "", 1)
    assert set(re.findall(r"\w+", rest)) <= {"and"}
    assert diagnosis.next_error > 1e4 * diagnosis.error


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")  # three heads, or pre-norm: no fast path
@pytest.mark.parametrize(
    ("kind", "conventions"),
    [
        (others.TorchGelu, [PRE, FINAL, EPSILON, "activation='gelu'"]),
        (others.MarianAsItComes, [EPSILON, SPLIT, SWISH, "position table in float32"]),
        *(
            pytest.param(*values, marks=pytest.mark.extended("third-party ports"))
            for values in (
                (others.TorchTransformer, [FINAL, EPSILON]),
                (others.TorchPreNorm, [PRE, FINAL, EPSILON]),
                (others.Marian, [EPSILON, SPLIT, SWISH]),
            )
        ),
    ],
)
@pytest.mark.only("torch")
def test_conventions_of_torch_and_hugging_face_are_identified(kind, conventions):
    assert_recognized(diagnosis_of(kind), conventions)


@pytest.mark.parametrize(
    ("kind", "conventions"),
    [
        (others.KerasHub, [EPSILON, UNSCALED]),
        (others.KerasHubPreNorm, [PRE, EPSILON, UNSCALED]),
        (others.KerasHubOddHeads, [EPSILON, UNSCALED, "scale in float32"]),
    ],
)
@pytest.mark.only("tf")
@pytest.mark.extended("third-party ports", "tf")
def test_conventions_of_keras_hub_are_identified(kind, conventions):
    assert_recognized(diagnosis_of(kind), conventions)


@pytest.mark.parametrize("kind", [others.Buggy, others.BuggyUnseen])
@pytest.mark.parametrize(
    "names",
    [
        ("scores divided by d_k", "unbiased variance"),
        *(
            pytest.param(names, marks=pytest.mark.extended("two bugs"))
            for names in (
                ("heads split as (d, h)", "exponent doubled"),
                ("cross-attention without padding mask", "sine and cosine swapped"),
            )
        ),
    ],
    ids=" and ".join,
)
@pytest.mark.only("torch")
def test_two_bugs_in_one_port_are_both_identified(kind, names, monkeypatch):
    both = Bug("", "", together(*(KNOWN[name].edits for name in names)))
    monkeypatch.setattr(kind, "package", injected(both, "torch").port.package)
    assert_recognized(diagnosis_of(kind), names)


@pytest.mark.parametrize("name", UNHEARD_OF)
@pytest.mark.only("torch")
def test_unlisted_bug_gets_no_exact_diagnosis(name, monkeypatch):
    buggy = injected(Bug("", "", UNHEARD_OF[name]), "torch")
    monkeypatch.setattr(others.Buggy, "package", buggy.port.package)
    diagnosis = diagnosis_of(others.Buggy)
    assert diagnosis.confidence in (LIKELY, UNKNOWN)
    assert diagnosis.candidates == ()
    assert diagnosis.next_error > 1e-3
    assert "exactly" not in diagnosis.sentence


def correct_ports() -> list:
    """Return correct ports, each with a case, as test parameters."""
    cases = {preset: preset_case(preset) for preset in PRESETS}
    seeds = {f"paper_base, seed {seed}": replace(cases["paper_base"], seed=seed) for seed in SEEDS}
    few = {name: case for name, case in {**cases, **seeds}.items() if name in ("paper_base", "marian")}
    chosen = {"torch": (others.Packaged, {**cases, **seeds}), "numpy": (others.Numpy, few)}
    chosen |= {"jax": (others.Jax, few), "tf": (others.Tf, few)}

    def marks(name, case):
        repeats = name in ("jax", "tf") and case is not cases["paper_base"]
        return [pytest.mark.only(name), *[pytest.mark.extended("presets")] * repeats]

    return [
        pytest.param(kind, case, marks=marks(name, case), id=f"{name}-{words}")
        for name, (kind, cases) in chosen.items()
        for words, case in cases.items()
    ]


@pytest.mark.parametrize(("kind", "case"), correct_ports())
def test_correct_ports_raise_no_false_alarm(kind, case):
    findings, reports = check(kind, [case])
    agreed = {finding.tap for finding in findings if finding.verdict == AGREES}
    assert {"encoder.output", "decoder.output", "logits", "output"} <= agreed
    assert {finding.verdict for finding in findings} == {AGREES, SKIPPED}
    assert reports == []
