"""The rows that each process of a user's port reads: every share gets different sentences, and the gradient shows them.

A gradient is the sum of the gradients of all rows that were read. The reference computes the gradient of each row of
each share's batch, so a linear system has the rows as its solution. Only a process that communicates has rows of other
shares in its gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy import ndarray

import reference_numpy as ref
from transformer_parity.transformer.distributed.cases import Batch, Probe
from transformer_parity.transformer.distributed.worker import Seen, own_batch
from transformer_spec.names import parameter_shapes
from transformer_spec.parallel_plan import Plan

EXACT = 1e-6  # largest relative residual of a gradient that is a sum over rows
READ = 0.01  # smallest coefficient of a row that was read, where 1 is exact
LOSS = 1e-9  # largest relative error of a loss


def rows_problem(probe: Probe, plan: Plan, seen: Sequence[Seen]) -> str:
    """Return why the processes don't divide the rows among them; empty if they do.

    Args:
        probe: The run, with the config of the port.
        plan: The devices. Processes are numbered along ``data``, then ``fsdp``, then ``tensor``.
        seen: The results of each process.
    """
    batches = [own_batch(probe, share) for share in range(plan.shares)]
    model = ref.Transformer.from_weights(probe.config, probe.weights(), "float64", fast=False)
    rows = len(probe.lengths)
    of_rows = [_vector(_gradient(model, batch, row)) for batch in batches for row in range(rows)]
    basis = np.stack(of_rows, 1) / rows
    for process, one in enumerate(seen):
        found = _vector(one.own_gradient)
        if found.shape != basis.shape[:1] or not np.isfinite(found).all():
            return f"process {process} must have a finite gradient of {len(basis)} numbers for batches of its own"
        solution = np.linalg.lstsq(basis, found, rcond=None)[0]
        if np.linalg.norm(found - basis @ solution) > EXACT * np.linalg.norm(found):
            return f"the gradient of process {process} is no sum over rows if every share has a different batch"
        reads = np.abs(solution.reshape(plan.shares, rows)) > READ
        if problem := _reads_problem(process, reads, plan) or _loss_problem(process, reads, one, probe, batches):
            return problem
    return ""


def _gradient(model: ref.Transformer, batch: Batch, row: int) -> Mapping[str, ndarray]:
    return ref.gradients(model, *(ids[row : row + 1] for ids in batch)).parameters


def _vector(gradient: Mapping[str, ndarray]) -> ndarray:
    return np.concatenate([np.zeros(0), *(np.ravel(gradient[name]) for name in sorted(gradient))])


def _reads_problem(process: int, reads: ndarray, plan: Plan) -> str:
    """Return what is wrong with the rows [shares, rows] in the gradient of a process."""
    others = np.arange(plan.shares) != process // plan.tensor
    if not reads[others].any():
        return f"process {process} trains by itself: its gradient contains no row of another process"
    for row, of_shares in enumerate(reads.T):
        shares = np.flatnonzero(of_shares).tolist()
        if len(shares) > 1:
            several = f"{(reads.sum(0) > 1).sum()} of {reads.shape[1]} rows are read more than once"
            return f"{several}: shares {' and '.join(map(str, shares))} of {plan} read row {row}"
        if not shares:
            return f"no process reads row {row}"
    idle = np.flatnonzero(~reads.any(1)).tolist()
    return f"share {idle[0]} of {plan} reads no row of its batch" if idle else ""


def _loss_problem(process: int, reads: ndarray, one: Seen, probe: Probe, batches: Sequence[Batch]) -> str:
    """Return whether the last step had other rows than the gradient, which its loss shows."""
    weights = one.snapshots[probe.steps].weights
    if {name: array.shape for name, array in weights.items()} != parameter_shapes(probe.config):
        return ""  # which the comparison of the weights reports
    read = [np.concatenate([ids[own] for ids, own in zip(of, reads, strict=True)]) for of in zip(*batches, strict=True)]
    with np.errstate(all="ignore"):
        model = ref.Transformer.from_weights(probe.config, weights, "float64", fast=False)
        expected = ref.gradients(model, *read).loss
    if abs(one.own_loss - expected) <= LOSS * abs(expected):
        return ""
    return (
        f"train_step of process {process} reads other rows than gradients: loss {one.own_loss:.6g}, not {expected:.6g}"
    )
