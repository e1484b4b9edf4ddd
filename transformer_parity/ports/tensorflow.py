"""The TensorFlow package behind the port protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from numpy import ndarray

from reference_numpy.search_plan import OnStep, SearchResult
from reference_numpy.training_config import TrainingConfig
from transformer_parity.ports.compile_clock import COMPILING
from transformer_parity.ports.package import COMPILED_IN_FULL, LoadedPackage, find
from transformer_parity.ports.protocol import SearchOptions


class LoadedTf(LoadedPackage):
    """A model of the TensorFlow package: what runs fast is compiled."""

    def __init__(self, package: Any, model: Any, dtype: str) -> None:
        super().__init__(package, model, dtype)
        self._compiled: dict[str, Callable[..., Any]] = {}
        self._called: set[Any] = set()

    def to_array(self, array: ndarray) -> Any:
        """Return the framework's own array."""
        import tensorflow as tf

        with tf.device(self.model.device):
            return tf.constant(array)

    def to_numpy(self, array: Any) -> ndarray:
        """Return a NumPy array."""
        return array.numpy()

    def run_tapped(self, block: str, arrays: dict[str, Any], given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Run a block of the model with every tap recorded."""
        import tensorflow as tf

        with tf.device(self.model.device):
            return super().run_tapped(block, arrays, given)

    def run_fast(self, block: str, arrays: dict[str, Any]) -> Any:
        """Run a block of the model the way a user runs it for speed."""
        import tensorflow as tf

        if block not in self._compiled:
            function = find(self.package, self.model, block)
            by_xla = self.dtype == COMPILED_IN_FULL
            self._compiled[block] = tf.function(lambda arrays: function(**arrays), jit_compile=by_xla)
        shapes = tuple((name, *array.shape) for name, array in arrays.items())
        with tf.device(self.model.device), self._compiling((block, shapes)):
            return self._compiled[block](arrays)

    def search(self, source_ids: ndarray, options: SearchOptions, on_step: OnStep | None = None) -> SearchResult:
        """Return the best hypotheses of a batch."""
        with self._compiling((options, source_ids.shape)) as stop:

            def show(ids: ndarray) -> None:
                stop()  # by the end of the first step, all is compiled
                if on_step is not None:
                    on_step(ids)

            return super().search(source_ids, options, on_step and show)

    def trainer(self, settings: TrainingConfig, seed: int = 0) -> Any:
        """Return what trains this model."""
        trainer = super().trainer(settings, seed)
        step = trainer.train_step

        def first_step(*batch: Any, **named: Any) -> Any:
            trainer.train_step = step
            with COMPILING.running():
                return step(*batch, **named)

        trainer.train_step = first_step
        return trainer

    @contextmanager
    def _compiling(self, what: Any) -> Iterator[Callable[[], None]]:
        """Count the first call as time spent compiling: TensorFlow does not tell how much of it is."""
        first = what not in self._called
        self._called.add(what)
        with COMPILING.running() if first else nullcontext(lambda: None) as stop:
            yield stop
