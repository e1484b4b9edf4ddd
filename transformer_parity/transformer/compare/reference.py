"""The expected tensors of a case, computed by the float64 reference, and their tolerances.

A float32 tolerance is derived from the baseline, which is the reference's own error in float32. In ``parity check``,
the reference runs in the process that compares the outputs, and no port runs in this process (see docs/agreement.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy import ndarray

from transformer_parity.engine.tensors import Digest, Tensors, digest, given
from transformer_parity.engine.tolerances import NotFiniteError
from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.ports.package import LoadedPackage
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.ports.registry import DEFINITION
from transformer_parity.transformer.stages.decode import SCORES
from transformer_parity.transformer.stages.registry import STAGES
from transformer_parity.transformer.stages.stage import Expected

MODELS, TRUTHS = 3, 64  # maximum number of cached models and of cached expected results


@dataclass
class Reference:
    """Computes the expected tensors of cases, once for all ports.

    Args:
        ports: Number of ports that request each case. After this number of requests, the cached result is discarded.
    """

    ports: int = 1
    _models: dict[Any, LoadedPackage] = field(default_factory=dict)
    _known: dict[Any, Expected | NotFiniteError] = field(default_factory=dict)
    _asked: dict[Any, int] = field(default_factory=dict)
    _truths: dict[Any, Tensors] = field(default_factory=dict)
    _digests: dict[Any, Mapping[str, Digest]] = field(default_factory=dict)
    _last: tuple[Any, Mapping[str, ndarray]] | None = None

    def expected(self, case: Case, placement: Placement) -> Expected:
        """Return the expected tensors of a case.

        Raises:
            NotFiniteError: If the reference overflows in float64 or, if the working dtype is float32, in float32.
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
        """Return the digests of the weights that a port must export."""
        key = (*_model_key(case, dtype), dtype)
        if key not in self._digests:
            weights = self._weights(case, dtype)
            self._digests[key] = {name: digest(array.astype(dtype)) for name, array in weights.items()}
        return self._digests[key]

    def _weights(self, case: Case, working: str) -> Mapping[str, ndarray]:
        """Return the weights that ports receive. The weights of the last model are cached."""
        key = _model_key(case, working)
        if self._last is None or self._last[0] != key:
            self._last = (key, given(case.load_weights(), working))
        return self._last[1]

    def _compute(self, case: Case, placement: Placement) -> Expected:
        with np.errstate(all="ignore"):  # _check_finite reports values that aren't finite
            exact = self._model(case, "float64", placement.dtype)
            rounded = self._model(case, "float32", placement.dtype) if placement.dtype == "float32" else None
            truth = self._truth(case, exact, placement.dtype)
            baseline: Mapping[str, ndarray] = {}
            if rounded is not None and STAGES[case.stage].has_baseline:
                baseline = _run(case, rounded, "float32")
                _check_finite(baseline, "float32")
            tolerances = STAGES[case.stage].tolerances(truth, baseline, placement)
            if baseline:
                for seed in range(STAGES[case.stage].perturbed_baselines):
                    more = self._perturbed_tolerances(case, placement, seed)
                    tolerances = {name: max(allowed, more[name]) for name, allowed in tolerances.items()}
            return Expected(truth, tolerances, exact, rounded)

    def _perturbed_tolerances(self, case: Case, placement: Placement, seed: int) -> dict[str, float]:
        """Return tolerances derived from a run in which each weight is perturbed to a neighboring float32 number.

        The error of one float32 run is random. If this error happens to be small, a tolerance based only on it would
        reject other correct implementations.
        """
        rng = np.random.default_rng(seed)
        weights = {}
        for name, array in self._weights(case, placement.dtype).items():
            toward = np.where(rng.random(array.shape) < 0.5, -np.inf, np.inf).astype(np.float32)
            weights[name] = np.nextafter(array.astype(np.float32), toward)
        exact, rounded = (
            _run(case, DEFINITION.load(case.config, weights, Placement(dtype)), dtype)
            for dtype in ("float64", "float32")
        )
        _check_finite(rounded, "float32")
        return STAGES[case.stage].tolerances(exact, rounded, placement)

    def _truth(self, case: Case, exact: LoadedPackage, dtype: str) -> Tensors:
        """Return the float64 outputs, which are the same whether the working dtype is float64 or float32."""
        key = _key(case, dtype)
        if STAGES[case.stage].trains:  # if the working dtype is float32, training stops earlier than in float64
            key = (key, dtype)
        if key not in self._truths:
            truth = _run(case, exact, dtype)
            _check_finite(truth, "float64")
            self._truths[key] = truth
            while len(self._truths) > TRUTHS:
                del self._truths[next(iter(self._truths))]
        return self._truths[key]

    def _model(self, case: Case, dtype: str, working: str) -> LoadedPackage:
        """Return the reference in a dtype. If the working dtype is bfloat16, round the weights to bfloat16 first."""
        key = (*_model_key(case, working), dtype)
        trains = STAGES[case.stage].trains
        if trains or key not in self._models:  # training modifies a model, so it can't be cached
            model = DEFINITION.load(case.config, self._weights(case, working), Placement(dtype))
            if trains:
                return model
            self._models[key] = model
            while len(self._models) > MODELS:
                del self._models[next(iter(self._models))]
        return self._models[key]


def _model_key(case: Case, dtype: str) -> tuple[Any, ...]:
    """Return the cache key of a model. The key includes whether weights and inputs are rounded to bfloat16."""
    return *case.model, dtype == "bfloat16"


def _key(case: Case, dtype: str) -> tuple[Any, ...]:
    return case.name, case.snapshots, *_model_key(case, dtype)


def _run(case: Case, model: LoadedPackage, dtype: str) -> Tensors:
    return STAGES[case.stage].expected(replace(case, inputs=given(case.inputs, dtype)), model, dtype)


def _check_finite(found: Mapping[str, ndarray], dtype: str) -> None:
    for name, value in found.items():
        if name != SCORES and not np.isfinite(value).all():  # a missing hypothesis has the score -inf
            raise NotFiniteError(f"the reference is not finite in {dtype} at {name}")
