"""Process-wide settings for distributed JAX runs. Only commands may change them; ``transformer_jax`` must not."""

from __future__ import annotations

import os
import sys
from types import TracebackType


def prepare_jax_process() -> None:
    """Configure JAX and the exception hook if the environment variables define a distributed run.

    Call this function before using JAX.
    """
    if "JAX_COORDINATOR_ADDRESS" not in os.environ:
        return
    import jax

    # With asynchronous dispatch, two processes may start the same two programs in different orders. Each process
    # would then wait for the other one forever.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    jax.config.update("jax_enable_preemption_service", False)  # the service would intercept SIGTERM
    sys.excepthook = _exit_at_once


def _exit_at_once(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error and exit immediately. A normal exit would cause a deadlock with the other processes."""
    sys.__excepthook__(kind, error, trace)
    sys.stdout.flush()
    os._exit(1)
