"""The verification of searches distinguishes near-ties from bugs and detects bugs of every kind."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from search_models import lively, load_reference, sources

import reference_numpy as ref
from reference_numpy import SearchResult, search, search_loop
from transformer_parity.transformer.bugs.edited_package import edited_package
from transformer_parity.transformer.decoding.near_ties import explain, follow, summary
from transformer_parity.transformer.decoding.prefixes import PrefixScorer, score
from transformer_parity.transformer.ports.protocol import Decoded
from transformer_spec.search import Search

GREEDY = Search(max_length=11)
BEAM = Search(beam_size=3, max_length=11, num_hypotheses=2, length_penalty=1.5)
BOTH = pytest.mark.parametrize("options", [GREEDY, BEAM], ids=["greedy", "beam"])
SIZES = {"beam_size": 3, "max_length": 11}
FORCED_END = {"at_limit": "forced"}
BY_RULES = {
    "opus": Search.preset("hf", {**FORCED_END, "renormalize": True, "banned_ids": (8,)}, num_hypotheses=3, **SIZES),
    "bart": Search.preset(
        "hf", {**FORCED_END, "stop": "first", "no_repeat_ngram_size": 2, "forced_ids": (4,)}, num_hypotheses=3, **SIZES
    ),
    "fairseq": Search.preset("fairseq", {"forced_ids": (4,)}, num_hypotheses=3, **SIZES),
    "marian": Search.preset("marian", {"banned_ids": (8,)}, num_hypotheses=3, **SIZES),
    "greedy": Search.preset("hf", {"renormalize": True, "no_repeat_ngram_size": 2}, max_length=11),
}


def twins(difference, token=5, seed=13):
    """Return a model in which token 7 duplicates another token, but is more likely by ``difference`` nats.

    Rounding in a matmul can't separate the two tokens, because each logit is the same kernel value, multiplied by 1.0,
    plus a bias.
    """
    config, weights = lively(seed=seed)
    weights["target_embedding.table"][token] = weights["target_embedding.table"][7]
    weights["decoder.final_norm.scale"][0], weights["decoder.final_norm.bias"][0] = 0.0, 1.0
    weights["output_proj.kernel"][:, [token, 7]] = 0.0
    weights["output_proj.kernel"][0, [token, 7]] = 1.5
    weights["output_proj.bias"][[token, 7]] = 0.0, difference
    return config, weights


def follow_all(config, weights, found, options, dtype):
    """Return the doubts about a search on the source sentences of ``sources``."""
    truth = load_reference(config, weights)
    rounded = None if dtype == "float64" else load_reference(config, weights, dtype)
    expected = options.run(ref, truth, sources(config)).nbest_ids
    return explain(truth, rounded, sources(config), found, expected, options)


def found_by(model, options, package=ref):
    return Decoded.by(lambda on_step: options.run(package, model, sources(model.config), on_step))


@BOTH
def test_near_tie_is_distinguished_from_a_bug(options):
    """Float32 can't represent the difference, so the lower ID is selected. In float64, the same choice is a bug."""
    config, weights = twins(1e-9)
    found = found_by(load_reference(config, weights, "float32"), options)
    assert 5 in found.result.nbest_ids
    doubts = follow_all(config, weights, found, options, "float32")
    assert doubts
    assert all(doubt.is_near_tie and 0 < doubt.margin < 1e-8 for doubt in doubts), doubts
    assert "near-tie" in summary(doubts)
    assert max(doubt.noise for doubt in doubts) < 1e-4
    strict = follow_all(config, weights, found, options, "float64")
    assert not strict[0].is_near_tie
    assert summary(strict) == str(next(doubt for doubt in strict if not doubt.is_near_tie))


@BOTH
def test_token_choice_unexplained_by_rounding_is_a_bug(options):
    config, weights = twins(1e-2)
    other = {**weights, "output_proj.bias": weights["output_proj.bias"].copy()}
    other["output_proj.bias"][7] = -1e-2
    doubts = follow_all(config, weights, found_by(load_reference(config, other), options), options, "float32")
    assert not doubts[-1].is_near_tie
    assert 4e-3 <= doubts[-1].margin < 0.2


