"""Profile a forward pass, a training step, or a search, and print the percentage of time spent on each kind of work.

Usage: ``python -m transformer_bench.profile_steps train torch --config base``. The workload is the same as in
``parity bench``. Two warm-up calls are excluded.

- NumPy: Python's ``cProfile`` measures the CPU time of each function. A table maps some functions, such as the methods
  of ``Linear`` and ``LayerNorm``, to the kind of work that they do. The time of any other function is added to the time
  of its callers.
- PyTorch: ``torch.profiler`` measures the time of each operation.
- JAX and TensorFlow: The profilers of these frameworks measure the time of each XLA instruction. By default,
  TensorFlow's training step isn't compiled using XLA, so the profile of this step lists graph operations instead. The
  profiles don't distinguish the matmuls of attention from other matmuls. XLA uses its library YNN for both matmuls and
  sums; calls without a matmul are reported as ``sum_fusion``.

The remaining time is attributed to Python. ``--form compiled`` selects the same compiled mode as ``parity bench
--peers``. ``--largest 20`` adds the names of functions or operations to the output.
"""

from __future__ import annotations

import argparse
import ast
import cProfile
import os
import pstats
import re
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

THREADS = (  # variables that frameworks read when they are imported
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PJRT_NPROC"),
    *("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"),
)
REST = "residual sums, masks and Python"
LOOPS = "other loops: sums, normalization, softmax, activations, optimizer"
PROGRAMS = "PROFILED_PROGRAMS"  # the environment variable with the directory to which XLA writes compiled programs
WARM = 2  # number of warm-up calls, the first of which compiles
Names = Mapping[str, float]  # seconds, keyed by function or operation

XLA = {
    r"^(ynn_|dot|\w*dot_general|[Mm]at[Mm]ul)": "matmuls",
    r"gather|scatter|dynamic|concatenate": "indexing",
    r"^(\w*_)?(copy|transpose)(_bitcast)?_fusion|^copy|^transpose": "copies and transposes",
    r"_fusion$|^wrapped_|reduce|broadcast": LOOPS,
}
KINDS = {  # name patterns with their kinds; the first matching pattern applies
    "numpy": {  # qualified names
        r"Linear\.|OutputProjection\.": "linear layers",
        r"scaled_dot_product|^attend|KeyValueCache\.": "attention",
        r"^(relu|gelu|gelu_tanh|swish)": "activations",
        r"LayerNorm\.": "normalization",
        r"^cross_entropy": "loss",
        r"Adam\.|^global_norm": "optimizer",
        r"Embedding\.": "embedding",
        r"^_next_log_probabilities|(Greedy|Beam)\.step": "choice of tokens",
    },
    "torch": {
        r"reorder_linear_weight": "weights laid out for few rows",
        r"scaled_dot_product|^aten::bmm|^aten::baddbmm": "attention",
        r"log_softmax|nll_loss|cross_entropy": "loss, or choice of tokens",
        r"addmm|::mm$|linear|mkl": "linear layers",
        r"^aten::(max|argmax|sort|topk|amax)$": "loss, or choice of tokens",
        r"layer_norm": "normalization",
        r"silu|relu|gelu|sigmoid": "activations",
        r"adam|vector_norm|foreach": "optimizer",
        r"embedding|index_put": "embedding",
        r"copy_|clone|::cat$|::fill_$|zero_": "copies and zeros",
    },
    "tf": {
        r"MatMul": "matmuls",
        r"LogSoftmax|CrossEntropy": "loss",
        r"ResourceApply|^L2Loss|^AssignSub|^Assign": "optimizer",
        r"Gather|Segment|Scatter|Concat|Slice|^Pad": "indexing",
        r"^(_Mkl)?(Transpose|BroadcastTo|Tile|ZerosLike|Fill|Cast)$": "copies and transposes",
        **XLA,
        r"^(?!Python)(_Mkl)?[A-Z]": LOOPS,
    },
    "jax": XLA,
}


