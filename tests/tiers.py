"""Which tests a run takes, in which process each runs, and what a process keeps from one file to the next.

The default tier shows every kind of thing at least once; tests marked ``extended`` repeat it for another framework,
mistake or preset. XLA's compiling is most of the time of all tests, so what was compiled once is kept on disk.
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

import psutil
import pytest

from transformer_parity.transformer.check.kept_programs import kept_in, processor_features
from transformer_spec import PRESETS, TransformerConfig

# In the name of a test, what it shares with others; these run one after another in one process. What TensorFlow has
# compiled, a process keeps until it ends: its tests are two parts, and of four processes, two are for these.
SHARED = (
    re.compile(r"test_(selftest|train\w*)\.py::.*[\[-](?P<tf_training>tf)[]-]"),
    re.compile(r"::test_(?P<tf_training>a_run_goes_on_in_another_framework|attention_of_every_backend|lockstep_shows)"),
    re.compile(r"::test_(?P<tf_training>.*backends_(agree|translate)|code_of_the_guides|info_describes|the_code_runs)"),
    re.compile(r"::test_[^\[]*(?P<tf>tensorflow|keras_hub|copy_is_saved)"),
    re.compile(r"[\[-](jax|tf)[]-]"),  # a framework that compiles
    re.compile(r"_(jax|tf)\.py::"),  # likewise, in a file that is about one
    re.compile(r"::test_(jax|tf)_"),  # likewise, in a test that is about one
    re.compile(r"\[(.*-)?(?P<jax>flax nnx)|\[(.*-)?(?P<tf>keras hub)"),  # likewise, in a test of another model in it
    re.compile(r"test_selftest\.py::.*\[torch-.*-(\S+)\]$"),  # a case: what each hypothesis makes of it
    re.compile(
        r"test_(circumstances|golden|investigate|parallel_torch|port_cases)(?:_written)?\.py"
    ),  # what a file needs
    re.compile(r"test_(import)_(?!messages|alone)"),  # models of transformers, whose import takes seconds
)

ALONE = {"tf", "tf_training"}
GROWTH = 400 * 2**20  # bytes, between two tests of which what they compiled is forgotten
GROWTH_OF_A_FILE = 100 * 2**20  # likewise between two files
_size = 0  # in bytes, of this process, when it last forgot

QUICK = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"  # in a third of the time


def add_options(parser):
    parser.addoption("--all", action="store_true", help="also the tests marked as extended")
    parser.addoption("--shard", metavar="K/N", help="of the extended tests, the K-th of N parts, and nothing else")


def configure(config):
    """Read the options. A shard of another form than K/N, with K from 1 to N, stops the run."""
    config.addinivalue_line("markers", "extended(kind, backend, ...): left out unless --all is given")
    config.shard = None
    if (asked := config.getoption("--shard")) is not None:
        shard = re.fullmatch(r"(\d+)/(\d+)", asked)
        config.shard = tuple(map(int, shard.groups())) if shard else (0, 0)
        if not 1 <= config.shard[0] <= config.shard[1]:
            raise pytest.UsageError(f"--shard takes K/N, with K from 1 to N: got {asked}")
    config.left_out, config.peaks = Counter(), []


def scheduler(config, log):
    """Return pytest-xdist's scheduler of groups: a group for what tests share, and all others singly.

    Its own ``--dist=loadgroup`` finds no groups (3.8.0, under pytest 9.2.0, where the names of tests are fixed).
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByWhatIsShared(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

        def _assign_work_unit(self, node) -> None:
            for name in ALONE & self.workqueue.keys():  # in a process that has done nothing else before either
                self.workqueue.move_to_end(name, last=False)
            super()._assign_work_unit(node)

        def _reschedule(self, node) -> None:
            if self.numnodes > 3 and ALONE & self.assigned_work[node].keys():
                node.shutdown()  # after its tests
            super()._reschedule(node)

    return ByWhatIsShared(config, log)


def group(test: str) -> str:
    """Return what a test shares with others, by its name; or the name itself."""
    return next((found.lastgroup or found[1] for shared in SHARED if (found := shared.search(test))), test)


def presets() -> list:
    """Return every preset as a parameter; in JAX and TF, one that has no convention of its own is extended."""
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
    """Return the values of a parameter: all but the first are extended, for these backends or for all."""
    first, *rest = values
    return [first, *(pytest.param(value, marks=pytest.mark.extended(kind, *backends)) for value in rest)]


def keep_what_is_compiled(config):
    """Let JAX keep executables on disk, for all processes of this run and of later ones on the same processor.

    In the default tier JAX also optimizes little, and compiles in a fraction of the time.
    """
    if not config.getoption("--all") and not config.shard:
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
        flags = os.environ.get("XLA_FLAGS", "")
        with suppress(PackageNotFoundError):  # XLA ends a process for a switch that it does not know
            if version("jaxlib").startswith("0.10.") and QUICK not in flags:
                os.environ["XLA_FLAGS"] = f"{flags} {QUICK}".strip()
    if hasattr(config, "cache"):  # not with -p no:cacheprovider
        os.environ.update(kept_in(config.cache.mkdir(f"jax-{processor_features()}")))


def framework(item) -> str:
    """Return the name of the one backend that a test is about; empty if it is about several, or about none."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if found := next((parameters[name] for name in ("port", "backend") if name in parameters), None):
        return getattr(found, "name", found)
    marker = item.get_closest_marker("only")
    return marker.args[0] if marker and len(marker.args) == 1 else ""


def choose(config, items) -> list:
    """Return the tests of this tier and shard, and count the others.

    Extended tests are dealt out to the shards kind by kind and file by file: what takes long is in many of them.
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
    """Return as what a test is extended; empty if it is of the default tier."""
    name = framework(item)
    marks = [mark.args for mark in item.iter_markers("extended")]
    return next((kind for kind, *backends in marks if name in backends or not backends), "")


def summary(left_out) -> list[str]:
    """Return the lines that say what was left out; none if nothing was."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(left_out.items()))
    number = sum(left_out.values())
    return [f"NOT TESTED: {number} extended tests, which --all runs; of each kind: {kinds}"] * bool(left_out)


def forget():
    """Free what the frameworks keep of the models of a finished file: gigabytes, after all of them."""
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
    if "keras" in sys.modules:
        sys.modules["keras"].backend.clear_session()  # which collects garbage too
    else:
        gc.collect()
    with suppress(OSError, AttributeError):  # of glibc, which keeps hundreds of megabytes of what XLA has freed
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def forget_if_grown(most=GROWTH):
    """Free it where the process has grown by as much as it may: to look through everything takes half a second."""
    global _size
    if psutil.Process().memory_info().rss > _size + most:
        forget()
        _size = psutil.Process().memory_info().rss


def peak() -> float:
    """Return the most memory that this process held, in GiB; 0 where that is not known."""
    try:
        import resource
    except ImportError:  # Windows
        return 0.0
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used / 2 ** (30 if sys.platform == "darwin" else 20)
