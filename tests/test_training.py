"""Training: one contract in four packages, and a run that any of them can take over from any other.

The reference's gradients are proved in ``test_backward``; here they are what the steps of all four are held to. Models
are as small as they can be, and each trainer is built once: the frameworks spend most of this file's time compiling.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from functools import cache, partial

import numpy as np
import pytest
import tiers
from conftest import assert_same_bits, random_weights, refusal, tiny_config

import reference_numpy as ref

NO_DROPOUT = ref.DropoutRates(embedding=0.0, residual=0.0)
RATES = ref.DropoutRates(embedding=0.2, attention=0.3, residual=0.0)  # few sites: each has to be compiled
ONE_LAYER = {"num_encoder_layers": 1, "num_decoder_layers": 1, "output_bias": True}
CONFIG = tiny_config(**ONE_LAYER, dropout=NO_DROPOUT)
WEIGHTS = random_weights(CONFIG, dtype="float64")
PAD = CONFIG.pad_id
SCHEDULE = {"warmup_steps": 40, "learning_rate_factor": 0.5}
TRAINERS = {  # dtype, dropout and settings: each has to be compiled
    "plain": ("float64", NO_DROPOUT, {}),
    "four slices, clipped": (
        "float64",
        NO_DROPOUT,
        {"accumulation_steps": 4, "clip_norm": 3.2, "beta1": 0.8, "beta2": 0.95, "epsilon": 1e-3},
    ),
    "dropout": ("float32", RATES, {"accumulation_steps": 2, "clip_norm": 3.2}),
    "mixed": ("float32", NO_DROPOUT, {"mixed_bfloat16": True}),
    "everything kept": ("float64", RATES, {"accumulation_steps": 2, "clip_norm": 3.2}),
    "checkpointed": ("float64", RATES, {"accumulation_steps": 2, "clip_norm": 3.2, "activation_checkpointing": True}),
}


def make_batch(seed=0, sentences=8):
    """Return ids with padding on all sides, a source that is nothing but padding, and uneven numbers of labels.

    Of four slices the last has no token at all.
    """
    rng = np.random.default_rng(seed)
    source, target, labels = (rng.integers(3, 37, (sentences, length)) for length in (4, 5, 5))
    target[:, 0] = CONFIG.bos_id
    source[1, 2:] = source[2] = target[1, 3:] = labels[1, 3:] = labels[4, 1:] = PAD
    target[6:, 1:] = labels[6:] = PAD
    return source, target, labels


def without_labels(batch):
    source, target, labels = batch
    return source, target, np.full_like(labels, PAD)


BATCH = make_batch()
BATCHES = [make_batch(0), make_batch(1), without_labels(make_batch(2)), make_batch(3)]


@pytest.fixture(scope="module", autouse=True)
def _quick_compilation(backends):
    """Let XLA optimise little: that is half the time of this file. ``parity check`` takes the other way."""
    if "jax" not in [backend.name for backend in backends]:
        yield
        return
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def build(backend, kind="plain", seed=0):
    """Return a trainer of ``TRAINERS`` whose model has other weights than ``WEIGHTS``."""
    dtype, rates, settings = TRAINERS[kind]
    config = CONFIG.replace(dropout=rates)
    model = backend.package.Transformer.from_weights(config, random_weights(config, seed=1), dtype=dtype)
    return backend.package.Trainer(model, ref.TrainingConfig(**SCHEDULE, **settings), seed)


def zero_state(step=0, seed=0):
    zeros = {name: np.zeros_like(array) for name, array in WEIGHTS.items()}
    return ref.TrainingState(step, seed, zeros, {name: array.copy() for name, array in zeros.items()})


@pytest.fixture(scope="module")
def trainers():
    """Return a function that hands out each trainer at the start of a run, and builds it once."""
    built = cache(build)

    def at_the_start(backend, kind="plain", weights=WEIGHTS):
        trainer = built(backend, kind)
        backend.package.set_weights(trainer.model, weights)
        trainer.load_state(zero_state())
        return trainer

    return at_the_start


def everything(trainer):
    """Return all that the next step depends on, by name."""
    state = trainer.export_state()
    return {
        "step": np.asarray(state.step),
        "seed": np.asarray(state.seed),
        **{f"weight {name}": array for name, array in trainer.model.export_weights().items()},
        **{f"first {name}": array for name, array in state.first_moment.items()},
        **{f"second {name}": array for name, array in state.second_moment.items()},
    }


def altered(ids, row, column, value):
    """Return a copy of ids with one of them replaced."""
    ids = ids.copy()
    ids[row, column] = value
    return ids


def take_steps(trainer, batches):
    return [trainer.train_step(*batch) for batch in batches]


def losses_of(trainer, batches):
    return np.array([float(result.loss) for result in take_steps(trainer, batches)])


def assert_near(got, expected, tolerance, what=""):
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert got.shape == expected.shape, what
    error = np.linalg.norm(got - expected)
    assert error <= tolerance * np.linalg.norm(expected), (what, error)


# --- Gradients ---

# No key bias: its gradient is rounding noise. In float32 the reference itself is only so exact.
GRADIENTS = {
    "paper_base": ("float64", {}),
    "annotated": ("float32", {"attention_bias": False, "position_encoding": "learned", "tie_embeddings": "none"}),
}


@pytest.fixture(scope="module", params=GRADIENTS)
def differentiated(backend, request):
    """A model in training mode, as its user may have left it, and the same in the reference."""
    dtype, overrides = GRADIENTS[request.param]
    ids = {"pad_id": PAD, "bos_id": CONFIG.bos_id, "eos_id": CONFIG.eos_id}
    config = tiny_config(request.param, **{**ONE_LAYER, **ids, "dropout": RATES, **overrides})
    weights = random_weights(config)
    model = backend.package.Transformer.from_weights(config, weights, dtype=dtype)
    if backend.name in ("torch", "jax"):
        model.train()
    return model, ref.Transformer.from_weights(config, weights, dtype=dtype)


def test_gradients(backend, differentiated):
    """As the reference has them: names, order, shapes and dtypes too; and without dropout, whatever the rates."""
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


def test_gradients_leave_the_model_as_it_is(backend, differentiated):
    model, _ = differentiated
    weights, mode = model.export_weights(), mode_of(backend, model)
    backend.package.gradients(model, *BATCH)
    assert_same_bits(model.export_weights(), weights)
    assert mode_of(backend, model) == mode
    if backend.name == "torch":
        assert all(parameter.grad is None for parameter in model.parameters())


def mode_of(backend, model):
    """Return what tells training from inference in a framework, and the state of its random numbers."""
    if backend.name == "torch":
        import torch

        return [module.training for module in model.modules()], torch.get_rng_state().tolist()
    if backend.name == "jax":
        from flax import nnx

        graph, _, rest = nnx.split(model, nnx.Param, ...)
        return graph, str(rest)
    if backend.name == "tf":
        return [variable.numpy().tolist() for variable in model.non_trainable_variables]
    return None


def test_gradients_of_no_token(backend, differentiated):
    model, _ = differentiated
    found = backend.package.gradients(model, *without_labels(BATCH))
    assert found.loss == 0.0
    assert not any(np.any(gradient) for gradient in (*found.parameters.values(), *found.taps.values()))


def test_gradients_of_a_source_of_padding_only(backend, differentiated):
    model, _ = differentiated
    source, target, labels = BATCH
    found = backend.package.gradients(model, np.full_like(source, PAD), target, labels)
    assert np.isfinite(found.loss)
    assert all(np.isfinite(gradient).all() for gradient in (*found.parameters.values(), *found.taps.values()))


# --- Steps ---


def transcribed_run(batches, settings):
    """Train ``WEIGHTS`` by the letter: equation (3), clipping, and Algorithm 1 of Kingma and Ba (2015)."""
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
def test_steps_are_what_is_written(backend, trainers, kind):
    """Weights, moments and reports, after the first step and after a few; the slices cannot be seen in any of them.

    One of the batches has no token, so that its step only lets the moments decay; one is clipped, and one is not.
    """
    trainer = trainers(backend, kind)
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


def test_a_batch_of_padding_is_no_step_in_any_direction(backend, trainers):
    trainer = trainers(backend, "four slices, clipped")
    result = trainer.train_step(*without_labels(BATCH))
    assert (float(result.loss), int(result.tokens), float(result.gradient_norm)) == (0.0, 0, 0.0)
    assert trainer.step == 1
    assert_same_bits(trainer.model.export_weights(), WEIGHTS)
    assert not any(array.any() for array in trainer.export_state().first_moment.values())


@pytest.mark.extended("training", "jax", "tf")
def test_between_two_steps_the_model_is_in_inference_mode(backend, trainers):
    """It holds the current weights, and computes what another model of these weights computes."""
    trainer = trainers(backend, "dropout")
    for _ in range(2):
        trainer.train_step(*BATCH)
        logits = [backend.to_numpy(trainer.model(*BATCH[:2])) for _ in range(2)]
        twin = backend.package.Transformer.from_weights(trainer.model.config, trainer.model.export_weights())
        np.testing.assert_array_equal(logits[0], logits[1])
        np.testing.assert_array_equal(logits[0], backend.to_numpy(twin(*BATCH[:2])))


@pytest.mark.parametrize("kind", tiers.first_alone(["plain", "dropout"], "training", "jax", "tf"))
def test_evaluation(backend, trainers, kind):
    """The plain likelihood: no dropout, no smoothing; between any two steps, and after another state was loaded."""
    trainer = trainers(backend, kind)
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


# --- State ---


def test_a_state_is_a_copy(backend, trainers):
    trainer = build(backend) if backend.name in ("numpy", "torch") else trainers(backend)
    state = trainer.export_state()
    assert (state.step, state.seed) == (0, 0)
    for moments in (state.first_moment, state.second_moment):
        assert list(moments) == list(WEIGHTS)
        for name, array in moments.items():
            assert array.shape == WEIGHTS[name].shape
            assert not array.any()
    trainer = trainers(backend)
    trainer.train_step(*BATCH)
    exported = everything(trainer)
    kept = {name: array.copy() for name, array in exported.items()}
    trainer.train_step(*BATCH)
    assert_same_bits(exported, kept)  # training on does not reach what was handed out
    now = everything(trainer)
    for array in everything(trainer).values():
        array[...] = 99  # nor does what happens to it reach the trainer
    assert_same_bits(everything(trainer), now)
    state = trainer.export_state()
    trainer.load_state(state)
    for array in (*state.first_moment.values(), *state.second_moment.values()):
        array[...] = 99
    assert_same_bits(everything(trainer), now)


@pytest.mark.extended("backends", "tf")
def test_a_run_goes_on_bit_for_bit(backend, trainers, tmp_path):
    """Cut anywhere, with dropout, through a file, in a model and a trainer that never saw the first part."""
    trainer, batches = trainers(backend, "dropout"), [make_batch(seed) for seed in range(4)]
    trainer.load_state(zero_state(seed=7))
    settings, config, losses, snapshots = trainer.settings, trainer.model.config, [], []
    for step, batch in enumerate(batches):
        checkpoint = ref.Checkpoint(config, settings, trainer.model.export_weights(), trainer.export_state(), {})
        ref.save_checkpoint(tmp_path / f"{step}.safetensors", checkpoint)
        snapshots.append(checkpoint)
        losses.append(float(trainer.train_step(*batch).loss))
    expected = everything(trainer)
    assert {array.dtype.name for name, array in expected.items() if " " in name} == {"float32"}
    resumed = build(backend, "dropout", seed=5)
    for step in (1, 3, 2):
        for checkpoint in (ref.load_checkpoint(tmp_path / f"{step}.safetensors"), snapshots[step]):
            assert (checkpoint.settings, checkpoint.config) == (settings, config)
            backend.package.set_weights(resumed.model, checkpoint.weights)
            resumed.load_state(checkpoint.state)
            assert [float(result.loss) for result in take_steps(resumed, batches[step:])] == losses[step:]
            assert_same_bits(everything(resumed), expected)
    assert (resumed.step, resumed.seed) == (4, 7)


def test_dropout_depends_on_seed_and_step_only(backend, trainers):
    trainer = trainers(backend, "dropout")

    def first(seed, step):
        backend.package.set_weights(trainer.model, WEIGHTS)
        trainer.load_state(zero_state(step, seed))
        return float(trainer.train_step(*BATCH).loss)

    mode, generator = mode_of(backend, trainer.model), np.random.get_state()[1].tolist()
    losses = [first(*pair) for pair in ((0, 0), (0, 1), (1, 0), (1, 1))]
    assert len(set(losses)) == 4
    assert first(0, 1) == losses[1]
    assert mode_of(backend, trainer.model) == mode  # nothing random of the caller's has moved
    assert np.random.get_state()[1].tolist() == generator
    undropped = ref.gradients(ref.Transformer.from_weights(CONFIG, WEIGHTS), *BATCH).loss
    assert min(abs(loss / undropped - 1) for loss in losses) > 1e-4


@pytest.fixture(scope="module")
def uninterrupted(backends, trainers, tmp_path_factory):
    """Each backend's losses over eight steps, and its checkpoint after four."""
    runs = {}
    for backend in backends:
        trainer, path = trainers(backend), tmp_path_factory.mktemp(backend.name) / "run.safetensors"
        losses = losses_of(trainer, HANDOVER[:4])
        weights, state = trainer.model.export_weights(), trainer.export_state()
        ref.save_checkpoint(path, ref.Checkpoint(CONFIG, trainer.settings, weights, state, {}))
        losses = [*losses, *losses_of(trainer, HANDOVER[4:])]
        runs[backend.name] = path, losses, float(trainer.evaluate(*BATCH)[0])
    return runs


