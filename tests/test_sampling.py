"""Sampling, prefixes of hypotheses, and scores of given translations, compared with Hugging Face."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace

import numpy as np
import pytest
import third_party
import torch
from search_models import EITHER, REPEATED, TOLERANCE, lively, load, load_reference, sources
from search_models import _quick as _quick  # a fixture of every test

import reference_numpy
from reference_numpy.search import Sample
from transformer_spec.search import Search
from transformer_spec.search_rules import SearchRules

SETTINGS = {
    "plain": {},
    "hot": {"temperature": 2.0},
    "cold, few": {"temperature": 0.6, "top_k": 4},
    "nucleus": {"top_p": 0.7},
    "all": {"temperature": 1.3, "top_k": 6, "top_p": 0.8},
}
PREFIXES = [(5,), (6, 9, 4), (), (11, 3), (7,)]  # one for each of the five sentences


# --- Sampling. ---


@pytest.mark.parametrize("settings", [SETTINGS["plain"], pytest.param(SETTINGS["all"], marks=REPEATED)])
def test_all_packages_generate_the_same_samples(backend, settings):
    config, weights = lively()
    expected = reference_numpy.sample(load_reference(config, weights), sources(config), 3, seed=7, **settings)
    found = backend.package.sample(load(backend, config, weights), sources(config), 3, seed=7, **settings)
    assert found.nbest_ids.tolist() == expected.nbest_ids.tolist()
    np.testing.assert_allclose(found.nbest_scores, expected.nbest_scores, TOLERANCE)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_tokens_are_drawn_with_the_probabilities_of_hugging_face(settings):
    """Evenly spaced random numbers each draw a token, so the frequencies of the tokens are their probabilities."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.tensor(np.random.default_rng(5).normal(size=(1, 13)) * 2)
    warpers = {"temperature": TemperatureLogitsWarper, "top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper}
    warped = logits
    for name, warper in warpers.items():
        warped = warper(settings[name])(None, warped) if name in settings else warped
    draws, limits = 20000, {"top_k": 13, "top_p": inf, "temperature": 1.0}
    uniforms = ((np.arange(draws) + 0.5) / draws).reshape(-1, 1, 1)
    plan = SimpleNamespace(uniforms=uniforms, **{**limits, **settings})
    log_probabilities = logits.log_softmax(-1).numpy().repeat(draws, 0)
    counts = np.bincount(Sample.choose(None, log_probabilities, 1, plan), minlength=13)
    np.testing.assert_allclose(counts / draws, warped.softmax(-1)[0].numpy(), atol=1.0 / draws)
    assert ((counts > 0) == torch.isfinite(warped[0]).numpy()).all()


def test_random_number_close_to_one_draws_an_allowed_token():
    log_probabilities = np.array([[*np.log([0.25, 0.125], dtype=np.float32), -inf, np.log(0.625)]], np.float32)
    uniforms = np.full((1, 1, 1), np.nextafter(np.float32(1.0), np.float32(0.0)))
    plan = SimpleNamespace(uniforms=uniforms, temperature=1.0, top_k=4, top_p=inf)
    assert Sample.choose(None, log_probabilities, 1, plan) == [1]


@REPEATED
def test_sample_depends_only_on_seed_and_index(backend):
    config, weights = lively()
    model, source_ids, sample = load(backend, config, weights), sources(config), backend.package.sample
    found = sample(model, source_ids, 3, seed=1, max_length=9)
    again = sample(model, source_ids, 3, seed=1, max_length=9)
    assert again.nbest_ids.tolist() == found.nbest_ids.tolist()
    assert sample(model, source_ids, 3, seed=2, max_length=9).nbest_ids.tolist() != found.nbest_ids.tolist()
    fewer = sample(model, source_ids[:2], 2, seed=1, max_length=9)
    width = fewer.nbest_ids.shape[2]
    assert fewer.nbest_ids.tolist() == found.nbest_ids[:2, :2, :width].tolist()
    assert len({tuple(ids) for ids in found.nbest_ids[0].tolist()}) == 3


@REPEATED
def test_sampling_from_a_single_token_equals_greedy_search(backend):
    config, weights = lively()
    model, source_ids = load(backend, config, weights), sources(config)
    greedy = backend.package.greedy_search(model, source_ids, max_length=9)
    for settings in ({"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-4}):
        found = backend.package.sample(model, source_ids, max_length=9, **settings)
        assert found.nbest_ids.tolist() == greedy.nbest_ids.tolist()
        np.testing.assert_allclose(found.nbest_scores, greedy.nbest_scores, TOLERANCE)


def test_samples_with_and_without_cache_are_identical():
    config, weights = lively()
    model = load_reference(config, weights)
    cached, whole = (
        reference_numpy.sample(model, sources(config), 2, seed=4, prefix_ids=PREFIXES, use_cache=cache)
        for cache in (True, False)
    )
    assert cached.nbest_ids.tolist() == whole.nbest_ids.tolist()


@REPEATED
def test_samples_follow_the_rules(backend):
    config, weights = lively()
    rules, shown = SearchRules(banned_ids=(4, 5), no_repeat_ngram_size=2, at_limit="scored"), []
    model, source_ids = load(backend, config, weights), sources(config)
    found = backend.package.sample(model, source_ids, 4, max_length=9, min_length=3, rules=rules, on_step=shown.append)
    assert not np.isin(found.nbest_ids, (4, 5)).any()
    assert (found.nbest_ids[:, :, :2] != config.eos_id).all()
    assert (found.nbest_ids == config.eos_id).any(2).all()  # all hypotheses are forced to end
    assert [ids.shape for ids in shown] == [(5, 4, n) for n in range(1, len(shown) + 1)]


# --- Prefixes. ---


@pytest.mark.parametrize("search", EITHER)
@REPEATED
def test_prefix_is_forced_only_in_its_own_sentence(backend, search):
    """The result matches a search for each individual sentence with its prefix as ``forced_ids``."""
    config, weights = lively()
    model, source_ids, find = load(backend, config, weights), sources(config), getattr(backend.package, search)
    for scored in (False, True):
        found = find(model, source_ids, max_length=9, prefix_ids=PREFIXES, rules=SearchRules(score_forced=scored))
        for row, prefix in enumerate(PREFIXES):
            rules = SearchRules(forced_ids=prefix, score_forced=scored)
            alone = find(model, source_ids[row : row + 1], max_length=9, rules=rules)
            width = alone.ids.shape[1]
            assert found.ids[row, :width].tolist() == alone.ids[0].tolist()
            assert found.ids[row, : len(prefix)].tolist() == list(prefix)
            assert found.scores[row] == pytest.approx(alone.scores[0], rel=TOLERANCE)


def test_prefixes_can_be_padded_arrays_and_tensors():
    config, weights = lively()
    model = load_reference(config, weights)
    padded = np.zeros((5, 3), int)
    for row, prefix in zip(padded, PREFIXES, strict=True):
        row[: len(prefix)] = prefix
    expected = reference_numpy.greedy_search(model, sources(config), prefix_ids=PREFIXES).ids.tolist()
    for given in (padded, torch.tensor(padded), padded.tolist()):
        assert reference_numpy.greedy_search(model, sources(config), prefix_ids=given).ids.tolist() == expected


@pytest.mark.parametrize("num_beams", [1, 4])
def test_hugging_face_search_from_a_prefix_gives_the_same_ids(num_beams):
    config, weights, source_ids, theirs = _hugging_face()
    prefix_ids = np.random.default_rng(2).integers(3, 13, (5, 2))
    fields = {"num_beams": num_beams, "do_sample": False, "length_penalty": 0.0, "early_stopping": "never"}
    found = theirs(prefix_ids, fields)
    usual = Search() if num_beams == 1 else Search(num_beams, length_penalty=0.0)
    options = Search(**{**vars(usual), "max_length": 11, "prefix_ids": prefix_ids})
    ours = options.run(reference_numpy, load_reference(config, weights), source_ids)
    expected = found.sequences[:, 1:].numpy()
    assert ours.ids.tolist() == expected[:, : ours.ids.shape[1]].tolist()
    assert (expected[:, ours.ids.shape[1] :] == config.pad_id).all()


# --- Scores of given translations. ---


def test_scores_match_the_transition_scores_of_hugging_face():
    config, weights, source_ids, theirs = _hugging_face()
    found = theirs(np.zeros((5, 0), int), {"num_beams": 1, "do_sample": False})
    model = third_party.marian_model(config, weights)
    transitions = model.compute_transition_scores(found.sequences, found.logits, normalize_logits=True).numpy()
    ids = found.sequences[:, 1:].numpy()
    scores = reference_numpy.score(load_reference(config, weights), source_ids, ids)
    np.testing.assert_allclose(scores.tokens, np.where(ids == config.pad_id, 0.0, transitions), rtol=1e-5, atol=1e-6)
    assert len({len(set(row)) for row in ids.tolist()}) > 1  # sentences of different lengths


@pytest.mark.parametrize("search", [*EITHER, "sample"])
def test_score_matches_the_scores_of_the_search(backend, search):
    config, weights = lively()
    model, source_ids = load(backend, config, weights), sources(config)
    several = {"beam_search": {"num_hypotheses": 4, "length_penalty": 0.0}, "sample": {"num_samples": 3}}
    found = getattr(backend.package, search)(model, source_ids, max_length=9, **several.get(search, {}))
    scores = backend.package.score(model, source_ids, found.nbest_ids)
    sequences, tokens = (np.asarray(x.detach() if backend.name == "torch" else x) for x in scores)
    np.testing.assert_allclose(sequences, found.nbest_scores, TOLERANCE)
    np.testing.assert_allclose(tokens.sum(-1), sequences, TOLERANCE)
    assert (tokens[found.nbest_ids == config.pad_id] == 0.0).all()
    best = backend.package.score(model, source_ids, found.ids)
    assert tuple(best.tokens.shape) == found.ids.shape


def test_empty_hypothesis_has_score_minus_infinity():
    """A beam search may return fewer hypotheses than requested."""
    config, weights = lively()
    labels = np.array([[[3, config.eos_id], [config.pad_id, config.pad_id]]] * 5)
    assert reference_numpy.score(load_reference(config, weights), sources(config), labels).sequences[0, 1] == -inf


def test_scores_can_be_differentiated():
    import transformer_torch

    config, weights = lively()
    model = transformer_torch.Transformer.from_weights(config, weights)
    transformer_torch.score(model, sources(config), np.full((5, 2), 3)).sequences.sum().backward()
    assert model.output_proj.bias.grad.abs().sum() > 0


# --- Results and errors. ---


@pytest.mark.parametrize("search", [*EITHER, "sample"])
def test_results_can_be_arrays_of_the_framework(port, search):
    config, weights = lively()
    model, source_ids, find = load(port, config, weights), sources(config), getattr(port.package, search)
    found, native = (find(model, source_ids, max_length=9, as_numpy=as_numpy) for as_numpy in (True, False))
    logits = model(source_ids, source_ids)
    assert type(native.nbest_ids) is type(native.nbest_scores) is type(logits)
    np.testing.assert_array_equal(found.nbest_ids, np.asarray(native.nbest_ids))
    np.testing.assert_array_equal(found.nbest_scores, np.asarray(native.nbest_scores))
    if port.name == "torch":
        assert not native.nbest_ids.is_inference()
        assert native.nbest_ids.device == model.device


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"temperature": 0.0}, ValueError, "temperature must be greater than 0 and at most 1e+30: got 0.0"),
        ({"top_p": 1.5}, ValueError, "top_p must be greater than 0 and at most 1: got 1.5"),
        ({"top_k": 0}, ValueError, "top_k must be at least 1: got 0"),
        ({"seed": None}, TypeError, "seed must be an integer: got None"),
        ({"num_samples": 0}, ValueError, "num_samples must be at least 1: got 0"),
        ({"prefix_ids": [[4]]}, ValueError, "prefix_ids must have one row per sequence: got 1 for 5 sequences"),
        ({"prefix_ids": [4] * 5}, TypeError, "prefix_ids must have one row of IDs per sequence: got a single row"),
        ({"prefix_ids": [[4, 0, 5]] * 5}, ValueError, "prefix_ids must contain neither EOS nor padding: got 0"),
        ({"prefix_ids": [[2]] * 5}, ValueError, "prefix_ids must contain neither EOS nor padding: got 2"),
        ({"prefix_ids": [[13]] * 5}, ValueError, "prefix_ids must be in [0, 13): got 13"),
        (
            {"prefix_ids": [[4, 4]] * 5, "max_length": 2},
            ValueError,
            "prefix_ids must contain fewer tokens than max_length: got 2",
        ),
        (
            {"prefix_ids": [[4]] * 5, "rules": SearchRules(forced_ids=(4,))},
            ValueError,
            "prefix_ids and rules.forced_ids are mutually exclusive",
        ),
    ],
)
def test_invalid_sampling_options_are_rejected(backend, given, error, message):
    config, weights = lively()
    with pytest.raises(error) as raised:
        backend.package.sample(load(backend, config, weights), sources(config), **given)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("target_ids", "error", "message"),
    [
        (np.full((4, 3), 5), ValueError, "target_ids must have shape [5, length] or [5, count, length]: got (4, 3)"),
        (np.full(5, 5), ValueError, "target_ids must have shape [5, length] or [5, count, length]: got (5,)"),
        (np.full((5, 3), 5.0), TypeError, "target_ids must be integers: got float64"),
        (np.full((5, 3), 13), ValueError, "target_ids must be in [0, 13): got 13 at [0, 0]"),
    ],
)
def test_score_rejects_invalid_target_ids(backend, target_ids, error, message):
    config, weights = lively()
    with pytest.raises(error) as raised:
        backend.package.score(load(backend, config, weights), sources(config), target_ids)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("start_id", "error", "message"),
    [
        (1.5, TypeError, "start_id must be an integer: got 1.5"),
        (-1, ValueError, "start_id must be at least 0: got -1"),
        (13, ValueError, "start_id must be in [0, 13): got 13"),
    ],
)
def test_invalid_start_token_of_a_score_is_rejected(backend, start_id, error, message):
    config, weights = lively()
    with pytest.raises(error) as raised:
        backend.package.score(load(backend, config, weights), sources(config), np.full((5, 3), 5), start_id=start_id)
    assert str(raised.value) == message


