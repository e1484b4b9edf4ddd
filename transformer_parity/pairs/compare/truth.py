"""The truth and the tolerances, both measured on the implementation that the user trusts.

- The truth is the original in float64.
- In a narrower dtype, a port may have several times the error that the original itself makes in this dtype. One run is
  too optimistic, because its error is random, and because a discrete decision such as a top-k may or may not flip.
  Therefore, the tolerance is based on the largest error for several inputs and several perturbed weights.
- In float64, there is nothing more precise to compare with. The noise of the original is measured instead: if the
  weights and inputs change by tiny equal steps, the tensors of a smooth function change along a polynomial, and the
  fourth difference of five steps contains only rounding errors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy import ndarray

from transformer_parity.engine.tensors import Tensors
from transformer_parity.engine.tolerances import EPS, POLICY, by_baseline
from transformer_parity.pairs.compare.conditions import fingerprints, unusable, varied_inputs
from transformer_parity.pairs.compare.difference import difference, kept, parts
from transformer_parity.pairs.contract.arrays import cast, is_float, rounded, varied
from transformer_parity.pairs.contract.implementation import Arrays
from transformer_parity.pairs.run.messages import Ran
from transformer_parity.pairs.run.side import Side, SideModel

ALL_EPS = {**EPS, "float16": 2.0**-10}
OFF_GRID = 2.0**-20  # relative change of the weights so that they aren't representable in float32
STEP = 2.0**-26  # relative change of the weights from step to step, smaller than a rounding error of float32
WEIGHTS_OF_STEPS = {-2: 1.0, -1: -4.0, 0: 6.0, 1: -4.0, 2: 1.0}  # coefficients of the fourth difference
PERTURBED = 3  # number of perturbed weights in each dtype
ZERO = 1e-4  # a tensor is zero except for rounding if it is this much smaller in float64 than in a narrower dtype
SAME = 1e-9  # largest relative difference of two identical runs, which may use different numbers of threads
ZERO_RATIO = 16.0  # largest accepted size of such a tensor, as a multiple of the original's


class RunStage(Protocol):
    """A function that runs a stage of a model, and returns its tensors in the order of computation."""

    def __call__(self, stage: str, model: SideModel, batch: int, inputs: Arrays | None = None) -> Tensors:
        """Run a stage on a batch, or on other inputs of the same shapes."""


class NoTruthError(Exception):
    """The original can't be used for a comparison."""


