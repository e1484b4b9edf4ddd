"""The pytest configuration, which selects tests by command-line options and never by what happens to be installed.

    pytest --backends numpy,torch,jax,tf --devices cpu,gpu --browser chromium --all

If a requested backend or device is missing, the run stops. The header and the summary list the backends and devices
that you didn't request. A skipped test fails the run, because a test that didn't run hasn't passed.

Without ``--all``, pytest deselects the tests marked ``@pytest.mark.extended(kind, *backends)``, either for these
backends or for all. They repeat a check for another framework, bug, or preset. The summary shows how many tests of each
kind were deselected. ``--shard 2/7`` runs only the second of seven parts of the extended tests. Without either option,
JAX compiles with few optimizations.

Fixtures for every test file:
    backend   each requested backend in turn, as a ``Backend``
    port      each requested backend except NumPy in turn, as a ``Backend``
    backends  the list of all requested backends
    ports     the list of all requested backends except NumPy
    device    each requested device in turn ("cpu", "gpu"); NumPy is never combined with "gpu"
    browser   path of the Chromium that opens reports; without one, tests that use this fixture are deselected

Mark a test for one framework with ``@pytest.mark.only("jax")``; ``port`` is then that framework's backend.

``tiny_config`` and ``random_weights`` are functions that you can use as fixtures or import from this module. Import
``assert_same_bits``, ``assert_near``, ``refusal``, ``exit_code``, ``parity``, ``child_processes``, and
``still_running`` from this module.
"""

from __future__ import annotations

import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
os.environ["PARITY_CACHE"] = ""  # don't use the developer's own cache
# 8 is glibc's default. Because a malloc variable is set, `parity train` doesn't make test processes keep freed memory.
os.environ["MALLOC_ARENA_TEST"] = "8"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # with models this small, threads mostly wait for each other

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

# Triton 3.8, which PyTorch's CUDA build imports, crashes the process if it is imported after TensorFlow 2.21.
with suppress(ImportError):
    importlib.import_module("triton")

# Otherwise, each of hundreds of child processes would recompile the packages.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # nohup ignores SIGINT, and child processes inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)

PACKAGES = {"numpy": "reference_numpy", "torch": "transformer_torch", "jax": "transformer_jax", "tf": "transformer_tf"}
DEVICES = ("cpu", "gpu")
MARIAN = "PARITY_MARIAN"  # environment variable that names a Python interpreter with pymarian
TRANSFORMERS_4 = "PARITY_TRANSFORMERS_4"  # environment variable that names a Python interpreter with transformers 4.57
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
TINY = {"d_model": 24, "num_heads": 3, "d_ff": 40, "num_encoder_layers": 2, "num_decoder_layers": 3, "max_length": 29}


@dataclass(frozen=True)
class Backend:
    """One of the four packages, with functions that convert arrays to and from its framework."""

    name: str  # "numpy", "torch", "jax", or "tf"
    copy: ModuleType | None = None  # an edited copy to use instead of the installed package

    @property
    def package(self) -> ModuleType:
        """Import the package on first use, so that a process imports only the packages that its tests require."""
        return self.copy or _import(self.name)

    def to_numpy(self, array: Any) -> ndarray:
        """Return a copy of a framework's array as a NumPy array; bfloat16 becomes the ml_dtypes type."""
        if self.name == "torch":
            import torch

            array = array.detach().cpu()
            if array.dtype == torch.bfloat16:  # Tensor.numpy doesn't support bfloat16
                return array.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16).copy()
        return np.array(array.numpy() if hasattr(array, "numpy") else array)

    def from_numpy(self, array: Any) -> Any:
        """Return the framework's own array with the same values, on the default device."""
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
        """Return the gradient of the sum of the squared logits with respect to each parameter of a port."""
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
    """Return a preset with every dimension reduced to a distinct small size, and with any field replaced.

    The source vocabulary has 37 entries. The target vocabulary has 41, or 37 if both sides share one embedding matrix.
    """
    fields = {**PRESETS[preset], **TINY, **overrides}
    if fields.get("position_encoding") == "relative":  # so that short sequences use all buckets
        fields = {"relative_buckets": 8, "relative_max_distance": 12, **fields}
    shared = fields.get("tie_embeddings", "all") in ("all", "source_target")
    fields = {"source_vocab_size": 37, "target_vocab_size": 37 if shared else 41, **fields}
    return TransformerConfig.preset(preset, **fields)


