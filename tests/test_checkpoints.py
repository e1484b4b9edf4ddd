"""Checkpoints restore every bit, damaged files are rejected with a reason, and a failed save changes nothing."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import signal
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import NAME, PROGRESS, assert_same, make, small_config
from checkpoint_files import path as path  # a fixture
from checkpoint_files import saved as saved  # a fixture
from conftest import assert_same_bits, random_weights, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file
from test_files import flipped, header_size, tensor_at

from reference_numpy import PRESETS, load_weights, save_weights
from transformer_spec.checkpoint import load_checkpoint, save_checkpoint
from transformer_spec.checkpoint_directory import RUN, read_run
from transformer_spec.files import checksum, load_vocabulary
from transformer_spec.training_config import TrainingState


def with_state(checkpoint, **changes):
    return dataclasses.replace(checkpoint, state=dataclasses.replace(checkpoint.state, **changes))


@pytest.mark.parametrize("preset", PRESETS)
def test_checkpoint_of_every_preset_round_trips(path, preset):
    checkpoint = make(tiny_config(preset, num_encoder_layers=1, num_decoder_layers=2))
    save_checkpoint(path, checkpoint)
    assert_same(load_checkpoint(path), checkpoint)
    assert list(path.parent.iterdir()) == [path]


def test_numpy_integers_load_as_python_ints(path):
    save_checkpoint(path, with_state(make(), step=np.int64(3), seed=np.uint32(4)))
    state = load_checkpoint(path).state
    assert (type(state.step), state.step, type(state.seed), state.seed) == (int, 3, int, 4)


@pytest.mark.parametrize("moments", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_every_dtype_keeps_its_bits(path, dtype, moments):
    checkpoint = make(dtype=dtype, moments=moments, vocabulary=None)
    tiny = np.finfo(moments) if moments != "bfloat16" else ml_dtypes.finfo(moments)
    for moment in (checkpoint.state.first_moment, checkpoint.state.second_moment):
        moment[NAME].flat[:4] = [-0.0, tiny.smallest_subnormal, tiny.max, tiny.tiny]
    checkpoint.state.first_moment[NAME].flat[4] = -tiny.smallest_subnormal
    save_checkpoint(path, checkpoint)
    assert_same(load_checkpoint(path), checkpoint)


def test_file_does_not_depend_on_the_memory_layout(path, saved):
    checkpoint = make()

    def laid_out_otherwise(arrays):
        return {name: np.asfortranarray(array).astype(">f4", order="K") for name, array in reversed(arrays.items())}

    state = checkpoint.state
    save_checkpoint(
        path,
        dataclasses.replace(
            checkpoint,
            weights=laid_out_otherwise(checkpoint.weights),
            state=TrainingState(
                state.step, state.seed, laid_out_otherwise(state.first_moment), laid_out_otherwise(state.second_moment)
            ),
            progress=dict(reversed(PROGRESS.items())),
        ),
    )
    assert path.read_bytes() == saved


def test_checkpoint_file_contains_the_documented_names(path, saved):
    names = make().weights
    with safe_open(path, framework="numpy") as file:
        moments = {f"{moment}_moment.{name}" for moment in ("first", "second") for name in names}
        assert set(file.keys()) == {*names, *moments, "vocabulary"}
        assert file.get_tensor("vocabulary").dtype == np.uint8
        (description,) = file.metadata().values()
        description = json.loads(description)
    assert description["version"] == 2
    assert set(description["sha256"]) == {*names, *moments, "vocabulary"}
    assert description["training"] == {
        "step": 41,
        "seed": 12345,
        "settings": make().settings.to_dict(),
        "progress": PROGRESS,
    }


def test_checkpoint_loads_as_a_weight_file(path, backend):
    checkpoint = make()
    save_checkpoint(path, checkpoint)
    config, weights = load_weights(path)
    assert config == checkpoint.config
    assert_same_bits(weights, checkpoint.weights)
    assert_same_bits(backend.package.load_transformer(path).export_weights(), checkpoint.weights)


def test_loading_a_weight_file_as_a_checkpoint_raises(path):
    config = small_config()
    save_weights(path, config, random_weights(config))
    reason = f"^{re.escape(str(path))} is not a usable checkpoint: the file contains weights but no training state$"
    with pytest.raises(ValueError, match=reason):
        load_checkpoint(path)
    with pytest.raises(FileNotFoundError, match=r"^there is no checkpoint .*nowhere$"):
        load_checkpoint(path.with_name("nowhere"))


def test_flipped_bits_in_tensors_are_detected(path, saved):
    """Each of 40 flipped bits in weights, moments, and the vocabulary is detected, and the message names the tensor."""
    rng = np.random.default_rng(0)
    for position in rng.integers(header_size(saved), len(saved), 40):
        path.write_bytes(flipped(saved, position, rng))
        name = re.escape(tensor_at(saved, position))
        reason = f"^{re.escape(str(path))} is not a usable checkpoint: {name} is damaged: expected SHA-256 "
        with pytest.raises(ValueError, match=reason):
            load_checkpoint(path)


@pytest.mark.parametrize("vocabulary", [None, b"", bytes(range(256)) * 9], ids=["none", "empty", "bytes"])
def test_vocabulary_round_trips(path, vocabulary):
    config = small_config()
    save_weights(path, config, random_weights(config), dtype="bfloat16", vocabulary=vocabulary)
    assert load_vocabulary(path) == vocabulary
    assert_same_bits(load_weights(path)[1], random_weights(config, dtype=ml_dtypes.bfloat16))
    save_checkpoint(path, make(vocabulary=vocabulary))
    assert load_vocabulary(path) == vocabulary
    assert load_checkpoint(path).vocabulary == vocabulary
    for save in (
        partial(save_weights, path, config, random_weights(config)),
        lambda vocabulary: save_checkpoint(path, make(vocabulary=vocabulary)),
    ):
        with pytest.raises(TypeError, match=r"^vocabulary must be bytes: got str$"):
            save(vocabulary="model")


ANY = make()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(progress=st.dictionaries(st.text(), JSON, max_size=3))
def test_arbitrary_progress_round_trips(tmp_path_factory, progress):
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    save_checkpoint(path, dataclasses.replace(ANY, progress=progress))
    assert_same(load_checkpoint(path), dataclasses.replace(ANY, progress=progress))


def test_numpy_step_and_seed_load_as_python_ints(path):
    save_checkpoint(path, with_state(make(), step=np.int64(3), seed=np.uint32(4)))
    state = load_checkpoint(path).state
    assert [(type(value), value) for value in (state.step, state.seed)] == [(int, 3), (int, 4)]


CIRCLE: list = []
CIRCLE.append(CIRCLE)


DEEP: list = []
for _ in range(100_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "value",
    [
        *(math.nan, -math.inf, (1, 2), {1: "a"}, {True: 1}, {1, 2}, b"bytes", np.float64(1), np.int64(1), np.ones(2)),
        *(Path("a"), {"a": [{"b": (1,)}]}, "\ud83d\ude00", 10**5000, CIRCLE, DEEP, signal.SIGINT),
    ],
    ids=lambda value: type(value).__name__,
)
def test_unserializable_progress_raises_value_error(path, saved, value):
    with pytest.raises(ValueError, match=r"^progress\['place'\] must contain only "):
        save_checkpoint(path, make(progress={**PROGRESS, "place": value}))
    assert path.read_bytes() == saved


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        (lambda c: with_state(c, step=-1), ValueError, "step must be at least 0: got -1"),
        (lambda c: with_state(c, step=1.0), TypeError, "step must be an integer: got 1.0"),
        (lambda c: with_state(c, seed=True), TypeError, "seed must be an integer: got True"),
        (lambda c: with_state(c, first_moment={}), ValueError, "first moments contain 0 tensors"),
        (
            lambda c: with_state(c, second_moment={**c.state.second_moment, NAME: np.full((24, 24), -1.0)}),
            ValueError,
            f"the second moment of {NAME} must not be negative",
        ),
        (
            lambda c: with_state(c, first_moment={**c.state.first_moment, NAME: np.ones((24, 24), int)}),
            TypeError,
            f"dtype of {NAME} must be one of float64",
        ),
        (lambda c: dataclasses.replace(c, weights={}), ValueError, "weights contain 0 tensors"),
        (lambda c: dataclasses.replace(c, config=c.config.replace(d_ff=41)), ValueError, "weights do not fit"),
        (lambda c: dataclasses.replace(c, progress=[]), TypeError, "progress must be a dict: got list"),
        (lambda c: dataclasses.replace(c, progress={1: 1}), ValueError, r"progress\[1\] must contain only"),
    ],
)
def test_save_rejects_checkpoints_that_load_rejects(path, saved, change, error, reason):
    with pytest.raises(error, match=f"^{reason}"):
        save_checkpoint(path, change(make()))
    assert path.read_bytes() == saved
    assert list(path.parent.iterdir()) == [path]


def rewrite(path, *, tensors=None, description=None, without=()):
    """Rewrite the file with different tensors or a different description, so that the file itself is valid."""
    with safe_open(path, framework="numpy") as file:
        old = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        (text,) = file.metadata().values()
    new = {name: array for name, array in {**old, **(tensors or {})}.items() if name not in without}
    content = {**json.loads(text), "sha256": {name: checksum(name, array) for name, array in new.items()}}
    if description is not None:
        content = description(content)
    save_file(new, path, metadata={"transformer-parity": json.dumps(content)})


def training(**changes):
    return lambda content: {**content, "training": {**content["training"], **changes}}


def training_without(field):
    def change(content):
        del content["training"][field]
        return content

    return change


def model(**changes):
    return lambda content: {**content, "config": {**content["config"], **changes}}


FITS = np.ones((24, 24), np.float32)
OPTIMIZER = make().settings.to_dict()
CORRUPTIONS = {
    "no first moment": ({"without": [f"first_moment.{NAME}"]}, f"first moments .* missing {NAME}"),
    "no second moment": ({"without": [f"second_moment.{NAME}"]}, f"second moments .* missing {NAME}"),
    "no weight": ({"without": [NAME]}, f"weights .* missing {NAME}"),
    "extra tensor": ({"tensors": {"third": FITS}}, "weights .* unexpected third"),
    "extra moment": ({"tensors": {"first_moment.third": FITS}}, "first moments .* unexpected third"),
    "shape": ({"tensors": {f"first_moment.{NAME}": FITS[:, 1:].copy()}}, rf"{NAME} must have shape \[24, 24\]"),
    "dtype": (
        {"tensors": {f"first_moment.{NAME}": FITS.astype(np.int32)}},
        f"dtype of {NAME} must be one of .* got int32",
    ),
    "negative": ({"tensors": {f"second_moment.{NAME}": -FITS}}, f"second moment of {NAME} must not be negative"),
    "NaN": ({"tensors": {f"second_moment.{NAME}": FITS * np.nan}}, f"{NAME} must be finite"),
    "infinite": ({"tensors": {f"first_moment.{NAME}": FITS * np.inf}}, f"{NAME} must be finite"),
    "NaN weight": ({"tensors": {NAME: FITS * np.nan}}, f"{NAME} must be finite"),
    "vocabulary": (
        {"tensors": {"vocabulary": np.ones(5, np.int8)}},
        r"expected vocabulary to be a 1-D uint8 tensor, got int8 \[5\]",
    ),
    "square vocabulary": (
        {"tensors": {"vocabulary": np.ones((2, 2), np.uint8)}},
        r"expected vocabulary to be a 1-D uint8 tensor, got uint8 \[2, 2\]",
    ),
    "version": ({"description": lambda c: {**c, "version": 3}}, "expected format version 2, got 3"),
    "unknown entry": ({"description": lambda c: {**c, "trainer": 1}}, "metadata contains unknown entries: trainer"),
    "no training": (
        {"description": lambda c: {**c, "training": None}},
        "expected the training state to be an object .* NoneType",
    ),
    "training list": (
        {"description": lambda c: {**c, "training": [1]}},
        "expected the training state to be an object .* list",
    ),
    "missing training": (
        {"description": lambda c: {name: c[name] for name in ("version", "config", "sha256")}},
        "weights .* unexpected first_moment",
    ),
    "no step": ({"description": training_without("step")}, "missing fields of the training state: step"),
    "no progress": ({"description": training_without("progress")}, "missing fields of the training state: progress"),
    "unknown field": ({"description": training(rng=1)}, "unknown fields of the training state: rng"),
    "negative step": ({"description": training(step=-1)}, "step must be at least 0: got -1"),
    "float step": ({"description": training(step=1.0)}, "step must be an integer: got 1.0"),
    "negative seed": ({"description": training(seed=-7)}, "seed must be at least 0: got -7"),
    "progress list": ({"description": training(progress=[])}, "progress must be a dict: got list"),
    "progress NaN": ({"description": training(progress={"x": math.nan})}, r"progress\['x'\] must contain only"),
    "settings list": ({"description": training(settings=[])}, "training settings must be a mapping"),
    "no settings": (
        {"description": training(settings={})},
        "missing training settings: accumulation_steps, activation_checkpointing, beta1",
    ),
    "settings": ({"description": training(settings={**OPTIMIZER, "x": 1})}, "unknown training settings: x"),
    "setting": ({"description": training(settings={**OPTIMIZER, "beta1": 1.0})}, r"beta1 must be in \[0, 1\)"),
    "NaN setting": ({"description": training(settings={**OPTIMIZER, "epsilon": math.nan})}, "epsilon must be positive"),
    "sizes": ({"description": model(d_ff=41)}, r"inner_proj.kernel must have shape \[24, 41\]: got \[24, 40\]"),
    "tying": ({"description": model(tie_embeddings="none")}, "missing target_embedding.table"),
    "layers": ({"description": model(num_encoder_layers=10**9)}, "too few for the config's"),
    "config": ({"description": model(depth=6)}, "unknown config fields: depth"),
}


@pytest.mark.parametrize("case", CORRUPTIONS)
def test_corrupted_checkpoint_is_rejected(path, saved, case):
    """The file itself is valid: without the change, it would load."""
    rewrite(path)
    load_checkpoint(path)
    change, reason = CORRUPTIONS[case]
    rewrite(path, **change)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))} is not a usable checkpoint: .*{reason}"):
        load_checkpoint(path)


OF_THE_RUN = [
    *("no training", "training list", "no step", "no progress", "unknown field", "negative step", "float step"),
    *("negative seed", "progress list", "progress NaN", "settings list", "no settings", "settings", "setting"),
    "NaN setting",
]


@pytest.mark.parametrize("case", OF_THE_RUN)
def test_corrupted_sharded_checkpoint_is_rejected(tmp_path, case):
    """It is rejected like an unsharded checkpoint, before any tensor in its directory is read."""
    path = tmp_path / RUN
    save_checkpoint(path, make())
    rewrite(path)
    assert read_run(tmp_path).training["progress"] == PROGRESS
    change, reason = CORRUPTIONS[case]
    rewrite(path, **change)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))} is not a usable sharded checkpoint: .*{reason}"):
        read_run(tmp_path)


def test_directory_without_training_state_is_rejected(tmp_path):
    save_weights(tmp_path / RUN, small_config(), random_weights(small_config()))
    with pytest.raises(
        ValueError, match=r"is not a usable sharded checkpoint: the file contains weights but no training state$"
    ):
        read_run(tmp_path)


def test_truncated_file_is_rejected(path, saved):
    end = header_size(saved)
    for length in {*range(20), *range(0, len(saved), len(saved) // 150), end - 1, end, end + 1, len(saved) - 1}:
        path.write_bytes(saved[:length])
        with pytest.raises(ValueError, match=f"^{re.escape(str(path))} is not a usable checkpoint: "):
            load_checkpoint(path)


def test_flipped_bits_in_the_header_are_rejected_or_harmless(path, saved):
    """Damage is rejected, unless it only changes whitespace or turns a description value into a different legal value.

    For example, nothing shows that a step of 41 was originally 43. Even then, all tensors are restored exactly.
    """
    rng = np.random.default_rng(0)
    end = header_size(saved)
    description = saved.index(b"transformer-parity")
    description_end = saved.index(b'}"}', description)
    expected = make()
    refusals = 0
    positions = [*range(8), *rng.integers(8, end, 300), *rng.integers(description, description_end, 300)]
    for position in positions:
        path.write_bytes(flipped(saved, position, rng))
        try:
            got = load_checkpoint(path)
        except ValueError:
            refusals += 1
            continue
        assert_same_bits(got.weights, expected.weights)
        assert_same_bits(got.state.first_moment, expected.state.first_moment)
        assert_same_bits(got.state.second_moment, expected.state.second_moment)
        if not description <= position <= description_end:
            assert_same(got, expected)
    assert 550 < refusals < len(positions)
