"""Options and files that `parity train` rejects before it writes anything."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import exit_code
from training_texts import PAIRS, SMALL, losses, resume, spoilt, train
from training_texts import few_dates as few_dates  # a fixture of every test
from training_texts import finished as finished  # a fixture
from training_texts import texts as texts  # a fixture

import reference_numpy as ref
from transformer_parity.apps.train import curves
from transformer_parity.apps.train.log import locked
from transformer_parity.engine.system.errors import UsageError

START, STEP = {"event": "start", "step": 0, "task": "dates"}, {"event": "step", "step": 1, "loss": {"numpy": 1.0}}
VALIDATION = {"event": "validation", "step": 1, "backend": "numpy", "averaged": 0, "loss": 1.0, "score": 0.0}
LOGS = {
    "empty": ([], "{log} contains no start event and no step event"),
    "no start": ([STEP], "{log} contains no start event"),
    "no step": ([START, VALIDATION], "{log} contains no step event"),
    "an unknown object": ([START, {"level": 1}], 'line 2 of {log} must be an event of a run: got {{"level": 1}}'),
    "not an object": ([5], "line 1 of {log} must be an event of a run: got 5"),
    "not a number": ([{**START, "step": "one"}], "line 1 of {log} must be an event of a run: got "),
    "a list as event type": ([{"event": [], "step": 1}], "line 1 of {log} must be an event of a run: got "),
    "no task": ([{"event": "start", "step": 0}], "line 1 of {log} must be an event of a run: got "),
    "no loss": ([START, {"event": "step", "step": 1}], "line 2 of {log} must be an event of a run: got "),
    "one loss": ([START, {**STEP, "loss": 1.0}], "line 2 of {log} must be an event of a run: got "),
    "no score": ([START, STEP, {**VALIDATION, "score": None}], "line 3 of {log} must be an event of a run: got "),
}


@pytest.mark.parametrize("why", LOGS)
def test_log_without_a_curve_is_rejected(why, tmp_path):
    events, message = LOGS[why]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(event) + "\n" for event in events), "utf-8")
    with pytest.raises(UsageError, match=re.escape(message.format(log=log))):
        curves.read_runs([tmp_path])
    log.write_text("".join(json.dumps(event) + "\n" for event in (START, STEP, VALIDATION)), "utf-8")
    curves.draw(curves.read_runs([tmp_path]), tmp_path / "c.svg")
    assert (tmp_path / "c.svg").stat().st_size > 1000


NOT_UTF8 = {
    "binary": (b"\x00\x80\xff\n", 1),
    "UTF-16": (json.dumps(START).encode("utf-16"), 1),
    "Latin-1": (f"{json.dumps(START)}\n".encode() + '{"task": "M\u00e4rz"}'.encode("latin-1"), 2),
}


@pytest.mark.parametrize("content", NOT_UTF8)
def test_log_with_invalid_utf8_is_rejected(content, finished, tmp_path, capfd):
    text, line = NOT_UTF8[content]
    run = shutil.copytree(finished, tmp_path / "run")
    (run / "log.jsonl").write_bytes(text)
    message = f"line {line} of {run / 'log.jsonl'} must be UTF-8: got "
    with pytest.raises(UsageError, match=re.escape(message)):
        curves.read_runs([run])
    assert resume(run, "--backend", "numpy", "--steps", 12) == 3
    assert message in capfd.readouterr().err
    assert (run / "log.jsonl").read_bytes() == text


REFUSED = {
    "a directory with a run": (
        ["--task", "dates", "--out", "{finished}"],
        "already contains a run; resume it with --resume",
    ),
    "nothing to train on": ([], "exactly one of --task, --text, and --resume is required"),
    "two things to train on": (["--task", "dates", "--resume", "{finished}"], "got --task, --resume"),
    "text options with dates": (
        ["--resume", "{finished}", "--text", "a", "b"],
        "trained on dates, not on text; remove --text",
    ),
    "no checkpoint": (["--resume", "{empty}"], "contains no checkpoint"),
    "missing run": (["--resume", "{empty}/nothing"], "there is no"),
    "weights only": (["--resume", "{finished}/model.safetensors"], "no training state"),
    "no steps left": (
        ["--resume", "{finished}"],
        "is the end of a run of 12 steps; to continue, specify a higher number with --steps",
    ),
    "settings of a resumed run": (
        ["--resume", "{finished}", "--seed", "0", "--set", "d_ff=8"],
        "remove --seed, --set d_ff",
    ),
    "saved in lockstep": (
        ["--task", "dates", "--backend", "numpy,torch", "--set", "save_every=2", "keep=1"],
        "remove --set save_every, --set keep",
    ),
    "resumed in lockstep": (["--resume", "{finished}", "--backend", "numpy,torch"], "one backend"),
    "beyond the last step": (["--task", "dates", "--steps", "5", "--stop-at", "6"], "must be at most 5, the last step"),
    "no text": (["--text", "{empty}/a", "{empty}/b"], "No such file"),
    "vocabulary options with dates": (
        ["--task", "dates", "--vocab-size", "9"],
        "--held-out and --vocab-size require --text",
    ),
    "dropout of one": (["--task", "dates", "--set", "dropout=1"], "dropout.embedding must be in [0, 1)"),
    "heads that do not divide": (["--task", "dates", "--set", "num_heads=3"], "num_heads must divide d_model"),
    "unknown field": (
        ["--task", "dates", "--set", "depth=3"],
        "unknown --set field depth; choose from accumulation_steps, activation, ",
    ),
    "a field of the corpus": (
        ["--task", "dates", "--set", "source_vocab_size=3"],
        "unknown --set field source_vocab_size; ",
    ),
    "a field with an option": (["--task", "dates", "--set", "total_steps=3"], "unknown --set field total_steps; "),
    "fewer checkpoints than averaged": (
        ["--task", "dates", "--set", "keep=1", "average=2"],
        "keep must be at least 2, the value of average: got 1",
    ),
    "an interval as text": (
        ["--task", "dates", "--set", "save_every=often"],
        "save_every must be an integer: got 'often'",
    ),
    "no tokens": (["--task", "dates", "--set", "tokens_per_batch=0"], "tokens_per_batch must be at least 1: got 0"),
    "a field without a value": (["--task", "dates", "--set", "d_k"], "must be FIELD=VALUE"),
    "a number as text": (["--task", "dates", "--set", "d_k=many"], "d_k must be an integer: got 'many'"),
    "fields of a run": (["--resume", "{finished}", "--set", "d_k=3"], "remove --set d_k"),
    "zero factor": (
        ["--task", "dates", "--set", "learning_rate_factor=0"],
        "learning_rate_factor must be positive",
    ),
    "an excessive cool-down": (
        ["--task", "dates", "--steps", "5", "--set", "cooldown_steps=6"],
        "cooldown_steps must be at most",
    ),
    "negative seed": (["--task", "dates", "--seed", "-1"], "seed"),
    "bfloat16 in numpy": (["--task", "dates", "--set", "mixed_bfloat16=true", "--backend", "numpy"], "mixed_bfloat16"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_invalid_train_arguments_are_rejected_before_writing(why, finished, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments, message = REFUSED[why]
    (tmp_path / "empty").mkdir()
    before = {path: path.read_bytes() for path in finished.iterdir()}
    places = {"finished": finished, "empty": tmp_path / "empty"}
    small = [] if "--resume" in arguments else SMALL
    given = [argument.format(**places) for argument in arguments]
    assert exit_code("train", *small, *given, *([] if "--backend" in given else ["--backend", "numpy"])) == 3
    assert message in capfd.readouterr().err
    assert {path: path.read_bytes() for path in finished.iterdir()} == before
    assert list(tmp_path.iterdir()) == [tmp_path / "empty"]
    assert list((tmp_path / "empty").iterdir()) == []


HOLDER = """
import sys, time
from pathlib import Path
from transformer_parity.apps.train.log import locked

