"""CTranslate2's model.bin: the layout that its own code writes and reads, and files that are damaged."""

from __future__ import annotations

import hashlib
import resource
import struct
import time

import ml_dtypes
import numpy as np
import pytest
from conftest import assert_same_bits

from transformer_parity.apps.containers import ctranslate2

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


def test_variables_come_back_and_aliases_are_one_array(tmp_path):
    ctranslate2.write(tmp_path / "model.bin", MODEL)
    found = ctranslate2.read(tmp_path / "model.bin")
    assert found[:2] == MODEL[:2]
    assert_same_bits(found.variables, VARIABLES)
    assert found.variables["table"] is found.variables["decoder/projection/weight"]


def test_the_bytes_are_those_of_ctranslate2(tmp_path):
    """Read as src/models/model.cc does; the checksum is of what its own ``_serialize`` writes for these variables."""
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


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "model.bin"
    ctranslate2.write(path, MODEL)
    seen = set()
    for name, data in damaged(path.read_bytes()):
        path.write_bytes(data)
        start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(ValueError, match=r"model.bin is not a usable model.bin: ") as refused:
            ctranslate2.read(path)
        assert time.process_time() - start < 1.0
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # kilobytes
        seen.add((name, str(refused.value)))
    assert len(seen) == 13


def test_what_has_no_place_is_refused(tmp_path):
    with pytest.raises(ValueError, match="W cannot be written for CTranslate2: 8 bytes of float64"):
        ctranslate2.write(tmp_path / "model.bin", ctranslate2.StoredModel("TransformerSpec", 7, {"W": np.ones(1)}))
    assert list(tmp_path.iterdir()) == []
