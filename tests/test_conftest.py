"""A test run stops if a backend is missing, lists everything that it leaves out, and fails if a test is skipped."""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import tiers

HERE = Path(__file__).parent


@pytest.fixture
def run(tmp_path):
    """Return a function that runs a small test suite with this conftest and returns its exit code and output."""
    for file in ("conftest.py", "tiers.py", "slow_tests.txt"):
        shutil.copy(HERE / file, tmp_path)

    def run(test, *options):
        (tmp_path / "test_small.py").write_text(f"import pytest\n\n{test}\n")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-c",
            os.devnull,
            "--rootdir",
            str(tmp_path),
            str(tmp_path),
            *options,
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": f"{tmp_path}{os.pathsep}{HERE.parent}",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # importing plugins takes longer than running such a suite
            "PYTEST_PLUGINS": "xdist.plugin" if "-n" in options else "",
        }
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        ) as process:
            try:
                output, _ = process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                for waiting in (*psutil.Process(process.pid).children(recursive=True), process):
                    waiting.send_signal(signal.SIGABRT)  # pytest then prints the stack of each thread
                pytest.fail(f"pytest ran for more than 60 seconds:\n{process.communicate()[0]}")
        return process.returncode, output

    return run


def test_slow_imports_are_local_to_the_tests():
    """Every pytest process collects every file, although it runs only some of the tests."""
    heavy = {"transformers", "jax", "flax", "tensorflow", "keras", "keras_hub", "third_party_flax"}
    for path in HERE.glob("test_*.py"):
        for node in ast.parse(path.read_text("utf-8")).body:
            modules = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not heavy & {module.split(".")[0] for module in modules}, path


def test_deselected_backends_and_devices_are_listed(run):
    code, output = run("def test(backend): pass", "--backends", "numpy", "-q")
    assert code == 0
    for line in ("jax (not in --backends)", "torch (not in --backends)", "gpu (not in --devices)"):
        assert output.count(f"NOT TESTED: {line}") == 1  # -q suppresses the header


SKIPS = """
def test_skip(): pytest.skip("no time")
def test_import(): pytest.importorskip("no_such_module")
@pytest.mark.skipif(True, reason="not now")
def test_condition(): pass
@pytest.mark.xfail
def test_expected(): assert 0
@pytest.mark.parametrize("x", [])
def test_empty_parametrize(x): pass
def test_good(): pass
"""


def test_skip_fails_the_run(run):
    code, output = run(SKIPS, "--backends", "numpy")
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "FAILED: 5 tests were skipped; skipped tests are not allowed" in output


def test_missing_backend_stops_the_run(run, tmp_path):
    (tmp_path / "transformer_jax.py").write_text("raise ModuleNotFoundError(\"No module named 'flax'\")")
    code, output = run("def test(): pass", "--backends", "numpy,jax")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "--backends includes jax, but No module named 'flax'" in output
    assert "pip install 'transformer-parity[jax]'" in output


def test_missing_gpu_stops_the_run(run, tmp_path):
    (tmp_path / "transformer_torch.py").write_text(
        "class runtime:\n    def check_placement(dtype, device): raise RuntimeError('no GPU is visible to torch')"
    )
    code, output = run("def test(): pass", "--backends", "torch", "--devices", "cpu,gpu")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "--devices requires a GPU, but no GPU is visible to torch" in output


def test_unknown_backend_stops_the_run(run):
    code, output = run("def test(): pass", "--backends", "numpy,mxnet")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "--backends must be a comma-separated list from numpy, torch, jax, tf: got mxnet" in output


def test_only_marker_deselects_tests_without_a_skip(run):
    test = (
        "@pytest.mark.only('jax')\ndef test_jax(port): assert 0\ndef test_port(port): assert 0\ndef test_good(): pass"
    )
    code, output = run(test, "--backends", "numpy")
    assert code == 0
    assert "1 passed, 2 deselected" in output


