"""Statements about which tensors differ and how: patterns, learning rates, and differences due to rounding."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from transformer_parity.engine.findings import AGREES, DIVERGES, Finding
from transformer_parity.engine.signatures import written
from transformer_parity.transformer.cases.case import tiny
from transformer_parity.transformer.cases.for_ports import port_cases
from transformer_parity.transformer.compare.runner import tensors
from transformer_parity.transformer.diagnose.candidates.trials import TRUTH, observed
from transformer_parity.transformer.diagnose.evidence.differing import Differing, described
from transformer_parity.transformer.diagnose.evidence.patterns import among_cases, not_finite, patterns
from transformer_parity.transformer.diagnose.evidence.properties import only_float32
from transformer_parity.transformer.diagnose.measured.step import first_step_in_words
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.ports.registry import DEFINITION
from transformer_parity.transformer.stages.steps import other_calls
from transformer_spec.names import parameter_shapes

CONFIG = tiny(d_k=None, d_v=None, attention_bias=True)
CASES = {case.name: case for case in port_cases(CONFIG)}
NAMES = list(parameter_shapes(CONFIG))


def observed_in(name):
    return dict(observed(TRUTH, CASES[name]))


def shown(name, changed):
    """Return a case in which some tensors differ."""
    truth = observed_in(name)
    wrong = tuple(tap for tap in truth if tap in changed)
    return Differing(CASES[name], wrong, {**truth, **changed}, truth)


def of_gradients(change, pattern):
    """Return the description for gradients if those whose names contain a pattern are changed."""
    truth = observed_in("gradients/padded")
    changed = {name: change(value) for name, value in truth.items() if name.startswith("of ") and pattern in name}
    return " | ".join(patterns(shown("gradients/padded", changed)))


@pytest.mark.parametrize(
    ("fits", "words"),
    [
        (lambda name: True, "all parameters"),
        (lambda name: name.endswith((".bias", ".scale")), "all biases and norms (all 1-D parameters)"),
        (lambda name: name.endswith("key_proj.kernel"), "all kernels of key projections"),
        (lambda name: name.startswith("encoder."), "all parameters of the encoder"),
        (lambda name: name.startswith("decoder.layers.1."), "all parameters of decoder.layers.1"),
        (lambda name: name.endswith(".kernel") and "cross_attention." in name, "all kernels of cross-attention"),
        (lambda name: name.endswith(".kernel") and "_attention." in name, "all kernels of attention"),
        (lambda name: name == "source_embedding.table", "source_embedding.table"),
        (lambda name: name != "source_embedding.table", "all parameters except source_embedding.table"),
    ],
)
def test_parameters_are_described_by_common_properties(fits, words):
    assert described([name for name in NAMES if fits(name)], NAMES) == words


@pytest.mark.parametrize(
    ("change", "pattern", "said"),
    [
        (np.zeros_like, "key_proj.kernel", "kernels of key projections is exactly zero: the backward pass stops"),
        (lambda x: 2.5 * x, ".scale", "scales of norms is 2.5 times the correct one"),
        (np.negative, "_norm.bias", "is -1 times the correct one"),
        (np.transpose, "query_proj.kernel", "kernels of query projections is the transpose of the correct one"),
        (lambda x: x + 1.0, "encoder.layers.0.", "the gradients of all"),
        (
            lambda x: x + 1.0,
            "_norm.scale",
            "the backward pass computes the gradient of decoder.layers.1.feed_forward_norm.scale first",
        ),
    ],
)
def test_wrong_gradients_are_described(change, pattern, said):
    assert said in of_gradients(change, pattern)


def test_wrong_loss_with_correct_gradients_is_reported():
    truth = observed_in("gradients/padded")
    (said,) = patterns(shown("gradients/padded", {"loss": truth["loss"] * 1.5}))
    assert said.startswith("only the loss differs (1.5 times the correct one): all ")


def test_first_wrong_step_and_overshooting_weights_are_reported():
    case, truth = CASES["steps/port"], observed_in("steps/port")
    start = case.load_weights()
    changed = {
        name: value + 0.1 for name, value in truth.items() if name.endswith(" loss") and int(name.split()[1]) > 6
    }
    for name, value in truth.items():
        if " weight " in name and name.endswith(".scale"):
            begun = start[name.split(" weight ")[1]].astype(np.float64)
            changed[name] = begun + 0.5 * (value - begun)
    said = patterns(shown("steps/port", changed))
    assert any("scales of norms moved 0.5 times as far" in words for words in said)
    losses = "the losses agree up to step 6 and differ from step 7 on"
    assert f"{losses}, and weights already differ after step 1" in said
    only_losses = {name: value for name, value in changed.items() if name.endswith(" loss")}
    said = patterns(shown("steps/port", only_losses))
    assert f"{losses}: the update of step 6 is wrong, or the forward pass with the weights after it" in said


def test_slightly_different_sentences_are_counted():
    """Sentences without padding may differ by rounding, but not by more."""
    case, truth = CASES["full/padded"], observed_in("full/padded")
    padded = (case.inputs["source_ids"] == CONFIG.pad_id).any(1)
    right = f"{padded.sum()} of {len(padded)} sentences differ, exactly those with padding in the source"
    for elsewhere, is_said in ((1e-14, True), (1e-10, False)):
        factor = np.where(padded, 1e-6, elsewhere)[:, None, None]
        said = patterns(shown("full/padded", {"output": truth["output"] * (1.0 + factor)}))
        assert (right in said) == is_said, said


def test_averaged_weights_are_not_diagnosed_as_a_wrong_learning_rate():
    """A port that trains correctly but returns an average of its weights has correct losses."""
    case, truth = CASES["steps/port"], observed_in("steps/port")
    start = case.load_weights()
    changed = {}
    for name, value in truth.items():
        if " weight " in name:
            begun = start[name.split(" weight ")[1]].astype(np.float64)
            changed[name] = begun + 0.1 * (value - begun)
    assert first_step_in_words(case, {**truth, **changed}) == ""
    said = patterns(shown("steps/port", changed))
    assert any(words.startswith("all 20 losses agree, so training is correct") for words in said)
    losses = {name: value + 0.1 for name, value in truth.items() if name.endswith(" loss")}
    assert "0.1 times as far" in first_step_in_words(case, {**truth, **changed, **losses})
    few = {name: value for name, value in changed.items() if name.endswith(".scale")}
    assert not any("training is correct" in words for words in patterns(shown("steps/port", few)))


def test_factor_close_to_one_is_not_printed_as_one():
    assert [written(factor) for factor in (1.0 + 3e-7, 0.5, 2.0, 1.0 - 1e-10)] == [
        "1.0000003",
        "0.5",
        "2",
        "0.9999999999",
    ]
    case, truth = CASES["steps/port"], observed_in("steps/port")
    start = case.load_weights()
    farther = {
        name: (begun := start[name.split(" weight ")[1]].astype(np.float64)) + (1.0 + 3e-6) * (value - begun)
        for name, value in truth.items()
        if " weight " in name
    }
    wrong = {**farther, "step 2 loss": truth["step 2 loss"] + 1e-7}
    assert "1.000003 times as far" in first_step_in_words(case, {**truth, **wrong})
    assert any("1.000003 times as far" in words for words in patterns(shown("steps/port", wrong)))


def test_weights_rounded_to_float32_are_reported():
    truth = observed_in("steps/port")
    changed = {name: value.astype(np.float32).astype(np.float64) for name, value in truth.items() if " weight " in name}
    said = patterns(shown("steps/port", changed))
    assert said[0] == "every returned weight that differs has only float32 precision"
    shifted = {name: value + 1e-7 for name, value in changed.items()}
    assert not any("only float32 precision" in words for words in patterns(shown("steps/port", shifted)))


def test_errors_as_large_as_float32_rounding_are_described_as_such():
    truth = observed_in("gradients/padded")
    rng = np.random.default_rng(0)
    for size, said in ((1e-7, True), (1e-12, False), (1e-3, False)):
        changed = {
            name: value * (1.0 + size * rng.normal(size=np.shape(value)))
            for name, value in truth.items()
            if name.startswith("of ")
        }
        words = patterns(shown("gradients/padded", changed))
        assert any("causes errors of this size" in one for one in words) == said


def test_step_is_not_blamed_for_a_batch_size_change_or_restart():
    for name, step, said in (
        ("steps/port/one_sentence", 2, "the batch of step 2 has a different number of sentences"),
        ("steps/port/changing_micro_batches", 8, "training restarts after step 7"),
    ):
        losses = {key: value + 0.1 for key, value in observed_in(name).items() if key == f"step {step} loss"}
        assert any(said in words for words in patterns(shown(name, losses)))


def test_calls_with_outdated_weights_are_reported():
    logits = observed_in("steps/port")["step 5 logits"]
    said = patterns(shown("steps/port", {"step 5 logits": 1.1 * logits}))
    assert any("these methods use weights from before the last update" in words for words in said)


def test_first_wrong_token_of_padded_sentences_is_reported():
    truth = observed_in("decode/port_greedy")
    tokens, padded = truth["tokens"].copy(), (CASES["decode/port_greedy"].inputs["source_ids"] == CONFIG.pad_id).any(1)
    tokens[padded, :, 3:] += 1
    (said,) = patterns(shown("decode/port_greedy", {"tokens": tokens}))
    assert said.startswith(
        f"in decode/port_greedy, {padded.sum()} of 4 sentences have different tokens, each starting at token 4"
    )
    assert "exactly those" in said
    assert said.endswith("with padding in the source")


@pytest.mark.parametrize(
    ("step", "older", "beginning", "words"),
    [
        (1, 0, "", "the weights that all parameters had before the first step"),
        (1, 0, "encoder.", "the weights that the layers of the encoder had before the first step"),
        (5, 1, ("source_embedding.", "encoder."), "the weights that the encoder had after step 1"),
    ],
)
def test_weights_from_before_a_step_are_recognized(step, older, beginning, words):
    config = tiny(d_k=None, d_v=None, tie_embeddings="none")
    case = next(case for case in port_cases(config) if case.name == "steps/port")
    truth = dict(observed(TRUTH, case))
    weights = {
        name: truth.get(f"step {older if name.startswith(beginning) else step} weight {name}", array)
        for name, array in case.load_weights().items()
    }
    found = dict(other_calls(case, DEFINITION.load(config, weights, Placement("float64"))))
    changed = {f"step {step} {name}": found[name] for name in ("logits", "tokens")}
    differing = Differing(case, tuple(changed), {**truth, **changed}, truth)
    (said,) = [one for one in patterns(differing) if "used the weights" in one]
    assert said.endswith(words)
    tokens = Differing(case, (f"step {step} tokens",), {**truth, f"step {step} tokens": found["tokens"]}, truth)
    of_tokens = [one for one in patterns(tokens) if "used the weights" in one]
    assert len(of_tokens) == (step == 1)  # after step 5, the tokens are the same
    assert all(one.endswith("the first step, or some of these weights") for one in of_tokens)


def test_losses_with_float32_precision_are_recognized():
    truth = observed_in("gradients/padded")
    rounded = np.asarray(float(np.float32(truth["loss"])))
    said = patterns(shown("gradients/padded", {"loss": rounded}))
    assert said[0] == "the loss has only float32 precision: compute the loss in the dtype of the model"
    for other in (0.0, 2.5, float(rounded) * (1.0 + 1e-12)):
        assert "float32" not in patterns(shown("gradients/padded", {"loss": np.asarray(other)}))[0]


def test_padding_labels_counted_in_the_loss_are_detected():
    """The target probabilities are correct, so the description doesn't mention them."""
    case, truth = CASES["gradients/padded"], observed_in("gradients/padded")
    padding = case.inputs["labels"] == CONFIG.pad_id
    changed = np.where(padding[..., None], 0.01, truth["at logits"])
    said = patterns(shown("gradients/padded", {"at logits": changed}))
    assert f"{padding.sum()} of {padding.sum()} padding labels contribute to the loss" in " ".join(said)
    assert "target probabilities" not in " ".join(said)
    said = patterns(shown("gradients/padded", {"at logits": (1.0 + 1e-9) * truth["at logits"]}))
    assert not any("target probabilities" in one or "contribute to the loss" in one for one in said)