with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("go_on", [False, True], ids=["new", "resumed"])
def test_second_run_in_a_directory_is_rejected_until_the_first_has_ended(go_on, tmp_path, capfd):
    directory = tmp_path / "run"
    options = ("--backend", "numpy", "--steps", 4)
    if go_on:
        assert train(directory, *options, "--stop-at", 2) == 0

    def start():
        return resume(directory, "--backend", "numpy") if go_on else train(directory, *options)

    with subprocess.Popen([sys.executable, "-c", HOLDER, str(directory)], stdout=subprocess.PIPE, text=True) as first:
        try:
            assert first.stdout.readline() == "locked\n"
            before = {path: path.read_bytes() for path in directory.iterdir()}
            assert start() == 3
            assert f"another process is training in {directory}" in capfd.readouterr().err
            assert {path: path.read_bytes() for path in directory.iterdir()} == before
        finally:
            first.kill()
    assert start() == 0
    assert sorted(losses(directory)) == [1, 2, 3, 4]


def test_run_proceeds_without_file_locks_if_unavailable(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert train(tmp_path / "run", "--backend", "numpy", "--steps", 1) == 0


def test_resuming_deletes_partial_files_of_a_killed_run(tmp_path):
    directory = tmp_path / "run"
    assert train(directory, "--backend", "numpy", "--steps", 4, "--stop-at", 2) == 0
    for name in ("checkpoint-0000003.safetensors", "model.safetensors", "curve.png", "mine"):
        (directory / f".{name}.0123abcd.tmp").write_bytes(b"half")
    (directory / ".tmpAbC123").write_bytes(b"half")
    assert resume(directory, "--backend", "numpy") == 0
    assert [path.name for path in directory.glob(".*")] == [".mine.0123abcd.tmp"]


def test_partial_files_of_killed_processes_are_deleted_after_the_run(tmp_path):
    with locked(tmp_path):
        for name in (".checkpoint-0000003.safetensors.0123abcd.tmp", ".tmpaRNRED", ".tmp-mine", "mine"):
            (tmp_path / name).write_bytes(b"half")
    assert {path.name for path in tmp_path.iterdir()} == {".tmp-mine", "mine"}


@pytest.fixture(scope="module")
def checkpoint(finished):
    return ref.load_checkpoint(finished / "checkpoint-0000008.safetensors")


TEXT = {"task": "text", "files": ["a", "b"], "held_out": None, "checksum": 0}
SPOILT = {
    "no plan": (["plan"], None, "the file does not contain 'plan'"),
    "no corpus": (["corpus"], None, "the file does not contain 'corpus'"),
    "no task": (["corpus", "task"], None, "the file does not contain 'task'"),
    "no seed": (["corpus", "seed"], None, "the file does not contain 'seed'"),
    "no checksum": (["corpus", "checksum"], None, "the file does not contain 'checksum'"),
    "no files": (["corpus"], {"task": "text"}, "the file does not contain 'files'"),
    "no held_out": (
        ["corpus"],
        {"task": "text", "files": ["a", "b"], "checksum": 0},
        "the file does not contain 'held_out'",
    ),
    "a list as corpus": (["corpus"], [1], "the entry 'corpus' must be a JSON object: got list"),
    "an unknown task": (["corpus", "task"], "speech", "task must be one of dates, text: got 'speech'"),
    "one file": (["corpus"], {**TEXT, "files": ["a"]}, "the text must consist of two files: got ['a']"),
    "numbers as files": (["corpus"], {**TEXT, "files": [1, 2]}, "the text must consist of two files: got [1, 2]"),
    "a seed as text": (["corpus", "seed"], "0", "seed must be an integer: got '0'"),
    "an unknown entry of the plan": (["plan", "depth"], 1, "unexpected keyword argument 'depth'"),
    "never saved": (["plan", "save_every"], 0, "save_every must be at least 1: got 0"),
    "never validated": (["plan", "validate_every"], -1, "validate_every must be at least 1: got -1"),
    "half a step": (["plan", "steps"], 1.5, "steps must be an integer: got 1.5"),
    "no tokens": (["tokens_per_batch"], 0, "tokens_per_batch must be at least 1: got 0"),
    "time as text": (["seconds"], "1", "seconds must be a number: got '1'"),
    "no position": (["position"], [], "position must consist of an epoch and an index: got []"),
    "a number as position": (["position"], 1, "position must consist of an epoch and an index: got 1"),
    "a position beyond the end": (["position"], [0, 10**9], "index must be below"),
}


@pytest.mark.parametrize("why", SPOILT)
def test_invalid_checkpoint_metadata_is_rejected_with_its_value(why, checkpoint, tmp_path, capfd):
    path = tmp_path / "checkpoint-0000008.safetensors"
    entry, value, message = SPOILT[why]
    spoilt(checkpoint, path, *entry, value=value)
    assert resume(path, "--backend", "numpy") == 3
    assert message in capfd.readouterr().err


def test_more_micro_batches_than_pairs_are_rejected_immediately(checkpoint, tmp_path, capfd):
    path = tmp_path / "checkpoint-0000008.safetensors"
    spoilt(checkpoint, path, settings=dataclasses.replace(checkpoint.settings, accumulation_steps=10**30))
    assert resume(path, "--backend", "numpy") == 3
    assert f"{10**30:,} micro-batches require at least {10**30:,} pairs: got {PAIRS}" in capfd.readouterr().err
    assert train(tmp_path / "run", "--backend", "numpy", "--steps", 1, "--set", f"accumulation_steps={PAIRS + 1}") == 3
    assert f"{PAIRS + 1} micro-batches require at least {PAIRS + 1} pairs: got {PAIRS}" in capfd.readouterr().err


@pytest.mark.parametrize("where", ["files", "held_out"])
@pytest.mark.parametrize("what", ["a FIFO", "a device", "a directory"])
def test_special_files_in_a_checkpoint_are_never_opened(what, where, texts, checkpoint, tmp_path, capfd):
    other = {"a FIFO": tmp_path / "fifo", "a device": Path("/dev/zero"), "a directory": tmp_path}[what]
    os.mkfifo(tmp_path / "fifo")  # opening it would block forever
    origin = {**TEXT, "files": list(map(str, texts[:2])), "held_out": list(map(str, texts[2:]))}
    origin[where][1] = str(other)
    path = tmp_path / "checkpoint-0000008.safetensors"
    spoilt(checkpoint, path, "corpus", value=origin)
    assert resume(path, "--backend", "numpy") == 3
    assert f"the run's text file {other} must be a regular file" in capfd.readouterr().err


def test_damaged_checkpoint_is_rejected_with_the_reason(finished, tmp_path, capfd):
    damaged = tmp_path / "checkpoint-0000008.safetensors"
    damaged.write_bytes((finished / damaged.name).read_bytes()[:-100])
    assert resume(damaged, "--backend", "numpy") == 3
    assert "is not a usable" in capfd.readouterr().err


def test_truncated_log_can_be_read(finished, tmp_path):
    lines = (finished / "log.jsonl").read_text("utf-8")
    (tmp_path / "log.jsonl").write_text(lines[:-20], "utf-8")
    assert losses(tmp_path) == losses(finished)
