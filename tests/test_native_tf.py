"""What users of Keras and TensorFlow do with any layer works with these."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import assert_same_bits, random_weights, tiny_config

import reference_numpy as ref

pytestmark = pytest.mark.only("tf")

SOURCE = np.array([[5, 6, 7, 36], [8, 9, 0, 0]])
TARGET = np.array([[1, 3, 4], [1, 5, 0]])


def build(port, dtype="float32", **overrides):
    config = tiny_config(**{"num_encoder_layers": 1, "num_decoder_layers": 1, **overrides})
    return port.package.Transformer.from_weights(config, random_weights(config), dtype)


@pytest.mark.parametrize("tie", ["target_output", "all"])
def test_a_tied_table_is_one_variable_in_two_places(port, tie, tmp_path):
    """Counted once, saved once, trained once."""
    import keras

    model = build(port, tie_embeddings=tie)
    assert model.output_proj.embedding is model.target_embedding
    assert model.count_params() == ref.count_parameters(model.config)
    variables = model.trainable_variables
    assert len({id(variable) for variable in variables}) == len(variables) == len(ref.parameter_shapes(model.config))
    model.save(path := tmp_path / "model.keras")
    numbers = sum(path.stat().st_size for path in tmp_path.iterdir())
    loaded = keras.models.load_model(path)
    assert loaded.output_proj.embedding is loaded.target_embedding
    assert_same_bits(loaded.export_weights(), model.export_weights())
    assert numbers < 4 * ref.count_parameters(model.config) + 150_000