HANDOVER = [make_batch(seed) for seed in range(8)]


@pytest.mark.extended("training", "torch", "jax", "tf")  # each runs all four
def test_a_run_goes_on_in_another_framework(backend, uninterrupted, trainers):
    for other, (path, losses, final) in uninterrupted.items():
        trainer, checkpoint = trainers(backend), ref.load_checkpoint(path)
        backend.package.set_weights(trainer.model, checkpoint.weights)
        trainer.load_state(checkpoint.state)
        assert trainer.step == 4
        # The contract says 1e-10; correct ports stay under 1e-14.
        assert_near(losses_of(trainer, HANDOVER[4:]), losses[4:], 1e-12, f"from {other}")
        assert_near(float(trainer.evaluate(*BATCH)[0]), final, 1e-12, f"from {other}")


# --- What is refused ---

SOURCE, TARGET, RIGHT = BATCH


BAD_BATCHES = {
    "labels too short": (
        (SOURCE, TARGET, RIGHT[:, :4]),
        ValueError,
        "labels must have shape (8, 5): got (8, 4)",
    ),
    "labels of fewer sentences": (
        (SOURCE, TARGET, RIGHT[:4]),
        ValueError,
        "labels must have shape (8, 5): got (4, 5)",
    ),
    "flat labels": (
        (SOURCE, TARGET, RIGHT.ravel()),
        ValueError,
        "labels must have shape [batch, length]: got (40,)",
    ),
    "label too large": (
        (SOURCE, TARGET, altered(RIGHT, 0, 1, 37)),
        ValueError,
        "labels must lie in [0, 37): got 37 at [0, 1]",
    ),
    "label -100": (
        (SOURCE, TARGET, altered(RIGHT, 1, 3, -100)),
        ValueError,
        "labels must lie in [0, 37): got -100 at [1, 3]",
    ),
    "float labels": ((SOURCE, TARGET, RIGHT.astype(float)), TypeError, "labels must be integers: got float64"),
    "float source": ((SOURCE.astype("float32"), TARGET, RIGHT), TypeError, "source_ids must be integers: got float32"),
    "boolean target": ((SOURCE, TARGET > 0, RIGHT), TypeError, "target_ids must be integers: got bool"),
    "source out of range": (
        (altered(SOURCE, 0, 0, 37), TARGET, RIGHT),
        ValueError,
        "source_ids must lie in [0, 37): got 37 at [0, 0]",
    ),
    "target negative": (
        (SOURCE, altered(TARGET, 0, 0, -1), RIGHT),
        ValueError,
        "target_ids must lie in [0, 37): got -1 at [0, 0]",
    ),
    "another batch size": (
        (SOURCE[:7], TARGET, RIGHT),
        ValueError,
        "source_ids and target_ids must agree in batch size: got 7 and 8",
    ),
    "no sentence": (
        (SOURCE[:0], TARGET[:0], RIGHT[:0]),
        ValueError,
        "source_ids must hold at least one token: got shape (0, 4)",
    ),
}