def numpy_names(run: Callable[[], Any], calls: int) -> Names:
    """Return the CPU time of each function to which ``KINDS`` assigns a kind of work.

    The time of any other function is added to the time of the functions that call it.
    """
    profile = cProfile.Profile(time.process_time)
    for _ in range(calls):
        profile.runcall(run)
    found: dict[str, float] = defaultdict(float)
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    names = {function: qualified(*function) for function in stats}

    def give(function: tuple[str, int, str], seconds: float, above: frozenset[Any]) -> None:
        """Add seconds to the time of a function or, if ``KINDS`` doesn't list the function, to the time of its callers.

        The seconds are divided among the callers in proportion to how long the function runs on behalf of each caller.
        """
        callers = {caller: of[2] for caller, of in stats[function][4].items() if caller not in above}
        whole = sum(callers.values())
        if kind_of("numpy", names[function]) != REST or not whole:
            found[names[function]] += seconds
            return
        for caller, part in callers.items():
            give(caller, seconds * part / whole, above | {function})

    for function, (_, _, own, _, _) in stats.items():
        if own:
            give(function, own, frozenset())
    return found


def qualified(file: str, line: int, name: str) -> str:
    """Return the name of a function, with the name of its class as a prefix, because cProfile omits the class."""
    return f"{_classes(file).get((line, name), '')}{name}" if "reference_numpy" in file else name


