"""The port protocol, NumPy at the boundary, and the four built-in ports.

A port loads canonical weights and runs any block of the model: the whole (path ``""``), a method (``encode``), a
module by its attribute path (``encoder.layers.0.self_attention``) or a function of the package
(``scaled_dot_product_attention``).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

import numpy as np
from numpy import ndarray

from reference_numpy.config import TransformerConfig
from reference_numpy.search_plan import OnStep, SearchResult
from reference_numpy.taps import Recorder
from reference_numpy.training_config import Gradients, TrainingConfig
from transformer_parity.clock import COMPILING
from transformer_parity.decoding import SearchOptions

# The dtype in which XLA compiles as it does for users, and what it makes of a program is compared. float64 compares the
# formulas, and bfloat16 is a smoke test: there XLA compiles quickly in JAX, and is left out in TensorFlow.
COMPILED_IN_FULL = "float32"
FUNCTIONS = ("scaled_dot_product_attention",)  # blocks that belong to the package, not to the model


@dataclass(frozen=True)
class Result:
    """What a block returned, and what its taps saw, in the order they fired."""

    output: ndarray
    taps: dict[str, ndarray]


class LoadedPort(Protocol):
    """A model that holds weights."""

    def export(self) -> dict[str, ndarray]:
        """Return every parameter by its canonical name."""

    def run(
        self, block: str, inputs: Mapping[str, ndarray], *, taps: bool, given: Mapping[str, ndarray] | None = None
    ) -> Result:
        """Run one block in inference mode.

        Args:
            block: The path of the block; empty for the whole model.
            inputs: Arrays by the name of the block's argument. Floats arrive in float64, ids as integers.
            taps: True records every tap; False runs the way a user runs it for speed, and records none.
            given: What to go on with behind a tap, by its name, in place of what was computed and recorded.
        """

    def shows(self, tap: str) -> bool:
        """Whether the port promises to show a tap, where the model has it."""

    def gradients(self, inputs: Mapping[str, ndarray]) -> Gradients:
        """Return the loss of a batch (source_ids, target_ids, labels) and its gradients, in inference mode."""

    def decode_stepwise(self, source_ids: ndarray, target_ids: ndarray) -> ndarray:
        """Return the logits of each target position, decoded one after another with a cache."""

    def search(self, source_ids: ndarray, options: SearchOptions, on_step: OnStep | None = None) -> SearchResult:
        """Return the best hypotheses of a batch, and show those that are unfinished after each step."""

    def trainer(self, settings: TrainingConfig, seed: int = 0) -> Any:
        """Return what trains this model, with ``train_step``, ``evaluate``, ``export_state`` and ``load_state``."""


class Port(Protocol):
    """An implementation of the model."""

    @property
    def name(self) -> str:
        """What it is called in tables."""

    def load(
        self, config: TransformerConfig, weights: Mapping[str, ndarray], dtype: str, device: str, precision: str
    ) -> LoadedPort:
        """Build a model that holds a copy of the weights."""


class MissingAbilityError(Exception):
    """Something that this port does not offer: it is skipped and counted, and never passes."""


class MissingFrameworkError(Exception):
    """A framework that was asked for is not installed; the message has the install line."""


class LoadedPackage:
    """A model of one of our four packages: they differ in how arrays go in and out, and in what is fast."""

    def __init__(self, package: Any, model: Any, dtype: str) -> None:
        self.package = package
        self.model = model
        self.dtype = dtype

    def export(self) -> dict[str, ndarray]:
        """Return every parameter by its canonical name."""
        return self.model.export_weights()

    def run(
        self, block: str, inputs: Mapping[str, ndarray], *, taps: bool, given: Mapping[str, ndarray] | None = None
    ) -> Result:
        """Run one block in inference mode; with taps off, the way a user runs it for speed."""
        arrays, instead = self._to_arrays(inputs), self._to_arrays(given or {})
        output, seen = self.run_tapped(block, arrays, instead) if taps else (self.run_fast(block, arrays), {})
        return Result(self.to_numpy(output), {name: self.to_numpy(value) for name, value in seen.items()})

    def shows(self, tap: str) -> bool:
        """Whether the port promises to show a tap: ours show all."""
        return True

    def _to_arrays(self, arrays: Mapping[str, ndarray]) -> dict[str, Any]:
        rounded = {name: x.astype(self.dtype) if x.dtype == np.float64 else x for name, x in arrays.items()}
        return {name: self.to_array(x) for name, x in rounded.items()}

    def gradients(self, inputs: Mapping[str, ndarray]) -> Gradients:
        """Return the loss of a batch and its gradients."""
        return self.package.gradients(self.model, **inputs)

    def decode_stepwise(self, source_ids: ndarray, target_ids: ndarray) -> ndarray:
        """Return the logits of each target position, decoded one after another with a cache."""
        return np.stack([self.to_numpy(logits) for logits in _decode_stepwise(self.model, source_ids, target_ids)], 1)

    def search(self, source_ids: ndarray, options: SearchOptions, on_step: OnStep | None = None) -> SearchResult:
        """Return the best hypotheses of a batch."""
        return options.search(self.package, self.model, source_ids, on_step)

    def trainer(self, settings: TrainingConfig, seed: int = 0) -> Any:
        """Return what trains this model."""
        return self.package.Trainer(self.model, settings, seed)

    def run_tapped(self, block: str, arrays: dict[str, Any], given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Run a block of the model with every tap recorded."""
        return _call_tapped(self.find(self.model, block), arrays, given)

    def run_fast(self, block: str, arrays: dict[str, Any]) -> Any:
        """Run a block of the model the way a user runs it for speed."""
        return self.find(self.model, block)(**arrays)

    def find(self, model: Any, block: str) -> Any:
        """Return the module, method or function that a block's path leads to."""
        if block in FUNCTIONS:
            return getattr(self.package, block)
        return self.package.weights.find(model, block) if block else model

    def to_array(self, array: ndarray) -> Any:
        """Return the framework's own array."""
        return array

    def to_numpy(self, array: Any) -> ndarray:
        """Return a NumPy array."""
        return np.asarray(array)


