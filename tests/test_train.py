"""Complete ``parity train`` and ``parity evaluate`` runs with very small models, as users start them."""

from __future__ import annotations

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
from training_texts import SMALL, losses, resume, train
from training_texts import few_dates as few_dates  # a fixture of every test
from training_texts import finished as finished  # a fixture
from training_texts import texts as texts  # a fixture

import reference_numpy as ref
from transformer_parity.apps.train import corpora, curves
from transformer_parity.apps.train.batches import Batches
from transformer_parity.apps.train.log import read_log
from transformer_parity.apps.train.run import LONGER, TrainingRun, longest_translation
from transformer_parity.cli.main import main
from transformer_parity.engine.system.errors import UsageError
from transformer_spec.files import open_file, write_file


def test_any_config_field_can_be_set(tmp_path):
    fields = "--set", "embedding_norm=true", "decoder_d_ff=9", "--set", "activation=swish", 'dropout={"embedding": 0.3}'
    assert train(tmp_path / "run", "--backend", "numpy", "--steps", 1, *fields) == 0
    config, _ = ref.load_weights(tmp_path / "run" / "model.safetensors")
    assert (config.embedding_norm, config.decoder_d_ff, config.activation, config.d_ff) == (True, 9, "swish", 24)
    assert config.dropout == ref.DropoutRates(embedding=0.3)


def saved_weights(path):
    return ref.load_weights(path)[1]


