"""The options of ``parity bench`` and their help texts."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

from transformer_bench.implementations import OURS
from transformer_bench.workload import SIZES, DecodeWork, Work
from transformer_parity.cli.options import add_backends, parallel_plan, positive
from transformer_parity.engine.style import FORMATS
from transformer_parity.engine.system.machine import processors
from transformer_parity.transformer.ports.registry import PORTS

GROWTH = {  # the axes of --scale, with their default sizes
    "source": (64, 128, 256, 512, 1024, 2048, 4096, 8192),
    "target": (64, 128, 256, 512, 1024),
    "length": (64, 128, 256, 512, 1024, 2048, 4096, 8192),
    "batch": (1, 2, 4, 8, 16, 32),
    "depth": (1, 2, 4, 8, 16),
    "vocabulary": (1_000, 4_000, 16_000, 64_000, 256_000),
}

DESCRIPTION = """\
Time the packages on the same work, running each package as its users would.

Each implementation runs in a separate process with the same number of threads.
After all of them are loaded and warmed up, the rounds start. In each round, every
implementation runs once while all others wait, so that changes in the machine's
speed affect all implementations equally. The reported ratios are medians of the ratios
within each round. If a result does not agree with the reference, its time is not
reported. Do not run anything else on the machine during a benchmark.

tasks:
  forward  Compute the logits of a batch of sentences in inference mode. NumPy and
           PyTorch run eagerly, and JAX and TensorFlow run a compiled function.
  train    Repeat training steps on one batch of sentences: forward pass, backward
           pass, and Adam update. The loss of every step must agree with the
           reference, so dropout is disabled by default. With --dropout, each
           implementation drops different elements, and the losses have to agree only
           within a wide tolerance.
  decode   Translate a batch of random sentences using a random model. The model never
           generates EOS, so that all implementations generate the same number of
           tokens.

