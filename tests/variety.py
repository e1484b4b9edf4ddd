"""The dimensions that the cases for ports vary, measured from arrays and configs, and the pairs that they cover."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product

import numpy as np

from transformer_parity.transformer.cases.case import DECODE, GRADIENTS, STEPS
from transformer_parity.transformer.cases.variety import longest
from transformer_parity.transformer.compare.runner import tensors
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.ports.registry import DEFINITION

# The values of each dimension, by stage. All pairs of values of two dimensions must occur, except IMPOSSIBLE.
SENTENCES = ("one", "several", "many")
LENGTHS = ("one", "some", "longest")
BEFORE = ("nothing", "same shape", "other method", "other model")
MAGNITUDES = ("usual", "large")
YES_NO = (False, True)
DIMENSIONS = {
    "activations": {
        "sentences": SENTENCES,
        "source tokens": LENGTHS,
        "target tokens": LENGTHS,
        "source padding": YES_NO,
        "target padding": YES_NO,
        "calls before": BEFORE,
        "magnitude": MAGNITUDES,
    },
    "gradients": {
        "sentences": SENTENCES[:2],
        "source tokens": LENGTHS[:2],
        "target tokens": LENGTHS[:2],
        "source padding": YES_NO,
        "target padding": YES_NO,
        "rows without labels": YES_NO,
        "calls before": BEFORE,
        "magnitude": MAGNITUDES,
    },
    "decode": {
        "sentences": SENTENCES,
        "source tokens": LENGTHS,
        "source padding": YES_NO,
        "limit": LENGTHS,
        "search": ("greedy", "beam"),
        "calls before": BEFORE,
        "magnitude": MAGNITUDES,
    },
    "steps": {
        "gradient norm": ("not clipped", "above the limit", "below the limit"),
        "micro_batches": (1, 2),
        "rows per step": ("the same", "changing"),
        "rows without labels": YES_NO,
        "cooldown": YES_NO,
    },
}
IMPOSSIBLE = {
    (("source tokens", "one"), ("source padding", True)): "a row without a token is not specified for ports",
    (("target tokens", "one"), ("target padding", True)): "a row without a token is not specified for ports",
    (("sentences", "one"), ("rows without labels", True)): "the loss of a batch without labels is not specified",
}
# Values that at least one case must have. Requiring all pairs with them would multiply the number of cases.
ONCE = {
    "activations": {
        *("as long as the source", "a row of one token", "a large vocabulary", "as many sentences as tokens"),
        *("more than 1024 tokens on both sides", "dropout in training before"),
    },
    "gradients": {"a row of one token", "an odd number of sentences", "several sentences without padding"},
    "decode": {
        *(
            "beam of 2",
            "beam of 3",
            "beam of 4",
            "a beam of more than half the vocabulary",
            "no penalty",
            "penalty below 1",
            "penalty above 1",
        ),
        *("all hypotheses end", "some hypotheses end", "no hypothesis ends", "the end symbol first"),
        *("different hypotheses", "lengths that differ", "a shorter first sentence"),
    },
    "steps": {
        "a batch of one sentence",
        "the end of the warm-up",
        "settings unlike the paper's",
        "a second start",
        "other calls between steps",
        "a shape that returns",
    },
}

Value = tuple[str, object]


def values_of(case) -> dict[str, object]:
    """Return the value of each dimension for a case."""
    inputs, pad_id = case.inputs, case.config.pad_id
    sentences, source = inputs["source_ids"].shape
    found = {
        "sentences": "one" if sentences == 1 else "several" if sentences < 8 else "many",
        "source tokens": _length(source, case),
        "source padding": bool((inputs["source_ids"] == pad_id).any()),
        "calls before": _before(case),
        "magnitude": _magnitude(case),
    }
    if case.stage == DECODE:
        return {
            **found,
            "limit": _length(case.options.max_length, case),
            "search": "greedy" if case.options.beam_size is None else "beam",
        }
    if case.stage == STEPS:
        sizes = case.rows or (sentences,)
        return {
            "gradient norm": _norms(case),
            "micro_batches": case.training.accumulation_steps,
            "rows per step": "changing" if len(set(sizes)) > 1 else "the same",
            "rows without labels": _is_unlabeled(case),
            "cooldown": case.training.cooldown_steps > 0,
        }
    found["target tokens"] = _length(inputs["target_ids"].shape[1], case)
    found["target padding"] = bool((inputs["target_ids"] == pad_id).any())
    if case.stage == GRADIENTS:
        found["rows without labels"] = _is_unlabeled(case)
    return found


def pairs(values: dict[str, object]) -> set[tuple[Value, Value]]:
    """Return the pairs of values that one case covers."""
    return {tuple(sorted(pair)) for pair in combinations(values.items(), 2)}


def missing(stage: str, cases: Iterable) -> list[tuple[Value, Value]]:
    """Return the possible pairs in a stage that no case covers."""
    dimensions = DIMENSIONS[stage]
    wanted = {
        tuple(sorted(((first, one), (second, other))))
        for first, second in combinations(dimensions, 2)
        for one, other in product(dimensions[first], dimensions[second])
    }
    wanted -= {tuple(sorted(pair)) for pair in IMPOSSIBLE}
    return sorted(wanted.difference(*map(pairs, map(values_of, cases))), key=repr)


def once(case) -> set[str]:
    """Return the values in ONCE that a case has."""
    inputs, pad_id = case.inputs, case.config.pad_id
    tokens = [(inputs[name] != pad_id).sum(1) for name in ("source_ids", "target_ids") if name in inputs]
    found = {"a row of one token"} if any((sums == 1).any() for sums in tokens) else set()
    if "target_ids" in inputs and inputs["source_ids"].shape == inputs["target_ids"].shape:
        found.add("as long as the source")
    if "target_ids" in inputs and len({*inputs["source_ids"].shape, *inputs["target_ids"].shape}) == 1:
        found.add("as many sentences as tokens")
    if "target_ids" in inputs and min(inputs["source_ids"].shape[1], inputs["target_ids"].shape[1]) > 1024:
        found.add("more than 1024 tokens on both sides")
    if any(earlier.stage == STEPS and earlier.config.dropout.residual for earlier in case.before):
        found.add("dropout in training before")
    if case.config.source_vocab_size > 2**15:
        found.add("a large vocabulary")
    if case.stage == GRADIENTS:
        found |= _found_in_labels(inputs["labels"], pad_id)
    if case.stage == DECODE:
        found |= _found_by_search(case)
    if case.stage == STEPS:
        found |= {"a batch of one sentence"} if 1 in case.rows else set()
        found |= {"other calls between steps"} if len(case.calls) > 1 else set()
        found |= {"a second start"} if case.restart else set()
        found |= {"settings unlike the paper's"} if 0.9 != case.training.beta1 != case.training.beta2 != 0.98 else set()
        found |= {"a shape that returns"} if len(set(case.rows)) > 1 else set()
        found |= {"the end of the warm-up"} if 1 < case.training.warmup_steps < 20 else set()
    return found


def _found_in_labels(labels, pad_id: int) -> set[str]:
    found = {"an odd number of sentences"} if len(labels) % 2 * len(labels) > 1 else set()
    several = min(labels.shape) > 1 and (labels != pad_id).all()
    return found | {"several sentences without padding"} if several else found


def _length(tokens: int, case) -> str:
    return "one" if tokens == 1 else "longest" if tokens == longest(case.config) else "some"


def _is_unlabeled(case) -> bool:
    return bool((case.inputs["labels"] == case.config.pad_id).all(1).any())


def _before(case) -> str:
    if not case.before:
        return "nothing"
    (earlier,) = case.before
    if earlier.model != case.model:
        return "other model"
    if earlier.stage != case.stage:
        return "other method"
    same = {name: array.shape for name, array in earlier.inputs.items()} == {
        name: array.shape for name, array in case.inputs.items()
    }
    different = any((array != case.inputs[name]).any() for name, array in earlier.inputs.items())
    return "same shape" if same and different else "the same call"


def _magnitude(case) -> str:
    """Return the magnitude of the logits, activations, and scores. See ``LARGE`` for exceptions."""
    if case.magnitude in ("usual", "ending"):
        return "usual"
    hypotheses = np.tile(np.arange(3, 15), (len(case.inputs["source_ids"]), 1))
    ids = {"source_ids": case.inputs["source_ids"], "target_ids": case.inputs.get("target_ids", hypotheses)}
    loaded = DEFINITION.load(case.config, case.load_weights(), Placement("float64"))
    found = loaded.run("", ids, taps=True)
    largest = {
        end: max(np.abs(value).max() for name, value in found.taps.items() if name.endswith(end))
        for end in ("output", "scores")
    }
    large = largest["output"] > 100
    large = large and (largest["scores"] > 88 or case.stage == GRADIENTS)
    large = large and (np.abs(found.output).max() > 709 or case.stage == DECODE)
    return "large" if large else "not as large as it should be"


def _norms(case) -> str:
    if case.training.clip_norm is None:
        return "not clipped"
    norms = [value for name, value in _run(case).items() if name.endswith("norm of the gradient")]
    if min(norms) > case.training.clip_norm:
        return "above the limit"
    return "below the limit" if max(norms) < case.training.clip_norm else "both"


def _found_by_search(case) -> set[str]:
    ids = _run(case)["tokens"][:, 0] - 1
    ends = (ids == case.config.eos_id).any(1)
    lengths = (ids > 0).sum(1)
    found = {"all" if ends.all() else "some" if ends.any() else "no"}
    found = {f"{word} hypothes{'is ends' if word == 'no' else 'es end'}" for word in found}
    if (ids[:, 0] == case.config.eos_id).any():
        found.add("the end symbol first")
    if len({tuple(row) for row in ids.tolist()}) > 1:
        found.add("different hypotheses")
    if len(set(lengths.tolist())) > 1:
        found.add("lengths that differ")
    tokens = (case.inputs["source_ids"] != case.config.pad_id).sum(1)
    if tokens[0] < tokens.max():
        found.add("a shorter first sentence")
    if case.options.beam_size is not None:
        penalty = case.options.length_penalty
        found.add(f"beam of {case.options.beam_size}")
        if 2 * case.options.beam_size > case.config.target_vocab_size:
            found.add("a beam of more than half the vocabulary")
        found.add("no penalty" if penalty == 0 else f"penalty {'below' if penalty < 1 else 'above'} 1")
    return found


def _run(case):
    return tensors(DEFINITION.load(case.config, case.load_weights(), Placement("float64")), case)
