"""`parity bench` verifies every result that it times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import reference_numpy as ref
from transformer_bench.verify import DecodeVerifier, DisagreementError, ForwardVerifier, TrainVerifier
from transformer_bench.workload import SEED, DecodeWork, ForwardWork, TrainWork
from transformer_parity.apps.translate.agreement import scorers
from transformer_parity.apps.translate.trained import Trained
from transformer_parity.transformer.cases import for_ports
from transformer_parity.transformer.cases.case import tiny
from transformer_parity.transformer.ports.protocol import Decoded
from transformer_spec.search import SearchResult

SMALL = DecodeWork("tiny", batch=3, source=6, target=5)
FORWARD = ForwardWork("tiny", batch=3, source=6, target=5)
TRAIN = TrainWork("tiny", batch=3, source=6, target=5)


def searched(work=SMALL, weights=None, dtype="float32"):
    model = ref.Transformer.from_weights(work.config, weights or work.weights(), dtype)
    return lambda on_step=None: work.search.run(ref, model, work.source_ids, on_step)


def no_steps():
    raise AssertionError("the steps were not requested")


@pytest.mark.parametrize("beam_size", [None, 3])
def test_reference_agrees_with_itself_in_bench(beam_size):
    work = replace(SMALL, beam_size=beam_size)
    found = searched(work)()
    assert found.ids.shape == (3, 5)
    assert not np.isin(found.ids, [work.config.pad_id, work.config.eos_id]).any()
    assert DecodeVerifier(work, work.weights()).verify(found, no_steps) == ""


def test_verifiers_use_the_unaccelerated_reference(monkeypatch):
    def refuse(model):
        raise AssertionError("the truth is computed by the code that is to be verified")

    monkeypatch.setattr("reference_numpy.part.accelerate", refuse)
    ForwardVerifier(FORWARD, FORWARD.weights())
    TrainVerifier(TRAIN, TRAIN.weights())
    DecodeVerifier(replace(SMALL, dtype="bfloat16"), SMALL.weights())
    config = tiny(d_k=None, d_v=None)
    for_ports._varied_seed.__wrapped__(config)
    for_ports._seed_that_says_padding.__wrapped__(config)
    scorers(Trained(Path(), None, SMALL.config, SMALL.weights(), None), "float32")(SMALL.source_ids[:1])


def test_benchmark_sentences_vary_in_tokens_and_lengths():
    work = DecodeWork("tiny")
    ids = searched(work)().ids
    assert ids.shape == (8, 64)
    assert len(np.unique(ids)) > 20
    assert all(len(np.unique(row)) > 3 for row in ids)
    assert len(np.unique(ids, axis=0)) == 8
    first = ref.Transformer.from_weights(work.config, work.weights())(
        work.source_ids, np.full((8, 1), work.config.bos_id)
    )
    # The logits of PAD and EOS are so low that no search selects these tokens, even if it doesn't exclude them.
    assert first[..., [work.config.pad_id, work.config.eos_id]].max() < -1000
    assert (work.source_ids != work.config.pad_id).sum(1).tolist() == [32, 30, 27, 25, 23, 21, 18, 16]


def another_token(found):
    ids = found.nbest_ids.copy()
    ids[1, 0, 2] += 1
    return SearchResult(ids, found.nbest_scores)


WRONG = {
    "a different token": (another_token, "sentence 1, token 3: "),
    "sentences in a different order": (
        lambda found: SearchResult(found.nbest_ids[::-1], found.nbest_scores[::-1]),
        "instead of",
    ),
    "scores off by a hundred eps": (
        lambda found: SearchResult(found.nbest_ids, found.nbest_scores * np.float32(1 + 100 * 2**-23)),
        "got 1.2e-05",
    ),
    "a NaN score": (
        lambda found: SearchResult(found.nbest_ids, found.nbest_scores * np.float32("nan")),
        "scores must be finite",
    ),
    "one missing token": (
        lambda found: SearchResult(found.nbest_ids[:, :, :4], found.nbest_scores),
        "ids and scores must have shapes [3, 1, 5] and [3, 1]: got [3, 1, 4] and [3, 1]",
    ),
    "one missing sentence": (
        lambda found: SearchResult(found.nbest_ids[:2], found.nbest_scores[:2]),
        "got [2, 1, 5] and [2, 1]",
    ),
}


@pytest.mark.parametrize("bug", WRONG)
def test_wrong_result_is_rejected(bug):
    change, reason = WRONG[bug]
    reference = DecodeVerifier(SMALL, SMALL.weights())
    right = searched()()
    for _ in range(2):  # before and after the verifier accepts a correct result
        with pytest.raises(DisagreementError) as caught:
            reference.verify(change(right), no_steps)
        assert reason in str(caught.value)
        assert reference.verify(right, no_steps) == ""


def test_near_tie_is_accepted():
    weights = SMALL.weights()
    weights["source_embedding.table"][[5, 7]] = 0.0  # the logits of these two tokens are exactly their biases
    weights["output_proj.bias"][[5, 7]] = 9.0
    found = searched(weights=weights)()
    assert (found.ids == 5).all()
    found.nbest_ids[1, 0, 2] = 7
    near_ties = DecodeVerifier(SMALL, weights).verify(found, no_steps)
    assert near_ties.startswith("1 near-tie; sentence 1, token 3: ID 7 instead of 5, margin 0.0e+00")


@pytest.mark.parametrize("beam_size", [None, 3])
def test_bfloat16_near_ties_use_bfloat16_noise(beam_size):
    """A bfloat16 search is accepted, unless its weights are wrong or the verifier expects float32 noise."""
    import transformer_torch

    work = DecodeWork("tiny", dtype="bfloat16", target=24, beam_size=beam_size)
    weights, kernel = work.weights(), "decoder.layers.0.feed_forward.inner_proj.kernel"
    reference = DecodeVerifier(work, weights)

    def found(changed):
        model = transformer_torch.Transformer.from_weights(work.config, {**weights, **changed}, "bfloat16")
        return lambda on_step=None: work.search.run(transformer_torch, model, work.source_ids, on_step)

    right, wrong = found({}), found({kernel: weights[kernel] * 1.3})
    assert "near-tie" in reference.verify(right(), lambda: Decoded.by(right))
    with pytest.raises(DisagreementError, match="rounding noise"):
        reference.verify(wrong(), lambda: Decoded.by(wrong))
    with pytest.raises(DisagreementError):
        DecodeVerifier(replace(work, dtype="float32"), weights).verify(right(), lambda: Decoded.by(right))


def test_wrong_beam_search_is_rejected_by_following_its_steps():
    work = replace(SMALL, beam_size=3)
    reference, search = DecodeVerifier(work, work.weights()), searched(work)
    wrong = another_token(search())
    with pytest.raises(DisagreementError, match="repeating the search gave different tokens"):
        reference.verify(wrong, lambda: Decoded.by(search))
    with pytest.raises(DisagreementError, match="is returned, but was never in the beam"):
        reference.verify(wrong, lambda: replace(Decoded.by(search), result=wrong))


def logits(work=FORWARD, dtype="float32"):
    model = ref.Transformer.from_weights(work.config, work.weights(), dtype)
    return model(work.source_ids, work.target_ids).astype(np.float32)


def test_logits_are_verified():
    verifier, right = ForwardVerifier(FORWARD, FORWARD.weights()), logits()
    for _ in range(2):
        assert verifier.verify(right, no_steps) == ""
        assert verifier.verify(logits(dtype="float64"), no_steps) == ""
    pads = FORWARD.target_ids == FORWARD.config.pad_id
    pads[:, 0] = False
    assert pads.any()
    at_pads = np.where(pads[..., None], np.float32(7), right)
    assert verifier.verify(at_pads, no_steps) == ""  # padding positions are ignored
    for wrong, reason in (
        (right * np.float32(1 + 1e-4), "got 1.0e-04"),
        (right[::-1], "the error of the logits must be at most"),
        (right[:, :4], "logits must have shape [3, 5, 1000]: got [3, 4, 1000]"),
        (right * np.float32("nan"), "logits must be finite"),
    ):
        with pytest.raises(DisagreementError) as caught:
            verifier.verify(wrong, no_steps)
        assert reason in str(caught.value)


def test_losses_are_verified_step_by_step():
    model = ref.Transformer.from_weights(TRAIN.config, TRAIN.weights())
    trainer = ref.Trainer(model, TRAIN.settings, SEED)
    losses = [float(trainer.train_step(TRAIN.source_ids, TRAIN.target_ids, TRAIN.labels).loss) for _ in range(6)]
    # The loss decreases, so a step that doesn't update the weights would be detected.
    assert losses[-1] < 0.9 * losses[0]
    verifier = TrainVerifier(TRAIN, TRAIN.weights())
    for step, loss in reversed(list(enumerate(losses, 1))):
        assert verifier.verify((step, loss), no_steps) == ""
    for wrong in ((2, losses[0]), (1, losses[0] * 1.001), (3, float("nan"))):
        with pytest.raises(DisagreementError, match=f"the loss of step {wrong[0]} must be"):
            verifier.verify(wrong, no_steps)


def test_labels_are_the_next_tokens():
    config = TRAIN.config
    for ids, labels in zip(TRAIN.target_ids, TRAIN.labels, strict=True):
        length = 1 + (ids[1:] != config.pad_id).sum()
        assert ids[0] == config.bos_id
        assert labels[: length - 1].tolist() == ids[1:length].tolist()
        assert labels[length - 1] == config.eos_id
        assert (labels[length:] == config.pad_id).all()


def test_dropout_is_applied_at_the_sites_in_the_paper():
    work = replace(TRAIN, dropout=0.3)
    rates = work.config.dropout
    assert (rates.embedding, rates.residual, rates.attention, rates.feed_forward) == (0.3, 0.3, 0.0, 0.0)
    verifier = TrainVerifier(work, work.weights())
    expected = TrainVerifier(work, work.weights())
    with pytest.raises(DisagreementError, match="the loss of step 1 must be"):
        verifier.verify((1, 1.0), no_steps)
    expected.verify((1, verifier._losses[0] * 1.05), no_steps)


def test_agreement_statement_mentions_dropout():
    assert TRAIN.agreement == "agree with the float64 reference"
    assert replace(TRAIN, dropout=0.1).agreement == "are within 10% of the reference, which drops different elements"
