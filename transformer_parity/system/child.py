"""A child process: how it is started, and how it ends."""

from __future__ import annotations

PATIENCE = 10.0  # seconds for a process to end by itself


THREAD_SWITCHES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "PJRT_NPROC",  # XLA's, behind JAX
)
