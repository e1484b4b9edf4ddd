"""Relative position biases, RMSNorm, gated networks, and the scalings of T5, in all four packages."""

from __future__ import annotations

import importlib
import re

import numpy as np
import pytest
from conftest import tiny_config

import reference_numpy as ref
from reference_numpy.relative_position import relative_position_bucket
from transformer_parity.transformer.cases.inputs import hard_weights
from transformer_spec.config import LATER_FIELDS, TransformerConfig

RATES = ref.DropoutRates(embedding=0.0, residual=0.0)
FAR = np.arange(-300, 301)


def exact_bucket(distance: int, num_buckets: int, max_distance: int, bidirectional: bool) -> int:
    """The definition of the buckets in exact integers, without logarithms."""
    first = 0
    if bidirectional:
        num_buckets //= 2
        first = num_buckets * (distance > 0)
        n = abs(distance)
    else:
        n = max(-distance, 0)
    m = num_buckets // 2
    if n < m:
        return first + n
    free, step = num_buckets - m, 0
    while step < free - 1 and n**free * m ** (step + 1) >= max_distance ** (step + 1) * m**free:
        step += 1
    return first + m + step


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(
    ("num_buckets", "max_distance"), [(32, 128), (32, 64), (16, 32), (64, 256), (10, 20), (8, 12), (5, 100), (4, 3)]
)
def test_buckets_match_their_definition_in_exact_integers(num_buckets, max_distance, bidirectional):
    expected = [exact_bucket(n, num_buckets, max_distance, bidirectional) for n in FAR.tolist()]
    found = relative_position_bucket(FAR, num_buckets, max_distance, bidirectional=bidirectional)
    assert found.tolist() == expected
    assert set(range(num_buckets if not bidirectional else num_buckets // 2)) <= {*expected}


@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_match_the_function_of_transformers(bidirectional):
    torch = pytest.importorskip("torch")
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    theirs = t5.T5Attention._relative_position_bucket(torch.from_numpy(FAR), bidirectional, 32, 128)
    assert relative_position_bucket(FAR, 32, 128, bidirectional=bidirectional).tolist() == theirs.tolist()


def test_buckets_are_the_same_in_every_backend(port):
    module = importlib.import_module(f"{port.package.__name__}.relative_position")
    distance = FAR if port.name in ("numpy", "jax") else port.from_numpy(FAR)
    for bidirectional in (True, False):
        found = module.relative_position_bucket(distance, 32, 128, bidirectional=bidirectional)
        expected = relative_position_bucket(FAR, 32, 128, bidirectional=bidirectional)
        np.testing.assert_array_equal(port.to_numpy(found), expected)


@pytest.mark.parametrize("preset", ["t5", "t5_v1_1"])
def test_checkpointed_gradients_are_the_usual_gradients(port, preset):
    """With activation checkpointing, the bias is an input of every recomputed layer, and it needs a gradient."""
    config = tiny_config(preset, dropout=RATES, num_decoder_layers=2)
    weights, (source, target, labels) = hard_weights(config), batch(config)
    found = []
    for checkpointing in (False, True):
        model = port.package.Transformer.from_weights(config, weights, "float64")
        settings = ref.TrainingConfig(activation_checkpointing=checkpointing, warmup_steps=5)
        trainer = port.package.Trainer(model, settings)
        trainer.train_step(source, target, labels)
        found.append(trainer.export_state().first_moment)
    for name in ("encoder.relative_bias.table", "decoder.relative_bias.table", *found[0]):
        largest = np.abs(found[0][name]).max()
        assert largest > 0
        np.testing.assert_allclose(found[1][name], found[0][name], rtol=0, atol=1e-12 * largest, err_msg=name)


def test_recomputed_layers_use_the_dropout_of_the_stacks_outputs():
    """The backward pass of the reference must read the masks of the final dropout, also if it recomputes the layers."""
    config = tiny_config(
        "t5", dropout=dict.fromkeys(("embedding", "attention", "residual", "feed_forward", "final"), 0.3)
    )
    weights, (source, target, labels) = hard_weights(config), batch(config)
    found = []
    for checkpointing in (False, True):
        model = ref.Transformer.from_weights(config, weights, "float64")
        trainer = ref.Trainer(model, ref.TrainingConfig(activation_checkpointing=checkpointing, warmup_steps=5), seed=3)
        trainer.train_step(source, target, labels)
        found.append(trainer.export_state().first_moment)
    for name, moment in found[0].items():
        np.testing.assert_allclose(found[1][name], moment, rtol=0, atol=1e-12 * np.abs(moment).max(), err_msg=name)


def test_new_model_has_smaller_queries_if_scores_are_not_scaled(port):
    """As in T5, so that the scores of a new model are as large as with the division by sqrt(d_k)."""
    options = {"jax": {"rngs": 0}}.get(port.name, {})
    largest = []
    for scale_scores in (True, False):
        config = tiny_config("t5", d_k=16, scale_scores=scale_scores)
        weights = port.package.Transformer(config, "float32", **options).export_weights()
        largest.append(np.abs(weights["decoder.layers.0.self_attention.query_proj.kernel"]).max())
        shared = np.abs(ref.init_weights(config)["decoder.layers.0.self_attention.query_proj.kernel"]).max()
        assert largest[-1] == pytest.approx(shared, rel=0.05)
    assert largest[0] == pytest.approx(4 * largest[1], rel=0.05)


@pytest.mark.parametrize("norm_order", ["post", "pre"])
def test_weights_for_the_check_exist_for_any_norm(norm_order):
    config = tiny_config(norm_order=norm_order, layer_norm_kind="rms", feed_forward_bias=False)
    assert hard_weights(config).keys() == ref.parameter_shapes(config).keys()


def batch(config):
    rng = np.random.default_rng(3)
    source, labels = rng.integers(3, 37, (3, 9)), rng.integers(3, 37, (3, 7))
    source[1, 6:] = labels[2, 5:] = config.pad_id
    return source, np.column_stack([np.full(3, config.bos_id), labels[:, :-1]]), labels


def test_final_dropout_applies_to_the_memory_and_the_decoder_output(port):
    """In T5, dropout follows the final norm of each stack, so the loss depends on the seed."""
    rates = ref.DropoutRates(embedding=0.0, residual=0.0, final=0.5)
    config = tiny_config("t5", dropout=rates)
    assert config.dropout.final == 0.5
    weights, (source, target, labels) = hard_weights(config), batch(config)
    losses = set()
    for seed in (0, 1):
        model = port.package.Transformer.from_weights(config, weights, "float64")
        trainer = port.package.Trainer(model, ref.TrainingConfig(warmup_steps=5), seed=seed)
        losses.add(float(port.to_numpy(trainer.train_step(source, target, labels).loss)))
    assert len(losses) == 2


@pytest.mark.parametrize("shape", [(1, 3, 5), (1, 2, 5, 7), (1, 3, 5, 6)])
def test_bias_of_a_wrong_shape_raises_the_same_error_in_every_backend(port, shape):
    query, key, value = np.zeros((2, 3, 5, 4)), np.zeros((2, 3, 7, 4)), np.zeros((2, 3, 7, 6))
    arrays = [port.from_numpy(x.astype(np.float32)) for x in (query, key, value, np.zeros(shape))]
    remedy = "; a bias must have four axes: batch, heads, queries, keys" if len(shape) != 4 else ""
    message = f"bias must broadcast to (2, 3, 5, 7): got {shape}{remedy}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        port.package.scaled_dot_product_attention(*arrays[:3], bias=arrays[3])


def test_config_of_an_earlier_version_can_be_read():
    config = tiny_config()
    earlier = {name: value for name, value in config.to_dict().items() if name not in LATER_FIELDS}
    del earlier["dropout"]["final"]
    assert TransformerConfig.from_dict(earlier) == config
    del earlier["d_model"]
    with pytest.raises(ValueError, match="missing config fields: d_model"):
        TransformerConfig.from_dict(earlier)


def test_standard_model_has_no_part_of_t5():
    model = ref.Transformer(tiny_config())
    assert model.encoder.relative_bias is model.decoder.relative_bias is None
    assert not hasattr(model.encoder.layers[0].feed_forward, "gate_proj")


def test_unscaled_scores_equal_scaled_scores_of_larger_queries():
    config = tiny_config("t5", d_k=4, d_v=4)  # sqrt(4) is exact
    weights, (source, target, _) = hard_weights(config), batch(config)
    larger = {name: 2 * x if name.endswith("query_proj.kernel") else x for name, x in weights.items()}
    scaled = ref.Transformer.from_weights(config.replace(scale_scores=True), larger, "float64")
    expected = ref.Transformer.from_weights(config, weights, "float64")(source, target)
    np.testing.assert_array_equal(scaled(source, target), expected)
