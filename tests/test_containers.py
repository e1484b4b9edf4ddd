"""Files written by other software are read exactly, and malicious files are rejected.

Rejecting a file runs no code, reads no other file, and uses little time and memory.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from imports import ROOT
from safetensors.numpy import save_file

from transformer_parity.apps.checkpoints.importer import import_checkpoint
from transformer_parity.apps.containers import pickles, tensors
from transformer_parity.apps.containers.directory import member
from transformer_parity.transformer.sentences.pairs import read_pairs
from transformer_spec.files import load_weights

SECONDS, BYTES = 1.0, 200 * 2**20  # limits on the CPU time and the additional memory for rejecting a file


# Functions that build pickles, opcode by opcode.
def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def number(value: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", value)


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def several(*values: int) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def storage(key="0", kind="FloatStorage", count=4) -> bytes:
    return b"(" + text("storage") + name("torch", kind) + text(key) + text("cpu") + number(count) + b"tQ"


def a_tensor(offset=0, shape=(4,), strides=(1,), of=None) -> bytes:
    hooks = name("collections", "OrderedDict") + b")R"
    parts = (of or storage()) + number(offset) + several(*shape) + several(*strides) + b"\x89" + hooks
    return name("torch._utils", "_rebuild_tensor_v2") + b"(" + parts + b"tR"


def state(*values: bytes) -> bytes:
    return b"\x80\x02}(" + b"".join(text(f"w{i}") + value for i, value in enumerate(values)) + b"u."


def archive(path: Path, pickled: bytes, numbers=bytes(16), compress=zipfile.ZIP_STORED, **more: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/data/0", numbers, compress)
        for key, content in more.items():
            file.writestr(f"archive/{key}", content)
    return path


class Call:
    """An object whose pickle calls a function when it is loaded."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


RUN = (os.system, "touch ran")
# A dict whose key is a tuple with 3 million levels of nesting.
DEEP = b"\x80\x02}(" + b")" + b"\x85" * 3_000_000 + b"Nu."
LARGE = a_tensor(shape=(9000,), of=storage(count=9000))
ELSEWHERE = b"}(" + text("path") + text("/etc/passwd") + b"ub"  # BUILD: sets attributes of the preceding object
DOTTED = text("collections") + text("OrderedDict.fromkeys") + b"\x93"  # STACK_GLOBAL

ZIPPED = {  # each pickle, with a part of the expected error message
    "os.system": (pickle.dumps(Call(*RUN), 2), "refers to posix.system"),
    "os.system, protocol 0": (pickle.dumps(Call(*RUN), 0), "refers to posix.system"),
    "os.system, protocol 4": (pickle.dumps(Call(*RUN), 4), "refers to posix.system"),
    "eval in a tensor": (state(name("builtins", "eval") + b"(" + text("open('ran', 'w')") + b"tR"), "builtins.eval"),
    "torch.load": (state(name("torch", "load") + b"(" + text("other.pt") + b"tR"), "refers to torch.load"),
    "a method of a known class": (b"\x80\x04" + DOTTED + b".", "refers to collections.OrderedDict.fromkeys"),
    "an instance, old way": (b"(ios\nsystem\n.", "the opcode INST"),
    "an object, old way": (b"(cos\nsystem\no.", "the opcode OBJ"),
    "an extension by number": (b"\x80\x02\x82\x01.", "the opcode EXT1"),
    "a state that changes a storage": (state(a_tensor(of=storage() + ELSEWHERE)), "no attribute"),
    "a state that changes a tensor": (state(a_tensor() + ELSEWHERE), "no attribute"),
    "a memo of 2 billion": (b"\x80\x02Nr\xff\xff\xff\x7f.", "got 2,147,483,647"),
    "tuples 3 million deep": (DEEP, "more than 100 levels deep"),
    "a tuple twice in the next, 60 times": (
        b"\x80\x02})" + b"q\x00h\x00\x86" * 60 + b"Ns.",
        "more than 10,000,000 values",
    ),
    "a text of 4 GiB": (b"\x80\x02X\xff\xff\xff\xff.", "expected 4294967295 bytes"),
    "a pickle that does not end": (b"\x80\x02}", "not a valid torch.save file"),
    "no values on the stack": (b"\x80\x02\x86.", "an empty stack"),
    "a storage cut short": (state(a_tensor(of=storage(count=5))), "at least 20 bytes, got 16"),
    "a storage of 4 TiB": (state(a_tensor(of=storage(count=2**40))), "at least 4,398,046,511,104 bytes"),
    "a storage of negative size": (state(a_tensor(of=storage(count=-4))), "the length of a storage"),
    "a storage elsewhere": (state(a_tensor(of=storage(key="../../../etc/passwd"))), "does not contain the member"),
    "a storage of another type": (state(a_tensor(of=storage(kind="QInt8Storage"))), "refers to torch.QInt8Storage"),
    "an offset behind the end": (state(a_tensor(offset=1)), "exceeds its storage, which has 4 elements"),
    "a stride behind the end": (state(a_tensor(strides=(2,))), "exceeds its storage, which has 4 elements"),
    "a negative stride": (state(a_tensor(strides=(-1,))), "invalid metadata"),
    "one number a billion times": (state(a_tensor(shape=(2**30,), strides=(0,))), "exceeds its storage"),
    "strides that are missing": (state(a_tensor(strides=())), "invalid metadata"),
    "a thousand of one storage": (state(*[LARGE] * 1000), "bytes in total: got 36,000,000"),
    "no tensors": (b"\x80\x02]q\x00.", "must be a state dict: got list"),
    "a number among tensors": (state(number(5)), "only tensors: got int for w0"),
}


