"""Process-wide settings for distributed JAX runs. Only commands may change them, never the JAX package itself."""

from __future__ import annotations

import os
import sys
from types import TracebackType


def prepare_jax_process() -> None:
    """If the environment defines a distributed run, configure JAX and the exception hook. Call it before using JAX."""
    if "JAX_COORDINATOR_ADDRESS" not in os.environ:
        return
    import jax

    # With asynchronous dispatch, two processes may start two programs in different orders and wait for each other
    # forever.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    jax.config.update("jax_enable_preemption_service", False)  # the service would intercept SIGTERM
    sys.excepthook = _exit_at_once


def _exit_at_once(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error and exit immediately, because a normal exit and the other processes would wait for each other."""
    sys.__excepthook__(kind, error, trace)
    sys.stdout.flush()
    os._exit(1)
