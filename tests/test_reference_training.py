"""The reference's trainer: Adam, accumulation, clipping, dropout, checkpointing, and resumption."""

from __future__ import annotations

import tracemalloc
from functools import partial

import numpy as np
import pytest
import tiers
from conftest import assert_same_bits, random_weights, tiny_config
from finite_differences import RATES, tiny_batch, tiny_model

import reference_numpy as ref
from reference_numpy import backward_trace


def test_gradient_is_the_mean_over_tokens():
    model = tiny_model()
    batch = tiny_batch(model.config)
    once, twice = ref.gradients(model, *batch), ref.gradients(model, *(np.concatenate([ids, ids]) for ids in batch))
    assert once.loss == pytest.approx(twice.loss, rel=1e-14)
    for name, gradient in once.parameters.items():
        np.testing.assert_allclose(twice.parameters[name], gradient, rtol=1e-11, atol=1e-14)


NO_DROPOUT = ref.DropoutRates(embedding=0.0, residual=0.0)


def trained(settings, steps, seed=0, **overrides):
    """Return a trainer after the given number of steps, each on a different batch, and the results of the steps."""
    trainer = ref.Trainer(tiny_model(**overrides), settings, seed)
    results = [trainer.train_step(*tiny_batch(trainer.model.config, seed=step)) for step in range(steps)]
    return trainer, results


@pytest.mark.parametrize("fast", [False, True])
def test_training_step_keeps_the_dtype_of_the_model(fast):
    """A float32 scalar times a NumPy integer would be a float64 value."""
    config = tiny_model().config
    model = ref.Transformer.from_weights(config, random_weights(config), "float32", fast=fast)
    assert ref.Trainer(model, ref.TrainingConfig()).train_step(*tiny_batch(config)).loss.dtype == np.float32


def test_adam_matches_algorithm_1_of_its_paper():
    settings = ref.TrainingConfig(warmup_steps=3, learning_rate_factor=0.1, beta1=0.8, beta2=0.95, epsilon=1e-5)
    trainer, results = trained(settings, 5, dropout=NO_DROPOUT)
    model = tiny_model(dropout=NO_DROPOUT)
    theta = model.export_weights()
    m, v = ({name: np.zeros_like(array) for name, array in theta.items()} for _ in range(2))
    for t in range(1, 6):
        model = ref.Transformer.from_weights(model.config, theta, "float64")
        result = ref.gradients(model, *tiny_batch(model.config, seed=t - 1))
        alpha = 0.1 * 24**-0.5 * min(t**-0.5, t * 3**-1.5)
        for name, g in result.parameters.items():
            m[name] = 0.8 * m[name] + (1 - 0.8) * g
            v[name] = 0.95 * v[name] + (1 - 0.95) * g**2
            m_hat, v_hat = m[name] / (1 - 0.8**t), v[name] / (1 - 0.95**t)
            theta[name] = theta[name] - alpha * m_hat / (np.sqrt(v_hat) + 1e-5)
        norm = np.sqrt(sum((g**2).sum() for g in result.parameters.values()))
        assert results[t - 1].loss == pytest.approx(result.loss, rel=1e-12)
        assert results[t - 1].gradient_norm == pytest.approx(norm, rel=1e-12)
    state = trainer.export_state()
    assert (state.step, state.seed) == (5, 0)
    weights = trainer.model.export_weights()
    for name in theta:
        np.testing.assert_allclose(weights[name], theta[name], rtol=1e-11, atol=1e-13)
        np.testing.assert_allclose(state.first_moment[name], m[name], rtol=1e-11, atol=1e-13)
        np.testing.assert_allclose(state.second_moment[name], v[name], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_accumulation_gives_the_same_result_as_one_batch(micro_batches):
    (one, expected), (several, found) = (
        trained(ref.TrainingConfig(accumulation_steps=k), 3, dropout=NO_DROPOUT) for k in (1, micro_batches)
    )
    for ours, theirs in zip(expected, found, strict=True):
        assert ours.tokens == theirs.tokens
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-13)
        assert ours.gradient_norm == pytest.approx(theirs.gradient_norm, rel=1e-12)
    weights = several.model.export_weights()
    for name, array in one.model.export_weights().items():
        np.testing.assert_allclose(weights[name], array, rtol=1e-12, atol=1e-12)