def prepared(directory: Path) -> dict[str, tuple[Path, str]]:
    """Write every malicious file, and return each path with a part of the expected error message."""
    found = {}

    def add(title: str, path: Path, said: str) -> Path:
        found[title] = (path, said)
        return path

    def new(kind: str) -> Path:
        return Path(tempfile.mkdtemp(dir=directory)) / f"model.{kind}"

    for title, (pickled, said) in ZIPPED.items():
        add(title, archive(new("bin"), pickled, bytes(36_000 if "thousand" in title else 16)), said)
    good = state(a_tensor())
    add(
        "100 megabytes from a hundredth",
        archive(new("bin"), good, bytes(10**8), zipfile.ZIP_DEFLATED),
        "without compression",
    )
    add("a TorchScript program", archive(new("bin"), good, **{"code/model.py": b""}), "TorchScript")
    add("big-endian", archive(new("bin"), good, byteorder=b"big"), "was written on a big-endian machine")
    with pytest.warns(UserWarning, match="Duplicate"):
        add(
            "members of one name",
            archive(new("bin"), good, **{"data.pkl": good}),
            "multiple members of model.bin have the same name",
        )
    whole = archive(new("bin"), good).read_bytes()
    add("a file cut short", new("bin"), "not written by torch.save").write_bytes(whole[:-40])
    add("an empty file", new("bin"), "not written by torch.save").write_bytes(b"")
    moved = bytearray(archive(new("bin"), good, bytes(160)).read_bytes())
    at = moved.rindex(b"PK\1\2")  # bytes 42 to 45 of the last member's entry contain its offset
    moved[at + 42 : at + 46] = struct.pack("<I", 7)
    add("a member somewhere else", new("bin"), "contains a wrong offset for").write_bytes(moved)

    machine = pickle.dumps({"little_endian": True}, 2)
    front = pickles.LEGACY_START + pickle.dumps(1001, 2) + machine
    keys = pickle.dumps(["0"], 2)
    old = front + state(a_tensor(of=storage(count=4)[:-2] + b"NtQ")) + keys
    for title, content, said in (
        ("old: os.system", front + pickle.dumps(Call(*RUN), 2) + keys, "refers to posix.system"),
        ("old: os.system as the keys", front + good + pickle.dumps(Call(*RUN), 2), "posix.system"),
        ("old: another count", old + struct.pack("<q", 5) + bytes(20), "expected 4 elements in storage 0, got 5"),
        ("old: cut short", old + struct.pack("<q", 4) + bytes(12), "is truncated"),
        ("old: keys of its own", front + good + pickle.dumps(["1"], 2) + bytes(24), "the list of storages"),
        ("old: nothing behind the first pickle", pickles.LEGACY_START, "not a valid torch.save file"),
    ):
        add(title, new("bin"), said).write_bytes(content)

    def header(size: int, content: object) -> bytes:
        return struct.pack("<Q", size) + json.dumps(content).encode()

    tensor = {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}
    claims = header(len(json.dumps({"w": tensor})), {"w": tensor})
    add("safetensors of 4 TiB", new("safetensors"), "not a valid").write_bytes(claims)
    add("safetensors with a long header", new("safetensors"), "not a valid").write_bytes(header(2**60, {}))
    add("safetensors cut short", new("safetensors"), "not a valid").write_bytes(b"12345")
    eighth = {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}
    content = header(len(json.dumps({"w": eighth})), {"w": eighth}) + b"\0"
    add("a number of eight bits", new("safetensors"), "not a valid").write_bytes(content)

    outside = directory / "outside.safetensors"
    save_file({"w": np.ones(3, np.float32)}, outside)

    def index(title: str, place: str, said: str, weight: str = "w") -> Path:
        path = add(title, new("safetensors.index.json"), said)
        path.write_text(json.dumps({"weight_map": {weight: place}}))
        return path.parent

    index("a shard above", "../outside.safetensors", "file names must not")
    index("a shard anywhere", str(outside), "file names must not")
    index("a shard of a drive", "C:outside.safetensors", "file names must not")
    index("a shard that is missing", "none.safetensors", "there is no file")
    index("the directory itself", ".", "file names must not")
    (index("a link that leads out", "link.safetensors", "outside its directory") / "link.safetensors").symlink_to(
        outside
    )
    os.mkfifo(index("a pipe, which has no end", "pipe", "must be a regular file") / "pipe")
    save_file(
        {"v": np.ones(1)}, index("a tensor that is not listed", "a.safetensors", "does not list v") / "a.safetensors"
    )
    add("an index that is a list", new("safetensors.index.json"), "a JSON object").write_text("[]")
    add("an index 1e5 deep", new("safetensors.index.json"), "is not valid JSON").write_text("[" * 100_000)
    add("an index of 17 MiB", new("safetensors.index.json"), "at most 16 MiB").write_text(" " * 17 * 2**20)
    add("numbers for names", new("safetensors.index.json"), "tensor names to file names").write_text(
        '{"weight_map": {"w": 3}}'
    )
    return found


