"""The conditions under which a port differs, derived from the cases that differ and the cases that agree."""

from __future__ import annotations

import pytest

from transformer_parity.transformer.cases.case import DECODE, GRADIENTS, STEPS, tiny
from transformer_parity.transformer.cases.for_ports import port_cases
from transformer_parity.transformer.diagnose.evidence.circumstances import circumstances

CASES = port_cases(tiny(d_k=None, d_v=None))


def said(stage, differs):
    """Return the statement about a stage in which some cases differ and others agree."""
    cases = [case for case in CASES if case.stage == stage]
    differ = [case for case in cases if differs(case)]
    assert 0 < len(differ) < len(cases)
    return circumstances(differ, [case for case in cases if not differs(case)])


@pytest.mark.parametrize(
    ("stage", "differs", "words"),
    [
        (DECODE, lambda case: (case.search.beam_size or 0) > 3, "a beam_size of at least 4"),
        (DECODE, lambda case: (case.search.beam_size or 0) > 2, "a beam_size of at least 3"),
        (DECODE, lambda case: case.search.beam_size is None, "no beam"),
        (DECODE, lambda case: case.search.max_length > 12, "a max_length of at least 32"),
        (GRADIENTS, lambda case: len(case.inputs["labels"]) == 1, "a batch size of at most 1"),
        (STEPS, lambda case: case.training.cooldown_steps, "a cooldown"),
        (STEPS, lambda case: not case.training.cooldown_steps, "no cooldown"),
        (STEPS, lambda case: case.training.clip_norm == 0.45, "a clip_norm of at most 0.45"),
        (
            DECODE,
            lambda case: case.search.beam_size and case.search.length_penalty == 0,
            "a length_penalty of at most 0",
        ),
    ],
)
def test_condition_met_only_by_differing_cases_is_stated(stage, differs, words):
    """One condition, or a combination of two, distinguishes the differing cases from the others."""
    assert said(stage, differs).startswith(f"exactly the cases with {words}")


def test_single_differing_case_is_named_with_at_most_one_condition():
    """A combination of two conditions could describe any single case, so it would be meaningless."""
    found = said(STEPS, lambda case: case.restart)
    assert (
        found == "steps/port/changing_micro_batches is the only case that differs, and the only case with a restart of "
        "training"
    )
    assert said(DECODE, lambda case: case.name == "decode/port_beam") == ""


def test_condition_is_stated_with_the_number_of_agreeing_cases():
    """Some cases meet the condition but agree by chance."""
    by_chance = "decode/many_beam", "decode/port_beam/longest", "decode/port_beam/one_token_each"
    found = said(DECODE, lambda case: case.search.beam_size and case.name not in by_chance)
    assert found == "only cases with a beam differ; 3 other such cases agree"


def test_uninformative_conditions_are_omitted():
    """No condition is stated if every case differs, if no case differs, or if too few cases agree."""
    cases = [case for case in CASES if case.stage == STEPS]
    assert circumstances(cases, []) == ""
    assert circumstances([], cases) == ""
    assert circumstances(cases[:1], cases[1:3]) == ""  # two agreeing cases are too little evidence
