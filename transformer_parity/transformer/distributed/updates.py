"""Identify bugs that affect only later steps, by running the reference with each known bug."""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from transformer_parity.transformer.bugs.bug import Bug
from transformer_parity.transformer.bugs.distributed import BUGS
from transformer_parity.transformer.bugs.edited_package import edited_package
from transformer_parity.transformer.distributed.cases import Probe
from transformer_parity.transformer.distributed.signatures import divisions
from transformer_parity.transformer.distributed.worker import Seen
from transformer_spec.parallel_plan import Plan

STEPS = 4  # number of steps to run
EXACT = 1e-9  # maximum relative error of the losses
# In the bug catalog, each bug names the case that detects it. If this case is ``OF_SHARD``, the bug can occur with any
# number of data-parallel shards. If it is ``OF_PARTS``, the bug can occur with any number of FSDP shards.
OF_SHARD = "distributed/data=2/short"
OF_PARTS = "distributed/fsdp=2/short"


def known_bug(probe: Probe, plan: Plan, seen: Seen, expected: Seen) -> str:
    """Return the name of the bug with which the reference reproduces the losses, or an empty string if there is none.

    Args:
        probe: The run, which must start at the first step.
        plan: The parallelism plan.
        seen: Results of one process.
        expected: Results on one device.
    """
    losses = np.array(seen.losses[:STEPS])
    if len(losses) < 2 or np.allclose(losses, expected.losses[:STEPS], rtol=EXACT, atol=0.0):
        return ""  # correct losses rule out a bug in the update
    cases = (OF_SHARD, OF_PARTS) if plan.fsdp > 1 else (OF_SHARD,)
    for rows in divisions(len(probe.lengths), probe.settings.accumulation_steps, plan.shards):
        for bug in BUGS:
            if bug.case in cases and bug.at.startswith(("step", "the whole")):
                found = _losses(bug, probe, plan, rows, len(losses))
                if np.allclose(found, losses, rtol=EXACT, atol=0.0):
                    return bug.name
    return ""


def _losses(bug: Bug, probe: Probe, plan: Plan, rows: np.ndarray, steps: int) -> np.ndarray:
    """Inject a bug into the reference, and return the losses of its first ``steps`` training steps."""
    package = edited_package("reference_numpy", tuple(bug.edits["numpy"]))
    model = package.Transformer.from_weights(probe.config, probe.weights(), "float64", fast=False)
    trainer = package.Trainer(model, probe.settings, probe.seed, mesh=package.Plan(plan.data, plan.fsdp))
    found = np.full(steps, np.nan)
    with np.errstate(all="ignore"), suppress(ArithmeticError):  # a bug may cause a division by zero
        for step in range(steps):
            padded = [np.pad(ids, ((0, 1), (0, 0)), constant_values=probe.config.pad_id) for ids in probe.batch(step)]
            found[step] = trainer.train_step(*(ids[rows.ravel()] for ids in padded)).loss
    return found
