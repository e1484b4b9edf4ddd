"""Array and text files of other software are read back exactly, and malicious files are rejected.

Rejecting a file runs no code and uses little memory.
"""

from __future__ import annotations

import hashlib
import io
import resource
import struct
import time
import zipfile
from pathlib import Path

import h5py
import ml_dtypes
import numpy as np
import pytest
from conftest import assert_same_bits

from transformer_parity.apps.containers import ctranslate2, hdf5, npz, yaml


@pytest.fixture(autouse=True)
def _nothing_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert not Path("ran").exists()


def refused_at_once(read, what, beginning, message=None):
    """Expect a ValueError within a short time and with little memory, and return its message."""
    start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=message) as refused:
        read(what)
    assert time.process_time() - start < 10.0  # a successful attack would take minutes
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # kilobytes
    assert str(refused.value).startswith(beginning)
    return str(refused.value)


def cut_and_others_are_refused(read, path, *others):
    """Expect a truncated file, an empty file, other invalid contents, and a missing file to be rejected."""
    data = path.read_bytes()
    for bad in (data[: len(data) // 2], b"", *others):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match="is not a valid"):
            read(path)
    with pytest.raises(FileNotFoundError):
        read(path.with_name("absent"))


# --- NumPy's .npz ---


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
def npz_file(tmp_path):
    return tmp_path / "model.npz"


ARRAYS = {
    "encoder_l1_self_Wq": np.arange(6, dtype=np.float32).reshape(2, 3),
    "half": np.array([[1.5, -0.0]], np.float16),
    "special:model.yml": np.frombuffer(b"type: transformer\0", np.int8),
    "scalar": np.array(3),
    "empty": np.zeros((0, 4), np.float64),
}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed, lambda path, **arrays: npz.write(path, arrays)])
def test_npz_arrays_round_trip(npz_file, save):
    save(npz_file, **ARRAYS)
    assert_same_bits(npz.read(npz_file), ARRAYS)


def test_transposed_npz_array_round_trips(npz_file):
    arrays = {"W": np.arange(6.0).reshape(2, 3).T}
    np.savez(npz_file, **arrays)
    np.testing.assert_array_equal(npz.read(npz_file)["W"], arrays["W"])


def test_written_npz_avoids_zip64_and_fortran_order(npz_file):
    """Marian's reader requires sizes in the local headers, which zip64 omits, and rejects Fortran order."""
    npz.write(npz_file, {"W": np.arange(6.0).reshape(2, 3).T})
    data = npz_file.read_bytes()
    assert int.from_bytes(data[22:26], "little") == 128 + 6 * 8
    assert int.from_bytes(data[28:30], "little") == 0
    assert b"'fortran_order': False" in data
    npz.write(npz_file, {"W": np.arange(6.0).reshape(2, 3).T})
    assert npz_file.read_bytes() == data


class Runs:
    def __reduce__(self):
        return (Path("ran").touch, ())


def claim(shape, held=64) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return buffer.getvalue() + bytes(held)


NPZ_ATTACKS = {
    "objects": (
        {"W.npy": npy(np.array([Runs()], dtype=object))},
        zipfile.ZIP_STORED,
        "expected W.npy to contain numbers",
    ),
    "text": ({"W.npy": npy(np.array(["a"]))}, zipfile.ZIP_STORED, "expected W.npy to contain numbers"),
    "4 TiB": ({"W.npy": claim((2**40,))}, zipfile.ZIP_STORED, "expected 4,398,046,511,104 bytes"),
    "overflow": ({"W.npy": claim((2**62, 2**62))}, zipfile.ZIP_STORED, "bytes in W.npy"),
    "negative": ({"W.npy": claim((-1, -16))}, zipfile.ZIP_STORED, "negative"),
    "larger than declared": ({"W.npy": claim((4,))}, zipfile.ZIP_STORED, "expected 16 bytes"),
    "bomb": ({"bomb.npy": claim((2**26,), 0)}, zipfile.ZIP_DEFLATED, "bytes of unpacked data"),
    "not an array": ({"W.npy": b"import os"}, zipfile.ZIP_STORED, "header"),
    "long header": ({"W.npy": b"\x93NUMPY\x02\x00" + b"\xff\xff\xff\x7f{"}, zipfile.ZIP_STORED, "header"),
    "expression": ({"W.npy": b"\x93NUMPY\x01\x00\x10\x00__import__('os')"}, zipfile.ZIP_STORED, "header"),
    "method": ({"W.npy": npy([1.0])}, zipfile.ZIP_BZIP2, "to use Deflate compression, got compression method 12"),
}


