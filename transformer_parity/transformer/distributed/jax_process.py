"""Settings of a process that joins others in JAX. A command may change its own process; the JAX package may not."""

from __future__ import annotations

import os
import sys
from types import TracebackType


def prepare_jax_process() -> None:
    """Configure JAX and the exception hook if the environment names other processes. Call it before JAX is used."""
    if "JAX_COORDINATOR_ADDRESS" not in os.environ:
        return
    import jax

    # CPUs of two processes may start two concurrent programs in different orders, and wait for each other permanently.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    jax.config.update("jax_enable_preemption_service", False)  # it would ignore SIGTERM
    sys.excepthook = _exit_at_once


def _exit_at_once(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error and end the process, which would otherwise wait for processes that wait for its part of a step."""
    sys.__excepthook__(kind, error, trace)
    sys.stdout.flush()
    os._exit(1)
