"""Tables of names map a format to canonical weights and back. Error messages use the format's own names."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import random_weights, tiny_config

import reference_numpy as ref
from transformer_parity.apps.checkpoints.formats.huggingface import TABLE, table_of
from transformer_parity.apps.checkpoints.imported import Origin
from transformer_parity.apps.checkpoints.name_mapping import AS_IS, ROW, TRANSPOSED, Row, give, same, spelled_out, take

SHARED = Row("{side}_position.table", "positions")  # one tensor in the file, two canonical weights


def case(preset="bart", **changes):
    config = tiny_config(preset, tie_embeddings="none", **changes)
    return config, random_weights(config), table_of("bart")


def test_weights_round_trip_through_a_table():
    config, weights, table = case()
    tensors = give(table, weights, config)
    assert tensors["lm_head.weight"].shape == (config.target_vocab_size, config.d_model)
    assert tensors["final_logits_bias"].shape == (1, config.target_vocab_size)
    assert all(array.flags.c_contiguous for array in tensors.values())
    back = take(table, tensors, config)
    assert list(back) == list(ref.parameter_shapes(config))
    assert all(same(weights[name], array) for name, array in back.items())


def test_layers_are_counted_from_0_or_from_1():
    config, _, _ = case()
    rows = (Row("{stack}.layers.{i}.feed_forward_norm.scale", "{stack}_l{n}_{i}_scale", ROW),)
    named = spelled_out(rows, config)
    last = config.num_decoder_layers - 1
    assert named[f"decoder.layers.{last}.feed_forward_norm.scale"].foreign == f"decoder_l{last + 1}_{last}_scale"
    assert len(named) == config.num_encoder_layers + config.num_decoder_layers


def test_name_in_two_rows_of_a_table_raises_an_error():
    config, _, table = case()
    with pytest.raises(ValueError, match=r"output_proj\.bias is mapped to two tensors, final_logits_bias and bias"):
        spelled_out((*table, Row("output_proj.bias", "bias")), config)


def test_tensor_without_a_name_in_the_format_raises_value_error():
    config, weights, _ = case()
    with pytest.raises(ValueError, match=r"this format cannot store output_proj\.kernel"):
        give(TABLE, weights, config)
    with pytest.raises(ValueError, match=r"no tensor name is specified for output_proj\.kernel"):
        take(TABLE, give(table_of("bart"), weights, config), config)


def test_tables_shared_by_the_format_must_be_equal():
    config, weights, table = case()
    table = (*(row for row in table if row.name != SHARED.name), SHARED)
    with pytest.raises(ValueError, match=r"source_position\.table and target_position\.table must be equal because"):
        give(table, weights, config)
    weights["target_position.table"] = weights["source_position.table"].copy()
    tensors = give(table, weights, config)
    assert same(take(table, tensors, config)["target_position.table"], tensors["positions"])


def test_tensor_mismatches_are_reported_with_format_names():
    config, weights, table = case()
    tensors = give(table, weights, config)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].T
    tensors["final_logits_bias"] = tensors["final_logits_bias"].astype(np.int32)
    tensors["optimizer.step"] = np.zeros(3)
    del tensors["model.encoder.embed_tokens.weight"]
    with pytest.raises(ValueError, match="the tensors do not match the config") as error:
        take(table, tensors, config, ignored=("scheduler.*",))
    d_model, source, target = config.d_model, config.source_vocab_size, config.target_vocab_size
    assert f"missing model.encoder.embed_tokens.weight [{source}, {d_model}]" in str(error.value)
    assert f"expected shape [{target}, {d_model}] for lm_head.weight, got [{d_model}, {target}]" in str(error.value)
    assert "expected float64 or float32 or float16 or bfloat16 for final_logits_bias, got int32" in str(error.value)
    assert "unexpected optimizer.step [3]" in str(error.value)


def test_ignored_tensors_are_not_imported_as_weights():
    config, weights, table = case()
    tensors = give(table, weights, config) | {"optimizer.step": np.zeros(3)}
    assert "optimizer.step" not in take(table, tensors, config, ignored=("optimizer.*",))


@pytest.mark.parametrize("form", [AS_IS, TRANSPOSED])
def test_same_compares_dtype_shape_and_bytes(form):
    one = np.array([[0.0, np.nan], [1.0, 2.0]], np.float32)
    one = one.T if form == TRANSPOSED else one
    assert same(one, one.copy())
    assert not same(one, -one)  # zeros have a sign
    assert not same(one, one.astype(np.float64))
    assert not same(one, one[:1])


def test_origin_round_trips_through_a_dict():
    origin = Origin(format="hf", family="marian", preset="marian", files={"a": "b"}, license=None)
    assert Origin.from_dict(origin.to_dict()) == origin
    with pytest.raises(ValueError, match="missing fields of an origin: license"):
        Origin.from_dict({name: value for name, value in origin.to_dict().items() if name != "license"})
    with pytest.raises(TypeError, match="must be strings"):
        Origin.from_dict(origin.to_dict() | {"files": ["a"]})
    with pytest.raises(TypeError, match="must be a mapping of field names to values: got list"):
        Origin.from_dict([])