@dataclass
class Truth:
    """The tensors of the original, and the tolerances for a port.

    Args:
        original: The implementation that the user trusts.
        weights: Its weights, before they are rounded to a dtype.
        batches: The inputs, one batch per seed.
        run: A function that runs a stage.
    """

    original: Side
    weights: Arrays
    batches: Sequence[Arrays]
    run: RunStage
    models: dict[str, SideModel] = field(default_factory=dict)
    _known: dict[tuple[str, str, int], Tensors] = field(default_factory=dict)
    _noises: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        """The dtype of the truth: float64, or float32 if the original can't run in float64."""
        return "float64" if "float64" in self.original.imported.dtypes else "float32"

    def model(self, dtype: str = "") -> SideModel:
        """Return the original in a dtype. By default, return it in the dtype of the truth.

        In a narrow dtype such as bfloat16, weights are rounded to this dtype in both implementations.
        """
        dtype = dtype or self.dtype
        if dtype not in self.models:
            self.models[dtype] = self.original.model(rounded(self.weights, dtype), dtype)
        return self.models[dtype]

    def of_port(self, port: Side, dtype: str) -> SideModel:
        """Return the port in a dtype, with the same weights as the original."""
        return port.model(self.model(dtype).weights, dtype)

    def exact(self, dtype: str) -> SideModel:
        """Return the original in the dtype of the truth, with the weights that a port has in ``dtype``."""
        if ALL_EPS[dtype] <= ALL_EPS["float32"]:
            return self.model()
        key = f"exact {dtype}"
        if key not in self.models:
            weights = cast(rounded(self.weights, dtype), self.dtype)
            self.models[key] = self.original.model(weights, self.dtype)
        return self.models[key]

    def perturbed(self, dtype: str, size: float, seed: int) -> Arrays:
        """Return the weights in a dtype, changed by random relative amounts of up to ``size``."""
        rng = np.random.default_rng(seed)
        return rounded(varied(cast(self.weights, "float64"), size, rng), dtype)

    def first_runs(self) -> list[Ran]:
        """Return the results of the original for all batches.

        Raises:
            NoTruthError: If a comparison with these results would be meaningless.
        """
        runs, name = [self.model().forward(batch) for batch in self.batches], self.original.name
        again = self.model().forward(self.batches[0]).outputs
        if any(ran.outputs.keys() != runs[0].outputs.keys() for ran in runs):
            raise NoTruthError(f"{name}.forward() must return the same outputs for all inputs")
        for output, value in runs[0].outputs.items():
            if output not in again or not difference(again[output], value) <= SAME:
                raise NoTruthError(f"{name} returns different values from call to call: {output!r} differs")
            if is_float(value) and value.dtype.name != self.dtype:
                raise NoTruthError(
                    f"{name} must return {self.dtype} outputs if load() gets this dtype: "
                    f"{output!r} has dtype {value.dtype.name}; if it can't run in float64, set dtypes = ('float32',)"
                )
        if why := unusable([fingerprints(ran.outputs) for ran in runs]):
            raise NoTruthError(f"nothing can be concluded from {name}.forward(): {why}")
        return runs

    def tensors(self, stage: str, batch: int, dtype: str = "") -> Tensors:
        """Return the original's tensors in the dtype of the truth, with the weights that a port has in ``dtype``."""
        return self._run(stage, self.exact(dtype or self.dtype), batch)

    def tolerances(self, stage: str, dtype: str) -> Tolerances:
        """Return the largest accepted error of each tensor in a dtype.

        Raises:
            NoTruthError: If the original's own error is so large that a comparison would be meaningless.
        """
        if dtype == "float64":
            rule = POLICY["pair"]["float64"]
            allowed = {name: rule["ratio"] * noise + rule["floor"] for name, noise in self.noise(stage).items()}
            return self._checked(Tolerances(allowed, self._zeros(stage)), rule["most"], dtype)
        own: dict[str, float] = {}
        for narrow, exact in self._spread(stage) if dtype == self.dtype else self._errors(stage, dtype):
            for name, value in exact.items():
                if is_float(value) and name in narrow:
                    own[name] = max(own.get(name, 0.0), difference(narrow[name], value))
        rule = POLICY["pair"]["rounded"]
        allowed = {name: by_baseline(rule, error, ALL_EPS[dtype]) for name, error in own.items()}
        return self._checked(Tolerances(allowed, self._zeros(stage)), rule["most"][dtype], dtype)

    def noise(self, stage: str) -> dict[str, float]:
        """Return the relative rounding error of each tensor in float64, from its fourth difference."""
        if stage not in self._noises:
            self._noises[stage] = self._noise(stage)
        return self._noises[stage]

    def _noise(self, stage: str) -> dict[str, float]:
        rng = np.random.default_rng(0)
        base = varied(self.model().weights, OFF_GRID, rng)
        batches = [varied_inputs(cast(batch, "float64"), OFF_GRID, rng) for batch in self.batches[:2]]
        seed = int(rng.integers(1 << 32))
        total: dict[tuple[int, str], ndarray] = {}
        for step, weight in WEIGHTS_OF_STEPS.items():
            # The same random numbers in every step, so that the weights and inputs change along a line.
            weights = varied(base, step * STEP, np.random.default_rng(seed))
            model = self.original.model(weights, self.dtype)
            for batch, inputs in enumerate(batches):
                inputs = varied_inputs(inputs, step * STEP, np.random.default_rng(seed))
                for name, value in self.run(stage, model, batch, inputs).items():
                    if is_float(value):
                        total[batch, name] = total.get((batch, name), 0.0) + weight * _finite(value)
        scale = math.sqrt(sum(weight**2 for weight in WEIGHTS_OF_STEPS.values()))
        noise: dict[str, float] = {}
        for (batch, name), value in total.items():
            center = self.tensors(stage, batch)[name]
            found = max(_relative(value[part], _finite(center)[part]) for part in parts(center))
            noise[name] = max(noise.get(name, 0.0), found / scale)
        return noise

    def _errors(self, stage: str, dtype: str) -> Iterator[tuple[Tensors, Tensors]]:
        """Yield the original's tensors in a dtype with the truth, for all inputs and for perturbed weights."""
        for batch in range(len(self.batches)):
            yield self._run(stage, self.model(dtype), batch), self.tensors(stage, batch, dtype)
        for seed in range(PERTURBED):
            weights, batch = self.perturbed(dtype, ALL_EPS[dtype], seed), seed % len(self.batches)
            exact = self.original.model(cast(weights, self.dtype), self.dtype)
            yield self._run(stage, self.original.model(weights, dtype), batch), self._run(stage, exact, batch)

    def _spread(self, stage: str) -> Iterator[tuple[Tensors, Tensors]]:
        """Yield the tensors after and before changes by one rounding error. No run is more precise than the truth."""
        for seed in range(PERTURBED):
            model = self.original.model(self.perturbed(self.dtype, ALL_EPS[self.dtype], seed), self.dtype)
            for batch in range(len(self.batches)):
                yield self._run(stage, model, batch), self.tensors(stage, batch)

    def _zeros(self, stage: str) -> dict[str, float]:
        """Return the sizes of the tensors that are zero except for rounding errors, which differ in every dtype.

        A change of the weights by one rounding error must change such a tensor in float32.
        """
        narrow, most = "float32", POLICY["pair"]["rounded"]["most"]["float32"]
        if self.dtype != "float64" or narrow not in self.original.imported.dtypes:
            return {}
        found: dict[str, float] = {}
        for batch in range(len(self.batches)):
            exact, wide = self.tensors(stage, batch), self._run(stage, self.model(narrow), batch)
            sizes = {
                name: (float(np.linalg.norm(_finite(value))), float(np.linalg.norm(_finite(wide[name]))))
                for name, value in exact.items()
                if is_float(value) and name in wide and value.shape == wide[name].shape
            }
            if zeros := {name: rough for name, (size, rough) in sizes.items() if size < ZERO * rough}:
                weights = self.perturbed(narrow, ALL_EPS[narrow], 0)
                changed = self.run(stage, self.original.model(weights, narrow), batch)
                for name, rough in zeros.items():
                    if difference(changed[name], wide[name]) > most:
                        found[name] = max(found.get(name, 0.0), rough)
        return found

    def _run(self, stage: str, model: SideModel, batch: int) -> Tensors:
        """Run the original. The results of unperturbed models are kept."""
        key = next((name for name, known in self.models.items() if known is model), None)
        if key is None:
            return self.run(stage, model, batch)
        if (key, stage, batch) not in self._known:
            self._known[key, stage, batch] = self.run(stage, model, batch)
        return self._known[key, stage, batch]

    def _checked(self, found: Tolerances, most: float, dtype: str) -> Tolerances:
        for name, allowed in found.allowed.items():
            if not allowed <= most and name not in found.zeros:
                raise NoTruthError(
                    f"{self.original.name} is too imprecise in {dtype}: its own error at {name} allows an error of "
                    f"{allowed:.1e}, but at most {most:g} shows a bug; use other weights or inputs"
                )
        return found


