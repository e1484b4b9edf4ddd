"""``parity check`` covers the optimized code: a bug in it makes a standard case diverge."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from transformer_parity.engine.findings import AGREES
from transformer_parity.transformer.bugs.edited_package import edited_package
from transformer_parity.transformer.cases.standard import standard_cases
from transformer_parity.transformer.compare.comparator import compare
from transformer_parity.transformer.ports.protocol import Placement, Placements
from transformer_parity.transformer.ports.registry import DEFINITION, PORTS

CASES = {case.name: case for case in standard_cases()}
MASK_OF_THE_FIRST_BLOCK = {
    "numpy": ("x[rows if x.shape[2] > 1 else head]", "x[head][:, :, : query[rows].shape[2]]"),
    "jax": ("(b, h, i * QUERY_BLOCK, 0)", "(b, h, 0, 0)"),
    "tf": ("[b, h, i * QUERY_BLOCK, 0]", "[b, h, 0, 0]"),
}
ONE_ROW_FOR_ALL_QUERIES = {
    "numpy": ("rows if x.shape[2] > 1 else head", "rows"),
    "jax": ("x if x is None or x.shape[2] == 1 else jnp.pad", "x if x is None else jnp.pad"),
    "tf": ("x if x is None or x.shape[2] == 1 else tf.pad", "x if x is None else tf.pad"),
}
PLACE_AMONG_THE_SORTED = {
    "numpy": ('at[np.argsort(-x[at], kind="stable")[:count]]', 'np.argsort(-x[at], kind="stable")[:count]'),
    "torch": ("block.gather(1, at // BLOCK) * BLOCK + at % BLOCK", "at"),
    "jax": ("jnp.take_along_axis(place, at, 1)", "at"),
    "tf": ("tf.gather(place, at, batch_dims=1)", "at"),
}
WITHOUT_THE_REST = {
    "torch": (
        "F.pad(values, (0, short), value=-inf) if short else values",
        "values[:, : (values.shape[1] // BLOCK) * BLOCK]",
    ),
    "jax": ("(0, 0), (0, -size % BLOCK)\n", "(0, 0), (0, 0)\n"),
}
WITHOUT_THE_REST_OF_FEW = {"tf": ("tf.range(size - rest, size)", "tf.range(size, size)")}
WITHOUT_THE_LAST_BLOCK = {
    "torch": ("if short else values", "if short else values[:, :-BLOCK]"),
    "jax": ("values = jnp.where(jnp.isnan(values), inf, values)", "values = values[:, : size - BLOCK]"),
    "tf": ("_, block = tf.math.top_k(maxima,", "_, block = tf.math.top_k(maxima[:, :-1],"),
}
FUSED = "F.scaled_dot_product_attention(query, key, value, mask, dropout_p=rate"
WITHOUT_THE_ROOT = {
    "numpy": ("1.0 / math.sqrt(query.shape[-1])", "1.0 / query.shape[-1]"),
    "torch": (f"{FUSED})", f"{FUSED}, scale=1.0 / query.shape[-1])"),
}


def injected(case, bugs):
    """Return a bug for each package, as test parameters."""
    return [
        pytest.param(name, case, edit, id=f"{name}-{case}", marks=pytest.mark.only(name)) for name, edit in bugs.items()
    ]


@pytest.mark.parametrize(
    ("name", "case", "edit"),
    [
        *injected("attention/padding", WITHOUT_THE_ROOT),
        *injected("attention/many_queries", MASK_OF_THE_FIRST_BLOCK),
        *injected("attention/many_padded_queries", ONE_ROW_FOR_ALL_QUERIES),
        *injected("decode/blocks_beam", PLACE_AMONG_THE_SORTED),
        *injected("decode/blocks_beam", WITHOUT_THE_REST),
        *injected("decode/blocks_beam", WITHOUT_THE_LAST_BLOCK),
        *injected("decode/paper_base_beam", WITHOUT_THE_REST_OF_FEW),
    ],
)
def test_bug_in_fast_code_is_detected(name, case, edit):
    port, setting = PORTS[name], Placements(("float64",))
    assert {finding.verdict for finding in compare([CASES[case]], port, setting)} == {AGREES}
    wrong = replace(port, package=edited_package(port.package, (("fast", *edit),)).__name__)
    assert not {finding.verdict for finding in compare([CASES[case]], wrong, setting)} <= {AGREES}


@pytest.mark.parametrize(
    "changed",
    [
        {"no_repeat_ngram_size": 0},
        {"no_repeat_ngram_size": 2},
        {"no_repeat_ngram_size": 4},
        {"banned_ids": ()},
        {"at_limit": "cut"},
        {"min_length": 1},
        {"min_length": 3},
        {"min_length": 5},
        {"start_id": None},
    ],
    ids=str,
)
def test_each_greedy_search_rule_changes_the_result(changed):
    case = CASES["decode/other_decoder_greedy"]
    assert case.options.beam_size is None
    options = {name: value for name, value in changed.items() if name in ("min_length", "start_id")}
    rules = {name: value for name, value in changed.items() if name not in options}
    assert_decides(case, replace(case.options, rules=replace(case.options.rules, **rules), **options))


@pytest.mark.parametrize("changed", [{"min_length": 1}, {"start_id": None}], ids=str)
def test_min_length_and_start_token_change_the_beam_search_result(changed):
    case = CASES["decode/other_decoder_beam"]
    assert_decides(case, replace(case.options, **changed))


def assert_decides(case, search):
    """Fail unless the reference finds different tokens with this search than with the case's search."""
    model = DEFINITION.load(case.config, case.load_weights(), Placement("float64"))
    expected, found = (model.search(case.inputs["source_ids"], options) for options in (case.options, search))
    assert not np.array_equal(found.nbest_ids, expected.nbest_ids)