EXTENDED = """
@pytest.mark.extended("presets", "numpy")
def test_backend(backend): pass
@pytest.mark.extended("presets", "torch")
def test_other_backend(backend): pass
@pytest.mark.extended("bugs")
@pytest.mark.parametrize("i", range(20))
def test_many(i): pass
def test_good(): pass
"""


def test_extended_tests_are_left_out_and_counted_by_kind(run):
    code, output = run(EXTENDED, "--backends", "numpy", "-q")
    assert (code, "2 passed, 21 deselected" in output) == (0, True)
    assert output.count("NOT TESTED: 21 extended tests (use --all): 20 bugs, 1 presets") == 1
    code, output = run(EXTENDED, "--backends", "numpy", "-q", "--all")
    assert (code, "23 passed" in output, "which --all" in output) == (0, True, False)


def test_parallel_run_reports_deselected_tests(run):
    code, output = run(EXTENDED, "--backends", "numpy", "-q", "-n", "2")
    assert (code, "2 passed" in output) == (0, True)
    assert output.count("NOT TESTED: 21 extended tests (use --all): 20 bugs, 1 presets") == 1
    assert "peak memory of each process: " in output


def test_shards_cover_each_extended_test_once_and_evenly(run):
    ran = []
    for shard in ("1/3", "2/3", "3/3"):
        code, output = run(EXTENDED, "--backends", "numpy", "-v", "--shard", shard)
        assert code == 0
        here = [line.split()[0] for line in output.splitlines() if " PASSED " in line and "test_many" in line]
        assert len(here) in (6, 7)
        ran += here
        assert "1 of the default tier" in output or "2 of the default tier" in output
        assert "test_good PASSED" not in output
    assert len(ran) == len(set(ran)) == 20


@pytest.mark.parametrize("shard", ["0/2", "3/2", "half"])
def test_unknown_shard_stops_the_run(run, shard):
    code, output = run("def test(): pass", "--backends", "numpy", "--shard", shard)
    assert code == pytest.ExitCode.USAGE_ERROR
    assert f"--shard must be K/N, with K from 1 to N: got {shard}" in output


def test_tests_with_shared_state_run_in_one_process(run):
    names = [f"{name}-{i}" for name in ("torch", "tf") for i in range(9)]
    test = f"@pytest.mark.parametrize('name', {names})\ndef test(name): pass"
    code, output = run(test, "--backends", "numpy", "-v", "-n", "2")
    assert code == 0
    workers = {line.split()[0] for line in output.splitlines() if "PASSED" in line and "[tf-" in line}
    assert len(workers) == 1, output


class Worker:
    """Stands in for a pytest-xdist worker, which starts a test only if it knows the next test or that there is none."""

    gateway = SimpleNamespace(id="gw")  # the scheduler reads the ID when it compares the tests of two workers

    def __init__(self):
        self.queue, self.ran, self.shutting_down = [], [], False

    def send_runtest_some(self, tests):
        self.queue += tests

    def shutdown(self):
        self.shutting_down = True

    def can_start(self):
        return bool(self.queue) and (len(self.queue) > 1 or self.shutting_down)


@pytest.mark.parametrize(("processes", "alone"), [(1, False), (3, False), (4, True)])
def test_tensorflow_tests_run_in_dedicated_processes(processes, alone):
    """Two of four processes are reserved for TensorFlow; fewer processes share all tests."""
    counts = {"tf": 4, "torch": 40, "a-jax": 5}
    tests = [f"test_small.py::test[{name}-{i}]" for name, count in counts.items() for i in range(count)]
    tests.append("test_small.py::test_info_describes_it")
    config = SimpleNamespace(getvalue={"tx": ["popen"] * processes}.get, option=SimpleNamespace(loadscopereorder=True))
    scheduler = tiers.scheduler(config, SimpleNamespace(loadscopesched=lambda *message: None))
    workers = [Worker() for _ in range(processes)]
    for worker in workers:
        scheduler.add_node(worker)
        scheduler.add_node_collection(worker, tests)
    scheduler.schedule()
    while ready := [worker for worker in workers if worker.can_start()]:
        for worker in ready:
            worker.ran.append(tests[worker.queue[0]])
            scheduler.mark_test_complete(worker, worker.queue.pop(0))
    assert sorted(test for worker in workers for test in worker.ran) == sorted(tests)
    for mine in ("[tf-", "::test_info"):
        (ran,) = [worker.ran for worker in workers if any(mine in test for test in worker.ran)]
        assert all(mine in test for test in ran) == alone