@pytest.mark.parametrize("case", BAD_BATCHES)
def test_bad_batches(backend, trainers, case):
    batch, kind, message = BAD_BATCHES[case]
    trainer = trainers(backend)
    trainer.train_step(*BATCH)
    before = everything(trainer)
    for function in (trainer.train_step, trainer.evaluate, partial(backend.package.gradients, trainer.model)):
        for ids in (batch, [backend.from_numpy(array) for array in batch]):
            assert refusal(function, *ids) == (kind, message)
    assert_same_bits(everything(trainer), before)


def test_a_batch_that_does_not_fall_into_slices(backend, trainers):
    trainer = trainers(backend, "four slices, clipped")
    before = everything(trainer)
    batch = [array[:6] for array in BATCH]
    assert refusal(trainer.train_step, *batch) == (
        ValueError,
        "accumulation_steps must divide the batch: got 4 and 6 sentences",
    )
    assert_same_bits(everything(trainer), before)
    trainer.evaluate(*batch)  # which has no slices


MIXED = ref.TrainingConfig(mixed_bfloat16=True)
TOO_COARSE = "training needs float32 or float64 weights: got bfloat16; mixed_bfloat16 computes in bfloat16"


def model_of(backend, dtype):
    return backend.package.Transformer.from_weights(CONFIG, WEIGHTS, dtype=dtype)