class Replay(Recorder):
    """A tap that keeps what it is shown, and goes on with something else where that is given."""

    def __call__(self, name: str, value: Any) -> Any:
        """Keep the value, and return it or what is given in its place."""
        return self.replace.get(name, self._keep(name, value))

    def _keep(self, name: str, value: Any) -> Any:
        if name in self:
            raise ValueError(f"tap {name} fired twice")
        self[name] = value
        return value


def _call_tapped(
    function: Callable[..., Any], arrays: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Call a block with every tap recorded; norms and embeddings have none."""
    written = getattr(function, "forward", None) or getattr(function, "call", None) or function
    recorder = Replay(replace=given)
    tap = {"tap": recorder} if "tap" in inspect.signature(written).parameters else {}
    return function(**arrays, **tap), OrderedDict(recorder)  # of a plain dict, jax.jit would sort the keys


def _decode_stepwise(model: Any, source_ids: Any, target_ids: Any) -> list[Any]:
    cache, found = model.init_cache(source_ids, target_ids.shape[1]), []
    for position in range(target_ids.shape[1]):
        logits, cache = model.decode_step(target_ids[:, position], cache)
        found.append(logits)
    return found


class _LoadedTorch(LoadedPackage):
    def to_array(self, array: ndarray) -> Any:
        import torch

        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(self.model.device)
        return torch.from_numpy(array.copy()).to(self.model.device)

    def to_numpy(self, array: Any) -> ndarray:
        import torch

        array = array.detach().cpu()
        if array.dtype == torch.bfloat16:
            return array.contiguous().view(torch.int16).numpy().view("bfloat16")
        return array.numpy()

    def run_tapped(self, block: str, arrays: dict[str, Any], given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        import torch

        with torch.inference_mode():
            return super().run_tapped(block, arrays, given)

    def decode_stepwise(self, source_ids: ndarray, target_ids: ndarray) -> ndarray:
        import torch

        with torch.inference_mode():
            return super().decode_stepwise(source_ids, target_ids)

    def run_fast(self, block: str, arrays: dict[str, Any]) -> Any:
        import torch

        with torch.inference_mode():
            return super().run_fast(block, arrays)


class _LoadedJax(LoadedPackage):
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
            return jax.numpy.stack(_decode_stepwise(nnx.merge(graph, state), source_ids, target_ids), 1)

        options = self.package.runtime.quick_compilation()
        return np.asarray(jax.jit(run, compiler_options=options)(state, source_ids, target_ids))

    def _jitted(self, tapped: bool) -> Callable[..., Any]:
        """Return one compiled function for all models: JAX compiles it again only where something static differs."""
        import jax
        from flax import nnx

        def run(graphdef: Any, state: Any, block: str, arrays: dict[str, Any], given: dict[str, Any]) -> Any:
            function = self.find(nnx.merge(graphdef, state), block)
            return _call_tapped(function, arrays, given) if tapped else function(**arrays)

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


class _LoadedTf(LoadedPackage):
    def __init__(self, package: Any, model: Any, dtype: str) -> None:
        super().__init__(package, model, dtype)
        self._compiled: dict[str, Callable[..., Any]] = {}
        self._called: set[Any] = set()

    def to_array(self, array: ndarray) -> Any:
        import tensorflow as tf

        with tf.device(self.model.device):
            return tf.constant(array)

    def to_numpy(self, array: Any) -> ndarray:
        return array.numpy()

    def run_tapped(self, block: str, arrays: dict[str, Any], given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        import tensorflow as tf

        with tf.device(self.model.device):
            return super().run_tapped(block, arrays, given)

    def run_fast(self, block: str, arrays: dict[str, Any]) -> Any:
        import tensorflow as tf

        if block not in self._compiled:
            function = self.find(self.model, block)
            by_xla = self.dtype == COMPILED_IN_FULL
            self._compiled[block] = tf.function(lambda arrays: function(**arrays), jit_compile=by_xla)
        shapes = tuple((name, *array.shape) for name, array in arrays.items())
        with tf.device(self.model.device), self._compiling((block, shapes)):
            return self._compiled[block](arrays)

    def search(self, source_ids: ndarray, options: SearchOptions, on_step: OnStep | None = None) -> SearchResult:
        with self._compiling((options, source_ids.shape)) as stop:

            def show(ids: ndarray) -> None:
                stop()  # by the end of the first step, all is compiled
                if on_step is not None:
                    on_step(ids)

            return super().search(source_ids, options, on_step and show)

    def trainer(self, settings: TrainingConfig, seed: int = 0) -> Any:
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


@dataclass(frozen=True)
class PackagePort:
    """One of our four packages."""

    name: str
    package: str
    needs: tuple[str, ...]  # what has to be importable
    loaded: type[LoadedPackage]

    def load(
        self, config: TransformerConfig, weights: Mapping[str, ndarray], dtype: str, device: str, precision: str
    ) -> LoadedPackage:
        """Build a model that holds a copy of the weights."""
        package = self.import_package()
        return self.loaded(package, package.Transformer.from_weights(config, weights, dtype, device, precision), dtype)

    def import_package(self) -> Any:
        """Import the package and its framework.

        Raises:
            MissingFrameworkError: The framework is not installed.
        """
        self.check_installed()
        prepare_environment()
        return importlib.import_module(self.package)

    def check_installed(self) -> None:
        """Raise MissingFrameworkError, with the install line, unless the framework can be found."""
        if missing := self.missing():
            raise MissingFrameworkError(
                f"backend {self.name!r} was asked for, but {missing} is not installed: "
                f"pip install 'transformer-parity[{self.name}]', or leave it out with --backends"
            )

    def missing(self) -> str | None:
        """Return the first module that is not installed, or None."""
        return next((module for module in self.needs if importlib.util.find_spec(module) is None), None)


def prepare_environment() -> None:
    """Let frameworks share a GPU instead of claiming it, and keep their start-up notices off the terminal."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


# torch stands before tensorflow: imported the other way round, some builds of the two crash.
PORTS: dict[str, PackagePort] = {
    "numpy": PackagePort("numpy", "reference_numpy", (), LoadedPackage),
    "torch": PackagePort("torch", "transformer_torch", ("torch",), _LoadedTorch),
    "jax": PackagePort("jax", "transformer_jax", ("jax", "flax"), _LoadedJax),
    "tf": PackagePort("tf", "transformer_tf", ("tensorflow", "keras"), _LoadedTf),
}


@contextmanager
def quiet_frameworks() -> Iterator[TextIO]:
    """Keep what compiled code prints to standard error off the terminal, and yield the terminal.

    TensorFlow announces its instruction sets however it is asked not to. What was held back is printed when something
    fails, because the reason may be in it.
    """
    sys.stderr.flush()
    with os.fdopen(os.dup(2), "w") as terminal, tempfile.TemporaryFile("w+", errors="replace") as held_back:
        os.dup2(held_back.fileno(), 2)
        try:
            yield terminal
        except BaseException:
            held_back.seek(0)
            terminal.write(held_back.read())
            raise
        finally:
            sys.stderr.flush()
            terminal.flush()
            os.dup2(terminal.fileno(), 2)