@pytest.mark.parametrize("name", NPZ_ATTACKS)
def test_malicious_npz_files_are_rejected(npz_file, name):
    members, method, message = NPZ_ATTACKS[name]
    archive(npz_file, members, method)
    refused_at_once(npz.read, npz_file, f"{npz_file} is not a valid .npz file: ", message)


def test_truncated_and_foreign_npz_files_are_rejected(npz_file):
    np.savez(npz_file, **ARRAYS)
    data = npz_file.read_bytes()
    cut_and_others_are_refused(npz.read, npz_file, data[:-30], b"PK", data.replace(b"transformer", b"transformex"))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_duplicate_npz_member_names_are_rejected(npz_file):
    with zipfile.ZipFile(npz_file, "w") as both:
        for _ in range(2):
            both.writestr("W.npy", npy([1.0]))
    with pytest.raises(ValueError, match="multiple members have the same name"):
        npz.read(npz_file)


def test_failed_write_keeps_the_old_file(npz_file):
    npz.write(npz_file, ARRAYS)
    before = npz_file.read_bytes()
    with pytest.raises(ValueError, match="numbers"):
        npz.write(npz_file, {"W": np.array([None])})
    assert npz_file.read_bytes() == before
    assert [one.name for one in npz_file.parent.iterdir()] == [npz_file.name]


# --- HDF5 ---

LAYERS = {
    "layers/dense/vars/0": np.arange(6, dtype=np.float32).reshape(2, 3),
    "layers/dense/vars/1": np.array([1.5, -0.0], np.float16),
    "seed/vars/0": np.array([1, 2], np.uint32),
    "step": np.array(3),
}


@pytest.fixture
def hdf5_file(tmp_path):
    path = tmp_path / "model.weights.h5"
    with h5py.File(path, "w") as h5:
        for name, array in LAYERS.items():
            h5[name] = array
    return path


def test_hdf5_arrays_round_trip(hdf5_file):
    assert_same_bits(hdf5.read(hdf5_file), LAYERS)
    assert_same_bits(hdf5.read("archive.keras", hdf5_file.read_bytes()), LAYERS)


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


def claim_of_terabytes(h5, secret):
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


HDF5_ATTACKS = {
    external_storage: "W uses external or virtual storage",
    external_link: r"W is a link \(ExternalLink\)",
    soft_link: r"W is a link \(SoftLink\)",
    virtual: "W uses external or virtual storage",
    claim_of_terabytes: "expected 4,398,046,511,104 bytes",
    compressed: "W has a chunked layout",
    text: "expected W to contain numbers",
    references: "expected W to contain numbers",
    itself: "the group group/again/ has more than one path",
    deep: "levels deep",
    named_type: "expected W to be a group or a dataset",
}


@pytest.mark.parametrize("attack", HDF5_ATTACKS)
def test_malicious_hdf5_files_are_rejected(hdf5_file, attack, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"a password, long")
    with h5py.File(hdf5_file, "a") as h5:
        attack(h5, secret)
    refused_at_once(hdf5.read, hdf5_file, f"{hdf5_file} is not a valid HDF5 file: ", HDF5_ATTACKS[attack])


def test_truncated_and_foreign_hdf5_files_are_rejected(hdf5_file):
    cut_and_others_are_refused(hdf5.read, hdf5_file, b"PK\x03\x04", hdf5_file.read_bytes()[:8])


# --- CTranslate2's model.bin ---

ONE = np.arange(6, dtype=np.float32).reshape(2, 3)
VARIABLES = {
    "decoder/projection/weight": ONE,
    "decoder/num_heads": np.array(8, np.int16),
    "half": np.array([1.5, -0.0], np.float16),
    "brain": np.array([1.5], ml_dtypes.bfloat16),
    "table": ONE,
    "flag": np.array(True, np.int8),
    "number": np.array([7], np.int32),
}
MODEL = ctranslate2.StoredModel("TransformerSpec", 7, VARIABLES)


def test_variables_round_trip_and_aliases_share_one_array(tmp_path):
    ctranslate2.write(tmp_path / "model.bin", MODEL)
    found = ctranslate2.read(tmp_path / "model.bin")
    assert found[:2] == MODEL[:2]
    assert_same_bits(found.variables, VARIABLES)
    assert found.variables["table"] is found.variables["decoder/projection/weight"]


