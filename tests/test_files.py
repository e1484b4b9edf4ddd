"""The weight file: the same bytes for the same content, whole or absent, and refused in one way when damaged."""

from __future__ import annotations

import json
import math
import pickle
import re
import signal
import struct
from contextlib import contextmanager
from pathlib import Path

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np
import pytest
from conftest import assert_same_bits, random_weights, tiny_config
from safetensors.numpy import save_file

from reference_numpy import load_weights, save_weights


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


@pytest.fixture
def config():
    return tiny_config(num_encoder_layers=1, num_decoder_layers=1, attention_bias=True)


@pytest.fixture
def saved(path, config):
    """Return the bytes of a good file, which lies at ``path``."""
    save_weights(path, config, random_weights(config))
    return path.read_bytes()


def header_size(content):
    return 8 + struct.unpack("<Q", content[:8])[0]


def with_description(content, description):
    """Return a file with another description of its config; None leaves it out."""
    end = header_size(content)
    header = json.loads(content[8:end])
    header["__metadata__"] = {"other": "x"} if description is None else {"transformer-parity": description}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[end:]


def test_bytes_depend_on_content_only(path, config):
    weights = random_weights(config, dtype="float64")
    save_weights(path, config, weights)
    content = path.read_bytes()
    for _ in range(5):  # hash tables are seeded anew each time
        save_weights(path, config, dict(reversed(weights.items())))
        assert path.read_bytes() == content


@pytest.mark.parametrize("storage", [None, "float64", "float32", "float16", "bfloat16"])
def test_storage_dtype(path, config, storage):
    weights = random_weights(config, dtype="float64")
    save_weights(path, config, weights, dtype=storage)
    loaded_config, loaded = load_weights(path)
    assert loaded_config == config
    expected = {name: array.astype(storage or "float64") for name, array in weights.items()}
    assert_same_bits(loaded, expected)
    with pytest.raises(ValueError, match=r"^dtype must be one of float64, float32, float16, bfloat16: got 'int8'$"):
        save_weights(path, config, weights, dtype="int8")


def test_overflow_of_storage_is_refused(path, config, saved):
    name = "encoder.layers.0.feed_forward.inner_proj.kernel"
    weights = {**random_weights(config), name: np.full((24, 40), -1e5)}
    with pytest.raises(ValueError, match=rf"^{name} overflows float16: its largest magnitude is 100000\.0$"):
        save_weights(path, config, weights, dtype="float16")
    assert path.read_bytes() == saved


@pytest.mark.parametrize("error", [OSError(28, "No space left"), KeyboardInterrupt(), MemoryError()], ids=repr)
@pytest.mark.parametrize("moment", ["save_file", "os.fsync", "os.replace"])
def test_failed_save_changes_nothing(path, config, saved, monkeypatch, error, moment):
    def fail(*args, **kwargs):
        if moment == "save_file":
            Path(args[1]).write_bytes(saved[:1000])
        raise error

    monkeypatch.setattr(f"reference_numpy.files.{moment}", fail)
    with pytest.raises(type(error)):
        save_weights(path, config, random_weights(config, seed=1))
    assert path.read_bytes() == saved
    assert list(path.parent.iterdir()) == [path]


def test_saved_file_is_as_readable_as_any_other(path, saved):
    other = path.with_name("other")
    other.write_text("")
    assert oct(path.stat().st_mode) == oct(other.stat().st_mode)


@pytest.mark.parametrize("target", ["nowhere/model.safetensors", "."])
def test_impossible_place(tmp_path, config, target):
    with pytest.raises(OSError):  # noqa: PT011  each system says it in its own words
        save_weights(tmp_path / target, config, random_weights(config, dtype="float64"))
    with pytest.raises(FileNotFoundError, match=r"^there is no weight file "):
        load_weights(tmp_path / target)


def refused(path):
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))} is not a usable weight file: "):
        load_weights(path)