def test_train_step_leaves_earlier_gradients_unchanged():
    trainer, _ = trained(ref.TrainingConfig(), 1, dropout=NO_DROPOUT)
    batch, kept, update = tiny_batch(trainer.model.config, seed=1), [], trainer.optimizer.update
    trainer.optimizer.update = lambda gradient, *numbers: (kept.append(gradient), update(gradient, *numbers))
    trainer.train_step(*batch)
    copies = {name: array.copy() for name, array in kept[0].items()}
    trainer.train_step(*batch)
    assert_same_bits(kept[0], copies)


def test_clipping_scales_the_gradient_to_the_clip_norm():
    (free, (result,)), (clipped, (same,)), (loose, _) = (
        trained(ref.TrainingConfig(clip_norm=norm), 1, dropout=NO_DROPOUT) for norm in (None, 0.1, 1e3)
    )
    assert result.gradient_norm == same.gradient_norm > 0.1
    assert_same_bits(free.optimizer.first_moment, loose.optimizer.first_moment)
    for name, moment in free.optimizer.first_moment.items():
        np.testing.assert_allclose(
            clipped.optimizer.first_moment[name], moment * 0.1 / result.gradient_norm, rtol=1e-12
        )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_resumed_run_is_bitwise_identical(dtype):
    settings = ref.TrainingConfig(warmup_steps=2, clip_norm=1.0, accumulation_steps=2)
    before = np.random.get_state()[1].copy()
    whole, _ = trained(settings, 4, seed=7, dropout=RATES, dtype=dtype)
    half, _ = trained(settings, 2, seed=7, dropout=RATES, dtype=dtype)
    state, weights = half.export_state(), half.model.export_weights()
    half.train_step(*tiny_batch(half.model.config, seed=9))  # must not change the exported state
    model = ref.Transformer.from_weights(half.model.config, weights, dtype)
    resumed = ref.Trainer(model, settings)
    resumed.load_state(state)
    for step in (2, 3):
        resumed.train_step(*tiny_batch(model.config, seed=step))
    assert (resumed.step, resumed.seed) == (4, 7)
    for ours, theirs in (
        (whole.model.export_weights(), resumed.model.export_weights()),
        (whole.export_state().first_moment, resumed.export_state().first_moment),
        (whole.export_state().second_moment, resumed.export_state().second_moment),
    ):
        assert_same_bits(ours, theirs)
        assert {array.dtype.name for array in ours.values()} == {dtype}
    np.testing.assert_array_equal(np.random.get_state()[1], before)  # the global random state is unchanged


def peak_of(call):
    """Return the result of a call and its peak memory use in bytes."""
    tracemalloc.start()
    try:
        result = call()
        return result, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("overrides", [{}, {"norm_order": "pre", "final_norm": True, "activation": "swish"}])
@pytest.mark.parametrize("rates", [RATES, ref.DropoutRates(embedding=0.0, attention=0.4, residual=0.0), NO_DROPOUT])
def test_activation_checkpointing_changes_no_bit(overrides, rates):
    def run(checkpointing):
        settings = ref.TrainingConfig(
            warmup_steps=2, accumulation_steps=2, clip_norm=1.0, activation_checkpointing=checkpointing
        )
        return trained(settings, 3, seed=3, dropout=rates, dtype="float32", **overrides)

    (plain, expected), (sparing, found) = run(False), run(True)
    assert found == expected
    assert_same_bits(sparing.model.export_weights(), plain.model.export_weights())
    for moment in ("first_moment", "second_moment"):
        assert_same_bits(getattr(sparing.export_state(), moment), getattr(plain.export_state(), moment))


