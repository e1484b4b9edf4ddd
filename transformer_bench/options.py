"""The options of ``parity bench`` and their help."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformer_bench.participants import OURS
from transformer_bench.workload import SIZES, DecodeWork, Work
from transformer_parity.cli.options import add_backends, parallel_plan, positive
from transformer_parity.engine.style import FORMATS
from transformer_parity.engine.system.machine import processors
from transformer_parity.transformer.ports.registry import PORTS

Run = Callable[[argparse.Namespace], int]

GROWTH = {  # what --scale lets grow, and its default sizes
    "source": (64, 128, 256, 512, 1024, 2048, 4096, 8192),
    "target": (64, 128, 256, 512, 1024),
    "length": (64, 128, 256, 512, 1024, 2048, 4096, 8192),
    "batch": (1, 2, 4, 8, 16, 32),
    "depth": (1, 2, 4, 8, 16),
    "vocabulary": (1_000, 4_000, 16_000, 64_000, 256_000),
}

DESCRIPTION = """\
Time the packages on the same work, each as its users run it.

Each runs in a process of its own, with the same number of threads. All are
started, loaded and warmed up first; then come the rounds. Each implementation runs
once per round, while all others wait, so that a change of the machine's speed
affects all of them. Ratios are taken within a round, and then their median.

No time is printed for a result that does not agree with the reference.

Run nothing else meanwhile: other load slows them down unequally.
"""

SIZES_HELP = """
Sizes: tiny is d_model 128, 2+2 layers, vocabulary 1,000; small 256, 3+3, 8,000;
base 512, 6+6, 37,000 and big 1,024, 6+6, 37,000, the paper's. The conventions are
those of the preset marian.
"""

DESCRIPTIONS = {
    "forward": """\
Compute the logits of a batch of sentences, in inference mode: eagerly in NumPy and
PyTorch, by a compiled function in JAX and TensorFlow.
""",
    "train": """\
Train on a batch of sentences repeatedly: forward, backward and an update by
Adam. The loss of every step has to be the reference's. That is why there is no
dropout by default; with --dropout, each implementation drops other elements, and
losses are compared within a wide tolerance.

With --parallel, our packages also train on several devices of this machine. On CPUs
each device is a process, which has its part of the threads; NumPy simulates them in
one. Devices that share two cores show what dividing costs, not what it gains. A second
table has the bytes that each device sends in a step and holds, computed from the plan;
with --rounds 0 it is all there is, for plans of more devices than there are here.
""",
    "decode": """\
Translate a batch of sentences: random ones, by a random model that never ends a
sentence before the maximum length, so that all generate the same number of tokens.
""",
    "compile": """\
Time the first call and a later one: the difference is compilation.
Forward pass, training step and greedy search, each in a fresh process.
""",
    "import": """\
Import each package, and its framework alone, each in a fresh process: the difference
is what the package adds.
""",
}

EXAMPLES = {
    "forward": """\
  parity bench forward                                  all four, small
  parity bench forward --peers --plot forward.png       beside torch.nn.Transformer, Marian, a Flax NNX model,
                                                        Keras hub, and the matrix products alone
  parity bench forward --config base --json base.json   the paper's size, every number into a file
  parity bench forward --scale source --batch 1 --plot growth.png    sources of 64 up to 8,192 tokens: time and memory
  parity bench forward --scale depth=1,2,4,8            1+1 up to 8+8 layers
  parity bench forward --dtype bfloat16 --device gpu --backends torch,jax
""",
    "train": """\
  parity bench train                                    all four, small
  parity bench train --peers --threads 2                beside torch.nn.Transformer, Marian, Flax NNX and Keras hub
  parity bench train --dropout 0.1                      with the paper's dropout
  parity bench train --scale length --activation-checkpointing --backends torch
  parity bench train --backends torch --parallel data=2 --parallel fsdp=2 --parallel data=4
  parity bench train --config big --batch 512 --rounds 0 --parallel fsdp=8 --parallel data=2,fsdp=8
""",
    "decode": """\
  parity bench decode                                   all four, small
  parity bench decode --backends numpy,torch --config tiny
  parity bench decode --peers --plot decode.png         beside Hugging Face's MarianMTModel, Flax NNX, Keras hub, and
                                                        the matrix products alone: a lower bound for NumPy
  parity bench decode --beam 4 --against torch          beam search; how many times as long as torch
  parity bench decode --config base --json decode.json  the paper's size, every number into a file
  parity bench decode --dtype bfloat16 --backends torch  weights of half the size, sums in float32
  parity bench decode --scale vocabulary --batch 1      vocabularies of 1,000 up to 256,000
""",
    "compile": """\
  parity bench compile --backends jax,tf
  parity bench compile --peers --json compile.json
""",
    "import": """\
  parity bench import
  parity bench import --backends torch --rounds 20