@pytest.mark.parametrize("token", [5, 2], ids=["a token", "EOS"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("bart", "fairseq") else pytest.mark.extended("searches"))
        for name in BY_RULES
    ],
)
def test_near_ties_are_distinguished_from_bugs_under_all_search_rules(name, token):
    """Rounding can also decide which hypotheses end, which are kept, and when the search stops."""
    options, strict = BY_RULES[name], []
    for seed in (13, 14):
        config, weights = twins(1e-9, token, seed)
        found = found_by(load_reference(config, weights, "float32"), options)
        assert all(doubt.is_near_tie for doubt in follow_all(config, weights, found, options, "float32"))
        strict += follow_all(config, weights, found, options, "float64")
    assert not all(doubt.is_near_tie for doubt in strict)


@pytest.mark.parametrize("options", [GREEDY, BEAM, *BY_RULES.values()], ids=["greedy", "beam", *BY_RULES])
def test_reference_search_has_no_doubtful_steps(options):
    """The search is followed even though its result is correct, and each of its steps must be the best choice."""
    for seed in (13, 28, 6):
        config, weights = lively(seed=seed)
        truth = load_reference(config, weights)
        found = found_by(truth, options)
        for row, source in enumerate(sources(config)):
            judge = PrefixScorer(truth, None, source)
            assert follow(judge, row, found, options) == []


def test_recomputed_scores_match_the_search():
    config, weights = lively()
    truth = load_reference(config, weights)
    for options in (GREEDY, BEAM, Search(beam_size=4, max_length=9, length_penalty_kind="power"), *BY_RULES.values()):
        found = options.run(ref, truth, sources(config))
        np.testing.assert_allclose(score(truth, sources(config), found.nbest_ids, options), found.nbest_scores, 1e-12)


def buggy_package(old, new):
    """Return the reference with one line of its search changed."""
    module = next(module for module in (search, search_loop) if old in inspect.getsource(module))
    return edited_package("reference_numpy", ((module.__name__.rpartition(".")[2], old, new),))


GREEDY_BUGS = {
    "does not stop at EOS": ("(tokens != plan.eos_id) & ", ""),
    "stops one token early": ("& (n < plan.limits[:, None])", "& (n < plan.limits[:, None] - 1)"),
    "selects the least likely token": (
        "return log_probabilities.argmax(-1)",
        "return np.where(log_probabilities == -inf, 9, log_probabilities).argmin(-1)",
    ),
    "always reads the start token": (
        "decode_step(state.tokens.reshape(-1), cache)",
        "decode_step(state.tokens.reshape(-1) * 0 + plan.start_id, cache)",
    ),
}
BEAM_BUGS = {
    "beams are not reordered": ("cache.reorder(rows)", "None"),
    "the cache follows the wrong beam": ("parent[sentence, rank]", "parent[:, :beam_size]"),
    "keeps the first hypotheses instead of the best": (
        "self.top(totals.reshape(batch, -1), 2 * beam_size)",
        "self.top(np.where(np.arange(beam_size * vocabulary) < 2 * vocabulary, totals.reshape(batch, -1), -9e9), 6)",
    ),
    "no length penalty": ("best / plan.penalties[n], -inf", "best, -inf"),
    "length without EOS": ("best / plan.penalties[n], -inf", "best / plan.penalties[n - 1], -inf"),
    "stops at the first hypothesis": ("finished[:, -1] >= attainable", "np.isfinite(finished[:, 0])"),
    "bound at the current length": ('longest = n if plan.rules.stop == "current" else plan.limits', "longest = n"),
    "continues after EOS": ("self.top(np.where(~ends, best, -inf), beam_size)", "self.top(best, beam_size)"),
    "stops one token early": ("(plan.limits == n)", "(plan.limits == n + 1)"),
    "no log-softmax": (
        "log_probabilities = log_softmax(logits)\n    log",
        "log_probabilities = logits.copy()\n    log",
    ),
    "generates padding": ("log_probabilities[:, plan.pad_id] = -inf", "pass"),
}


@pytest.mark.parametrize(
    ("options", "old", "new"),
    [
        pytest.param(options, *lines, id=f"{kind}: {name}")
        for kind, options, bugs in (("greedy", GREEDY, GREEDY_BUGS), ("beam", BEAM, BEAM_BUGS))
        for name, lines in bugs.items()
    ],
)
def test_search_bugs_are_detected(options, old, new):
    buggy, caught = buggy_package(old, new), False
    for seed in (13, 28, 6, 3):
        config, weights = lively(seed=seed)
        truth = load_reference(config, weights)
        found = found_by(load_reference(config, weights), options, buggy)
        doubts = follow_all(config, weights, found, options, "float32")
        known = score(truth, sources(config), found.result.nbest_ids, options)
        caught |= not np.allclose(known, found.result.nbest_scores, rtol=1e-5)
        caught |= any(not doubt.is_near_tie for doubt in doubts)
    assert caught