def test_finished_run_leaves_the_documented_files(finished):
    assert {path.name for path in finished.iterdir()} == {
        "checkpoint-0000008.safetensors",  # the first checkpoint was deleted because of keep=2
        "checkpoint-0000012.safetensors",
        "model.safetensors",
        "log.jsonl",
        "curve.png",
        "result.json",
    }
    assert (finished / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_log_contains_all_events_of_a_run(finished):
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


def test_final_weights_are_the_average_of_the_last_checkpoints(finished):
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
def test_resumed_training_is_bitwise_identical_to_an_uninterrupted_run(backend, tmp_path):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert train(whole, "--backend", backend.name, "--steps", 6) == 0
    assert train(halves, "--backend", backend.name, "--steps", 6, "--stop-at", 3) == 0
    assert not (halves / "model.safetensors").exists()
    assert resume(halves, "--backend", backend.name) == 0
    assert losses(halves) == losses(whole)
    for name, array in saved_weights(whole / "model.safetensors").items():
        assert array.tobytes() == saved_weights(halves / "model.safetensors")[name].tobytes(), name


@pytest.mark.extended("training runs")
def test_run_continues_in_another_framework(backends, tmp_path):
    """In float64 without dropout, the losses match an uninterrupted run to 1e-10, regardless of the frameworks."""
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
def test_lockstep_shows_agreeing_curves(backends, tmp_path, capfd):
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
def test_bug_in_one_backend_is_detected_in_lockstep(tmp_path, capfd, monkeypatch):
    """One schedule is a step ahead, so the first losses are equal and the second losses differ."""
    import transformer_torch

    class Early(ref.TrainingConfig):
        def learning_rate(self, step, d_model):
            return super().learning_rate(step + 1, d_model)

    class EarlyTrainer(transformer_torch.Trainer):
        def __init__(self, model, settings, seed, **options):
            super().__init__(model, Early(**settings.to_dict()), seed, **options)

    monkeypatch.setattr(transformer_torch, "Trainer", EarlyTrainer)
    assert train(tmp_path / "run", "--backend", "numpy,torch", "--steps", 4, "--dtype", "float64") == 0
    assert "The curves diverge by more than 1e-06 at step 2:" in capfd.readouterr().out


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
    assert "have changed since the run started" in capfd.readouterr().err


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


def test_longest_translation_is_limited_by_held_out_targets():
    config = ref.TransformerConfig(source_vocab_size=9, target_vocab_size=9)
    pairs = 40 * [([5, 2], [6] * 11 + [2])] + 42 * [([7] * 20 + [2], [8, 2])]
    held_out = Batches(pairs, config, 64)
    assert [shape[1:] for shape in held_out.shapes] == [(2, 12), (21, 2)]
    assert longest_translation(held_out) == 12 + LONGER


def test_evaluate_reports_missing_and_invalid_file_contents(finished, tmp_path, capfd):
    def evaluate(path):
        assert main(["evaluate", str(path), "--task", "dates", "--backend", "numpy"]) == 3
        return capfd.readouterr().err

    with open_file(finished / "checkpoint-0000012.safetensors", "checkpoint") as (description, file):
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  the object isn't a dict
    for spoilt, message in (({"step": "12"}, "step must be an integer: got '12'"), ({}, "'step'")):
        write_file(tmp_path / "checkpoint", {**description, "training": spoilt}, tensors, None)
        assert f"checkpoint is not a usable weight file: {message}" in evaluate(tmp_path / "checkpoint")
    ref.save_weights(tmp_path / "weights", *ref.load_weights(finished / "model.safetensors"))
    assert "weights contains no vocabulary" in evaluate(tmp_path / "weights")


def test_interruption_does_not_change_the_averaged_weights(tmp_path):
    options = ("--backend", "numpy", "--steps", 8, "--set", "save_every=2", "average=3")
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert train(whole, *options) == 0
    assert train(halves, *options, "--stop-at", 5) == 0
    assert resume(halves, "--backend", "numpy") == 0
    for name, array in saved_weights(whole / "model.safetensors").items():
        assert array.tobytes() == saved_weights(halves / "model.safetensors")[name].tobytes(), name


def test_older_checkpoint_is_resumed_in_a_separate_directory(finished, tmp_path, capfd):
    old = finished / "checkpoint-0000008.safetensors"
    before = {path: path.read_bytes() for path in finished.iterdir()}
    assert resume(old, "--backend", "numpy") == 3
    assert "specify a different directory with --out DIR" in capfd.readouterr().err
    assert resume(old, "--backend", "numpy", "--out", tmp_path / "branch") == 0
    assert sorted(losses(tmp_path / "branch")) == [9, 10, 11, 12]
    assert [losses(tmp_path / "branch")[step] for step in range(9, 13)] == [losses(finished)[s] for s in range(9, 13)]
    assert {path: path.read_bytes() for path in finished.iterdir()} == before


def test_run_without_final_weights_can_be_finished(finished, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    (copy / "model.safetensors").unlink()
    assert resume(copy, "--backend", "numpy") == 0
    assert (copy / "model.safetensors").read_bytes() == (finished / "model.safetensors").read_bytes()


def test_checkpoint_with_a_custom_name_is_never_deleted(finished, tmp_path):
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
def test_extended_run_has_no_final_model_until_its_new_end(stopped, finished, tmp_path, monkeypatch):
    """The run can be stopped and resumed like any other, even after its last step."""
    copy, whole = tmp_path / "copy", tmp_path / "whole"
    for directory in (copy, whole):
        shutil.copytree(finished, directory)

    def fail(self):
        raise UsageError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, "finish", fail)
        code = 0 if stopped < 16 else 3
        assert resume(copy, "--backend", "numpy", "--steps", 16, "--stop-at", stopped) == code
    assert not (copy / "model.safetensors").exists()
    for directory, options in ((copy, ()), (whole, ("--steps", 16))):
        assert resume(directory, "--backend", "numpy", *options) == 0
    assert (copy / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert (copy / "model.safetensors").read_bytes() != (finished / "model.safetensors").read_bytes()


@pytest.mark.parametrize("when", ["fails", "is stopped"])
def test_extended_run_without_a_new_step_keeps_its_final_model(when, finished, tmp_path, monkeypatch):
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)

    def end(self, stop):
        if when == "fails":
            raise UsageError("failed")
        stop.signal = signal.SIGTERM
        return True

    monkeypatch.setattr(TrainingRun, "_stops", end)
    assert resume(copy, "--backend", "numpy", "--steps", 16) == (3 if when == "fails" else 128 + signal.SIGTERM)
    # Resuming the run deleted result.json, which described the run before it was resumed.
    assert {path.name for path in copy.iterdir()} == {path.name for path in finished.iterdir()} - {"result.json"}
    assert (copy / "model.safetensors").read_bytes() == (finished / "model.safetensors").read_bytes()


def test_run_can_be_finished_in_another_directory(finished, tmp_path):
    """In a different directory, only the last checkpoint is available for averaging."""
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


def test_float64_run_is_resumed_in_float64(tmp_path, capfd):
    assert train(tmp_path / "run", "--backend", "numpy", "--steps", 4, "--stop-at", 2, "--dtype", "float64") == 0
    assert resume(tmp_path / "run", "--backend", "numpy", "--dtype", "float32") == 3
    assert "--resume uses float64" in capfd.readouterr().err
    assert resume(tmp_path / "run", "--backend", "numpy") == 0
    assert {array.dtype.name for array in saved_weights(tmp_path / "run" / "model.safetensors").values()} == {"float64"}


def test_non_finite_loss_ends_the_run(tmp_path, capfd):
    with np.errstate(all="ignore"):
        assert train(tmp_path / "run", "--backend", "numpy", "--steps", 60, "--set", "learning_rate_factor=1e30") == 3
    assert "the loss is not finite at step" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("factor", "every"),
    [
        (1e10, 1),
        *(
            pytest.param(*other, marks=pytest.mark.extended("divergences"))
            for other in ((1e10, 2), (1e30, 1), (3e38, 2))
        ),
    ],
)
def test_diverging_run_reports_the_step_and_saves_no_nan(backend, factor, every, tmp_path, capfd):
    """The first non-finite value may be the loss, the held-out loss, a weight, or the logits in a search."""
    options = [f"save_every={every}", f"validate_every={every}", "warmup_steps=1", f"learning_rate_factor={factor}"]
    with np.errstate(all="ignore"):
        assert train(tmp_path / "run", "--backend", backend.name, "--steps", 6, "--set", *options) == 3
    error = capfd.readouterr().err
    assert "Traceback" not in error
    assert re.search(
        r"at step [1-6]( \(the last checkpoint is .*\))?; try a smaller learning_rate_factor, or clip_norm=1", error
    )
    assert read_log(tmp_path / "run")[-1]["step"] >= 1
    for path in (tmp_path / "run").glob("checkpoint-*"):
        assert all(np.isfinite(array).all() for array in ref.load_checkpoint(path).weights.values())