def test_truncated(path, saved):
    end = header_size(saved)
    lengths = {*range(0, 20), *range(0, len(saved), len(saved) // 60), end - 1, end, end + 1, len(saved) - 1}
    for length in lengths:
        path.write_bytes(saved[:length])
        refused(path)
    path.write_bytes(saved + b"\0")
    refused(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"a text file\n" * 100,
        pickle.dumps({"weights": [1.0]}),
        b"\x80\x04" + b"cos\nsystem\n(S'false'\ntR.",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 10**9) + b"{}",
        struct.pack("<Q", 2) + b"{}",
        struct.pack("<Q", 100_000) + b"[" * 100_000,
    ],
    ids=["empty", "text", "pickle", "evil pickle", "header 2**63", "header 10**9", "no tensors", "nested header"],
)
def test_other_files(path, content):
    path.write_bytes(content)
    refused(path)


@contextmanager
def at_once():
    """Interrupt what takes longer than a second, before it has filled the memory."""

    def interrupt(*args):
        raise TimeoutError("not at once")

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


BAD_DESCRIPTIONS = {
    "none": None,
    "not JSON": "{",
    "empty": "",
    "a list": "[]",
    "nested": "[" * 100_000,
    "nested config": '{"version": 1, "config": ' + '{"a": ' * 50_000,
    "no version": "{}",
}
BAD_CONFIGS = {
    "a list": [1],
    "nothing": {},
    "unknown field": {"depth": 6},
    "text for a number": {"d_ff": "40"},
    "float for an integer": {"d_ff": 40.0},
    "null": {"d_k": "null"},
    "unknown dropout": {"dropout": {"everywhere": 0.1}},
    "dropout as list": {"dropout": [0.1]},
    "other sizes": {"d_ff": 41},
    "other tying": {"tie_embeddings": "none"},
    "a billion layers": {"num_encoder_layers": 10**9},
    "a billion tokens": {"source_vocab_size": 10**9, "target_vocab_size": 10**9},
    "a billion positions": {"position_encoding": "learned", "max_length": 10**9},
    "as wide as the world": {"d_model": 10**400, "d_k": 8, "d_v": 8},
    "NaN": {"layer_norm_epsilon": math.nan},
    "infinite": {"layer_norm_epsilon": math.inf},
    "an integer beyond every float": {"layer_norm_epsilon": 10**400},
}


@pytest.mark.parametrize("case", [*BAD_DESCRIPTIONS, "version 2", *(f"config: {case}" for case in BAD_CONFIGS)])
def test_bad_description(path, config, saved, case):
    if case in BAD_DESCRIPTIONS:
        description = BAD_DESCRIPTIONS[case]
    elif case == "version 2":
        description = json.dumps({"version": 2, "config": config.to_dict()})
    else:
        changes = BAD_CONFIGS[case.removeprefix("config: ")]
        fields = {**config.to_dict(), **changes} if changes and isinstance(changes, dict) else changes
        description = json.dumps({"version": 1, "config": fields})
    path.write_bytes(with_description(saved, description))
    with at_once():  # nothing of the size it speaks of is built
        refused(path)


def test_bad_tensors(path, config):
    """The file itself is in order, and its weights are not those of its config."""
    metadata = {"transformer-parity": json.dumps({"version": 1, "config": config.to_dict()})}
    weights = random_weights(config)
    name = "decoder.layers.0.cross_attention.key_proj.kernel"
    for bad in (
        {**weights, name: np.ones((24, 24), np.int32)},
        {**weights, name: np.full((24, 24), np.nan, np.float32)},
        {**weights, name: np.ones((24, 25), np.float32)},
        {**weights, "extra": np.ones(1, np.float32)},
        {key: array for key, array in weights.items() if key != name},
        {"x": np.ones(1, np.float32)},
    ):
        save_file(bad, path, metadata=metadata)
        refused(path)


def test_flipped_bits(path, config, saved):
    """A damaged header is refused, unless the damage is whitespace or a legal value of the config.

    Damaged numbers are still numbers: only NaN and infinity among them can be told.
    """
    rng = np.random.default_rng(0)
    _, weights = load_weights(path)
    end = header_size(saved)
    description = saved.index(b"transformer-parity")
    refusals = 0
    for position in [*range(8), *rng.integers(8, end, 400), *rng.integers(end, len(saved), 50)]:
        content = bytearray(saved)
        content[position] ^= 1 << rng.integers(8)
        path.write_bytes(content)
        try:
            got_config, got = load_weights(path)
        except ValueError:
            refusals += 1
            continue
        if position < end:
            assert_same_bits(got, weights)
            assert got_config == config or position > description
        assert all(np.isfinite(array).all() for array in got.values())
    assert 390 < refusals < 450
