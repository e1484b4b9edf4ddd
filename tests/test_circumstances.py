"""Every command in adverse circumstances: its exit code, and no traceback, partial file, or leftover process.

No command has a terminal here. A limit on file size simulates a full disk, because it causes the same kind of error.
The read-only directory belongs to the kernel, so not even root can write to it. If the tests don't run as root, the
``another user`` circumstance can't switch users, so the directory is only made unwritable.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path
from xml.etree import ElementTree

import circumstances
import psutil
import pytest
from conftest import assert_same_bits
from search_models import lively
from translate_runs import save

from reference_numpy import TransformerConfig, init_weights
from transformer_parity.apps.checkpoints import importer
from transformer_parity.cli.init_pair import template
from transformer_parity.cli.main import COMMANDS
from transformer_spec.files import load_weights, save_weights

ROOT = Path(__file__).resolve().parent.parent
SERVER = Path(circumstances.__file__)
READ_ONLY = "/sys/kernel"
PORT = """
import reference_numpy
from transformer_parity.transformer.cases import for_ports
from transformer_parity.plugin import Port

for_ports.SEEDS = for_ports.ENDING_SEEDS = 1  # in the port's process too

class One(Port):
    overrides = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    dtypes = ("float64",)

    def load(self, config, weights, dtype):
        self.model = reference_numpy.Transformer.from_weights(config, weights, dtype)

    def forward(self, source_ids, target_ids, tap):
        return self.model(source_ids, target_ids) * (1 + 1e-15)
"""
SMALL = {
    **{"source_vocab_size": 9, "target_vocab_size": 9, "d_model": 8, "num_heads": 1, "d_ff": 8},
    **{"num_encoder_layers": 1, "num_decoder_layers": 1},
}
MODEL = "--set d_model=8 num_heads=1 d_ff=8 num_encoder_layers=1 num_decoder_layers=1 tokens_per_batch=200"
# Commands that run quickly, with their exit codes. {out} is the output directory; {have} contains the input files.
RUNS = {
    "check": (
        "check --port one:One --stage activations --dtype float64 --failures {out}/f "
        "--json {out}/a.json --html {out}/a.html",
        0,
    ),
    "check-distributed": (
        "check-distributed --port one:One --dtype float64 --json {out}/a.json --html {out}/a.html",
        3,  # the port doesn't support training
    ),
    "init-pair": ("init-pair --framework numpy --out {out}/toys.py", 0),
    "pair": ("pair {have}/my_pair.py --seeds 1 --dtype float64 --json {out}/a.json", 0),
    "init-port": ("init-port --framework other --out {out}/my_port.py", 0),
    "golden": ("golden --dtype float64 --out {out}/golden", 0),
    "compare": ("compare {have}/truth {have}/mine --stage activations --json {out}/a.json", 0),
    "selftest": ("selftest --backends torch --part feed-forward --json {out}/a.json", 0),
    "train": (f"train --task dates --backend numpy --steps 2 {MODEL} --out {{out}}/run", 0),
    "checkpoint": ("checkpoint {have}/parts --out {out}/checkpoint.safetensors", 0),
    "evaluate": ("evaluate {have}/model --text {have}/text {have}/text --backend numpy --json {out}/a.json", 0),
    "translate": ("translate --weights {have}/model --backend numpy --search max_length=9 {have}/text", 0),
    "import": ("import {have}/hf --out {out}/model.safetensors --backend numpy --json {out}/a.json", 0),
    "export": ("export {have}/imported.safetensors --format hf --out {out}/hf", 0),
    "explore": ("explore abc de --weights {have}/model --backends numpy --out {out}/a.html", 0),
    "bench": (
        "bench forward --backends numpy --config tiny --batch 1 --source 4 --target 4 --threads 1 --rounds 1 "
        "--json {out}/a.json",
        0,
    ),
    "info": ("info --names", 0),
    "source": ("source attention", 0),
    "show": ("show masks --out {out}/a.png", 0),
}
WRITES = {name for name, (arguments, _) in RUNS.items() if "{out}" in arguments}
STREAMS = {"translate"}  # commands that stop when nothing reads their output
STOPPED = {"SIGINT": 130, "SIGTERM": 143}  # exit codes of a training run, which saves before it stops
LATE = 0.6  # fraction of a command's events after which it receives a signal
EARLY = 0.3  # the same for selftest, whose child processes make the number of events vary


def test_circumstances_cover_every_command():
    assert set(RUNS) == set(COMMANDS)


class Server:
    """A process that runs commands; see ``circumstances``."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.have = directory, directory / "have"
        self.have.mkdir()
        (self.have / "one.py").write_text(PORT)
        (self.have / "my_pair.py").write_text(template("numpy", "numpy"))
        (self.have / "text").write_text("abc\nde\n" * 9)
        save(self.have / "model", *lively())
        config = TransformerConfig.preset("marian", **SMALL)
        save_weights(self.have / "imported.safetensors", config, init_weights(config, seed=0))
        importer.export_checkpoint(importer.load(self.have / "imported.safetensors"), "hf", self.have / "hf")
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(self.have)]),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, str(SERVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self.environment,
        )
        self.passed: dict[str, int] = {}
        self.have.chmod(0o755)
        for command, name in (("golden --for one:One", "truth"), ("golden --port one:One", "mine"), ("train", "run")):
            command, *options = command.split()
            case = Case(self, command)
            case.arguments = [*RUNS[command][0].format(out=case.out, have=self.have).split(), *options]
            assert case.end("plain") == 0, case.said
            made = case.out / {"golden": "golden", "train": "run"}[command]
            shutil.move(made, self.have / name)

    def make_parts(self) -> None:
        """Convert the run's checkpoint to the sharded format that PyTorch reads."""
        if (self.have / "parts").exists():
            return
        (path,) = (self.have / "run").glob("checkpoint-*.safetensors")
        case = Case(self, "checkpoint")
        case.arguments = ["checkpoint", str(path), "--backend", "torch", "--out", str(self.have / "parts")]
        assert case.end("plain") == 0, case.said

    def moments(self, command: str) -> int:
        """Return the number of interpreter events during a command."""
        if command not in self.passed:
            case = Case(self, command)
            assert case.end("plain") == RUNS[command][1], case.said
            case.check()
            self.passed[command] = int(case.passed.read_text())
        return self.passed[command]


