"""The JAX package behind the port protocol."""

# ruff: noqa: D102  methods are documented in LoadedPackage

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from numpy import ndarray

from reference_numpy.search_plan import OnStep, SearchResult
from reference_numpy.training_config import TrainingConfig
from transformer_parity.ports.package import (
    COMPILED_IN_FULL,
    LoadedPackage,
    call_tapped,
    decode_stepwise,
    find,
    with_first_step,
)
from transformer_parity.ports.protocol import SearchOptions


class LoadedJax(LoadedPackage):
    """A model of the JAX package: every block is compiled."""

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

    def decode_stepwise(self, source_ids: ndarray, target_ids: ndarray) -> ndarray:
        import jax
        from flax import nnx

        graph, state = nnx.split(self.model)

        def run(state: Any, source_ids: Any, target_ids: Any) -> Any:  # all steps compiled at once
            return jax.numpy.stack(decode_stepwise(nnx.merge(graph, state), source_ids, target_ids), 1)

        options = self.package.runtime.quick_compilation()
        return np.asarray(jax.jit(run, compiler_options=options)(state, source_ids, target_ids))

    def _compiled(self, tapped: bool) -> Callable[..., Any]:
        # With taps on, too, compiling takes longer than running.
        return _compile(self.package, tapped, tapped or self.dtype != COMPILED_IN_FULL)

    def search(self, source_ids: ndarray, options: SearchOptions, on_step: OnStep | None = None) -> SearchResult:
        with self._compiling():
            return super().search(source_ids, options, on_step)

    def trainer(self, settings: TrainingConfig) -> Any:
        return with_first_step(super().trainer(settings), self._compiling)

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        """Let what the package compiles by itself be compiled as that dtype is."""
        import jax

        name = "jax_disable_most_optimizations"
        before = jax.config.read(name)
        jax.config.update(name, before or self.dtype != COMPILED_IN_FULL)
        try:
            yield
        finally:
            jax.config.update(name, before)


@cache
def _compile(package: Any, tapped: bool, quick: bool) -> Callable[..., Any]:
    """Return one function for all models of a package: JAX compiles it again only where something static differs."""
    import jax
    from flax import nnx

    def run(graphdef: Any, state: Any, block: str, arrays: dict[str, Any], given: dict[str, Any]) -> Any:
        function = find(package, nnx.merge(graphdef, state), block)
        return call_tapped(function, arrays, given) if tapped else function(**arrays)

    options = package.runtime.quick_compilation() if quick else None
    return jax.jit(run, static_argnums=(0, 2), compiler_options=options)
