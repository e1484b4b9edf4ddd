"""Candidates that aren't injected into any port: each changes the values in a different way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from transformer_parity.transformer.bugs.catalog import (
    BACKWARD_BLOCKS,
    BACKWARD_PATHS,
    CANDIDATES,
    LOSSES,
    SEARCH_CANDIDATES,
    STEP_VARIANTS,
)
from transformer_parity.transformer.cases.case import ACTIVATIONS, DECODE, GRADIENTS, STEPS, tiny
from transformer_parity.transformer.cases.for_ports import port_cases
from transformer_parity.transformer.diagnose.candidates.candidate import Candidate, misplaced_weights
from transformer_parity.transformer.diagnose.candidates.trials import TRUTH, Trials, observed

CONFIGS = [
    tiny("paper_base", d_k=None, d_v=None),
    tiny("paper_base", d_k=None, d_v=None, final_norm=True),
    tiny("paper_base", d_k=None, d_v=None, activation="gelu", label_smoothing_kind="off_target"),
]
# names or endings of small cases, one of which has large weights
SMALL = ("/padded", "/one_token", "full/longest", "full/longest/one_sentence")
CASES = {
    stage: [
        case for config in CONFIGS for case in port_cases(config) if case.stage == stage and case.name.endswith(SMALL)
    ]
    for stage in (ACTIVATIONS, GRADIENTS)
}
# With these two configs, rounding probabilities or log-probabilities to float16 changes the result of a search.
CASES[DECODE] = port_cases(CONFIGS[1], (DECODE,))
MARIAN = port_cases(tiny("marian", d_k=None, d_v=None), (DECODE,))
CASES[DECODE] += tuple(case for case in MARIAN if case.name == "decode/many_greedy_ends")
STEP_CASES = {case.name.partition("/")[2]: case for case in port_cases(CONFIGS[0], (STEPS,))}
CASES[STEPS] = [
    replace(STEP_CASES["port_clipped"], snapshots=(2,)),
    replace(STEP_CASES["port_clipped/changing_micro_batches"], snapshots=(2,)),  # has a large epsilon
    replace(STEP_CASES["port/changing_micro_batches"], snapshots=(9,)),  # training was restarted before step 9
    replace(STEP_CASES["port/small_gradient"], snapshots=(2,)),  # the clip norm exceeds the gradient norm
]


def differs(bug, stage):
    """Return True if at least one case that runs the modified code detects the bug."""
    candidate = Candidate((bug,))
    cases = [case for case in CASES[stage] if observed(candidate, case) is not None]
    return any(Trials.of(case, observed(TRUTH, case)).differing(candidate) for case in cases)


@pytest.mark.parametrize("bug", [*CANDIDATES, *misplaced_weights(0)], ids=lambda bug: bug.name)
def test_candidates_of_the_forward_pass_differ_from_the_reference(bug):
    assert differs(bug, ACTIVATIONS)


@pytest.mark.parametrize("bug", [*BACKWARD_BLOCKS, *BACKWARD_PATHS, *LOSSES], ids=lambda bug: bug.name)
def test_candidates_of_the_backward_pass_differ_from_the_reference(bug):
    assert all(observed(Candidate((bug,)), case) is not None for case in CASES[GRADIENTS])
    assert differs(bug, GRADIENTS)


@pytest.mark.parametrize("bug", STEP_VARIANTS, ids=lambda bug: bug.name)
def test_candidates_of_a_step_differ_from_the_reference(bug):
    assert all(observed(Candidate((bug,)), case) is not None for case in CASES[STEPS])
    assert differs(bug, STEPS)


@pytest.mark.parametrize("bug", SEARCH_CANDIDATES, ids=lambda bug: bug.name)
def test_candidates_of_searches_differ_from_the_reference(bug):
    # A candidate about beam search doesn't have to change greedy search, but greedy search must run with it.
    assert all(observed(Candidate((bug,)), case) is not None for case in CASES[DECODE])
    assert differs(bug, DECODE)
