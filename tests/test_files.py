"""Weight files with the same content are identical, are never partial, and are rejected if they are damaged."""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import signal
import struct
from contextlib import contextmanager
from hashlib import sha256
from stat import S_ISDIR

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np
import pytest
from conftest import assert_same_bits, random_weights, tiny_config
from safetensors.numpy import save_file

from reference_numpy import (
    Transformer,
    count_parameters,
    load_weights,
    parameter_shapes,
    save_weights,
    tap_shapes,
)
from transformer_parity.engine.system.files import write_text
from transformer_spec.files import VocabularyFiles, checksum, load_notes, load_vocabulary


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


@pytest.fixture
def config():
    return tiny_config(num_encoder_layers=1, num_decoder_layers=1, attention_bias=True)


@pytest.fixture
def saved(path, config):
    """Save a valid file at ``path`` and return its bytes."""
    save_weights(path, config, random_weights(config))
    return path.read_bytes()


def header_size(content):
    return 8 + struct.unpack("<Q", content[:8])[0]


def header(content):
    return json.loads(content[8 : header_size(content)])


def with_header(content, entries):
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + content[header_size(content) :]


def with_description(content, description):
    """Return a file with the given description of its config; None removes the description."""
    metadata = {"other": "x"} if description is None else {"transformer-parity": description}
    return with_header(content, {**header(content), "__metadata__": metadata})


def header_checksums(content):
    return json.loads(header(content)["__metadata__"]["transformer-parity"])["sha256"]


def save_described(path, config, tensors):
    """Write a file with correct checksums, in which the tensors may contradict the config."""
    checksums = {name: checksum(name, array) for name, array in tensors.items()}
    description = {"version": 2, "config": config.to_dict(), "sha256": checksums}
    save_file(tensors, path, metadata={"transformer-parity": json.dumps(description)})


def flipped(content, position, rng):
    """Return the contents of a file with one flipped bit in the given byte."""
    changed = bytearray(content)
    changed[position] ^= 1 << rng.integers(8)
    return bytes(changed)


def tensor_at(content, position):
    """Return the name of the tensor that contains a byte of a file."""
    offset = position - header_size(content)
    entries = {name: entry for name, entry in header(content).items() if name != "__metadata__"}
    (name,) = [name for name, entry in entries.items() if entry["data_offsets"][0] <= offset < entry["data_offsets"][1]]
    return name


def test_file_bytes_depend_only_on_the_content(path, config):
    weights = random_weights(config, dtype="float64")
    save_weights(path, config, weights)
    content = path.read_bytes()
    for _ in range(5):  # hash tables use a different seed each time
        save_weights(path, config, dict(reversed(weights.items())))
        assert path.read_bytes() == content


@pytest.mark.parametrize("storage", [None, "float64", "float32", "float16", "bfloat16"])
def test_weights_are_stored_in_the_given_dtype(path, config, storage):
    weights = random_weights(config, dtype="float64")
    save_weights(path, config, weights, dtype=storage)
    loaded_config, loaded = load_weights(path)
    assert loaded_config == config
    expected = {name: array.astype(storage or "float64") for name, array in weights.items()}
    assert_same_bits(loaded, expected)
    with pytest.raises(ValueError, match=r"^dtype must be one of float64, float32, float16, bfloat16: got 'int8'$"):
        save_weights(path, config, weights, dtype="int8")


def test_overflow_in_the_storage_dtype_is_rejected(path, config, saved):
    name = "encoder.layers.0.feed_forward.inner_proj.kernel"
    weights = {**random_weights(config), name: np.full((24, 40), -1e5)}
    with pytest.raises(ValueError, match=rf"^{name} overflows float16: the array's largest magnitude is 100000\.0$"):
        save_weights(path, config, weights, dtype="float16")
    assert path.read_bytes() == saved


def test_save_weights_replaces_the_target_of_a_symbolic_link(tmp_path, path, config):
    link, weights = tmp_path / "latest.safetensors", random_weights(config)
    save_weights(path, config, weights)
    try:
        link.symlink_to(path.name)
    except OSError:  # Windows allows only some users to create links
        pytest.skip("this system does not support symbolic links")
    save_weights(link, config, {name: 2 * array for name, array in weights.items()})
    assert link.is_symlink()
    np.testing.assert_array_equal(
        load_weights(path)[1]["source_embedding.table"], 2 * weights["source_embedding.table"]
    )


