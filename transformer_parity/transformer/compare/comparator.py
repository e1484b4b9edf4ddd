"""The comparator: the outputs of a case against what the reference yields, tensor by tensor.

It is the only one: a port in this process, a port in another process and a folder of files are compared here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import numpy as np
from numpy import ndarray

from transformer_parity.transformer.cases.case import ACTIVATIONS, DECODE, GRADIENTS, STEPS, Case
from transformer_parity.transformer.compare.expected import Expected, Reference
from transformer_parity.transformer.compare.findings import AGREES, SKIPPED, Finding, Kept, Setting
from transformer_parity.transformer.compare.near_ties import explain, score_tolerance, summary
from transformer_parity.transformer.compare.outputs import (
    CACHED,
    FAST,
    FILES,
    LOGITS,
    OUTPUT,
    SCORES,
    TOKENS,
    Digest,
    Outputs,
    Tensors,
    name_problem,
    run_cases,
    structure_problem,
    wide_tokens,
)
from transformer_parity.transformer.compare.prefixes import score
from transformer_parity.transformer.compare.tolerances import NotFiniteError, relative_error
from transformer_parity.transformer.compare.training_outputs import OPTIONAL, WHOLE, training_error
from transformer_parity.transformer.compare.verdict import Author
from transformer_parity.transformer.ports.protocol import Decoded, Port
from transformer_spec.search import SearchResult


def compare(
    cases: Iterable[Case],
    port: Port,
    setting: Setting,
    progress: Callable[[str], None] = lambda text: None,
    kept: Kept | None = None,
) -> Iterator[Finding]:
    """Run every case on a port in every dtype, in this process, and yield each comparison.

    Args:
        cases: What to run.
        port: What to run it on.
        setting: Dtypes, device and precision.
        progress: Told what is about to run.
        kept: Receives the tensors of each case in which something failed.
    """
    by_name = {case.name: case for case in cases}
    placements = [setting.placement(dtype) for dtype in setting.dtypes]
    comparator = Comparator(port.name, setting, Reference())
    for outputs in run_cases(by_name.values(), port, placements, progress):
        yield from comparator.compare(by_name[outputs.case], outputs, kept)


class Comparator:
    """Compares the outputs of one port with what the reference yields.

    Args:
        backend: The name of the port.
        setting: How it was run.
        reference: What computes the truth.
    """

    def __init__(self, backend: str, setting: Setting, reference: Reference) -> None:
        self.backend = backend
        self.setting = setting
        self.reference = reference

    def compare(self, case: Case, outputs: Outputs, kept: Kept | None = None) -> Iterator[Finding]:
        """Yield every comparison of one case, in the order of computation.

        Args:
            case: The case that was run.
            outputs: What came of it.
            kept: Receives the tensors if something failed.
        """
        for finding in self._findings(case, outputs):
            if kept is not None and finding.verdict not in (AGREES, SKIPPED):
                kept[case.name, outputs.dtype] = _for_diagnosis(case, outputs)
            yield finding

    def _findings(self, case: Case, outputs: Outputs) -> Iterator[Finding]:
        author = Author(self.backend, outputs.dtype, case)
        if outputs.weights is not None:
            yield author.round_trip(_weights_problem(outputs.weights, self.reference.digests(case, outputs.dtype)))
        yield from (author.skipped(path, why) for path, why in outputs.skipped)
        for path, name, problem in outputs.problems:
            yield author.compared(path, name, math.inf, 0.0, problem=problem)
        if outputs.paths:
            try:
                expected = self.reference.expected(case, self.setting.placement(outputs.dtype))
            except NotFiniteError as error:
                yield author.failed("run", str(error))
                return
            for path, tensors in outputs.paths.items():
                yield from _Path(author, path, tensors, expected).findings(outputs)
        yield from (author.failed(path, why) for path, why in outputs.failures)


class _Path:
    """The tensors that a port yields in a case in one way, beside what is expected."""

    def __init__(self, author: Author, path: str, tensors: Tensors, expected: Expected) -> None:
        self.author = author
        self.case = author.case
        self.path = path
        self.expected = expected
        self.tensors = _with_whole(tensors, expected.tensors) if self.case.stage == GRADIENTS else tensors

    def findings(self, outputs: Outputs) -> Iterator[Finding]:
        """Yield what is not shown, what is wrong with the names, and then each tensor."""
        due, skips = self._due(outputs)
        yield from (self.author.skipped(self.path, why) for why in skips)
        have = [name for name in self.tensors if name in due or name not in self.expected.tensors]
        ordered = self.case.stage == ACTIVATIONS  # where the order is that of the computation
        if (have != due) if ordered else (sorted(have) != sorted(due)):
            yield self.author.compared(self.path, "names", math.inf, 0.0, problem=name_problem(have, due))
        names = [name for name in due if name in self.tensors]
        if self.case.stage == DECODE:
            yield from self._search(names, outputs)
            return
        for name in names:
            yield self._tensor(name)

    def _due(self, outputs: Outputs) -> tuple[list[str], list[str]]:
        """Return the names that have to be there, and why others need not be."""
        due = list(self.expected.tensors)
        if self.path == FAST and self.case.stage == ACTIVATIONS:
            due = [OUTPUT]
        elif self.case.stage == DECODE:
            due = [name for name in due if (name == LOGITS) == (self.path == CACHED)]
        if self.path == FILES:
            absent = {name: why for name in due if name not in self.tensors and (why := _why_absent(name, outputs))}
            reasons = list(absent.values())
            skips = [f"{reasons.count(why)} tensors: {why}" for why in dict.fromkeys(reasons)]
            return [name for name in due if name not in absent], skips
        hidden = {*outputs.hidden, *(f"at {name}" for name in outputs.hidden)} - self.tensors.keys()
        skips = []
        if (unseen := [name for name in due if name in hidden]) and self.case.stage == ACTIVATIONS:
            skips.append(f"{len(unseen)} of {len(due) - 1} taps are not shown")
        due = [name for name in due if name not in hidden or self._all_or_nothing(name)]
        if self.case.stage in (GRADIENTS, STEPS):
            for what, is_one in OPTIONAL.items():
                names = [name for name in due if is_one(name)]
                if names and not any(name in self.tensors for name in names):
                    skips.append(f"{len(names)} {what} are not shown")
                    due = [name for name in due if name not in names]
        if self.case.stage == DECODE and SCORES in due and SCORES not in self.tensors:
            skips.append("scores are not shown")
            due.remove(SCORES)
        return due, skips

    def _all_or_nothing(self, name: str) -> bool:
        """Whether a gradient at a hidden tap is due all the same: none is shown, which is skipped as a whole."""
        return name.startswith("at ") and not any(other.startswith("at ") for other in self.tensors)

    def _tensor(self, name: str) -> Finding:
        actual, truth = self.tensors[name], self.expected.tensors[name]
        is_scalar = self.case.stage in (GRADIENTS, STEPS) and not truth.ndim
        problem = _masked_scores(name, actual) or structure_problem(
            actual, truth, "float64" if is_scalar else self.author.dtype
        )
        if problem:
            return self.author.compared(self.path, name, math.inf, self.expected.tolerances[name], problem=problem)
        if self.case.stage in (GRADIENTS, STEPS):
            error = training_error(name, self.tensors, self.expected.tensors)
        else:
            error = relative_error(actual, truth)
        return self.author.compared(self.path, name, error, self.expected.tolerances[name])

    def _search(self, names: Sequence[str], outputs: Outputs) -> Iterator[Finding]:
        """Compare the cached logits, then the tokens, then their scores."""
        if LOGITS in names:
            yield self._tensor(LOGITS)
        if TOKENS not in names:
            return
        ids, scores = self.tensors[TOKENS], self.tensors.get(SCORES)
        known = self.expected.tensors
        if problem := self._tokens_problem(ids, known[TOKENS]):
            yield self.author.compared(self.path, TOKENS, math.inf, 0.0, problem=problem)
            return
        exact = self.expected.exact.model
        rounded = None if self.expected.rounded is None else self.expected.rounded.model
        source_ids, options = self.case.inputs["source_ids"], self.case.options
        wrong = "" if scores is None else structure_problem(scores, known[SCORES], self.author.dtype)
        if wrong:
            yield self.author.compared(self.path, SCORES, math.inf, 0.0, problem=wrong)
        # Of a search whose steps are not known, only the result is explained.
        unknown = None if self.path == FILES or scores is None else scores
        found = Decoded(SearchResult(ids, unknown), outputs.steps)  # type: ignore[arg-type]
        doubts = explain(exact, rounded, source_ids, found, known[TOKENS], options)
        worst = max(doubts, key=lambda doubt: (not doubt.is_near_tie, doubt.margin), default=None)
        problem = summary(doubts) if worst and worst.margin == math.inf else ""  # which no rounding explains
        margin, noise = (worst.margin, worst.noise) if worst else (0.0, 0.0)
        yield self.author.compared(self.path, TOKENS, margin, noise, problem=problem, detail=summary(doubts))
        if scores is not None and not wrong:
            truth = score(exact, source_ids, ids, options)
            if not np.isfinite(truth).all():  # of tokens that are not allowed
                problem = f"scores must be finite: the reference finds {truth.min()} for these tokens"
                yield self.author.compared(self.path, SCORES, math.inf, 0.0, problem=problem)
                return
            usual = None if rounded is None else score(rounded, source_ids, ids, options)
            yield self.author.compared(self.path, SCORES, relative_error(scores, truth), score_tolerance(truth, usual))

    def _tokens_problem(self, ids: ndarray, truth: ndarray) -> str:
        """Return what is wrong with tokens before any decision is compared; empty if nothing is."""
        limit = self.case.options.limit(self.case.inputs["source_ids"].shape[1], self.case.config)
        shape, size = list(truth.shape[:2]), self.case.config.target_vocab_size
        if ids.dtype.kind not in "iu":
            return f"tokens must be integers: got {ids.dtype.name}"
        if ids.ndim != 3 or list(ids.shape[:2]) != shape:
            return f"shape must be {[*shape, 'length']}: got {list(ids.shape)}".replace("'", "")
        if not 0 < ids.shape[2] <= limit:
            return f"hypotheses must be of 1 to {limit} tokens: got {ids.shape[2]}"
        if not ((ids >= 0) & (ids < size)).all():
            return f"tokens must be in 0 to {size - 1}: got {ids.min()} to {ids.max()}"
        return ""


def _why_absent(name: str, outputs: Outputs) -> str:
    return next((why for pattern, why in outputs.absent if fnmatchcase(name, pattern)), "")


def _masked_scores(name: str, actual: ndarray) -> str:
    if name.endswith("scores") and actual.dtype.kind == "f" and np.isneginf(actual).any():
        return "scores are compared before the mask is added: show them before it"
    return ""


def _with_whole(tensors: Mapping[str, ndarray], expected: Mapping[str, ndarray]) -> Tensors:
    """Return the tensors with the gradient of all parameters, one after another, computed here."""
    names = sorted(name for name in expected if name.startswith("of "))
    if any(name not in tensors for name in names):
        return {name: value for name, value in tensors.items() if name != WHOLE}
    return {**tensors, WHOLE: np.concatenate([np.ravel(tensors[name]) for name in names])}


def _for_diagnosis(case: Case, outputs: Outputs) -> Tensors:
    """Return the tensors by name, in the form in which hypotheses yield them."""
    shown = outputs.shown
    if TOKENS in shown and shown[TOKENS].ndim == 3:
        shown[TOKENS] = wide_tokens(shown[TOKENS], case.options)
    return shown


def _weights_problem(back: Mapping[str, Digest], weights: Mapping[str, Digest]) -> str:
    if sorted(back) != sorted(weights):
        return name_problem(back, weights)
    for name, wanted in weights.items():
        if back[name][1] != wanted[1]:
            return f"{name} must come back in the shape {list(wanted[1])}: got {list(back[name][1])}"
        if back[name] != wanted:
            return f"{name} does not come back as it was given"
    return ""
