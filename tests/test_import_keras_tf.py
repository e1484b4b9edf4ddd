"""Keras files: models built from keras_hub layers, which Keras saves and runs."""

from __future__ import annotations

import json
import zipfile
from functools import cache

import h5py
import numpy as np
import pytest
from conftest import assert_same_bits
from imported_models import assert_only_this_computes_it
from tiers import first_alone

import reference_numpy as ref
from transformer_parity.apps.checkpoints.formats import keras_hub as reader
from transformer_parity.apps.checkpoints.options import ReadOptions

V, W, LENGTH, D = 19, 23, 9, 8  # d_k is 4: Keras rounds 1 / sqrt(d_k) to float32
IDS = {"pad_id": 0, "bos_id": 1, "eos_id": 2}
POST = {"norm_order": "post", "activation": "relu", "layer_norm_epsilon": 1e-5}
pytestmark = pytest.mark.only("tf")


@cache
def build(**options):
    import keras
    import keras_hub

    options = {"intermediate_dim": 20, "num_heads": 2, **options}
    target_embedding = keras_hub.layers.TokenAndPositionEmbedding(W, LENGTH, D)  # created before the source embedding
    source, target = keras.Input((None,), dtype="int32"), keras.Input((None,), dtype="int32")
    x = keras_hub.layers.TokenAndPositionEmbedding(V, LENGTH, D)(source)
    for _ in range(2):
        x = keras_hub.layers.TransformerEncoder(**options)(x)
    y = target_embedding(target)
    for _ in range(2):
        y = keras_hub.layers.TransformerDecoder(**options)(y, x)
    model = keras.Model([source, target], keras.layers.Dense(W)(y))
    rng = np.random.default_rng(0)
    for variable in model.variables:
        if variable.path.endswith("gamma"):
            variable.assign(rng.uniform(0.5, 1.5, variable.shape))
        elif "seed" not in variable.path:
            variable.assign(rng.normal(0, 0.3, variable.shape))
    return model


@pytest.fixture
def ids():
    rng = np.random.default_rng(3)
    return rng.integers(3, V, (3, 7)), rng.integers(3, V, (3, 5))


def read(path, **fields):
    return reader.read(path, ReadOptions(fields={**IDS, **fields}))


OPTIONS = [{}, {"normalize_first": True, "activation": "gelu", "layer_norm_epsilon": 1e-3}]


@pytest.mark.parametrize("options", first_alone(OPTIONS, "formats"), ids=["post", "pre"])
def test_imported_logits_match_keras(port, options, ids, tmp_path):
    model = build(**options)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    imported = read(tmp_path / "model.keras")
    theirs = model.predict(list(ids), verbose=0).astype(np.float64)
    others = [{"activation": "swish"}, {"scale_embedding": True}, {"layer_norm_epsilon": 1e-2}]
    assert_only_this_computes_it(imported, ids, theirs, others, limits=(2e-6, 1e-4))  # Keras computes in float32
    assert imported.config == ref.TransformerConfig.preset(
        "keras_hub",
        **{"source_vocab_size": V, "target_vocab_size": W, "max_length": LENGTH, "d_model": D, "d_ff": 20},
        **{"num_heads": 2, "num_encoder_layers": 2, "num_decoder_layers": 2, **IDS},
        norm_order="pre" if options else "post",
        activation=options.get("activation", "relu"),
        layer_norm_epsilon=options.get("layer_norm_epsilon", 1e-5),
    )
    assert imported.notes == (
        "the first of the two embeddings is used for the source, because a functional model stores the source "
        "embedding first",
        "the file does not specify these settings, so your values are used: pad_id 0, bos_id 1, eos_id 2. The "
        "comparison of the backends does not detect a wrong value",
    )
    assert reader.recognizes(tmp_path / "model.keras")
    said = {name: getattr(imported.config, name) for name in POST}
    alone = read(tmp_path / "model.weights.h5", **said)
    assert alone.config == imported.config
    assert_same_bits(alone.weights, imported.weights)


def test_config_fields_missing_from_the_file_raise_value_error(port, tmp_path):
    build().save_weights(tmp_path / "model.weights.h5")
    build().save(tmp_path / "model.keras")
    with pytest.raises(
        ValueError, match=r"model.weights.h5 does not contain norm_order, activation, layer_norm_epsilon"
    ):
        read(tmp_path / "model.weights.h5")
    with pytest.raises(ValueError, match=r"model.keras does not contain pad_id, bos_id, eos_id"):
        reader.read(tmp_path / "model.keras", ReadOptions())


def rewritten(path, change):
    """Rewrite an archive with a changed description of its layers."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    content = json.loads(members["config.json"])
    change(content["config"]["layers"])
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**members, "config.json": json.dumps(content)}.items():
            archive.writestr(name, data)


@pytest.mark.extended("formats")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda layers: layers.append({"class_name": "Lambda", "config": {}}),
            "TransformerDecoder: got Lambda",
        ),
        (lambda layers: layers.pop(), "does not contain the layers Dense"),
        (lambda layers: layers.append({"class_name": "Dense", "config": {}}), "must contain 1 Dense layers: got 2"),
        (
            lambda layers: layers[3]["config"].update(layer_norm_epsilon=1.0),
            "must have the same layer_norm_epsilon: got",
        ),
        (
            lambda layers: [one["config"].update(activation="elu") for one in layers],
            "activation in config.json must be one of relu,",
        ),
    ],
)
def test_unsupported_models_are_rejected(port, change, message, tmp_path):
    build().save(tmp_path / "model.keras")
    rewritten(tmp_path / "model.keras", change)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "model.keras")


def test_unexpected_and_missing_weights_are_rejected(port, tmp_path):
    path = tmp_path / "model.weights.h5"
    build().save_weights(path)
    with h5py.File(path, "a") as file:
        file["layers/lstm/vars/0"] = np.zeros(3, np.float32)
    with pytest.raises(ValueError, match=r"unexpected layers/lstm/vars/0 \[3\]"):
        read(path, **POST)
    with h5py.File(path, "a") as file:
        del file["layers/lstm"], file["layers/transformer_decoder/_self_attention_layer/key_dense"]
    with pytest.raises(ValueError, match=r"missing layers/transformer_decoder/_self_attention_layer/key_dense/vars/0"):
        read(path, **POST)
    (tmp_path / "model.keras").write_bytes(b"PK\3\4")
    with pytest.raises(ValueError, match=r"is not a valid .keras file"):
        read(tmp_path / "model.keras")