@dataclass(frozen=True)
class Tolerances:
    """The largest accepted errors of a port in one dtype.

    Attributes:
        allowed: The largest accepted relative error of each tensor.
        zeros: The tensors that are zero except for rounding errors, with the largest size of these errors in float32.
    """

    allowed: dict[str, float]
    zeros: dict[str, float]

    def if_float64_agrees(self) -> Tolerances:
        """Return the larger tolerances in float32 of a port that agrees in float64."""
        rule = POLICY["pair"]["rounded"]
        factor, most = rule["if_float64_agrees"], rule["most"]["float32"]
        return Tolerances(
            {name: min(factor * value, max(value, most)) for name, value in self.allowed.items()}, self.zeros
        )

    def scale(self, name: str) -> float:
        """Return the size to which the error of a tensor is relative; 0 for the size of the tensor itself."""
        return self.zeros.get(name, 0.0)

    def limit(self, name: str) -> float:
        """Return the largest accepted error of a tensor. Decisions, such as token IDs, have none."""
        return ZERO_RATIO if name in self.zeros else self.allowed.get(name, 0.0)


def _finite(array: ndarray) -> ndarray:
    """Return an array in float64, in which zeros replace infinite and masked values."""
    return np.where(kept(array), np.asarray(array, np.float64), 0.0)


def _relative(value: ndarray, scale: ndarray) -> float:
    size = float(np.linalg.norm(scale))
    return float(np.linalg.norm(value)) / size if size else 0.0
