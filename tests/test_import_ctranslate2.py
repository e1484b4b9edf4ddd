"""CTranslate2 checkpoints: exports match CTranslate2's own results (if it is installed) and can be imported again."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace

import numpy as np
import pytest
from conftest import assert_same_bits, random_weights, tiny_config
from imported_models import logits_of, ours
from third_party import relative_error
from tiers import first_alone

import reference_numpy as ref
from reference_numpy.functional import log_softmax
from transformer_parity.apps.checkpoints.formats import ctranslate2
from transformer_parity.apps.checkpoints.options import ReadOptions
from transformer_parity.apps.checkpoints.padding import append_padding
from transformer_parity.apps.containers import ctranslate2 as container

CONFIGS = {
    "post": {"tie_embeddings": "all"},
    "pre": {"norm_order": "pre", "final_norm": True, "layer_norm_epsilon": 1e-3, "scale_embedding": False},
    "marian": {"preset": "marian_cpp", "start": "zeros"},
    "bart": {"preset": "bart", "pad_id": 1},
    "fairseq": {"preset": "fairseq", "decoder_num_heads": 2, "decoder_d_ff": 48, "activation": "gelu"},
    "target": {"tie_embeddings": "target_output", "activation": "gelu_tanh", "attention_bias": False},
}


def build(preset="paper_base", start="", **changes):
    config = tiny_config(preset, **{"eos_id": 3, **changes})
    weights = random_weights(config)
    if start == "zeros":
        config, weights = append_padding(config.replace(pad_id=0, bos_id=0), weights)
    return ours(config, weights)


@pytest.fixture(params=first_alone(CONFIGS, "formats"))
def model(request):
    return build(**CONFIGS[request.param])


def sentences(config):
    rng = np.random.default_rng(0)
    return rng.integers(4, 30, (8, 9)), rng.integers(4, 30, (8, 6))


def logits(model):
    return logits_of(model.config, model.weights, *sentences(model.config))


def read(path):
    return ctranslate2.read(path, ReadOptions())


def test_ctranslate2_export_round_trips(model, tmp_path):
    ctranslate2.write(model, tmp_path / "one")
    assert ctranslate2.recognizes(tmp_path / "one")
    again = read(tmp_path / "one")
    size = model.config.target_vocab_size
    assert relative_error(logits(again)[..., :size], logits(model)) <= 1e-12
    own = {name for name in model.weights if "position" not in name and name in again.weights}
    assert_same_bits(
        {name: again.weights[name] for name in own if again.weights[name].shape == model.weights[name].shape},
        {name: model.weights[name] for name in own if again.weights[name].shape == model.weights[name].shape},
    )
    assert again.config.eos_id == model.config.eos_id
    notes = ctranslate2.write(again, tmp_path / "two")
    assert notes == ctranslate2.write(model, tmp_path / "three")
    assert bool(notes) == (model.config.pad_id < model.config.target_vocab_size - 1)
    for name in ("model.bin", "source_vocabulary.json", "target_vocabulary.json", "config.json"):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes(), name


@pytest.mark.needs(importlib.util.find_spec("ctranslate2"), "CTranslate2")
def test_ctranslate2_scores_and_translations_match(model, tmp_path):
    import ctranslate2 as theirs

    ctranslate2.write(model, tmp_path)
    config = model.config
    translator = theirs.Translator(
        str(tmp_path), device="cpu", compute_type="float32", inter_threads=1, intra_threads=1
    )
    source, target = sentences(config)
    end = str(config.eos_id)
    lines = [[str(token) for token in row] for row in source]
    scored = translator.score_batch(lines, [[str(token) for token in row] for row in target])
    start = np.full((len(target), 1), config.bos_id)
    run = ref.Transformer.from_weights(config, model.weights, dtype="float64")
    computed = log_softmax(run(source, np.concatenate([start, target], axis=1)))
    wanted = np.concatenate([target, np.full((len(target), 1), config.eos_id)], axis=1)
    expected = np.take_along_axis(computed, wanted[..., None], axis=-1)[..., 0]
    found = np.array([one.log_probs for one in scored])
    assert np.abs(found - expected).max() <= 2e-5
    neighbors = {"layer_norm_epsilon": 1e-2}, {"scale_embedding": not config.scale_embedding}
    for change in neighbors:
        inputs = source, np.concatenate([start, target], axis=1)
        other = log_softmax(logits_of(config.replace(**change), model.weights, *inputs))
        assert np.abs(found - np.take_along_axis(other, wanted[..., None], axis=-1)[..., 0]).max() > 1e-3
    inside = "<pad>" in json.loads((tmp_path / "target_vocabulary.json").read_text())
    options = {"beam_size": 1, "max_decoding_length": 12, "suppress_sequences": [["<pad>"]] if inside else None}
    said = [one.hypotheses[0] for one in translator.translate_batch(lines, **options)]
    searched = ref.greedy_search(run, source, max_length=12)
    assert said == [
        [str(token) for token in row if token not in (config.eos_id, config.pad_id)] for row in searched.ids
    ]
    assert any(str(end) not in one for one in said)


def edited(path, change):
    binary = container.read(path / "model.bin")
    container.write(path / "model.bin", change(binary))


def with_variables(**changes):
    names = {name.replace("__", "/"): value for name, value in changes.items()}
    return lambda binary: binary._replace(variables={**binary.variables, **names})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b._replace(name="WhisperSpec"), "must contain a TransformerSpec: got WhisperSpec"),
        (
            with_variables(encoder__layer_0__ffn__linear_0__weight_scale=np.ones(1, np.float32)),
            "the model is quantized",
        ),
        (with_variables(decoder__alibi=np.array(1, np.int8)), "decoder/alibi is not supported: expected 0, got 1"),
        (with_variables(decoder__pre_norm=np.array(1, np.int8)), "encoder/pre_norm and decoder/pre_norm must be equal"),
        (with_variables(encoder__scale_embeddings=np.array(3, np.float32)), r"must be 1 or sqrt\(d_model\): got 3"),
        (with_variables(encoder__rotary=np.ones(2, np.float32)), r"unexpected encoder/rotary \[2\]"),
        (with_variables(encoder__num_heads=np.ones(2, np.int16)), "encoder/num_heads must be a scalar"),
        (
            with_variables(encoder__activation=np.array(4, np.int8), decoder__activation=np.array(4, np.int8)),
            "encoder/activation must be one of .*: got 4",
        ),
    ],
)
def test_unsupported_models_are_rejected(change, message, tmp_path):
    ctranslate2.write(build(), tmp_path)
    edited(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        read(tmp_path)


def test_invalid_ctranslate2_vocabularies_are_rejected(tmp_path):
    ctranslate2.write(build(), tmp_path)
    (tmp_path / "target_vocabulary.json").write_text('["a", "b"]')
    with pytest.raises(ValueError, match=r"target_vocabulary.json must be a JSON list of 37 strings"):
        read(tmp_path)
    (tmp_path / "target_vocabulary.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"target_vocabulary.json is not valid JSON"):
        read(tmp_path)
    (tmp_path / "target_vocabulary.json").unlink()
    with pytest.raises(FileNotFoundError):
        read(tmp_path)


def test_missing_position_tables_select_opennmt_sinusoids(tmp_path):
    """Without position tables, the encoding is OpenNMT-tf's, which starts at 1, with all sine channels first."""
    ctranslate2.write(build(), tmp_path)
    edited(tmp_path, lambda b: b._replace(variables={n: a for n, a in b.variables.items() if "encodings" not in n}))
    config = read(tmp_path).config
    assert (config.position_layout, config.position_timescale, config.position_offset) == ("split", "m_minus_1", 1)


@pytest.mark.needs(importlib.util.find_spec("ctranslate2"), "CTranslate2")
def test_sinusoids_match_ctranslate2(tmp_path):
    import ctranslate2 as theirs

    model = build(position_layout="split", position_timescale="m_minus_1", position_offset=1)
    ctranslate2.write(model, tmp_path)
    lines = [[str(token) for token in row] for row in sentences(model.config)[0]]

    def scores():
        translator = theirs.Translator(str(tmp_path), device="cpu", compute_type="float32")
        return np.array([one.log_probs for one in translator.score_batch(lines, [line[:5] for line in lines])])

    written = scores()
    edited(tmp_path, lambda b: b._replace(variables={n: a for n, a in b.variables.items() if "encodings" not in n}))
    assert np.abs(scores() - written).max() <= 2e-5


def test_float16_weights_are_imported_exactly(tmp_path):
    model = build(preset="marian_cpp", start="zeros")
    half = {name: array.astype(np.float16) for name, array in model.weights.items()}
    ctranslate2.write(replace(model, weights=half), tmp_path)
    again = read(tmp_path)
    assert again.config == model.config.replace(max_length=again.config.max_length)
    assert_same_bits(again.weights, half)
