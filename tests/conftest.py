"""What is tested: chosen on the command line, never discovered at run time.

    pytest --backends numpy,torch,jax,tf --devices cpu,gpu --browser chromium --all

A backend or device that is asked for and missing stops the run. One that is not asked for is named in the header and
in the summary. A skipped test fails the run: a test that did not run has not passed.

Without ``--all``, tests marked ``@pytest.mark.extended(kind, *backends)`` are left out, for these backends or for all:
they repeat for another framework, mistake or preset what other tests show for one. How many of each kind is printed.
``--shard 2/7`` runs a seventh of them, and no others. Without either, JAX optimizes little.

Fixtures for every test file:
    backend   each requested backend in turn, a ``Backend``
    port      likewise, without NumPy
    backends  all requested backends, a list; ``ports`` likewise, without NumPy
    device    each requested device in turn ("cpu", "gpu"); NumPy never meets "gpu"
    browser   the Chromium that opens reports; its tests are left out where there is none

A test of one framework is marked ``@pytest.mark.only("jax")``; ``port`` is then that one.

``tiny_config`` and ``random_weights`` are functions; take them as fixtures or import them from here. Likewise
``assert_same_bits``, ``assert_near``, ``refusal``, ``exit_code``, ``parity``, ``child_processes`` and
``still_running``, to be imported.
"""

from __future__ import annotations

import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
os.environ["PARITY_CACHE"] = ""  # the user's own is left alone
# As by default: where a variable of glibc is set, `parity train` does not keep what a process of the tests frees.
os.environ["MALLOC_ARENA_TEST"] = "8"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # in models this small, threads mostly wait for each other

import gc
import importlib
import importlib.util
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import psutil
import pytest
import tiers
from numpy import ndarray

from transformer_spec import PRESETS, TransformerConfig, init_weights

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes would each compile the packages anew
sys.dont_write_bytecode = False

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as under nohup: what the tests start could not be interrupted
    signal.signal(signal.SIGINT, signal.default_int_handler)

PACKAGES = {"numpy": "reference_numpy", "torch": "transformer_torch", "jax": "transformer_jax", "tf": "transformer_tf"}
DEVICES = ("cpu", "gpu")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
TINY = {"d_model": 24, "num_heads": 3, "d_ff": 40, "num_encoder_layers": 2, "num_decoder_layers": 3, "max_length": 29}


@dataclass(frozen=True)
class Backend:
    """One of the four packages, and the way of arrays in and out of its framework."""

    name: str  # numpy, torch, jax or tf
    copy: ModuleType | None = None  # in place of the package

    @property
    def package(self) -> ModuleType:
        """The package; a process in which no test needs it never imports it."""
        return self.copy or _import(self.name)

    def to_numpy(self, array: Any) -> ndarray:
        """Return a copy of a framework's array, bfloat16 as ml_dtypes' bfloat16."""
        if self.name == "torch":
            import torch

            array = array.detach().cpu()
            if array.dtype == torch.bfloat16:  # which Tensor.numpy refuses
                return array.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16).copy()
        return np.array(array.numpy() if hasattr(array, "numpy") else array)

    def from_numpy(self, array: Any) -> Any:
        """Return the framework's own array with the same content, on its default device."""
        array = np.array(array)
        if self.name == "torch":
            import torch

            if array.dtype == ml_dtypes.bfloat16:
                return torch.tensor(array.view(np.int16)).view(torch.bfloat16)
            return torch.tensor(array)
        if self.name == "jax":
            import jax.numpy as jnp

            return jnp.array(array)
        if self.name == "tf":
            import tensorflow as tf

            return tf.constant(array)
        return array

    def gradients(self, model: Any, *inputs: Any, **options: Any) -> list[ndarray]:
        """Return the gradient of the sum of squared logits with regard to each parameter of a port."""
        if self.name == "torch":
            model.zero_grad()
            model(*inputs, **options).square().sum().backward()
            found = [parameter.grad for parameter in model.parameters()]
        elif self.name == "jax":
            import jax
            from flax import nnx

            gradient = nnx.jit(nnx.grad(lambda model: (model(*inputs, **options) ** 2).sum()))
            found = jax.tree.leaves(gradient(model))
        else:
            import tensorflow as tf

            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(*inputs, **options) ** 2)
            found = [tf.convert_to_tensor(gradient) for gradient in tape.gradient(loss, model.trainable_variables)]
        return [self.to_numpy(gradient) for gradient in found]

    def __repr__(self) -> str:
        return self.name


