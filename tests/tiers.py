"""Test tiers: the tests that a run selects, the process that runs each test, and the caches that a process keeps.

The default tier covers nearly every feature. Tests marked ``extended`` repeat a test for a different framework, bug, or
preset. The tests in ``slow_tests.txt``, which take more than two seconds of CPU time, are also extended. Most of them
repeat a faster test with different parameters, but about 30 are the only test of a behavior. Compilation by XLA
dominates the run time, so compiled programs are cached on disk.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import sys
from collections import Counter
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import pytest

from transformer_parity.engine.system.kept_programs import kept_in, processor_features
from transformer_spec import PRESETS, TransformerConfig

# Parts of test names that identify shared resources. Tests that share a resource run sequentially in one process.
# Because a process retains everything that TensorFlow compiles, TensorFlow's tests form two groups, for two of four
# processes.
SHARED = (
    re.compile(r"test_(selftest|train\w*)\.py::.*[\[-](?P<tf_training>tf)[]-]"),
    re.compile(r"::test_(?P<tf_training>run_continues_in_another_framework|attention_of_every_backend|lockstep_shows)"),
    re.compile(r"::test_(?P<tf_training>.*backends_(agree|translate)|code_of_the_guides|info_describes|the_code_runs)"),
    re.compile(r"::test_[^\[]*(?P<tf>tensorflow|keras_hub|copy_is_saved)"),
    re.compile(r"[\[-](jax|tf)[]-]"),  # a framework that compiles
    re.compile(r"_(jax|tf)\.py::"),  # a file for such a framework
    re.compile(r"::test_(jax|tf)_"),  # a test for such a framework
    re.compile(r"\[(.*-)?(?P<jax>flax nnx)|\[(.*-)?(?P<tf>keras hub)"),  # a third-party model in such a framework
    re.compile(r"test_selftest\.py::.*\[torch-.*-(\S+)\]$"),  # a case on which all candidates are run
    re.compile(
        r"test_(circumstances|golden|investigate|parallel_torch|port_cases|wrong_ports)(?:_written)?\.py"
    ),  # data shared by all tests in a file
    re.compile(r"test_(import)_(?!messages|alone)"),  # models in transformers, which takes seconds to import
)

ALONE = {"tf", "tf_training"}
SLOW = frozenset(Path(__file__).with_name("slow_tests.txt").read_text("utf-8").splitlines())  # one test ID per line
GROWTH = 400 * 2**20  # memory growth in bytes after which caches are cleared between two tests
GROWTH_OF_A_FILE = 100 * 2**20  # memory growth in bytes after which caches are cleared between two files
_size = 0  # memory use of this process in bytes after caches were last cleared

QUICK = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"  # 3 times faster


def add_options(parser):
    parser.addoption("--all", action="store_true", help="also run the tests marked as extended")
    parser.addoption("--shard", metavar="K/N", help="run only part K of N of the extended tests")


def configure(config):
    """Read the options. Raise a usage error if --shard isn't K/N with K from 1 to N."""
    config.addinivalue_line("markers", "extended(kind, backend, ...): deselected unless --all or --shard is given")
    config.shard = None
    if (asked := config.getoption("--shard")) is not None:
        shard = re.fullmatch(r"(\d+)/(\d+)", asked)
        config.shard = tuple(map(int, shard.groups())) if shard else (0, 0)
        if not 1 <= config.shard[0] <= config.shard[1]:
            raise pytest.UsageError(f"--shard must be K/N, with K from 1 to N: got {asked}")
    config.left_out, config.peaks = Counter(), []


def scheduler(config, log):
    """Return a pytest-xdist scheduler that groups tests by shared resources and runs all other tests individually.

    xdist's own ``--dist=loadgroup`` doesn't find the groups (3.8.0 with pytest 9.2.0, which doesn't allow renaming
    tests).
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByWhatIsShared(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

        def _assign_work_unit(self, node) -> None:
            for name in ALONE & self.workqueue.keys():  # these groups run first, each in a fresh process
                self.workqueue.move_to_end(name, last=False)
            super()._assign_work_unit(node)

        def _reschedule(self, node) -> None:
            if self.numnodes > 3 and ALONE & self.assigned_work[node].keys():
                node.shutdown()  # after finishing its tests
            super()._reschedule(node)

    return ByWhatIsShared(config, log)


def group(test: str) -> str:
    """Return the name of the resource that a test shares with others, or the test's own name."""
    return next((found.lastgroup or found[1] for shared in SHARED if (found := shared.search(test))), test)