@pytest.mark.parametrize("settings", [ref.TrainingConfig(), MIXED], ids=["plain", "mixed"])
def test_weights_too_coarse_to_train(port, settings):
    assert refusal(port.package.Trainer, model_of(port, "bfloat16"), settings) == (ValueError, TOO_COARSE)


def test_mixed_precision_needs_float32(port):
    expected = ValueError, "mixed_bfloat16 needs float32 weights: got float64"
    assert refusal(port.package.Trainer, model_of(port, "float64"), MIXED) == expected


def test_numpy_has_no_mixed_precision():
    expected = ValueError, "mixed_bfloat16 is not available in this backend"
    for dtype in ("float64", "float32"):
        assert refusal(ref.Trainer, ref.Transformer.from_weights(CONFIG, WEIGHTS, dtype), MIXED) == expected


NAME = "encoder.layers.0.feed_forward.inner_proj.bias"
BAD_STATES = {  # what is changed: attributes of the state, or one first or second moment; None leaves it out
    "negative step": ({"step": -1}, ValueError, "step must be at least 0: got -1"),
    "step of a float": ({"step": 1.0}, TypeError, "step must be an integer: got 1.0"),
    "negative seed": ({"seed": -3}, ValueError, "seed must be at least 0: got -3"),
    "seed of None": ({"seed": None}, TypeError, "seed must be an integer: got None"),
    "missing": (
        {"first_moment": {NAME: None}},
        ValueError,
        f"first moments do not fit the config: missing {NAME} [40]",
    ),
    "extra": (
        {"second_moment": {"momentum": np.zeros((2, 3))}},
        ValueError,
        "second moments do not fit the config: unexpected momentum [2, 3]",
    ),
    "misshaped": (
        {"second_moment": {NAME: np.zeros((40, 1))}},
        ValueError,
        f"second moments do not fit the config: {NAME} must have shape [40]: got [40, 1]",
    ),
    "integers": (
        {"first_moment": {NAME: np.zeros(40, int)}},
        TypeError,
        f"{NAME} must be one of float64, float32, float16, bfloat16: got int64",
    ),
    "NaN": (
        {"first_moment": {NAME: np.append(np.zeros(39), np.nan)}},
        ValueError,
        f"{NAME} must be finite: got 1 NaN or infinite values",
    ),
    "infinite": (
        {"second_moment": {NAME: np.full(40, np.inf)}},
        ValueError,
        f"{NAME} must be finite: got 40 NaN or infinite values",
    ),
    "negative": (
        {"second_moment": {NAME: np.append(np.zeros(39), -0.25)}},
        ValueError,
        f"the second moment of {NAME} must not be negative: got -0.25",
    ),
}


