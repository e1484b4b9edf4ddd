"""Checkpoint writes that fail, are killed, or race, and averages of checkpoints."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import NAME, assert_same, make, small_config
from checkpoint_files import path as path  # a fixture
from checkpoint_files import saved as saved  # a fixture
from conftest import assert_same_bits, random_weights
from safetensors import SafetensorError

from reference_numpy import load_weights, save_weights
from transformer_spec.checkpoint import average_weights, load_checkpoint, save_checkpoint
from transformer_spec.files import load_vocabulary

WRITERS = {
    "weights": lambda path: save_weights(path, small_config(), random_weights(small_config())),
    "checkpoint": lambda path: save_checkpoint(path, make()),
}


@pytest.fixture(params=WRITERS)
def write(request):
    return WRITERS[request.param]


ERRORS = (OSError(28, "No space left"), SafetensorError("disk on fire"), KeyboardInterrupt(), MemoryError())


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("moment", ["save_file", "os.chmod", "os.fsync", "os.replace"])
def test_failed_save_keeps_the_previous_file(path, saved, write, monkeypatch, error, moment):
    def fail(*args, **kwargs):
        if moment == "save_file":
            Path(args[1]).write_bytes(saved[:1000])
        raise error

    monkeypatch.setattr(f"transformer_spec.files.{moment}", fail)
    expected = OSError if isinstance(error, OSError | SafetensorError) else type(error)
    with pytest.raises(expected) as raised:
        write(path)
    if expected is OSError:
        assert str(path) in str(raised.value)
        assert raised.value.errno == getattr(error, "errno", None)
    assert path.read_bytes() == saved
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("moment", ["save_file", "os.chmod", "os.fsync", "os.replace"])
def test_killed_process_leaves_the_old_file(path, saved, moment):
    code = f"""
import os, pathlib, signal, sys
from transformer_spec import files, load_weights, save_weights

def die(*args, **kwargs):
    if {moment!r} == "save_file":
        pathlib.Path(args[1]).write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)

config, weights = load_weights(sys.argv[1])
files.{moment} = die
save_weights(sys.argv[1], config, weights)
"""
    assert subprocess.run([sys.executable, "-c", code, str(path)]).returncode == -signal.SIGKILL
    assert path.read_bytes() == saved
    save_checkpoint(path, make(progress={}))  # the file left by the killed process doesn't interfere
    assert load_checkpoint(path).progress == {}


def test_concurrent_writers_leave_a_complete_checkpoint(path, monkeypatch):
    """Each writer uses a separate temporary file, so the writer that finishes last leaves a complete checkpoint."""
    first, second = make(progress={"writer": 1}), make(progress={"writer": 2})
    replace = os.replace

    def other_comes_between(*args):
        monkeypatch.setattr("transformer_spec.files.os.replace", replace)
        save_checkpoint(path, second)
        assert_same(load_checkpoint(path), second)
        replace(*args)

    monkeypatch.setattr("transformer_spec.files.os.replace", other_comes_between)
    save_checkpoint(path, first)
    assert_same(load_checkpoint(path), first)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("target", ["nowhere/run.safetensors", "."])
def test_unwritable_path_raises_os_error(tmp_path, write, target):
    with pytest.raises(OSError, match=f"{re.escape(str(tmp_path / target))}'$"):
        write(tmp_path / target)
    assert list(tmp_path.iterdir()) == []


def test_unreadable_file_is_not_reported_as_missing(path, saved, monkeypatch):
    """Safetensors would report the file as missing. The test patches ``open``, because root can read any file."""

    def refuse(*args):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("transformer_spec.files.open", refuse, raising=False)
    for load in (load_checkpoint, load_weights, load_vocabulary):
        with pytest.raises(PermissionError, match=re.escape(str(path))):
            load(path)


def test_saved_file_has_default_permissions(path, write):
    write(path)
    other = path.with_name("other")
    other.write_text("")
    assert oct(path.stat().st_mode) == oct(other.stat().st_mode)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_average_weights_returns_the_float64_mean(tmp_path, dtype):
    config = small_config()
    each = [random_weights(config, seed, dtype) for seed in range(3)]
    each[0][NAME].flat[:2] = [-0.0, 0.1]
    paths = [tmp_path / f"{i}.safetensors" for i in range(3)]
    save_weights(paths[0], config, each[0])
    save_checkpoint(paths[1], make(config, weights=each[1]))
    save_weights(paths[2], config, each[2], vocabulary=b"model")
    got_config, alone = average_weights(paths[:1])
    assert got_config == config
    assert_same_bits(alone, each[0])
    _, twice = average_weights([paths[1], paths[1]])
    assert_same_bits(twice, each[1])
    _, mean = average_weights(paths)
    in_float64 = {name: sum(weights[name].astype(np.float64) for weights in each) / 3 for name in each[0]}
    assert_same_bits(mean, {name: array.astype(dtype) for name, array in in_float64.items()})


def test_average_of_different_models_is_rejected(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    save_checkpoint(one, make())
    with pytest.raises(ValueError, match=r"^averaging weights requires at least one file: got none$"):
        average_weights([])
    with pytest.raises(TypeError, match=r"^paths must be a list of files: got 'a.safetensors'$"):
        average_weights("a.safetensors")
    config = small_config(layer_norm_epsilon=1e-5, pad_id=3)
    save_weights(other, config, random_weights(config))
    reason = "must have the same config: the configs differ in layer_norm_epsilon, pad_id$"
    with pytest.raises(ValueError, match=f"^{re.escape(str(other))} and {re.escape(str(one))} {reason}"):
        average_weights([one, other])
    save_weights(other, small_config(), random_weights(small_config()), dtype="float16")
    with pytest.raises(ValueError, match=r"in the same dtype: got float16 and float32$"):
        average_weights([one, other])
    other.write_bytes(one.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"^{re.escape(str(other))} is not a usable weight file: "):
        average_weights([one, other])


def test_average_of_different_parts_is_rejected(tmp_path):
    """Their configs match, but an average must not treat the missing weights as zero."""
    config = small_config()
    paths = {part: tmp_path / f"{part}.safetensors" for part in (None, "encoder", "decoder")}
    for part, file in paths.items():
        save_weights(file, config, random_weights(config), part=part)
    whole, encoder, decoder = paths.values()
    assert_same_bits(average_weights([encoder, encoder])[1], load_weights(encoder)[1])
    for one, other, reason in (
        (whole, encoder, r"missing decoder\..*; and \d+ more"),
        (encoder, whole, r"unexpected decoder\..*; and \d+ more"),
        (encoder, decoder, r"missing encoder\..*; and \d+ more"),
    ):
        same = f"{re.escape(str(other))} must contain the same tensors as {re.escape(str(one))}"
        with pytest.raises(ValueError, match=f"^{same}: {reason}$"):
            average_weights([one, other])