def tiny_config(preset: str = "paper_base", **overrides: Any) -> TransformerConfig:
    """Return a preset shrunk until every axis has its own small size, with any field replaced.

    Source vocabulary 37; target vocabulary 41, or 37 where both share one table.
    """
    fields = {**TINY, **overrides}
    tied = fields.get("tie_embeddings", PRESETS[preset].get("tie_embeddings", "all")) == "all"
    fields = {"source_vocab_size": 37, "target_vocab_size": 37 if tied else 41, **fields}
    return TransformerConfig.preset(preset, **fields)


def random_weights(config: TransformerConfig, seed: int = 0, dtype: str = "float32") -> dict[str, ndarray]:
    """Return weights that let no mistake hide: random biases and scales, sharp attention, every bit in use.

    Fresh weights would: zero biases and unit scales make a forgotten one invisible.
    """
    rng = np.random.default_rng(seed)
    weights = {}
    for name, array in init_weights(config, seed).items():
        if name.endswith(".scale"):
            array = rng.uniform(0.5, 1.5, array.shape)
        elif name.endswith(".bias"):
            array = rng.normal(0.0, 0.2, array.shape)
        else:
            sharpness = 2.0 if name.endswith(("query_proj.kernel", "key_proj.kernel")) else 1.0
            array = array * rng.uniform(0.9 * sharpness, 1.1 * sharpness, array.shape)
        weights[name] = array.astype(dtype)
    return weights


def assert_same_bits(got: Mapping[str, ndarray], expected: Mapping[str, ndarray]) -> None:
    """Fail unless names, dtypes, shapes and every bit agree; of NaN and -0.0 too."""
    assert set(got) == set(expected)
    for name, array in expected.items():
        assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape), name
        assert got[name].tobytes() == array.tobytes(), name


