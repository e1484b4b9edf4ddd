"""An .npz is read as arrays of numbers, and what would run code or take memory is refused first."""

from __future__ import annotations

import io
import resource
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
from conftest import assert_same_bits

from transformer_parity.apps.containers import npz


def npy(array) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.asarray(array), allow_pickle=True)
    return buffer.getvalue()


def archive(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method, compresslevel=1) as file:
        for name, data in members.items():
            with file.open(name, "w") as member:
                member.write(data)
                for _ in range(256 if name == "bomb.npy" else 0):
                    member.write(bytes(2**20))
    return path


@pytest.fixture
def file(tmp_path):
    return tmp_path / "model.npz"


ARRAYS = {
    "encoder_l1_self_Wq": np.arange(6, dtype=np.float32).reshape(2, 3),
    "half": np.array([[1.5, -0.0]], np.float16),
    "special:model.yml": np.frombuffer(b"type: transformer\0", np.int8),
    "scalar": np.array(3),
    "empty": np.zeros((0, 4), np.float64),
}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed, lambda path, **arrays: npz.write(path, arrays)])
def test_arrays_come_back(file, save):
    save(file, **ARRAYS)
    assert_same_bits(npz.read(file), ARRAYS)


def test_a_transposed_array_comes_back(file):
    arrays = {"W": np.arange(6.0).reshape(2, 3).T}
    np.savez(file, **arrays)
    np.testing.assert_array_equal(npz.read(file)["W"], arrays["W"])


def test_what_is_written_can_be_read_without_zip64_and_without_fortran_order(file):
    """Marian's reader takes sizes from the local headers, where zip64 has none, and refuses columns first."""
    npz.write(file, {"W": np.arange(6.0).reshape(2, 3).T})
    data = file.read_bytes()
    assert int.from_bytes(data[22:26], "little") == 128 + 6 * 8
    assert int.from_bytes(data[28:30], "little") == 0
    assert b"'fortran_order': False" in data
    npz.write(file, {"W": np.arange(6.0).reshape(2, 3).T})
    assert file.read_bytes() == data


class Runs:
    def __reduce__(self):
        return (Path("ran").touch, ())


def claim(shape, held=64) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return buffer.getvalue() + bytes(held)


ATTACKS = {
    "objects": ({"W.npy": npy(np.array([Runs()], dtype=object))}, zipfile.ZIP_STORED, "W.npy must hold numbers"),
    "text": ({"W.npy": npy(np.array(["a"]))}, zipfile.ZIP_STORED, "W.npy must hold numbers"),
    "4 TiB": ({"W.npy": claim((2**40,))}, zipfile.ZIP_STORED, "claims 4,398,046,511,104 bytes"),
    "overflow": ({"W.npy": claim((2**62, 2**62))}, zipfile.ZIP_STORED, "claims"),
    "negative": ({"W.npy": claim((-1, -16))}, zipfile.ZIP_STORED, "negative"),
    "more than claimed": ({"W.npy": claim((4,))}, zipfile.ZIP_STORED, "claims 16 bytes"),
    "bomb": ({"bomb.npy": claim((2**26,), 0)}, zipfile.ZIP_DEFLATED, "its members must unpack to at most"),
    "no array": ({"W.npy": b"import os"}, zipfile.ZIP_STORED, "header"),
    "long header": ({"W.npy": b"\x93NUMPY\x02\x00" + b"\xff\xff\xff\x7f{"}, zipfile.ZIP_STORED, "header"),
    "expression": ({"W.npy": b"\x93NUMPY\x01\x00\x10\x00__import__('os')"}, zipfile.ZIP_STORED, "header"),
    "method": ({"W.npy": npy([1.0])}, zipfile.ZIP_BZIP2, "must be stored or deflated"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_are_refused(file, name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    members, method, message = ATTACKS[name]
    archive(file, members, method)
    start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=message) as refused:
        npz.read(file)
    assert str(refused.value).startswith(f"{file} is not a usable .npz file: ")
    assert time.process_time() - start < 1.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # kilobytes
    assert not Path("ran").exists()


def test_cut_and_other_files_are_refused(file):
    np.savez(file, **ARRAYS)
    data = file.read_bytes()
    for bad in (data[:-30], data[: len(data) // 2], b"", b"PK", data.replace(b"transformer", b"transformex")):
        file.write_bytes(bad)
        with pytest.raises(ValueError, match="is not a usable"):
            npz.read(file)
    with pytest.raises(FileNotFoundError):
        npz.read(file.with_name("absent.npz"))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_name_that_comes_twice_is_refused(file):
    with zipfile.ZipFile(file, "w") as both:
        for _ in range(2):
            both.writestr("W.npy", npy([1.0]))
    with pytest.raises(ValueError, match="several members of one name"):
        npz.read(file)


def test_a_failed_write_leaves_the_old_file(file):
    npz.write(file, ARRAYS)
    before = file.read_bytes()
    with pytest.raises(ValueError, match="numbers"):
        npz.write(file, {"W": np.array([None])})
    assert file.read_bytes() == before
    assert [one.name for one in file.parent.iterdir()] == [file.name]
