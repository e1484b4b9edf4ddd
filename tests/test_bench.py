"""`parity bench`: failing implementations, processes that die, interruptions, and the output."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import tiers
from bench_runs import QUICK, Wrong, bench, read
from bench_runs import no_pause as no_pause  # an autouse fixture
from conftest import child_processes, still_running
from test_bench_verify import SMALL

from transformer_bench import rounds
from transformer_bench.implementations import OURS, DecodePackage
from transformer_bench.measurements import Entry
from transformer_bench.peak import libraries
from transformer_bench.workload import DecodeWork
from transformer_parity.cli.main import main
from transformer_parity.engine.findings import AGREES, FAILED
from transformer_parity.engine.system.machine import processors

# --- The rounds. ---


class Process:
    """A fake process that records its requests and reports one second less with each run."""

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
            raise rounds.ImplementationError("enough")
        return rounds.Reply(method, self.seconds, 2.0 * self.seconds, int(self.seconds), 90)


def test_implementations_are_warmed_up_and_take_turns_to_run_first():
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
        peak_bytes=97,  # the peak during the rounds, excluding compilation
    )
    assert a.entry.work_bytes == 7
    assert c.entry.seconds == a.entry.seconds
    assert (b.entry.verdict, b.entry.problem, b.entry.is_timed) == (FAILED, "enough", False)


def test_agreeing_implementations_are_timed(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("transformer_bench.run.libraries", libraries)
    environment = dict(os.environ)
    code, printed, progress = bench(
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
    peak = report["peak"]
    assert list(peak["rates"]) == list(peak["bandwidths"]) == list(peak["libraries"]) == ["numpy", "torch"]
    assert peak["rate"] == max(peak["rates"].values()) > 1e9
    assert peak["bandwidth"] == max(peak["bandwidths"].values()) > 1e8
    assert f"{peak['seconds'] / report['implementations'][0]['median_seconds']:.0%}" in printed
    assert report["work"]["operations"] == DecodeWork("tiny", 8, 6, 4).operations
    assert [entry["name"] for entry in report["implementations"]] == ["numpy", "torch"]
    for entry in report["implementations"]:
        assert len(entry["seconds"]) == len(entry["cores"]) == 2
        assert 0 < entry["median_seconds"] < 60
        assert entry["first_seconds"] > 0
        assert entry["peak_bytes"] is None or entry["peak_bytes"] >= entry["loaded_bytes"] > 2**20
        assert entry["environment"]["threads"] == str(min(2, processors()))
        assert f"{1e3 * entry['median_seconds']:,.1f}" in printed
    numpy, torch = (entry["seconds"] for entry in report["implementations"])
    expected = [ours / theirs for ours, theirs in zip(torch, numpy, strict=True)]
    assert report["ratios"]["torch"]["numpy"]["median"] == pytest.approx(sum(expected) / 2)
    assert list(report["ratios"]["torch"]) == ["numpy"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.png"]


@pytest.mark.extended("peers")
def test_peers_do_the_same_work(capsys, tmp_path):
    code, printed, _ = bench(capsys, "--backends", "numpy", "--peers", "--json", tmp_path / "a.json")
    assert code == 0, printed
    agreeing = "numpy, marian, flax nnx, keras hub, keras hub XLA"
    assert f"Tokens and scores of every call of {agreeing} agree" in printed.replace("\n", " ")
    assert "matmuls: only the matrix multiplications" in printed
    report, _ = read(tmp_path / "a.json")
    assert {entry["name"]: entry["has_result"] for entry in report["implementations"]} == {
        "numpy": True,
        **dict.fromkeys(["marian", "flax nnx", "keras hub", "keras hub XLA"], True),
        "matmuls": False,
    }


@pytest.mark.extended("peers")
def test_peers_search_with_the_same_beam(capsys):
    code, printed, _ = bench(capsys, "--backends", "numpy", "--peers", "--beam", 3)
    assert code == 0, printed
    assert "beam search with 3 beams" in printed
    assert "Tokens and scores of every call of numpy, marian agree" in printed


@dataclass
class Dying(DecodePackage):
    """An implementation that exits in its second round."""

    calls: int = 0

    def run(self):
        self.calls += 1
        if self.calls > 3:
            print("out of luck", file=sys.stderr, flush=True)
            os._exit(7)
        return super().run()


@dataclass
class Raising(DecodePackage):
    """An implementation that fails to load."""

    def load(self, work, weights):
        raise MemoryError("too large")


@pytest.mark.parametrize(
    ("implementation", "code", "reason"),
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
def test_wrong_or_failing_implementations_are_not_timed(implementation, code, reason, capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(OURS["decode"], "torch", implementation)
    options = ["--backends", "numpy,torch", "--rounds", 3, "--json", tmp_path / "a.json"]
    found, printed, _ = bench(capsys, *options)
    assert found == code
    assert reason in printed
    assert "of numpy agree" in printed
    report, everything = read(tmp_path / "a.json")
    numpy, torch = report["implementations"]
    assert len(numpy["seconds"]) == 3
    assert torch["seconds"] is torch["first_seconds"] is torch["median_seconds"] is None
    assert report["ratios"] == {"numpy": {}}
    assert everything["exit_code"] == code


@pytest.mark.needs(os.name != "nt", "signals")
@pytest.mark.parametrize(
    "number", tiers.first_alone([signal.SIGINT, signal.SIGTERM], "signals"), ids=["SIGINT", "SIGTERM"]
)
def test_interrupted_benchmark_prints_partial_results_and_cleans_up(number, tmp_path):
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
        # NumPy, the throughput measurement, and the process that ends these two if their parent is killed.
        assert len(started) >= 3
        assert [path.suffix for path in temporary.glob("*/*.*")] == [".safetensors"]
        process.send_signal(number)
        printed, _ = process.communicate(timeout=60)
    assert process.returncode == 3, printed + errors.read_text()
    assert "interleaved rounds. Tokens and scores of every call of numpy agree" in printed
    assert "INTERRUPTED after" in printed
    assert "Traceback" not in errors.read_text()
    report, everything = read(tmp_path / "a.json")
    assert everything["interrupted"]
    assert 2 <= len(report["implementations"][0]["seconds"]) < 100
    assert still_running(started, 10.0) == []
    assert list(temporary.iterdir()) == []


def test_ctrl_c_before_the_first_timing_reports_no_times(capsys, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("transformer_bench.run.run_rounds", interrupted)
    code, printed, _ = bench(capsys, "--backends", "numpy")
    assert code == 3
    assert "FAILED    numpy: interrupted before it was timed" in printed
    assert "INTERRUPTED after 0 of 2 rounds." in printed
    assert "agree" not in printed
    assert child_processes() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--threads", "100000"], "the number of CPU cores: got 100000"),
        (["--json", "absent/a.json"], "there is no directory absent"),
        (["--plot", "a.gif"], "--plot must end in png or svg: got a.gif"),
        (["--backends", "theano"], "unknown theano; choose from numpy, torch, jax, tf"),
        (["--rounds", "0"], "--rounds must be positive for decode: got 0"),
        (["--rounds", "-1"], "must be a positive integer: got '-1'"),
        (["--dropout", "0.1"], "decode does not support --dropout"),
        (["--parallel", "data=2"], "decode does not support --parallel"),
        (["--config", "huge"], "invalid choice: 'huge'"),
        (["--device", "gpu", "--peers"], "--peers supports only the CPU; remove --peers or --device gpu"),
        (["--device", "gpu"], "numpy supports only the CPU; add --backends torch,jax,tf"),
    ],
)
def test_invalid_bench_options_are_rejected_before_measuring(options, message, capsys, monkeypatch):
    monkeypatch.setattr("transformer_bench.run.started", None)
    code, printed, errors = bench(capsys, *options)
    assert code == 3
    assert printed == ""
    assert message in errors


def test_missing_peers_are_reported(capsys, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find_spec(name))
    code, _, errors = bench(capsys, "--backends", "numpy", "--peers")
    assert code == 3
    assert "--peers requires transformers, which is not installed: pip install transformers" in errors


GROWING_REFUSED = [
    ("forward", ["--scale", "width"], "one of source, target, length, batch, depth, vocabulary: got 'width'"),
    ("forward", ["--scale", "batch=1,x"], "must be a positive integer: got 'x'"),
    ("forward", ["--scale", "batch=2,2"], "sizes must be in increasing order: got 2,2"),
    ("forward", ["--dtype", "bfloat16", "--peers"], "--peers supports only float32"),
    ("forward", ["--dtype", "bfloat16"], "numpy does not support bfloat16 in benchmarks"),
    (
        "forward",
        ["--beam", "2", "--activation-checkpointing"],
        "forward does not support --beam, --activation-checkpointing",
    ),
    ("train", ["--activation-checkpointing", "--peers"], "--peers does not support --activation-checkpointing"),
    ("train", ["--dropout", "1"], "must be a number of at least 0 and less than 1: got '1'"),
]


@pytest.mark.parametrize(("task", "options", "message"), GROWING_REFUSED)
def test_unsupported_options_of_a_bench_task_are_rejected(task, options, message, capsys, monkeypatch):
    monkeypatch.setattr("transformer_bench.run.started", None)
    code, printed, errors = bench(capsys, *options, task=task)
    assert (code, printed) == (3, "")
    assert message in errors


def test_bench_help_explains_verification_and_table_columns(capsys):
    for arguments, line in (
        (["bench", "--help"], "If a result does not agree with the reference, its time is not\nreported."),
        (["bench", "decode", "--help"], "table columns:"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert line in capsys.readouterr().out
