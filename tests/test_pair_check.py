"""``parity pair`` on a NumPy model: verdicts, places, and causes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pair_models
import pytest
from pair_models import Original

from transformer_parity.engine.findings import AGREES, DIVERGES, IMPRECISE
from transformer_parity.pair import assert_parity
from transformer_parity.pairs.assertion import _import
from transformer_parity.pairs.check import compare_pair
from transformer_parity.pairs.compare.rounding import GROSS
from transformer_parity.pairs.result import PairResult, Settings


def compared(port: str, original: str = "Original", names=None, **settings) -> PairResult:
    kinds = [getattr(pair_models, name) for name in (original, port)]
    return compare_pair(*(_import(kind()) for kind in kinds), Settings(**settings), names or {})


def test_different_algorithms_agree_in_every_stage():
    result = compared("Port")
    assert result.verdict.word == "AGREE"
    assert result.introduced == []
    assert {(one.stage, one.dtype) for one in result.findings} == {
        (stage, dtype) for stage in ("forward", "gradients") for dtype in ("float64", "float32")
    }
    assert {one.tap for one in result.findings if one.stage == "forward"} == {"norm", "gate", "up", "hidden", "logits"}
    assert result.replaced == ["norm.weight", "norm.bias", "head.bias"]
    assert max(one.ratio for one in result.findings) < 0.5


BUGS = {  # port: (place, kind)
    "Epsilon": ("norm", "epsilon"),
    "Activation": ("hidden", "activation"),
    "SwappedWeights": ("gate", "swapped weights"),
    "WithoutBias": ("logits", "offset"),
    "OverBatch": ("logits", "batch dependence"),
    "LooksAhead": ("logits", "mask"),
    "Random": ("hidden", "randomness"),
    "ForgetsLoss": ("head.bias", "factor"),
    "EpsilonFloat32": ("norm", "epsilon"),
    "Renamed": ("norm", "epsilon"),
    "IgnoresTaps": ("norm", "epsilon"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_bug_is_found_located_and_named(bug):
    place, kind = BUGS[bug]
    result = compared(bug, names=getattr(getattr(pair_models, bug), "names", None))
    assert result.verdict.word == "DIVERGE"
    assert result.introduced[0] == place
    assert kind in [named.kind for named in result.named]


@pytest.mark.parametrize("rounds", ["InFloat16", "InFloat16Float32"])
def test_rounding_is_told_from_a_different_formula(rounds):
    result = compared(rounds)
    assert result.verdict.word == "IMPRECISE"
    assert result.introduced == ["hidden"]
    assert {one.verdict for one in result.findings} == {AGREES, IMPRECISE}


def test_bug_in_float32_only_is_not_taken_for_rounding():
    result = compared("EpsilonFloat32")
    assert {one.verdict for one in result.findings} == {DIVERGES}
    assert any("compared in float64" in note for note in result.notes)


def test_float32_alone_can_agree():
    result = compared("Float32Only")
    assert result.verdict.word == "AGREE"
    assert {one.dtype for one in result.findings} == {"float32"}


def test_exception_in_the_port_is_reported_with_its_line():
    result = compared("Raises")
    assert result.verdict.word == "INCOMPLETE"
    assert "the kernel doesn't exist (pair_models.py, line" in " ".join(one.detail for one in result.findings)


def test_dtype_that_the_port_does_not_offer_is_an_error():
    result = compared("Float32Only", dtypes=("float64",))
    assert result.verdict.word == "INCOMPLETE"
    assert "doesn't run in float64" in result.findings[0].detail


def test_stage_that_is_requested_but_missing_is_incomplete():
    result = compared("Port", stages=("forward", "decode"))
    assert result.verdict.word == "INCOMPLETE"
    assert any("decode" in line for line in result.verdict.missing)


def test_stages_of_one_side_are_listed_as_not_tested():
    result = compared("WithoutGradients")
    assert result.verdict.word == "AGREE"
    assert result.not_tested == ["gradients: pair_models:WithoutGradients doesn't define gradients()"]


def test_missing_output_diverges():
    result = compared("Port", original="Router", stages=("forward",))
    assert result.verdict.word == "DIVERGE"
    details = {one.detail for one in result.findings}
    assert "the port doesn't return this tensor; it returns logits instead" in details
    assert "the original has no such tensor" in details


def test_constant_rounded_to_float32_is_imprecise_in_float64():
    result = compared("RoundedConstant", stages=("forward",))
    assert (result.verdict.word, result.introduced) == ("IMPRECISE", ["norm"])
    details = {one.detail.partition("; ")[2] for one in result.findings if one.verdict == "imprecise"}
    assert details == {
        "the error is smaller than a rounding error of float32, as if a constant were rounded to float32"
    }


def test_larger_rounding_errors_agree_if_float64_agrees():
    result = compared("OnePassVariance", stages=("forward",))
    assert result.verdict.word == "AGREE"
    worst = max(finding.ratio for finding in result.findings if finding.dtype == "float32")
    assert 0.25 < worst < 1.0  # above the tolerance of a port that isn't compared in float64


def test_rounding_errors_of_the_inputs_are_imprecise():
    result = compared("OnePassVarianceFloat32", stages=("forward",))
    assert (result.verdict.word, result.introduced[:1]) == ("IMPRECISE", ["norm"])


@pytest.mark.parametrize("dtypes", [("float64",), ("float32",)])
def test_different_formula_at_high_frequencies_is_no_rounding(dtypes):
    result = compared("WavesOfRoundedPi", original="Waves", dtypes=dtypes)
    assert (result.verdict.word, result.introduced) == ("DIVERGE", ["waves"])
    assert max(finding.error for finding in result.findings) < GROSS


def test_single_weight_that_a_port_ignores_is_found():
    assert compared("WavesWithFixedSlope", original="Waves").verdict.word == "DIVERGE"


def test_shape_of_a_single_value_is_compared():
    result = compared("ScalarTapPort", original="ScalarTap", stages=("forward",))
    assert "shape must be []: got [1]" in " ".join(finding.detail for finding in result.findings)


def test_failure_of_the_original_is_not_blamed_on_the_port():
    result = compared("Port", original="RaisesInLoad")
    assert result.verdict.word == "INCOMPLETE"
    assert [one.backend for one in result.findings] == ["pair_models:RaisesInLoad"]


def test_tensors_with_one_value_can_be_wrong():
    result = compared("WrongScalar", original="Scalar", stages=("forward",))
    assert (result.verdict.word, result.introduced) == ("DIVERGE", ["loss"])
    assert not any("the cause was not found" in note for note in result.notes)


def test_nan_of_the_original_is_noted():
    result = compared("ScalarPort", original="WithNaN", stages=("forward",))
    assert "pair_models:WithNaN computes NaN in float64: parts" in result.notes


def test_noise_of_float32_weights_is_found():
    result = compared("PreciseNorm", original="NormInFloat32", stages=("forward",))
    assert result.verdict.word == "AGREE", [one for one in result.findings if one.verdict != "agrees"]


def test_tap_with_other_axes_is_converted():
    result = compared("OtherAxes", stages=("forward",))
    assert result.verdict.word == "AGREE"
    assert "the port's axes of gate were converted by 'a c b -> a b c'" in result.notes
    assert result.names.written()["gate"] == ["gate", "a c b -> a b c"]


def test_other_axes_do_not_hide_a_bug():
    result = compared("OtherAxesOfWrongValues", stages=("forward",))
    assert (result.verdict.word, result.introduced) == ("DIVERGE", ["gate"])


def test_weight_without_effect_is_reported():
    result = compared("Port", original="WithUnusedWeight", stages=("forward",))
    assert result.verdict.word == "AGREE"
    assert "changes of the weights pooler.weight affect no result, so they aren't compared" in result.notes
    assert not any("affect no result" in note for note in compared("Port", stages=("forward",)).notes)


def test_bias_of_a_choice_has_an_effect():
    notes = compared("BiasOfChoicePort", original="BiasOfChoice", stages=("forward",)).notes
    (note,) = [note for note in notes if "affect no result" in note]
    assert "up.weight" in note
    assert "head.bias" not in note


def test_class_compared_with_itself_is_incomplete():
    result = compared("Original")
    assert result.verdict.word == "INCOMPLETE"
    assert "run the same code" in result.findings[0].detail


def test_decision_at_a_near_tie_may_differ():
    result = compared("RouterPort", original="TiedRouter")
    assert result.verdict.word == "AGREE"


def test_wrong_decision_diverges():
    result = compared("WrongRouter", original="Router")
    assert result.verdict.word == "DIVERGE"
    assert result.introduced[0] == "chosen"


def test_taps_without_a_map_are_matched_by_their_values():
    result = compared("Renamed")
    assert result.verdict.word == "DIVERGE"
    assert sorted(result.names.proposed) == ["gate", "hidden", "norm", "up"]
    assert {one.tap for one in result.findings} == {"logits", "loss", "head.weight", "head.bias"}
    assert result.introduced[0] == "norm"


def test_map_of_a_missing_tap_is_a_problem():
    result = compared("Port", names={"norm": "layer_norm"})
    assert result.verdict.word == "DIVERGE"
    assert any("the port has no such tap" in one.detail for one in result.findings)


def test_assertion_contains_the_report():
    assert_parity(Original(), pair_models.Port(), seeds=1)
    with pytest.raises(AssertionError, match=r"STARTS AT norm[\s\S]*DIVERGE with pair_models:Original"):
        assert_parity(Original(), pair_models.Epsilon(), seeds=1)


def test_assertion_uses_the_names_of_the_original(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    directory = str(Path(pair_models.__file__).parent)
    code = f"import sys\nsys.path.append({directory!r})\nimport pair_models\nnames = {{'norm': 'missing'}}\n"
    (tmp_path / "renamed_pair.py").write_text(f"{code}class Original(pair_models.Original): pass\n")
    import renamed_pair

    with pytest.raises(AssertionError, match="the port has no such tap"):
        assert_parity(renamed_pair.Original(), pair_models.Port(), seeds=1)
    assert_parity(renamed_pair.Original(), pair_models.Port(), seeds=1, names={})


def test_assertion_of_a_local_class_is_an_error():
    class Local(pair_models.Port):
        pass

    with pytest.raises(ValueError, match="top level of a module"):
        assert_parity(Original(), Local())


def test_attributes_of_an_instance_reach_its_process():
    port = pair_models.Port()
    port.epsilon = 1e-3
    with pytest.raises(AssertionError, match=r"epsilon is 0.001 instead of 1e-05"):
        assert_parity(Original(), port, seeds=1)


@pytest.mark.needs(importlib.util.find_spec("torch"), "torch")
def test_versions_include_a_framework_that_load_imports():
    versions = compared("ImportsTorch", stages=("forward",), dtypes=("float32",), seeds=1).versions
    assert versions["pair_models:ImportsTorch"].keys() - versions["pair_models:Original"].keys() == {"torch"}


def test_versions_are_reported_if_no_model_can_be_created():
    assert "numpy" in compared("RaisesInLoad", seeds=1).versions["pair_models:RaisesInLoad"]


def test_tolerances_of_a_port_follow_from_the_original():
    result = compared("Port", stages=("forward",))
    wide = {one.tolerance for one in result.findings if one.dtype == "float64"}
    narrow = {one.tolerance for one in result.findings if one.dtype == "float32"}
    assert all(1e-12 <= value < 1e-11 for value in wide)
    assert all(4 * 2.0**-23 < value < 1e-5 for value in narrow)
    assert np.isfinite([*wide, *narrow]).all()
