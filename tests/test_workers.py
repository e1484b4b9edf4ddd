"""Every port runs in a separate process, so crashes, hangs, and output affect only its own findings."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import venv

import pytest
import tiers

import reference_numpy
from transformer_parity.engine.findings import AGREES, FAILED, SKIPPED, Finding
from transformer_parity.engine.processes import children, start
from transformer_parity.engine.system.machine import processors
from transformer_parity.transformer.cases.case import ACTIVATIONS, tiny
from transformer_parity.transformer.cases.for_ports import port_cases
from transformer_parity.transformer.cases.standard import standard_cases
from transformer_parity.transformer.check.checked_port import CheckedPort
from transformer_parity.transformer.check.messages import PortJob
from transformer_parity.transformer.check.processes import MEMORY, run_all
from transformer_parity.transformer.ports.protocol import Placements
from transformer_parity.transformer.stages.registry import STAGES

FLOAT64 = Placements(("float64",))
FORWARD = {case.name for case in port_cases(tiny(d_k=None, d_v=None), [ACTIVATIONS])}

PORT = """
import os, signal, sys, time
from reference_numpy import Transformer
from transformer_parity.plugin import Port

class Mine(Port):
    dtypes = ("float64",)

    def load(self, config, weights, dtype):
        self.model = Transformer.from_weights(config, weights, dtype)

    def forward(self, source_ids, target_ids, tap):
        {forward}
        return self.model(source_ids, target_ids)
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return a function that writes a port to the current directory and returns the port's name."""
    monkeypatch.chdir(tmp_path)

    def write(forward="pass", head=""):
        (tmp_path / "mine.py").write_text(head + PORT.format(forward=forward))
        return "mine:Mine"

    return write


def ports(*names: str, cases=None, stages=(ACTIVATIONS,)) -> list[CheckedPort]:
    """Return each port with the given cases, or with all cases of the given stages."""
    return [CheckedPort(PortJob(name, FLOAT64), (cases or {}).get(name), stages) for name in names]


def compare(*names: str, cases=None, stages=(ACTIVATIONS,), **options) -> list[Finding]:
    compared = ports(*names, cases=cases, stages=stages)
    for _ in run_all(compared, **options):
        pass
    assert all(port.is_done for port in compared)
    return [finding for port in compared for finding in port.findings]


def only_problem(findings: list[Finding]) -> str:
    """Return the text of the only finding that is a failure."""
    (problem,) = [finding for finding in findings if finding.verdict == FAILED]
    assert problem.backend == "Mine"
    return problem.detail


def test_plugin_port_and_built_in_port_run_side_by_side(write):
    name = write()
    full = tuple(case for case in standard_cases() if case.name == "full/padded")
    compared = ports(name, "torch", cases={"torch": full})
    for _ in run_all(compared):
        pass
    mine, of_torch = compared
    findings = [finding for port in compared for finding in port.findings]
    assert {finding.verdict for finding in findings} == {AGREES, SKIPPED}
    cases = {backend: {found.case for found in findings if found.backend == backend} for backend in ("Mine", "torch")}
    assert cases["Mine"] == FORWARD
    assert cases["torch"] == {"full/padded"}
    assert (mine.label, mine.dtypes, mine.is_done) == ("Mine", ("float64",), True)
    assert mine.environment["port"] == name
    assert "numpy" in mine.environment
    kinds = {type(value) for value in of_torch.environment.values()}
    assert kinds == {str}  # other classes would be imported in order to unpickle them


def test_cases_can_be_given_directly(write):
    (case, *_) = port_cases(tiny(d_v=8))
    name = write()
    findings = compare(name, cases={name: (case,)})
    assert {finding.case for finding in findings} == {case.name}


@pytest.mark.parametrize(
    ("forward", "problem"),
    [
        ("sys.exit(4)", "the port called sys.exit(4) at float64 full/padded"),
        ("os._exit(5)", "the process ended with exit code 5 at float64 full/padded: the process printed nothing"),
        (
            "print('the last', end=''), os._exit(6)",
            "the process ended with exit code 6 at float64 full/padded: the last",
        ),
        (
            "print('so it goes', file=sys.stderr); os.kill(os.getpid(), signal.SIGSEGV)",
            "the process ended with exit code -11 (SIGSEGV) at float64 full/padded: so it goes",
        ),
        (
            "os._exit(8) if os.fork() else time.sleep(600)",
            "the process ended with exit code 8 at float64 full/padded: the process printed nothing",
        ),
    ],
    ids=["sys.exit", "os._exit", "prints", "segfault", "forks"],
)
def test_port_that_exits_its_process_is_reported(forward, problem, write, capfd):
    assert only_problem(compare(write(forward))) == problem
    assert capfd.readouterr() == ("", "")