def test_mean_over_padding_is_recognized_by_its_factor():
    labels = CASES["gradients/padded"].inputs["labels"]
    tokens = int((labels != CONFIG.pad_id).sum())
    words = f"{tokens} / {labels.size}, as if divided by the number of target positions instead of labels"
    assert words in of_gradients(lambda value: value * (tokens / labels.size), "")


def test_target_probabilities_are_derived_from_the_loss_gradient():
    truth = observed_in("gradients/padded")
    labels = CASES["gradients/padded"].inputs["labels"]
    counted = labels != CONFIG.pad_id
    more = 0.01 * (np.arange(CONFIG.target_vocab_size) == labels[..., None])
    changed = np.where(counted[..., None], truth["at logits"] - (more - 0.002) / counted.sum(), truth["at logits"])
    (said,) = (
        one for one in patterns(shown("gradients/padded", {"at logits": changed})) if "target probabilities" in one
    )
    share = CONFIG.label_smoothing / CONFIG.target_vocab_size
    right, each = (
        1.0 - CONFIG.label_smoothing + share,
        "for the label, {0:.6g} for padding, {0:.6g} for every other token",
    )
    assert said == (
        f"the loss uses target probabilities of {right + 0.008:.6g} {each.format(share - 0.002)}, "
        f"instead of {right:.6g} {each.format(share)}"
    )
    prediction = truth["at logits"] * counted.sum() + np.where(labels[..., None] == np.arange(37), right, share)
    more = np.where(counted[..., None], 0.1 * (prediction - 1.0 / 37), 0.0)  # a loss of 1.1 for all tokens together
    (said,) = (
        one
        for one in patterns(shown("gradients/padded", {"at logits": truth["at logits"] + more / counted.sum()}))
        if "target probabilities" in one
    )
    assert said.startswith(f"the loss uses target probabilities of {right + 0.1 / 37:.6g} for the label, ")
    doubled = patterns(shown("gradients/padded", {"at logits": 2.0 * truth["at logits"]}))
    assert not any("target probabilities" in one for one in doubled)


