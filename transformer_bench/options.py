"""The options of ``parity bench`` and their help."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

from transformer_bench.participants import OURS
from transformer_bench.workload import SIZES, DecodeWork, Work
from transformer_parity.cli.options import add_backends, parallel_plan, positive
from transformer_parity.engine.style import FORMATS
from transformer_parity.engine.system.machine import processors
from transformer_parity.transformer.ports.registry import PORTS

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

tasks:
  forward  Compute the logits of a batch of sentences in inference mode: eagerly in
           NumPy and PyTorch, with a compiled function in JAX and TensorFlow.
  train    Train on a batch of sentences repeatedly: forward, backward, and an update
           with Adam. The loss of every step must equal the loss of the reference, so
           there is no dropout by default. With --dropout, each implementation drops
           different elements, and losses are compared within a wide tolerance.
  decode   Translate a batch of random sentences with a random model that never ends
           a sentence before the maximum length, so that all implementations generate
           the same number of tokens.

With --parallel, our packages also train on several devices of this machine. On CPUs,
each device is a process with a share of the threads; NumPy simulates the devices in
one process. Devices that share two cores measure the overhead of the split, not the
gain. A second table lists the bytes that each device sends in a step and holds. They
are computed from the plan. --rounds 0 prints only this table, also for plans with
more devices than this machine has.
"""

SIZES_HELP = """\
sizes: tiny is d_model 128, 2+2 layers, vocabulary 1,000; small 256, 3+3, 8,000;
base 512, 6+6, 37,000 and big 1,024, 6+6, 37,000, the paper's. The conventions are
those of the preset marian.
"""

EXAMPLES = """\
examples:
  parity bench forward                                  all four, small
  parity bench forward --peers --plot forward.png       beside torch.nn.Transformer, Marian, a Flax NNX model,
                                                        Keras hub, and the matrix products alone
  parity bench forward --config base --json base.json   the paper's size, every number into a file
  parity bench forward --scale source --batch 1 --plot growth.png    sources of 64 up to 8,192 tokens: time and memory
  parity bench forward --scale depth=1,2,4,8            1+1 up to 8+8 layers
  parity bench forward --dtype bfloat16 --device gpu --backends torch,jax
  parity bench train --peers --threads 2                beside torch.nn.Transformer, Marian, Flax NNX and Keras hub
  parity bench train --dropout 0.1                      with the paper's dropout
  parity bench train --scale length --activation-checkpointing --backends torch
  parity bench train --backends torch --parallel data=2 --parallel fsdp=2 --parallel data=4
  parity bench train --config big --batch 512 --rounds 0 --parallel fsdp=8 --parallel data=2,fsdp=8
  parity bench decode --peers --plot decode.png         beside Hugging Face's MarianMTModel, Flax NNX, Keras hub, and
                                                        the matrix products alone: a lower bound for NumPy
  parity bench decode --beam 4 --backends numpy,torch   beam search
  parity bench decode --dtype bfloat16 --backends torch  weights of half the size, sums in float32
  parity bench decode --scale vocabulary --batch 1      vocabularies of 1,000 up to 256,000

`python -m transformer_bench.imports` times importing each package beside its framework.
"""

READING = """
reading the table: `times` is the median of the ratios within each round, with the
lowest and the highest; tokens count padding too. GFLOP/s counts matrix products only. `of the limit`: the time
that they take at the best rate of this machine, over the time of the row. That rate is
measured in each round: one large product by each library in use, and reading as
much as the model's weights; a training step also reads and writes what Adam needs.
`cores` is how many the process kept
busy. `first call` includes compiling. Memory is the most that the process held in a
round, and how much more that was than before its first call; of several processes, that
of the one with the most.
"""

EXIT = """
exit code: 0 all agree and are timed, 1 a result does not agree, 3 not everything was timed
"""


ONLY = {  # option: the task it is about
    "beam": "decode",
    "dropout": "train",
    "activation_checkpointing": "train",
    "parallel": "train",
}


def add_options(commands: Any) -> argparse.ArgumentParser:
    """Describe the command and its options, and return its parser."""
    parser = commands.add_parser(
        "bench",
        description=DESCRIPTION,
        epilog=f"{SIZES_HELP}\n{EXAMPLES}{READING}{EXIT}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("task", choices=OURS, metavar="TASK", help=f"what to time: {', '.join(OURS)}")
    add_backends(parser, list(PORTS))
    parser.add_argument(
        "--peers", action="store_true", help="also other implementations, and the matrix products alone"
    )
    _add_work(parser)
    _add_measurement(parser)
    return parser


def _add_work(parser: argparse.ArgumentParser) -> None:
    """Add the options of the work."""
    work = parser.add_argument_group("the work")
    work.add_argument(
        "--config",
        choices=SIZES,
        default=Work.size,
        help="size of the model (default: %(default)s); --scale depth=N changes the layers of each stack",
    )
    for name, what in (
        ("batch", "sentences"),
        ("source", "tokens of the longest source sentence"),
        ("target", "tokens of the longest target sentence; of each, when decoding"),
    ):
        usual, decoding = getattr(Work, name), getattr(DecodeWork, name)
        usual = f"{usual}" if usual == decoding else f"{usual}; for decode {decoding}"
        work.add_argument(f"--{name}", type=positive, metavar="N", help=f"{what} (default: {usual})")
    work.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the computation (default: %(default)s)",
    )
    work.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="where to compute (default: %(default)s)")
    work.add_argument(
        "--beam", type=positive, metavar="K", help="decode: beam search, keeping K hypotheses (default: greedy)"
    )
    work.add_argument(
        "--dropout", type=rate, metavar="RATE", help="train: dropout of embeddings and residuals (default: none)"
    )
    work.add_argument(
        "--activation-checkpointing",
        action="store_true",
        help="train: recompute layers in the backward pass, to save memory; our packages only",
    )
    work.add_argument(
        "--parallel",
        type=parallel_plan,
        action="append",
        default=[],
        metavar="PLAN",
        help="train: also on several devices, such as data=2,fsdp=2, and what each sends and holds; may be repeated",
    )


def _add_measurement(parser: argparse.ArgumentParser) -> None:
    """Add the options of the rounds and of what is written."""
    measurement = parser.add_argument_group("measurement")
    threads = min(2, processors())
    measurement.add_argument(
        "--threads", type=positive, default=threads, metavar="N", help=f"threads of each process (default: {threads})"
    )
    measurement.add_argument(
        "--rounds", type=rounds, default=7, metavar="N", help="how many rounds (default: %(default)s); train: or none"
    )
    measurement.add_argument(
        "--scale",
        type=growth,
        metavar="AXIS[=N,N,...]",
        help=f"let {', '.join(GROWTH)} grow: time and memory at each size, and the exponents of their growth",
    )
    measurement.add_argument("--json", type=Path, metavar="FILE", help="also write the result for machines")
    measurement.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help=f"also draw a bar for each, or with --scale a line; the name ends in {', '.join(FORMATS)}",
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
