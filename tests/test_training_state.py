"""The state of a training run: copies, resumption in any framework, and rejected batches and states."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest
from conftest import assert_same_bits, refusal
from training_runs import (
    BATCH,
    CONFIG,
    HANDOVER,
    NAME,
    RIGHT,
    SOURCE,
    TARGET,
    WEIGHTS,
    assert_near,
    at_the_start,
    build,
    everything,
    losses_of,
    make_batch,
    mode_of,
    model_of,
    take_steps,
    zero_state,
)
from training_runs import _quick_compilation as _quick_compilation  # a fixture of every test

import reference_numpy as ref


def altered(ids, row, column, value):
    """Return a copy of IDs in which one is replaced."""
    ids = ids.copy()
    ids[row, column] = value
    return ids


# --- State ---
def test_exported_state_is_a_copy(backend):
    trainer = build(backend) if backend.name in ("numpy", "torch") else at_the_start(backend)
    state = trainer.export_state()
    assert (state.step, state.seed) == (0, 0)
    for moments in (state.first_moment, state.second_moment):
        assert list(moments) == list(WEIGHTS)
        for name, array in moments.items():
            assert array.shape == WEIGHTS[name].shape
            assert not array.any()
    trainer = at_the_start(backend)
    trainer.train_step(*BATCH)
    exported = everything(trainer)
    kept = {name: array.copy() for name, array in exported.items()}
    trainer.train_step(*BATCH)
    assert_same_bits(exported, kept)  # further training doesn't change exported arrays
    now = everything(trainer)
    for array in everything(trainer).values():
        array[...] = 99  # changing exported arrays doesn't affect the trainer
    assert_same_bits(everything(trainer), now)
    state = trainer.export_state()
    trainer.load_state(state)
    for array in (*state.first_moment.values(), *state.second_moment.values()):
        array[...] = 99
    assert_same_bits(everything(trainer), now)


@pytest.mark.extended("backends", "tf")
def test_resumed_run_is_bit_exact(backend, tmp_path):
    """A run with dropout can be interrupted at any step and resumed from a file with a new model and trainer."""
    trainer, batches = at_the_start(backend, "dropout"), [make_batch(seed) for seed in range(4)]
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


def test_dropout_depends_on_seed_and_step_only(backend):
    trainer = at_the_start(backend, "dropout")

    def first(seed, step):
        backend.package.set_weights(trainer.model, WEIGHTS)
        trainer.load_state(zero_state(step, seed))
        return float(trainer.train_step(*BATCH).loss)

    mode, generator = mode_of(backend, trainer.model), np.random.get_state()[1].tolist()
    losses = [first(*pair) for pair in ((0, 0), (0, 1), (1, 0), (1, 1))]
    assert len(set(losses)) == 4
    assert first(0, 1) == losses[1]
    assert mode_of(backend, trainer.model) == mode  # the caller's random state is unchanged
    assert np.random.get_state()[1].tolist() == generator
    undropped = ref.gradients(ref.Transformer.from_weights(CONFIG, WEIGHTS), *BATCH).loss
    assert min(abs(loss / undropped - 1) for loss in losses) > 1e-4


@pytest.fixture(scope="module")
def uninterrupted(backends, tmp_path_factory):
    """The losses of eight steps in each backend, and the checkpoint after four steps."""
    runs = {}
    for backend in backends:
        trainer, path = at_the_start(backend), tmp_path_factory.mktemp(backend.name) / "run.safetensors"
        losses = losses_of(trainer, HANDOVER[:4])
        weights, state = trainer.model.export_weights(), trainer.export_state()
        ref.save_checkpoint(path, ref.Checkpoint(CONFIG, trainer.settings, weights, state, {}))
        losses = [*losses, *losses_of(trainer, HANDOVER[4:])]
        runs[backend.name] = path, losses, float(trainer.evaluate(*BATCH)[0])
    return runs


@pytest.mark.extended("training", "torch", "jax", "tf")  # each backend takes all four steps
def test_run_continues_in_another_framework(backend, uninterrupted):
    for other, (path, losses, final) in uninterrupted.items():
        trainer, checkpoint = at_the_start(backend), ref.load_checkpoint(path)
        backend.package.set_weights(trainer.model, checkpoint.weights)
        trainer.load_state(checkpoint.state)
        assert trainer.step == 4
        # The contract requires 1e-10. Errors of correct ports are below 1e-14.
        assert_near(losses_of(trainer, HANDOVER[4:]), losses[4:], 1e-12, f"from {other}")
        assert_near(float(trainer.evaluate(*BATCH)[0]), final, 1e-12, f"from {other}")


BAD_BATCHES = {
    "labels too short": ((SOURCE, TARGET, RIGHT[:, :4]), ValueError, "labels must have shape (8, 5): got (8, 4)"),
    "labels of fewer sentences": ((SOURCE, TARGET, RIGHT[:4]), ValueError, "labels must have shape (8, 5): got (4, 5)"),
    "flat labels": ((SOURCE, TARGET, RIGHT.ravel()), ValueError, "labels must have shape [batch, length]: got (40,)"),
    "label too large": (
        (SOURCE, TARGET, altered(RIGHT, 0, 1, 37)),
        ValueError,
        "labels must be in [0, 37): got 37 at [0, 1]",
    ),
    "label -100": (
        (SOURCE, TARGET, altered(RIGHT, 1, 3, -100)),
        ValueError,
        "labels must be in [0, 37): got -100 at [1, 3]",
    ),
    "float labels": ((SOURCE, TARGET, RIGHT.astype(float)), TypeError, "labels must be integers: got float64"),
    "float source": ((SOURCE.astype("float32"), TARGET, RIGHT), TypeError, "source_ids must be integers: got float32"),
    "boolean target": ((SOURCE, TARGET > 0, RIGHT), TypeError, "target_ids must be integers: got bool"),
    "source out of range": (
        (altered(SOURCE, 0, 0, 37), TARGET, RIGHT),
        ValueError,
        "source_ids must be in [0, 37): got 37 at [0, 0]",
    ),
    "target negative": (
        (SOURCE, altered(TARGET, 0, 0, -1), RIGHT),
        ValueError,
        "target_ids must be in [0, 37): got -1 at [0, 0]",
    ),
    "a different batch size": (
        (SOURCE[:7], TARGET, RIGHT),
        ValueError,
        "source_ids and target_ids must have the same batch size: got 7 and 8",
    ),
    "empty batch": (
        (SOURCE[:0], TARGET[:0], RIGHT[:0]),
        ValueError,
        "source_ids must contain at least one token: got shape (0, 4)",
    ),
}


@pytest.mark.parametrize("case", BAD_BATCHES)
def test_invalid_batches_are_rejected(backend, case):
    batch, kind, message = BAD_BATCHES[case]
    trainer = at_the_start(backend)
    trainer.train_step(*BATCH)
    before = everything(trainer)
    for function in (trainer.train_step, trainer.evaluate, partial(backend.package.gradients, trainer.model)):
        for ids in (batch, [backend.from_numpy(array) for array in batch]):
            assert refusal(function, *ids) == (kind, message)
    assert_same_bits(everything(trainer), before)


def test_batch_not_divisible_into_micro_batches_raises_value_error(backend):
    trainer = at_the_start(backend, "four micro-batches, clipped")
    before = everything(trainer)
    batch = [array[:6] for array in BATCH]
    assert refusal(trainer.train_step, *batch) == (
        ValueError,
        "accumulation_steps must divide the batch size: got 4 and 6",
    )
    assert_same_bits(everything(trainer), before)
    trainer.evaluate(*batch)  # evaluation doesn't use micro-batches


MIXED = ref.TrainingConfig(mixed_bfloat16=True)
TOO_COARSE = "training requires float32 or float64 weights: got bfloat16; to compute in bfloat16, set mixed_bfloat16"


@pytest.mark.parametrize("settings", [ref.TrainingConfig(), MIXED], ids=["plain", "mixed"])
def test_bfloat16_weights_are_rejected_by_the_trainer(port, settings):
    assert refusal(port.package.Trainer, model_of(port, "bfloat16"), settings) == (ValueError, TOO_COARSE)


def test_mixed_precision_requires_float32_weights(port):
    expected = ValueError, "mixed_bfloat16 requires float32 weights: got float64"
    assert refusal(port.package.Trainer, model_of(port, "float64"), MIXED) == expected


def test_mixed_precision_is_rejected_in_numpy():
    expected = ValueError, "mixed_bfloat16 is not supported by this package"
    for dtype in ("float64", "float32"):
        assert refusal(ref.Trainer, ref.Transformer.from_weights(CONFIG, WEIGHTS, dtype), MIXED) == expected


BAD_STATES = {  # changes to attributes of the state, or to one first or second moment; None removes it
    "negative step": ({"step": -1}, ValueError, "step must be at least 0: got -1"),
    "float step": ({"step": 1.0}, TypeError, "step must be an integer: got 1.0"),
    "negative seed": ({"seed": -3}, ValueError, "seed must be at least 0: got -3"),
    "no seed": ({"seed": None}, TypeError, "seed must be an integer: got None"),
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
        f"dtype of {NAME} must be one of float64, float32, float16, bfloat16: got int64",
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
def test_invalid_states_are_rejected(backend, case):
    changes, kind, message = BAD_STATES[case]
    trainer = at_the_start(backend)
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
def test_state_that_overflows_the_dtype_is_rejected(backend, moment):
    """The error occurs only when the state is rounded, and even then the trainer must remain unchanged."""
    trainer = at_the_start(backend, "dropout")
    trainer.train_step(*BATCH)
    before, state = everything(trainer), zero_state(step=9, seed=9)
    getattr(state, moment)[NAME] = np.append(np.zeros(39), 1e300)
    kind, message = refusal(trainer.load_state, state)
    assert (kind, message) == (ValueError, f"{NAME} overflows float32: the array's largest magnitude is 1e+300")
    assert_same_bits(everything(trainer), before)