""",
}

READING = """
reading the table: `times` is the median of the ratios within each round, with the
lowest and the highest; tokens count padding too. GFLOP/s counts matrix products only. `of the limit`: the time
that they take at the best rate of this machine, over the time of the row. That rate is
measured in each round: one large product by each library that takes part, and reading as
much as the model's weights; a training step also reads and writes what Adam needs.
`cores` is how many the process kept
busy. `first call` includes compiling. Memory is the most that the process held in a
round, and how much more that was than before its first call; of several processes, that
of the one with the most.
"""

EXIT = """
exit code: 0 all agree and are timed, 1 a result does not agree, 3 not everything was timed
"""


def add_tasks(commands: Any, run: Mapping[str, Run]) -> None:
    """Describe the command and its tasks, each with the function that runs it."""
    parser = commands.add_parser(
        "bench",
        description=DESCRIPTION,
        epilog="Start with `parity bench forward --peers`.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tasks = parser.add_subparsers(title="what to time", metavar="TASK", required=True)
    for task, what in (
        ("forward", "logits of a batch"),
        ("train", "steps of Adam"),
        ("decode", "greedy or beam search with a cache"),
        ("compile", "first calls and later ones, of all three"),
        ("import", "each package, and its framework alone"),
    ):
        _add_task(tasks, task, what).set_defaults(run=run[task])


def _add_task(tasks: Any, task: str, what: str) -> argparse.ArgumentParser:
    """Describe a task and its options."""
    parser = tasks.add_parser(
        task,
        help=what,
        description=DESCRIPTIONS[task] + ("" if task == "import" else SIZES_HELP),
        epilog=f"examples:\n{EXAMPLES[task]}{READING if task in OURS else ''}{EXIT}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_backends(parser, list(PORTS))
    if task != "import":
        _add_work(parser, task)
    if task in OURS:
        parser.add_argument(
            "--against", metavar="NAME", help="print times as multiples of its time (default: of the fastest)"
        )
    if task != "compile":
        what = "how many rounds (default: %(default)s)" + "; 0 times nothing" * (task == "train")
        kind = rounds if task == "train" else positive
        parser.add_argument("--rounds", type=kind, default=7, metavar="N", help=what)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything for machines")
    if task != "compile":
        what = "a bar for each" if task not in OURS else "a bar for each, or with --scale a line"
        parser.add_argument(
            "--plot", type=Path, metavar="FILE", help=f"also draw {what}; the name ends in {', '.join(FORMATS)}"
        )
    return parser


def _add_work(parser: argparse.ArgumentParser, task: str) -> None:
    """Add the options of the work and of the participants."""
    default = DecodeWork if task == "decode" else Work
    parser.add_argument("--config", choices=SIZES, default=Work.size, help="size of the model (default: %(default)s)")
    parser.add_argument(
        "--peers", action="store_true", help="also other implementations, and the matrix products alone"
    )
    threads = min(2, processors())
    parser.add_argument(
        "--threads", type=positive, default=threads, metavar="N", help=f"threads of each process (default: {threads})"
    )
    for name, what in (
        ("batch", "sentences"),
        ("source", "tokens of the longest source sentence"),
        ("target", "tokens of the longest target sentence; of each, when decoding"),
    ):
        parser.add_argument(
            f"--{name}",
            *(["--tokens"] if name == "target" else []),
            type=positive,
            default=getattr(default, name),
            metavar="N",
            help=f"{what} (default: {getattr(default, name)})",
        )
    parser.add_argument("--layers", type=positive, metavar="N", help="in each stack (default: as in --config)")
    if task == "decode":
        parser.add_argument(
            "--beam", type=positive, metavar="K", help="beam search, keeping K hypotheses (default: greedy)"
        )
    if task == "train":
        parser.add_argument(
            "--dropout",
            type=rate,
            default=0.0,
            metavar="RATE",
            help="dropout of embeddings and residuals (default: none)",
        )
        parser.add_argument(
            "--activation-checkpointing",
            action="store_true",
            help="compute layers again in the backward pass, to save memory; our packages only",
        )
        parser.add_argument(
            "--parallel",
            type=parallel_plan,
            action="append",
            default=[],
            metavar="PLAN",
            help="also on several devices, such as data=2,fsdp=2, and what each sends and holds; may be repeated",
        )
    if task in OURS:
        parser.add_argument(
            "--dtype",
            choices=("float32", "bfloat16"),
            default="float32",
            help="of the computation (default: %(default)s)",
        )
    if task in OURS:
        parser.add_argument(
            "--scale",
            type=growth,
            metavar="AXIS[=N,N,...]",
            help=f"let {', '.join(GROWTH)} grow: time and memory at each size, and the exponents of their growth",
        )
    parser.add_argument(
        "--device", choices=("cpu", "gpu"), default="cpu", help="where to compute (default: %(default)s)"
    )


def rounds(text: str) -> int:
    """Return an argparse value: an integer that is not negative."""
    return 0 if text == "0" else positive(text)


def rate(text: str) -> float:
    """Return an argparse value: a number in [0, 1)."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"must be a number from 0 up to but not including 1: got {text!r}")
    return value


def growth(text: str) -> tuple[str, tuple[int, ...]]:
    """Return an argparse value: what grows, and the values it takes."""
    axis, given, values = text.partition("=")
    if axis not in GROWTH:
        raise argparse.ArgumentTypeError(f"must begin with one of {', '.join(GROWTH)}: got {text!r}")
    sizes = tuple(positive(value) for value in values.split(",")) if given else GROWTH[axis]
    if any(after <= before for before, after in itertools.pairwise(sizes)):
        raise argparse.ArgumentTypeError(f"must grow: got {values}")
    return axis, sizes