def test_swapped_save_weights_arguments_raise_type_error(tmp_path, config):
    with pytest.raises(TypeError, match=r"^config must be a TransformerConfig: got (Posix|Windows)Path$"):
        save_weights(config, tmp_path / "model.safetensors", random_weights(config))


@pytest.mark.parametrize("target", ["nowhere/model.safetensors", "."])
def test_unwritable_path_raises_os_error(tmp_path, config, target):
    with pytest.raises(OSError):  # noqa: PT011  the message depends on the operating system
        save_weights(tmp_path / target, config, random_weights(config, dtype="float64"))
    with pytest.raises(OSError, match=r"^there is no weight file |is a directory, not a weight file"):
        load_weights(tmp_path / target)


def refused(path, reason=""):
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))} is not a usable weight file: {reason}"):
        load_weights(path)


def test_truncated_file_is_rejected(path, saved):
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
    ids=["empty", "text", "pickle", "malicious pickle", "header 2**63", "header 10**9", "no tensors", "nested header"],
)
def test_foreign_files_are_rejected(path, content):
    path.write_bytes(content)
    refused(path)


@contextmanager
def at_once():
    """Interrupt a call that takes longer than a second, before it exhausts the memory."""

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
    "nested config": '{"version": 2, "sha256": {}, "config": ' + '{"a": ' * 50_000,
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
    "different sizes": {"d_ff": 41},
    "different ties": {"tie_embeddings": "none"},
    "a billion layers": {"num_encoder_layers": 10**9},
    "a billion tokens": {"source_vocab_size": 10**9, "target_vocab_size": 10**9},
    "a billion positions": {"position_encoding": "learned", "max_length": 10**9},
    "10**400 channels": {"d_model": 10**400, "d_k": 8, "d_v": 8},
    "NaN": {"layer_norm_epsilon": math.nan},
    "infinite": {"layer_norm_epsilon": math.inf},
    "an integer too large for a float": {"layer_norm_epsilon": 10**400},
}
BAD_CHECKSUMS = {
    "version 1": ({"version": 1}, "expected format version 2, got 1"),
    "version 3": ({"version": 3}, "expected format version 2, got 3"),
    "a version of a wrong type": ({"version": True}, "expected format version 2, got True"),
    "no checksums": ({"version": 2}, "the metadata must contain an object 'sha256'"),
    "checksums in a list": ({"version": 2, "sha256": []}, "the metadata must contain an object 'sha256'"),
    "a missing checksum": ({"version": 2, "sha256": {}}, "is damaged: expected SHA-256 None, got "),
    "an unknown entry": ({"version": 2, "sha256": {}, "rung": 1}, "the metadata contains unknown entries: rung"),
}


@pytest.mark.parametrize("case", BAD_CHECKSUMS)
def test_invalid_checksums_are_rejected(path, config, saved, case):
    changes, reason = BAD_CHECKSUMS[case]
    path.write_bytes(with_description(saved, json.dumps({"config": config.to_dict(), **changes})))
    refused(path, f".*{reason}")


@pytest.mark.parametrize("case", [*BAD_DESCRIPTIONS, *(f"config: {case}" for case in BAD_CONFIGS)])
def test_invalid_description_is_rejected(path, config, saved, case):
    if case in BAD_DESCRIPTIONS:
        description = BAD_DESCRIPTIONS[case]
    else:
        changes = BAD_CONFIGS[case.removeprefix("config: ")]
        fields = {**config.to_dict(), **changes} if changes and isinstance(changes, dict) else changes
        description = json.dumps({"version": 2, "sha256": header_checksums(saved), "config": fields})
    path.write_bytes(with_description(saved, description))
    with at_once():  # nothing with the described sizes is allocated
        refused(path)


def test_invalid_tensors_are_rejected(path, config):
    """The file itself is valid, but its weights don't match its config."""
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
        save_described(path, config, bad)
        refused(path, "(?!.* is damaged)")


def test_flipped_bits_in_the_header_are_rejected_or_harmless(path, config, saved):
    """Damage is rejected, unless it only changes whitespace or turns a config value into another legal value."""
    rng = np.random.default_rng(0)
    _, weights = load_weights(path)
    end = header_size(saved)
    description = saved.index(b"transformer-parity")
    refusals = 0
    for position in [*range(8), *rng.integers(8, end, 400)]:
        path.write_bytes(flipped(saved, position, rng))
        try:
            got_config, got = load_weights(path)
        except ValueError:
            refusals += 1
            continue
        assert_same_bits(got, weights)
        assert got_config == config or position > description
    assert refusals > 390


