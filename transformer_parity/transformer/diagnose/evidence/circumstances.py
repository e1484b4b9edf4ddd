"""Find the properties that only the cases with differences have, such as padding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from transformer_parity.transformer.cases.case import DECODE, Case

EVIDENCE = 3  # minimum number of cases that agree with the reference and don't satisfy the condition
# A condition describes the cases that differ from the reference. For each number of a case, the condition can be a
# limit, for example "a source length of at least 8". For the following numbers, it can also be an exact value, for
# example "a batch size of 1".
EXACTLY = ("a batch size", "a beam_size", "a length_penalty")


def circumstances(differ: Sequence[Case], agree: Sequence[Case]) -> str:
    """Return a sentence about the conditions under which a port differs from the reference, or "" if none are found.

    Args:
        differ: Cases of one stage in which the port differs from the reference.
        agree: Cases of the same stage in which the port agrees with the reference.
    """
    if not differ or len(agree) < EVIDENCE:
        return ""
    shared = sorted(_shared(differ, agree), key=lambda one: len(one[1]))
    words, rest = shared[0]
    if not rest:
        also = [other for other, left in shared if not left and not other.startswith(words.partition(" of ")[0])]
        words += f" (or {also[0]})" if also else ""
        if len(differ) == 1:
            return f"{differ[0].name} is the only case that differs, and the only case with {words}"
        return f"exactly the cases with {words} differ"
    if len(differ) == 1:  # a single case may satisfy two conditions by chance
        return ""
    if second := [other for other, left in _shared(differ, rest) if not left]:
        return f"exactly the cases with {words} and {second[0]} differ"
    if len(agree) - len(rest) < EVIDENCE or len(rest) > len(differ) / 2:
        return ""
    others = "one other such case agrees" if len(rest) == 1 else f"{len(rest)} other such cases agree"
    return f"only cases with {words} differ; {others}"


def _shared(differ: Sequence[Case], agree: Sequence[Case]) -> Iterator[tuple[str, list[Case]]]:
    """Yield each condition that all cases in ``differ`` satisfy, and the cases in ``agree`` that also satisfy it."""
    for fact in sorted(set.union(*map(_facts, (*differ, *agree)))):
        if all(fact in _facts(case) for case in differ):
            yield fact, [case for case in agree if fact in _facts(case)]
        if all(fact not in _facts(case) for case in differ):
            yield f"no {fact.removeprefix('a ')}", [case for case in agree if fact not in _facts(case)]
    for name in [name for name in _numbers(differ[0]) if all(name in _numbers(case) for case in differ)]:
        values = [_numbers(case)[name] for case in differ]
        low, high = min(values), max(values)
        yield f"{name} of at least {low:g}", [case for case in agree if _numbers(case).get(name, -math.inf) >= low]
        yield f"{name} of at most {high:g}", [case for case in agree if _numbers(case).get(name, math.inf) <= high]
        if low == high and name in EXACTLY:
            yield f"{name} of {low:g}", [case for case in agree if _numbers(case).get(name) == low]


def _numbers(case: Case) -> Mapping[str, float]:
    """Return a dict that maps the description of each size and numeric setting of a case to its value."""
    (batch, source_length), search, settings = case.inputs["source_ids"].shape, case.search, case.settings
    found: dict[str, float] = {"a batch size": batch, "a source length": source_length}
    if case.stage != DECODE:
        found["a target length"] = case.inputs["target_ids"].shape[1]
    elif search is not None:
        found |= {"a max_length": search.max_length or math.inf, "a beam_size": search.beam_size or 1}
        if search.beam_size is not None:
            found["a length_penalty"] = search.length_penalty
    if settings is not None:
        found |= {"an accumulation_steps": settings.accumulation_steps, "a clip_norm": settings.clip_norm or math.inf}
    return found


def _facts(case: Case) -> set[str]:
    """Return the descriptions of all features that a case has, for example "padding in the source"."""
    inputs, pad_id, trains = case.inputs, case.config.pad_id, case.settings is not None
    found = {
        "padding in the source": (inputs["source_ids"] == pad_id).any(),
        "padding in the target": case.stage != DECODE and (inputs["target_ids"] == pad_id).any(),
        "rows without labels": "labels" in inputs and (inputs["labels"] == pad_id).all(1).any(),
        "a beam": case.search is not None and case.search.beam_size is not None,
        "large weights": case.magnitude not in ("usual", "ending"),
        "a cooldown": trains and case.training.cooldown_steps > 0,
        "betas other than the paper's": trains and (case.training.beta1, case.training.beta2) != (0.9, 0.98),
        "batches of different sizes": len(set(case.rows)) > 1,
        "calls of other methods between steps": bool(case.calls),
        "a restart of training": bool(case.restart),
    }
    for earlier in case.before:
        other_stage = f"a previous run of {earlier.stage}" if earlier.stage != case.stage else "a previous batch"
        found["a previous run of a different model" if earlier.model != case.model else other_stage] = True
    return {words for words, holds in found.items() if holds}
