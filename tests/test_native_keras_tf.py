"""Keras weight files, metrics, and losses work with this model."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import assert_same_bits
from native_models import LABELS, SOURCE, TARGET, build

pytestmark = pytest.mark.only("tf")


@pytest.mark.parametrize("side", ["encoder", "decoder"])
@pytest.mark.parametrize("suffix", [".weights.h5", ".weights.json", ".keras"])
def test_weights_with_additional_layers_are_rejected(port, side, suffix, tmp_path):
    """By default, Keras ignores additional layers in a file, so the model must report them."""
    layers = f"num_{side}_layers"
    saved, model = build(port, **{layers: 3}), build(port, **{layers: 2})
    path = str(tmp_path / f"model{suffix}")
    if suffix == ".keras":
        saved.save(path)
    else:
        saved.save_weights(path, **({"max_shard_size": 1.0} if suffix == ".weights.json" else {}))
    with pytest.raises(ValueError, match="must have 3 layers"):
        model.load_weights(path)
    with pytest.warns(UserWarning, match="must have 3 layers"):
        model.load_weights(path, skip_mismatch=True)
    same = build(port, **{layers: 3})
    same.load_weights(path)
    assert_same_bits(same.export_weights(), saved.export_weights())


def test_metrics_and_losses_of_keras_can_ignore_padding(port):
    import keras

    model = build(port)
    counted = model.config.pad_id != LABELS
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=model.config.pad_id),
        weighted_metrics=["accuracy"],
    )
    found = model.evaluate([SOURCE, TARGET], LABELS, sample_weight=counted.astype(float), verbose=0, return_dict=True)
    logits = np.asarray(model(SOURCE, TARGET))
    log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    right = np.take_along_axis(log_probabilities, LABELS[..., None], -1)[..., 0]
    assert abs(found["accuracy"] - (logits.argmax(-1) == LABELS)[counted].mean()) <= 1e-6
    assert abs(found["loss"] + right[counted].mean()) <= 1e-6
