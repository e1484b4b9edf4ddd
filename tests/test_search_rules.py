"""The searches of Hugging Face, fairseq, and Marian: every backend returns the same hypotheses as these programs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import other_searches
import pytest
import third_party
from conftest import random_weights, tiny_config
from search_models import load, quick_search, tokens_of
from test_search import score_all

import reference_numpy
from reference_numpy import SearchRules
from transformer_parity.apps.checkpoints.formats.huggingface_search import UNKNOWN, generation_search
from transformer_spec.search import Search

SENTENCES, TOKENS, FORCED = 80, 20, 7
COMPILED = pytest.mark.extended("searches", "jax", "tf")
REPEATED = pytest.mark.extended("searches", "torch", "jax", "tf")


@pytest.fixture(autouse=True)
def _quick(request):
    """Disable compiler optimizations."""
    backend = request.getfixturevalue("backend").name if "backend" in request.fixturenames else "numpy"
    with quick_search(backend):
        yield


@cache
def lively_marian(**sizes):
    """Return a config and weights for which hypotheses end after 1 to 20 tokens, and 80 sentences."""
    config = tiny_config("marian", max_length=64, source_vocab_size=40, target_vocab_size=40, **sizes)
    weights = random_weights(config, 4)
    weights["output_proj.bias"] = weights["output_proj.bias"] * 5  # with tied embeddings, models tend to repeat tokens
    weights["output_proj.bias"][config.eos_id] += 4.0
    rng = np.random.default_rng(0)
    source_ids = np.full((SENTENCES, 9), config.pad_id)
    for row in source_ids:
        length = rng.integers(2, 10)
        row[:length] = rng.choice(np.delete(np.arange(config.source_vocab_size), config.pad_id), length)
    return config, weights, source_ids


def padded(ids, width=TOKENS):
    """Pad IDs [B, L] on the right."""
    return np.pad(ids, ((0, 0), (0, width - ids.shape[1])), constant_values=lively_marian()[0].pad_id)


# --- Hugging Face. ---

FORCED_END = {"forced_eos_token_id": 0}
GENERATION = {
    "4 beams": {"num_beams": 4, "early_stopping": False, **FORCED_END},
    "6 beams": {"num_beams": 6, "early_stopping": False, **FORCED_END},
    "renormalized": {"num_beams": 4, "early_stopping": False, "renormalize_logits": True, **FORCED_END},
    "the first": {"num_beams": 4, "early_stopping": True, **FORCED_END},
    "exact": {"num_beams": 4, "early_stopping": "never", **FORCED_END},
    "exact, cut": {"num_beams": 4, "early_stopping": "never"},
    "forced, the first": {"num_beams": 5, "early_stopping": True, "forced_bos_token_id": FORCED},
    "forced": {"num_beams": 5, "early_stopping": False, "forced_bos_token_id": FORCED},
    "no n-gram twice": {
        **{"num_beams": 4, "early_stopping": True, "no_repeat_ngram_size": 3},
        **{"min_length": 5, "length_penalty": 2.0},
    },
    "greedy": {"num_beams": 1, "no_repeat_ngram_size": 2, "suppress_tokens": [11], **FORCED_END},
}


@cache
def generated(name):
    """Return the hypotheses and scores of ``generate``, and its settings as search options."""
    config, weights, source_ids = lively_marian()
    lengths = {"max_length": TOKENS + 1, "bad_words_ids": [[config.pad_id]], "decoder_start_token_id": config.bos_id}
    fields = {**lengths, **GENERATION[name]}
    ids, scores = third_party.marian_generate(config, weights, source_ids, fields)
    return padded(ids[:, 0]), None if scores is None else scores[:, 0], generation_search(fields, config)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=COMPILED if name in ("4 beams", "no n-gram twice") else REPEATED) for name in GENERATION],
)
def test_search_matches_hugging_face_generate(backend, name):
    config, weights, source_ids = lively_marian()
    expected, scores, options = generated(name)
    count = SENTENCES if backend.name in ("numpy", "torch") else 16
    found = options.run(backend.package, load(backend, config, weights), source_ids[:count])
    assert (padded(found.ids) == expected[:count]).all(1).sum() == count
    if scores is not None:
        np.testing.assert_allclose(found.scores, scores[:count], rtol=2e-6)  # Hugging Face sums in float32


def test_hugging_face_rules_change_most_results():
    """Except for one setting, at least 25% of the results change if the default rules are used instead.

    The other tests would therefore detect a rule that isn't applied.
    """
    config, weights, source_ids = lively_marian()
    model, same, count = load_numpy(config, weights), {}, SENTENCES // 4
    for name in GENERATION:
        expected, _, options = generated(name)
        found = replace(options, rules=SearchRules()).run(reference_numpy, model, source_ids[:count])
        same[name] = int((padded(found.ids) == expected[:count]).all(1).sum())
    assert same.pop("exact, cut") == count
    assert max(same.values()) <= 0.75 * count, same


def test_generation_config_is_converted_to_a_search():
    config = lively_marian()[0]
    opus = {
        **{"num_beams": 4, "max_length": 512, "bad_words_ids": [[config.pad_id]], "renormalize_logits": True},
        **{"eos_token_id": 0, "forced_eos_token_id": 0, "decoder_start_token_id": 1, "transformers_version": "5.23.0"},
    }
    rules = SearchRules.preset("hf", at_limit="forced", renormalize=True)
    assert generation_search(opus, config) == Search(4, 1.0, 511, 1, "power", 1, 1, rules)
    greedy = generation_search({}, config)
    assert (greedy.beam_size, greedy.max_length, greedy.rules) == (None, 20, SearchRules.preset("hf"))
    assert generation_search({"max_new_tokens": 9, "min_new_tokens": 3}, config).min_length == 4
    assert generation_search({"bad_words_ids": [[5], [0]], "suppress_tokens": [6]}, config).rules.banned_ids == (5, 6)
    assert generation_search({name: usual[0] for name, usual in UNKNOWN.items()}, config) == greedy
    for fields, message in (
        ({"repetition_penalty": 1.2}, "repetition_penalty in a generation config is not supported: got 1.2"),
        ({"eos_token_id": [0, 3]}, "eos_token_id must be the model's EOS token, 0: got [0, 3]"),
        ({"bad_words_ids": [[3, 4]]}, "every entry of bad_words_ids must be a single token: got [3, 4]"),
        ({"early_stopping": "late"}, "early_stopping must be false, true, or 'never': got 'late'"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            generation_search(fields, config)


# --- fairseq and Marian. ---


def theirs(program, **settings):
    """Return all (score, tokens) pairs that a transcription finds for each sentence."""
    config, weights, source_ids = lively_marian()
    model, symbols = load_numpy(config, weights), other_searches.Symbols(config.bos_id, config.eos_id, config.pad_id)
    for source in source_ids:
        known = {}

        def scores_after(tokens, source=source[source != config.pad_id], known=known):
            if tuple(tokens) not in known:
                known[tuple(tokens)] = score_all(model, source, [tokens])[0].tolist()
            return known[tuple(tokens)]

        yield program(scores_after, symbols, **settings)


def load_numpy(config, weights):
    return reference_numpy.Transformer.from_weights(config, weights, "float64")


PROGRAMS = {
    "fairseq": ({}, {}, {}),
    "fairseq, prefix": ({"prefix": (FORCED, 9)}, {"forced_ids": (FORCED, 9)}, {}),
    "fairseq, n-grams": ({"no_repeat_ngram": 2}, {"no_repeat_ngram_size": 2}, {}),
    "marian": ({"normalize": 0.6}, {}, {"length_penalty": 0.6}),
    "marian, not normalized": ({"normalize": 0.0}, {}, {"length_penalty": 0.0}),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("fairseq", "marian") else pytest.mark.extended("searches"))
        for name in PROGRAMS
    ],
)
def test_search_matches_fairseq_and_marian(name):
    """All hypotheses match, in the same order and with the same scores."""
    config, weights, source_ids = lively_marian()
    settings, rules, options = PROGRAMS[name]
    program = name.partition(",")[0]
    length = {"fairseq": {"max_len": 11}, "marian": {"max_length": 12}}[program]
    sizes = {"beam_size": 4, "num_hypotheses": 4, "max_length": 12}
    options = Search.preset(program, rules, **sizes, **options)
    found = options.run(reference_numpy, load_numpy(config, weights), source_ids)
    expected = theirs(getattr(other_searches, f"{program}_search"), beam=4, **length, **settings)
    for row, best in enumerate(expected):
        assert [tokens_of(ids, config) for ids in found.nbest_ids[row]][: len(best)] == [tuple(ids) for _, ids in best]
        np.testing.assert_allclose(found.nbest_scores[row, : len(best)], [score for score, _ in best], 1e-12)
        assert (found.nbest_scores[row, len(best) :] == -np.inf).all()


# --- All rules, in every backend. ---

RULES = {
    "hf": {
        **{"at_limit": "forced", "renormalize": True, "no_repeat_ngram_size": 2, "banned_ids": (11, 23)},
        "forced_ids": (FORCED,),
    },
    "fairseq": {"forced_ids": (FORCED, 9), "no_repeat_ngram_size": 3},
    "marian": {"banned_ids": (11,)},
}


def searches_by(program):
    """Return a beam search and a greedy search with more rules than the program uses by default."""
    beam = Search.preset(program, RULES[program], beam_size=4, num_hypotheses=3, max_length=8)
    return [beam, replace(beam, beam_size=None, num_hypotheses=1)]


@pytest.mark.parametrize("kind", ["beam", pytest.param("greedy", marks=COMPILED)])
@pytest.mark.parametrize(
    "program", ["hf", pytest.param("fairseq", marks=COMPILED), pytest.param("marian", marks=COMPILED)]
)
def test_every_backend_follows_the_rules(port, program, kind):
    # All backends except torch run one operation at a time, which is slow.
    one_layer = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    config, weights, source_ids = lively_marian(**{} if port.name == "torch" else one_layer)
    reference, model = load_numpy(config, weights), load(port, config, weights)
    options = searches_by(program)[kind == "greedy"]
    for count, most in ((6, 8), (3, 4)):
        if port.name == "torch" or count == 3:
            expected, found = (
                replace(options, max_length=most).run(package, it, source_ids[:count])
                for package, it in ((reference_numpy, reference), (port.package, model))
            )
            np.testing.assert_array_equal(found.nbest_ids, expected.nbest_ids)
            np.testing.assert_allclose(found.nbest_scores, expected.nbest_scores, 1e-12)


@pytest.mark.parametrize("program", RULES)
def test_search_rules_give_equal_results_with_and_without_cache(program):
    config, weights, source_ids = lively_marian()
    model = load_numpy(config, weights)
    for options in searches_by(program):
        search = reference_numpy.greedy_search if options.beam_size is None else reference_numpy.beam_search
        rest = {} if options.beam_size is None else {"beam_size": 4, "num_hypotheses": 3}
        lengths = {"max_length": options.max_length, "min_length": options.min_length, "rules": options.rules}
        cached, plain = (search(model, source_ids[:9], **rest, **lengths, use_cache=use) for use in (True, False))
        np.testing.assert_array_equal(cached.nbest_ids, plain.nbest_ids)
        np.testing.assert_allclose(cached.nbest_scores, plain.nbest_scores, 1e-12)


def test_search_results_follow_the_rules():
    config, weights, source_ids = lively_marian()
    hf, fairseq, marian = (searches_by(program)[0] for program in RULES)
    found = {
        program: options.run(reference_numpy, load_numpy(config, weights), source_ids).nbest_ids
        for program, options in zip(RULES, (hf, fairseq, marian), strict=True)
    }
    for program in ("hf", "marian"):
        assert not np.isin(found[program], RULES[program]["banned_ids"]).any()
    assert (found["fairseq"][..., :2] == (FORCED, 9)).all()
    for ids in found["hf"].reshape(-1, 8):
        tokens = [config.bos_id, *tokens_of(ids, config)]
        pairs = list(pairwise(tokens))
        assert len(set(pairs)) == len(pairs)
    full = found["hf"][..., 7] != config.pad_id
    assert full.any()
    assert (found["hf"][..., 7][full] == config.eos_id).all()


@COMPILED
def test_huge_no_repeat_ngram_size_changes_nothing(backend):
    """The search doesn't iterate over all n-gram tokens, which would take minutes."""
    config, weights, source_ids = lively_marian()
    model = load(backend, config, weights)
    usual, found = (
        backend.package.beam_search(
            model, source_ids[:2], 2, max_length=6, rules=SearchRules(no_repeat_ngram_size=size)
        )
        for size in (0, 10**9)
    )
    np.testing.assert_array_equal(found.nbest_ids, usual.nbest_ids)