@pytest.mark.parametrize("case", BAD_STATES)
def test_bad_states(backend, trainers, case):
    changes, kind, message = BAD_STATES[case]
    trainer = trainers(backend)
    trainer.train_step(*BATCH)
    before, state = everything(trainer), zero_state(step=9, seed=9)
    for field, change in changes.items():
        if isinstance(change, dict):
            change = getattr(state, field) | change
            change = {name: array for name, array in change.items() if array is not None}
        state = dataclasses.replace(state, **{field: change})
    assert refusal(trainer.load_state, state) == (kind, message)
    assert_same_bits(everything(trainer), before)


@pytest.mark.parametrize("moment", ["first_moment", "second_moment"])
def test_a_state_too_large_for_the_dtype(backend, trainers, moment):
    """Found out only when it is rounded, by which time nothing may have changed either."""
    trainer = trainers(backend, "dropout")
    trainer.train_step(*BATCH)
    before, state = everything(trainer), zero_state(step=9, seed=9)
    getattr(state, moment)[NAME] = np.append(np.zeros(39), 1e300)
    kind, message = refusal(trainer.load_state, state)
    assert (kind, message) == (ValueError, f"{NAME} overflows float32: its largest magnitude is 1e+300")
    assert_same_bits(everything(trainer), before)