@cache
def _classes(file: str) -> dict[tuple[int, str], str]:
    tree = ast.parse(Path(file).read_text("utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    methods = [(owner, node) for owner in classes for node in owner.body if isinstance(node, ast.FunctionDef)]
    return {(node.lineno, node.name): f"{owner.name}." for owner, node in methods}


def torch_names(run: Callable[[], Any], calls: int) -> Names:
    """Return the time spent in each operation itself, and the remaining time, which is attributed to Python."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as found:
        start = time.perf_counter()
        for _ in range(calls):
            run()
        whole = time.perf_counter() - start
    names = {event.key: event.self_cpu_time_total / 1e6 for event in found.key_averages()}
    return {**names, "Python": max(0.0, whole - sum(names.values()))}


def jax_names(run: Callable[[], Any], calls: int) -> Names:
    """Return the time spent in each XLA instruction, and the remaining time, which is attributed to Python.

    The keys are the names of the instructions, without their numeric suffixes.
    """
    import jax

    return traced(jax.profiler.trace, run, calls)


def tf_names(run: Callable[[], Any], calls: int) -> Names:
    """Return the time spent in each XLA instruction and each type of TensorFlow operation, and the remaining time.

    The remaining time is attributed to Python.
    """
    import tensorflow as tf

    return traced(tf.profiler.experimental.Profile, run, calls)


def traced(trace: Callable[[str], AbstractContextManager[Any]], run: Callable[[], Any], calls: int) -> Names:
    """Trace some calls, and return the time of each operation. JAX can read the traces of both JAX and TensorFlow.

    Raises:
        ValueError: If XLA didn't dump a compiled program, or if times overlap.
    """
    from jax.profiler import ProfileData

    with tempfile.TemporaryDirectory() as directory:
        with trace(directory):
            start = time.perf_counter()
            for _ in range(calls):
                run()
            whole = time.perf_counter() - start
        (file,) = Path(directory).rglob("*.xplane.pb")
        found = ProfileData.from_file(str(file))
    names: Counter[str] = Counter()
    has_matmul = matmuls(Path(os.environ[PROGRAMS]))
    for event in (event for plane in found.planes for line in plane.lines for event in line.events):
        operation = re.fullmatch(r"[^:]+:([A-Z_]\w+)", event.name)  # TensorFlow's names are PATH:TYPE
        stats = dict(event.stats)
        if "hlo_op" in stats:
            if not re.match(r"while|call|conditional", event.name):  # the operations that they run are separate events
                key = stats["hlo_module"], event.name
                if event.name.startswith("ynn_") and key not in has_matmul:
                    raise ValueError(f"the XLA dump does not contain {event.name} of {stats['hlo_module']}")
                name = re.sub(r"\.\d+$", "", event.name)
                names[name if has_matmul.get(key, True) else "sum_fusion"] += event.duration_ns / 1e9
        elif operation and not re.search(r"PartitionedCall|Xla|(While|If|Case)$|inference", operation[1]):
            names[operation[1]] += event.duration_ns / 1e9
    if sum(names.values()) > 1.02 * whole:
        raise ValueError(
            f"the parts take {sum(names.values()):.2f} s, but the whole call takes only {whole:.2f} s: parts overlap"
        )
    return {**names, "Python": max(0.0, whole - sum(names.values()))}


def matmuls(programs: Path) -> dict[tuple[str, str], bool]:
    """Return, for each YNN call (program name, instruction name), whether the call contains a matmul."""
    found: dict[tuple[str, str], bool] = {}
    for file in programs.glob("*cpu_after_optimizations.txt"):
        text = file.read_text()
        (program,) = re.findall(r"^HloModule ([\w.\-]+)", text)
        bodies = dict(re.findall(r"^%?([\w.\-]+) \(.*?\{\n(.*?)^\}", text, re.DOTALL | re.MULTILINE))
        for name, body in re.findall(r"%?(ynn_fusion[\w.\-]*) = .* fusion\(.*calls=%?([\w.\-]+)", text):
            key = program, name  # multiple programs can have this key; the value is True if any of them has a matmul
            found[key] = found.get(key, False) or " dot(" in bodies[body]
    return found


PROFILERS: dict[str, Callable[[Callable[[], Any], int], Names]] = {
    "numpy": numpy_names,
    "torch": torch_names,
    "jax": jax_names,
    "tf": tf_names,
}


def kind_of(backend: str, name: str) -> str:
    """Return the kind of work that a function or operation does: the first match in ``KINDS``, or ``REST``."""
    return next((kind for pattern, kind in KINDS[backend].items() if re.search(pattern, name)), REST)


def runner(options: argparse.Namespace) -> Callable[[], Any]:
    """Return a function that runs the workload once."""
    import reference_numpy as ref
    from transformer_bench.implementations import FORMS, OURS
    from transformer_bench.workload import DecodeWork, ForwardWork, TrainWork

    work = {"forward": ForwardWork, "train": TrainWork, "decode": DecodeWork}[options.task](options.config)
    implementation = (FORMS if options.form else OURS)[options.task][options.backend]
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "model.safetensors"
        ref.save_weights(file, work.config, work.weights())
        implementation.prepare()
        implementation.load(work, file)
    return implementation.run


def main() -> None:
    """Print the percentage of time spent on each kind of work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("forward", "train", "decode"))
    parser.add_argument("backend", choices=PROFILERS)
    parser.add_argument("--config", default="base", help="use a model of this size (default: %(default)s)")
    parser.add_argument("--form", choices=("compiled",), help="use the compiled mode (default: the default mode)")
    parser.add_argument("--calls", type=int, default=3, help="profile this many calls (default: %(default)s)")
    parser.add_argument(
        "--largest",
        type=int,
        default=0,
        metavar="N",
        help="also print the N functions or operations that take the most time",
    )
    options = parser.parse_args()
    os.environ.update(dict.fromkeys(THREADS, "1"))
    with tempfile.TemporaryDirectory() as programs:
        flags = f"--xla_dump_to={programs} --xla_dump_hlo_as_text"
        os.environ.update(XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} {flags}", JAX_ENABLE_COMPILATION_CACHE="false")
        os.environ[PROGRAMS] = programs
        run = runner(options)
        for _ in range(WARM):
            run()
        names = PROFILERS[options.backend](run, options.calls)
    whole = sum(names.values())
    kinds: dict[str, float] = defaultdict(float)
    for name, seconds in names.items():
        kinds[kind_of(options.backend, name)] += seconds
    print(f"{1e3 * whole / options.calls:,.0f} ms per call, one thread")
    for kind, seconds in sorted(kinds.items(), key=lambda item: -item[1]):
        print(f"{seconds / whole:6.1%}  {kind}")
    for name, seconds in Counter(names).most_common(options.largest):
        print(f"{seconds / whole:6.1%}  {name}: {kind_of(options.backend, name)}")


if __name__ == "__main__":
    main()