def test_nan_is_located():
    truth = observed_in("full/padded")
    output = truth["output"].copy()
    output[1, 2, :3] = math.nan
    said = not_finite(shown("full/padded", {"output": output}))
    assert said.startswith("output: 3 NaN of 1036 values, the first at index [1, 2, 0]")
    output[1, 2, 2] = -math.inf
    said = not_finite(shown("full/padded", {"output": output}))
    assert said.startswith("output: 2 NaN and 1 infinite of 1036 values, the first at index [1, 2, 0]")


def test_agreeing_cases_are_listed():
    def found(name, verdict):
        return Finding("it", "float64", "", name, "fast", "tokens", 0.0, 1.0, verdict, stage=CASES[name].stage)

    def said(differs, *agree):
        others = [(CASES[name], None) for name in agree]
        findings = [found(differs, DIVERGES), *(found(name, AGREES) for name in agree)]
        return " | ".join(among_cases(findings, CASES[differs], others))

    assert said("decode/port_beam", "decode/port_greedy").endswith(
        "only cases with beam search differ, and cases with greedy search agree"
    )
    assert "has the same shapes and agrees" in said("full/other_padding", "full/padded")
    assert said("full/longest", "full/padded") == ""
    assert said("gradients/padded", "gradients/one_token").endswith("cases that agree: gradients/one_token")
    assert said("full/longest") == ""


def test_varying_factor_is_not_attributed_to_the_learning_rate():
    case = CASES["steps/port"]
    other = replace(case, settings=replace(case.training, beta1=0.5))
    actual = tensors(DEFINITION.load(CONFIG, case.load_weights(), Placement("float64")), other)
    assert "check the learning rate" not in first_step_in_words(case, actual)


def test_float32_everywhere_is_recognized_by_the_values():
    case, truth = CASES["full/padded"], observed_in("full/padded")
    rounded = {name: value.astype(np.float32).astype(np.float64) for name, value in truth.items()}
    assert only_float32(case, rounded, truth).startswith(
        "float64 was requested, but every value has only float32 precision"
    )
    assert only_float32(case, truth, truth) == ""
    assert only_float32(case, {**rounded, "output": truth["output"]}, truth) == ""