def test_written_bytes_match_ctranslate2(tmp_path):
    """The layout follows src/models/model.cc; CTranslate2's own ``_serialize`` writes a file with this checksum."""
    ctranslate2.write(tmp_path / "model.bin", MODEL)
    data = (tmp_path / "model.bin").read_bytes()
    head = struct.pack("<IH16sII", 6, 16, b"TransformerSpec\0", 7, 6)
    assert data.startswith(head + struct.pack("<H6sBIBI", 6, b"brain\0", 1, 1, 5, 2) + b"\xc0\x3f")
    alias = struct.pack("<IH6sH26s", 1, 6, b"table\0", 26, b"decoder/projection/weight\0")
    assert data.endswith(alias)
    assert hashlib.sha256(data).hexdigest() == "76aa187eb3a5cf3342b6d10f828a79bd8e82d9f6de3606267dcfbced0ac6dd61"


def damaged(data):
    name = data.index(b"decoder/projection/weight")
    claim = name + 26 + 1 + 8 + 1
    yield "cut", data[:-3]
    yield "longer", data + b"x"
    yield "empty", b""
    yield "old", struct.pack("<I", 3) + data[4:]
    yield "new", struct.pack("<I", 7) + data[4:]
    yield "4 GiB", data[:claim] + struct.pack("<I", 2**32 - 4) + data[claim + 4 :]
    yield "shape", data[: name + 27] + struct.pack("<I", 2**31) + data[name + 31 :]
    yield "type", data[: claim - 1] + b"\x09" + data[claim:]
    yield "name", data.replace(b"half\0", b"halfx")
    yield "twice", data.replace(b"\x05\0half\0", b"\x05\0flag\0")
    yield "alias", data[:-5] + b"none\0"
    yield "text", data.replace(b"half\0", b"h\xfflf\0")
    yield "many", data[:26] + struct.pack("<I", 2**32 - 1) + data[30:]


def test_damaged_ctranslate2_models_are_rejected(tmp_path):
    path = tmp_path / "model.bin"
    ctranslate2.write(path, MODEL)
    spoilt = dict(damaged(path.read_bytes()))
    assert len(spoilt) == 13
    for data in spoilt.values():
        path.write_bytes(data)
        refused_at_once(ctranslate2.read, path, f"{path} is not a valid model.bin: ")


def test_unsupported_ctranslate2_dtype_raises_value_error(tmp_path):
    with pytest.raises(ValueError, match="CTranslate2 does not support W: got 8 bytes of float64"):
        ctranslate2.write(tmp_path / "model.bin", ctranslate2.StoredModel("TransformerSpec", 7, {"W": np.ones(1)}))
    assert list(tmp_path.iterdir()) == []


# --- YAML ---


def test_yaml_mapping_round_trips():
    content = {
        "type": "transformer",
        "dim-vocabs": [7, 9],
        "ulr": False,
        "transformer-preprocess": "",
        "text": "a: #b\n",
    }
    assert yaml.read(yaml.write(content), "it") == content
    assert yaml.read(yaml.write(content).encode(), "it") == content
    assert list(yaml.read(yaml.write(content), "it")) == list(content)


BOMB = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: !!python/object/apply:os.system [touch ran]", "could not determine a constructor"),
        ("a: !!python/name:os.system", "could not determine a constructor"),
        (BOMB, r"the alias \*a is not supported"),
        ("a: &a {b: *a}", r"the alias \*a is not supported"),
        ("[" * 3_000, "is not valid YAML"),
        ("a: " + "x" * 2**18, "must have at most 262,144 bytes"),
        ("a: 1" + ":9" * 100_000, "numbers of at most 100 characters, got 200,001"),
        ("a: [1", "is not valid YAML"),
        ("a: \x00", "is not valid YAML"),
        (b"a: \xff\xfe\xfa", "is not valid YAML"),
        ("[1, 2]", "must be a mapping: got list"),
        ("", "must be a mapping: got NoneType"),
        ("{[1]: 2}", "is not valid YAML"),
    ],
)
def test_malicious_yaml_is_rejected(text, message, tmp_path):
    refused_at_once(lambda text: yaml.read(text, "special:model.yml"), text, "special:model.yml ", message)
    assert list(tmp_path.iterdir()) == []
