"""Projections that multiply by the kernel of a different projection."""

from __future__ import annotations

import numpy as np
import pytest

from transformer_parity.transformer.cases.case import Case, tiny
from transformer_parity.transformer.cases.inputs import token_ids
from transformer_parity.transformer.diagnose.evidence.signatures import other_kernel
from transformer_parity.transformer.diagnose.hypotheses.trials import TRUTH, observed
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.ports.registry import DEFINITION

BLOCK = "encoder.layers.0.self_attention"


def said(attention_bias, change):
    """Return the sentence about the query of a model in which weights are changed."""
    config = tiny(d_k=None, d_v=None, attention_bias=attention_bias)
    case = Case("full/padded", "full model", config, "", token_ids(config))
    weights, wanted = dict(case.load_weights()), observed(TRUTH, case)
    changed = DEFINITION.load(config, {**weights, **change(weights)}, Placement("float64"))
    alone = dict(changed.run("", case.inputs, taps=True).taps)
    padding = (case.inputs["source_ids"] == config.pad_id)[:, None, :, None]
    alone[f"{BLOCK}.query"] = np.where(padding, wanted[f"{BLOCK}.query"], alone[f"{BLOCK}.query"])
    return other_kernel(f"{BLOCK}.query", alone, wanted, weights)


@pytest.mark.parametrize(("bias", "words"), [(True, ", with the right bias"), (False, "")])
def test_the_kernel_of_another_projection_is_recognized(bias, words):
    """Query and key are exchanged, and their biases are not."""
    exchanged = {f"{BLOCK}.query_proj.kernel": f"{BLOCK}.key_proj.kernel"}
    found = said(bias, lambda weights: {name: weights[other] for name, other in exchanged.items()})
    assert found == f"the kernel is {BLOCK}.key_proj.kernel{words}"


def test_a_transposed_kernel_is_recognized():
    """A kernel is [in, out] here, and [out, in] in PyTorch."""
    name = f"{BLOCK}.query_proj.kernel"
    assert said(False, lambda weights: {name: weights[name].T}) == f"the kernel is the transpose of {name}"


def test_nothing_is_said_of_a_kernel_that_no_parameter_is():
    """A multiple of a kernel, and the kernel itself."""
    name = f"{BLOCK}.query_proj.kernel"
    assert said(False, lambda weights: {name: 2.0 * weights[name]}) == ""
    assert said(False, lambda weights: {}) == ""