def assert_near(found: Mapping[str, ndarray], expected: Mapping[str, ndarray], tolerance: float = 1e-12) -> None:
    """Fail unless arrays agree by name, each up to a share of the largest magnitude of the expected one."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert np.abs(found[name] - array).max() <= tolerance * np.abs(array).max(), name


def refusal(function, *args, **kwargs):
    """Return type and message of what a call raises."""
    try:
        function(*args, **kwargs)
    except Exception as error:  # whatever it is, its type and message are compared
        return type(error), str(error)
    return None, "accepted"


def exit_code(*arguments) -> int:
    """Run a command of `parity` and return its exit code."""
    from transformer_parity.cli.main import main

    try:
        return main(list(map(str, arguments)))
    except SystemExit as leaving:  # argparse's way out
        return leaving.code


def parity(capture, *arguments):
    """Run a command of `parity`; return its exit code, its output and what it wrote to standard error."""
    return exit_code(*arguments), *capture.readouterr()


def child_processes() -> list:
    """Return the processes that this one has started, but the one by which Python tracks what libraries share."""
    return [child for child in psutil.Process().children() if "multiprocessing" not in " ".join(child.cmdline())]


def still_running(processes, seconds: float = 5.0) -> list:
    """Return which processes do not end in time; one that has ended may wait seconds for init to take note of it."""
    deadline = time.monotonic() + seconds
    while left := [process for process in processes if _is_running(process)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return left


def _is_running(process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture(name="tiny_config", scope="session")
def _tiny_config():
    return tiny_config


@pytest.fixture(name="random_weights", scope="session")
def _random_weights():
    return random_weights


@pytest.fixture(scope="session")
def backends(pytestconfig):
    return list(pytestconfig.requested_backends)


@pytest.fixture(scope="session")
def ports(backends):
    return [backend for backend in backends if backend.name != "numpy"]


@pytest.fixture(scope="session")
def browser(pytestconfig):
    return pytestconfig.browser


@pytest.fixture(autouse=True)
def _imported(request):
    """Import the package that a test is about, which sets its framework up, before the test imports the framework."""
    for name in {"backend", "port"} & set(request.fixturenames):
        _ = request.getfixturevalue(name).package
    yield
    tiers.forget_if_grown()


@pytest.fixture(scope="module", autouse=True)
def _forget():
    yield
    tiers.forget_if_grown(tiers.GROWTH_OF_A_FILE)


def pytest_addoption(parser):
    tiers.add_options(parser)
    parser.addoption("--backends", default=",".join(PACKAGES), help="which to test (default: %(default)s)")
    parser.addoption("--devices", default="cpu", help="cpu, gpu or both (default: %(default)s)")
    found = next(filter(shutil.which, BROWSERS), "none")
    parser.addoption("--browser", default=found, help="a Chromium to open reports, or none (default: %(default)s)")


def pytest_configure(config):
    config.addinivalue_line("markers", "only(name, ...): for these backends; left out where none is asked for")
    tiers.configure(config)
    config.addinivalue_line("markers", "needs(whether, what): of the system; left out where it is not there")
    config.browser = _find_browser(config.getoption("--browser"))
    names = _choices(config, "--backends", tuple(PACKAGES))
    config.requested_devices = _choices(config, "--devices", DEVICES)
    tiers.keep_what_is_compiled(config)  # before JAX is imported
    config.requested_backends = [Backend(name) for name in names]
    if not config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        for backend in config.requested_backends:  # at once; pytest-xdist's processes import what their tests need
            _ = backend.package
    if "gpu" in config.requested_devices:
        for backend in config.requested_backends:
            if backend.name != "numpy":
                _need_gpu(backend)
    config.not_tested = [f"NOT TESTED: {name} (left out of --backends)" for name in PACKAGES if name not in names]
    config.not_tested += [
        f"NOT TESTED: {device} (left out of --devices)" for device in DEVICES if device not in config.requested_devices
    ]
    if os.name == "nt":
        config.not_tested.append("NOT TESTED: signals, pipes and devices by name (Windows has others)")
    if not hasattr(os, "sched_setaffinity"):
        config.not_tested.append("NOT TESTED: processes that are bound to one processor (this system has none)")
    if not importlib.util.find_spec("ctranslate2"):
        config.not_tested.append("NOT TESTED: what CTranslate2 computes from our folders (not installed)")
    if not importlib.util.find_spec("torchao"):
        config.not_tested.append("NOT TESTED: models that torchao has quantized (not installed)")
    if config.browser is None:
        config.not_tested.append(f"NOT TESTED: reports in a browser (ask with --browser; known: {', '.join(BROWSERS)})")


def _choices(config, option, known):
    chosen = config.getoption(option).split(",")
    if unknown := [name for name in chosen if name not in known]:
        raise pytest.UsageError(f"{option} takes {', '.join(known)}: got {', '.join(unknown)}")
    return [name for name in known if name in chosen]


def _find_browser(name):
    path = shutil.which(name)
    if path is None and name != "none":
        raise pytest.UsageError(f"--browser asks for {name}, which is not there; leave it out with --browser none")
    return path


@cache
def _import(name):
    if name == "tf" and importlib.util.find_spec("torch"):  # before TensorFlow, which else crashes in some builds
        import torch  # noqa: F401
    try:
        package = importlib.import_module(PACKAGES[name])
    except ImportError as error:
        extra = "" if name == "numpy" else f"[{name}]"
        raise pytest.UsageError(
            f"backend {name} was asked for, but {error}. Install it with: pip install 'transformer-parity{extra}', "
            "or leave it out of --backends"
        ) from error
    if name == "jax":  # whichever test runs first: JAX has float64 for the whole process or not at all
        import jax

        jax.config.update("jax_enable_x64", True)
    gc.collect()
    gc.freeze()  # what was imported stays: it is not looked through again, hundreds of times
    return package


def _need_gpu(backend):
    try:
        backend.package.runtime.check_placement("float32", "gpu")
    except RuntimeError as error:
        raise pytest.UsageError(f"--devices asks for a GPU, but {error}") from error


def pytest_generate_tests(metafunc):
    """Parametrise ``backend``, ``port`` and ``device`` over what was asked for; fixtures of a module may use them."""
    backends, devices = metafunc.config.requested_backends, metafunc.config.requested_devices
    names = metafunc.fixturenames
    if marker := metafunc.definition.get_closest_marker("only"):
        backends = [backend for backend in backends if backend.name in marker.args]
    which = next((name for name in ("backend", "port") if name in names), None)
    if which == "port":
        backends = [backend for backend in backends if backend.name != "numpy"]
    if which and "device" in names:
        pairs = [(b, d) for b in backends for d in devices if (b.name, d) != ("numpy", "gpu")]
        metafunc.parametrize((which, "device"), pairs, ids=[f"{b.name}-{d}" for b, d in pairs], scope="module")
    elif which:
        metafunc.parametrize(which, backends, ids=[backend.name for backend in backends], scope="module")
    elif "device" in names:
        metafunc.parametrize("device", devices, scope="module")


def pytest_ignore_collect(collection_path, config):
    """Leave out a file about one framework that was not asked for: it need not be there to be imported."""
    about = collection_path.stem.rpartition("_")[2]
    return True if about in set(PACKAGES) - {backend.name for backend in config.requested_backends} else None


def pytest_collection_modifyitems(config, items):
    """Leave out the tests of frameworks, or of a browser, that were not asked for: they are named, and not skipped."""
    requested = {backend.name for backend in config.requested_backends}

    def is_wanted(item):
        if "browser" in item.fixturenames and config.browser is None:
            return False
        if not all(marker.args[0] for marker in item.iter_markers("needs")):
            return False
        marker = item.get_closest_marker("only")
        needed = set(marker.args) if marker else set(PACKAGES) - {"numpy"} if "port" in item.fixturenames else requested
        return bool(needed & requested)

    chosen = tiers.choose(config, [item for item in items if is_wanted(item)])
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = chosen


def pytest_report_header(config):
    tested = [backend.name for backend in config.requested_backends]
    return [f"backends: {', '.join(tested)}; devices: {', '.join(config.requested_devices)}", *config.not_tested]


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # a process of pytest-xdist: the one that reports has collected nothing
        session.config.workeroutput["tests"] = {"left_out": dict(session.config.left_out), "peak": tiers.peak()}
    if _not_run(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return tiers.scheduler(config, log) if config.getoption("dist") == "load" else None


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Take over what a process of pytest-xdist tells at its end; one that crashed tells nothing."""
    if told := getattr(node, "workeroutput", {}).get("tests"):
        node.config.left_out = told["left_out"]  # every process collects the same
        node.config.peaks.append(told["peak"])


def pytest_terminal_summary(terminalreporter, config):
    for line in [*config.not_tested, *tiers.summary(config.left_out)]:
        terminalreporter.write_line(line, yellow=True)
    peaks = ", ".join(f"{peak:.1f} GiB" for peak in config.peaks or [tiers.peak()])
    terminalreporter.write_line(f"largest size of each process: {peaks}")
    if skipped := _not_run(config):
        terminalreporter.write_line(f"FAILED: {skipped} tests were skipped, and a skip is not a pass", red=True)


def _not_run(config):
    if hasattr(config, "workerinput"):  # a process of pytest-xdist: the one that reports counts
        return 0
    stats = config.pluginmanager.get_plugin("terminalreporter").stats
    return len(stats.get("skipped", [])) + len(stats.get("xfailed", []))