def test_default_maximum_length_follows_each_preset():
    config, weights, _ = lively_marian()
    source_ids = np.array([[5, 6, 7, 8]])
    endless = np.where(np.arange(40) == config.eos_id, -1e3, weights["output_proj.bias"])
    model = load_numpy(config, {**weights, "output_proj.bias": endless})
    for name, most in (("paper", 54), ("hf", 54), ("fairseq", 201), ("marian", 12)):
        options = Search.preset(name, beam_size=2)
        assert options.limit(4, config) == most
        if most < 100:
            assert options.run(reference_numpy, model, source_ids).ids.shape == (1, most)


# --- Serialization and validation. ---

BAD_RULES = [
    ({"stop": "soon"}, ValueError, "stop must be one of attainable, current, first: got 'soon'"),
    ({"pool": "all"}, ValueError, "pool must be one of num_hypotheses, beam, first: got 'all'"),
    ({"at_limit": "eos"}, ValueError, "at_limit must be one of cut, forced, scored: got 'eos'"),
    ({"renormalize": 1}, TypeError, "renormalize must be True or False: got 1"),
    ({"forced_ids": 5}, TypeError, "forced_ids must be a list of IDs: got 5"),
    ({"banned_ids": [5.0]}, TypeError, "banned_ids must be an integer: got 5.0"),
    ({"banned_ids": [-5]}, ValueError, "banned_ids must be at least 0: got -5"),
    ({"no_repeat_ngram_size": -1}, ValueError, "no_repeat_ngram_size must be at least 0: got -1"),
    ({"max_length_factor": -1.0}, ValueError, "max_length_factor must be at least 0: got -1.0"),
    (
        {"beam_shrinks": True},
        ValueError,
        "beam_shrinks=True requires pool to be 'beam' or 'first': got 'num_hypotheses'",
    ),
    ({"patience": 1}, ValueError, "unknown search rules: patience"),
]