def test_lines_longer_than_the_model_has_positions_are_cut_off(tmp_path, capfd, monkeypatch):
    monkeypatch.setitem(corpora.RECIPES["dates"].model, "max_length", 16)
    options = ("--backend", "numpy", "--steps", 2, "--preset", "paper_learned")
    assert train(tmp_path / "run", *options) == 0
    assert "\nskipping 24 pairs that are longer than 16 tokens\n" in capfd.readouterr().err


def test_held_out_sentences_do_not_depend_on_the_hash_seed(tmp_path):
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


def test_curves_of_several_runs_are_drawn_in_one_figure(finished, tmp_path, capfd):
    main = runpy.run_path(str(Path(__file__).parents[1] / "docs" / "examples" / "curves.py"))["main"]
    main([str(finished), "--out", str(tmp_path / "c.svg")])
    assert "<svg" in (tmp_path / "c.svg").read_text("utf-8")
    for arguments, message in (
        ([str(finished), str(finished)], "runs must have different backends"),
        ([str(tmp_path)], "no log.jsonl in"),
        ([str(finished), "--out", str(tmp_path / "c.txt")], "--out must end in .png or .svg"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert message in capfd.readouterr().err


@pytest.mark.parametrize(
    "number", tiers.first_alone([signal.SIGINT, signal.SIGTERM], "signals"), ids=["ctrl-c", "sigterm"]
)
def test_stopped_run_is_saved_and_explains_how_to_resume(number, tmp_path):
    command = [sys.executable, "-m", "transformer_parity", "train", "--task", "dates", "--backend", "numpy"]
    directory = tmp_path / "run"
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    said = ""
    with subprocess.Popen(
        [*command, "--out", str(directory), *SMALL], stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        for line in process.stderr:
            said += line
            if line.startswith("step "):
                process.send_signal(number)
                break
        said += process.stderr.read()
    assert process.returncode == 128 + number
    assert f"parity train --resume {directory} --backend numpy" in said
    (checkpoint,) = directory.glob("*.safetensors")
    step = ref.load_checkpoint(checkpoint).state.step
    assert f"stopped and saved at step {step:,}" in said
    assert max(losses(directory)) == step


def test_moved_text_of_a_run_can_be_specified(texts, tmp_path, capfd):
    directory = tmp_path / "run"
    options = ("--vocab-size", 40, "--backend", "numpy", "--steps", 4, "--set", "save_every=2", "average=1", "keep=2")
    task = ("--text", str(texts[0]), str(texts[1]), "--held-out", str(texts[2]), str(texts[3]))
    assert train(directory, *options, "--stop-at", 2, task=task) == 0
    (tmp_path / "there").mkdir()
    moved = [path.rename(tmp_path / "there" / path.name) for path in texts]
    assert resume(directory, "--backend", "numpy") == 3
    assert (
        f"the run's text file {texts[0]} must be a regular file; if you moved the file, specify its new path with "
        "--text or --held-out" in capfd.readouterr().err
    )
    assert resume(directory, "--text", moved[0], moved[2], "--held-out", *moved[2:], "--backend", "numpy") == 3
    assert "have changed since the run started" in capfd.readouterr().err
    assert resume(directory, "--text", *moved[:2], "--held-out", *moved[2:], "--backend", "numpy") == 0
    assert sorted(losses(directory)) == [1, 2, 3, 4]
    corpus = ref.load_checkpoint(directory / "checkpoint-0000004.safetensors").progress["corpus"]
    assert corpus["files"] + corpus["held_out"] == list(map(str, moved))
