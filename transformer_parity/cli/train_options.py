"""The options of ``parity train`` and their help."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from transformer_parity.apps.train.corpora import RECIPES
from transformer_parity.apps.train.log import CURVE, LOG, MODEL
from transformer_parity.cli.options import FALLBACK_HELP, add_backends, add_machine, parallel_plan, positive
from transformer_spec.presets import PRESETS

SUBWORDS = RECIPES["text"].vocab_size

EXAMPLES = f"""\
examples:
  parity train --task dates --backend jax                   the dates, to more than 99 % exact matches in minutes
  parity train --text train.en.gz train.de.gz --held-out val.en.gz val.de.gz --backend torch
  parity train --resume runs/dates-jax --backend tf         continue in another framework, with exactly the same state
  parity train --task dates --backend torch,jax,tf --steps 100 --dtype float64
                                                            in lockstep: same weights, same batches, no dropout

  parity train --task dates --backend torch --parallel data=2,fsdp=2
                                                            on 4 devices of this machine: 4 processes of PyTorch
  torchrun --nproc-per-node 8 --no-python parity train --resume RUN --backend torch --parallel fsdp=8 --device gpu
                                                            on 8 GPUs; the launcher starts the processes

what a run leaves in its folder:
  checkpoint-*.safetensors   config, weights, optimizer state, position in the data, vocabulary
  {MODEL:24}   the final weights, for load_transformer and `parity translate`
  {LOG:24}   one JSON object a line
  {CURVE:24}   the curves of the losses and of the score
Every backend can continue from a checkpoint of any other. Ctrl-C and SIGTERM finish the step, save, and print how to
continue. A second run in the same folder is refused until the first has ended. If the text has moved, name it:
--resume RUN --text SOURCE TARGET.

on several devices: --parallel says how they share each step, and --processes how many processes have them; they are
started here, and end together, whatever ends one. Under torchrun, under srun, or where JAX_COORDINATOR_ADDRESS or
TF_CONFIG is set, the processes are there already, and each is given the same command line. The batches, the loss, the
masks of dropout and the norm that is clipped are those of one device, so that a run ends with the same weights on any
plan, but for rounding, and can be continued on any other, in any backend. The first process writes and prints. PyTorch
needs a process for each device; JAX and TensorFlow divide the CPU of one process, and TensorFlow has copies only
(data=N); NumPy computes the shares one after another.

exit code: 0 finished, 3 not started, failed, or Ctrl-C pressed twice, 130 stopped by Ctrl-C, 143 by SIGTERM
"""


def add_options(commands: Any) -> argparse.ArgumentParser:
    """Describe the command and its options, and return its parser."""
    parser = commands.add_parser(
        "train",
        description="Train a Transformer on generated dates or on your own parallel text: token-bucketed batches, the "
        "paper's schedule, label smoothing and Adam, validation, and checkpoints that every backend can continue.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what to train on: one of these, and with --resume the text that has moved")
    what.add_argument("--task", choices=["dates"], help="human-written dates to ISO 8601, generated as needed")
    what.add_argument("--text", nargs=2, type=Path, metavar=("SOURCE", "TARGET"), help="two line-aligned files")
    what.add_argument("--held-out", nargs=2, type=Path, metavar=("SOURCE", "TARGET"), help="text to validate on")
    what.add_argument("--resume", type=Path, metavar="RUN", help="continue from a run's folder, or from one checkpoint")
    add_backends(parser, None, FALLBACK_HELP)
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the run goes (default: runs/TASK-BACKEND)")

    length = parser.add_argument_group("length")
    for name, what in {
        "steps": _default("steps of the whole run", "steps"),
        "stop-at": "stop after this step, to be continued later",
        "validate-every": "steps between validations (default: a tenth of the run)",
        "save-every": "steps between checkpoints (default: a tenth of the run)",
        "keep": "how many checkpoints to keep (default: as many as --average)",
        "average": _default("how many of the last checkpoints to average at the end", "average"),
    }.items():
        length.add_argument(f"--{name}", type=positive, metavar="N", help=what)

    model = parser.add_argument_group("model")
    model.add_argument(
        "--preset", choices=list(PRESETS), metavar="NAME", help="whose conventions (default: paper_base)"
    )
    for name, what in {
        "d-model": _default("width", "d_model"),
        "d-ff": _default("inner width", "d_ff"),
        "heads": _default("attention heads", "num_heads"),
        "layers": _default("layers in each stack", "num_encoder_layers"),
        "vocab-size": f"subwords of --text (default: {SUBWORDS})",
    }.items():
        model.add_argument(f"--{name}", type=positive, metavar="N", help=what)
    model.add_argument("--dropout", type=float, metavar="P", help=_default("dropout rate", "dropout"))
    model.add_argument(
        "--set",
        action="append",
        metavar="FIELD=VALUE",
        help="any other field of the config, such as embedding_norm=true",
    )

    optimizer = parser.add_argument_group("optimizer")
    optimizer.add_argument(
        "--tokens", type=positive, metavar="N", help=_default("tokens of a batch, padding included", "tokens_per_batch")
    )
    optimizer.add_argument(
        "--factor",
        type=float,
        metavar="X",
        help=_default("factor of the learning rate in equation (3)", "learning_rate_factor"),
    )
    optimizer.add_argument(
        "--warmup", type=positive, metavar="N", help=_default("steps in which the rate rises", "warmup_steps")
    )
    optimizer.add_argument(
        "--cooldown",
        type=int,
        metavar="N",
        help=_default("last steps, in which the rate falls to zero", "cooldown_steps"),
    )
    optimizer.add_argument(
        "--clip", type=float, metavar="X", help="clip the gradient to this norm (default: no clipping)"
    )
    optimizer.add_argument(
        "--accumulate", type=positive, metavar="N", help="split each batch into N slices, to save memory"
    )
    optimizer.add_argument(
        "--mixed-bfloat16", action="store_true", default=None, help="compute in bfloat16 with float32 weights"
    )
    optimizer.add_argument(
        "--activation-checkpointing",
        action="store_true",
        default=None,
        help="keep each layer's input alone, and compute the rest again in the backward pass, to save memory",
    )
    optimizer.add_argument("--seed", type=int, metavar="N", help="seed of weights, batches and dropout (default: 0)")

    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--dtype", choices=["float64", "float32"], help="of the weights (default: float32, or that of the run)"
    )
    add_machine(machine)
    machine.add_argument(
        "--parallel",
        type=parallel_plan,
        metavar="PLAN",
        help="share each step among devices, as by data=2,fsdp=2,tensor=2: copies of the model, parts of each "
        "parameter, parts of the heads and of the feed-forward network (default: one device)",
    )
    machine.add_argument(
        "--processes",
        type=positive,
        metavar="N",
        help="how many processes of this machine have these devices (default: one for each in torch, else one)",
    )
    return parser


def _default(what: str, field: str) -> str:
    """Return the help of an option, with the default of each task."""
    dates, text = (
        {**vars(recipe), **recipe.model, **recipe.training}[field] for recipe in (RECIPES["dates"], RECIPES["text"])
    )
    return f"{what} (default: {dates} for dates, {text} for text)"