@pytest.mark.parametrize(("fields", "error", "message"), BAD_RULES)
def test_invalid_rules_in_a_dict_are_rejected(fields, error, message):
    with pytest.raises(error) as caught:
        SearchRules.from_dict(fields)
    assert str(caught.value) == message


@pytest.mark.parametrize("search", ["greedy_search", "beam_search"])
def test_invalid_rules_raise_the_same_error_in_every_backend(backend, search):
    config, weights, source_ids = lively_marian()
    model = load(backend, config, weights)
    for rules, error, message in (
        ({"stop": "first"}, TypeError, "rules must be SearchRules, such as SearchRules.preset('hf'): got dict"),
        (SearchRules(forced_ids=(40,)), ValueError, "forced_ids must be in [0, 40): got 40"),
        (SearchRules(banned_ids=(0,)), ValueError, "banned_ids must contain neither EOS nor padding: got 0"),
        (SearchRules(forced_ids=(1,)), ValueError, "forced_ids must contain neither EOS nor padding: got 1"),
        (
            SearchRules(forced_ids=(5, 6)),
            ValueError,
            "forced_ids must contain fewer tokens than max_length: got 2 and 2",
        ),
    ):
        with pytest.raises(error) as caught:
            getattr(backend.package, search)(model, source_ids[:1], max_length=2, rules=rules)
        assert str(caught.value) == message


