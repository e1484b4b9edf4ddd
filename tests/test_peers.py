"""Third-party Transformers loaded with our weights: each computes, learns, and generates the same as the reference."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from conftest import random_weights, tiny_config

import reference_numpy as ref
from transformer_bench.peers import PEERS

FRAMEWORKS = {
    "torch.nn": "torch",
    "torch.nn compiled": "torch",
    "marian": "torch",
    "flax nnx": "jax",
    "keras hub": "tf",
    "keras hub XLA": "tf",
}
CONFIG = tiny_config("marian", num_encoder_layers=1, num_decoder_layers=1, label_smoothing=0.3)
STILL = CONFIG.replace(dropout=ref.DropoutRates(embedding=0.0, residual=0.0))
TRAINING = ref.TrainingConfig(warmup_steps=10, beta1=0.8, beta2=0.95, epsilon=1e-3)
TOKENS = 9
PAD, END = CONFIG.pad_id, CONFIG.eos_id
SOURCE = np.array([[7, 5, 21, 9, 30, 2, 0], [8, 3, 11, 0, 1, 1, 1], [36, 4, 0, 1, 1, 1, 1]])
LABELS = np.array([[4, 17, 6, 25, 33, 0], [12, 9, 0, 1, 1, 1], [2, 35, 8, 29, 0, 1]])
TARGET = np.concatenate([np.full((3, 1), CONFIG.bos_id), np.where(LABELS == END, PAD, LABELS)[:, :-1]], axis=1)


def peers(*names):
    return pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.only(FRAMEWORKS[n])) for n in names])


@cache
def weights():
    """Return weights that favor padding, which must not be generated, and produce sentences of different lengths."""
    found = random_weights(CONFIG, seed=6)
    found["output_proj.bias"][[PAD, END]] = 4.0, 3.0
    return found


def reference(config=CONFIG, dtype="float64", **changed):
    return ref.Transformer.from_weights(config, {**weights(), **changed}, dtype)


def built(name, config, **options):
    peer = copy.copy(PEERS[name])
    peer.prepare()
    peer.build(config, weights(), **options)
    return peer


@cache
def usual(name):
    return built(name, CONFIG, training=TRAINING)


def error(found, expected):
    return np.linalg.norm(found.astype(np.float64) - expected) / np.linalg.norm(expected)


def logits_of(peer):
    return peer.to_numpy(peer.forward(SOURCE, TARGET))


@peers(*(name for name in PEERS if name != "torch.nn compiled"))
def test_peer_logits_match_the_reference(name):
    found = logits_of(usual(name))
    assert found.dtype == np.float32
    assert error(found, reference()(SOURCE, TARGET)) < 2e-6


@pytest.mark.only("torch")
def test_torch_is_compiled_when_requested(monkeypatch):
    import torch

    compiled = []

    def compile_quickly(model, **options):
        compiled.append(options)
        # The default backend would compile C++ code for a minute.
        return to_compile(model, backend="eager", fullgraph=True)

    to_compile = torch.compile
    monkeypatch.setattr(torch, "compile", compile_quickly)
    peer = built("torch.nn compiled", STILL, training=TRAINING)
    assert compiled == [{}, {}]
    assert error(logits_of(peer), reference()(SOURCE, TARGET)) < 2e-6
    expected = ref.gradients(reference(STILL), SOURCE, TARGET, LABELS).loss
    assert peer.train_step(SOURCE, TARGET, LABELS) == pytest.approx(expected, rel=1e-5)
    torch._dynamo.reset()
    built("torch.nn", CONFIG)
    assert len(compiled) == 2


def test_changing_any_weight_by_one_percent_changes_the_logits():
    right = reference()(SOURCE, TARGET)
    for name, array in weights().items():
        if not name.endswith("key_proj.bias"):  # it shifts all scores of a query equally
            wrong = reference(**{name: 1.01 * array})(SOURCE, TARGET)
            assert error(wrong, right) > 2e-5, name


@pytest.mark.parametrize(
    ("name", "most"),
    [
        pytest.param("torch.nn", 1e-14, marks=pytest.mark.only("torch")),
        pytest.param("marian", 1e-7, marks=pytest.mark.only("torch")),  # its positional encodings are float32
        pytest.param("flax nnx", 1e-6, marks=pytest.mark.only("jax")),  # the softmax in jax.nn is float32
        pytest.param("keras hub", 1e-7, marks=pytest.mark.only("tf")),  # Keras's 1 / sqrt(d_k) is float32
    ],
)
def test_float64_error_is_below_the_limit_of_each_library(name, most):
    found = logits_of(built(name, CONFIG, dtype="float64"))
    assert found.dtype == np.float64
    assert error(found, reference()(SOURCE, TARGET)) < most


@peers("torch.nn", "marian", "flax nnx", "keras hub")
@pytest.mark.extended("peers")
def test_peer_training_matches_the_reference(name):
    # Keras adds epsilon to the root of the second moment before the bias correction, so epsilon must be small.
    settings = replace(TRAINING, epsilon=1e-9) if name == "keras hub" else TRAINING
    model = reference(STILL, "float32")
    trainer = ref.Trainer(model, settings)
    peer = built(name, STILL, training=settings)
    for _ in range(4):
        expected = trainer.train_step(SOURCE, TARGET, LABELS).loss
        assert peer.train_step(SOURCE, TARGET, LABELS) == pytest.approx(float(expected), rel=1e-4)
    assert error(logits_of(peer), model(SOURCE, TARGET)) < 1e-3


@peers("torch.nn", "marian", "flax nnx", "keras hub")
@pytest.mark.extended("peers")
def test_peer_dropout_is_active_only_in_training(name):
    peer = usual(name)
    before = logits_of(peer)
    if "torch" in peer.modules:  # torch draws all masks from one generator; two losses may match by chance
        import torch

        torch.manual_seed(1)
    expected = ref.gradients(reference(), SOURCE, TARGET, LABELS).loss
    losses = [peer.train_step(SOURCE, TARGET, LABELS) for _ in range(2)]
    assert abs(losses[0] - expected) > 1e-3 * expected
    after = logits_of(peer)
    assert error(after, before) > 1e-3  # the model has learned
    assert np.array_equal(after, logits_of(peer))
    usual.cache_clear()


@pytest.mark.only("torch")
def test_torch_dropout_rates_match_the_other_peers():
    import torch

    config = CONFIG.replace(dropout=ref.DropoutRates(embedding=0.2, residual=0.3))
    model = built("torch.nn", config)._model
    assert model.dropout.p == 0.2
    for layer in (*model.transformer.encoder.layers, *model.transformer.decoder.layers):
        rates = {name: module.p for name, module in layer.named_children() if isinstance(module, torch.nn.Dropout)}
        assert rates.pop("dropout") == 0.0
        assert set(rates.values()) == {0.3}
        assert layer.self_attn.dropout == 0.0


@pytest.mark.only("tf")
def test_keras_hub_dropout_rates_match_the_other_peers():
    import keras

    config = CONFIG.replace(dropout=ref.DropoutRates(embedding=0.2, residual=0.3))
    model = built("keras hub", config)._model
    assert model.dropout.rate == 0.2
    for layer in (*model.encoder, *model.decoder):
        inner = list(layer._flatten_layers(include_self=False))
        attentions = [module for module in inner if isinstance(module, keras.layers.MultiHeadAttention)]
        assert attentions
        assert all(attention.dropout == 0.0 for attention in attentions)
        assert layer._self_attention_dropout.rate == layer._feedforward_dropout.rate == 0.3


@peers("marian", "flax nnx", "keras hub", "keras hub XLA")
@pytest.mark.extended("peers")
def test_peer_greedy_search_matches_the_reference(name):
    expected = ref.greedy_search(reference(), SOURCE, TOKENS)
    lengths = (expected.ids != PAD).sum(1)
    assert lengths.tolist() == [TOKENS - 1, TOKENS, 1]
    found = usual(name).greedy(SOURCE, TOKENS)
    assert np.array_equal(found.nbest_ids, expected.nbest_ids)
    assert found.nbest_ids.dtype == expected.nbest_ids.dtype
    assert found.nbest_scores.dtype == np.float32
    assert error(found.nbest_scores, expected.nbest_scores) < 1e-5


@peers("torch.nn")
def test_torch_peer_greedy_search_is_not_implemented(name):
    with pytest.raises(NotImplementedError, match="no cache"):
        usual(name).greedy(SOURCE, TOKENS)


@peers("torch.nn", "marian", "flax nnx", "keras hub")
def test_training_without_settings_raises_value_error(name):
    with pytest.raises(ValueError, match="training requires settings"):
        built(name, CONFIG).train_step(SOURCE, TARGET, LABELS)


@peers("torch.nn", "marian", "flax nnx", "keras hub")
@pytest.mark.parametrize(
    ("changes", "training", "message"),
    [
        ({"norm_order": "pre"}, {}, r"peers support only the 'marian' preset, with norm_order='post': got 'pre'"),
        ({"d_k": 5}, {}, "d_k=8: got 5"),
        ({"dropout": {"attention": 0.1}}, {}, "peers support dropout only for embeddings and residuals"),
        ({}, {"clip_norm": 1.0}, "peers support training only with clip_norm=None: got 1.0"),
        ({}, {"accumulation_steps": 2}, "peers support training only with accumulation_steps=1: got 2"),
    ],
)
def test_unsupported_peer_settings_are_rejected(name, changes, training, message):
    with pytest.raises(ValueError, match=message):
        built(name, CONFIG.replace(**changes), training=ref.TrainingConfig(**training))


@pytest.mark.only("torch")
def test_marian_peer_requires_a_single_dropout_rate():
    with pytest.raises(ValueError, match="the same dropout rate"):
        built("marian", CONFIG.replace(dropout=ref.DropoutRates(embedding=0.2, residual=0.1)))


def test_peers_do_not_import_frameworks_before_use():
    code = "import sys, transformer_bench.peers; print(*{'torch', 'transformers', 'jax', 'flax', 'optax', "
    code += "'tensorflow', 'keras', 'keras_hub'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"
    for name, peer in PEERS.items():
        assert peer.name == name
        assert pickle.loads(pickle.dumps(peer)) == peer


@peers(*PEERS)
def test_peer_reports_version_device_and_threads(name):
    peer = PEERS[name]
    said = peer.prepare()
    assert list(said) == ["version", "device", "threads"]
    assert all(__import__(module).__version__ in said["version"] for module in peer.modules if module != "optax")
