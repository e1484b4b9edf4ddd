"""Training settings, learning rate, and loss match formulas written in plain Python."""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from conftest import refusal, tiny_config

import reference_numpy as ref

# --- The settings ---

BAD_SETTINGS = {
    "factor 0": ({"learning_rate_factor": 0.0}, ValueError, "learning_rate_factor must be positive: got 0.0"),
    "factor NaN": ({"learning_rate_factor": math.nan}, ValueError, "learning_rate_factor must be positive: got nan"),
    "factor as text": ({"learning_rate_factor": "1"}, TypeError, "learning_rate_factor must be a number: got '1'"),
    "no warm-up": ({"warmup_steps": 0}, ValueError, "warmup_steps must be at least 1: got 0"),
    "warm-up of 1.5": ({"warmup_steps": 1.5}, TypeError, "warmup_steps must be an integer: got 1.5"),
    "warm-up of True": ({"warmup_steps": True}, TypeError, "warmup_steps must be an integer: got True"),
    "zero steps": ({"total_steps": 0}, ValueError, "total_steps must be at least 1: got 0"),
    "float steps": ({"total_steps": 1e5}, TypeError, "total_steps must be an integer: got 100000.0"),
    "negative cool-down": ({"cooldown_steps": -1}, ValueError, "cooldown_steps must be at least 0: got -1"),
    "cool-down of None": ({"cooldown_steps": None}, TypeError, "cooldown_steps must be an integer: got None"),
    "cool-down without total steps": (
        {"cooldown_steps": 3},
        ValueError,
        "cooldown_steps=3 requires total_steps, which determines when the cool-down begins",
    ),
    "cool-down longer than the run": (
        {"cooldown_steps": 8, "total_steps": 7},
        ValueError,
        "cooldown_steps must be at most total_steps 7: got 8",
    ),
    "beta1 of 1": ({"beta1": 1.0}, ValueError, "beta1 must be in [0, 1): got 1.0"),
    "negative beta2": ({"beta2": -0.1}, ValueError, "beta2 must be in [0, 1): got -0.1"),
    "beta2 of False": ({"beta2": False}, TypeError, "beta2 must be a number: got False"),
    "epsilon 0": ({"epsilon": 0}, ValueError, "epsilon must be positive: got 0"),
    "infinite epsilon": ({"epsilon": math.inf}, ValueError, "epsilon must be positive: got inf"),
    "clip norm 0": ({"clip_norm": 0.0}, ValueError, "clip_norm must be positive: got 0.0"),
    "clip norm as text": ({"clip_norm": "none"}, TypeError, "clip_norm must be a number: got 'none'"),
    "zero micro-batches": ({"accumulation_steps": 0}, ValueError, "accumulation_steps must be at least 1: got 0"),
    "half a micro-batch": ({"accumulation_steps": 0.5}, TypeError, "accumulation_steps must be an integer: got 0.5"),
    "mixed precision as a number": ({"mixed_bfloat16": 1}, TypeError, "mixed_bfloat16 must be True or False: got 1"),
    "checkpointing as text": (
        {"activation_checkpointing": "all"},
        TypeError,
        "activation_checkpointing must be True or False: got 'all'",
    ),
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_invalid_settings_are_rejected(case):
    fields, kind, message = BAD_SETTINGS[case]
    assert refusal(ref.TrainingConfig, **fields) == (kind, message)


def test_default_settings_match_the_paper():
    settings = ref.TrainingConfig()
    assert (settings.beta1, settings.beta2, settings.epsilon, settings.warmup_steps) == (0.9, 0.98, 1e-9, 4000)
    assert (settings.learning_rate_factor, settings.accumulation_steps) == (1.0, 1)
    assert settings.mixed_bfloat16 is settings.activation_checkpointing is False
    assert settings.clip_norm is settings.total_steps is None
    assert settings.cooldown_steps == 0
    # The peak learning rate of the base model.
    assert math.isclose(settings.learning_rate(4000, 512), 6.98771e-4, rel_tol=1e-5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.beta1 = 0.5


@pytest.mark.parametrize(("factor", "warmup", "d_model"), [(1.0, 4000, 512), (0.3, 7, 24), (2.0, 1, 1024)])
def test_learning_rate_warms_up_linearly_and_decays_with_the_inverse_square_root(factor, warmup, d_model):
    """The learning rate increases linearly to its peak at the end of the warm-up, then decays with 1 / sqrt(step)."""
    settings = ref.TrainingConfig(learning_rate_factor=factor, warmup_steps=warmup)
    peak = factor / math.sqrt(d_model * warmup)
    for step in sorted({1, 2, warmup // 2 + 1, warmup, warmup + 1, 10 * warmup, 100_000}):
        expected = peak * (step / warmup if step < warmup else math.sqrt(warmup / step))
        assert math.isclose(settings.learning_rate(step, d_model), expected, rel_tol=1e-14)
    rates = [settings.learning_rate(step, d_model) for step in range(1, 3 * warmup + 1)]
    assert rates.index(max(rates)) == warmup - 1


@pytest.mark.parametrize(("warmup", "total", "cooldown"), [(7, 50, 20), (40, 50, 20), (7, 50, 50), (7, 1, 1)])
def test_learning_rate_decreases_linearly_in_the_cool_down(warmup, total, cooldown):
    """The learning rate decreases linearly during the cool-down and would be zero one step after the last one."""
    settings = ref.TrainingConfig(warmup_steps=warmup, total_steps=total, cooldown_steps=cooldown)
    rates = [settings.learning_rate(step, 24) for step in range(1, total + 5)]
    free = ref.TrainingConfig(warmup_steps=warmup)
    start = total - cooldown
    assert rates[:start] == [free.learning_rate(step, 24) for step in range(1, start + 1)]
    held = free.learning_rate(max(start, 1), 24)
    expected = [held * (1 - j / (cooldown + 1)) for j in range(1, cooldown + 1)]
    np.testing.assert_allclose(rates[start:total], expected, rtol=1e-12)
    assert rates[total - 1] > 0
    assert rates[total:] == [0.0] * 4
    abrupt = ref.TrainingConfig(warmup_steps=warmup, total_steps=total)
    assert abrupt.learning_rate(total, 24) == free.learning_rate(total, 24)
    # Without a cool-down, total_steps has no effect.
    assert abrupt.learning_rate(total + 1, 24) == free.learning_rate(total + 1, 24)


def test_settings_round_trip_through_a_dict():
    settings = ref.TrainingConfig(total_steps=9, cooldown_steps=3, clip_norm=0.5, mixed_bfloat16=True, warmup_steps=2)
    fields = settings.to_dict()
    assert ref.TrainingConfig.from_dict(fields) == settings
    assert set(fields) == {field.name for field in dataclasses.fields(ref.TrainingConfig)}
    assert refusal(ref.TrainingConfig.from_dict, fields | {"beta3": 1, "alpha": 2}) == (
        ValueError,
        "unknown training settings: alpha, beta3",
    )
    assert ref.TrainingConfig.from_dict({**fields, "activation_checkpointing": True}).activation_checkpointing
    del fields["beta1"], fields["epsilon"]
    assert refusal(ref.TrainingConfig.from_dict, fields) == (ValueError, "missing training settings: beta1, epsilon")
    assert refusal(ref.TrainingConfig.from_dict, [1]) == (
        TypeError,
        "training settings must be a mapping of field names to values: got list",
    )


# --- The loss ---

KINDS = ("uniform", "off_target", "off_target_and_pad")
LABELS = np.array([[4, 0, 3], [2, 3, 3], [1, 1, 4]])


def loss_config(kind="uniform", smoothing=0.1):
    """Return a config with so few words that each class affects the loss; the padding ID is neither first nor last."""
    config = tiny_config(source_vocab_size=5, target_vocab_size=5, pad_id=3, bos_id=0, eos_id=1)
    return config.replace(label_smoothing=smoothing, label_smoothing_kind=kind)


def transcribed_cross_entropy(logits, labels, config):
    """Return the loss of section 5.4, one word at a time: ``-sum(q * log(p))`` with the smoothed labels ``q``."""
    terms, tokens, smoothing, pad = [], 0, config.label_smoothing, config.pad_id
    for place in np.ndindex(labels.shape):
        right, row = labels[place], [float(x) for x in logits[place]]
        if right == pad:
            continue
        tokens += 1
        largest = max(row)
        log_sum = largest + math.log(math.fsum(math.exp(x - largest) for x in row))
        receives = {
            "uniform": list(range(5)),
            "off_target": [k for k in range(5) if k != right],
            "off_target_and_pad": [k for k in range(5) if k not in (right, pad)],
        }[config.label_smoothing_kind]
        for k in range(5):
            q = (1 - smoothing if k == right else 0.0) + (smoothing / len(receives) if k in receives else 0.0)
            terms.append(-q * (row[k] - log_sum))
    return math.fsum(terms), tokens


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.2])
@pytest.mark.parametrize("kind", KINDS)
def test_cross_entropy_matches_the_formula_of_the_paper(backend, kind, smoothing):
    config = loss_config(kind, smoothing)
    logits = np.random.default_rng(0).normal(0.0, 3.0, (3, 3, 5))
    total, tokens = backend.package.cross_entropy(*map(backend.from_numpy, (logits, LABELS)), config)
    total = backend.to_numpy(total)
    expected = transcribed_cross_entropy(logits, LABELS, config)
    assert (total.shape, total.dtype) == ((), np.float64)
    assert total == pytest.approx(expected[0], rel=1e-13)
    assert int(tokens) == expected[1] == 6
    narrow, _ = backend.package.cross_entropy(*map(backend.from_numpy, (logits.astype("float32"), LABELS)), config)
    assert backend.to_numpy(narrow).dtype == np.float32
    assert float(narrow) == pytest.approx(expected[0], rel=1e-5)


@pytest.mark.parametrize("masked", [-1e9, -math.inf])
def test_loss_excludes_a_masked_padding_logit(backend, masked):
    """Padding is never generated, so models mask its logit."""
    config = loss_config("off_target_and_pad")
    logits = np.random.default_rng(0).normal(0.0, 3.0, (3, 3, 5)).astype("float32")
    losses = []
    for logits[..., config.pad_id] in (-1e3, masked):
        total, _ = backend.package.cross_entropy(*map(backend.from_numpy, (logits, LABELS)), config)
        losses.append(float(total))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_cross_entropy_of_extreme_logits_is_accurate(backend, kind, dtype):
    config = loss_config(kind)
    logits = (np.random.default_rng(0).permuted(np.tile([-1e4, -1.0, 0.0, 1.0, 1e4], (3, 3, 1)), axis=-1)).astype(dtype)
    total, _ = backend.package.cross_entropy(*map(backend.from_numpy, (logits, LABELS)), config)
    assert float(total) == pytest.approx(transcribed_cross_entropy(logits, LABELS, config)[0], rel=1e-6)


def test_cross_entropy_of_padding_only_is_zero(backend):
    logits = np.random.default_rng(0).normal(size=(3, 3, 5))
    nothing = backend.from_numpy(np.full_like(LABELS, 3))
    total, tokens = backend.package.cross_entropy(backend.from_numpy(logits), nothing, loss_config())
    assert (float(total), int(tokens)) == (0.0, 0)


@pytest.mark.parametrize("shape", [(1, 3), (3, 1), (3, 2), (3,)])
def test_cross_entropy_rejects_labels_of_wrong_shape(backend, shape):
    """Some of these shapes would broadcast silently."""
    logits, labels = backend.from_numpy(np.zeros((3, 3, 5))), backend.from_numpy(np.zeros(shape, int))
    needed = "shape (3, 3)" if len(shape) == 2 else "shape [batch, length]"
    assert refusal(backend.package.cross_entropy, logits, labels, loss_config()) == (
        ValueError,
        f"labels must have {needed}: got {shape}",
    )


@pytest.mark.parametrize("shape", [(3, 3, 4), (3, 3, 6), (3, 3)])
def test_cross_entropy_rejects_logits_of_wrong_shape(backend, shape):
    logits, labels = backend.from_numpy(np.zeros(shape)), backend.from_numpy(LABELS)
    assert refusal(backend.package.cross_entropy, logits, labels, loss_config()) == (
        ValueError,
        f"logits must have shape (3, 3, 5): got {shape}",
    )


def labels_with(label):
    labels = LABELS.copy()
    labels[1, 2] = label
    return labels


@pytest.mark.parametrize("label", [-100, -1, 5])
def test_label_outside_the_vocabulary_is_rejected(backend, label):
    """The labels include the value that torch ignores silently."""
    logits, labels = np.zeros((3, 3, 5)), labels_with(label)
    for given in (labels, backend.from_numpy(labels)):
        assert refusal(backend.package.cross_entropy, backend.from_numpy(logits), given, loss_config()) == (
            ValueError,
            f"labels must be in [0, 5): got {label} at [1, 2]",
        )


@pytest.mark.only("jax", "tf")
@pytest.mark.parametrize("label", [-100, 5])
def test_label_outside_the_vocabulary_gives_nan_in_compiled_code(port, label):
    """Compiled code can't check the values of the labels, so it returns a loss of NaN."""
    logits, labels = map(port.from_numpy, (np.zeros((3, 3, 5)), labels_with(label)))
    if port.name == "jax":
        import jax

        compiled = jax.jit(partial(port.package.cross_entropy, config=loss_config()))
    else:
        import tensorflow as tf

        compiled = tf.function(partial(port.package.cross_entropy, config=loss_config()), jit_compile=True)
    assert np.isnan(compiled(logits, labels)[0])


def test_cross_entropy_of_bfloat16_logits_is_computed_in_float32(port):
    config = loss_config()
    logits = np.random.default_rng(0).normal(0.0, 3.0, (3, 3, 5)).astype(ml_dtypes.bfloat16)
    total, _ = port.package.cross_entropy(*map(port.from_numpy, (logits, LABELS)), config)
    assert port.to_numpy(total).dtype == np.float32
    assert float(total) == pytest.approx(transcribed_cross_entropy(logits, LABELS, config)[0], rel=1e-6)


@pytest.mark.only("jax")
def test_jax_computes_the_gradient_of_the_loss_in_place(port):
    """According to XLA, the gradient needs no temporary array as wide as the vocabulary."""
    import jax

    config = tiny_config(source_vocab_size=500, target_vocab_size=500)
    logits, labels = jax.ShapeDtypeStruct((4, 8, 500), "float32"), jax.ShapeDtypeStruct((4, 8), "int32")
    gradient = jax.jit(jax.grad(lambda logits, labels: port.package.cross_entropy(logits, labels, config)[0]))
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        room = gradient.lower(logits, labels).compile().memory_analysis().temp_size_in_bytes
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
    assert room < 0.1 * logits.size * logits.dtype.itemsize


@pytest.mark.only("torch")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_matches_torch(port, smoothing):
    import torch

    logits, labels = torch.randn(3, 3, 5, dtype=torch.float64), torch.tensor(LABELS)
    total, tokens = port.package.cross_entropy(logits, labels, loss_config(smoothing=smoothing))
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=3, label_smoothing=smoothing
    )
    torch.testing.assert_close(total / tokens, expected, rtol=1e-13, atol=0)
