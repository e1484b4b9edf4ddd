"""The stage ``distributed``, as the messages of processes that other stages send: one framework after another."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from transformer_parity.transformer.check.one_port import Facts, Job, Message
from transformer_parity.transformer.distributed.run import group
from transformer_parity.transformer.distributed.stage import Check


def run_distributed(
    jobs: Sequence[Job], check: Check, *, interpreters: Mapping[str, str] | None = None, timeout: float | None = None
) -> Iterator[Message]:
    """Do all jobs, and yield a message for each run on several devices. Closing the iterator ends the processes.

    Args:
        jobs: What to compare, one job for each backend.
        check: The runs.
        interpreters: The Python interpreter that runs a backend, where it is not this one.
        timeout: As in ``processes.run_all``.
    """
    for job in jobs:
        yield Message(job.backend, doing="starting", facts=Facts(job.title))
        python = (interpreters or {}).get(job.backend, sys.executable)
        environment: dict[str, str] = {}
        start = partial(group, job.backend, processes=check.processes, timeout=timeout, python=python)
        for step in check.steps(job.backend, start):
            environment = step.environment or environment
            yield Message(job.backend, doing=step.doing, findings=tuple(step.findings))
        yield Message(job.backend, environment=environment, done=True)