DISTURB = r"""
def disturb():
    global disturb
    os.write(1, b"\0" * 99)
    print("here")
    sys.stdout.close()
    os.close(1)
    disturb = lambda: None
"""


def test_port_that_writes_to_and_closes_stdout_still_agrees(write):
    findings = compare(write("disturb()", head=DISTURB))
    assert {finding.verdict for finding in findings} == {AGREES, SKIPPED}


def test_exception_in_a_port_fails_each_case(write):
    findings = [finding for finding in compare(write("raise OSError('no disk')")) if finding.verdict == FAILED]
    assert sorted(finding.case for finding in findings) == sorted(FORWARD)
    assert {finding.detail for finding in findings} == {"OSError: no disk (mine.py, line 13, in forward)"}


@pytest.mark.parametrize(
    ("head", "problem"),
    [
        ("import absent", "ValueError: port 'mine:Mine' cannot be imported: No module named 'absent' at importing"),
        ("1 / 0", "ZeroDivisionError: division by zero (mine.py, line 1) at importing"),
        ("so it goes", "SyntaxError: invalid syntax (mine.py, line 1) at importing"),
        ("raise SystemExit", "the port called sys.exit(None) at importing"),
    ],
)
def test_port_module_import_error_is_reported(head, problem, write):
    assert only_problem(compare(write(head=head))) == problem


OBJECTS = """
import numpy as np

class Number:
    pass
"""


def test_custom_objects_of_a_port_do_not_reach_the_parent_process(write, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)  # so that the class could be imported
    findings = compare(write("return np.array([[[Number()]]])", head=OBJECTS))
    said = {finding.detail.partition(" (")[0] for finding in findings if finding.verdict == FAILED}
    assert said == {"TypeError: output must contain numbers: got dtype object"}
    assert "mine" not in sys.modules


def test_invalid_port_conventions_are_reported(write):
    name = write()
    with open("mine.py", "a") as file:
        file.write("    overrides = {'norm_order': 'middle'}\n")
    problem = "ValueError: norm_order must be one of post, pre: got 'middle' at importing"
    assert only_problem(compare(name)) == problem


def test_timeout_stops_only_the_silent_port(write):
    name = write("time.sleep(60) if source_ids.shape[0] == 1 else None; print('thinking')")
    findings = compare(name, "numpy", cases={"numpy": standard_cases()[:1]}, timeout=2.0)
    assert only_problem(findings) == "no progress for 2 s at float64 full/one_sentence: thinking"
    assert {finding.verdict for finding in findings if finding.backend == "numpy"} == {AGREES}
    assert len({finding.case for finding in findings if finding.backend == "Mine" and finding.case}) == 3


@pytest.mark.parametrize(
    "waits",
    tiers.first_alone(["pass", "time.sleep(0.01)", "time.sleep(60)"], "timed processes"),
    ids=["never", "now and then", "once"],
)
def test_port_that_never_returns_is_stopped_busy_or_idle(waits, write):
    started = time.monotonic()
    problem = only_problem(compare(write(f"while True: {waits}"), timeout=2.0))
    assert problem == "no progress for 2 s at float64 full/padded: the process printed nothing"
    assert time.monotonic() - started < 50.0


def test_port_that_answers_in_time_is_not_stopped(write):
    short = [case for case in port_cases(tiny(d_k=None, d_v=None), [ACTIVATIONS]) if "thousand" not in case.name]
    cases = {"mine:Mine": short}
    started = time.monotonic()
    findings = compare(write("time.sleep(0.02)"), cases=cases, timeout=2.0)
    assert time.monotonic() - started > 2.0  # for all calls together
    assert {finding.verdict for finding in findings} == {AGREES, SKIPPED}
    assert compare(write(), cases=cases, timeout=None) == findings


