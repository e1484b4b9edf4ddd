"""``parity check`` includes the less common calls that users make: a bug in any of them makes a case diverge."""

from __future__ import annotations

from dataclasses import replace

import pytest

from transformer_parity.engine.findings import AGREES, IMPRECISE, SKIPPED, Kept
from transformer_parity.transformer.bugs.edited_package import edited_package
from transformer_parity.transformer.cases.standard import standard_cases
from transformer_parity.transformer.compare.comparator import compare
from transformer_parity.transformer.diagnose.investigate import Investigation
from transformer_parity.transformer.ports.protocol import Placements
from transformer_parity.transformer.ports.registry import PORTS

CASES = {case.name: case for case in standard_cases()}
STEPWISE, BEAM = "decode/other_decoder_greedy", "decode/ends_apart_beam"
STEPS, GRADIENTS = "steps/pre", "gradients/padded"
DEFAULTS, LIMITS = "decode/paper_base_beam", "decode/other_decoder_beam"
FORMULAS, LOSS = "decode/marian_beam", "loss/large_logits"
SAMPLES, PREFIX, SCORES = "decode/samples", "decode/prefix_beam", "scores/translations"
BUGS = {  # name: case, module, text, and its replacement; the same for NumPy and PyTorch unless listed separately
    "taps of a cached step": (STEPWISE, "transformer", 'cache, within(tap, "decoder"))', "cache, tap)"),
    "a tap of a cached step is not called": (
        STEPWISE,
        "transformer",
        'logits = tap("logits", self.output_proj(x))',
        "logits = self.output_proj(x)",
    ),
    "the memory for a cache is ignored": (STEPWISE, "transformer", "if memory is None:", "if True:"),
    "on_step is not called": (BEAM, "search_loop", "if on_step is not None:", "if False:"),
    "on_step is called with one hypothesis": (BEAM, "search_loop", "state.ids[:, :, :n]", "state.ids[:, :1, :n]"),
    "on_step is called with one token too few": (
        BEAM,
        "search_loop",
        "state.ids[:, :, :n]",
        "state.ids[:, :, : n - 1]",
    ),
    "no padding where a hypothesis has ended": (
        BEAM,
        "search",
        "where((alive != -inf)[:, :, None], candidates[sentence, rank], plan.pad_id)",
        "where((alive == alive)[:, :, None], candidates[sentence, rank], plan.pad_id)",
    ),
    "a different default length penalty": (
        DEFAULTS,
        "search",
        "length_penalty: float = 0.6",
        "length_penalty: float = 1.6",
    ),
    "a different default beam size": (DEFAULTS, "search", "beam_size: int = 4", "beam_size: int = 5"),
    "a different default number of hypotheses": (
        FORMULAS,
        "search",
        "num_hypotheses: int = 1",
        "num_hypotheses: int = 2",
    ),
    "the tokens of a batch are not counted": (LOSS, "training", "counted.sum()", "counted.sum() * 0"),
    "omitted rules": (
        "decode/paper_base_greedy",
        "search",
        "if rules is None else rules,\n        prefix_ids=prefix_ids,\n    )\n    return run_search(Greedy,",
        "if False else rules,\n        prefix_ids=prefix_ids,\n    )\n    return run_search(Greedy,",
    ),
    "the start token of a greedy search": (
        STEPWISE,
        "search",
        "max_length=max_length,\n        min_length=min_length,\n        start_id=start_id,\n",
        "max_length=max_length,\n        min_length=min_length,\n",
    ),
    "the minimum length of a beam search": (
        LIMITS,
        "search",
        "length_penalty_kind=length_penalty_kind,\n        min_length=min_length,\n",
        "length_penalty_kind=length_penalty_kind,\n",
    ),
    "samples with a different seed": (
        SAMPLES,
        "search",
        'check_integer("seed", seed',
        'check_integer("seed", seed + 1',
    ),
    "samples without a temperature": (SAMPLES, "search", "values / plan.temperature", "values"),
    "samples from one token too many": (SAMPLES, "search", "< plan.top_k", "<= plan.top_k"),
    "the share of a token counts before it": (
        SAMPLES,
        "search",
        "probs.cumsum(-1) - probs <",
        "probs.cumsum(-1) <",
    ),
    "samples from unlikely tokens too": (
        SAMPLES,
        "search",
        "- probs < plan.top_p",
        "- probs < plan.top_p * 9",
    ),
    "the share of the excluded is drawn": (SAMPLES, "search", "reshape(-1, 1) * sums[:, -1:]", "reshape(-1, 1) * 1.0"),
    "a random number for all tokens": (SAMPLES, "search", "plan.uniforms[:, :, n - 1]", "plan.uniforms[:, :, 0]"),
    "the first prefix for all sentences": (PREFIX, "search_rules", "plan.prefix[:, n - 1]", "plan.prefix[:1, n - 1]"),
    "a prefix with probability one": (PREFIX, "search_rules", "scored=rules.score_forced", "scored=False"),
    "scores at padding": (SCORES, "search", "is_token = labels != ", "is_token = labels != -1 + 0 * "),
    "scores with a different start token": (
        SCORES,
        "search",
        "check_start(start_id, model.config)",
        "model.config.eos_id",
    ),
    "scores without the source mask": (SCORES, "search", "labels[:, :-1]], 1), source_mask)", "labels[:, :-1]], 1))"),
    "smoothing in an evaluation": (STEPS, "training", "label_smoothing=0.0", "label_smoothing=0.2"),
    "the exported state has no step": (STEPS, "training", "State(self.step, self.seed,", "State(0, self.seed,"),
    "the step is not loaded": (STEPS, "training", "self.step, self.seed = state.step, state", "self.seed = state"),
}
OF_A_PACKAGE = {
    "numpy": {
        "channels are counted instead of queries": (
            "attention/many_padded_queries",
            "fast",
            "query.shape[2] > QUERY_BLOCK",
            "query.shape[3] > QUERY_BLOCK",
        ),
        "a loss that overflows": (
            LOSS,
            "functional",
            "logits - logits.max(axis=-1, keepdims=True)",
            "logits",
        ),
        "a step without any label": (
            STEPS,
            "training",
            "count = max(int(tokens), 1)\n        norm",
            "count = int(tokens)\n        norm",
        ),
        "a moment is not loaded": (STEPS, "training", "[...] = state.second_moment[name]", "[...] *= 1.0"),
        "the trainer's gradient": (
            STEPS,
            "training",
            "array / count for name, array in gradient.items()",
            "array for name, array in gradient.items()",
        ),
        "no gradients at taps": (
            GRADIENTS,
            "training",
            "{name: gradient * scale for name, gradient in of_taps.items()},\n",
            "",
        ),
    },
    "torch": {
        "a loss that overflows": (
            LOSS,
            "training",
            "logits.log_softmax(-1, torch.promote_types(logits.dtype, torch.float32))",
            "logits - logits.exp().sum(-1, keepdim=True).log()",
        ),
        "a step without any label": (
            STEPS,
            "training",
            "    loss = total / tokens.clamp(min=1)\n            loss.b",
            "    loss = total / tokens\n            loss.b",
        ),
        "a search by the formulas": (FORMULAS, "search_loop", "with inference(model) if", "with model if"),
        "dropout in gradients": (GRADIENTS, "layers", "    model.eval()\n", "    pass\n"),
        "trained parameters are called frozen": (
            GRADIENTS,
            "training",
            "if name not in trained)",
            "if name in trained)",
        ),
        "a moment is not loaded": (
            STEPS,
            "training",
            'copy_in(name, second, remembered["exp_avg_sq"])',
            "pass",
        ),
        "the trainer's gradient": (STEPS, "training", "copy_out(name, p.grad) for", "2 * copy_out(name, p.grad) for"),
        "no gradients at taps": (
            GRADIENTS,
            "training",
            "(source_ids, target_ids, **taps)",
            "(source_ids, target_ids)",
        ),
        "scores without the source mask": (
            SCORES,
            "search",
            "given(*inputs, source_mask) if has_mask",
            "given(*inputs) if has_mask",
        ),
    },
    "jax": {"taps of a cached step": BUGS["taps of a cached step"]},
    "tf": {"taps of a cached step": BUGS["taps of a cached step"]},
}


