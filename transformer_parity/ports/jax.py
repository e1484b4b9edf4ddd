"""The JAX package behind the port protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy import ndarray

from reference_numpy.search_plan import OnStep, SearchResult
from reference_numpy.training_config import TrainingConfig
from transformer_parity.ports.package import COMPILED_IN_FULL, LoadedPackage, call_tapped, decode_stepwise
from transformer_parity.ports.protocol import SearchOptions


class LoadedJax(LoadedPackage):
    def to_array(self, array: ndarray) -> Any:
        import jax

        return jax.device_put(array.copy(), self.model.device)

    def run_tapped(self, block: str, arrays: dict[str, Any], given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        from flax import nnx

        return self._jitted(tapped=True)(*nnx.split(self.model), block, arrays, given)

    def run_fast(self, block: str, arrays: dict[str, Any]) -> Any:
        from flax import nnx

        return self._jitted(tapped=False)(*nnx.split(self.model), block, arrays, {})

    def decode_stepwise(self, source_ids: ndarray, target_ids: ndarray) -> ndarray:
        import jax
        from flax import nnx

        graph, state = nnx.split(self.model)

        def run(state: Any, source_ids: Any, target_ids: Any) -> Any:  # all steps compiled at once
            return jax.numpy.stack(decode_stepwise(nnx.merge(graph, state), source_ids, target_ids), 1)

        options = self.package.runtime.quick_compilation()
        return np.asarray(jax.jit(run, compiler_options=options)(state, source_ids, target_ids))

    def _jitted(self, tapped: bool) -> Callable[..., Any]:
        """Return one compiled function for all models: JAX compiles it again only where something static differs."""
        import jax
        from flax import nnx

        def run(graphdef: Any, state: Any, block: str, arrays: dict[str, Any], given: dict[str, Any]) -> Any:
            function = self.find(nnx.merge(graphdef, state), block)
            return call_tapped(function, arrays, given) if tapped else function(**arrays)

        quick = tapped or self.dtype != COMPILED_IN_FULL
        key = (self.package.__name__, tapped, quick)
        if key not in _JITTED:
            # With taps on, too, nobody waits for the result, only for the compiler.
            options = self.package.runtime.quick_compilation() if quick else None
            _JITTED[key] = jax.jit(run, static_argnums=(0, 2), compiler_options=options)
        return _JITTED[key]

    def search(self, source_ids: ndarray, options: SearchOptions, on_step: OnStep | None = None) -> SearchResult:
        with self._compiling():
            return super().search(source_ids, options, on_step)

    def trainer(self, settings: TrainingConfig, seed: int = 0) -> Any:
        trainer = super().trainer(settings, seed)
        step = trainer.train_step

        def first_step(*batch: Any, **named: Any) -> Any:
            trainer.train_step = step
            with self._compiling():
                return step(*batch, **named)

        trainer.train_step = first_step
        return trainer

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


_JITTED: dict[tuple[str, bool, bool], Callable[..., Any]] = {}
