"""Messages that ``parity import`` and ``parity export`` print for unsuitable files, names, or options."""

from __future__ import annotations

import io
import json
import re
import struct
import time
import tracemalloc
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import parity, tiny_config
from imported_models import ours
from test_first_minute import only as only  # a fixture
from test_import_torch import DEFAULT, SAID, Seq2Seq, annotated_file, randomized
from vocabulary_files import train

import reference_numpy as ref
from transformer_parity.apps.checkpoints import importer
from transformer_parity.apps.checkpoints.formats import torch_nn
from transformer_parity.apps.checkpoints.imported import Origin
from transformer_parity.apps.checkpoints.importer import import_checkpoint
from transformer_parity.apps.checkpoints.options import ReadOptions
from transformer_parity.apps.checkpoints.proof import DTYPES, Agreement
from transformer_parity.apps.translate.trained import read_trained
from transformer_parity.cli import import_checkpoint as command
from transformer_parity.cli.main import main
from transformer_spec.files import VocabularyFiles
from transformer_spec.search import Search

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
IMPORT = ("import", "model.pt", "--as", "torch", "--names", "names.toml", "--backend", "numpy")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory that contains a model based on torch.nn.Transformer and the file with its names."""
    monkeypatch.chdir(tmp_path)
    torch.save(randomized(Seq2Seq()).state_dict(), "model.pt")
    (tmp_path / "names.toml").write_text(SAID.format(**DEFAULT))
    return tmp_path


def vocabulary(directory, size=17):
    """Write a SentencePiece model with the special IDs of the test model, and return its path."""
    model = train(kind="char", size=size, pad_id=0, bos_id=1, eos_id=2, unk_id=3, character_coverage=0.5)
    (directory / "text.model").write_bytes(model)
    return directory / "text.model"


@pytest.mark.parametrize(
    ("errors", "code", "last"),
    [((0.0, 0.1), 2, "IMPRECISE  numpy"), ((0.1, 0.1), 1, "DIVERGE  numpy"), ((0.0, 0.0), 0, "AGREE  numpy")],
)
def test_verdicts_and_exit_codes_match_parity_check(here, capsys, monkeypatch, errors, code, last):
    proof = [Agreement("numpy", dtype, error, 1e-5) for dtype, error in zip(DTYPES, errors, strict=True)]
    monkeypatch.setattr(command, "prove", lambda *_: proof)
    assert main([*IMPORT[:-2], "--out", "a.safetensors", "--json", "a.json"]) == code
    assert capsys.readouterr().out.splitlines()[-1] == last
    found = json.loads(Path("a.json").read_text())
    assert (found["verdict"], found["exit_code"]) == (last.split()[0], code)


def test_torch_import_stores_the_given_vocabulary(here):
    path = vocabulary(here)
    imported = import_checkpoint("model.pt", "torch", ReadOptions(vocab=(path,), names=here / "names.toml"))
    assert imported.vocabulary.target_ids("")[-1] == 2
    assert path.name in imported.origin.files
    assert not any(note.startswith("no vocabulary") for note in imported.notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab": "nosuch.model"}, "there is no file nosuch.model"),
        ({"names": "nosuch.toml"}, "there is no file nosuch.toml"),
        ({"fields": {"eos_id": 5}}, "the vocabulary must append only eos_id, 5, to a target sentence: got [2]"),
    ],
)
def test_explicitly_given_files_must_be_valid(options, message, here):
    path = vocabulary(here)
    given = {"vocab": options.get("vocab", path.name), "names": options.get("names", "names.toml")}
    asked = ReadOptions(vocab=(Path(given["vocab"]),), names=Path(given["names"]), fields=options.get("fields", {}))
    with pytest.raises((OSError, ValueError), match=re.escape(message)):
        import_checkpoint("model.pt", "torch", asked)


@pytest.mark.parametrize("name", [name for name in importer.FORMATS if name not in importer.ASKED])
def test_options_unsupported_by_a_format_are_rejected(name, here):
    for options in ReadOptions(vocab=(here / "model.pt",)), ReadOptions(fields={"num_heads": 3}):
        with pytest.raises(ValueError, match=f"has the format {name}, which supports no options; remove --"):
            import_checkpoint("model.pt", name, options)


@pytest.mark.parametrize("prefix", ["net.", "module.net.", ""])
def test_torch_prefix_is_derived_from_the_tensor_names(prefix, here):
    state = {name.replace("net.", prefix): one for name, one in torch.load("model.pt").items()}
    torch.save(state, "model.pt")
    text = SAID.format(**DEFAULT).replace('prefix = "net."', "")
    (here / "names.toml").write_text(text)
    options = ReadOptions(names=here / "names.toml")
    assert torch_nn.read(here / "model.pt", options).config.num_encoder_layers == 2
    more = {name.replace(prefix, "other.", 1): one for name, one in state.items() if "coder." in name}
    if prefix:
        torch.save({**state, **more}, "model.pt")
        with pytest.raises(
            ValueError, match=r"more than one model; set prefix under \[file\] in the TOML file to one of"
        ):
            torch_nn.read(here / "model.pt", options)


def test_annotated_transformer_names_can_have_a_prefix(tmp_path):
    _, read = annotated_file(tmp_path, lambda s: {f"module.{name}": one for name, one in s.items()}, num_heads=3)
    assert read().config.num_encoder_layers == 2
    assert importer.recognized(tmp_path / "model.pt") == "annotated"


def test_error_for_an_unrecognized_file_describes_its_contents(here, capsys):
    def said(path, *options):
        code, out, err = parity(capsys, "import", path, *options)
        assert (code, out) == (3, "")
        assert len(err) < 400
        return err

    assert "tensors belong to torch.nn.Transformer; add --as torch --names FILE\n" in said("model.pt")
    torch.save({"epoch": 3, "model_state_dict": torch.load("model.pt")}, "nested.pt")
    assert '--names FILE, and set state = "model_state_dict" under [file] in FILE\n' in said("nested.pt")
    torch.save(torch.nn.Linear(2, 2), "whole.pt")
    assert "refers to torch.nn.modules.linear.Linear, which would run code; save only model.state_dict()" in said(
        "whole.pt"
    )
    torch.save({"w": torch.ones(2)}, "other.pt")
    assert "the file contains w; `parity import --help` lists the supported formats" in said("other.pt")
    torch.save({"model": {"encoder.layers.0.fc1.weight": torch.ones(2)}}, "fairseq.pt")
    assert "belong to fairseq or Hugging Face, but the settings are missing" in said("fairseq.pt")
    (here / "empty").mkdir()
    assert "the directory contains neither config.json nor model.bin" in said("empty")
    (here / "hf").mkdir()
    (here / "hf/config.json").write_text("{}")
    (here / "hf/model.safetensors").write_text("")
    assert "the directory of this file contains config.json; pass the directory hf instead" in said(
        "hf/model.safetensors"
    )
    config = ref.TransformerConfig(source_vocab_size=9, target_vocab_size=9, d_model=8, num_heads=2, d_ff=8)
    ref.save_weights("ours.safetensors", config, ref.init_weights(config, seed=0))
    assert "a weight file of this project; use it with `parity translate` or" in said("ours.safetensors")
    assert f"has the format {'annotated'}" not in said("model.pt", "--names", "nosuch.toml")


def test_names_option_selects_the_torch_format(here, capsys):
    code, out, _ = parity(capsys, "import", "model.pt", "--names", "names.toml")
    assert code == 0
    assert "torch.nn.Transformer" in out
    words = " ".join(out.split())
    assert (
        "the file does not specify these settings, so your values are used: num_heads 3, norm_order post, activation "
        "relu" in words
    )
    assert "pass vocabulary files, such as --vocab source.model target.model" in words


def test_written_weights_are_checked_only_with_installed_backends(here, capsys, only):
    only()
    code, out, _ = parity(capsys, "import", "model.pt", "--names", "names.toml", "--out", "out.safetensors")
    assert code == 0
    assert "NOT CHECKED" not in out
    assert out.endswith("AGREE  numpy\n")


def test_only_weight_files_are_overwritten_by_import(here, capsys):
    (here / "mine.txt").write_text("precious")
    code, _, err = parity(capsys, *IMPORT, "--out", "mine.txt")
    assert code == 3
    assert err.endswith("a new file or an existing weight file: got mine.txt, which is not a weight file\n")
    assert (here / "mine.txt").read_text() == "precious"
    for _ in range(2):
        assert parity(capsys, *IMPORT, "--out", "new.safetensors")[0] == 0


def test_ctrl_c_during_comparison_reports_the_written_file(here, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "prove", interrupted)
    code, _, err = parity(capsys, *IMPORT, "--out", "new.safetensors")
    assert code == 3
    assert "parity import: new.safetensors is complete, but has not been compared with the reference\n" in err


def test_unsupported_check_is_rejected_before_writing(here, capsys):
    code, _, err = parity(capsys, *IMPORT, "--out", "new.safetensors", "--check")
    assert code == 3
    assert "--check requires " in err
    assert "; remove --check" in err
    assert not (here / "new.safetensors").exists()


def test_export_without_vocabulary_prints_a_note(here, capsys):
    config = ref.TransformerConfig.preset("marian", source_vocab_size=9, target_vocab_size=9, d_model=8, num_heads=2)
    ref.save_weights("own.safetensors", config, ref.init_weights(config, seed=0))
    code, out, _ = parity(capsys, "export", "own.safetensors", "--format", "hf", "--out", "hf")
    assert code == 0
    assert "note: own.safetensors contains no vocabulary, so no tokenizer was written\n" in out


@pytest.mark.parametrize("line", ["translate --text x --weights files", "export files --format hf --out out"])
def test_directory_given_as_weight_file_is_rejected(line, here, capsys):
    (here / "files").mkdir()
    code, _, err = parity(capsys, *line.split())
    assert code == 3
    assert "files is a directory, not a weight file; use `parity import` to convert a checkpoint directory\n" in err
    for name in ("model.safetensors", "checkpoint-20.safetensors"):  # a training run writes both files
        (here / "files" / name).touch()
    code, _, err = parity(capsys, *line.split())
    assert code == 3
    assert "files is a directory, not a weight file; it contains checkpoint-20.safetensors, model.safetensors\n" in err


def test_missing_vocabulary_error_explains_how_to_add_one(here, capsys):
    assert parity(capsys, *IMPORT, "--out", "new.safetensors")[0] == 0
    err = parity(capsys, "translate", "--weights", "new.safetensors", "--text", "x")[2]
    assert "to add one, rerun `parity import`, which notes the files that it needs, or call save_weights" in err


CANNOT_HOLD = [  # a format, a preset, its changed fields, and the error message
    ("torch", "torch", {"final_norm": False}, "final_norm must be True: got False"),
    ("torch", "torch", {"activation": "swish"}, "activation must be 'relu' or 'gelu': got 'swish'"),
    ("torch", "torch", {"attention_bias": False}, "attention_bias must be True: got False"),
    ("torch", "torch", {"d_k": 5}, "d_k must be 8: got 5"),
    ("torch", "torch", {"decoder_d_ff": 48}, "decoder_d_ff must be None: got 48"),
    ("marian", "marian_cpp", {"layer_norm_epsilon": 1e-5}, "layer_norm_epsilon must be 1e-06: got 1e-05"),
    ("marian", "marian_cpp", {"position_timescale": "m"}, "position_timescale must be 'm_minus_1': got 'm'"),
    ("marian", "marian_cpp", {"activation": "gelu"}, "activation must be 'swish' or 'relu': got 'gelu'"),
    ("marian", "marian_cpp", {"d_k": 5}, "d_k must be 8: got 5"),
    ("ctranslate2", "paper_base", {"d_k": 5}, "d_k must be 8: got 5"),
    ("ctranslate2", "paper_base", {"layer_norm_kind": "annotated"}, "layer_norm_kind must be 'standard': got"),
    ("hf", "m2m_100", {"final_norm": False}, "final_norm must be True: got False"),
    ("hf", "marian", {"norm_order": "pre"}, "norm_order must be 'post': got 'pre'"),
    ("hf", "paper_base", {}, ""),
    ("hf", "bart", {"d_k": 16}, "d_k must be 8: got 16"),
]
SOFTWARE = {"torch": "torch.nn.Transformer", "marian": "Marian", "ctranslate2": "CTranslate2", "hf": ""}


@pytest.mark.parametrize(("format_", "preset", "change", "message"), CANNOT_HOLD)
def test_model_unsupported_by_a_format_is_not_exported(format_, preset, change, message, tmp_path):
    said = f"{SOFTWARE[format_]} does not support this model: .*{re.escape(message)}"
    for write in (importer.module_of(format_).write, partial(importer.export_checkpoint, format_=format_)):
        with pytest.raises(ValueError, match=said):
            write(ours(tiny_config(preset, **change)), directory=tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_marian_export_requires_a_zero_start_embedding(tmp_path):
    with pytest.raises(ValueError, match=r"^the target embedding of bos_id, 1, must be zero because Marian starts"):
        importer.export_checkpoint(ours(tiny_config("marian_cpp")), "marian", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- Files that contradict themselves ---


def lying(path, **notes):
    """Write a weight file with false notes or with a vocabulary of a different kind than declared."""
    config = ref.TransformerConfig.preset("marian", source_vocab_size=9, target_vocab_size=9, d_model=8, num_heads=2)
    table = json.dumps({"</s>": 0, "<unk>": 1, "a": 2}).encode()
    vocabulary = VocabularyFiles(notes.pop("kind", "marian"), {"vocab.json": table})
    ref.save_weights(path, config, ref.init_weights(config, seed=0), vocabulary=vocabulary, notes=notes)
    return path


def search(rules=None, **changes):
    usual = Search().to_dict()
    return {**usual, **changes, "rules": {**usual["rules"], **(rules or {})}}


ORIGIN = Origin(format="hf", family="marian", preset="marian", files={}).to_dict()
LIES = {
    "a different vocabulary kind": ({"kind": "nllb"}, "a vocabulary of kind nllb requires 'sentencepiece.bpe.model'"),
    "an unknown vocabulary kind": ({"kind": "klingon"}, "the kind of a vocabulary must be one of .*: got 'klingon'"),
    "a start token that is not an ID": ({"search": search(start_id=9)}, r"start_id must be in \[0, 9\): got 9"),
    "forced tokens that are not IDs": (
        {"search": search({"forced_ids": [3, 10**9]})},
        r"forced_ids must be in \[0, 9\)",
    ),
    "banned tokens that are not IDs": (
        {"search": search({"banned_ids": [9]})},
        r"banned_ids must be in \[0, 9\): got 9",
    ),
    "a beam of a billion": (
        {"search": search(beam_size=10**9)},
        "beam_size in the search settings of a file must be at most",
    ),
    "an unknown preset": ({"origin": {**ORIGIN, "preset": "nosuch"}}, "preset must be one of paper_base"),
    "files given as a string": ({"origin": {**ORIGIN, "files": "x"}}, "the fields of an origin must be strings"),
}


@pytest.mark.parametrize("lie", LIES)
def test_weight_file_with_false_metadata_is_rejected(lie, tmp_path):
    notes, message = LIES[lie]
    path = lying(tmp_path / "lie.safetensors", **notes)
    with pytest.raises(ValueError, match=message):
        importer.load(path)
    if "origin" not in notes:  # translation doesn't require the origin
        with pytest.raises(ValueError, match=message):
            read_trained(path)


def test_unknown_origin_family_does_not_prevent_export(tmp_path):
    path = lying(tmp_path / "lie.safetensors", origin={**ORIGIN, "family": "nosuch"})
    assert importer.export_checkpoint(importer.load(path), "hf", tmp_path / "out") == ()
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "marian"


def many_names(path):
    header = json.dumps(
        {f"layers.{i}.name": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(300_000)}
    ).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)


def many_members(path):
    content = io.BytesIO()
    np.save(content, np.zeros(1, np.float32))
    with zipfile.ZipFile(path, "w") as archive:
        for i in range(30_000):
            archive.writestr(f"n{i}.npy", content.getvalue())


def overlapping(path, count=3000):
    """Write an archive whose directory lists one member of a megabyte many times, under different names."""
    content = io.BytesIO()
    np.save(content, np.zeros(2**18, np.float32))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("0000000.npy", content.getvalue())
    written = path.read_bytes()
    at, end = written.index(b"PK\1\2"), written.index(b"PK\5\6")
    entries = b"".join(written[at:end].replace(b"0000000", f"{i:07}".encode()) for i in range(count))
    tail = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, len(entries), at, 0)
    path.write_bytes(written[:at] + entries + tail)


@pytest.mark.parametrize(
    ("write", "name", "message"),
    [
        (many_names, "model.safetensors", "at most 4,194,304 bytes, got 23,"),
        (many_members, "model.npz", "expected at most 10,000 members, got 30,000"),
        (overlapping, "model.npz", "bytes of unpacked data"),
        (lambda path: overlapping(path, 31), "model.npz", "File name in directory '0000001.npy' and header"),
    ],
)
def test_files_with_too_many_names_are_rejected_immediately(write, name, message, tmp_path):
    write(tmp_path / name)
    for measured in ("seconds", "bytes"):  # measured separately, because tracing allocations takes time
        before = time.process_time()
        if measured == "bytes":
            tracemalloc.start()
        with pytest.raises(ValueError, match=message):
            import_checkpoint(tmp_path / name)
        if measured == "bytes":
            assert tracemalloc.get_traced_memory()[1] < 100e6
            tracemalloc.stop()
        else:
            assert time.process_time() - before < 1.0