def random_weights(config: TransformerConfig, seed: int = 0, dtype: str = "float32") -> dict[str, ndarray]:
    """Return weights that expose bugs: random biases and scales, large attention logits, and full-precision values.

    Freshly initialized weights would hide bugs: their biases are zero and their scales are one, so omitting them
    changes nothing.
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
    """Fail unless names, dtypes, shapes, and all bits match, including the bits of NaN and -0.0."""
    assert set(got) == set(expected)
    for name, array in expected.items():
        assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape), name
        assert got[name].tobytes() == array.tobytes(), name


def assert_near(found: Mapping[str, ndarray], expected: Mapping[str, ndarray], tolerance: float = 1e-12) -> None:
    """Fail unless arrays with the same name differ by at most ``tolerance`` times the largest expected magnitude."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert np.abs(found[name] - array).max() <= tolerance * np.abs(array).max(), name


def refusal(function, *args, **kwargs):
    """Return the type and the message of the exception that a call raises."""
    try:
        function(*args, **kwargs)
    except Exception as error:  # the caller compares the type and message of any exception
        return type(error), str(error)
    return None, "accepted"


def exit_code(*arguments) -> int:
    """Run a `parity` command and return its exit code."""
    from transformer_parity.cli.main import main

    try:
        return main(list(map(str, arguments)))
    except SystemExit as leaving:  # argparse exits this way
        return leaving.code


def parity(capture, *arguments):
    """Run a `parity` command; return its exit code, its standard output, and its standard error."""
    return exit_code(*arguments), *capture.readouterr()


def child_processes() -> list:
    """Return the child processes of this process, except Python's multiprocessing resource tracker."""
    return [child for child in psutil.Process().children() if "multiprocessing" not in " ".join(child.cmdline())]


def still_running(processes, seconds: float = 5.0) -> list:
    """Return the processes still running after a grace period, which gives init time to reap exited processes."""
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
    """Import the package under test before the test imports the framework, because the package configures it."""
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
    parser.addoption("--backends", default=",".join(PACKAGES), help="test these backends (default: %(default)s)")
    parser.addoption(
        "--devices",
        default="cpu",
        help="test on these devices: cpu, gpu, or both, separated by a comma (default: %(default)s)",
    )
    found = next(filter(shutil.which, BROWSERS), "none")
    parser.addoption(
        "--browser", default=found, help="open HTML reports in this Chromium browser, or none (default: %(default)s)"
    )


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "only(name, ...): run for these backends; deselected if none of them is requested"
    )
    tiers.configure(config)
    config.addinivalue_line(
        "markers", "needs(condition, feature): requires a feature of the system; deselected if the condition is false"
    )
    config.browser = _find_browser(config.getoption("--browser"))
    names = _choices(config, "--backends", tuple(PACKAGES))
    config.requested_devices = _choices(config, "--devices", DEVICES)
    tiers.keep_what_is_compiled(config)  # JAX reads these settings on import
    config.requested_backends = [Backend(name) for name in names]
    if not config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        # Import all packages now; each pytest-xdist worker imports only what its tests require.
        for backend in config.requested_backends:
            _ = backend.package
    if "gpu" in config.requested_devices:
        for backend in config.requested_backends:
            if backend.name != "numpy":
                _need_gpu(backend)
    config.not_tested = [f"NOT TESTED: {name} (not in --backends)" for name in PACKAGES if name not in names]
    config.not_tested += [
        f"NOT TESTED: {device} (not in --devices)" for device in DEVICES if device not in config.requested_devices
    ]
    if os.name == "nt":
        config.not_tested.append("NOT TESTED: signals, pipes, and device files (different on Windows)")
    if not hasattr(os, "sched_setaffinity"):
        config.not_tested.append("NOT TESTED: processes bound to one CPU core (not supported by this system)")
    if not importlib.util.find_spec("ctranslate2"):
        config.not_tested.append("NOT TESTED: CTranslate2 on exported directories (not installed)")
    if not importlib.util.find_spec("torchao"):
        config.not_tested.append("NOT TESTED: models quantized by torchao (not installed)")
    if not os.environ.get(MARIAN):
        config.not_tested.append(f"NOT TESTED: Marian itself (set {MARIAN} to a Python interpreter with pymarian)")
    if not os.environ.get(TRANSFORMERS_4):
        config.not_tested.append(
            f"NOT TESTED: Flax and TensorFlow classes (set {TRANSFORMERS_4} to a Python interpreter with "
            "transformers 4.57)"
        )
    if config.browser is None:
        config.not_tested.append(
            f"NOT TESTED: HTML reports in a browser (use --browser with one of {', '.join(BROWSERS)})"
        )