@pytest.mark.parametrize(
    ("test", "shares"),
    [
        ("test_search.py::test_types[jax-float64]", "jax"),
        ("test_native_tf.py::test_fit", "tf"),
        ("test_clock.py::test_jax_compiles", "jax"),
        ("test_peers.py::test_logits[keras hub XLA]", "tf"),
        ("test_peers.py::test_float64[flax nnx-1e-06]", "jax"),
        ("test_selftest.py::test_bug[tf-loss-summed-steps]", "tf_training"),
        ("test_training.py::test_mixed_precision_trains_accurately_with_float32_weights[tf]", "tf_training"),
        ("test_train.py::test_run_continues_in_another_framework", "tf_training"),
        ("test_search.py::test_cached_equals_uncached[jax-keras_hub]", "jax"),
        ("test_others.py::test_no_alarm[torch-keras_hub]", "test_others.py::test_no_alarm[torch-keras_hub]"),
        ("test_edited_package.py::test_tensorflow_compiles_each_copy_of_a_model_separately[float32]", "tf"),
        ("test_selftest.py::test_bug[torch-loss-no - and no-full/padded]", "full/padded"),
        ("test_golden.py::test_golden_vectors_of_each_package_agree[torch]", "golden"),
        ("test_import_hf.py::test_logits_match_transformers[marian-numpy]", "import"),
        ("test_import_hf.py::test_logits_match_transformers[marian-jax]", "jax"),
        ("test_search.py::test_types[torch-float64]", "test_search.py::test_types[torch-float64]"),
    ],
)
def test_group_is_derived_from_the_test_name(test, shares):
    assert tiers.group(test) == shares


def test_files_excluded_from_ci_for_other_kernels_exist():
    """The script lists the files to exclude, so that new files are included by default."""
    script = (HERE.parent / ".ci" / "run").read_text()
    names = re.search(r"^left_out=\(([^)]+)\)$", script, re.MULTILINE)[1].split()
    assert [name for name in names if not (HERE / f"test_{name}.py").exists()] == []
    taken = re.search(r"^left_out=.*?^done$", script, re.MULTILINE | re.DOTALL)[0]
    done = subprocess.run(
        ["bash", "-euc", f"{taken}\necho ${{every[@]}}"], cwd=HERE.parent, capture_output=True, text=True, check=True
    )
    files = {path.stem.removeprefix("test_") for path in map(Path, done.stdout.split())}
    everything = {path.stem.removeprefix("test_") for path in HERE.glob("test_*.py")}
    pattern = r"^(containers|import_|site|vocabularies)|_(jax|tf)$"
    assert files == {name for name in everything - {*names} if not re.search(pattern, name)}


def test_unmet_needs_are_deselected_without_a_skip(run):
    test = "@pytest.mark.needs(False, 'what no system has')\ndef test_lacks(): assert 0\ndef test_good(): pass"
    code, output = run(test, "--backends", "numpy")
    assert code == 0
    assert "1 passed, 1 deselected" in output


def test_every_slow_test_exists():
    assert tiers.SLOW
    for test in tiers.SLOW:
        file, _, name = test.partition("::")
        source = Path(__file__).with_name(file).read_text("utf-8")
        assert f"def {name.partition('[')[0]}(" in source, test
