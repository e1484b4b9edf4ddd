"""`parity bench train --parallel`: runs with multiple processes, rejected arguments, and the costs of plans."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from conftest import child_processes, parity, still_running

from reference_numpy import Plan
from transformer_bench import rounds, run
from transformer_bench.implementations import TrainOnDevices
from transformer_bench.rounds import Reply, TimedImplementation
from transformer_bench.tables import costs_for_machines
from transformer_bench.workload import TrainWork
from transformer_parity.cli.main import main
from transformer_parity.engine.processes import team

PLANS = (" data=", " fsdp=")  # the beginnings of table rows
QUICK = ["--config", "tiny", "--target", "4", "--source", "6", "--threads", "1", "--rounds", "2"]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(rounds, "PAUSE", 0.0)
    here = str(Path(__file__).parent)  # directory from which child processes import the implementations defined here
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])]))


# --- Implementations with multiple processes ---


def test_combined_reply_uses_slowest_time_and_largest_memory():
    replies = [Reply((1, 2.0), 3.0, 1.0, 70, 60), Reply((1, 2.5), 2.0, 2.0, 90, 50)]
    assert Reply.of(replies) == Reply((1, 2.0), 3.0, 3.0, 90, 60, others=((1, 2.5),))
    assert Reply.of(replies[:1]) == replies[0]
    assert Reply.of([Reply("", 1.0, 1.0)] * 2).peak_bytes is None


@dataclass
class Two(TimedImplementation):
    """Two processes that return their numbers; with ``fails``, process 1 exits and process 0 raises or hangs."""

    name: str = "two"
    processes: int = 2
    fails: str = ""

    def environments(self):
        return nullcontext([{"NUMBER": "0"}, {"NUMBER": "1"}])

    def prepare(self):
        return {"version": "1"}

    def load(self, work, weights):
        return os.environ["NUMBER"], os.environ["OMP_NUM_THREADS"]

    def run(self):
        number = os.environ["NUMBER"]
        if self.fails and number == "0":
            time.sleep(0.2)
            if self.fails == "hangs":
                time.sleep(600)
            raise RuntimeError("the other is gone")
        if self.fails:
            print("out of luck", file=sys.stderr, flush=True)
            os._exit(7)
        return number


def test_requests_reach_all_processes_and_threads_are_divided():
    entry = rounds.Entry("two")
    with rounds.started([Two()], [entry], threads=6) as ((process,), directory):
        assert process.receive("prepare").others == ({"version": "1"},)
        loaded = process.ask("load", None, directory)
        assert (loaded.answer, *loaded.others) == (("0", "3"), ("1", "3"))
        with pytest.raises(rounds.DisagreementError, match="1 is wrong"):
            rounds._run(process, refuse_the_second)
        assert len(child_processes()) == 3  # including the process that ends these two if this process is killed
    assert child_processes() == []


def refuse_the_second(answer, show):
    if answer == "1":
        raise rounds.DisagreementError("1 is wrong")
    return ""


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_exit_of_one_process_is_reported_and_ends_the_others(how, monkeypatch):
    monkeypatch.setattr(team, "CAUSE", 0.5)
    with rounds.started([Two(fails=how)], [rounds.Entry("two")], threads=2) as ((process,), _):
        process.receive("prepare")
        started = [child for child in child_processes() if rounds.WORK in child.cmdline()]
        assert len(started) == 2
        reason = "process 1 of 2: the process ended with exit code 7 in run: out of luck"
        with pytest.raises(rounds.ImplementationError, match=reason):
            process.ask("run")
        assert still_running(started, 10.0) == []


# --- The command ---


def test_numpy_plan_is_simulated_in_one_process(capsys, tmp_path):
    code, printed, errors = parity(
        *(capsys, "bench", "train", *QUICK, "--backends", "numpy", "--rounds", 1, "--parallel", "fsdp=2,tensor=2"),
        *("--json", tmp_path / "a.json"),
    )
    assert code == 0, printed + errors
    names = ["numpy", "numpy fsdp=2,tensor=2"]
    assert f"Losses of every call of {', '.join(names)} agree with the float64 reference." in " ".join(printed.split())
    (race,) = json.loads((tmp_path / "a.json").read_text())["result"]["races"]
    assert [entry["name"] for entry in race["implementations"]] == names
    assert [len(entry["seconds"]) for entry in race["implementations"]] == [1, 1]
    plan = Plan.parse("fsdp=2,tensor=2")
    assert race["plans"] == costs_for_machines(TrainWork("tiny", source=6, target=4), [plan])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.extended("plans")) for name in ("torch", "jax", "tf")]
)
def test_each_framework_is_timed_in_multiple_processes(name, capsys, tmp_path):
    code, printed, errors = parity(
        *(capsys, "bench", "train", *QUICK, "--backends", name, "--parallel", "data=2", "--parallel", "fsdp=2"),
        *("--json", tmp_path / "a.json"),
    )
    (race,) = json.loads((tmp_path / "a.json").read_text())["result"]["races"]
    one, data, fsdp = race["implementations"]
    for entry in (one, data, *[fsdp] * (name != "tf")):
        assert len(entry["seconds"]) == 2, printed + errors
        assert entry["peak_bytes"] > 2**26
    assert code == (3 if name == "tf" else 0)
    if name == "tf":
        assert fsdp["seconds"] is None
        assert "FAILED    tf fsdp=2: process " in printed
        assert "TensorFlow's strategies support only the axis 'data': got plan fsdp=2" in printed


def test_zero_rounds_print_plan_costs_without_timing(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(run, "started", None)
    options = ["--rounds", 0, "--config", "big", "--parallel", "data=8", "--json", tmp_path / "a.json"]
    code, printed, errors = parity(capsys, "bench", "train", *QUICK, *options)
    assert (code, errors) == (0, "")
    rows = [line.split() for line in printed.splitlines()]
    assert next(row for row in rows if row[:1] == ["data=8"])[1:4] == ["1,430", "-", "-"]
    assert next(row for row in rows if row[:2] == ["one", "device"])[2:6] == ["-", "-", "-", "817"]
    (race,) = json.loads((tmp_path / "a.json").read_text())["result"]["races"]
    assert (race["implementations"], race["plans"][0]["plan"]) == ([], "data=8")


def test_documented_plan_costs_match_the_command_output(capsys):
    page = (Path(__file__).parents[1] / "docs" / "results" / "devices-memory.md").read_text("utf-8")
    commands = [line.split()[4:] for line in page.splitlines() if re.match(r"\$ parity bench train .*--rounds 0", line)]
    assert [command[1] for command in commands] == ["base", "big"]
    shown = [" ".join(line.split()) for line in page.splitlines()]
    for command in commands:
        assert main(["bench", "train", *command]) == 0
        printed, _ = capsys.readouterr()
        rows = [" ".join(line.split()) for line in printed.splitlines() if line.startswith((" one device", *PLANS))]
        assert len(rows) == 5
        at = shown.index(rows[0])
        assert shown[at : at + 5] == rows


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rounds", "0"], "--rounds 0 only computes the costs of parallelism plans; add --parallel PLAN"),
        (
            ["--parallel", "tensor=3"],
            "--parallel tensor=3: num_heads of the encoder must be divisible by tensor=3: got 4",
        ),
        (["--parallel", "rows=3"], "a plan must have the form data=2,fsdp=2,tensor=2: got 'rows=3'"),
        (["--rounds", "-1", "--parallel", "data=2"], "must be a positive integer: got '-1'"),
    ],
)
def test_invalid_bench_options_are_rejected_before_measuring(options, message, capsys, monkeypatch):
    monkeypatch.setattr(run, "started", None)
    code, printed, errors = parity(capsys, "bench", "train", *QUICK, *options)
    assert (code, printed) == (3, "")
    assert message in errors


def test_number_of_processes_depends_on_backend_and_device():
    found = {
        (name, device): TrainOnDevices(name, Plan.parse("data=4"), device).processes
        for name in ("numpy", "torch", "jax", "tf")
        for device in ("cpu", "gpu")
    }
    assert [found[name, "cpu"] for name in ("numpy", "torch", "jax", "tf")] == [1, 4, 4, 4]
    assert [found[name, "gpu"] for name in ("numpy", "torch", "jax", "tf")] == [1, 4, 1, 1]


@pytest.mark.needs(os.name != "nt", "signals")
@pytest.mark.extended("plans")
def test_ctrl_c_ends_all_processes(tmp_path):
    arguments = ["bench", "train", *QUICK, "--rounds", "100000", "--backends", "torch", "--parallel", "data=2"]
    errors = tmp_path / "errors"
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "transformer_parity", *arguments], stdout=subprocess.PIPE, stderr=stderr, text=True
        )
        deadline = time.monotonic() + 120
        while "round 3 of" not in errors.read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        started = psutil.Process(process.pid).children(recursive=True)
        # One process runs without a plan, two run the plan, one measures the throughput, and one ends the others if
        # their parent is killed.
        assert len(started) >= 5
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=60)
    assert process.returncode == 3, printed + errors.read_text()
    assert "INTERRUPTED after" in printed
    assert "Traceback" not in errors.read_text()
    assert still_running(started, 10.0) == []