class Case:
    """One command in one circumstance."""

    def __init__(self, server: Server, command: str, out: str = "") -> None:
        self.server, self.command, self.mark = server, command, str(uuid.uuid4())
        directory = server.directory / self.mark
        directory.mkdir()
        self.out, self.temporary, self.passed = directory / "out", directory / "temporary", directory / "passed"
        self.said = ""
        self.out.mkdir()
        self.temporary.mkdir()
        self.temporary.chmod(0o777)
        self.arguments = RUNS[command][0].format(out=out or self.out, have=server.have).split()

    def end(self, circumstance: str, at: int = 0) -> int:
        """Run the command, store its standard error, and return its exit code."""
        request = {"circumstance": circumstance, "at": at, "arguments": self.arguments, "mark": self.mark}
        request["stdout"] = "/dev/full" if circumstance == "a full output" else os.devnull
        request |= {"directory": str(self.out), "temporary": str(self.temporary), "passed": str(self.passed)}
        self.server.process.stdin.write(json.dumps(request) + "\n")
        self.server.process.stdin.flush()
        code, self.said = json.loads(self.server.process.stdout.readline())
        return code

    def check(self) -> None:
        """Fail if the command printed a traceback, or left a partial file, a temporary file, or a process."""
        assert "Traceback" not in self.said
        assert "Exception ignored" not in self.said
        deadline = time.monotonic() + 5.0
        while (left := [*self._processes(), *self.temporary.iterdir()]) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert left == []
        for path in self.out.rglob("*"):
            assert not path.name.startswith("."), path
            if path.is_file():
                whole(path)

    def _processes(self) -> list[str]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("CIRCUMSTANCE") == self.mark:
                    found.append(" ".join(process.cmdline()))
        return found


def whole(path: Path) -> None:
    """Fail unless a file is complete and valid."""
    content = path.read_bytes()
    if path.suffix == ".json":
        json.loads(content)
    elif path.suffix == ".xml":
        ElementTree.fromstring(content)
    elif path.suffix == ".html":
        assert content.rstrip().endswith(b"</html>")
    elif path.suffix == ".png":
        assert content.endswith(b"IEND\xaeB`\x82")
    elif path.suffix == ".py":
        compile(content, path, "exec")
    elif path.parent.name == "hf":
        assert {file.name for file in path.parent.iterdir()} >= {"config.json", "generation_config.json"}
    elif path.name in ("model.safetensors", "weights.safetensors") or path.name.startswith("checkpoint"):
        load_weights(path)


@pytest.fixture(scope="module")
def server():
    temporary = Path(tempfile.gettempdir()).resolve()
    is_open = all(directory.stat().st_mode & 0o001 for directory in (temporary, *temporary.parents))
    with tempfile.TemporaryDirectory(dir=None if is_open else "/tmp") as directory:
        Path(directory).chmod(0o755)  # pytest's own directories are inaccessible to other users
        server = Server(Path(directory))
        yield server
        server.process.stdin.close()
        assert server.process.wait(10) == 0
        server.process.stdout.close()


@pytest.fixture
def case(server, command):
    return case_of(server, command)


def case_of(server, command, out=""):
    """Return a case whose command has the input files that it requires."""
    if command == "checkpoint":
        server.make_parts()
    return Case(server, command, out)


# Commands that write files, run for a long time, or stream their output.
SHOWN = ("check", "golden", "train", "translate")


def commands(names):
    """Parametrize a test over commands, most of which run only as extended tests."""
    extended, torch = pytest.mark.extended("circumstances"), pytest.mark.only("torch")
    marks = {name: [extended, torch] if name == "checkpoint" else [extended] for name in names if name not in SHOWN}
    return pytest.mark.parametrize("command", [pytest.param(name, marks=marks.get(name, ())) for name in names])


