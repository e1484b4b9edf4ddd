"""What users of NumPy models do with any model works with this one."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from conftest import random_weights, tiny_config

import reference_numpy as ref

SOURCE = np.array([[5, 6, 7, 36], [8, 9, 0, 0]])
TARGET = np.array([[1, 3, 4], [1, 5, 0]])


def build(dtype="float64", **overrides):
    config = tiny_config(**{"num_encoder_layers": 1, "num_decoder_layers": 1, **overrides})
    return ref.Transformer.from_weights(config, random_weights(config), dtype)


@pytest.mark.parametrize("tie", ["target_output", "all"])
@pytest.mark.parametrize("copied", [lambda x: x, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_tied_table_is_one_array_in_two_places(tie, copied):
    model = copied(build(tie_embeddings=tie))
    assert model.output_proj.table is model.target_embedding.table
    expected, x = model(SOURCE, TARGET), np.ones((1, 1, 24))
    logits = model.output_proj(x)
    model.target_embedding.table *= 2.0
    np.testing.assert_allclose(model.output_proj(x), 2.0 * logits, rtol=1e-14)
    ref.set_weights(model, random_weights(model.config))
    np.testing.assert_array_equal(model(SOURCE, TARGET), expected)


def test_two_threads_may_ask_for_positions(monkeypatch):
    """While one thread computes few rows, another puts more of them there; each gets as many as it asked for."""
    position = ref.SinusoidalPosition(tiny_config())
    encode = ref.embedding.sinusoidal_encoding

    def overtaken(length, *conventions):
        if length == 5:
            position.vectors(9)
        elif length == 9:  # and the few rows take the place of the many
            position._known = encode(3, *conventions)
        return encode(length, *conventions)

    monkeypatch.setattr(ref.embedding, "sinusoidal_encoding", overtaken)
    np.testing.assert_array_equal(position.vectors(5), encode(5, 24))
    position._known = encode(0, 24)
    np.testing.assert_array_equal(position.vectors(9), encode(9, 24))