@pytest.mark.parametrize(
    ("name", "case", "edit"),
    [
        pytest.param(name, case, edit, id=f"{name}-{what}", marks=pytest.mark.only(name))
        for name, own in OF_A_PACKAGE.items()
        for what, (case, *edit) in ({**BUGS, **own} if name in ("numpy", "torch") else own).items()
    ],
)
def test_bug_in_a_less_common_call_is_detected(name, case, edit):
    wrong = replace(PORTS[name], package=edited_package(PORTS[name].package, (tuple(edit),)).__name__)
    found = {finding.verdict for finding in compare([CASES[case]], wrong, Placements(("float64",)))}
    assert found - {AGREES, SKIPPED}


WIDE = {  # package: the text that converts bfloat16 logits to float32, and its replacement
    "torch": ("torch.promote_types(logits.dtype, torch.float32)", "logits.dtype"),
    "jax": ("logits.astype(jnp.promote_types(logits.dtype, jnp.float32))", "logits"),
    "tf": ('tf.cast(logits, keras.backend.result_type(logits.dtype, "float32"))', "logits"),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.only(name)) for name in WIDE])
def test_loss_computed_in_bfloat16_is_detected(name):
    package = edited_package(PORTS[name].package, (("training", *WIDE[name]),)).__name__
    for port, verdict in ((PORTS[name], AGREES), (replace(PORTS[name], package=package), IMPRECISE)):
        findings = compare([CASES[LOSS]], port, Placements(("bfloat16",)))
        assert {one.verdict for one in findings if one.tap == "loss"} == {verdict}


@pytest.mark.only("numpy")
def test_right_tokens_after_wrong_steps_are_diagnosed():
    edit = BUGS["on_step is not called"][1:]
    wrong, setting = replace(PORTS["numpy"], package=edited_package("reference_numpy", (edit,)).__name__), ("float64",)
    kept: Kept = {}
    findings = list(compare([CASES[BEAM]], wrong, Placements(setting), kept=kept))
    (report,) = Investigation(wrong, Placements(setting), "numpy").failures(findings, kept, [CASES[BEAM]])
    assert report.diagnosis is not None
    assert "different tokens" not in report.diagnosis.sentence


@pytest.mark.parametrize("case", [STEPWISE, BEAM, STEPS, GRADIENTS, DEFAULTS, LIMITS, FORMULAS, LOSS])
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.only(name)) for name in ("numpy", "torch")])
def test_packages_agree_without_a_bug(name, case):
    findings = compare([CASES[case]], PORTS[name], Placements(("float64",)))
    assert {finding.verdict for finding in findings} == {AGREES}
