"""Compute ratios of tensors, and describe them in terms of model or batch sizes."""

from __future__ import annotations

import math

import numpy as np
from numpy import ndarray

from transformer_parity.transformer.cases.case import Case
from transformer_spec.config import TransformerConfig

EQUAL = 1e-6  # relative tolerance for comparing a measured factor with a known value


def best_factor(actual: ndarray, wanted: ndarray) -> float:
    """Return the factor for which ``factor * wanted`` is closest to ``actual`` (least squares)."""
    return float(np.vdot(wanted, actual) / max(np.vdot(wanted, wanted), 1e-300))


def factor_in_words(ratio: float, config: TransformerConfig, case: Case | None = None) -> str:
    """Describe a factor in terms of the sizes of the model or batch, for example as ``1 / sqrt(d_k)``.

    Return an empty string if the factor matches no size.

    Args:
        ratio: The factor.
        config: Config of the model, or of its decoder.
        case: The case whose batch sizes may explain the factor; None if the factor can't depend on batch sizes.
    """
    equal = [
        wording
        for words, value in _sizes(config).items()
        for wording, number in ((words, value), (f"1 / {words}", 1.0 / value), (f"-{words}", -value))
        if _is_same(ratio, number)
    ]
    counts = _counts(case) if case else {}
    equal += [f"1 / {n}, as if averaged over {n} {words}" for words, n in counts.items() if _is_same(ratio, 1.0 / n)]
    equal += [f"{n}, as if not divided by the number of {words}" for words, n in counts.items() if _is_same(ratio, n)]
    labels = counts.get("labels", 0)
    equal += [
        f"{labels} / {n}, as if divided by the number of {words} instead of labels"
        for words, n in counts.items()
        if labels and _is_same(ratio, labels / n)
    ]
    return f", a factor of {' or '.join(equal)}" if equal else ""


def _is_same(ratio: float, number: float) -> bool:
    return math.isclose(ratio, number, rel_tol=EQUAL) and not math.isclose(number, 1.0)


def _sizes(config: TransformerConfig) -> dict[str, float]:
    return {
        "sqrt(d_model)": math.sqrt(config.d_model),
        "sqrt(d_k)": math.sqrt(config.d_k),
        "sqrt(d_v)": math.sqrt(config.d_v),
        "d_k": config.d_k,
        "d_model": config.d_model,
        "num_heads": config.num_heads,
        "sqrt(d_model / d_k)": math.sqrt(config.d_model / config.d_k),
        "ln 2": math.log(2.0),
    }


def _counts(case: Case) -> dict[str, int]:
    """Return the number of sentences, positions, tokens, labels, and vocabulary entries of a batch.

    Positions include padding. Tokens and labels don't include padding.
    """
    found = {"sentences": len(case.inputs["source_ids"])}
    for name, plural in (("source_ids", "source"), ("target_ids", "target")):
        if name in case.inputs:
            found[f"{plural} positions"] = case.inputs[name].size
            found[f"{plural} tokens"] = int((case.inputs[name] != case.config.pad_id).sum())
    if "labels" in case.inputs:
        found["labels"] = int((case.inputs["labels"] != case.config.pad_id).sum())
        found["vocabulary entries"] = case.config.target_vocab_size
    return {words: n for words, n in found.items() if n > 1}