def presets() -> list:
    """Return every preset as a parameter. In JAX and TensorFlow, presets without a new convention are extended."""
    parameters, seen = [], set()
    for preset in PRESETS:
        fields = TransformerConfig.preset(preset, source_vocab_size=37, target_vocab_size=37).to_dict()
        conventions = {
            (name, value)
            for name, value in fields.items()
            if isinstance(value, str | bool) or name == "position_offset"
        }
        marks = [pytest.mark.extended("presets", "jax", "tf")] if conventions <= seen else []
        parameters.append(pytest.param(preset, marks=marks))
        seen |= conventions
    return parameters


def first_alone(values, kind: str, *backends: str) -> list:
    """Return a parameter's values. All except the first are extended for the given backends (default: all)."""
    first, *rest = values
    return [first, *(pytest.param(value, marks=pytest.mark.extended(kind, *backends)) for value in rest)]


def keep_what_is_compiled(config):
    """Let JAX cache executables on disk for all processes of this run and of later runs on the same processor.

    In the default tier, JAX also skips most optimizations, which reduces compilation time.
    """
    if not config.getoption("--all") and not config.shard:
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
        flags = os.environ.get("XLA_FLAGS", "")
        with suppress(PackageNotFoundError):  # XLA aborts if it doesn't recognize a flag
            if version("jaxlib").startswith("0.10.") and QUICK not in flags:
                os.environ["XLA_FLAGS"] = f"{flags} {QUICK}".strip()
    if hasattr(config, "cache"):  # unset with -p no:cacheprovider
        os.environ.update(kept_in(config.cache.mkdir(f"jax-{processor_features()}")))


def framework(item) -> str:
    """Return the name of the only backend that a test uses, or an empty string if it uses multiple or no backends."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if found := next((parameters[name] for name in ("port", "backend") if name in parameters), None):
        return getattr(found, "name", found)
    marker = item.get_closest_marker("only")
    return marker.args[0] if marker and len(marker.args) == 1 else ""


def choose(config, items) -> list:
    """Return the tests of this tier and shard, and record the number of other tests.

    Extended tests are assigned to shards in turn, sorted by kind and file, so that slow tests are spread over the
    shards.
    """
    kinds = {item: _kind(item) for item in items}
    extended = sorted((item for item in items if kinds[item]), key=lambda item: (kinds[item], item.nodeid))
    if config.shard:
        part, parts = config.shard
        wanted = set(extended[part - 1 :: parts])
    else:
        wanted = set(items) - (set() if config.getoption("--all") else set(extended))
    config.left_out.update(kinds[item] or "of the default tier" for item in items if item not in wanted)
    return [item for item in items if item in wanted]


def _kind(item) -> str:
    """Return the kind of an extended test, or an empty string if the test is in the default tier."""
    name = framework(item)
    marks = [mark.args for mark in item.iter_markers("extended")]
    slow = "slow tests" if item.nodeid.removeprefix("tests/") in SLOW else ""
    return next((kind for kind, *backends in marks if name in backends or not backends), slow)


def summary(left_out) -> list[str]:
    """Return a line about the tests that weren't selected, or no lines if all tests were selected."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(left_out.items()))
    number = sum(left_out.values())
    return [f"NOT TESTED: {number} extended tests (use --all): {kinds}"] * bool(left_out)


def forget():
    """Clear the frameworks' caches for the models of a finished file, which would otherwise grow to gigabytes."""
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
    if "keras" in sys.modules:
        sys.modules["keras"].backend.clear_session()  # also collects garbage
    else:
        gc.collect()
    with suppress(OSError, AttributeError):  # glibc retains hundreds of megabytes that XLA has freed
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def forget_if_grown(most=GROWTH):
    """Clear the caches if the process has grown by the given number of bytes, because clearing takes half a second."""
    global _size
    if psutil.Process().memory_info().rss > _size + most:
        forget()
        _size = psutil.Process().memory_info().rss


def peak() -> float:
    """Return the peak memory use of this process in GiB, or 0 if it isn't available."""
    try:
        import resource
    except ImportError:  # Windows
        return 0.0
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used / 2 ** (30 if sys.platform == "darwin" else 20)
