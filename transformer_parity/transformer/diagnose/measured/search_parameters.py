"""Determine whether a port searches with a wrong beam size, length penalty, maximum length, or attention window."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy import ndarray

from transformer_parity.transformer.bugs.bug import Bug, Edits
from transformer_parity.transformer.bugs.candidates.search import seen
from transformer_parity.transformer.bugs.search import penalized, planned
from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.diagnose.candidates.candidate import Candidate
from transformer_parity.transformer.diagnose.candidates.trials import TRUTH, Attempt, Trials, observed
from transformer_parity.transformer.diagnose.measured.search import returned

WIDEST = 10  # largest constant beam size to try
ALPHAS = [tenths / 10 for tenths in range(1, 21)]
PENALTIES = {"gnmt": "((5.0 + {n}) / 6.0) ** {alpha}", "power": "(1.0 * {n}) ** {alpha}"}
LENGTHS = {
    "where n excludes the EOS token": "__import__('numpy').maximum(n - 1, 1)",
    "where n includes the BOS token": "(n + 1)",
}
MOST = "__import__('numpy').minimum(plan.limits, {})"
PADDED, SOURCES = "source_mask.shape[1]", "source_mask.sum(1)"


@dataclass(frozen=True)
class Parameter:
    """A search parameter for which a port may use a different value.

    Attributes:
        words: Format string for the name of the bug, with one field for the value.
        edits: Edits to the reference for each value to try, in ascending order of the values.
    """

    words: str
    edits: Mapping[Any, Edits]

    def named(self, values: Sequence[float]) -> Bug:
        """Return one bug for all of the given values of the parameter, which must have the same effect.

        The name of the bug lists all of the values, but the edits of the bug apply only one of them.
        """
        every = list(self.edits)
        first, last = every.index(values[0]), every.index(values[-1])
        is_range = len(values) > 2 and last - first + 1 == len(values)
        said = f"{values[0]:g} to {values[-1]:g}" if is_range else " or ".join(f"{value:g}" for value in values)
        return Bug(self.words.format(said), "", self.edits[min(values, key=lambda value: len(f"{value:g}"))])


def fitting_parameters(trials: Trials, kinds: Sequence[Trials]) -> Iterator[list[Attempt]]:
    """Find the search parameters that reproduce the port's tokens. Yield one list of attempts per element of ``kinds``.

    Args:
        trials: The port's tensors in a case that runs a search.
        kinds: ``trials`` with different values of the attribute ``others``. The search parameters must also reproduce
            the port's tokens in all cases in ``others``.
    """
    exact = [
        (parameter, {value: one for value in parameter.edits if (one := _reproduced(trials, parameter, value))})
        for parameter in parameters(trials.case, trials.actual)
    ]
    for some in kinds:
        fits = []
        for parameter, found in exact:
            values = [value for value, attempt in found.items() if some.holds_elsewhere(attempt.candidate)]
            if values:
                fits.append(replace(found[values[0]], candidate=Candidate((parameter.named(values),))))
        yield fits


def _reproduced(trials: Trials, parameter: Parameter, value: float) -> Attempt | None:
    attempt = trials.run(Candidate((parameter.named([value]),)))
    return attempt if attempt and attempt.is_exact else None


def parameters(case: Case, shown: Mapping[str, ndarray]) -> list[Parameter]:
    """Return every search parameter that may be wrong, with the values to try."""
    ids = returned(case, shown)
    if ids is None:
        return []
    found = [*_limits(case, ids), _window(case, ids)]
    if case.options.beam_size is not None:
        found += [*_beams(case.options.beam_size), *_penalties(case.options.length_penalty)]
    return found


def _beams(size: int) -> Iterator[Parameter]:
    def sized(expression: str) -> Edits:
        return planned(f"plan = plan if search.beam_size is None else plan._replace(beam_size={expression})")

    capped = {value: sized(f"min(plan.beam_size, {value})") for value in range(2, size)}
    yield Parameter("a beam size of at most {}", capped)
    fixed = {value: sized(f"{value}") for value in range(2, WIDEST + 1) if value != size}
    yield Parameter("a beam size of {}, regardless of beam_size", fixed)
    yield Parameter("a beam size of {} * beam_size", {value: sized(f"{value} * plan.beam_size") for value in (2, 3)})
    yield Parameter("a beam size of beam_size + {}", {value: sized(f"plan.beam_size + {value}") for value in (1, 2)})


def _penalties(alpha: float) -> Iterator[Parameter]:
    for kind, formula in PENALTIES.items():
        about = f"a length penalty {'n^alpha ' if kind == 'power' else ''}with an alpha of {{}}"
        fixed = {value: penalized(formula.format(n="n", alpha=value)) for value in ALPHAS if value != alpha}
        yield Parameter(f"{about}, regardless of length_penalty", fixed)
        if alpha == 0.0:
            instead = {value: penalized(formula.format(n="n", alpha=f"(alpha or {value})")) for value in ALPHAS}
            yield Parameter(f"{about} instead of 0", instead)
        capped = {value: penalized(formula.format(n="n", alpha=f"min(alpha, {value})")) for value in ALPHAS}
        yield Parameter(f"{about} at most", {value: edits for value, edits in capped.items() if value < alpha})
    for words, n in LENGTHS.items():
        yield Parameter(
            f"a length penalty n^alpha, {words}", {1: penalized(PENALTIES["power"].format(n=n, alpha="alpha"))}
        )


def limited(limits: str) -> Edits:
    """Return edits that set the maximum length of each sentence in a search to the given expression."""
    return planned(
        f"limits = __import__('numpy').maximum({limits}, 1)",
        "plan = plan._replace(limits=limits, penalties=search._penalties(int(limits.max())))",
    )


def _limits(case: Case, ids: ndarray) -> Iterator[Parameter]:
    config = case.config
    is_source = case.inputs["source_ids"] != config.pad_id
    padded, limit = is_source.shape[1], int(case.options.plan(config, is_source).limits.max())
    lengths = (ids != config.pad_id).sum(1)
    longest, is_cut = int(lengths.max(initial=1)), ~(ids == config.eos_id).any(1)
    yield Parameter("a maximum length larger by {}", {1: limited("plan.limits + 1"), 2: limited("plan.limits + 2")})
    yield Parameter("a maximum length smaller by {}", {1: limited("plan.limits - 1"), 2: limited("plan.limits - 2")})
    if longest == limit:
        return
    bound = "at most " if longest < limit else ""
    most = MOST if longest < limit else "plan.limits * 0 + {}"
    yield Parameter(f"a maximum length of {bound}{{}}", {longest: limited(most.format(longest))})
    more = longest - padded
    yield Parameter(
        f"a maximum length of {bound}the longest source length plus {{}}",
        {more: limited(most.format(f"{PADDED} + {more}"))},
    )
    each = np.unique((lengths - is_source.sum(1))[is_cut & (lengths != limit)]).tolist()
    if len(each) == 1:
        own = {each[0]: limited(most.format(f"{SOURCES} + {each[0]}"))}
        yield Parameter(f"a maximum length of {bound}the length of each source plus {{}}", own)
    if longest % padded == 0:
        times = longest // padded
        many = {times: limited(most.format(f"{times} * {PADDED}"))}
        yield Parameter(f"a maximum length of {bound}{{}} times the longest source length", many)


def _window(case: Case, ids: ndarray) -> Parameter:
    """Return the attention windows to try. In greedy search, the position of the first error limits their size."""
    last = ids.shape[1]
    usual = observed(TRUTH, case)
    expected = None if usual is None else returned(case, usual)
    if case.options.beam_size is None and expected is not None and expected.shape == ids.shape:
        last = int(np.argmax((expected != ids).any(0)))
    inside = "np.arange(cache.length + 1) > cache.length - {}"
    sizes = {size: seen(inside.format(size)) for size in range(1, last + 1)}
    return Parameter("cached steps that attend to only the last {} positions", sizes)