CHILD = """
import json, resource, sys, time
from pathlib import Path
from transformer_parity.apps.containers import pickles, tensors
assert not {"torch", "transformers"} & set(sys.modules)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
first, found = peak(), []
for line in sys.stdin:
    path = Path(line.strip())
    read = {".bin": pickles.read_tensors, ".json": tensors.read_shards}.get(path.suffix, tensors.read)
    start, said = time.process_time(), None
    try:
        read(path)
    except (ValueError, OSError) as error:
        said = str(error)
    found.append((said, time.process_time() - start, peak() - first))
assert not {"torch", "transformers"} & set(sys.modules)
print(json.dumps(found))
"""


def test_malicious_files_are_rejected(tmp_path):
    """The files are read in a new process, so that its peak memory shows how much memory each of them uses."""
    attacks = prepared(tmp_path)
    paths = "".join(f"{path}\n" for path, _ in attacks.values())
    settings = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}}
    child = subprocess.run([sys.executable, "-c", CHILD], input=paths, text=True, capture_output=True, **settings)
    assert child.returncode == 0, child.stderr
    results = dict(zip(attacks, json.loads(child.stdout), strict=True))
    for title, (path, said) in attacks.items():
        error, seconds, taken = results[title]
        assert error is not None, title
        assert said in error, (title, error)
        assert path.name in error or path.parent.name in error or "file names" in error, (title, error)
        assert "\n" not in error
        assert len(error) < 400, title
        assert seconds < SECONDS, title
        assert taken < BYTES, (title, taken)
    assert not (tmp_path / "ran").exists()


