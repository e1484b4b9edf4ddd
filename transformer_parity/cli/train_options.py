"""The options of ``parity train`` and their help texts."""

from __future__ import annotations

import argparse
import dataclasses
import textwrap
from pathlib import Path
from typing import Any

from transformer_parity.apps.train.corpora import RECIPES
from transformer_parity.apps.train.log import CURVE, LOG, MODEL
from transformer_parity.apps.train.run import RunPlan
from transformer_parity.cli.options import FALLBACK_HELP, add_backends, add_machine, field, parallel_plan, positive
from transformer_spec.config import TransformerConfig
from transformer_spec.presets import PRESETS
from transformer_spec.training_config import TrainingConfig

SUBWORDS = RECIPES["text"].vocab_size

MODEL_FIELDS = [
    entry.name
    for entry in dataclasses.fields(TransformerConfig)
    if entry.name not in ("source_vocab_size", "target_vocab_size")  # the corpus determines these fields
]
TRAINING_FIELDS = [entry.name for entry in dataclasses.fields(TrainingConfig) if entry.name != "total_steps"]
PLAN_FIELDS = [entry.name for entry in dataclasses.fields(RunPlan) if entry.name != "steps"]
RUN_FIELDS = [*PLAN_FIELDS, "tokens_per_batch"]
WITH_DEFAULTS = {
    "d_model": "model dimension",
    "d_ff": "inner dimension of the feed-forward network",
    "num_heads": "number of attention heads",
    "num_encoder_layers": "number of encoder layers",
    "num_decoder_layers": "number of decoder layers",
    "dropout": "dropout rate, or one rate per site as a JSON object",
    "tokens_per_batch": "batch size in tokens, including padding",
    "learning_rate_factor": "multiplier of the rate in equation (3) of the paper",
    "warmup_steps": "steps during which the learning rate increases",
    "cooldown_steps": "final steps during which the learning rate falls to 0",
    "average": "number of last checkpoints to average",
}
OTHER_FIELDS = {
    "keep": "number of checkpoints to keep (default: the value of average)",
    "save_every": "number of steps between checkpoints (default: 10% of the run)",
    "validate_every": "number of steps between validations (default: 10% of the run)",
    "clip_norm": "clip the gradient to this norm (default: null, no clipping)",
    "accumulation_steps": "number of micro-batches per batch; a higher number uses less memory (default: 1)",
    "mixed_bfloat16": "compute in bfloat16 with float32 weights (default: false)",
    "activation_checkpointing": "recompute activations in the backward pass to use less memory (default: false)",
}

EXAMPLES = """\
examples:
  parity train --task dates --backend jax                   learn to read dates: over 99% exact matches in minutes
  parity train --text train.en.gz train.de.gz --held-out val.en.gz val.de.gz --backend torch
  parity train --resume runs/dates-jax --backend tf         resume in a different framework, from exactly the same state
  parity train --task dates --backend torch,jax,tf --steps 100 --dtype float64
                                                            train in lockstep: same weights and batches, no dropout

  parity train --task dates --backend torch --parallel data=2,fsdp=2
                                                            use 4 devices of this machine, with 4 PyTorch processes
  torchrun --nproc-per-node 8 --no-python parity train --resume RUN --backend torch --parallel fsdp=8 --device gpu
                                                            use 8 GPUs; torchrun starts the processes
  parity train --text train.en train.de --set d_model=512 num_heads=8 d_ff=2048 num_encoder_layers=6
    num_decoder_layers=6 warmup_steps=4000                  train the paper's base model
"""
SETTINGS = """
fields of --set (values are JSON or plain strings; a resumed run accepts only validate_every, save_every, keep, and
average):
"""
DIRECTORY = f"""

files in the run directory:
  checkpoint-*.safetensors   config, weights, optimizer state, position in the data, and vocabulary
  {MODEL:24}   final weights, for load_transformer and `parity translate`
  {LOG:24}   log with one JSON object per line
  {CURVE:24}   plot of the losses and the score
`python docs/examples/curves.py RUN RUN --out FILE` plots the curves of multiple runs in one figure.

stop and resume: Every backend can resume from every checkpoint. Ctrl-C and SIGTERM finish the current step, save a
checkpoint, and print the command that resumes the run. Only one process can train in a run directory at a time. If you
moved the training text, specify its new location: --resume RUN --text SOURCE TARGET.

multiple devices: --parallel specifies how the devices share each step, and --processes specifies the number of
processes. `parity train` starts these processes and, if one of them ends, stops all of them. If torchrun or srun
already started the processes, or if JAX_COORDINATOR_ADDRESS or TF_CONFIG is set, run the same command in every process.
Batches, loss, dropout masks, and gradient clipping are the same as on one device. A run therefore produces the same
weights under every plan, up to rounding, and can be resumed under a different plan and in a different backend. Only the
first process writes files and prints. PyTorch requires one process per device. JAX and TensorFlow can split the CPU of
one process into multiple devices. TensorFlow supports only data parallelism (data=N). NumPy computes the shards one
after another.

exit code: 0 finished; 3 not started, failed, or Ctrl-C pressed twice; 130 stopped by Ctrl-C; 143 stopped by SIGTERM
"""