@pytest.mark.extended("timed processes")
@pytest.mark.needs(hasattr(os, "sched_setaffinity"), "processes bound to one CPU core")
def test_port_waiting_for_a_cpu_is_not_stopped(write, tmp_path):
    one = {min(os.sched_getaffinity(0))}
    name = write("compute()")
    with open("mine.py", "a") as file:
        file.write(f"""
def compute():
    global compute
    os.sched_setaffinity(0, {one})
    started, enough = time.monotonic(), time.thread_time() + 1.5
    while time.thread_time() < enough:
        pass
    open("waited", "w").write(str(time.monotonic() - started))
    compute = lambda: None
""")
    command = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(command, start_new_session=True) for _ in range(4)]  # sessions share CPU time
    try:
        for other in others:
            os.sched_setaffinity(other.pid, one)
        findings = compare(name, timeout=3.0)
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert float((tmp_path / "waited").read_text()) > 3.5
    assert FAILED not in {finding.verdict for finding in findings}


def test_closing_the_iterator_ends_the_process(write, tmp_path):
    name = write(f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)")
    messages = run_all(ports(name))
    for port, _ in messages:
        if port.doing == "float64 full/padded":
            break
    messages.close()
    pid = tmp_path / "pid"
    if pid.exists() and pid.read_text():  # the process may have been killed before it wrote the file
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)


def test_ctrl_c_does_not_reach_a_port(write):
    findings = compare(write("os.kill(os.getpid(), signal.SIGINT)"))
    assert FAILED not in {finding.verdict for finding in findings}


def test_standard_input_of_a_port_is_empty(write):
    (problem, *_) = [found.detail for found in compare(write("input()")) if found.verdict == FAILED]
    assert problem == "EOFError: EOF when reading a line (mine.py, line 13, in forward)"


def test_processes_share_threads_and_retain_freed_memory(write, monkeypatch):
    for switch in children.THREAD_SWITCHES:
        monkeypatch.delenv(switch, raising=False)
    for switch in ("OMP_WAIT_POLICY", "MALLOC_MMAP_MAX_"):
        monkeypatch.delenv(switch, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "9")
    switches = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PJRT_NPROC", "OMP_WAIT_POLICY", *MEMORY)
    findings = compare(write(f"raise ValueError([os.environ[name] for name in {switches}])"))
    (problem, *_) = [found.detail for found in findings if found.verdict == FAILED]
    said = f"ValueError: {['7', str(processors()), str(processors()), 'passive', '0', '9']}"
    assert problem == f"{said} (mine.py, line 13, in forward)"
    assert "PJRT_NPROC" not in os.environ


def test_thread_count_respects_cpu_affinity(write, monkeypatch):
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 5}, raising=False)
    findings = compare(write("raise ValueError(os.environ['MKL_NUM_THREADS'])"))
    assert {found.detail.partition(" (")[0] for found in findings if found.verdict == FAILED} == {"ValueError: 3"}


@pytest.fixture(scope="module")
def other_python(tmp_path_factory):
    """Return the interpreter of a new, empty environment and its package directory."""
    directory = tmp_path_factory.mktemp("environment")
    venv.create(directory, symlinks=os.name != "nt")
    python = directory / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    command = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return str(python), subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()


def test_port_runs_in_another_interpreter(write, other_python):
    python, packages = other_python
    name = write("raise OSError(sys.executable)")
    options = {"interpreters": {name: python}}
    problem = only_problem(compare(name, **options))
    assert problem == "the process ended with exit code 1 at starting: ModuleNotFoundError: No module named 'numpy'"

    for needed in ("numpy", "ml_dtypes", "safetensors"):  # but not rich, matplotlib, sacrebleu, or sentencepiece
        directory = os.path.dirname(__import__(needed).__path__[0])
        for entry in (needed, f"{needed}.libs"):
            if os.path.exists(os.path.join(directory, entry)) and not os.path.exists(os.path.join(packages, entry)):
                os.symlink(os.path.join(directory, entry), os.path.join(packages, entry))
    details = {finding.detail for finding in compare(name, **options) if finding.verdict == FAILED}
    assert details == {f"OSError: {python} (mine.py, line 13, in forward)"}
    findings = compare(write(), "numpy", cases={"numpy": standard_cases()[:1]}, stages=STAGES, **options)
    assert {finding.verdict for finding in findings} == {AGREES, SKIPPED}


def test_module_finder_finds_only_project_packages():
    assert start.Ours.find_spec("reference_numpy").origin == reference_numpy.__file__
    assert start.Ours.find_spec("numpy") is None


def test_missing_interpreter_is_reported(write):
    name, started = write(), time.monotonic()
    assert only_problem(compare(name, interpreters={name: "/absent/python"})) == (
        "the interpreter /absent/python cannot be started: No such file or directory"
    )
    assert time.monotonic() - started < 4.0  # fails without waiting