# --- Mixed precision ---


@pytest.mark.extended("training", "jax")
def test_mixed_precision(port, trainers):
    trainer = trainers(port, "mixed")
    exact = ref.gradients(ref.Transformer.from_weights(CONFIG, WEIGHTS), *BATCH).loss
    losses = losses_of(trainer, [BATCH] * 30)
    assert 1e-5 < abs(losses[0] / exact - 1) < 0.03  # bfloat16 has eight bits: it is in use, and does no harm
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.8 * losses[0]
    found = everything(trainer)
    assert {array.dtype.name for name, array in found.items() if " " in name} == {"float32"}
    low_bits = found[f"weight {NAME}"].view(np.uint32) & 0xFFFF
    assert low_bits.any()  # no weight was rounded to bfloat16 on the way
    twin = port.package.Transformer.from_weights(CONFIG, trainer.model.export_weights())
    logits = port.to_numpy(trainer.model(*BATCH[:2]))
    assert logits.dtype == np.float32
    np.testing.assert_array_equal(logits, port.to_numpy(twin(*BATCH[:2])))
    total, _ = trainer.evaluate(*BATCH)
    expected, _ = ref.cross_entropy(logits, RIGHT, CONFIG.replace(label_smoothing=0.0))
    assert port.to_numpy(total).dtype == np.float32
    assert_near(float(total), float(expected), 1e-6)


# --- Activation checkpointing ---


@pytest.mark.extended("training", "jax", "tf")
def test_activation_checkpointing_changes_no_number(backend, trainers):
    """Losses, norms, weights and moments of three steps; so dropout falls both times on the same elements."""
    found = {}
    for kind in ("everything kept", "checkpointed"):
        trainer = trainers(backend, kind)
        results = take_steps(trainer, BATCHES[:3])
        found[kind] = everything(trainer)
        found[kind] |= {
            what: np.array([float(getattr(result, what)) for result in results]) for what in ("loss", "gradient_norm")
        }
    kept, checkpointed = found.values()
    assert list(kept) == list(checkpointed)
    for name, expected in kept.items():
        assert_near(checkpointed[name], expected, 1e-12, name)
    stacks = trainer.model.encoder, trainer.model.decoder
    assert not any(getattr(stack, "activation_checkpointing", False) for stack in stacks)  # but for a step