def _choices(config, option, known):
    chosen = config.getoption(option).split(",")
    if unknown := [name for name in chosen if name not in known]:
        raise pytest.UsageError(
            f"{option} must be a comma-separated list from {', '.join(known)}: got {', '.join(unknown)}"
        )
    return [name for name in known if name in chosen]


def _find_browser(name):
    path = shutil.which(name)
    if path is None and name != "none":
        raise pytest.UsageError(
            f"--browser {name} is not installed: install it, or skip the browser tests with --browser none"
        )
    return path


@cache
def _import(name):
    # In some builds, TensorFlow crashes if it is imported before torch.
    if name == "tf" and importlib.util.find_spec("torch"):
        import torch  # noqa: F401
    try:
        package = importlib.import_module(PACKAGES[name])
    except ImportError as error:
        extra = "" if name == "numpy" else f"[{name}]"
        raise pytest.UsageError(
            f"--backends includes {name}, but {error}. Install it with: pip install 'transformer-parity{extra}', "
            "or remove it from --backends"
        ) from error
    if name == "jax":  # JAX's float64 setting applies to the whole process, so no test may run before it is set
        import jax

        jax.config.update("jax_enable_x64", True)
    gc.collect()
    gc.freeze()  # exempt the imported modules from hundreds of later garbage collections
    return package


def _need_gpu(backend):
    try:
        backend.package.runtime.check_placement("float32", "gpu")
    except RuntimeError as error:
        raise pytest.UsageError(f"--devices requires a GPU, but {error}") from error


def pytest_generate_tests(metafunc):
    """Parametrize ``backend``, ``port``, and ``device`` over the requested values, also for module-scoped fixtures."""
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
    """Ignore a file about one framework unless that framework was requested, because it may not be installed."""
    about = collection_path.stem.rpartition("_")[2]
    return True if about in set(PACKAGES) - {backend.name for backend in config.requested_backends} else None


def pytest_collection_modifyitems(config, items):
    """Deselect (rather than skip) the tests for frameworks or browsers that weren't requested."""
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
    # A pytest-xdist worker sends these to the main process, which collects no tests.
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["tests"] = {"left_out": dict(session.config.left_out), "peak": tiers.peak()}
    if _not_run(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return tiers.scheduler(config, log) if config.getoption("dist") == "load" else None


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Store the results that a pytest-xdist worker sent when it ended; a crashed worker sends none."""
    if told := getattr(node, "workeroutput", {}).get("tests"):
        node.config.left_out = told["left_out"]  # the same in every worker, because all workers collect the same tests
        node.config.peaks.append(told["peak"])


def pytest_terminal_summary(terminalreporter, config):
    for line in [*config.not_tested, *tiers.summary(config.left_out)]:
        terminalreporter.write_line(line, yellow=True)
    peaks = ", ".join(f"{peak:.1f} GiB" for peak in config.peaks or [tiers.peak()])
    terminalreporter.write_line(f"peak memory of each process: {peaks}")
    if skipped := _not_run(config):
        terminalreporter.write_line(f"FAILED: {skipped} tests were skipped; skipped tests are not allowed", red=True)


def _not_run(config):
    if hasattr(config, "workerinput"):  # only the main process reports skipped tests
        return 0
    stats = config.pluginmanager.get_plugin("terminalreporter").stats
    return len(stats.get("skipped", [])) + len(stats.get("xfailed", []))
