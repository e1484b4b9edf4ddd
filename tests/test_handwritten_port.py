"""The worked example of a port: a torch model with fused and tied weights, whose taps use hooks."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from transformer_parity.engine.findings import AGREES, SKIPPED
from transformer_parity.transformer.cases.for_ports import port_cases, port_config
from transformer_parity.transformer.compare.comparator import compare
from transformer_parity.transformer.diagnose.investigate import Investigation
from transformer_parity.transformer.ports.protocol import Placements
from transformer_parity.transformer.ports.user import PluginPort

EXAMPLE = Path(__file__).parent.parent / "docs" / "examples" / "handwritten_port.py"


@pytest.fixture
def module(monkeypatch):
    spec = importlib.util.spec_from_file_location("handwritten_port", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "handwritten_port", module)
    spec.loader.exec_module(module)
    return module


def compared(dtypes):
    port, setting, kept = PluginPort("handwritten_port:MyPort"), Placements(dtypes), {}
    cases = port_cases(port_config(port), ("activations",))
    findings = list(compare(cases, port, setting, kept=kept))
    return findings, Investigation(port, setting, port.reference).failures(findings, kept, cases)


@pytest.mark.only("torch")
def test_example_agrees_with_the_reference(module):
    findings, _ = compared(("float64", "float32"))
    assert {finding.verdict for finding in findings} == {AGREES, SKIPPED}
    shown = {finding.tap for finding in findings if finding.verdict == AGREES}
    assert {"encoder.layers.1.self_attention.output", "decoder.layers.0.cross_attention_norm.output"} <= shown


@pytest.mark.only("torch")
def test_hooks_locate_the_wrong_block(module, monkeypatch):
    usual = module.Attention.forward

    def doubled(self, x, memory, mask):
        return usual(self, x, memory, mask) * (1 + self.cross)

    monkeypatch.setattr(module.Attention, "forward", doubled)
    _, reports = compared(("float64",))
    (report,) = reports
    assert report.blame.replayed == "port"
    assert report.blame.introduced == [f"decoder.layers.{i}.cross_attention.output" for i in range(2)]