def test_activation_checkpointing_saves_memory():
    def peak(depth, checkpointing):
        model = tiny_model(dropout=RATES, dtype="float32", num_encoder_layers=depth, num_decoder_layers=depth)
        trainer = ref.Trainer(model, ref.TrainingConfig(activation_checkpointing=checkpointing))
        batch = (np.tile(ids, (2, 8)) for ids in tiny_batch(model.config))
        _, found = peak_of(partial(trainer.train_step, *batch))
        return found - 8 * sum(array.nbytes for array in model.export_weights().values()) // 8  # size of the gradient

    assert peak(6, checkpointing=True) < 0.4 * peak(6, checkpointing=False)
    added, saved = (peak(6, checkpointing) - peak(3, checkpointing) for checkpointing in (False, True))
    assert saved < 0.2 * added  # only the input of each layer is stored


def test_training_does_not_store_attention_scores():
    model = tiny_model(dropout=RATES)
    source, target, _ = tiny_batch(model.config)
    everything, kept = ref.Recorder(), backward_trace.Activations()
    for tap in (everything, kept):
        model(source, target, tap=tap, rng=np.random.default_rng(0))
    left_out = [name for name in everything if name not in kept]
    assert left_out == [name for name in everything if name == "logits" or name.endswith(".scores")]


def test_dropout_depends_on_seed_and_step():
    def first_loss(seed, step):
        trainer = ref.Trainer(tiny_model(dropout=RATES), ref.TrainingConfig(), seed)
        trainer.step = step
        return trainer.train_step(*tiny_batch(trainer.model.config)).loss

    losses = [first_loss(*pair) for pair in ((0, 0), (0, 1), (1, 0), (1, 1))]
    assert len(set(losses)) == 4
    assert first_loss(0, 1) == losses[1]


def test_step_without_labels_changes_no_reference_weights():
    trainer = ref.Trainer(tiny_model(), ref.TrainingConfig(clip_norm=1.0))
    before = trainer.model.export_weights()
    result = trainer.train_step(*tiny_batch(trainer.model.config, labeled=False))
    assert (result.loss, result.tokens, result.gradient_norm) == (0.0, 0, 0.0)
    assert_same_bits(trainer.model.export_weights(), before)


def test_evaluation_returns_the_loss_without_smoothing_and_dropout():
    trainer = ref.Trainer(tiny_model(dropout=RATES), ref.TrainingConfig())
    source, target, labels = tiny_batch(trainer.model.config)
    total, tokens = trainer.evaluate(source, target, labels)
    logits = trainer.model(source, target)
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    wanted = [probabilities[place][labels[place]] for place in zip(*np.nonzero(labels), strict=True)]
    assert tokens == len(wanted)
    assert total == pytest.approx(-np.log(wanted).sum(), rel=1e-13)


@pytest.mark.parametrize("norm_order", tiers.first_alone(["post", "pre"], "training"))
def test_reference_learns_to_copy(norm_order):
    config = tiny_config(
        source_vocab_size=9, target_vocab_size=9, norm_order=norm_order, num_encoder_layers=1, num_decoder_layers=1
    )
    model = ref.Transformer.from_weights(config, ref.init_weights(config))
    trainer = ref.Trainer(model, ref.TrainingConfig(warmup_steps=40, learning_rate_factor=0.5))
    rng = np.random.default_rng(0)

    def sentences():
        source = rng.integers(3, 9, (32, 4))
        return source, np.insert(source, 0, config.bos_id, 1), np.insert(source, 4, config.eos_id, 1)

    for _ in range(150):
        trainer.train_step(*sentences())
    total, tokens = trainer.evaluate(*sentences())
    assert total / tokens < 0.3  # chance level: log 6 for four of five tokens, about 1.4 per token
