"""``parity train`` and ``parity evaluate``, as a user runs them: whole runs of very small models."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiers

import reference_numpy as ref
from transformer_parity.apps.train import batches, corpora, curves
from transformer_parity.apps.train.batches import Batches
from transformer_parity.apps.train.log import locked, read_log
from transformer_parity.apps.train.run import LONGER, TrainingRun, longest_translation
from transformer_parity.cli.main import main
from transformer_parity.engine.system.errors import UsageError
from transformer_spec.files import open_file, write_file

SMALL = ["--set", "d_model=16", "num_heads=2", "d_ff=24", "num_encoder_layers=1", "num_decoder_layers=1"]
SMALL += ["warmup_steps=4", "tokens_per_batch=256"]
PAIRS = 60


@pytest.fixture(autouse=True)
def few_dates(monkeypatch):
    make_small(monkeypatch)


def make_small(monkeypatch):
    """Let the dates be few, and their batches of two shapes: each is compiled for."""
    monkeypatch.setattr(corpora, "DATES_TRAINED", PAIRS)
    monkeypatch.setattr(corpora, "DATES_HELD_OUT", 6)
    monkeypatch.setattr(batches, "MAX_SHAPES", 2)


def train(folder, *options, task=("--task", "dates"), small=SMALL):
    return main(["train", *task, "--out", str(folder), *small, *map(str, options)])


def exit_code(*arguments):
    """Return the exit code of a command, wherever it is decided."""
    try:
        return main([*arguments])
    except SystemExit as leaving:  # argparse's way out
        return leaving.code


def resume(path, *options):
    return main(["train", "--resume", str(path), *map(str, options)])


def test_any_field_of_the_model(tmp_path):
    fields = "--set", "embedding_norm=true", "decoder_d_ff=9", "--set", "activation=swish", 'dropout={"embedding": 0.3}'
    assert train(tmp_path / "run", "--backend", "numpy", "--steps", 1, *fields) == 0
    config, _ = ref.load_weights(tmp_path / "run" / "model.safetensors")
    assert (config.embedding_norm, config.decoder_d_ff, config.activation, config.d_ff) == (True, 9, "swish", 24)
    assert config.dropout == ref.DropoutRates(embedding=0.3)


def losses(folder):
    """Return the training loss of each step, whoever took it."""
    return {event["step"]: next(iter(event["loss"].values())) for event in read_log(folder) if event["event"] == "step"}


def saved_weights(path):
    return ref.load_weights(path)[1]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of twelve steps, to the end."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        assert train(folder, "--backend", "numpy", "--steps", 12, "--set", "save_every=4", "keep=2", "average=2") == 0
    return folder


def test_a_run_leaves_what_it_promises(finished):
    assert {path.name for path in finished.iterdir()} == {
        "checkpoint-0000008.safetensors",  # the first one is gone: keep=2
        "checkpoint-0000012.safetensors",
        "model.safetensors",
        "log.jsonl",
        "curve.png",
        "result.json",
    }
    assert (finished / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_log_tells_the_whole_story(finished):
    events = read_log(finished)
    assert sorted(losses(finished)) == list(range(1, 13))
    start = next(event for event in events if event["event"] == "start")
    config = ref.TransformerConfig.from_dict(start["config"])
    settings = ref.TrainingConfig.from_dict(start["settings"])
    assert (config.d_model, settings.total_steps) == (16, 12)
    for event in events:
        if event["event"] == "step":
            assert event["learning_rate"] == settings.learning_rate(event["step"], config.d_model)
            assert event["tokens"] > 0
            assert event["gradient_norm"] > 0
    assert next(event["file"] for event in events if event["event"] == "checkpoint") == "checkpoint-0000004.safetensors"
    end = next(event for event in events if event["event"] == "end")
    assert set(end["reached"]) == {"numpy", "numpy, 2 checkpoints averaged"}


def test_the_final_weights_are_the_average_of_the_last_checkpoints(finished):
    last = [saved_weights(path) for path in sorted(finished.glob("checkpoint-*"))]
    for name, array in saved_weights(finished / "model.safetensors").items():
        np.testing.assert_allclose(array, np.mean([weights[name] for weights in last], axis=0), rtol=1e-6)
    assert ref.load_vocabulary(finished / "model.safetensors") is not None


def test_activation_checkpointing_changes_no_loss(tmp_path):
    found = {}
    for name, options in {"kept": [], "again": ["--set", "activation_checkpointing=true"]}.items():
        assert train(tmp_path / name, "--backend", "numpy", "--dtype", "float64", "--steps", 2, *options) == 0
        found[name] = losses(tmp_path / name)
        start = next(event for event in read_log(tmp_path / name) if event["event"] == "start")
        assert start["settings"]["activation_checkpointing"] is bool(options)
    assert found["again"] == pytest.approx(found["kept"], rel=1e-12)


def test_training_lowers_the_loss(tmp_path):
    assert train(tmp_path / "run", "--backend", "numpy", "--steps", 40, "--set", "learning_rate_factor=2") == 0
    found = losses(tmp_path / "run")
    assert found[40] < 0.8 * found[1]


@pytest.mark.extended("training runs", "jax", "tf")
def test_stopped_and_resumed_is_uninterrupted_bit_by_bit(backend, tmp_path):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert train(whole, "--backend", backend.name, "--steps", 6) == 0
    assert train(halves, "--backend", backend.name, "--steps", 6, "--stop-at", 3) == 0
    assert not (halves / "model.safetensors").exists()
    assert resume(halves, "--backend", backend.name) == 0
    assert losses(halves) == losses(whole)
    for name, array in saved_weights(whole / "model.safetensors").items():
        assert array.tobytes() == saved_weights(halves / "model.safetensors")[name].tobytes(), name


@pytest.mark.extended("training runs")
def test_a_run_goes_on_in_another_framework(backends, tmp_path):
    """In float64 without dropout, the curve is the uninterrupted one to 1e-10, whoever takes the steps."""
    exact = ("--dtype", "float64", "--set", "dropout=0", "--steps", 2 * len(backends))
    whole, relay = tmp_path / "whole", tmp_path / "relay"
    assert train(whole, "--backend", backends[0].name, *exact) == 0
    assert train(relay, "--backend", backends[0].name, *exact, "--stop-at", 2) == 0
    for turn, backend in enumerate(backends[1:], start=2):
        assert resume(relay, "--backend", backend.name, "--dtype", "float64", "--stop-at", 2 * turn) == 0
    ours, theirs = losses(relay), losses(whole)
    assert sorted(ours) == sorted(theirs)
    np.testing.assert_allclose([ours[step] for step in theirs], list(theirs.values()), rtol=1e-10)


@pytest.mark.extended("training runs")
@pytest.mark.only("torch", "jax", "tf")
def test_lockstep_shows_where_the_curves_part(backends, tmp_path, capfd):
    names = [backend.name for backend in backends]
    assert train(tmp_path / "run", "--backend", ",".join(names), "--steps", 5, "--dtype", "float64") == 0
    steps, by_backend = curves.losses(read_log(tmp_path / "run"))
    assert list(by_backend) == names
    assert len(steps) == 5
    assert curves.spread(by_backend).max() < 1e-12
    output = capfd.readouterr().out
    assert "The curves agree for 5 steps" in output
    assert not list((tmp_path / "run").glob("*.safetensors"))


@pytest.mark.only("torch")
def test_a_mistake_in_one_backend_is_seen_in_lockstep(tmp_path, capfd, monkeypatch):
    """A schedule that is one step ahead: the first loss is the same, the second is not."""
    import transformer_torch

    class Early(ref.TrainingConfig):
        def learning_rate(self, step, d_model):
            return super().learning_rate(step + 1, d_model)

    class EarlyTrainer(transformer_torch.Trainer):
        def __init__(self, model, settings, seed, **options):
            super().__init__(model, Early(**settings.to_dict()), seed, **options)

    monkeypatch.setattr(transformer_torch, "Trainer", EarlyTrainer)
    assert train(tmp_path / "run", "--backend", "numpy,torch", "--steps", 4, "--dtype", "float64") == 0
    assert "The curves diverge at step 2," in capfd.readouterr().out


def test_text_is_learned_in_subwords(tmp_path, capfd):
    (tmp_path / "a").write_text("".join(f"the cat number {i} sleeps\n" for i in range(40)), "utf-8")
    (tmp_path / "b").write_text("".join(f"die Katze Nummer {i} schläft\n" for i in range(40)), "utf-8")
    options = ("--backend", "numpy", "--steps", 2, "--vocab-size", 60, "--set", "average=1")
    text = ("--text", str(tmp_path / "a"), str(tmp_path / "b"))
    assert train(tmp_path / "run", *options, task=text) == 0
    assert "BLEU" in capfd.readouterr().out
    for arguments in (["--text", *text[1:]], ["--text", *text[1:], "--sentences", "3", "--json", str(tmp_path / "j")]):
        assert main(["evaluate", str(tmp_path / "run" / "model.safetensors"), "--backend", "numpy", *arguments]) == 0
    assert json.loads((tmp_path / "j").read_text("utf-8"))["result"]["evaluations"][0]["sentences"] == 3
    (tmp_path / "a").write_text("another text\n" * 40, "utf-8")
    capfd.readouterr()
    assert resume(tmp_path / "run", "--backend", "numpy", "--steps", 4) == 3
    assert "are not the text that this run began with" in capfd.readouterr().err


@pytest.mark.extended("translations")
def test_all_backends_translate_the_same(finished, backends, tmp_path):
    names = ",".join(backend.name for backend in backends)
    files = [str(finished / "model.safetensors"), str(finished / "checkpoint-0000012.safetensors")]
    options = ["--task", "dates", "--sentences", "8", "--json", str(tmp_path / "j")]
    assert main(["evaluate", *files, "--backend", names, *options]) == 0
    results = json.loads((tmp_path / "j").read_text("utf-8"))["result"]["evaluations"]
    assert [result["backend"] for result in results] == 2 * [backend.name for backend in backends]
    assert [result["step"] for result in results] == [None] * len(backends) + [12] * len(backends)
    for result in results:
        assert result["loss"] == pytest.approx(results[(result["step"] and -1) or 0]["loss"], rel=1e-5)


def test_how_long_a_translation_may_be():
    config = ref.TransformerConfig(source_vocab_size=9, target_vocab_size=9)
    pairs = 40 * [([5, 2], [6] * 11 + [2])] + 42 * [([7] * 20 + [2], [8, 2])]
    held_out = Batches(pairs, config, 64)
    assert [shape[1:] for shape in held_out.shapes] == [(2, 12), (21, 2)]
    assert longest_translation(held_out) == 12 + LONGER


def test_evaluate_says_what_a_file_lacks(finished, tmp_path, capfd):
    def evaluate(path):
        assert main(["evaluate", str(path), "--task", "dates", "--backend", "numpy"]) == 3
        return capfd.readouterr().err

    with open_file(finished / "checkpoint-0000012.safetensors", "checkpoint") as (description, file):
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
    for spoilt, message in (({"step": "12"}, "step must be an integer: got '12'"), ({}, "'step'")):
        write_file(tmp_path / "checkpoint", {**description, "training": spoilt}, tensors, None)
        assert f"checkpoint is not a usable weight file: {message}" in evaluate(tmp_path / "checkpoint")
    ref.save_weights(tmp_path / "weights", *ref.load_weights(finished / "model.safetensors"))
    assert "weights holds no vocabulary" in evaluate(tmp_path / "weights")


def test_a_stop_in_between_changes_nothing_of_the_average(tmp_path):
    options = ("--backend", "numpy", "--steps", 8, "--set", "save_every=2", "average=3")
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert train(whole, *options) == 0
    assert train(halves, *options, "--stop-at", 5) == 0
    assert resume(halves, "--backend", "numpy") == 0
    for name, array in saved_weights(whole / "model.safetensors").items():
        assert array.tobytes() == saved_weights(halves / "model.safetensors")[name].tobytes(), name


def test_an_older_checkpoint_is_a_branch_of_its_own(finished, tmp_path, capfd):
    old = finished / "checkpoint-0000008.safetensors"
    before = {path: path.read_bytes() for path in finished.iterdir()}
    assert resume(old, "--backend", "numpy") == 3
    assert "branch off with --out DIR" in capfd.readouterr().err
    assert resume(old, "--backend", "numpy", "--out", tmp_path / "branch") == 0
    assert sorted(losses(tmp_path / "branch")) == [9, 10, 11, 12]
    assert [losses(tmp_path / "branch")[step] for step in range(9, 13)] == [losses(finished)[s] for s in range(9, 13)]
    assert {path: path.read_bytes() for path in finished.iterdir()} == before


def test_a_run_that_ended_before_its_final_weights_can_be_finished(finished, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    (copy / "model.safetensors").unlink()
    assert resume(copy, "--backend", "numpy") == 0
    assert (copy / "model.safetensors").read_bytes() == (finished / "model.safetensors").read_bytes()


def test_a_checkpoint_of_another_name_is_never_deleted(finished, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    shutil.copy(copy / "checkpoint-0000008.safetensors", copy / "checkpoint-best.safetensors")
    assert resume(copy, "--backend", "numpy", "--steps", 16) == 0
    assert sorted(path.name for path in copy.glob("checkpoint-*")) == [
        "checkpoint-0000012.safetensors",
        "checkpoint-0000016.safetensors",
        "checkpoint-best.safetensors",
    ]


@pytest.mark.parametrize("stopped", [13, 16], ids=["in between", "at the end"])
def test_a_run_that_goes_on_beyond_its_end_has_no_model_until_its_new_end(stopped, finished, tmp_path, monkeypatch):
    """It can be stopped and resumed as any other, also when all steps are taken."""
    copy, whole = tmp_path / "copy", tmp_path / "whole"
    for folder in (copy, whole):
        shutil.copytree(finished, folder)

    def fail(self):
        raise UsageError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, "finish", fail)
        code = 0 if stopped < 16 else 3
        assert resume(copy, "--backend", "numpy", "--steps", 16, "--stop-at", stopped) == code
    assert not (copy / "model.safetensors").exists()
    for folder, options in ((copy, ()), (whole, ("--steps", 16))):
        assert resume(folder, "--backend", "numpy", *options) == 0
    assert (copy / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert (copy / "model.safetensors").read_bytes() != (finished / "model.safetensors").read_bytes()


@pytest.mark.parametrize("when", ["fails", "is stopped"])
def test_a_run_that_takes_no_step_beyond_its_end_keeps_its_model(when, finished, tmp_path, monkeypatch):
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)

    def end(self, stop):
        if when == "fails":
            raise UsageError("failed")
        stop.signal = signal.SIGTERM
        return True

    monkeypatch.setattr(TrainingRun, "_stops", end)
    assert resume(copy, "--backend", "numpy", "--steps", 16) == (3 if when == "fails" else 128 + signal.SIGTERM)
    assert {path.name for path in copy.iterdir()} == {path.name for path in finished.iterdir()}
    assert (copy / "model.safetensors").read_bytes() == (finished / "model.safetensors").read_bytes()


def test_it_can_be_finished_elsewhere(finished, tmp_path):
    """The last checkpoint is all there is to average there."""
    copy, elsewhere = tmp_path / "copy", tmp_path / "elsewhere"
    shutil.copytree(finished, copy)
    (copy / "model.safetensors").unlink()
    assert resume(copy, "--backend", "numpy", "--out", elsewhere) == 0
    last = saved_weights(finished / "checkpoint-0000012.safetensors")
    for name, array in saved_weights(elsewhere / "model.safetensors").items():
        assert array.tobytes() == last[name].tobytes(), name
    assert sorted(path.name for path in elsewhere.iterdir()) == [
        "checkpoint-0000012.safetensors",
        "log.jsonl",
        "model.safetensors",
        "result.json",
    ]


def test_a_float64_run_goes_on_in_float64(tmp_path, capfd):
    assert train(tmp_path / "run", "--backend", "numpy", "--steps", 4, "--stop-at", 2, "--dtype", "float64") == 0
    assert resume(tmp_path / "run", "--backend", "numpy", "--dtype", "float32") == 3
    assert "goes on in float64" in capfd.readouterr().err
    assert resume(tmp_path / "run", "--backend", "numpy") == 0
    assert {array.dtype.name for array in saved_weights(tmp_path / "run" / "model.safetensors").values()} == {"float64"}


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path, capfd):
    with np.errstate(all="ignore"):
        assert train(tmp_path / "run", "--backend", "numpy", "--steps", 60, "--set", "learning_rate_factor=1e30") == 3
    assert "the loss is not finite at step" in capfd.readouterr().err


def test_lines_longer_than_the_model_has_positions_are_cut_off(tmp_path, capfd, monkeypatch):
    monkeypatch.setitem(corpora.RECIPES["dates"].model, "max_length", 16)
    options = ("--backend", "numpy", "--steps", 2, "--preset", "paper_learned")
    assert train(tmp_path / "run", *options) == 0
    assert "\n24 pairs are longer than 16 tokens and are left out\n" in capfd.readouterr().err


def test_which_sentences_are_held_out_does_not_depend_on_hashing(tmp_path):
    for side in "ab":
        (tmp_path / side).write_text("".join(f"same\n{side} {i}\n" for i in range(100)), "utf-8")
    found = set()
    for seed in "01":
        code = "import sys; from transformer_parity.apps.train import corpora; "
        code += "print(corpora.text(sys.argv[1:], None, 40).held_out)"
        command = [sys.executable, "-c", code, str(tmp_path / "a"), str(tmp_path / "b")]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        found.add(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert len(found) == 1


def test_curves_of_several_runs_in_one_picture(finished, tmp_path, capfd):
    main = runpy.run_path(str(Path(__file__).parents[1] / "docs" / "examples" / "curves.py"))["main"]
    main([str(finished), "--out", str(tmp_path / "c.svg")])
    assert "<svg" in (tmp_path / "c.svg").read_text("utf-8")
    for arguments, message in (
        ([str(finished), str(finished)], "one run a backend"),
        ([str(tmp_path)], "no log.jsonl in"),
        ([str(finished), "--out", str(tmp_path / "c.txt")], "--out must end in .png or .svg"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert message in capfd.readouterr().err


START, STEP = {"event": "start", "step": 0, "task": "dates"}, {"event": "step", "step": 1, "loss": {"numpy": 1.0}}
VALIDATION = {"event": "validation", "step": 1, "backend": "numpy", "averaged": 0, "loss": 1.0, "score": 0.0}
LOGS = {
    "empty": ([], "{log} must hold the start of a run and a step: got no start and no step"),
    "no start": ([STEP], "{log} must hold the start of a run and a step: got no start"),
    "no step": ([START, VALIDATION], "{log} must hold the start of a run and a step: got no step"),
    "another object": ([START, {"level": 1}], 'line 2 of {log} must be an event of a run: got {{"level": 1}}'),
    "no object": ([5], "line 1 of {log} must be an event of a run: got 5"),
    "no number": ([{**START, "step": "one"}], "line 1 of {log} must be an event of a run: got "),
    "a list for a kind": ([{"event": [], "step": 1}], "line 1 of {log} must be an event of a run: got "),
    "no task": ([{"event": "start", "step": 0}], "line 1 of {log} must be an event of a run: got "),
    "no loss": ([START, {"event": "step", "step": 1}], "line 2 of {log} must be an event of a run: got "),
    "one loss": ([START, {**STEP, "loss": 1.0}], "line 2 of {log} must be an event of a run: got "),
    "no score": ([START, STEP, {**VALIDATION, "score": None}], "line 3 of {log} must be an event of a run: got "),
}


@pytest.mark.parametrize("why", LOGS)
def test_a_log_without_a_curve_is_refused(why, tmp_path):
    events, message = LOGS[why]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(event) + "\n" for event in events), "utf-8")
    with pytest.raises(UsageError, match=re.escape(message.format(log=log))):
        curves.read_runs([tmp_path])
    log.write_text("".join(json.dumps(event) + "\n" for event in (START, STEP, VALIDATION)), "utf-8")
    curves.draw(curves.read_runs([tmp_path]), tmp_path / "c.svg")
    assert (tmp_path / "c.svg").stat().st_size > 1000


@pytest.mark.parametrize(
    "number", tiers.first_alone([signal.SIGINT, signal.SIGTERM], "signals"), ids=["ctrl-c", "sigterm"]
)
def test_a_stopped_run_is_saved_and_says_how_to_go_on(number, tmp_path):
    command = [sys.executable, "-m", "transformer_parity", "train", "--task", "dates", "--backend", "numpy"]
    folder = tmp_path / "run"
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    said = ""
    with subprocess.Popen(
        [*command, "--out", str(folder), *SMALL], stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        for line in process.stderr:
            said += line
            if line.startswith("step "):
                process.send_signal(number)
                break
        said += process.stderr.read()
    assert process.returncode == 128 + number
    assert f"parity train --resume {folder} --backend numpy" in said
    (checkpoint,) = folder.glob("*.safetensors")
    step = ref.load_checkpoint(checkpoint).state.step
    assert f"stopped at step {step:,}" in said
    assert max(losses(folder)) == step


REFUSED = {
    "a folder with a run": (["--task", "dates", "--out", "{finished}"], "holds a run already: go on with --resume"),
    "nothing to train on": ([], "what to train on must be one of --task, --text and --resume"),
    "two things to train on": (["--task", "dates", "--resume", "{finished}"], "got --task, --resume"),
    "text for dates": (
        ["--resume", "{finished}", "--text", "a", "b"],
        "learned dates: leave out --text",
    ),
    "no checkpoint": (["--resume", "{empty}"], "holds no checkpoint"),
    "no such run": (["--resume", "{empty}/nothing"], "there is no"),
    "weights only": (["--resume", "{finished}/model.safetensors"], "no training state"),
    "nothing left to do": (["--resume", "{finished}"], "is the end of a run of 12 steps: ask for more with --steps"),
    "settings of a resumed run": (
        ["--resume", "{finished}", "--seed", "0", "--set", "d_ff=8"],
        "leave out --seed, --set d_ff",
    ),
    "saved in lockstep": (
        ["--task", "dates", "--backend", "numpy,torch", "--set", "save_every=2", "keep=1"],
        "leave out --set save_every, --set keep",
    ),
    "resumed in lockstep": (["--resume", "{finished}", "--backend", "numpy,torch"], "one backend"),
    "behind the end": (
        ["--task", "dates", "--steps", "5", "--stop-at", "6"],
        "must be at most 5, the run's end",
    ),
    "no text": (["--text", "{empty}/a", "{empty}/b"], "No such file"),
    "words for dates": (["--task", "dates", "--vocab-size", "9"], "--held-out and --vocab-size are about --text"),
    "dropout of one": (["--task", "dates", "--set", "dropout=1"], "dropout.embedding must be in [0, 1)"),
    "heads that do not divide": (["--task", "dates", "--set", "num_heads=3"], "num_heads must divide d_model"),
    "no field": (
        ["--task", "dates", "--set", "depth=3"],
        "--set must name a field of accumulation_steps, activation, ",
    ),
    "a field of the corpus": (["--task", "dates", "--set", "source_vocab_size=3"], "got source_vocab_size"),
    "a field with an option": (["--task", "dates", "--set", "total_steps=3"], "got total_steps"),
    "fewer checkpoints than averaged": (
        ["--task", "dates", "--set", "keep=1", "average=2"],
        "keep must be at least average 2: got 1",
    ),
    "a word for an interval": (
        ["--task", "dates", "--set", "save_every=often"],
        "save_every must be an integer: got 'often'",
    ),
    "no tokens": (["--task", "dates", "--set", "tokens_per_batch=0"], "tokens_per_batch must be at least 1: got 0"),
    "a field without a value": (["--task", "dates", "--set", "d_k"], "must be FIELD=VALUE"),
    "a word for a number": (["--task", "dates", "--set", "d_k=many"], "d_k must be an integer: got 'many'"),
    "fields of a run": (["--resume", "{finished}", "--set", "d_k=3"], "leave out --set d_k"),
    "factor of nothing": (
        ["--task", "dates", "--set", "learning_rate_factor=0"],
        "learning_rate_factor must be positive",
    ),
    "a cool-down too long": (
        ["--task", "dates", "--steps", "5", "--set", "cooldown_steps=6"],
        "cooldown_steps must be at most",
    ),
    "negative seed": (["--task", "dates", "--seed", "-1"], "seed"),
    "bfloat16 in numpy": (["--task", "dates", "--set", "mixed_bfloat16=true", "--backend", "numpy"], "mixed_bfloat16"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_work_is_refused_before_anything_is_written(why, finished, tmp_path, capfd, monkeypatch):
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
def test_the_second_of_two_runs_in_a_folder_is_refused_until_the_first_has_died(go_on, tmp_path, capfd):
    folder = tmp_path / "run"
    options = ("--backend", "numpy", "--steps", 4)
    if go_on:
        assert train(folder, *options, "--stop-at", 2) == 0

    def start():
        return resume(folder, "--backend", "numpy") if go_on else train(folder, *options)

    with subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True) as first:
        try:
            assert first.stdout.readline() == "locked\n"
            before = {path: path.read_bytes() for path in folder.iterdir()}
            assert start() == 3
            assert f"another process is writing into {folder}" in capfd.readouterr().err
            assert {path: path.read_bytes() for path in folder.iterdir()} == before
        finally:
            first.kill()
    assert start() == 0
    assert sorted(losses(folder)) == [1, 2, 3, 4]


def test_where_there_are_no_locks_a_run_goes_on_without(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert train(tmp_path / "run", "--backend", "numpy", "--steps", 1) == 0


def test_what_a_killed_run_left_half_written_goes_when_it_is_resumed(tmp_path):
    folder = tmp_path / "run"
    assert train(folder, "--backend", "numpy", "--steps", 4, "--stop-at", 2) == 0
    for name in ("checkpoint-0000003.safetensors", "model.safetensors", "curve.png", "mine"):
        (folder / f".{name}.0123abcd.tmp").write_bytes(b"half")
    (folder / ".tmpAbC123").write_bytes(b"half")
    assert resume(folder, "--backend", "numpy") == 0
    assert [path.name for path in folder.glob(".*")] == [".mine.0123abcd.tmp"]


def test_what_a_killed_process_of_a_run_left_half_written_goes_with_the_run(tmp_path):
    with locked(tmp_path):
        for name in (".checkpoint-0000003.safetensors.0123abcd.tmp", ".tmpaRNRED", ".tmp-mine", "mine"):
            (tmp_path / name).write_bytes(b"half")
    assert {path.name for path in tmp_path.iterdir()} == {".tmp-mine", "mine"}


@pytest.fixture
def texts(tmp_path):
    """The two sides of a text, and of another one that is held out."""
    paths = [tmp_path / name for name in ("a", "b", "c", "d")]
    for path in paths:
        path.write_text("".join(f"{path.name} has {i} cats\n" for i in range(40)), "utf-8")
    return paths


def test_the_text_of_a_run_may_have_moved(texts, tmp_path, capfd):
    folder = tmp_path / "run"
    options = ("--vocab-size", 40, "--backend", "numpy", "--steps", 4, "--set", "save_every=2", "average=1", "keep=2")
    task = ("--text", str(texts[0]), str(texts[1]), "--held-out", str(texts[2]), str(texts[3]))
    assert train(folder, *options, "--stop-at", 2, task=task) == 0
    (tmp_path / "there").mkdir()
    moved = [path.rename(tmp_path / "there" / path.name) for path in texts]
    assert resume(folder, "--backend", "numpy") == 3
    assert (
        f"the run's text {texts[0]} is no file: name what has moved with --text and --held-out"
        in capfd.readouterr().err
    )
    assert resume(folder, "--text", moved[0], moved[2], "--held-out", *moved[2:], "--backend", "numpy") == 3
    assert "are not the text that this run began with" in capfd.readouterr().err
    assert resume(folder, "--text", *moved[:2], "--held-out", *moved[2:], "--backend", "numpy") == 0
    assert sorted(losses(folder)) == [1, 2, 3, 4]
    corpus = ref.load_checkpoint(folder / "checkpoint-0000004.safetensors").progress["corpus"]
    assert corpus["files"] + corpus["held_out"] == list(map(str, moved))


@pytest.fixture(scope="module")
def checkpoint(finished):
    return ref.load_checkpoint(finished / "checkpoint-0000008.safetensors")


def spoilt(checkpoint, path, *entry, value=None, settings=None):
    """Write a checkpoint with another value at an entry of its progress, or without the entry."""
    progress = json.loads(json.dumps(checkpoint.progress))
    *outer, last = entry or ("plan",)
    place = progress
    for key in outer:
        place = place[key]
    if entry and value is None:
        del place[last]
    elif entry:
        place[last] = value
    changed = dataclasses.replace(checkpoint, progress=progress, settings=settings or checkpoint.settings)
    ref.save_checkpoint(path, changed)


TEXT = {"task": "text", "files": ["a", "b"], "held_out": None, "checksum": 0}
SPOILT = {
    "no plan": (["plan"], None, "it lacks 'plan'"),
    "no corpus": (["corpus"], None, "it lacks 'corpus'"),
    "no task": (["corpus", "task"], None, "it lacks 'task'"),
    "no seed": (["corpus", "seed"], None, "it lacks 'seed'"),
    "no checksum": (["corpus", "checksum"], None, "it lacks 'checksum'"),
    "no files": (["corpus"], {"task": "text"}, "it lacks 'files'"),
    "no held_out": (["corpus"], {"task": "text", "files": ["a", "b"], "checksum": 0}, "it lacks 'held_out'"),
    "a list for a corpus": (["corpus"], [1], "its corpus must be an object with named fields: got list"),
    "an unknown task": (["corpus", "task"], "speech", "task must be one of dates, text: got 'speech'"),
    "one file": (["corpus"], {**TEXT, "files": ["a"]}, "its text must be two files: got ['a']"),
    "files of numbers": (["corpus"], {**TEXT, "files": [1, 2]}, "its text must be two files: got [1, 2]"),
    "text for a seed": (["corpus", "seed"], "0", "seed must be an integer: got '0'"),
    "an unknown entry of the plan": (["plan", "depth"], 1, "unexpected keyword argument 'depth'"),
    "never saved": (["plan", "save_every"], 0, "save_every must be at least 1: got 0"),
    "never validated": (["plan", "validate_every"], -1, "validate_every must be at least 1: got -1"),
    "half a step": (["plan", "steps"], 1.5, "steps must be an integer: got 1.5"),
    "no tokens": (["tokens_per_batch"], 0, "tokens_per_batch must be at least 1: got 0"),
    "time as text": (["seconds"], "1", "seconds must be a number: got '1'"),
    "no position": (["position"], [], "position must be an epoch and an index: got []"),
    "a number for a position": (["position"], 1, "position must be an epoch and an index: got 1"),
    "a position behind the end": (["position"], [0, 10**9], "index must be below the"),
}


@pytest.mark.parametrize("why", SPOILT)
def test_a_checkpoint_that_says_nonsense_is_refused_by_what_it_says(why, checkpoint, tmp_path, capfd):
    path = tmp_path / "checkpoint-0000008.safetensors"
    entry, value, message = SPOILT[why]
    spoilt(checkpoint, path, *entry, value=value)
    assert resume(path, "--backend", "numpy") == 3
    assert message in capfd.readouterr().err


def test_more_slices_than_pairs_are_refused_at_once(checkpoint, tmp_path, capfd):
    path = tmp_path / "checkpoint-0000008.safetensors"
    spoilt(checkpoint, path, settings=dataclasses.replace(checkpoint.settings, accumulation_steps=10**30))
    assert resume(path, "--backend", "numpy") == 3
    assert f"a batch in {10**30:,} slices takes as many pairs or more: got {PAIRS}" in capfd.readouterr().err
    assert train(tmp_path / "run", "--backend", "numpy", "--steps", 1, "--set", f"accumulation_steps={PAIRS + 1}") == 3
    assert f"a batch in {PAIRS + 1} slices takes as many pairs or more: got {PAIRS}" in capfd.readouterr().err


@pytest.mark.parametrize("where", ["files", "held_out"])
@pytest.mark.parametrize("what", ["a FIFO", "a device", "a folder"])
def test_what_is_no_file_is_never_opened(what, where, texts, checkpoint, tmp_path, capfd):
    other = {"a FIFO": tmp_path / "fifo", "a device": Path("/dev/zero"), "a folder": tmp_path}[what]
    os.mkfifo(tmp_path / "fifo")  # to open it would wait for ever
    origin = {**TEXT, "files": list(map(str, texts[:2])), "held_out": list(map(str, texts[2:]))}
    origin[where][1] = str(other)
    path = tmp_path / "checkpoint-0000008.safetensors"
    spoilt(checkpoint, path, "corpus", value=origin)
    assert resume(path, "--backend", "numpy") == 3
    assert f"the run's text {other} is no file" in capfd.readouterr().err


def test_a_damaged_checkpoint_is_refused_with_the_reason(finished, tmp_path, capfd):
    damaged = tmp_path / "checkpoint-0000008.safetensors"
    damaged.write_bytes((finished / damaged.name).read_bytes()[:-100])
    assert resume(damaged, "--backend", "numpy") == 3
    assert "is not a usable" in capfd.readouterr().err


def test_a_log_that_breaks_off_in_the_middle_of_a_line_can_be_read(finished, tmp_path):
    lines = (finished / "log.jsonl").read_text("utf-8")
    (tmp_path / "log.jsonl").write_text(lines[:-20], "utf-8")
    assert losses(tmp_path) == losses(finished)
