"""Bugs that appear only after a different call, for long outputs, or for small gradients are found and explained."""

from __future__ import annotations

import pytest

from transformer_parity.engine.findings import AGREES, SKIPPED
from transformer_parity.transformer.cases.for_ports import port_cases, port_config
from transformer_parity.transformer.compare.comparator import compare
from transformer_parity.transformer.diagnose.investigate import Investigation
from transformer_parity.transformer.ports.protocol import Placements
from transformer_parity.transformer.ports.user import PluginPort

SETTING = Placements(("float64",))


@pytest.mark.parametrize(
    ("kind", "stage", "failing", "said"),
    [
        (
            "MaskByShape",
            "activations",
            "full/other_padding",
            "agrees on a newly loaded model, but differs",
        ),
        ("ForwardOfOldWeights", "steps", "steps/port", ""),
        ("ClipsBelowTheNorm", "steps", "steps/port/one_sentence", ""),
        ("TwentyTokens", "decode", "decode/port_greedy/longest", ""),
    ],
)
def test_port_that_is_wrong_only_in_some_calls_diverges(kind, stage, failing, said):
    port, kept = PluginPort(f"stateful_ports:{kind}"), {}
    cases = port_cases(port_config(port), [stage])
    findings = list(compare(cases, port, SETTING, kept=kept))
    wrong = [finding for finding in findings if finding.verdict not in (AGREES, SKIPPED)]
    assert failing in {finding.case for finding in wrong}
    assert "full/padded" not in {finding.case for finding in wrong}
    if said:
        reports = list(Investigation(port, SETTING, port.reference).failures(findings, kept, cases))
        assert said in reports[0].diagnosis.sentence
