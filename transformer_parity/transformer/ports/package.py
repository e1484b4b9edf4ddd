"""Base class for the adapters of the four packages. The adapters take and return NumPy arrays.

An adapter loads canonical weights and runs any block of the model. The path of a block is one of the following:

- ``""``: the full model
- ``encode``: a method of the model
- ``encoder.layers.0.self_attention``: a module, by its attribute path
- ``scaled_dot_product_attention``: the attention function that the model uses
- ``cross_entropy``: the training loss
- ``score``: the log-probabilities of given translations
- ``Encoder``, ``Decoder``: the encoder or the decoder, loaded as a separate model
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
from numpy import ndarray

from transformer_parity.engine.outputs import OUTPUT
from transformer_parity.engine.system.environment import prepare_environment
from transformer_parity.engine.system.machine import DISTRIBUTION
from transformer_parity.transformer.ports.protocol import MissingFrameworkError, Placement, Result
from transformer_spec import names
from transformer_spec.config import TransformerConfig
from transformer_spec.search import OnStep, Search, SearchResult
from transformer_spec.taps import Recorder
from transformer_spec.training_config import Gradients, TrainingConfig

# In this dtype, models are compiled with all XLA optimizations, as in normal use. Only float32 runs therefore check the
# optimized programs. float64 runs check only the formulas, and bfloat16 runs are smoke tests. In these two
# dtypes, JAX compiles with fewer optimizations, and TensorFlow traces only full models and doesn't use XLA.
COMPILED_IN_FULL = "float32"
ATTENTION = "scaled_dot_product_attention"  # a block without parameters; fast models use a fused implementation
CROSS_ENTROPY = "cross_entropy"  # the summed loss of given logits, and the number of target tokens
SCORE = "score"  # the log-probabilities of given translations
PARTS = ("Encoder", "Decoder")  # blocks that can be loaded as separate models, with the weights of the full model


class LoadedPackage:
    """A model of one of the four packages.

    Subclasses convert arrays between NumPy and the framework, and run blocks in the same way as users of the framework.
    """

    def __init__(self, package: Any, model: Any, placement: Placement) -> None:
        self.package = package
        self.model = model
        self.placement = placement
        self.dtype = placement.dtype
        self.parts: dict[str, Any] = {}  # maps a name to the separately loaded encoder or decoder

    def export(self) -> dict[str, ndarray]:
        """Return all parameters, keyed by canonical name."""
        return self.model.export_weights()

    def run(
        self, block: str, inputs: Mapping[str, ndarray], *, taps: bool, given: Mapping[str, ndarray] | None = None
    ) -> Result:
        """Run one block in inference mode. Without taps, use the model's fast path."""
        arrays, instead = self._to_arrays(inputs), self._to_arrays(given or {})
        if block == CROSS_ENTROPY:
            loss, tokens = self.cross_entropy(arrays)
            return Result(np.array(float(tokens)), {"loss": np.array(float(loss))})
        if block == SCORE:
            scores = self.package.score(self.model, **arrays)
            return Result(self.to_numpy(scores.tokens), {"sequences": self.to_numpy(scores.sequences)})
        output, seen = self.run_tapped(block, arrays, instead) if taps else (self.run_fast(block, arrays), {})
        return Result(self.to_numpy(output), {name: self.to_numpy(value) for name, value in seen.items()})

    def shows(self, tap: str) -> bool:
        """Return True, because the four packages report every tap."""
        return True

    def _to_arrays(self, arrays: Mapping[str, ndarray]) -> dict[str, Any]:
        rounded = {name: x.astype(self.dtype) if x.dtype == np.float64 else x for name, x in arrays.items()}
        return {name: self.to_array(x) for name, x in rounded.items()}

    def cross_entropy(self, arrays: dict[str, Any]) -> tuple[Any, Any]:
        """Return the loss of given logits, summed over the target tokens, and the number of target tokens."""
        return self.package.cross_entropy(**arrays, config=self.model.config)

    def gradients(self, inputs: Mapping[str, ndarray]) -> Gradients:
        """Return the loss for a batch and the gradients of the loss."""
        found = self.package.gradients(self.model, **inputs)
        if not found.taps:
            raise ValueError("gradients must contain one array per tap: got none")
        if found.frozen:
            raise ValueError(
                "the field `frozen` of the gradients must be empty, because the check doesn't freeze any parameters: "
                f"got {found.frozen[0]}"
            )
        return found

    def decode_stepwise(self, source_ids: ndarray, target_ids: ndarray) -> Result:
        """Decode all target positions one at a time with a cache, and return the logits and taps of all positions."""
        start, step = self.stepwise()
        with self.inference():
            cache, steps = start(source_ids, target_ids.shape[1]), []
            for ids in target_ids.T:
                cache, seen = step(ids, cache)
                steps.append({name: self.to_numpy(value) for name, value in seen.items()})
        found = {name: _joined(name, [seen[name] for seen in steps]) for name in steps[0]}
        return Result(found.pop(OUTPUT), found)

    def stepwise(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return two functions: one that creates a cache, and one that decodes one position with the cache."""
        return partial(start_cache, self.model), partial(decode_next, self.model)

    def search(self, source_ids: ndarray, options: Search, on_step: OnStep | None = None) -> SearchResult:
        """Return the best hypotheses of a batch."""
        return options.run(self.package, self.model, source_ids, on_step)

    def trainer(self, settings: TrainingConfig) -> Any:
        """Return a trainer for this model."""
        return self.package.Trainer(self.model, settings)

    def run_tapped(self, block: str, arrays: dict[str, Any], given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Run a block of the model and record every tap."""
        with self.inference():
            return call_tapped(find(*self.holding(block)), arrays, given)

    def run_fast(self, block: str, arrays: dict[str, Any]) -> Any:
        """Run a block of the model on its fast path, without taps."""
        with self.inference():
            return find(*self.holding(block))(**arrays)

    def holding(self, block: str) -> tuple[Any, str]:
        """Return the model that contains a block, and the path of the block in that model.

        For a block in ``PARTS``, the model is the encoder or decoder, which is loaded separately on first use.
        """
        if block not in PARTS:
            return self.model, block
        if block not in self.parts:
            kind, weights = getattr(self.package, block), self.model.export_weights()
            fast = self.model.fast
            self.parts[block] = kind.from_weights(self.model.config, weights, *self.placement, fast=fast)
        return self.parts[block], ""

    def summed(self, mesh: Any, numbers: Sequence[float]) -> Any:
        """Return the sum of each number over the processes in a mesh. All processes must call this method."""
        return numbers

    def quickly(self) -> AbstractContextManager[Any]:
        """Return a context that reduces compile time, for trainer methods that are called only once."""
        return nullcontext()

    def inference(self) -> AbstractContextManager[Any]:
        """Return a context for running the model in inference mode."""
        return nullcontext()

    def to_array(self, array: ndarray) -> Any:
        """Convert a NumPy array to the framework's array type."""
        return array

    def to_numpy(self, array: Any) -> ndarray:
        """Convert a framework array to a NumPy array."""
        return np.asarray(array)


def find(model: Any, block: str) -> Any:
    """Return the module, method, or function with the path ``block``."""
    if block == ATTENTION:
        return model.encoder.layers[0].self_attention.attend
    return names.find(model, block) if block else model


def call_tapped(
    function: Callable[..., Any], arrays: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Call a block and record every tap. Norms and embeddings have no taps."""
    written = getattr(function, "forward", None) or getattr(function, "call", None) or function
    recorder = Recorder(replace=given, keep_computed=True)
    tap = {"tap": recorder} if "tap" in inspect.signature(written).parameters else {}
    return function(**arrays, **tap), OrderedDict(recorder)  # jax.jit would sort the keys of a plain dict


def start_cache(model: Any, source_ids: Any, capacity: int) -> Any:
    """Return a cache with capacity for ``capacity`` target positions.

    The cache is built from the encoder memory. In contrast, searches build their caches from the source IDs.
    """
    source_mask = source_ids != model.config.pad_id
    return model.init_cache(None, capacity, source_mask=source_mask, memory=model.encode(source_ids))


def decode_next(model: Any, target_ids: Any, cache: Any) -> tuple[Any, dict[str, Any]]:
    """Decode one more target position, and return the updated cache and the taps, including the logits [B, 1, V]."""
    seen = Recorder()
    logits, cache = model.decode_step(target_ids, cache, seen)
    return cache, {**seen, OUTPUT: logits[:, None]}


def _joined(name: str, steps: Sequence[ndarray]) -> ndarray:
    """Concatenate the values of a tap for individual target positions along the second-to-last axis.

    Some packages return attention weights only for the positions that have been decoded. Pad these weights with zeros,
    because the weights of later positions are zero. Also set the scores and biases of later positions to zero, because
    a mask excludes them.
    """
    if name.endswith(("self_attention.scores", "relative_bias.output")):
        steps = [step[..., : i + 1] for i, step in enumerate(steps)]
    width = max(step.shape[-1] for step in steps)
    padded = [np.pad(step, [(0, 0)] * (step.ndim - 1) + [(0, width - step.shape[-1])]) for step in steps]
    return np.concatenate(padded, -2)


def with_first_step(trainer: Any, compiling: Callable[[], AbstractContextManager[Any]]) -> Any:
    """Return a trainer that runs its first step in the given context, because the first step triggers compilation."""
    step = trainer.train_step

    def first_step(*batch: Any, **named: Any) -> Any:
        trainer.train_step = step
        with compiling():
            return step(*batch, **named)

    trainer.train_step = first_step
    return trainer


def allow_dtype(package: ModuleType, dtype: str) -> ModuleType:
    """Return the package after enabling a dtype. JAX supports float64 only if it is enabled for the whole process."""
    if dtype == "float64" and package.__name__.startswith("transformer_jax"):
        import jax

        jax.config.update("jax_enable_x64", True)
    return package


@dataclass(frozen=True)
class PackagePort:
    """One of the four packages.

    Attributes:
        name: Name of the backend.
        package: Name of the Python package.
        needs: Modules that must be installed.
        loaded: Class of the loaded model.
        fast: True to use the package's fast implementations, False to compute each formula exactly as written.
    """

    name: str
    package: str
    needs: tuple[str, ...]
    loaded: type[LoadedPackage]
    fast: bool = True

    def load(self, config: TransformerConfig, weights: Mapping[str, ndarray], placement: Placement) -> LoadedPackage:
        """Build a model with a copy of the weights."""
        package = allow_dtype(self.import_package(), placement.dtype)
        package.set_precision(placement.precision)  # also applies to functions that don't take a model
        model = package.Transformer.from_weights(config, weights, *placement, fast=self.fast)
        return self.loaded(package, model, placement)

    def import_package(self) -> Any:
        """Import the package and its framework.

        Raises:
            MissingFrameworkError: If the framework is not installed.
        """
        self.check_installed()
        prepare_environment()
        return importlib.import_module(self.package)

    @property
    def install(self) -> str:
        """Shell command that installs the framework and the command-line interface."""
        return f"pip install '{DISTRIBUTION}[cli,{self.name}]'"

    def check_installed(self) -> None:
        """Raise a MissingFrameworkError with the install command unless the framework is installed."""
        if missing := self.missing():
            raise MissingFrameworkError(
                f"backend {self.name!r} requires {missing}, which is not installed: "
                f"run {self.install}, or exclude the backend with --backends"
            )

    def missing(self) -> str | None:
        """Return the first required module that is not installed, or None if all are installed."""
        return next((module for module in self.needs if importlib.util.find_spec(module) is None), None)
