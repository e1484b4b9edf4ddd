"""Adapter from the TensorFlow package to the port protocol."""

# ruff: noqa: D102  LoadedPackage documents the methods

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from numpy import ndarray

from transformer_parity.transformer.ports.compile_clock import COMPILING
from transformer_parity.transformer.ports.package import (
    ATTENTION,
    COMPILED_IN_FULL,
    LoadedPackage,
    find,
    with_first_step,
)
from transformer_parity.transformer.ports.protocol import Placement, Result
from transformer_spec.search import OnStep, Search, SearchResult
from transformer_spec.search_rules import SearchRules
from transformer_spec.training_config import TrainingConfig


class LoadedTf(LoadedPackage):
    """A model of the TensorFlow package. In float32, the fast path is compiled with XLA."""

    def __init__(self, package: Any, model: Any, placement: Placement) -> None:
        super().__init__(package, model, placement)
        self._compiled: dict[str, Callable[..., Any]] = {}
        self._called: set[Any] = set()
        self._sum: Any = None

    def run(
        self, block: str, inputs: Mapping[str, ndarray], *, taps: bool, given: Mapping[str, ndarray] | None = None
    ) -> Result:
        """Run one block. Rename the mask argument, because Keras layers call it ``attention_mask``."""
        if block != ATTENTION:
            inputs = {"attention_mask" if name == "mask" else name: x for name, x in inputs.items()}
        return super().run(block, inputs, taps=taps, given=given)

    def to_array(self, array: ndarray) -> Any:
        import tensorflow as tf

        with self.inference():
            return tf.constant(array)

    def to_numpy(self, array: Any) -> ndarray:
        return array.numpy()

    def summed(self, mesh: Any, numbers: Sequence[float]) -> Any:
        import tensorflow as tf

        def on_device(found: Any) -> Any:
            return tf.distribute.get_replica_context().all_reduce("SUM", tf.identity(found))

        if self._sum is None:
            self._sum = tf.function(lambda found: mesh.run(on_device, (found,)), autograph=False)
        return mesh.experimental_local_results(self._sum(tf.constant(numbers, tf.float64)))[0].numpy()

    def inference(self) -> Any:
        import tensorflow as tf

        return tf.device(self.model.device)

    def quickly(self) -> Any:
        return self.package.runtime.quick_compilation()

    def run_fast(self, block: str, arrays: dict[str, Any]) -> Any:
        import tensorflow as tf

        by_xla = self.dtype == COMPILED_IN_FULL
        if block and not by_xla:  # run the block eagerly, because tracing takes much longer than one eager run
            return super().run_fast(block, arrays)
        if block not in self._compiled:
            function = find(*self.holding(block))
            self._compiled[block] = tf.function(lambda arrays: function(**arrays), jit_compile=by_xla)
        shapes = tuple((name, *array.shape) for name, array in arrays.items())
        with self.inference(), self._compiling((block, shapes)):
            return self._compiled[block](arrays)

    def search(self, source_ids: ndarray, options: Search, on_step: OnStep | None = None) -> SearchResult:
        # Searches that use other programs' rules run only in float64. Compile these searches with XLA anyway, because
        # the check must cover the compiled code.
        if self.dtype != COMPILED_IN_FULL and options.rules == SearchRules():
            with self.package.runtime.quick_compilation():
                return super().search(source_ids, options, on_step)
        with self._compiling((options, source_ids.shape)) as stop:

            def show(ids: ndarray) -> None:
                stop()  # everything is compiled by the end of the first step
                if on_step is not None:
                    on_step(ids)

            return super().search(source_ids, options, on_step and show)

    def trainer(self, settings: TrainingConfig) -> Any:
        return with_first_step(super().trainer(settings), COMPILING.running)

    @contextmanager
    def _compiling(self, what: Any) -> Iterator[Callable[[], None]]:
        """Record the duration of the first call as compile time, because TensorFlow doesn't report compile times."""
        first = what not in self._called
        self._called.add(what)
        with COMPILING.running() if first else nullcontext(lambda: None) as stop:
            yield stop
