"""The options of ``parity train`` and their help."""

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
    if entry.name not in ("source_vocab_size", "target_vocab_size")  # the corpus has them
]
TRAINING_FIELDS = [entry.name for entry in dataclasses.fields(TrainingConfig) if entry.name != "total_steps"]
PLAN_FIELDS = [entry.name for entry in dataclasses.fields(RunPlan) if entry.name != "steps"]
RUN_FIELDS = [*PLAN_FIELDS, "tokens_per_batch"]
WITH_DEFAULTS = {
    "d_model": "width",
    "d_ff": "inner width",
    "num_heads": "attention heads",
    "num_encoder_layers": "layers of the encoder",
    "num_decoder_layers": "layers of the decoder",
    "dropout": "rate at the preset's sites, or an object of rates",
    "tokens_per_batch": "padding included",
    "learning_rate_factor": "factor of equation (3)",
    "warmup_steps": "steps in which the rate rises",
    "cooldown_steps": "last steps, in which the rate falls to zero",
    "average": "how many of the last checkpoints to average at the end",
}
OTHER_FIELDS = {
    "keep": "how many checkpoints to keep (default: average)",
    "save_every": "steps between checkpoints (default: a tenth of the run)",
    "validate_every": "steps between validations (default: a tenth of the run)",
    "clip_norm": "clip the gradient to this norm (default: null, no clipping)",
    "accumulation_steps": "split each batch into slices, to save memory (default: 1)",
    "mixed_bfloat16": "compute in bfloat16 with float32 weights (default: false)",
    "activation_checkpointing": "recompute layers in the backward pass, to save memory (default: false)",
}

EXAMPLES = """\
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
  parity train --text train.en train.de --set d_model=512 num_heads=8 d_ff=2048 num_encoder_layers=6
    num_decoder_layers=6 warmup_steps=4000                  the paper's base model
"""
SETTINGS = """
fields of --set, each with its value in JSON or as a word; a resumed run takes those of the checkpoints only:
"""
FOLDER = f"""

what a run leaves in its folder:
  checkpoint-*.safetensors   config, weights, optimizer state, position in the data, vocabulary
  {MODEL:24}   the final weights, for load_transformer and `parity translate`
  {LOG:24}   one JSON object a line
  {CURVE:24}   the curves of the losses and of the score
`python docs/examples/curves.py RUN RUN --out FILE` draws the curves of several runs in one picture.
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
        epilog=EXAMPLES + SETTINGS + _fields() + FOLDER,
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
    length.add_argument("--steps", type=positive, metavar="N", help=_default("steps of the whole run", "steps"))
    length.add_argument("--stop-at", type=positive, metavar="N", help="stop after this step, to be continued later")

    model = parser.add_argument_group("model and settings")
    model.add_argument(
        "--preset", choices=list(PRESETS), metavar="NAME", help="whose conventions (default: paper_base)"
    )
    model.add_argument("--vocab-size", type=positive, metavar="N", help=f"subwords of --text (default: {SUBWORDS})")
    model.add_argument(
        "--set",
        type=field,
        nargs="+",
        action="extend",
        default=[],
        dest="fields",
        metavar="FIELD=VALUE",
        help="fields of the model, of training, or of the run, such as d_model=512 warmup_steps=4000; see below",
    )
    model.add_argument("--seed", type=int, metavar="N", help="seed of weights, batches and dropout (default: 0)")

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


def _default(what: str, name: str) -> str:
    """Return the help of an option or a field, with the default of each task."""
    dates, text = (
        {**vars(recipe), **recipe.model, **recipe.training}[name] for recipe in (RECIPES["dates"], RECIPES["text"])
    )
    return f"{what} (default: {dates} for dates, {text} for text)"


def _fields() -> str:
    """Return the help of ``--set``: the fields that are changed most, and the names of all others."""
    said = {name: _default(what, name) for name, what in WITH_DEFAULTS.items()} | OTHER_FIELDS
    lines = [f"  {name:26} {what}" for name, what in said.items()]
    others = ", ".join(name for name in (*MODEL_FIELDS, *TRAINING_FIELDS) if name not in said)
    return "\n".join([*lines, *textwrap.wrap(f"also {others}", 118, initial_indent="  ", subsequent_indent="  ")])
