"""What a case must yield: the float64 reference, and the tolerance of each tensor.

A tolerance in float32 follows from the baseline: the error that the reference itself makes in float32. The reference
computes in the process that compares, where no port runs (see docs/agreement.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy import ndarray

from transformer_parity.transformer.cases.case import ACTIVATIONS, DECODE, STEPS, Case
from transformer_parity.transformer.compare import training_outputs
from transformer_parity.transformer.compare.outputs import (
    LOGITS,
    SCORES,
    TOKENS,
    Digest,
    Tensors,
    digest,
    given,
    tensors,
)
from transformer_parity.transformer.compare.tolerances import NotFiniteError, relative_error, tolerance
from transformer_parity.transformer.ports.package import LoadedPackage
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.ports.registry import PORTS

MODELS, TRUTHS = 3, 64  # that are kept


@dataclass(frozen=True)
class Expected:
    """What one case must yield in one dtype.

    Attributes:
        tensors: The float64 truth by name, in the order of computation.
        tolerances: The largest error that agrees, by name; those of a search depend on what was found.
        exact: The reference in float64, for searches.
        rounded: The reference in float32, where that is the dtype.
    """

    tensors: Tensors
    tolerances: dict[str, float]
    exact: LoadedPackage
    rounded: LoadedPackage | None


@dataclass
class Reference:
    """Computes what cases must yield, each once however many ports are compared.

    Args:
        ports: How many ports will ask for each case; after the last, it is forgotten.
    """

    ports: int = 1
    _models: dict[Any, LoadedPackage] = field(default_factory=dict)
    _known: dict[Any, Expected | NotFiniteError] = field(default_factory=dict)
    _asked: dict[Any, int] = field(default_factory=dict)
    _truths: dict[Any, Tensors] = field(default_factory=dict)
    _digests: dict[Any, Mapping[str, Digest]] = field(default_factory=dict)
    _last: tuple[Any, Mapping[str, ndarray]] | None = None

    def expected(self, case: Case, placement: Placement) -> Expected:
        """Return what a case must yield.

        Raises:
            NotFiniteError: The reference overflows in float64, or in float32 where that is the dtype.
        """
        key = (_key(case, placement.dtype), placement)
        if key not in self._known:
            try:
                self._known[key] = self._compute(case, placement)
            except NotFiniteError as error:
                self._known[key] = error
        found = self._known[key]
        self._asked[key] = self._asked.get(key, 0) + 1
        if self._asked[key] >= self.ports:
            del self._known[key], self._asked[key]
        if isinstance(found, NotFiniteError):
            raise found
        return found

    def digests(self, case: Case, dtype: str) -> Mapping[str, Digest]:
        """Return the digests of the weights that must come back from a port."""
        key = (*_model_key(case, dtype), dtype)
        if key not in self._digests:
            weights = self._weights(case, dtype)
            self._digests[key] = {name: digest(array.astype(dtype)) for name, array in weights.items()}
        return self._digests[key]

    def _weights(self, case: Case, working: str) -> Mapping[str, ndarray]:
        """Return the weights that a port is given; those of the last model are kept."""
        key = _model_key(case, working)
        if self._last is None or self._last[0] != key:
            self._last = (key, given(case.load_weights(), working))
        return self._last[1]

    def _compute(self, case: Case, placement: Placement) -> Expected:
        with np.errstate(all="ignore"):  # what is not finite is reported by name
            exact = self._model(case, "float64", placement.dtype)
            rounded = self._model(case, "float32", placement.dtype) if placement.dtype == "float32" else None
            truth = self._truth(case, exact, placement.dtype)
            baseline: Mapping[str, ndarray] = {}
            if rounded is not None and case.stage != STEPS:  # whose tolerances are fixed
                baseline = _run(case, rounded, "float32")
                _check_finite(baseline, "float32")
            return Expected(truth, _tolerances(case, placement, truth, baseline), exact, rounded)

    def _truth(self, case: Case, exact: LoadedPackage, dtype: str) -> Tensors:
        """Return the outputs in float64, which are the same for float64 and float32."""
        key = _key(case, dtype)
        if case.stage == STEPS:  # fewer steps in float32
            key = (key, dtype)
        if key not in self._truths:
            truth = _run(case, exact, dtype)
            _check_finite(truth, "float64")
            self._truths[key] = truth
            while len(self._truths) > TRUTHS:
                del self._truths[next(iter(self._truths))]
        return self._truths[key]

    def _model(self, case: Case, dtype: str, working: str) -> LoadedPackage:
        """Return the reference in a dtype; only for bfloat16 are its weights rounded beforehand."""
        key = (*_model_key(case, working), dtype)
        if case.stage == STEPS or key not in self._models:  # training changes a model
            model = PORTS["numpy"].load(case.config, self._weights(case, working), Placement(dtype))
            if case.stage == STEPS:
                return model
            self._models[key] = model
            while len(self._models) > MODELS:
                del self._models[next(iter(self._models))]
        return self._models[key]


def _model_key(case: Case, dtype: str) -> tuple[Any, ...]:
    """Return what tells one model from another: weights and inputs are rounded beforehand for bfloat16."""
    return case.config, case.weights_file, case.seed, dtype == "bfloat16"


def _key(case: Case, dtype: str) -> tuple[Any, ...]:
    return case.name, *_model_key(case, dtype)


def _run(case: Case, model: LoadedPackage, dtype: str) -> Tensors:
    """Return what the reference yields; of a search, the logits of all positions at once, and plain tokens."""
    inputs = given(case.inputs, dtype)
    if case.stage != DECODE:
        return tensors(model, replace(case, inputs=inputs), dtype)
    found = model.search(inputs["source_ids"], case.options)
    searched = {TOKENS: found.nbest_ids, SCORES: found.nbest_scores}
    if case.options.beam_size is None and "target_ids" in inputs:
        return {LOGITS: model.model(inputs["source_ids"], inputs["target_ids"]), **searched}
    return searched


def _check_finite(found: Mapping[str, ndarray], dtype: str) -> None:
    for name, value in found.items():
        if name != SCORES and not np.isfinite(value).all():  # -inf is the score of no hypothesis
            raise NotFiniteError(f"the reference is not finite in {dtype} at {name}")


def _tolerances(case: Case, placement: Placement, exact: Tensors, baseline: Mapping[str, ndarray]) -> dict[str, float]:
    """Return the tolerance of every tensor but those of a search."""
    dtype, precision, device = placement.dtype, placement.precision, placement.device
    names = [name for name in exact if name not in (TOKENS, SCORES)] if case.stage == DECODE else list(exact)
    if case.stage in (ACTIVATIONS, DECODE):
        own = {name: relative_error(baseline[name], exact[name]) for name in names if name in baseline}
        return {name: tolerance(name, dtype, own.get(name, 0.0), precision, device) for name in names}
    own = {name: training_outputs.training_error(name, baseline, exact) for name in names if name in baseline}
    whole = own.get(training_outputs.WHOLE, 0.0)
    return {name: training_outputs.training_tolerance(name, dtype, own.get(name, 0.0), whole) for name in names}