@pytest.mark.parametrize(
    ("options", "longest"),
    [
        ({"max_length": 10**30}, 10**30),
        ({"rules": SearchRules(max_length_factor=1e30, max_length_extra=0)}, 2**32 - 2),
        ({"rules": SearchRules(max_length_factor=10**30)}, 2**32 + 48),
        ({"rules": SearchRules(max_length_extra=10**30)}, 2**32 + 1),
    ],
)
def test_length_beyond_the_integer_range_is_rejected(backend, options, longest):
    config, weights, source_ids = lively_marian()
    model = load(backend, config, weights)
    with pytest.raises(ValueError, match=f"^max_length must be at most {2**31 - 1}: got {longest}$"):
        backend.package.greedy_search(model, source_ids[:1, :3], **options)


def test_numpy_numbers_in_rules_become_python_numbers():
    rules = SearchRules(max_length_factor=np.float32(1.5), max_length_extra=np.int64(2), forced_ids=[np.int32(5)])
    assert json.loads(json.dumps(rules.to_dict())) == rules.to_dict()
    assert rules.max_lengths([3, 4]).tolist() == [6, 8]
    options = Search(beam_size=np.int32(3), length_penalty=np.float32(0.5), start_id=np.uint8(1))
    assert json.loads(json.dumps(options.to_dict())) == options.to_dict()


def test_search_rules_and_options_round_trip_through_json():
    for name in ("paper", "hf", "fairseq", "marian"):
        for options in (Search.preset(name), Search.preset(name, beam_size=4, max_length=9, start_id=3)):
            assert Search.from_dict(json.loads(json.dumps(options.to_dict()))) == options
    rules = SearchRules.preset("hf", forced_ids=[np.int64(7)], banned_ids=[3, 4])
    assert SearchRules.from_dict(json.loads(json.dumps(rules.to_dict()))) == rules
    assert Search.from_dict({"beam_size": 2}) == Search(2)
    for fields, error, message in (
        ({"beams": 2}, ValueError, "unknown search options: beams"),
        ({"rules": 3}, TypeError, "rules must be a mapping of field names to values: got int"),
        ([], TypeError, "search options must be a mapping of field names to values: got list"),
        ({"min_length": 0}, ValueError, "min_length must be at least 1: got 0"),
        ({"start_id": -1}, ValueError, "start_id must be at least 0: got -1"),
        ({"length_penalty": "x"}, TypeError, "length_penalty must be a number: got 'x'"),
        (
            {"max_length": 70_000},
            ValueError,
            "max_length in the search settings of a file must be at most 65,536: got 70,000",
        ),
        (
            {"rules": {"no_repeat_ngram_size": 1001}},
            ValueError,
            "no_repeat_ngram_size in the search settings of a file must be at most 1,000: got 1,001",
        ),
    ):
        with pytest.raises(error) as caught:
            Search.from_dict(fields)
        assert str(caught.value) == message
    with pytest.raises(ValueError, match="rules must be one of paper, hf, fairseq, marian: got 'moses'"):
        SearchRules.preset("moses")