def test_flipped_bits_in_tensors_are_detected(path, config):
    """Each of 40 flipped bits is detected, and the message names the tensor.

    Checking for NaN wouldn't be enough, because nearly all of the damaged values are still valid numbers.
    """
    save_weights(path, config, random_weights(config), vocabulary=bytes(2000))
    saved = path.read_bytes()
    rng = np.random.default_rng(0)
    for position in rng.integers(header_size(saved), len(saved), 40):
        path.write_bytes(flipped(saved, position, rng))
        refused(path, f"{re.escape(tensor_at(saved, position))} is damaged: expected SHA-256 [0-9a-f]{{64}}, got ")


def test_checksum_covers_name_dtype_shape_and_bytes(path, config, saved):
    """A program in any language can compute the checksum in this way."""
    description = json.loads(header(saved)["__metadata__"]["transformer-parity"])
    assert description["version"] == 2
    _, weights = load_weights(path)
    assert description["sha256"] == {
        name: sha256(json.dumps([name, "float32", list(array.shape)]).encode() + array.tobytes()).hexdigest()
        for name, array in weights.items()
    }


def test_swapped_tensors_are_detected(path, saved):
    """The two tensors have the same shape and dtype, and the bytes of each are undamaged."""
    names = [f"encoder.layers.0.self_attention.{side}_proj.kernel" for side in ("query", "key")]
    entries = header(saved)
    entries |= {name: entries[other] for name, other in zip(names, reversed(names), strict=True)}
    path.write_bytes(with_header(saved, entries))
    refused(path, f"({'|'.join(map(re.escape, names))}) is damaged")


def test_directory_is_synced_after_the_file_is_in_place(path, config, monkeypatch):
    """Otherwise, a power failure could undo the rename."""
    done = []

    def replace(*args):
        done.append("replace")
        os_replace(*args)

    os_replace = os.replace
    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(
        os, "fsync", lambda file: done.append("directory" if S_ISDIR(os.fstat(file).st_mode) else "file")
    )
    save_weights(path, config, random_weights(config))
    write_text(path.with_suffix(".txt"), "text")
    assert done == ["file", "replace", "directory"] * 2


# --- Vocabulary files and notes in a weight file ---

FILES = VocabularyFiles("marian", {"source.spm": bytes(range(256)), "vocab.json": b"{}", "empty.txt": b""})
NOTES = {"search": {"beam_size": 4, "rules": {"banned_ids": [7], "factor": 0.1}}, "origin": {"license": "CC-BY 4.0 ©"}}


def test_vocabulary_files_and_notes_round_trip(path, config):
    weights = random_weights(config)
    save_weights(path, config, weights, vocabulary=FILES, notes=NOTES)
    saved = path.read_bytes()
    assert load_vocabulary(path) == FILES
    assert load_notes(path) == NOTES
    got_config, got = load_weights(path)
    assert got_config == config
    assert_same_bits(got, weights)
    assert {name for name in header(saved) if name.startswith("vocabulary")} == {
        f"vocabulary.marian.{name}" for name in FILES.files
    }
    description = json.loads(header(saved)["__metadata__"]["transformer-parity"])
    for name, note in NOTES.items():
        text = json.dumps([name, note], sort_keys=True)
        assert description["sha256"][name] == sha256(text.encode()).hexdigest()
    save_weights(path, config, weights, vocabulary=FILES, notes=dict(reversed(NOTES.items())))
    assert path.read_bytes() == saved


def test_file_without_vocabulary_files_or_notes_keeps_the_old_format(path, config):
    """Neither the description nor the tensors include any of the newer entries."""
    save_weights(path, config, random_weights(config), vocabulary=bytes(range(256)))
    entries = header(path.read_bytes())
    names = {*random_weights(config), "vocabulary"}
    assert set(entries) == {"__metadata__", *names}
    text = entries["__metadata__"]["transformer-parity"]
    assert set(entries["__metadata__"]) == {"transformer-parity"}
    description = json.loads(text)
    assert text == json.dumps(description, sort_keys=True)
    assert set(description) == {"version", "config", "sha256"}
    assert set(description["sha256"]) == names
    assert load_notes(path) == {}


