"""Compare a port's gradients, training steps, and searches with its ``forward``, to determine which of them are wrong.

A search chooses each token based on logits that it computes from the preceding tokens. If ``forward`` is called with
these tokens, it must return the same logits. If ``forward`` agrees with the reference but the search chooses different
tokens, the search stores incorrect state between steps or follows a different rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy import ndarray

from transformer_parity.engine.tensors import given
from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.decoding.prefixes import searched_log_probabilities
from transformer_parity.transformer.diagnose.evidence.blame import distance
from transformer_parity.transformer.diagnose.evidence.properties import SAME, output
from transformer_parity.transformer.diagnose.measured.search import before_the_end, facts, read_before, returned
from transformer_parity.transformer.ports.protocol import AnyPort, Placement
from transformer_parity.transformer.ports.registry import DEFINITION
from transformer_spec.config import TransformerConfig

ROUNDING = 1e-9  # maximum absolute and relative differences between logits due to float64 rounding
FIRST = "compare activations first, using --stage activations"
EMPTY = "at token 1, no previous token is cached yet, so a wrong cache is not the cause"
FULL = (
    "The first token of every sentence agrees with `forward`, and no known rule (repeated n-grams, length limits) "
    "explains the later differences. Compare the logits inside the search with the logits of `forward`: if they "
    "differ, the cache "
    "is wrong"
)


def beside_forward(
    port: AnyPort, placement: Placement, shown: Iterable[tuple[Case, Mapping[str, ndarray] | None]]
) -> str:
    """Report that ``forward`` itself is wrong, or that greedy search chooses different tokens than ``forward``.

    Args:
        port: The port to rerun.
        placement: The device on which to run the port, and the dtype, which must be float64.
        shown: Cases of one stage. Each case is paired with the port's tensors, or with None if the port agrees with
            the reference in this case.

    Returns:
        A sentence about the first case in which ``forward`` is wrong, or in which the search chooses different tokens
        than ``forward``. An empty string if there is no such case.
    """
    for case, tensors in shown:
        if tensors is None or case.block:
            continue
        source_ids, target_ids = case.inputs["source_ids"], case.inputs.get("target_ids")
        ids = None
        if case.search is not None:
            ids = returned(case, tensors)
            if case.options.beam_size is not None or ids is None:
                continue
            target_ids = read_before(case, ids)
        if target_ids is None:
            continue
        inputs = {"source_ids": source_ids, "target_ids": target_ids}
        weights = case.load_weights()
        own = output(port.load(case.config, given(weights, "float64"), placement), inputs, case.config)
        truth = output(DEFINITION.load(case.config, weights, Placement("float64")), inputs, case.config)
        error = distance("output", {"output": own}, {"output": truth})
        if error > SAME["float64"]:
            where = case.name if ids is None else f"{case.name}, on the tokens that the search returned"
            return f"`forward` itself differs from the reference in {where} (error {error:.0e}): {FIRST}"
        if ids is not None and (found := _departure(case, own, ids)):
            return (
                f"in {case.name}, `forward` agrees with the reference on the tokens that the search returned "
                f"(error {error:.0e}), but the search chooses different tokens: {found}"
            )
    return ""


def _departure(case: Case, logits: ndarray, ids: ndarray) -> str:
    """Describe the first token that a greedy search chose although a different allowed token had a larger logit.

    Return "" if there is no such token.

    Args:
        case: A case with a greedy search.
        logits: The logits that the port's own ``forward`` returns for these tokens [B, T, V].
        ids: The returned tokens [B, T].
    """
    config = case.config
    plan = case.options.plan(config, case.inputs["source_ids"] != config.pad_id)
    allowed = searched_log_probabilities(logits, ids, plan)  # [B, T, V]
    best = allowed.argmax(-1)
    behind = logits.max(-1, where=np.isfinite(allowed), initial=-np.inf) - _at(logits, ids)  # [B, T]
    departs = behind > ROUNDING * (1.0 + np.abs(logits).max(-1))
    departs &= before_the_end(ids, config)
    departs &= departs.cumsum(1) == 1
    if not departs.any():
        return ""
    step = int(np.flatnonzero(departs.any(0))[0])
    sentence = int(np.flatnonzero(departs[:, step])[0])  # the first sentence with a wrong choice at this step
    said, right = ids[sentence, step], best[sentence, step]
    found = (
        f"at token {step + 1} of sentence {sentence}, the search returns {_named(said, config)}, but `forward` prefers "
        f"{_named(right, config)} by {behind[sentence, step]:.1e} ({departs.any(1).sum()} of {len(ids)} sentences "
        "differ)"
    )
    if known := facts(case, ids, best, departs):
        return f"{found}: {'; '.join(known)}"
    return f"{found}: {EMPTY}" if step == 0 else f"{found}. {FULL}"


def _named(token: int, config: TransformerConfig) -> str:
    """Return a description of a token, for example ``token 2 (EOS)``."""
    roles = {config.pad_id: " (padding)", config.bos_id: " (BOS)", config.eos_id: " (EOS)"}
    return f"token {token}{roles.get(token, '')}"


def _at(logits: ndarray, ids: ndarray) -> ndarray:
    return np.take_along_axis(logits, ids[..., None], -1)[..., 0]
