"""Each stage has a tolerance for every tensor that it compares. A new stage requires a class and a registry entry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from transformer_parity.engine.comparison import Arrays
from transformer_parity.engine.findings import AGREES, DIVERGES
from transformer_parity.engine.outputs import FAST, Outputs
from transformer_parity.engine.tensors import Tensors
from transformer_parity.engine.verdict import Coverage, Verdict
from transformer_parity.transformer.cases.case import ACTIVATIONS, DECODE, GRADIENTS, STEPS, Case
from transformer_parity.transformer.cases.standard import standard_cases
from transformer_parity.transformer.compare.comparator import compare
from transformer_parity.transformer.compare.reference import Reference
from transformer_parity.transformer.ports.package import LoadedPackage
from transformer_parity.transformer.ports.protocol import LoadedPort, Placement, Placements
from transformer_parity.transformer.ports.registry import PORTS
from transformer_parity.transformer.stages.decode import SEARCHED
from transformer_parity.transformer.stages.registry import STAGES
from transformer_parity.transformer.stages.stage import Stage, Way

CASES = {case.stage: case for case in reversed(standard_cases()) if not case.block}


def test_stages_have_names_and_an_order():
    assert list(STAGES) == [ACTIVATIONS, GRADIENTS, STEPS, DECODE]
    assert {name: stage.name for name, stage in STAGES.items()} == {name: name for name in STAGES}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("stage", STAGES)
def test_every_tensor_has_a_tolerance(stage, dtype):
    expected = Reference().expected(replace(CASES[stage], snapshots=(1, 2)), Placement(dtype))
    assert expected.tensors
    found = expected.tolerances.keys()
    assert found == expected.tensors.keys() - {*SEARCHED}
    assert all(0.0 < value < 1.0 for value in expected.tolerances.values())


class Means(Stage):
    """A stage that compares the mean logit of each sentence and exists only in this test."""

    name = "means"
    component = "means of logits"
    path = FAST
    reproduces = 1e-12

    def run(self, case: Case, loaded: LoadedPort, outputs: Outputs) -> Iterator[Way]:
        yield FAST, lambda: {"means": np.asarray(loaded.run("", case.inputs, taps=False).output).mean((1, 2))}

    def tolerances(self, truth: Arrays, baseline: Arrays, placement: Placement) -> dict[str, float]:
        return dict.fromkeys(truth, 1e-10)


class Shifted(LoadedPackage):
    """A model whose logits are all slightly too large."""

    def run_fast(self, block: str, arrays: Tensors) -> Tensors:
        return super().run_fast(block, arrays) + 1e-3


@pytest.mark.parametrize(("loaded", "verdict"), [(LoadedPackage, AGREES), (Shifted, DIVERGES)])
def test_new_stage_requires_only_a_class_and_a_registry_entry(monkeypatch, loaded, verdict):
    monkeypatch.setitem(STAGES, Means.name, Means())
    case = replace(CASES[ACTIVATIONS], stage=Means.name, component=Means.component)
    port = replace(PORTS["numpy"], loaded=loaded)
    found = list(compare([case], port, Placements(("float64",))))
    means = [finding for finding in found if finding.tap == "means"]
    assert [(one.stage, one.component, one.path, one.verdict) for one in means] == [
        ("means", "means of logits", FAST, verdict)
    ]
    planned = Counter({("means", "float64"): 1})
    assert Verdict.of(found, [Coverage("numpy", ("means",), planned=planned)]).verdict == verdict