def test_flipped_bits_in_notes_and_vocabularies_are_detected(path, config):
    save_weights(path, config, random_weights(config), vocabulary=FILES, notes=NOTES)
    saved = path.read_bytes()
    for part in (b"banned_ids", b"CC-BY", b"factor", b"[7]"):
        place = saved.index(part) + 1
        for bit in (1, 2, 4):
            path.write_bytes(saved[:place] + bytes([saved[place] ^ bit]) + saved[place + 1 :])
            refused(path)
    path.write_bytes(saved.replace(b"CC-BY", b"CC-BX"))
    refused(path, "origin is damaged: expected SHA-256 [0-9a-f]{64}, got ")
    path.write_bytes(saved.replace(b"vocabulary.marian.v", b"vocabulary.martin.v"))
    refused(path)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"notes": {"search": [1]}}, TypeError, "search must be a dict: got list"),
        *(
            (
                {"notes": {"origin": {"x": value}}},
                ValueError,
                r"^origin\['x'\] must contain only dicts with string keys, ",
            )
            for value in (object(), np.float32(1), np.float64(1), math.nan, (1, 2), {1: 2}, [{"y": (1,)}], b"bytes")
        ),
        ({"notes": {"search": {1: 2}}}, ValueError, r"^search\[1\] must contain only dicts with string keys, "),
        ({"notes": {"origin": {"x": "x" * 2**20}}}, ValueError, "origin must be at most 1,048,576 bytes of JSON: got"),
        ({"notes": {"license": {}}}, ValueError, "note must be one of search, origin: got 'license'"),
        ({"vocabulary": VocabularyFiles("a.b", {"x": b""})}, ValueError, "its kind must be an identifier: got 'a.b'"),
        (
            {"vocabulary": VocabularyFiles("marian", {})},
            ValueError,
            "vocabulary must have files, and its kind must be an identifier",
        ),
        (
            {"vocabulary": VocabularyFiles("marian", {"x": "x"})},
            TypeError,
            "vocabulary.marian.x must be bytes: got str",
        ),
    ],
)
def test_invalid_notes_and_vocabularies_are_rejected_without_writing(path, config, saved, options, error, message):
    with pytest.raises(error, match=message):
        save_weights(path, config, random_weights(config), **options)
    assert path.read_bytes() == saved


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            {"vocabulary": b"", "vocabulary.marian.a": b""},
            "expected the tensors of one vocabulary, got vocabulary, vocabulary.marian.a",
        ),
        ({"vocabulary.marian.a": b"", "vocabulary.nllb.b": b""}, "expected the tensors of one vocabulary, got"),
        ({"vocabulary.a": b""}, "expected the tensors of one vocabulary, got vocabulary.a"),
    ],
)
def test_file_with_several_vocabularies_is_rejected(path, config, extra, message):
    weights = random_weights(config)
    tensors = weights | {name: np.frombuffer(content, np.uint8) for name, content in extra.items()}
    save_described(path, config, tensors)
    refused(path, message)


def test_dtype_of_a_file_can_be_a_numpy_dtype(path, config):
    for dtype in (np.float16, np.dtype("float16"), "half"):
        save_weights(path, config, random_weights(config), dtype)
        assert {array.dtype.name for array in load_weights(path)[1].values()} == {"float16"}


def test_files_in_other_formats_are_rejected_with_the_expected_format(tmp_path):
    np.savez(tmp_path / "weights.npz", kernel=np.ones(3))
    with pytest.raises(
        ValueError, match=r"weights.npz is not a usable weight file: .*; a weight file is a .safetensors"
    ):
        load_weights(tmp_path / "weights.npz")


@pytest.mark.parametrize("of_config", [count_parameters, parameter_shapes, lambda model: tap_shapes(model, 1, 2, 3)])
def test_functions_of_a_config_reject_a_model(of_config, config):
    with pytest.raises(TypeError, match=r"^config must be a TransformerConfig: got Transformer$"):
        of_config(Transformer(config))


def test_weights_instead_of_a_dtype_are_not_printed(config):
    with pytest.raises(ValueError, match=r"^dtype must be one of float64, float32: got dict$"):
        Transformer(config, random_weights(config))
