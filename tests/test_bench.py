"""`parity bench`: what gets no time, processes that die, interruption, what is printed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import tiers
from conftest import child_processes, still_running
from test_bench_verify import FORWARD, SMALL, TRAIN, another_token, no_steps

import reference_numpy as ref
from transformer_bench import imports, rounds
from transformer_bench.limit import Library, libraries
from transformer_bench.measurements import Entry
from transformer_bench.participants import FORMS, OURS, DecodePackage, ForwardPackage, TrainPackage, others
from transformer_bench.plots import draw_growth, draw_times
from transformer_bench.run import Setting
from transformer_bench.verify import verifier_of
from transformer_bench.workload import DecodeWork
from transformer_parity.cli.main import main
from transformer_parity.engine.findings import AGREES, FAILED
from transformer_parity.engine.system.machine import processors

QUICK = ["--config", "tiny", "--target", "4", "--source", "6", "--threads", "1"]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(rounds, "PAUSE", 0.0)
    # One test measures what all libraries can do.
    monkeypatch.setattr("transformer_bench.run.libraries", lambda *_, **__: [Library("numpy")])
    here = str(Path(__file__).parent)  # where processes find the participants of this file
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])]))


def parity(capsys, *arguments, task="decode"):
    """Run the command and return its exit code and what it printed."""
    try:
        code = main(["bench", task, *QUICK, "--rounds", "2", *map(str, arguments)])
    except SystemExit as leaving:  # argparse's way out
        code = leaving.code
    return code, *capsys.readouterr()


# --- The rounds. ---


class Process:
    """Stands for a process: writes down what it is asked, and takes ever fewer seconds."""

    def __init__(self, name, asked, fails_at=None):
        self.entry = Entry(name)
        self.asked = asked
        self.fails_at = fails_at
        self.seconds = 100.0

    def receive(self, method):
        return rounds.Reply({"version": "1"}, 0.0, 0.0)

    def ask(self, method, *arguments):
        self.asked.append(f"{self.entry.name} {method}")
        self.seconds -= method == "run"
        if self.seconds == self.fails_at:
            raise rounds.ParticipantError("enough")
        return rounds.Reply(method, self.seconds, 2.0 * self.seconds, int(self.seconds), 90)


def test_all_are_warm_before_the_rounds_and_each_is_first_in_turn():
    asked: list[str] = []
    a, b, c = processes = [Process("a", asked), Process("b", asked, fails_at=96.0), Process("c", asked)]
    verified = []
    verify = lambda result, show: verified.append(result) or ""  # noqa: E731
    rounds.run_rounds(processes, SMALL, Path(), 4, verify, lambda name, doing: None)
    assert asked[:9] == [f"{name} {method}" for name in "abc" for method in ("load", "run", "run")]
    assert [entry[0] for entry in asked[9:]] == [*"abc", *"bca", *"ca", *"ac"]
    assert len(verified) == len([entry for entry in asked if entry.endswith("run")]) - 1
    assert a.entry == Entry(
        "a",
        environment={"version": "1"},
        first_seconds=99.0,
        seconds=[97.0, 96.0, 95.0, 94.0],
        cores=[2.0] * 4,
        loaded_bytes=90,
        peak_bytes=97,  # of the rounds: compiling is not among them
    )
    assert a.entry.work_bytes == 7
    assert c.entry.seconds == a.entry.seconds
    assert (b.entry.verdict, b.entry.problem, b.entry.is_timed) == (FAILED, "enough", False)


# --- The command. ---


def read(path):
    """Return the results of the first work, and everything else."""
    document = json.loads(path.read_text())
    found = document["result"]
    return found["races"][0], {**document, **found}


def test_times_of_two_that_agree(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("transformer_bench.run.libraries", libraries)
    environment = dict(os.environ)
    code, printed, progress = parity(
        *(capsys, "--backends", "numpy,torch", "--threads", min(2, processors())),
        *("--json", tmp_path / "a.json", "--plot", tmp_path / "a.png"),
    )
    assert dict(os.environ) == environment
    assert code == 0, printed + progress
    assert "Medians of 2 interleaved rounds. Tokens and scores of every call of numpy, torch agree" in printed
    assert "d_model 128, 2+2 layers, 4 heads, d_ff 512, vocabulary 1,000, float32" in printed
    assert progress.index("torch: first call") < progress.index("round 1 of 2") < progress.index("round 2 of 2")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    report, found = read(tmp_path / "a.json")
    assert (report["verdict"], found["exit_code"], found["interrupted"]) == (AGREES, 0, False)
    limit = report["limit"]
    assert list(limit["rates"]) == list(limit["bandwidths"]) == list(limit["libraries"]) == ["numpy", "torch"]
    assert limit["rate"] == max(limit["rates"].values()) > 1e9
    assert limit["bandwidth"] == max(limit["bandwidths"].values()) > 1e8
    assert f"{limit['seconds'] / report['participants'][0]['median_seconds']:.0%}" in printed
    assert report["work"]["operations"] == DecodeWork("tiny", 8, 6, 4).operations
    assert [entry["name"] for entry in report["participants"]] == ["numpy", "torch"]
    for entry in report["participants"]:
        assert len(entry["seconds"]) == len(entry["cores"]) == 2
        assert 0 < entry["median_seconds"] < 60
        assert entry["first_seconds"] > 0
        assert entry["peak_bytes"] is None or entry["peak_bytes"] >= entry["loaded_bytes"] > 2**20
        assert entry["environment"]["threads"] == str(min(2, processors()))
        assert f"{1e3 * entry['median_seconds']:,.1f}" in printed
    numpy, torch = (entry["seconds"] for entry in report["participants"])
    expected = [ours / theirs for ours, theirs in zip(torch, numpy, strict=True)]
    assert report["ratios"]["torch"]["numpy"]["median"] == pytest.approx(sum(expected) / 2)
    assert list(report["ratios"]["torch"]) == ["numpy"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.png"]


@pytest.mark.extended("peers")
def test_peers_do_the_same_work(capsys, tmp_path):
    code, printed, _ = parity(capsys, "--backends", "numpy", "--peers", "--json", tmp_path / "a.json")
    assert code == 0, printed
    agreeing = "numpy, marian, flax nnx, keras hub, keras hub XLA"
    assert f"Tokens and scores of every call of {agreeing} agree" in printed.replace("\n", " ")
    assert "products: only the matrix products" in printed
    report, _ = read(tmp_path / "a.json")
    assert {entry["name"]: entry["has_result"] for entry in report["participants"]} == {
        "numpy": True,
        **dict.fromkeys(["marian", "flax nnx", "keras hub", "keras hub XLA"], True),
        "products": False,
    }


@pytest.mark.extended("peers")
def test_peers_search_with_the_same_beam(capsys):
    code, printed, _ = parity(capsys, "--backends", "numpy", "--peers", "--beam", 3)
    assert code == 0, printed
    assert "beam search with 3 hypotheses" in printed
    assert "Tokens and scores of every call of numpy, marian agree" in printed


@dataclass
class Wrong(DecodePackage):
    """Says another token, from the third call on."""

    calls: int = 0

    def result(self, found):
        self.calls += 1
        return another_token(found) if self.calls > 2 else found


@dataclass
class Dying(DecodePackage):
    """Dies in its second round."""

    calls: int = 0

    def run(self):
        self.calls += 1
        if self.calls > 3:
            print("out of luck", file=sys.stderr, flush=True)
            os._exit(7)
        return super().run()


@dataclass
class Raising(DecodePackage):
    """Cannot load."""

    def load(self, work, weights):
        raise MemoryError("too large")


@pytest.mark.parametrize(
    ("participant", "code", "reason"),
    [
        (Wrong("torch"), 1, "DIVERGES  torch: sentence 1, token 3: "),
        *(
            pytest.param(*row, marks=pytest.mark.extended("timed steps"))
            for row in (
                (Dying("torch"), 3, "FAILED    torch: the process ended with exit code 7 in run: out of luck"),
                (Raising("torch"), 3, "FAILED    torch: MemoryError: too large"),
            )
        ),
    ],
    ids=["wrong", "dying", "raising"],
)
def test_who_is_wrong_or_fails_gets_no_time(participant, code, reason, capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(OURS["decode"], "torch", participant)
    options = ["--backends", "numpy,torch", "--rounds", 3, "--json", tmp_path / "a.json"]
    found, printed, _ = parity(capsys, *options)
    assert found == code
    assert reason in printed
    assert "of numpy agree" in printed
    report, everything = read(tmp_path / "a.json")
    numpy, torch = report["participants"]
    assert len(numpy["seconds"]) == 3
    assert torch["seconds"] is torch["first_seconds"] is torch["median_seconds"] is None
    assert report["ratios"] == {"numpy": {}}
    assert everything["exit_code"] == code


@pytest.mark.needs(os.name != "nt", "signals")
@pytest.mark.parametrize(
    "number", tiers.first_alone([signal.SIGINT, signal.SIGTERM], "signals"), ids=["SIGINT", "SIGTERM"]
)
def test_an_interruption_prints_what_is_there_and_leaves_no_process_and_no_file(number, tmp_path):
    arguments = ["bench", "decode", *QUICK, "--backends", "numpy", "--rounds", "100000", "--json", tmp_path / "a.json"]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    errors = tmp_path / "errors"
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "transformer_parity", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        deadline = time.monotonic() + 60
        while "round 3 of" not in errors.read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        started = psutil.Process(process.pid).children(recursive=True)
        assert len(started) >= 3  # numpy, the matrix rate, and what ends these two if their parent is killed
        assert [path.suffix for path in temporary.glob("*/*.*")] == [".safetensors"]
        process.send_signal(number)
        printed, _ = process.communicate(timeout=60)
    assert process.returncode == 3, printed + errors.read_text()
    assert "interleaved rounds. Tokens and scores of every call of numpy agree" in printed
    assert "INTERRUPTED after" in printed
    assert "Traceback" not in errors.read_text()
    report, everything = read(tmp_path / "a.json")
    assert everything["interrupted"]
    assert 2 <= len(report["participants"][0]["seconds"]) < 100
    assert still_running(started, 10.0) == []
    assert list(temporary.iterdir()) == []


def test_ctrl_c_before_anything_is_timed(capsys, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("transformer_bench.run.run_rounds", interrupted)
    code, printed, _ = parity(capsys, "--backends", "numpy")
    assert code == 3
    assert "FAILED    numpy: interrupted before it was timed" in printed
    assert "INTERRUPTED after 0 of 2 rounds." in printed
    assert "agree" not in printed
    assert child_processes() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--threads", "100000"], "the processors there are: got 100000"),
        (["--json", "absent/a.json"], "there is no folder absent"),
        (["--plot", "a.gif"], "--plot must end in png or svg: got a.gif"),
        (["--backends", "theano"], "unknown theano: choose from numpy, torch, jax, tf"),
        (["--rounds", "0"], "--rounds must be positive for decode: got 0"),
        (["--rounds", "-1"], "must be a positive integer: got '-1'"),
        (["--dropout", "0.1"], "decode does not take --dropout"),
        (["--parallel", "data=2"], "decode does not take --parallel"),
        (["--config", "huge"], "invalid choice: 'huge'"),
        (["--device", "gpu", "--peers"], "--peers run on the CPU: leave out --peers or --device gpu"),
        (["--device", "gpu"], "reference_numpy runs on the CPU: add --backends torch,jax,tf"),
    ],
)
def test_what_cannot_be_done_is_refused_at_once(options, message, capsys, monkeypatch):
    monkeypatch.setattr("transformer_bench.run.started", None)
    code, printed, errors = parity(capsys, *options)
    assert code == 3
    assert printed == ""
    assert message in errors


def test_missing_peers_are_named(capsys, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find_spec(name))
    code, _, errors = parity(capsys, "--backends", "numpy", "--peers")
    assert code == 3
    assert "--peers needs transformers, which is not installed: pip install transformers" in errors


GROWING_REFUSED = [
    ("forward", ["--scale", "width"], "one of source, target, length, batch, depth, vocabulary: got 'width'"),
    ("forward", ["--scale", "batch=1,x"], "must be a positive integer: got 'x'"),
    ("forward", ["--scale", "batch=2,2"], "must grow: got 2,2"),
    ("forward", ["--dtype", "bfloat16", "--peers"], "--peers compute in float32"),
    ("forward", ["--dtype", "bfloat16"], "reference_numpy has no bfloat16 worth timing"),
    (
        "forward",
        ["--beam", "2", "--activation-checkpointing"],
        "forward does not take --beam, --activation-checkpointing",
    ),
    ("train", ["--activation-checkpointing", "--peers"], "--peers have no activation checkpointing"),
    ("train", ["--dropout", "1"], "must be a number from 0 up to but not including 1: got '1'"),
]


@pytest.mark.parametrize(("task", "options", "message"), GROWING_REFUSED)
def test_what_cannot_be_done_is_refused_for_each_task(task, options, message, capsys, monkeypatch):
    monkeypatch.setattr("transformer_bench.run.started", None)
    code, printed, errors = parity(capsys, *options, task=task)
    assert (code, printed) == (3, "")
    assert message in errors


def test_help_teaches(capsys):
    for arguments, line in (
        (["bench", "--help"], "No time is printed for a result that does not agree with the reference."),
        (["bench", "decode", "--help"], "reading the table:"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert line in capsys.readouterr().out


# --- Forward passes and training steps. ---


@pytest.mark.extended("timed steps")
@pytest.mark.parametrize("task", ["forward", "train"])
def test_forward_and_train_agree_before_they_are_timed(task, capsys, tmp_path):
    code, printed, errors = parity(
        *(capsys, "--backends", "numpy,torch,jax,tf", "--json", tmp_path / "a.json", "--plot", tmp_path / "a.svg"),
        task=task,
    )
    assert code == 0, printed + errors
    what = {"forward": "Logits", "train": "Losses"}[task]
    assert f"{what} of every call of numpy, torch, jax, tf agree with the float64 reference." in printed
    found, _ = read(tmp_path / "a.json")
    assert [entry["name"] for entry in found["participants"]] == ["numpy", "torch", "jax", "tf"]
    assert (tmp_path / "a.svg").read_text().lstrip().startswith("<?xml")


@dataclass
class WrongLogits(ForwardPackage):
    """Computes the logits of other sentences."""

    def result(self, found):
        return super().result(found)[::-1]


@dataclass
class Lazy(TrainPackage):
    """Does not train: the loss stays where it was."""

    def ready(self, model, work):
        step = super().ready(model, work)
        first = step()
        calls = iter(range(1, 100))
        return lambda: (next(calls), first[1])


@pytest.mark.parametrize(
    ("task", "participant", "reason"),
    [
        ("forward", WrongLogits("torch"), "DIVERGES  torch: the logits are off by"),
        pytest.param(
            *("train", Lazy("torch"), "DIVERGES  torch: the loss of step 2 is"),
            marks=pytest.mark.extended("timed steps"),
        ),
    ],
    ids=["forward", "train"],
)
def test_who_computes_something_else_gets_no_time(task, participant, reason, capsys, monkeypatch):
    monkeypatch.setitem(OURS[task], "torch", participant)
    code, printed, _ = parity(capsys, "--backends", "numpy,torch", task=task)
    assert code == 1
    assert reason in printed
    assert "of numpy agree" in printed


@pytest.mark.extended("timed growth")
def test_growth_is_measured_and_drawn(capsys, tmp_path):
    code, printed, errors = parity(
        *(capsys, "--backends", "numpy,torch", "--scale", "source=8,32", "--batch", 2),
        *("--json", tmp_path / "a.json", "--plot", tmp_path / "a.png"),
        task="forward",
    )
    assert code == 0, printed + errors
    assert "milliseconds, by source" in printed
    assert "MiB beyond what was held before the first call, by source" in printed
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    _, found = read(tmp_path / "a.json")
    assert found["scale"] == "source"
    assert {"numpy", "torch"} <= {*found["exponents"]}
    assert [entry["work"]["source"] for entry in found["races"]] == [8, 32]


def test_imports_are_compared_with_their_frameworks(capsys, tmp_path):
    imports.main(["--backends", "numpy", "--rounds", "2", "--json", str(tmp_path / "a.json")])
    assert "reference_numpy" in capsys.readouterr().out
    found = json.loads((tmp_path / "a.json").read_text())
    assert [entry["name"] for entry in found["imports"]] == ["numpy, safetensors.numpy", "reference_numpy"]
    assert found["ratios"]["numpy"]["median"] > 0.5
    assert all(len(entry["seconds"]) == 2 for entry in found["imports"])


def test_an_import_that_fails_is_said(monkeypatch):
    monkeypatch.setitem(imports.FRAMEWORKS, "numpy", "no_such_module")
    with pytest.raises(ImportError, match=r"^import no_such_module: ModuleNotFoundError"):
        imports.main(["--backends", "numpy", "--rounds", "1"])


def test_only_marian_has_a_beam():
    assert [other.name for other in others(replace(SMALL, beam_size=3))] == ["marian"]
    assert [other.name for other in others(SMALL)] == ["marian", "flax nnx", "keras hub", "keras hub XLA"]
    assert [other.name for other in others(TRAIN)] == [
        *("torch.nn", "torch.nn compiled", "marian", "flax nnx", "keras hub", "keras hub XLA")
    ]


@pytest.mark.parametrize("work", [FORWARD, TRAIN, SMALL], ids=lambda work: work.task)
def test_our_compiled_form_takes_part_beside_the_peers(work):
    names = lambda *ours, **how: [one.name for one in Setting(ours, **how).participants(work)]  # noqa: E731
    forms = [] if work.task == "decode" else ["torch compiled"]
    assert names("torch", peers=True)[: len(forms) + 2] == ["torch", *forms, others(work)[0].name]
    assert ("torch compiled" in names("torch", "numpy", peers=True)) == (work.task == "forward")  # for want of memory
    assert names("torch") == ["torch"]
    assert "torch compiled" not in names("numpy", peers=True)
    assert ("tf compiled" in names("tf", peers=True)) == (work.task == "train")  # its forward pass always is
    assert "tf compiled" not in names("tf", "numpy", peers=True)


@pytest.mark.parametrize("work", [FORWARD, TRAIN], ids=lambda work: work.task)
def test_our_compiled_form_in_torch_is_compiled(work, tmp_path, monkeypatch):
    import torch

    compiled = []

    def compile_eagerly(what):
        compiled.append(what)
        return compile_it(what, backend="eager")

    compile_it = torch.compile
    monkeypatch.setattr(torch, "compile", compile_eagerly)
    weights = work.weights()
    ref.save_weights(tmp_path / "model.safetensors", work.config, weights)
    form = FORMS[work.task]["torch"]
    form.prepare()
    form.load(work, tmp_path / "model.safetensors")
    verifier = verifier_of(work, weights)
    for _ in range(2):
        verifier.verify(form.result(form.run()), no_steps)
    assert len(compiled) == 1
    torch.compiler.reset()


@pytest.mark.extended("timed steps")
def test_our_compiled_form_in_tensorflow_is_compiled(tmp_path, monkeypatch):
    import tensorflow as tf

    by_xla = []
    trace = tf.function
    monkeypatch.setattr(
        tf, "function", lambda *of, **options: by_xla.append(options.get("jit_compile")) or trace(*of, **options)
    )
    weights = TRAIN.weights()
    ref.save_weights(tmp_path / "model.safetensors", TRAIN.config, weights)
    verifier = verifier_of(TRAIN, weights)
    for form, expected in ((FORMS["train"]["tf"], True), (OURS["train"]["tf"], None)):
        form.prepare()
        form.load(TRAIN, tmp_path / "model.safetensors")
        verifier.verify(form.result(form.run()), no_steps)
        assert by_xla.pop() is expected


def test_a_bar_of_ours_is_known_by_the_first_word_of_its_name():
    entries = [Entry(name, seconds=[1.0]) for name in ("torch compiled", "torch data=2", "torch.nn compiled")]
    (axes,) = draw_times("title", "details", entries, "machine").axes
    colours = [bar.get_facecolor() for bar in axes.patches]
    assert colours[0] == colours[1] != colours[2]


@pytest.mark.extended("timed steps")
def test_a_picture_compares_with_nobody_who_is_wrong(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(OURS["decode"], "torch", Wrong("torch"))
    seen = []
    monkeypatch.setattr("transformer_bench.command.write", lambda figure, path: None)
    monkeypatch.setattr("transformer_bench.command.draw_times", lambda *found: seen.append(found))
    options = ["--backends", "numpy,torch", "--plot", tmp_path / "a.png"]
    code, _, _ = parity(capsys, *options)
    assert code == 1
    ((_, _, timed, _),) = seen
    assert [entry.name for entry in timed] == ["numpy"]


@pytest.mark.parametrize("memory", [None, 2**20])
def test_growth_is_drawn_where_memory_is_unknown(memory, tmp_path):
    peak = memory and memory + 2**20
    races = [[Entry("numpy", seconds=[float(size)], loaded_bytes=memory, peak_bytes=peak)] for size in (1, 2)]
    figure = draw_growth("title", "details", "batch", (1, 2), races, "machine")
    figure.savefig(tmp_path / "a.png")
    assert len(figure.axes) == (1 if memory is None else 2)


@pytest.mark.only("torch")
def test_a_step_in_bfloat16_has_weights_in_float32(capsys):
    code, printed, errors = parity(capsys, "--backends", "torch", "--dtype", "bfloat16", task="train")
    assert code == 0, printed + errors
    assert "bfloat16" in printed
