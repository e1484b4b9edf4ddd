"""Running models one operation at a time: for a mistake that is run once, compiling takes longer than running."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

from transformer_parity.transformer.mistakes.training import GRADIENTS
from transformer_spec.taps import no_tap


@contextmanager
def interpreted(backend: str) -> Iterator[None]:
    """Run the models of a backend one operation at a time."""
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


@contextmanager
def interpreted_training(backend: str) -> Iterator[None]:
    """Run the training of a backend one operation at a time.

    JAX's own model is compiled, once for all mistakes that share it: those whose edits leave its modules alone.
    """
    if backend != "jax":
        with interpreted(backend):
            yield
        return
    import jax

    from transformer_jax import Transformer

    model = patch.object(Transformer, "__call__", _compiled_call())
    step = patch.object(jax, "jit", lambda function, **_: function)
    with model, step, patch.object(jax.lax, "scan", _loop):
        yield


@cache
def _compiled_call() -> Callable[..., Any]:
    """Return the call of JAX's model, compiled where no tap is recorded."""
    import jax
    from flax import nnx

    from transformer_jax import Transformer

    call = Transformer.__call__
    compiled = jax.jit(lambda graph, state, *ids: call(nnx.merge(graph, state), *ids), static_argnums=0)

    def call_compiled(self: Any, source_ids: Any, target_ids: Any, tap: Any = no_tap) -> Any:
        if tap is not no_tap:
            return call(self, source_ids, target_ids, tap=tap)
        config = self.config
        for module in (self, self.source_position, self.target_position):
            module.config = GRADIENTS.config  # another label smoothing must not compile the model again
        parts = nnx.split(self)
        self.config = config
        return compiled(*parts, source_ids, target_ids)

    return call_compiled


def _loop(function: Callable[..., Any], carry: Any, inputs: Any) -> tuple[Any, None]:
    """Compute what jax.lax.scan computes, one step after another."""
    import jax

    for i in range(len(jax.tree.leaves(inputs)[0])):
        carry, _ = function(carry, jax.tree.map(lambda array: array[i], inputs))  # noqa: B023  called at once
    return carry, None