@pytest.mark.parametrize("condition", ["np.isfinite(state.finished).all()", "n == plan.capacity - 1"])
def test_search_that_stops_too_early_is_detected(condition):
    """The searches run on one sentence at a time, because an unfinished sentence would keep its batch running."""
    buggy = buggy_package("if not state.goes_on():", f"if not state.goes_on() or {condition}:")
    wrong = 0
    for seed, row, count in itertools.product((13, 28, 6), range(5), (1, 2)):
        config, weights = lively(seed=seed)
        truth, options = load_reference(config, weights), replace(BEAM, num_hypotheses=count)
        source_ids = sources(config)[row : row + 1]
        expected = options.run(ref, truth, source_ids).nbest_ids
        try:
            found = Decoded.by(partial(options.run, buggy, truth, source_ids))
        except ValueError:  # the search returned no hypothesis
            continue
        doubts = explain(truth, truth, source_ids, found, expected, options)
        assert bool(doubts) == (found.result.nbest_ids.tolist() != expected.tolist())
        assert not any(doubt.is_near_tie for doubt in doubts)
        wrong += bool(doubts)
    assert wrong


def spoilt(found, change):
    """Return a search result whose hypotheses have been changed."""
    ids = found.result.nbest_ids.copy()
    change(ids)
    return Decoded(SearchResult(ids, found.result.nbest_scores), found.shown)


def twice(ids):
    ids[:, 1] = ids[:, 0]


def pad_inside(ids):
    ids[0, 0] = np.concatenate([ids[0, 0, :2], [0], ids[0, 0, 2:-1]])


def shortened(ids):
    ids[0, 0, -1] = 0


@pytest.mark.parametrize("change", [twice, pad_inside, shortened])
def test_impossible_search_results_have_infinite_margins(change):
    config, weights = lively()
    options = Search(beam_size=3, max_length=5, num_hypotheses=2, length_penalty=1.5)
    found = spoilt(found_by(load_reference(config, weights), options), change)
    doubts = follow_all(config, weights, found, options, "float32")
    assert doubts
    assert all(doubt.margin == np.inf for doubt in doubts)


@pytest.mark.parametrize("options", [GREEDY, BEAM, *BY_RULES.values()], ids=["greedy", "beam", *BY_RULES])
def test_random_tokens_are_explained_without_an_exception(options):
    """The random tokens often include padding and EOS, so most hypotheses continue after one of them."""
    config, weights = lively()
    truth = load_reference(config, weights)
    right = options.run(ref, truth, sources(config)).nbest_ids
    rng = np.random.default_rng(0)
    for _ in range(5):
        ids = rng.choice([0, 2, 2, 4, 5, 8], (*right.shape[:2], rng.integers(1, 12)))
        for scores in (None, np.zeros(right.shape[:2])):
            doubts = explain(truth, None, sources(config), Decoded(SearchResult(ids, scores), []), right, options)
            assert {doubt.sentence for doubt in doubts} == {*range(len(right))}
            assert not any(np.isnan(doubt.margin) for doubt in doubts)


def test_padding_inside_a_greedy_hypothesis_is_reported_with_its_position():
    config, weights = lively()
    found = spoilt(found_by(load_reference(config, weights), GREEDY), pad_inside)
    doubts = follow_all(config, weights, found, GREEDY, "float64")
    assert "sentence 0, token 3: a hypothesis contains padding" in summary(doubts)


def test_port_without_recorded_steps_gets_no_near_tie_exemption():
    config, weights = lively()
    found = found_by(load_reference(config, weights), BEAM)
    other = spoilt(found, lambda ids: ids.__setitem__((slice(None), 1), ids[:, 0]))
    hidden = Decoded(other.result, [])
    assert not all(doubt.is_near_tie for doubt in follow_all(config, weights, hidden, BEAM, "float32"))


def test_source_of_only_padding_is_checked():
    config, weights = lively()
    truth = load_reference(config, weights)
    source_ids = np.full((1, 3), config.pad_id)
    found = Decoded.by(lambda on_step: BEAM.run(ref, truth, source_ids, on_step))
    assert follow(PrefixScorer(truth, None, source_ids[0]), 0, found, BEAM) == []
