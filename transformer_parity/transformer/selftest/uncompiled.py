"""Run models without compilation, because compiling a model for a single run takes longer than the run itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interpreted(backend: str) -> Iterator[None]:
    """Disable the compilation of a backend's models inside a ``with`` statement."""
    if backend == "jax":
        import jax

        with jax.disable_jit():
            yield
    elif backend == "tf":
        import tensorflow as tf

        tf.config.run_functions_eagerly(True)
        try:
            yield
        finally:
            tf.config.run_functions_eagerly(False)
    else:
        yield