def add_options(commands: Any) -> argparse.ArgumentParser:
    """Add the command and its options, and return its parser."""
    parser = commands.add_parser(
        "train",
        description="Train a Transformer on generated dates or on your own parallel text, using batches of "
        "sentences of similar length, the paper's learning rate schedule, label smoothing, and Adam. The command "
        "regularly validates the model and saves checkpoints, from which every backend can resume.",
        epilog=EXAMPLES + SETTINGS + _fields() + DIRECTORY,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("data (one of --task, --text, and --resume is required)")
    what.add_argument(
        "--task",
        choices=["dates"],
        help="train on generated dates; the model learns to convert human-readable dates to ISO 8601",
    )
    what.add_argument(
        "--text",
        nargs=2,
        type=Path,
        metavar=("SOURCE", "TARGET"),
        help="train on two line-aligned text files; with --resume, specify the new location of these files",
    )
    what.add_argument(
        "--held-out", nargs=2, type=Path, metavar=("SOURCE", "TARGET"), help="validate on these two text files"
    )
    what.add_argument(
        "--resume",
        type=Path,
        metavar="RUN",
        help="resume from the last checkpoint in this run directory, or from this checkpoint file",
    )
    add_backends(parser, None, FALLBACK_HELP)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write the run to this directory (default: the directory of the resumed run, otherwise runs/TASK-BACKEND)",
    )

    length = parser.add_argument_group("length")
    length.add_argument(
        "--steps", type=positive, metavar="N", help=_default("set the total number of steps in the run", "steps")
    )
    length.add_argument(
        "--stop-at", type=positive, metavar="N", help="save and stop after this step, so that you can resume later"
    )

    model = parser.add_argument_group("model and settings")
    model.add_argument(
        "--preset",
        choices=list(PRESETS),
        metavar="NAME",
        help="use the conventions of this preset; `parity info` lists all presets (default: paper_base)",
    )
    model.add_argument(
        "--vocab-size", type=positive, metavar="N", help=f"learn N subwords from --text (default: {SUBWORDS})"
    )
    model.add_argument(
        "--set",
        type=field,
        nargs="+",
        action="extend",
        default=[],
        dest="fields",
        metavar="FIELD=VALUE",
        help="set fields of the model, the training, or the run, such as d_model=512 warmup_steps=4000; the fields are "
        "listed below",
    )
    model.add_argument(
        "--seed", type=int, metavar="N", help="set the seed for the weights, batches, and dropout (default: 0)"
    )

    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--dtype",
        choices=["float64", "float32"],
        help="store the weights in this dtype (default: the dtype of the resumed run, otherwise float32)",
    )
    add_machine(machine)
    machine.add_argument(
        "--parallel",
        type=parallel_plan,
        metavar="PLAN",
        help="divide each step among multiple devices, for example with data=2,fsdp=2,tensor=2. data replicates the "
        "model, fsdp shards each parameter, and tensor shards the heads and the feed-forward network (default: one "
        "device)",
    )
    machine.add_argument(
        "--processes",
        type=positive,
        metavar="N",
        help="run N processes on this machine and divide the devices among these processes (default: one process per "
        "device for torch, otherwise one process)",
    )
    return parser


def _default(what: str, name: str) -> str:
    """Return the help text of an option or a field, including the default of each task."""
    dates, text = (
        {**vars(recipe), **recipe.model, **recipe.training}[name] for recipe in (RECIPES["dates"], RECIPES["text"])
    )
    return f"{what} (default: {dates} for dates, {text} for text)"


def _fields() -> str:
    """Return the help text of ``--set``: a list of the most important fields, and the names of all other fields."""
    said = {name: _default(what, name) for name, what in WITH_DEFAULTS.items()} | OTHER_FIELDS
    lines = [f"  {name:26} {what}" for name, what in said.items()]
    others = ", ".join(name for name in (*MODEL_FIELDS, *TRAINING_FIELDS) if name not in said)
    return "\n".join(
        [*lines, *textwrap.wrap(f"other fields: {others}", 118, initial_indent="  ", subsequent_indent="  ")]
    )
