"""An HDF5 file is read as arrays that lie in it, and what leads out of it or takes memory is refused first."""

from __future__ import annotations

import resource
import time

import h5py
import numpy as np
import pytest
from conftest import assert_same_bits

from transformer_parity.apps.containers import hdf5

ARRAYS = {
    "layers/dense/vars/0": np.arange(6, dtype=np.float32).reshape(2, 3),
    "layers/dense/vars/1": np.array([1.5, -0.0], np.float16),
    "seed/vars/0": np.array([1, 2], np.uint32),
    "step": np.array(3),
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.weights.h5"
    with h5py.File(path, "w") as h5:
        for name, array in ARRAYS.items():
            h5[name] = array
    return path


def test_arrays_come_back(file):
    assert_same_bits(hdf5.read(file), ARRAYS)
    assert_same_bits(hdf5.read("archive.keras", file.read_bytes()), ARRAYS)


def external_storage(h5, secret):
    h5.create_dataset("W", (16,), "u1", external=[(str(secret), 0, 16)])


def external_link(h5, secret):
    h5["W"] = h5py.ExternalLink(str(secret), "/W")


def soft_link(h5, secret):
    h5["W"] = h5py.SoftLink("/step")


def virtual(h5, secret):
    layout = h5py.VirtualLayout((4,), "f4")
    layout[:] = h5py.VirtualSource(str(secret), "W", (4,))
    h5.create_virtual_dataset("W", layout)


def claim(h5, secret):
    h5.create_dataset("W", (2**40,), "f4")


def compressed(h5, secret):
    h5.create_dataset("W", data=np.zeros(2**24, "f4"), compression="gzip", chunks=(2**22,))


def text(h5, secret):
    h5["W"] = "text"


def references(h5, secret):
    h5.create_dataset("W", (1,), h5py.ref_dtype)


def itself(h5, secret):
    h5["group/again"] = h5["/"]


def deep(h5, secret):
    h5.create_group("a/" * 100)


def named_type(h5, secret):
    h5["W"] = np.dtype("f4")


ATTACKS = {
    external_storage: "W is stored in another file",
    external_link: "W is a link: ExternalLink",
    soft_link: "W is a link: SoftLink",
    virtual: "W is stored in another file",
    claim: "W claims 4,398,046,511,104 bytes",
    compressed: "W must be stored in one piece",
    text: "W must hold numbers",
    references: "W must hold numbers",
    itself: "group/again/ is a group that has two names",
    deep: "groups deep",
    named_type: "W is neither a group nor a dataset",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_are_refused(file, attack, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"a password, long")
    with h5py.File(file, "a") as h5:
        attack(h5, secret)
    start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=ATTACKS[attack]) as refused:
        hdf5.read(file)
    assert str(refused.value).startswith(f"{file} is not a usable HDF5 file: ")
    assert time.process_time() - start < 1.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # kilobytes


def test_cut_and_other_files_are_refused(file):
    data = file.read_bytes()
    for bad in (data[: len(data) // 2], b"", b"PK\x03\x04", data[:8]):
        file.write_bytes(bad)
        with pytest.raises(ValueError, match="is not a usable"):
            hdf5.read(file)
    with pytest.raises(FileNotFoundError):
        hdf5.read(file.with_name("absent.h5"))