@pytest.mark.only("torch")
def test_torch_keeps_less(port, trainers):
    """A layer's input alone outlives its forward pass."""
    import torch

    def kept_bytes(kind):
        sizes = []

        def keep(tensor):
            sizes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            trainers(port, kind).train_step(*BATCH)
        return sum(sizes)

    assert kept_bytes("checkpointed") < 0.5 * kept_bytes("everything kept")


@pytest.mark.only("jax")
@pytest.mark.extended("training", "jax")
def test_jax_keeps_less(port):
    """XLA says how much room a step takes beside what goes in and comes out."""
    import jax

    training, compilation = port.package.training, port.package.compilation
    config = CONFIG.replace(num_encoder_layers=2, num_decoder_layers=2)
    batch = [np.tile(ids, (1, 8)) for ids in BATCH]

    def room(settings):
        model = port.package.Transformer.from_weights(config, random_weights(config))
        trainer = port.package.Trainer(model, settings)
        numbers = {"random_bits": np.zeros(2, np.uint32), "learning_rate": 1.0, "corrections": (1.0, 1.0)}
        inputs = compilation.parameters_of(model), trainer.optimizer, training._take(model, *batch), numbers
        step = trainer._compiled_step.lower(*inputs)
        return step.compile().memory_analysis().temp_size_in_bytes

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)  # it is they that could undo it
    try:
        kept, checkpointed = (room(ref.TrainingConfig(activation_checkpointing=again)) for again in (False, True))
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
    assert checkpointed < 0.7 * kept


@pytest.mark.only("jax")
def test_new_moments_in_jax_take_the_place_of_the_old(port, trainers):
    """Each of the two its own: in the place of the other, XLA would have to copy one of them first."""
    trainer = trainers(port)

    def places():
        moments = trainer.optimizer.first_moment, trainer.optimizer.second_moment
        return [{name: array.unsafe_buffer_pointer() for name, array in moment.items()} for moment in moments]

    trainer.train_step(*BATCH)
    before = places()
    trainer.train_step(*BATCH)
    assert places() == before


@pytest.mark.only("tf")
def test_tf_computes_again(port, trainers):
    """What is kept is decided where the graph runs; here, that there are more matrix products in it."""

    def products(kind):
        trainer = trainers(port, kind)
        trainer.train_step(*BATCH)
        (step,) = trainer._traced.values()
        graph = step.get_concrete_function().graph.as_graph_def()
        nodes = [node for function in graph.library.function for node in function.node_def]
        return sum("MatMul" in node.op for node in [*graph.node, *nodes])

    assert products("checkpointed") > 1.2 * products("everything kept")


# --- Compilation ---


@pytest.mark.only("jax")
def test_jax_compiles_a_step_once(port, trainers, caplog):
    """Another step, learning rate or seed, and weights and moments from elsewhere, meet what is compiled already."""
    import jax

    trainer = trainers(port)
    trainer.train_step(*BATCH)
    trainer.evaluate(*BATCH)
    with caplog.at_level(logging.DEBUG, "jax"), jax.log_compiles():
        jax.jit(lambda x: x + 1)(np.ones(5)).block_until_ready()
        assert "Compiling" in caplog.text  # a compilation is seen
        caplog.clear()
        for state in (zero_state(step=1000, seed=7), zero_state(step=10_000, seed=8)):
            trainer.load_state(state)
            take_steps(trainer, BATCHES)
            trainer.evaluate(*BATCH)
    assert "Compiling" not in caplog.text


@pytest.mark.only("tf")
def test_tf_traces_a_step_once(port, trainers, monkeypatch):
    """Likewise, and for batches of every shape."""
    trainer, traced = trainers(port), []
    trainer.train_step(*BATCH)
    trainer.evaluate(*BATCH)
    cross_entropy = port.package.training.cross_entropy

    def traced_cross_entropy(*args):
        traced.append(args)
        return cross_entropy(*args)

    monkeypatch.setattr(port.package.training, "cross_entropy", traced_cross_entropy)
    for state in (zero_state(step=1000, seed=7), zero_state(step=10_000, seed=8)):
        trainer.load_state(state)
        for batch in (*BATCHES, [array[:3, :3] for array in BATCH]):
            trainer.train_step(*batch)
            trainer.evaluate(*batch)
    assert traced == []
    port.package.gradients(trainer.model, *BATCH)
    assert len(traced) == 1  # a call is seen


