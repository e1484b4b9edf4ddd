"""The port protocol, NumPy at the boundary, and the four built-in ports.

A port loads canonical weights and runs any block of the model: the whole (path ``""``), a method (``encode``), a
module by its attribute path (``encoder.layers.0.self_attention``), the attention that the model computes with
(``scaled_dot_product_attention``), the loss that it is trained with (``cross_entropy``), the log-probabilities of given
translations (``score``), or a part that is loaded alone (``Encoder``, ``Decoder``).
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

# The dtype in which XLA compiles as it does for users, and what it makes of a program is compared. float64 compares the
# formulas, and bfloat16 is a smoke test: there XLA compiles quickly in JAX, and is left out in TensorFlow, which traces
# whole models alone.
COMPILED_IN_FULL = "float32"
ATTENTION = "scaled_dot_product_attention"  # the block without parameters, which a fast model computes in its own way
CROSS_ENTROPY = "cross_entropy"  # the loss of given logits, summed, and the number of their target tokens
SCORE = "score"  # the log-probabilities of given translations
PARTS = ("Encoder", "Decoder")  # blocks that are models of their own, with the model's weights


class LoadedPackage:
    """A model of one of our four packages: they differ in how arrays go in and out, and in what is fast."""

    def __init__(self, package: Any, model: Any, placement: Placement) -> None:
        self.package = package
        self.model = model
        self.placement = placement
        self.dtype = placement.dtype
        self.parts: dict[str, Any] = {}  # loaded so far

    def export(self) -> dict[str, ndarray]:
        """Return every parameter by its canonical name."""
        return self.model.export_weights()

    def run(
        self, block: str, inputs: Mapping[str, ndarray], *, taps: bool, given: Mapping[str, ndarray] | None = None
    ) -> Result:
        """Run one block in inference mode; with taps off, the way a user runs it for speed."""
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
        """Whether the port promises to show a tap: ours show all."""
        return True

    def _to_arrays(self, arrays: Mapping[str, ndarray]) -> dict[str, Any]:
        rounded = {name: x.astype(self.dtype) if x.dtype == np.float64 else x for name, x in arrays.items()}
        return {name: self.to_array(x) for name, x in rounded.items()}

    def cross_entropy(self, arrays: dict[str, Any]) -> tuple[Any, Any]:
        """Return the loss of logits, summed over the target tokens, and their number."""
        return self.package.cross_entropy(**arrays, config=self.model.config)

    def gradients(self, inputs: Mapping[str, ndarray]) -> Gradients:
        """Return the loss of a batch and its gradients."""
        found = self.package.gradients(self.model, **inputs)
        if not found.taps:
            raise ValueError("gradients must hold one array per tap: got none")
        if found.frozen:
            raise ValueError(f"gradients must name no frozen parameter, because all are trained: got {found.frozen[0]}")
        return found

    def decode_stepwise(self, source_ids: ndarray, target_ids: ndarray) -> Result:
        """Return logits and taps of all target positions, decoded one after another with a cache."""
        start, step = self.stepwise()
        with self.inference():
            cache, steps = start(source_ids, target_ids.shape[1]), []
            for ids in target_ids.T:
                cache, seen = step(ids, cache)
                steps.append({name: self.to_numpy(value) for name, value in seen.items()})
        found = {name: _joined([seen[name] for seen in steps]) for name in steps[0]}
        return Result(found.pop(OUTPUT), found)

    def stepwise(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return the function that makes a cache, and the function that decodes a position with it."""
        return partial(start_cache, self.model), partial(decode_next, self.model)

    def search(self, source_ids: ndarray, options: Search, on_step: OnStep | None = None) -> SearchResult:
        """Return the best hypotheses of a batch."""
        return options.run(self.package, self.model, source_ids, on_step)

    def trainer(self, settings: TrainingConfig) -> Any:
        """Return what trains this model."""
        return self.package.Trainer(self.model, settings)

    def run_tapped(self, block: str, arrays: dict[str, Any], given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Run a block of the model with every tap recorded."""
        with self.inference():
            return call_tapped(find(*self.holding(block)), arrays, given)

    def run_fast(self, block: str, arrays: dict[str, Any]) -> Any:
        """Run a block of the model the way a user runs it for speed."""
        with self.inference():
            return find(*self.holding(block))(**arrays)

    def holding(self, block: str) -> tuple[Any, str]:
        """Return the model that holds a block, this one or a part of it alone, and the block's path in it."""
        if block not in PARTS:
            return self.model, block
        if block not in self.parts:
            kind, weights = getattr(self.package, block), self.model.export_weights()
            fast = self.model.fast
            self.parts[block] = kind.from_weights(self.model.config, weights, *self.placement, fast=fast)
        return self.parts[block], ""

    def summed(self, mesh: Any, numbers: Sequence[float]) -> Any:
        """Return the sum of each number over the processes of a mesh, all of which call this."""
        return numbers

    def quickly(self) -> AbstractContextManager[Any]:
        """Return the context for a method of a trainer that is called once."""
        return nullcontext()

    def inference(self) -> AbstractContextManager[Any]:
        """Return the context that a model is run in."""
        return nullcontext()

    def to_array(self, array: ndarray) -> Any:
        """Return the framework's own array."""
        return array

    def to_numpy(self, array: Any) -> ndarray:
        """Return a NumPy array."""
        return np.asarray(array)


def find(model: Any, block: str) -> Any:
    """Return the module, method or function that a block's path leads to."""
    if block == ATTENTION:
        return model.encoder.layers[0].self_attention.attend
    return names.find(model, block) if block else model


def call_tapped(
    function: Callable[..., Any], arrays: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Call a block with every tap recorded; norms and embeddings have none."""
    written = getattr(function, "forward", None) or getattr(function, "call", None) or function
    recorder = Recorder(replace=given, keep_computed=True)
    tap = {"tap": recorder} if "tap" in inspect.signature(written).parameters else {}
    return function(**arrays, **tap), OrderedDict(recorder)  # of a plain dict, jax.jit would sort the keys


def start_cache(model: Any, source_ids: Any, capacity: int) -> Any:
    """Return a cache for some target positions, given the memory; a search gives the source instead."""
    source_mask = source_ids != model.config.pad_id
    return model.init_cache(None, capacity, source_mask=source_mask, memory=model.encode(source_ids))


def decode_next(model: Any, target_ids: Any, cache: Any) -> tuple[Any, dict[str, Any]]:
    """Return the cache after one more target position, and the values at its taps with its logits [B, 1, V]."""
    seen = Recorder()
    logits, cache = model.decode_step(target_ids, cache, seen)
    return cache, {**seen, OUTPUT: logits[:, None]}


def _joined(steps: Sequence[ndarray]) -> ndarray:
    """Join the values of target positions, which are the last axis but one.

    Some packages return attention to the positions so far only; attention to later ones is zero.
    """
    width = max(step.shape[-1] for step in steps)
    padded = [np.pad(step, [(0, 0)] * (step.ndim - 1) + [(0, width - step.shape[-1])]) for step in steps]
    return np.concatenate(padded, -2)


def with_first_step(trainer: Any, compiling: Callable[[], AbstractContextManager[Any]]) -> Any:
    """Return a trainer whose first step, which compiles all of them, runs in a context."""
    step = trainer.train_step

    def first_step(*batch: Any, **named: Any) -> Any:
        trainer.train_step = step
        with compiling():
            return step(*batch, **named)

    trainer.train_step = first_step
    return trainer


def allow_dtype(package: ModuleType, dtype: str) -> ModuleType:
    """Return a package that can compute in a dtype. JAX switches float64 on for the whole process only."""
    if dtype == "float64" and package.__name__.startswith("transformer_jax"):
        import jax

        jax.config.update("jax_enable_x64", True)
    return package


@dataclass(frozen=True)
class PackagePort:
    """One of our four packages."""

    name: str
    package: str
    needs: tuple[str, ...]  # what has to be importable
    loaded: type[LoadedPackage]
    fast: bool = True  # False computes each formula as it is written

    def load(self, config: TransformerConfig, weights: Mapping[str, ndarray], placement: Placement) -> LoadedPackage:
        """Build a model that holds a copy of the weights."""
        package = allow_dtype(self.import_package(), placement.dtype)
        package.set_precision(placement.precision)  # also of what is called without a model
        model = package.Transformer.from_weights(config, weights, *placement, fast=self.fast)
        return self.loaded(package, model, placement)

    def import_package(self) -> Any:
        """Import the package and its framework.

        Raises:
            MissingFrameworkError: The framework is not installed.
        """
        self.check_installed()
        prepare_environment()
        return importlib.import_module(self.package)

    @property
    def install(self) -> str:
        """The line that installs its framework, and the command line."""
        return f"pip install '{DISTRIBUTION}[cli,{self.name}]'"

    def check_installed(self) -> None:
        """Raise MissingFrameworkError, with the install line, unless the framework can be found."""
        if missing := self.missing():
            raise MissingFrameworkError(
                f"backend {self.name!r} was asked for, but {missing} is not installed: "
                f"{self.install}, or leave it out with --backends"
            )

    def missing(self) -> str | None:
        """Return the first module that is not installed, or None."""
        return next((module for module in self.needs if importlib.util.find_spec(module) is None), None)
