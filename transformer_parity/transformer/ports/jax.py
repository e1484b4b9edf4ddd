"""Adapter from the JAX package to the port protocol."""

# ruff: noqa: D102  LoadedPackage documents the methods

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import numpy as np
from numpy import ndarray

from transformer_parity.transformer.ports.package import (
    COMPILED_IN_FULL,
    LoadedPackage,
    call_tapped,
    decode_next,
    find,
    start_cache,
)
from transformer_spec.search import OnStep, Search, SearchResult
from transformer_spec.training_config import TrainingConfig


class LoadedJax(LoadedPackage):
    """A model of the JAX package that compiles every block."""

    def to_array(self, array: ndarray) -> Any:
        import jax

        return jax.device_put(array.copy(), self.model.device)

    def summed(self, mesh: Any, numbers: Sequence[float]) -> Any:
        from jax.experimental.multihost_utils import process_allgather

        return process_allgather(np.array(numbers, np.float32)).sum(0)

    def run_tapped(self, block: str, arrays: dict[str, Any], given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        from flax import nnx

        model, block = self.holding(block)
        return self._compiled(tapped=True)(*nnx.split(model), block, arrays, given)

    def run_fast(self, block: str, arrays: dict[str, Any]) -> Any:
        from flax import nnx

        model, block = self.holding(block)
        return self._compiled(tapped=False)(*nnx.split(model), block, arrays, {})

    def cross_entropy(self, arrays: dict[str, Any]) -> tuple[Any, Any]:
        import jax

        function = partial(self.package.cross_entropy, config=self.model.config)
        with self.package.runtime.quick_compilation():
            return jax.jit(function, compiler_options=self.package.runtime.compiler_options())(**arrays)

    def stepwise(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        from flax import nnx

        start, step = _compile_stepwise(self.package)
        model = nnx.split(self.model)
        return partial(start, *model), partial(step, *model)

    def _compiled(self, tapped: bool) -> Callable[..., Any]:
        # With taps, compiling takes longer than running, so compile with fewer optimizations.
        return _compile(self.package, tapped, tapped or self.dtype != COMPILED_IN_FULL)

    def search(self, source_ids: ndarray, options: Search, on_step: OnStep | None = None) -> SearchResult:
        with self._compiling():
            return super().search(source_ids, options, on_step)

    def trainer(self, settings: TrainingConfig) -> Any:
        with self._compiling():
            return super().trainer(settings)

    def _compiling(self) -> AbstractContextManager[None]:
        return nullcontext() if self.dtype == COMPILED_IN_FULL else self.package.runtime.quick_compilation()


@cache
def _compile(package: Any, tapped: bool, quick: bool) -> Callable[..., Any]:
    """Return a compiled function that can run any block of any model in ``package``.

    All models share this function, so JAX recompiles it only if a static argument or a shape differs.
    """
    import jax
    from flax import nnx

    def run(graphdef: Any, state: Any, block: str, arrays: dict[str, Any], given: dict[str, Any]) -> Any:
        function = find(nnx.merge(graphdef, state), block)
        return call_tapped(function, arrays, given) if tapped else function(**arrays)

    with package.runtime.quick_compilation() if quick else nullcontext():
        return jax.jit(run, static_argnums=(0, 2), compiler_options=package.runtime.compiler_options())


@cache
def _compile_stepwise(package: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return two compiled functions: one that creates a cache, and one that decodes one position with the cache."""
    import jax
    from flax import nnx

    def start(graphdef: Any, state: Any, source_ids: Any, capacity: int) -> Any:
        return start_cache(nnx.merge(graphdef, state), source_ids, capacity)

    def step(graphdef: Any, state: Any, target_ids: Any, cache: Any) -> Any:
        return decode_next(nnx.merge(graphdef, state), target_ids, cache)

    with package.runtime.quick_compilation():
        quick = package.runtime.compiler_options()
    compiled = jax.jit(start, static_argnums=(0, 3), compiler_options=quick)
    return compiled, jax.jit(step, static_argnums=0, compiler_options=quick)