every, some = commands(RUNS), commands(sorted(WRITES))


@every
def test_closed_output_pipe_does_not_change_the_results(case, command):
    expected = 3 if command in STREAMS else RUNS[command][1]
    assert case.end("head") == expected
    assert case.said.count("error") == 0
    assert bool(list(case.out.iterdir())) == (command in WRITES)
    case.check()


@every
def test_full_output_device_is_an_error_and_results_are_kept(case, command):
    assert case.end("a full output") == 3
    assert "No space left on device" in case.said
    assert bool(list(case.out.iterdir())) == (command in WRITES)
    case.check()


@every
def test_full_disk_is_reported_without_a_partial_file(case, command):
    assert case.end("a full disk") == (3 if command in WRITES else RUNS[command][1])
    assert ("File too large" in case.said) == (command in WRITES)
    case.check()


@some
def test_read_only_directory_is_reported_without_a_partial_file(server, command):
    case = case_of(server, command, READ_ONLY)
    assert case.end("") == 3
    assert READ_ONLY in case.said
    case.check()


# A user without read access to the frameworks can't import them.
@commands([name for name in RUNS if name != "checkpoint"])
def test_output_directory_owned_by_a_different_user(case, command):
    case.out.chmod(0o555)
    assert case.end("another user") == (3 if command in WRITES else RUNS[command][1])
    assert ("Permission denied" in case.said) == (command in WRITES)
    assert list(case.out.iterdir()) == []
    case.check()


@some
def test_output_directory_without_permissions_is_an_error(case, command):
    case.out.chmod(0)
    case.arguments = [argument.replace("/out/", "/out/inner/") for argument in case.arguments]
    assert case.end("another user") == 3
    assert "Permission denied" in case.said
    case.out.chmod(0o755)
    case.check()


@every
@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_signal_ends_a_command_without_leftovers(case, command, number):
    late = EARLY if command == "selftest" else LATE
    code = case.end(number, at=round(late * case.server.moments(command)))
    assert code in (3, STOPPED[number] if command == "train" else 3)
    case.check()


@every
def test_sigkill_leaves_no_partial_files(case, command):
    late = EARLY if command == "selftest" else LATE
    assert case.end("SIGKILL", at=round(late * case.server.moments(command))) == -9
    case.check()


LONGER = f"train --task dates --backend numpy --steps 8 {MODEL} save_every=2 keep=2 --out {{out}}/run"
RESUMED = "train --resume {out}/run --backend numpy"
ENDED = {"SIGKILL": {-9}, "SIGTERM": {143, 3}, "SIGINT": {130, 3}}


@pytest.fixture(scope="module")
def uninterrupted(server):
    """Return the number of interpreter events during a training run, and the final weights."""
    case = Case(server, "train")
    case.arguments = LONGER.format(out=case.out).split()
    assert case.end("plain") == 0, case.said
    return int(case.passed.read_text()), load_weights(case.out / "run" / "model.safetensors")[1]


@pytest.mark.extended("interrupted training")
# Most of a run's events come from plotting.
@pytest.mark.parametrize("moment", [0.01, 0.018, 0.02, 0.023, 0.026, 0.03, 0.034])
@pytest.mark.parametrize("number", ENDED)
def test_interrupted_training_resumes_to_identical_weights(server, uninterrupted, number, moment):
    passed, weights = uninterrupted
    case = Case(server, "train")
    case.arguments = LONGER.format(out=case.out).split()
    assert case.end(number, at=round(moment * passed)) in ENDED[number], case.said
    made = {path.name for path in (case.out / "run").glob("*.safetensors")}
    if "model.safetensors" not in made:
        if made:
            case.arguments = RESUMED.format(out=case.out).split()
        else:  # the run ended before it saved a checkpoint
            shutil.rmtree(case.out / "run", ignore_errors=True)
        assert case.end("") == 0, case.said
    assert_same_bits(load_weights(case.out / "run" / "model.safetensors")[1], weights)
    case.check()


EXTENDED = [pytest.param(command, marks=pytest.mark.extended("commands")) for command in RUNS if command != "check"]


@pytest.mark.parametrize("command", ["check", *EXTENDED])
def test_commands_run_in_a_minimal_environment(server, case, command):
    """Commands work with ``python -O``, an ASCII-only locale, no home directory, and no terminal."""
    kept = ("PATH", "PYTHONPATH", "OMP_NUM_THREADS")
    bare = {name: value for name, value in server.environment.items() if name in kept}
    bare |= {"LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "TMPDIR": str(case.temporary)}
    asked = [sys.executable, "-O", str(SERVER), *case.arguments]
    done = subprocess.run(asked, cwd=case.out, env=bare, capture_output=True, check=False, stdin=subprocess.DEVNULL)
    case.said = done.stderr.decode("ascii")
    assert done.returncode == RUNS[command][1], shlex.join(asked) + case.said
    assert done.stdout.isascii()
    case.check()