@pytest.mark.only("torch")
def test_torch_compile(port, trainers, monkeypatch):
    """The same losses when a compiler traces the whole of forward and backward pass; which one is its user's choice."""
    import torch

    expected = losses_of(trainers(port), HANDOVER[:3])
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager", fullgraph=True))
    model = model_of(port, "float64")
    trainer = port.package.Trainer(model, ref.TrainingConfig(**SCHEDULE), compile=True)
    assert_near(losses_of(trainer, HANDOVER[:3]), expected, 1e-12)
    torch.compiler.reset()


def compiled_by_xla(port, kind):
    model = port.package.Transformer.from_weights(CONFIG.replace(dropout=TRAINERS[kind][1]), WEIGHTS, dtype="float64")
    return port.package.Trainer(model, ref.TrainingConfig(**SCHEDULE, **TRAINERS[kind][2]), compile=True)


@pytest.mark.only("tf")
@pytest.mark.parametrize("kind", ["plain", "four slices, clipped"])
def test_xla(port, trainers, kind):
    trainer = compiled_by_xla(port, kind)
    assert_near(losses_of(trainer, BATCHES[:3]), losses_of(trainers(port, kind), BATCHES[:3]), 1e-12)
    (step,) = trainer._traced.values()
    assert step.function_spec.jit_compile
    found, expected = trainer.gradient(*BATCH), trainers(port, kind)
    port.package.set_weights(expected.model, trainer.model.export_weights())
    expected = expected.gradient(*BATCH)
    assert_near(found.loss, expected.loss, 1e-12)
    trainer.evaluate(*BATCH)
    _, gradient, evaluation = trainer._traced.values()
    assert gradient.function_spec.jit_compile
    assert not evaluation.function_spec.jit_compile  # of any number of shapes


@pytest.mark.only("tf")
@pytest.mark.extended("training")
def test_dropout_of_xla_draws_the_same_for_layers_that_are_computed_again(port):
    kept, again = (losses_of(compiled_by_xla(port, kind), BATCHES[:2]) for kind in ("everything kept", "checkpointed"))
    assert_near(kept, again, 1e-12)


# --- Learning ---


def reversals(count):
    """Yield batches of sentences that are to be said backwards."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        source = rng.integers(3, 9, (8, 4))
        backwards = source[:, ::-1]
        yield source, np.insert(backwards, 0, CONFIG.bos_id, 1), np.insert(backwards, 4, CONFIG.eos_id, 1)


@pytest.fixture(scope="module")
def learning():
    """The reference, as it learns from fresh weights to reverse: its weights at the start, its losses and itself."""
    weights = {name: array.astype(np.float64) for name, array in ref.init_weights(CONFIG).items()}
    model = ref.Transformer.from_weights(CONFIG, weights, dtype="float64")
    trainer = ref.Trainer(model, ref.TrainingConfig(**SCHEDULE))
    return weights, losses_of(trainer, reversals(250)), trainer


def test_the_reference_learns_to_reverse(learning):
    _, losses, trainer = learning
    assert losses[0] > 3.0  # guessing among all 37 words costs log 37 = 3.6
    totals, tokens = zip(*(trainer.evaluate(*batch) for batch in list(reversals(270))[250:]), strict=True)
    assert sum(totals) / sum(tokens) < 0.4  # guessing among the six in use costs log 6 for four tokens in five: 1.4


@pytest.mark.extended("training", "jax", "tf")
def test_every_port_learns_alike(port, learning, trainers):
    weights, losses, _ = learning
    trainer = trainers(port, weights=weights)
    found = losses_of(trainer, reversals(20))
    np.testing.assert_allclose(found, losses[:20], rtol=1e-10, atol=0)