def saved(path: Path, **options) -> dict:
    """Save tensors of every kind, some of which share storage, and return them."""
    kinds = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
    found = {str(kind): torch.arange(6).reshape(2, 3).to(kind) for kind in (*kinds, torch.int16, torch.int8)}
    found |= {"bool": torch.tensor([True, False]), "scalar": torch.tensor(3.0), "empty": torch.zeros(0, 3)}
    table = torch.randn(5, 4)
    found |= {"tied": table, "tied too": table, "transposed": table.T, "row": table[2], "part": table[1:4, 1::2]}
    found["parameter"] = torch.nn.Parameter(torch.randn(3))
    torch.save(found, path, **options)
    return found


@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}, {"pickle_protocol": 4}])
def test_torch_files_are_read_exactly(tmp_path, options):
    expected = saved(tmp_path / "model.bin", **options)
    found = pickles.read_tensors(tmp_path / "model.bin")
    assert list(found) == list(expected)
    for key, tensor in expected.items():
        assert found[key].dtype.name == str(tensor.dtype).removeprefix("torch.")
        assert found[key].tolist() == tensor.tolist()
    assert found["tied"] is found["tied too"]


def test_pickled_namespace_requires_explicit_permission(tmp_path):
    from argparse import Namespace

    layer = torch.nn.Linear(2, 3)
    torch.save({"model": layer.state_dict(), "args": Namespace(width=3)}, tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"refers to argparse\.Namespace, which would run code; save only model"):
        pickles.read(tmp_path / "model.pt")
    found = pickles.read(tmp_path / "model.pt", pickles.NAMESPACE)
    assert found["args"].width == 3
    assert pickles.arrays(found["model"], "model")["weight"].tolist() == layer.weight.tolist()


def test_single_and_sharded_safetensors_are_read(tmp_path):
    expected = {"a": torch.randn(2, 3).to(torch.bfloat16), "b": torch.randn(3).half(), "c": torch.arange(3)}
    from safetensors.torch import save_file as save

    places = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
    for place in set(places.values()):
        save({name: tensor for name, tensor in expected.items() if places[name] == place}, tmp_path / place)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    found = tensors.read_shards(index)
    assert {name: array.tolist() for name, array in found.items()} == {
        name: tensor.tolist() for name, tensor in expected.items()
    }
    assert found["a"].dtype.name == "bfloat16"
    assert tensors.shards(index) == [tmp_path / "model-1.safetensors", tmp_path / "model-2.safetensors"]


def test_symbolic_links_in_the_hub_cache_are_followed(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs/ab12").write_bytes(b"{}")
    directory = tmp_path / "snapshots/main"
    directory.mkdir(parents=True)
    (directory / "config.json").symlink_to("../../blobs/ab12")
    assert member(directory, "config.json").read_bytes() == b"{}"


# Files that git-lfs has not fetched, and permissions of written files.
UNFETCHED = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32\nsize 12345\n"
)
FETCH = "is a git-lfs pointer, not the file; fetch the file with `git lfs pull`"


@pytest.mark.parametrize("name", ["m.npz", "m.pt", "m.ckpt", "m.weights.h5", "m.keras", "m.safetensors"])
def test_git_lfs_pointer_is_reported(name, tmp_path):
    (tmp_path / name).write_bytes(UNFETCHED)
    with pytest.raises(ValueError, match=f"^{name} {FETCH}$"):
        import_checkpoint(tmp_path / name)
    with pytest.raises(ValueError, match=FETCH):
        load_weights(tmp_path / name)
    with pytest.raises(ValueError, match=FETCH):
        read_pairs(tmp_path / name, tmp_path / name)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "pytorch_model.bin"])
def test_git_lfs_pointer_in_a_directory_is_reported(name, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "marian"}')
    (tmp_path / name).write_bytes(UNFETCHED)
    with pytest.raises(ValueError, match=f"{name} {FETCH}$"):
        import_checkpoint(tmp_path)


@pytest.mark.needs(os.name != "nt", "permissions")
@pytest.mark.parametrize("umask", [0o022, 0o007, 0o077])
def test_written_files_have_permissions_from_the_umask(umask, tmp_path):
    before = os.umask(umask)
    try:
        tensors.write(tmp_path / "a.safetensors", {"x": np.zeros(2)})
    finally:
        os.umask(before)
    assert (tmp_path / "a.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask
