"""Steps that are wrong behind a gradient that is right: the reference takes them with each known mistake."""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from transformer_parity.transformer.distributed.cases import Probe
from transformer_parity.transformer.distributed.signatures import divisions
from transformer_parity.transformer.distributed.worker import Seen
from transformer_parity.transformer.mistakes.distributed import MISTAKES
from transformer_parity.transformer.mistakes.edited_package import edited_package
from transformer_parity.transformer.mistakes.mistake import Mistake
from transformer_spec.parallel_plan import Plan

STEPS = 4  # that are taken
EXACT = 1e-9  # how well losses must be met, relative
OF_SHARES = "distributed/data=2/short"  # the run that shows mistakes which any number of shares can make
OF_PARTS = "distributed/fsdp=2/short"  # likewise, any number of parts


def known_mistake(probe: Probe, plan: Plan, seen: Seen, expected: Seen) -> str:
    """Return the name of a mistake with which the reference has the losses that were seen; empty if there is none.

    Args:
        probe: What was trained, from its beginning.
        plan: On which devices.
        seen: Of one process.
        expected: The run on one device.
    """
    losses = np.array(seen.losses[:STEPS])
    if len(losses) < 2 or np.allclose(losses, expected.losses[:STEPS], rtol=EXACT, atol=0.0):
        return ""  # which no mistake in an update shows in
    cases = (OF_SHARES, OF_PARTS) if plan.fsdp > 1 else (OF_SHARES,)
    for rows in divisions(len(probe.lengths), probe.settings.accumulation_steps, plan.shares):
        for mistake in MISTAKES:
            if mistake.case in cases and mistake.at.startswith(("step", "the whole")):
                found = _losses(mistake, probe, plan, rows, len(losses))
                if np.allclose(found, losses, rtol=EXACT, atol=0.0):
                    return mistake.name
    return ""


def _losses(mistake: Mistake, probe: Probe, plan: Plan, rows: np.ndarray, steps: int) -> np.ndarray:
    """Return the losses of the first steps that the reference takes with a mistake."""
    package = edited_package("reference_numpy", tuple(mistake.edits["numpy"]))
    model = package.Transformer.from_weights(probe.config, probe.weights(), "float64", fast=False)
    trainer = package.Trainer(model, probe.settings, probe.seed, mesh=package.Plan(plan.data, plan.fsdp))
    found = np.full(steps, np.nan)
    with np.errstate(all="ignore"), suppress(ArithmeticError):  # a mistake may divide by nothing
        for step in range(steps):
            padded = [np.pad(ids, ((0, 1), (0, 0)), constant_values=probe.config.pad_id) for ids in probe.batch(step)]
            found[step] = trainer.train_step(*(ids[rows.ravel()] for ids in padded)).loss
    return found
