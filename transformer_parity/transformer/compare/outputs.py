"""The outputs of a case: named tensors, the same from a port that runs and from a folder of files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np
from numpy import ndarray

from transformer_parity.transformer.cases.case import ACTIVATIONS, GRADIENTS, STEPS, Case
from transformer_parity.transformer.compare.exceptions import described
from transformer_parity.transformer.compare.training_outputs import gradients, last_step, shifted, steps
from transformer_parity.transformer.ports.protocol import Decoded, LoadedPort, MissingAbilityError, Placement, Port
from transformer_spec.names import tap_shapes
from transformer_spec.search import Search, SearchResult

# How a model was run: with taps on; the way a user runs it; position by position; weights in and out; elsewhere.
TAPS, FAST, CACHED, LOAD, FILES = PATHS = ("taps", "fast", "cached", "load", "files")
OUTPUT = "output"  # the name of what a block returns
LOGITS = "logits"
TOKENS, SCORES = "tokens", "scores"  # of a search
Tensors = dict[str, ndarray]
Digest = tuple[str, tuple[int, ...], str]  # dtype, shape, SHA-256 of the bytes


@dataclass
class Outputs:
    """What one implementation computes in one case, in one dtype.

    Attributes:
        case: The name of the case.
        dtype: The working dtype.
        paths: The tensors by path and name, in the order of computation.
        steps: The unfinished hypotheses after each step of a search, [B, K, n] each.
        hidden: The taps that are not shown, on purpose.
        weights: The digests of the weights that come back, where the model was loaded for this case.
        skipped: What is not offered: its path, and why.
        problems: What is wrong whatever the numbers are: path, name, and what.
        failures: What ended with an exception: path, and the exception.
        absent: Patterns of names that files leave out on purpose, and why.
    """

    case: str
    dtype: str
    paths: dict[str, Tensors] = field(default_factory=dict)
    steps: list[ndarray] = field(default_factory=list)
    hidden: tuple[str, ...] = ()
    weights: dict[str, Digest] | None = None
    skipped: list[tuple[str, str]] = field(default_factory=list)
    problems: list[tuple[str, str, str]] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)
    absent: list[tuple[str, str]] = field(default_factory=list)

    def attempt(self, path: str, run: Callable[[], Mapping[str, ndarray]]) -> None:
        """Run the model one way and keep its tensors, or why there are none."""
        try:
            self.paths[path] = plain(run())
        except MissingAbilityError as missing:
            self.skipped.append((path, str(missing)))
        except Exception as error:  # a finding, not a crash of the comparison
            self.failures.append((path, described(error)))

    @property
    def shown(self) -> Tensors:
        """All tensors by name: those of a search as ``searched`` returns them, and no fast path beside taps."""
        found: Tensors = {}
        for path, tensors in self.paths.items():
            if path != FAST or TAPS not in self.paths:
                found |= tensors
        return found


def plain(values: Mapping[str, ndarray]) -> Tensors:
    """Return arrays of no subclass: another class can answer for its shape and its comparisons.

    Raises:
        TypeError: An array holds objects: whoever receives them would import the module that they come from.
    """
    return {str(name): _plain(str(name), value) for name, value in values.items()}


def _plain(name: str, value: ndarray) -> ndarray:
    found = value if type(value) is ndarray else np.array(value, subok=False)
    if found.dtype.hasobject:
        raise TypeError(f"{name} must hold numbers: got dtype {found.dtype}")
    return found


def given(arrays: Mapping[str, ndarray], dtype: str) -> Tensors:
    """Return what a port is given: read-only copies, rounded to bfloat16 beforehand where that is the dtype.

    Both sides start from the same numbers, and a port that changes its caller's arrays is detected.
    """
    found = {}
    for name, array in arrays.items():
        rounds = dtype == "bfloat16" and array.dtype.kind == "f"
        found[name] = array.astype("bfloat16").astype(array.dtype) if rounds else array.copy()
        found[name].setflags(write=False)
    return found


def run_cases(
    cases: Iterable[Case], port: Port, placements: Sequence[Placement], progress: Callable[[str], None]
) -> Iterator[Outputs]:
    """Run every case on a port in every dtype; cases that share a config and weights run on one loaded model.

    Args:
        cases: What to run.
        port: What to run it on.
        placements: One per dtype.
        progress: Told what is about to run.
    """
    groups: dict[tuple[Any, ...], list[Case]] = {}
    for case in cases:
        groups.setdefault(_model(case), []).append(case)
    for same_model in groups.values():
        weights: Mapping[str, ndarray] = {}
        for placement in placements:
            if due := [case for case in same_model if placement.dtype in case.dtypes]:
                weights = weights or same_model[0].load_weights()
                yield from _run_group(due, port, weights, placement, progress)


def _model(case: Case) -> tuple[Any, ...]:
    """Return what has to be loaded; training changes a model, so what is to take steps is loaded for that alone."""
    return case.config, case.weights_file, case.seed, case.stage == STEPS and case.name


def _run_group(
    cases: Sequence[Case],
    port: Port,
    weights: Mapping[str, ndarray],
    placement: Placement,
    progress: Callable[[str], None],
) -> Iterator[Outputs]:
    left_out = getattr(port, "left_out", {})
    loaded: LoadedPort | None = None
    skips: list[tuple[str, str]] = []  # why nothing could be loaded
    failures: list[tuple[str, str]] = []
    for case in cases:
        outputs = Outputs(case.name, placement.dtype)
        if case.name in left_out:
            outputs.skipped.append(("run", str(left_out[case.name])))
            yield outputs
            continue
        progress(f"{placement.dtype} {case.name}")
        if loaded is None and not skips and not failures:
            try:
                loaded = port.load(case.config, given(weights, placement.dtype), placement)
                _export(loaded, outputs)
            except MissingAbilityError as missing:
                skips.append(("run", str(missing)))
            except Exception as error:
                failures.append(("run", described(error)))
        outputs.skipped += skips
        outputs.failures += failures
        if loaded is not None and not failures:
            run_case(case, loaded, outputs)
        yield outputs


def _export(loaded: LoadedPort, outputs: Outputs) -> None:
    try:
        outputs.weights = {name: digest(array, outputs.dtype) for name, array in plain(loaded.export()).items()}
    except MissingAbilityError as missing:
        outputs.skipped.append((LOAD, str(missing)))


def digest(array: ndarray, dtype: str = "") -> Digest:
    """Return what two arrays have in common if they are equal bit by bit."""
    if _holds_bfloat16(array, dtype):
        array = array.astype("bfloat16")
    # Without another copy where there are bytes to look at: a model may have gigabytes.
    whole: Any = array.tobytes() if array.dtype.hasobject else np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return array.dtype.name, array.shape, hashlib.sha256(whole).hexdigest()


def run_case(case: Case, loaded: LoadedPort, outputs: Outputs) -> None:
    """Run one case on a loaded model and add its tensors to ``outputs``."""
    dtype = outputs.dtype
    inputs = given(case.inputs, dtype)
    if case.stage == ACTIVATIONS:
        outputs.attempt(TAPS, lambda: _activations(case, loaded, inputs))
        outputs.hidden = tuple(tap for tap in tap_shapes(case.config, 1, 1, 1) if not loaded.shows(tap))
        if case.fast and TAPS in outputs.paths:
            outputs.attempt(FAST, lambda: {OUTPUT: loaded.run(case.block, inputs, taps=False).output})
    elif case.stage == GRADIENTS:
        outputs.attempt(TAPS, lambda: gradients(loaded, inputs))
        outputs.hidden = tuple(tap for tap in tap_shapes(case.config, 1, 1, 1) if not loaded.shows(tap))
    elif case.stage == STEPS:
        outputs.attempt(FAST, lambda: steps(loaded, shifted(inputs), case.training, last_step(dtype)))
    else:
        if case.options.beam_size is None and "target_ids" in inputs:  # position by position yields what all at once do
            stepwise = partial(loaded.decode_stepwise, inputs["source_ids"], inputs["target_ids"])
            outputs.attempt(CACHED, lambda: {LOGITS: stepwise()})
        outputs.attempt(FAST, lambda: _search(case, loaded, inputs, outputs))
    for name, array in given(case.inputs, dtype).items():
        if array.tobytes() != inputs[name].tobytes():
            outputs.problems.append(("run", name, "the port changes the array that it is given"))


def _activations(case: Case, loaded: LoadedPort, inputs: Mapping[str, ndarray]) -> Tensors:
    result = loaded.run(case.block, inputs, taps=True)
    return {**result.taps, OUTPUT: result.output}


def _search(case: Case, loaded: LoadedPort, inputs: Mapping[str, ndarray], outputs: Outputs) -> Tensors:
    found = Decoded.by(partial(loaded.search, inputs["source_ids"], case.options))
    outputs.steps = [_plain(f"step {i}", np.asarray(step)) for i, step in enumerate(found.shown, 1)]
    scores = found.result.nbest_scores
    return {TOKENS: found.result.nbest_ids, **({} if scores is None else {SCORES: scores})}


def searched(result: SearchResult, options: Search) -> Tensors:
    """Return the result of a search as tensors of fixed shapes; padding is 0, and any token above."""
    return {TOKENS: wide_tokens(result.nbest_ids, options)} | (
        {} if result.nbest_scores is None else {SCORES: result.nbest_scores}
    )


def wide_tokens(ids: ndarray, options: Search) -> ndarray:
    """Return tokens [B, N, max_length] as floats, padded with 0; a token is its id + 1."""
    tokens = np.zeros((*ids.shape[:2], max(options.max_length or 0, ids.shape[2])))
    tokens[..., : ids.shape[2]] = ids + 1
    return tokens


def tensors(loaded: Any, case: Case, dtype: str = "float64") -> Tensors:
    """Return all tensors that a model yields in a case, in the order of computation.

    Raises:
        ValueError: The case lacks its settings.
    """
    if case.stage == ACTIVATIONS:
        return _activations(case, loaded, case.inputs)
    if case.stage == GRADIENTS:
        return gradients(loaded, case.inputs)
    if case.stage == STEPS:
        return steps(loaded, shifted(case.inputs), case.training, last_step(dtype))
    found = searched(loaded.search(case.inputs["source_ids"], case.options), case.options)
    if case.options.beam_size is None and "target_ids" in case.inputs:
        found = {LOGITS: loaded.decode_stepwise(case.inputs["source_ids"], case.inputs["target_ids"]), **found}
    return found


def structure_problem(actual: ndarray, truth: ndarray, dtype: str) -> str:
    """Return what is wrong with a tensor before any number is compared; empty if nothing is."""
    if actual.shape != truth.shape:
        return f"shape must be {list(truth.shape)}: got {list(actual.shape)}"
    if actual.dtype.name != dtype and not _holds_bfloat16(actual, dtype):
        return f"dtype must be {dtype}: got {actual.dtype.name}"
    if not np.isfinite(actual).all():
        return f"{int((~np.isfinite(actual)).sum())} of {actual.size} values are NaN or infinite"
    return ""


def _holds_bfloat16(actual: ndarray, dtype: str) -> bool:
    """Whether float32 values are bfloat16 values: NumPy has no bfloat16 of its own, so ports widen them."""
    if dtype != "bfloat16" or actual.dtype != np.float32:
        return False
    return bool((actual.view(np.uint32) & 0xFFFF == 0).all())


def name_problem(actual: Iterable[str], expected: Iterable[str]) -> str:
    """Return in what two different lists of names differ."""
    actual, expected = list(actual), list(expected)
    if missing := [name for name in expected if name not in actual]:
        return f"missing {', '.join(missing[:3])}" + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    if extra := [name for name in actual if name not in expected]:
        return f"unexpected {', '.join(extra[:3])}" + (f" and {len(extra) - 3} more" if len(extra) > 3 else "")
    first = next(i for i, (ours, theirs) in enumerate(zip(actual, expected, strict=True)) if ours != theirs)
    return f"{actual[first]} fired where {expected[first]} was due"
