"""Training follows one contract in four packages, so that each of them can resume a run from any other.

``test_backward`` checks the reference's gradients, and these tests compare the steps of all four packages with them.
Models are as small as possible, and each trainer is built only once, because compilation dominates the run time.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import tiers
from conftest import assert_same_bits, random_weights, tiny_config
from training_runs import (
    BATCH,
    BATCHES,
    CONFIG,
    NO_DROPOUT,
    ONE_LAYER,
    PAD,
    RATES,
    SCHEDULE,
    TRAINERS,
    WEIGHTS,
    assert_near,
    at_the_start,
    everything,
    losses_of,
    mode_of,
    take_steps,
    without_labels,
    zero_state,
)
from training_runs import _quick_compilation as _quick_compilation  # a fixture of every test

import reference_numpy as ref

# --- Gradients ---

# Without key biases, whose gradients are only rounding noise. In float32, the reference itself isn't more precise.
GRADIENTS = {
    "paper_base": ("float64", {}),
    "annotated": ("float32", {"attention_bias": False, "position_encoding": "learned", "tie_embeddings": "none"}),
}


@pytest.fixture(scope="module", params=GRADIENTS)
def differentiated(backend, request):
    """A model in training mode, as a user may have left it, and the same model in the reference."""
    dtype, overrides = GRADIENTS[request.param]
    ids = {"pad_id": PAD, "bos_id": CONFIG.bos_id, "eos_id": CONFIG.eos_id}
    config = tiny_config(request.param, **{**ONE_LAYER, **ids, "dropout": RATES, **overrides})
    weights = random_weights(config)
    model = backend.package.Transformer.from_weights(config, weights, dtype=dtype)
    if backend.name in ("torch", "jax"):
        model.train()
    return model, ref.Transformer.from_weights(config, weights, dtype=dtype)


def test_gradients_match_the_reference(backend, differentiated):
    """Gradients match the reference in names, order, shapes, and dtypes, and ignore the dropout rates."""
    model, reference = differentiated
    found, expected = backend.package.gradients(model, *BATCH), ref.gradients(reference, *BATCH)
    dtype = reference.source_embedding.table.dtype
    tolerance = 1e-12 if dtype == np.float64 else 3e-5
    assert type(found.loss) is float
    assert found.loss == pytest.approx(expected.loss, rel=tolerance)
    assert list(found.parameters) == list(ref.parameter_shapes(model.config))
    assert list(found.taps) == list(ref.tap_shapes(model.config, 8, 4, 5))
    for ours, theirs in ((found.parameters, expected.parameters), (found.taps, expected.taps)):
        for name, gradient in ours.items():
            assert (type(gradient), gradient.dtype) == (np.ndarray, dtype), name
            assert_near(gradient, theirs[name], tolerance, name)


def test_gradients_do_not_modify_the_model(backend, differentiated):
    model, _ = differentiated
    weights, mode = model.export_weights(), mode_of(backend, model)
    backend.package.gradients(model, *BATCH)
    assert_same_bits(model.export_weights(), weights)
    assert mode_of(backend, model) == mode
    if backend.name == "torch":
        assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_without_labels_are_zero(backend, differentiated):
    model, _ = differentiated
    found = backend.package.gradients(model, *without_labels(BATCH))
    assert found.loss == 0.0
    assert not any(np.any(gradient) for gradient in (*found.parameters.values(), *found.taps.values()))


def test_gradients_of_an_all_padding_source_are_finite(backend, differentiated):
    model, _ = differentiated
    source, target, labels = BATCH
    found = backend.package.gradients(model, np.full_like(source, PAD), target, labels)
    assert np.isfinite(found.loss)
    assert all(np.isfinite(gradient).all() for gradient in (*found.parameters.values(), *found.taps.values()))


# --- Steps ---
def transcribed_run(batches, settings):
    """Train ``WEIGHTS`` using equation (3), clipping, and Algorithm 1 of Kingma and Ba (2015) literally."""
    theta = {name: array.copy() for name, array in WEIGHTS.items()}
    m, v = ({name: np.zeros_like(array) for name, array in theta.items()} for _ in range(2))
    losses, norms = [], []
    for t, batch in enumerate(batches, start=1):
        found = ref.gradients(ref.Transformer.from_weights(CONFIG, theta, dtype="float64"), *batch)
        norm = math.sqrt(sum((g**2).sum() for g in found.parameters.values()))
        losses.append(found.loss)
        norms.append(norm)
        alpha = settings.learning_rate_factor / math.sqrt(24) * min(t**-0.5, t * settings.warmup_steps**-1.5)
        for name, g in found.parameters.items():
            if settings.clip_norm is not None and norm > settings.clip_norm:
                g = g * (settings.clip_norm / norm)
            m[name] = settings.beta1 * m[name] + (1 - settings.beta1) * g
            v[name] = settings.beta2 * v[name] + (1 - settings.beta2) * g**2
            m_hat, v_hat = m[name] / (1 - settings.beta1**t), v[name] / (1 - settings.beta2**t)
            theta[name] = theta[name] - alpha * m_hat / (np.sqrt(v_hat) + settings.epsilon)
    return losses, norms, theta, m, v


@pytest.mark.parametrize(
    "kind",
    [
        kind
        for kind, (_, rates, settings) in TRAINERS.items()
        if rates == NO_DROPOUT and not settings.get("mixed_bfloat16")
    ],
)
def test_train_steps_match_the_written_formulas(backend, kind):
    """Weights, moments, and reports match after the first step and after a few, regardless of micro-batches.

    One of the batches has no tokens, so its step only decays the moments. The gradients of one step are clipped.
    """
    trainer = at_the_start(backend, kind)
    tokens = [int((labels != PAD).sum()) for _, _, labels in BATCHES]
    for batches in (BATCHES[:1], BATCHES[1:]):
        results = take_steps(trainer, batches)
        taken = BATCHES[: trainer.step]
        losses, norms, theta, m, v = transcribed_run(taken, trainer.settings)
        assert [int(result.tokens) for result in results] == tokens[: trainer.step][-len(results) :]
        assert_near([float(result.loss) for result in results], losses[-len(results) :], 1e-13)  # before the update
        assert_near([float(result.gradient_norm) for result in results], norms[-len(results) :], 1e-12)  # unclipped
        state = trainer.export_state()
        assert (state.step, state.seed) == (trainer.step, 0) == (len(taken), 0)
        for what, found, expected in (
            ("weight", trainer.model.export_weights(), theta),
            ("first moment", state.first_moment, m),
            ("second moment", state.second_moment, v),
        ):
            assert list(found) == list(WEIGHTS)
            for name, array in found.items():
                assert array.dtype == np.float64
                assert_near(array, expected[name], 1e-12, f"{what} {name} after {trainer.step} steps")
    if trainer.settings.clip_norm is not None:
        assert min(norms[0], norms[1], norms[3]) < trainer.settings.clip_norm < max(norms)


def test_step_on_a_padding_batch_changes_no_weights(backend):
    trainer = at_the_start(backend, "four micro-batches, clipped")
    result = trainer.train_step(*without_labels(BATCH))
    assert (float(result.loss), int(result.tokens), float(result.gradient_norm)) == (0.0, 0, 0.0)
    assert trainer.step == 1
    assert_same_bits(trainer.model.export_weights(), WEIGHTS)
    assert not any(array.any() for array in trainer.export_state().first_moment.values())


@pytest.mark.extended("training", "jax", "tf")
def test_model_is_in_inference_mode_between_steps(backend):
    """The model contains the current weights and computes the same as a new model with these weights."""
    trainer = at_the_start(backend, "dropout")
    for _ in range(2):
        trainer.train_step(*BATCH)
        logits = [backend.to_numpy(trainer.model(*BATCH[:2])) for _ in range(2)]
        twin = backend.package.Transformer.from_weights(trainer.model.config, trainer.model.export_weights())
        np.testing.assert_array_equal(logits[0], logits[1])
        np.testing.assert_array_equal(logits[0], backend.to_numpy(twin(*BATCH[:2])))


@pytest.mark.parametrize("kind", tiers.first_alone(["plain", "dropout"], "training", "jax", "tf"))
def test_evaluation_uses_neither_dropout_nor_label_smoothing(backend, kind):
    """Evaluation uses neither dropout nor label smoothing, at any time between steps and after loading a state."""
    trainer = at_the_start(backend, kind)
    config = trainer.model.config.replace(label_smoothing=0.0)
    tolerance = 1e-13 if kind == "plain" else 1e-5
    for prepare in (
        lambda: None,
        lambda: trainer.train_step(*BATCH),
        lambda: trainer.load_state(zero_state(step=5, seed=3)),
        lambda: backend.package.set_weights(trainer.model, WEIGHTS),
    ):
        prepare()
        before = everything(trainer)
        total, tokens = trainer.evaluate(*BATCH)
        logits = ref.Transformer.from_weights(CONFIG, trainer.model.export_weights(), "float64")(*BATCH[:2])
        expected, counted = ref.cross_entropy(logits, BATCH[2], config)
        assert int(tokens) == counted == (BATCH[2] != PAD).sum()
        assert_near(backend.to_numpy(total), expected, tolerance)
        assert_same_bits(everything(trainer), before)
    total, tokens = trainer.evaluate(*without_labels(BATCH))
    assert (float(total), int(tokens)) == (0.0, 0)


# --- Learning ---
def reversals(count):
    """Yield batches of sentences whose targets are the reversed sources."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        source = rng.integers(3, 9, (8, 4))
        backwards = source[:, ::-1]
        yield source, np.insert(backwards, 0, CONFIG.bos_id, 1), np.insert(backwards, 4, CONFIG.eos_id, 1)


@pytest.fixture(scope="module")
def learning():
    """The reference after learning to reverse sentences: its initial weights, its losses, and its trainer."""
    weights = {name: array.astype(np.float64) for name, array in ref.init_weights(CONFIG).items()}
    model = ref.Transformer.from_weights(CONFIG, weights, dtype="float64")
    trainer = ref.Trainer(model, ref.TrainingConfig(**SCHEDULE))
    return weights, losses_of(trainer, reversals(250)), trainer


def test_reference_learns_to_reverse(learning):
    _, losses, trainer = learning
    assert losses[0] > 3.0  # guessing among all 37 words costs log 37 = 3.6
    totals, tokens = zip(*(trainer.evaluate(*batch) for batch in list(reversals(270))[250:]), strict=True)
    assert sum(totals) / sum(tokens) < 0.4  # guessing among the six used words costs log 6 for four of five tokens: 1.4


@pytest.mark.extended("training", "jax", "tf")
def test_every_port_has_the_same_losses_as_the_reference(port, learning):
    weights, losses, _ = learning
    trainer = at_the_start(port, weights=weights)
    found = losses_of(trainer, reversals(20))
    np.testing.assert_allclose(found, losses[:20], rtol=1e-10, atol=0)
