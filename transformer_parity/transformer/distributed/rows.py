"""Determine which rows of a batch each process of a user's port reads.

Each shard receives a batch with different sentences. The gradient that a process returns is the sum of the gradients of
all rows that the processes read. The reference computes the gradient of every row in every batch. The solution of a
linear system then shows which rows the processes have read.
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

# The gradient of each process is fitted with a linear combination of the gradients of individual rows. Without rounding
# errors, the coefficients of a correct port are 0 or 1. A process uses the rows whose coefficients exceed READ.
EXACT = 1e-6  # maximum residual of the fit, relative to the gradient
READ = 0.01
LOSS = 1e-9  # maximum relative error of a loss


def rows_problem(probe: Probe, plan: Plan, seen: Sequence[Seen]) -> str:
    """Return an error message if the processes don't divide the rows correctly, else an empty string.

    Args:
        probe: The run. Its config is the port's config.
        plan: The parallelism plan. Processes are numbered in row-major order over the axes ``data``, ``fsdp``, and
            ``tensor``.
        seen: Results of each process.
    """
    batches = [own_batch(probe, shard) for shard in range(plan.shards)]
    model = ref.Transformer.from_weights(probe.config, probe.weights(), "float64", fast=False)
    rows = len(probe.lengths)
    of_rows = [_vector(_gradient(model, batch, row)) for batch in batches for row in range(rows)]
    basis = np.stack(of_rows, 1) / rows
    for process, one in enumerate(seen):
        found = _vector(one.own_gradient)
        if found.shape != basis.shape[:1] or not np.isfinite(found).all():
            return f"process {process} must return a finite gradient with {len(basis)} elements for its own batch"
        solution = np.linalg.lstsq(basis, found, rcond=None)[0]
        if np.linalg.norm(found - basis @ solution) > EXACT * np.linalg.norm(found):
            return (
                f"the gradient of process {process} must be a sum of the gradients of individual rows: got a "
                "different gradient"
            )
        reads = np.abs(solution.reshape(plan.shards, rows)) > READ
        if problem := _reads_problem(process, reads, plan) or _loss_problem(process, reads, one, probe, batches):
            return problem
    return ""


def _gradient(model: ref.Transformer, batch: Batch, row: int) -> Mapping[str, ndarray]:
    return ref.gradients(model, *(ids[row : row + 1] for ids in batch)).parameters


def _vector(gradient: Mapping[str, ndarray]) -> ndarray:
    return np.concatenate([np.zeros(0), *(np.ravel(gradient[name]) for name in sorted(gradient))])


def _reads_problem(process: int, reads: ndarray, plan: Plan) -> str:
    """Return an error message if the wrong rows contribute to the gradient of a process, else an empty string.

    Args:
        process: Number of the process.
        reads: True for rows that contribute to the gradient [shards, rows].
        plan: The parallelism plan.
    """
    others = np.arange(plan.shards) != process // plan.tensor
    if not reads[others].any():
        return f"process {process} trains independently: its gradient contains no rows of other processes"
    for row, of_shards in enumerate(reads.T):
        shards = np.flatnonzero(of_shards).tolist()
        if len(shards) > 1:
            several = f"{(reads.sum(0) > 1).sum()} of {reads.shape[1]} rows are read more than once"
            return f"{several}: shards {' and '.join(map(str, shards))} of {plan} read row {row}"
        if not shards:
            return f"no process reads row {row}"
    idle = np.flatnonzero(~reads.any(1)).tolist()
    return f"shard {idle[0]} of {plan} reads no rows of its batch" if idle else ""


def _loss_problem(process: int, reads: ndarray, one: Seen, probe: Probe, batches: Sequence[Batch]) -> str:
    """Return an error message if the loss shows that ``train_step`` reads different rows than ``gradients``."""
    weights = one.snapshots[probe.steps].weights
    if {name: array.shape for name, array in weights.items()} != parameter_shapes(probe.config):
        return ""  # the comparison of the weights reports this error
    read = [np.concatenate([ids[own] for ids, own in zip(of, reads, strict=True)]) for of in zip(*batches, strict=True)]
    with np.errstate(all="ignore"):
        model = ref.Transformer.from_weights(probe.config, weights, "float64", fast=False)
        expected = ref.gradients(model, *read).loss
    if abs(one.own_loss - expected) <= LOSS * abs(expected):
        return ""
    return (
        f"train_step of process {process} must read the same rows as gradients: "
        f"the loss is {one.own_loss:.6g} instead of {expected:.6g}"
    )