def test_sampling_settings_require_a_seed():
    for settings in ({"temperature": 2.0}, {"top_k": 3}, {"top_p": 0.5}):
        with pytest.raises(ValueError, match="apply only to sampling; set a seed"):
            Search(**settings)
    with pytest.raises(ValueError, match="sampling does not use a beam"):
        Search(4, seed=1)


def _hugging_face():
    """Return the config, weights, sources, and a function that generates from prefixes [B, P] with Hugging Face."""
    import transformers

    config, weights = lively("marian", bos_id=0, tie_embeddings="all", max_length=64)
    weights["output_proj.bias"] = weights["output_proj.bias"] * 4
    weights["output_proj.bias"][config.eos_id] += 2.0
    source_ids = sources(config)

    def generate(prefix_ids, fields):
        start = np.full((5, 1), config.bos_id)
        special = {"pad_token_id": config.pad_id, "eos_token_id": config.eos_id}
        return third_party.marian_model(config, weights).generate(
            input_ids=torch.tensor(source_ids),
            attention_mask=torch.tensor(source_ids != config.pad_id),
            decoder_input_ids=torch.tensor(np.concatenate([start, prefix_ids], 1)),
            generation_config=transformers.GenerationConfig(
                max_length=12,
                bad_words_ids=[[config.pad_id]],
                return_dict_in_generate=True,
                output_logits=True,
                **special,
                **fields,
            ),
        )

    return config, weights, source_ids, generate
