"""Models whose results don't depend on their input are rejected, because a wrong program could agree with them."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from golden_vectors import compare, drop, edit, set_field
from golden_vectors import copy as copy  # a fixture
from golden_vectors import truth as truth  # a fixture

import reference_numpy as ref
from transformer_parity.cli.main import main
from transformer_parity.transformer.cases.case import tiny
from transformer_parity.transformer.cases.dependence import why_nothing_shows
from transformer_parity.transformer.cases.for_ports import port_cases, port_config
from transformer_parity.transformer.cases.inputs import hard_weights
from transformer_parity.transformer.cases.standard import standard_cases
from transformer_parity.transformer.golden import vectors
from transformer_parity.transformer.golden.evidence import gaps
from transformer_parity.transformer.ports.templates.other_port import MyPort
from transformer_parity.transformer.ports.user import PluginPort
from transformer_parity.transformer.stages.registry import STAGES


def models():
    """Return one case for each distinct model among the cases that run a full model."""
    cases = [case for case in [*standard_cases(), *port_cases(tiny())] if not case.block]
    return {(case.config, case.seed): case for case in cases}.values()


def test_every_case_model_depends_on_its_inputs_and_weights():
    assert len(models()) > 50
    assert [case.name for case in models() if why_nothing_shows(case.config, case.load_weights())] == []


LOGITS = "the logits do not depend on"
UNTIED, LEARNED = {"tie_embeddings": "none"}, {"position_encoding": "learned"}
BLIND = [
    ({}, ".", f"{LOGITS} the source tokens"),
    ({}, "cross_attention.output_proj", f"{LOGITS} the source tokens"),
    ({}, "^source_embedding", f"{LOGITS} the source tokens"),
    (UNTIED, "^target_embedding", f"{LOGITS} the target tokens"),
    (LEARNED, "^source_position", f"{LOGITS} the order of the source"),
    ({"d_model": 2, "num_heads": 1}, "^$", f"{LOGITS} the padding mask"),
    ({}, r"self_attention\.|feed_forward\.|query_proj|key_proj", "32 of 61 weights do not affect the loss, including"),
    ({"target_vocab_size": 2, "eos_id": 1, **UNTIED}, "^$", "target_vocab_size must be at least 3"),
]


@pytest.mark.parametrize(("overrides", "zeroed", "why"), BLIND)
def test_insensitive_model_is_detected(overrides, zeroed, why):
    config = tiny(**{"d_k": None, "d_v": None, **overrides})
    weights = {name: 0 * array if re.search(zeroed, name) else array for name, array in hard_weights(config).items()}
    assert why in why_nothing_shows(config, weights)


@pytest.mark.parametrize("overrides", [{"layer_norm_epsilon": 1.0}, {"position_offset": 1_000_000}, {"num_heads": 1}])
def test_model_with_extreme_config_values_depends_on_its_inputs(overrides):
    config = tiny(**{"d_k": None, "d_v": None, **overrides})
    assert not why_nothing_shows(config, hard_weights(config))


class Blind(MyPort):
    """A port with one channel, in which each norm returns only its bias."""

    overrides = {"d_model": 1, "num_heads": 1, "position_encoding": "learned"}


class Short(MyPort):
    """A port with fewer positions than its cases require."""

    overrides = {"position_encoding": "learned", "max_length": 4}


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("Blind", "overrides of Blind: the logits do not depend on the source tokens, so the comparison"),
        ("Short", "Short must have at least 12 positions: got 4"),
    ],
)
def test_port_with_an_insensitive_model_is_incomplete(kind, why, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    with pytest.raises(ValueError, match=why):
        port_config(PluginPort(f"test_dependence:{kind}"))
    assert main(["check", "--port", f"test_dependence:{kind}", "--failures", str(tmp_path)]) == 3
    printed = capsys.readouterr().out
    assert why in " ".join(printed.split())
    assert "INCOMPLETE" in printed
    assert main(["golden", "--for", f"test_dependence:{kind}", "--out", str(tmp_path / "truth")]) == 3


@pytest.mark.parametrize("stage", STAGES)
def test_port_that_omits_every_padded_case_of_a_stage_is_rejected(stage):
    config, port = tiny(d_k=None, d_v=None), PluginPort(f"{MyPort.__module__}:MyPort")
    of_stage = [case for case in port_cases(config) if case.stage == stage]
    port.left_out = {case.name: "later" for case in of_stage}
    assert port_config(port) == config  # a port may omit an entire stage, which is then reported as missing
    port.left_out = {case.name: "later" for case in of_stage if (case.inputs["source_ids"] == config.pad_id).any()}
    if len(port.left_out) < len(of_stage):
        with pytest.raises(ValueError, match=f"left_out of MyPort omits every case with padding in the stage {stage}"):
            port_config(port)


def test_insensitive_weights_are_rejected(tmp_path, capsys):
    config, path = tiny(), tmp_path / "weights.safetensors"
    ref.save_weights(path, config, {name: 0 * array for name, array in hard_weights(config).items()})
    assert main(["check", "--backends", "torch", "--weights", str(path)]) == 3
    assert "weights.safetensors: the logits do not depend on the source tokens" in capsys.readouterr().err


def test_cases_without_padding_are_incomplete(truth, copy, capsys):
    padded = {case.name for case in vectors.read(copy).cases if (case.inputs["source_ids"] == 0).any()}
    drop(copy, lambda name: name not in padded)
    set_field("left_out", value=[{"case": "full/*", "reason": "no masks yet"}])(copy)
    assert compare(truth, copy, "--stage", "activations") == 3
    printed = " ".join(capsys.readouterr().out.split())
    assert "MISSING numpy: activations: source_ids have no padding in any case that A and B both contain" in printed


def test_written_golden_vectors_have_no_coverage_gaps(truth):
    directory = vectors.read(truth)
    assert list(gaps(directory, directory, directory.cases)) == []


def test_gaps_in_the_inputs_are_reported(truth):
    directory = vectors.read(truth)
    changes = {
        "are equal in every case": lambda ids: np.repeat(ids[1:2] if len(ids) > 1 else ids, len(ids), axis=0),
        "contain only one distinct token": lambda ids: np.where(ids == 0, 0, 5),
        "have no padding": lambda ids: np.where(ids == 0, 5, ids),
    }
    for words, change in changes.items():
        cases = [replace_inputs(case, change) for case in directory.cases]
        found = [why for why in gaps(directory, directory, cases) if words in why]
        assert {why.partition(":")[0] for why in found} == {*STAGES}


def replace_inputs(case, change):
    return replace(case, inputs={name: change(ids) for name, ids in case.inputs.items()})


def test_results_missing_from_b_are_reported(truth, copy, capsys):
    case = {"case": "gradients/*", "tensors": ["of *", "at *"], "reason": "loss only"}
    for name in (one.name for one in vectors.read(copy).cases if one.stage == "gradients"):
        edit(copy, name, "float64", lambda tensors: [tensors.pop(tap) for tap in list(tensors) if tap != "loss"])
    set_field("left_out", value=[case])(copy)
    assert compare(truth, copy, "--stage", "gradients") == 3
    printed = " ".join(capsys.readouterr().out.split())
    assert "MISSING numpy: gradients: B omits 'of *' in more than half of the cases of this stage" in printed


def test_declared_omission_of_one_gradient_agrees(truth, copy, capsys):
    table = "of source_embedding.table"
    edit(copy, "gradients/padded", "float64", lambda tensors: tensors.pop(table))
    assert compare(truth, copy, "--stage", "gradients") == 1
    assert f"missing {table}" in capsys.readouterr().out
    set_field("left_out", value=[{"case": "gradients/*", "tensors": [table], "reason": "frozen"}])(copy)
    assert compare(truth, copy, "--stage", "gradients") == 0