With --parallel, the packages also train on multiple devices of this machine. On CPUs,
each device is a process with an equal number of threads. NumPy simulates the
devices in one process. If the devices share the same cores, the result shows the
overhead of parallelism rather than the speedup. A second table lists the bytes that
each device stores and sends per step. These values are computed from the plan, not measured.
--rounds 0 prints only the second table, and also supports plans that require more
devices than this machine has.
"""

SIZES_HELP = """\
sizes for --config (all use the conventions of the `marian` preset):
  tiny   d_model 128,   2+2 layers, vocabulary 1,000
  small  d_model 256,   3+3 layers, vocabulary 8,000
  base   d_model 512,   6+6 layers, vocabulary 37,000 (the paper's base model)
  big    d_model 1,024, 6+6 layers, vocabulary 37,000 (the paper's big model)
"""

EXAMPLES = """\
examples:
  parity bench forward                                  time all four packages with a small model
  parity bench forward --peers --plot forward.png       also time torch.nn.Transformer, Marian, Flax NNX, KerasHub,
                                                        and only the matrix multiplications
  parity bench forward --config base --json base.json   use the paper's base size, and write all results to a file
  parity bench forward --scale source --batch 1 --plot growth.png    increase the source length from 64 to 8,192 tokens
  parity bench forward --scale depth=1,2,4,8            increase the number of layers from 1+1 to 8+8
  parity bench forward --dtype bfloat16 --device gpu --backends torch,jax
  parity bench train --peers --threads 2                also time torch.nn.Transformer, Marian, Flax NNX, and KerasHub
  parity bench train --dropout 0.1                      use the paper's dropout
  parity bench train --scale length --activation-checkpointing --backends torch
  parity bench train --backends torch --parallel data=2 --parallel fsdp=2 --parallel data=4
  parity bench train --config big --batch 512 --rounds 0 --parallel fsdp=8 --parallel data=2,fsdp=8
  parity bench decode --peers --plot decode.png         also time Hugging Face's MarianMTModel, Flax NNX, KerasHub,
                                                        and only the matrix multiplications (a lower bound for NumPy)
  parity bench decode --beam 4 --backends numpy,torch   use beam search
  parity bench decode --dtype bfloat16 --backends torch  use bfloat16 weights with float32 accumulation
  parity bench decode --scale vocabulary --batch 1      increase the vocabulary from 1,000 to 256,000

To measure the import time of each package and its framework, run `python -m transformer_bench.imports`.
"""

READING = """
table columns:
  tokens/s     target tokens per second, including padding
  times NAME   median, lowest, and highest ratio to the fastest implementation within a round
  GFLOP/s      throughput, counting only matrix multiplications
  of the peak  minimum possible time for the work on this machine, divided by the measured time. The minimum follows
               from the best matmul throughput and memory bandwidth of all libraries, which are measured in each round.
  cores        average number of busy CPU cores
  first call   time of the first call, including compilation
  memory       peak memory of the process during a round, and its increase since the start of the first call (for
               multiple processes, the maximum)
"""

EXIT = """
exit code: 0 all results agree and were timed, 1 a result does not agree, 3 not everything was timed
"""


ONLY = {  # for each option, the only task that supports it
    "beam": "decode",
    "dropout": "train",
    "activation_checkpointing": "train",
    "parallel": "train",
}


def add_options(commands: Any) -> argparse.ArgumentParser:
    """Add the command and its options, and return its parser."""
    parser = commands.add_parser(
        "bench",
        description=DESCRIPTION,
        epilog=f"{SIZES_HELP}\n{EXAMPLES}{READING}{EXIT}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("task", choices=OURS, metavar="TASK", help=f"time this task: {', '.join(OURS)}")
    add_backends(parser, list(PORTS))
    parser.add_argument(
        "--peers",
        action="store_true",
        help="also time implementations from other projects, and a run that computes only the matrix multiplications",
    )
    _add_work(parser)
    _add_measurement(parser)
    return parser


def _add_work(parser: argparse.ArgumentParser) -> None:
    """Add the options that define the workload."""
    work = parser.add_argument_group("work")
    work.add_argument(
        "--config",
        choices=SIZES,
        default=Work.size,
        help="use a model of this size, as listed below; --scale depth=N changes the number of layers (default: "
        "%(default)s)",
    )
    for name, what in (
        ("batch", "use batches of N sentences"),
        ("source", "set the length of the longest source sentence to N tokens"),
        ("target", "set the length of the longest target sentence (for decode, of every target sentence) to N tokens"),
    ):
        usual, decoding = getattr(Work, name), getattr(DecodeWork, name)
        usual = f"{usual}" if usual == decoding else f"{decoding} for decode, otherwise {usual}"
        work.add_argument(f"--{name}", type=positive, metavar="N", help=f"{what} (default: {usual})")
    work.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="compute in this dtype (default: %(default)s)",
    )
    work.add_argument(
        "--device", choices=("cpu", "gpu"), default="cpu", help="run on this device (default: %(default)s)"
    )
    work.add_argument(
        "--beam", type=positive, metavar="K", help="decode: use beam search with K beams (default: greedy search)"
    )
    work.add_argument(
        "--dropout", type=rate, metavar="RATE", help="train: apply dropout to embeddings and residuals (default: none)"
    )
    work.add_argument(
        "--activation-checkpointing",
        action="store_true",
        help="train: recompute activations in the backward pass to use less memory; not supported with --peers",
    )
    work.add_argument(
        "--parallel",
        type=parallel_plan,
        action="append",
        default=[],
        metavar="PLAN",
        help="train: also train on multiple devices with this plan, such as data=2,fsdp=2, and list the bytes that "
        "each device sends and stores; can be repeated",
    )


def _add_measurement(parser: argparse.ArgumentParser) -> None:
    """Add the options that control the measurement and the output files."""
    measurement = parser.add_argument_group("measurement")
    threads = min(2, processors())
    measurement.add_argument(
        "--threads",
        type=positive,
        default=threads,
        metavar="N",
        help=f"use N threads for each implementation (default: {threads})",
    )
    measurement.add_argument(
        "--rounds",
        type=rounds,
        default=7,
        metavar="N",
        help="measure N rounds; 0 measures nothing and is allowed only for the train task with --parallel "
        "(default: %(default)s)",
    )
    measurement.add_argument(
        "--scale",
        type=growth,
        metavar="AXIS[=N,N,...]",
        help=f"measure multiple sizes along one axis ({', '.join(GROWTH)}), and fit growth exponents to time and "
        "memory",
    )
    measurement.add_argument("--json", type=Path, metavar="FILE", help="also write the result as JSON")
    measurement.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help=f"also plot the times as bars, or as lines with --scale; the name of FILE must end in "
        f".{' or .'.join(FORMATS)}",
    )


def rounds(text: str) -> int:
    """Parse a nonnegative integer for argparse."""
    return 0 if text == "0" else positive(text)


def rate(text: str) -> float:
    """Parse a number in [0, 1) for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0 and less than 1: got {text!r}")
    return value


def growth(text: str) -> tuple[str, tuple[int, ...]]:
    """Parse an axis and, optionally, its sizes for argparse."""
    axis, given, values = text.partition("=")
    if axis not in GROWTH:
        raise argparse.ArgumentTypeError(f"must start with one of {', '.join(GROWTH)}: got {text!r}")
    sizes = tuple(positive(value) for value in values.split(",")) if given else GROWTH[axis]
    if any(after <= before for before, after in itertools.pairwise(sizes)):
        raise argparse.ArgumentTypeError(f"sizes must be in increasing order: got {values}")
    return axis, sizes
