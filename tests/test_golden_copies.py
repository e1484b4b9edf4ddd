"""Copied golden vectors: a tensor with the same bits as A's wasn't computed, unless its values are exact by nature."""

import json
from dataclasses import replace

import numpy as np
import pytest
from golden_vectors import GREEDY, PADDED, compare, edit, findings_of, moved
from golden_vectors import copy as copy  # a fixture
from golden_vectors import truth as truth  # a fixture
from tiers import first_alone

from transformer_parity.engine.findings import SKIPPED
from transformer_parity.transformer.cases.case import tiny
from transformer_parity.transformer.golden import vectors
from transformer_parity.transformer.golden.copies import find_copies
from transformer_parity.transformer.golden.produce import compute, golden_cases
from transformer_parity.transformer.ports.registry import DEFINITION, PORTS

OUTPUT, LOSS = "output", "step 1 loss"


def with_tensors(directory, change):
    """Return golden vectors in which ``change(name, array)`` replaces each floating-point tensor."""
    found = {
        place: {name: change(name, x) if x.dtype.kind == "f" else x for name, x in tensors.items()}
        for place, tensors in directory._computed.items()
    }
    return replace(directory, _computed=found)


def merged(truth, is_own):
    """Return ``{**truth, **mine}``: A's tensors, except for the names that are the program's own."""
    return with_tensors(truth, lambda name, x: moved(x) if is_own(name) else x)


def test_copies_with_one_computed_tensor_per_case_are_incomplete(truth, copy, tmp_path, capsys):
    original = vectors.read(truth)
    for case in original.cases:
        for dtype in case.dtypes:
            theirs = original.tensors(case, dtype)
            own = next(name for name in ("source_embedding.output", "loss", LOSS, "scores") if name in theirs)
            edit(copy, case.name, dtype, lambda mine, theirs=theirs, own=own: mine.update({**theirs, own: mine[own]}))
    result = tmp_path / "result.json"
    assert compare(truth, copy, "--json", result) == 3
    printed = " ".join(capsys.readouterr().out.split())
    assert "tensors in 36 outputs have the same bytes as in A, such as float64 full/padded" in printed
    assert "compute them, or declare them in left_out. If your program really computes the same bytes" in printed
    assert json.loads(result.read_text())["result"]["comparisons"] <= 80


@pytest.mark.parametrize("nth", first_alone(range(20), "golden vectors"))
def test_copied_tensors_are_detected_next_to_a_computed_tensor(truth, nth):
    truth = vectors.read(truth)
    for case in truth.cases:
        for own in list(truth.tensors(case, "float64"))[nth::20]:
            if case.stage == "decode" and own == "scores":
                continue  # the only other tensor is tokens, which matches in every correct program
            mine = merged(truth, lambda name, own=own: name == own)
            found = find_copies(truth, mine, [case])[case.name, "float64"]
            assert {*found} - {own} == truth.tensors(case, "float64").keys() - {own}


def test_copies_are_detected_if_half_of_the_tensors_are_copied(truth):
    truth = vectors.read(truth)
    for case in (case for case in truth.cases if case.stage != "decode"):
        copies = list(truth.tensors(case, "float64"))[::2]
        found = find_copies(truth, merged(truth, lambda name, copies=copies: name not in copies), [case])
        assert set(found[case.name, "float64"]) >= set(copies)


def test_doubly_transposed_copy_is_detected(truth, copy):
    own = vectors.read(truth)
    edit(copy, PADDED, "float64", lambda mine: mine.update({OUTPUT: np.ascontiguousarray(held(own)[OUTPUT].T).T}))
    assert set(find_copies(own, vectors.read(copy), own.cases)) == {(PADDED, "float64")}


def held(directory):
    return directory.tensors(next(case for case in directory.cases if case.name == PADDED), "float64")


def test_copy_with_a_few_changed_numbers_is_detected(truth, copy):
    own = vectors.read(truth)
    copied = held(own)[OUTPUT].copy()
    copied[0, 0] *= 1.0 + 1e-14
    edit(copy, PADDED, "float64", lambda mine: mine.update({OUTPUT: copied}))
    assert find_copies(own, vectors.read(copy), own.cases) == {(PADDED, "float64"): [OUTPUT]}


def test_copied_scores_of_all_searches_are_detected(truth, copy):
    own = vectors.read(truth)
    for case in (case for case in own.cases if case.stage == "decode"):
        edit(copy, case.name, "float64", lambda mine, case=case: mine.update(own.tensors(case, "float64")))
    found = find_copies(own, vectors.read(copy), own.cases)
    assert found[GREEDY, "float64"] == ["tokens", "scores"]


def test_only_tensors_that_are_not_copies_are_compared(truth, copy):
    own = vectors.read(truth)
    edit(copy, PADDED, "float64", lambda mine: mine.update({OUTPUT: held(own)[OUTPUT], "logits": 2 * mine["logits"]}))
    findings = [one for one in findings_of(truth, copy) if (one.case, one.dtype) == (PADDED, "float64")]
    assert OUTPUT not in {finding.tap for finding in findings}
    assert "1 tensors: the bytes are equal to A's, so they were copied, not computed" in {
        finding.detail for finding in findings if finding.verdict == SKIPPED
    }
    assert [finding.tap for finding in findings if finding.error > 1e-3] == ["logits"]


@pytest.mark.parametrize("noise", [moved, lambda x: x * (1.0 + 1e-14)], ids=["one ulp", "1e-14"])
def test_copies_with_noise_are_not_detected(truth, noise):
    """docs/reference/verdict-checks.md documents this limit."""
    own = vectors.read(truth)
    noisy = find_copies(own, with_tensors(own, lambda name, x: noise(x)), own.cases)
    assert not [place for place in noisy if place[1] == "float64"]


PRODUCERS = [
    pytest.param(name, marks=pytest.mark.extended("golden vectors") if name == "numpy" else pytest.mark.only(name))
    for name in PORTS
]
OTHERS = [pytest.param(name, marks=pytest.mark.extended("golden vectors")) for name in ("bart", "mbart", "annotated")]


@pytest.mark.extended("golden vectors", "jax", "tf")  # these compile every case
@pytest.mark.parametrize("preset", ["paper_base", *OTHERS])
@pytest.mark.parametrize("name", PRODUCERS)
def test_independently_computed_tensors_are_not_flagged_as_copies(name, preset):
    """The presets differ in what they compute before any rounding, for example a norm of the embeddings."""
    cases = golden_cases(tiny(preset, d_k=None, d_v=None))
    sides = []
    for port in (DEFINITION, PORTS[name]):
        computed, _ = compute(port, cases, vectors.DTYPES, "cpu", lambda doing: None)
        tensors = {(case.name, dtype): found for case, by_dtype in computed for dtype, found in by_dtype.items()}
        weights = cases[0].load_weights()
        sides.append(
            vectors.GoldenDirectory(None, port.name, cases[0].config, weights, cases, vectors.DTYPES, (), tensors)
        )
    assert not find_copies(*sides, cases)
    assert find_copies(sides[1], sides[1], cases).keys() == sides[1]._computed.keys()
