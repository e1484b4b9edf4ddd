"""Diagnoses of ports written independently of the bug catalog: the right name, a measured fact, or unknown.

A plain NumPy model contains one bug at a time and reports all taps, a few, or none. In other ports, the forward pass is
right but greedy search is wrong, or the gradients are right but the learning rate is wrong.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from tiers import first_alone

import reference_numpy
from transformer_parity.engine.findings import AGREES, SKIPPED
from transformer_parity.transformer.cases.for_ports import model_cases, port_cases, port_config
from transformer_parity.transformer.compare.comparator import compare
from transformer_parity.transformer.diagnose.candidates import several
from transformer_parity.transformer.diagnose.diagnosis import EXACT, LIKELY, UNKNOWN
from transformer_parity.transformer.diagnose.investigate import Investigation
from transformer_parity.transformer.ports.protocol import Placements
from transformer_parity.transformer.ports.templates.other_port import MyPort
from transformer_parity.transformer.ports.user import PluginPort, Port
from transformer_spec.taps import no_tap
from transformer_spec.training_config import TrainingConfig

SETTING = Placements(("float64",))
TAPS = {"all": ("**",), "few": ("*.output", "*.layers.*.output"), "none": ()}


@pytest.fixture(autouse=True)
def few_attempts(monkeypatch):
    monkeypatch.setattr(several, "ATTEMPTS", 30)  # fewer combinations of bugs to try if no single bug fits


def reports_of(kind, *stages, **fields):
    """Compare a kind of port as `parity check` does, and return a report for each stage that fails."""
    globals()["Wrong"] = type("Wrong", (kind,), {**fields, "__module__": __name__})
    port, kept = PluginPort(f"{__name__}:Wrong"), {}
    cases = port_cases(port_config(port), stages) if stages else model_cases(port_config(port))[:4]
    findings = list(compare(cases, port, SETTING, kept=kept))
    reports = list(Investigation(port, SETTING, port.reference).failures(findings, kept, cases))
    assert ({finding.verdict for finding in findings} <= {AGREES, SKIPPED}) == (not reports)
    return reports


# --- Forward ---


def softmax(x, axis=-1):
    weights = np.exp(x - x.max(axis, keepdims=True))
    return weights / weights.sum(axis, keepdims=True)


class Plain(Port):
    """The paper's model with at most one bug."""

    dtypes = ("float64",)
    overrides = {"attention_bias": True}
    taps = ("**",)
    bug = ""

    def load(self, config, weights, dtype):
        self.config, self.weights = config, {name: array.astype(np.float64) for name, array in weights.items()}
        if self.has("weights of layer 0 and 1 swapped"):
            swapped = str.maketrans("01", "10")
            self.weights = {name: self.weights[name.translate(swapped)] for name in weights}

    def has(self, bug):
        return self.bug == bug

    def linear(self, x, path):
        return x @ self.weights[f"{path}.kernel"] + self.weights.get(f"{path}.bias", 0.0)

    def norm(self, x, path):
        mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        if self.has("a little of the batch's mean"):
            mean = mean + 3e-4 * x.mean()
        if self.has("norm over positions"):
            mean, variance = x.mean(1, keepdims=True), x.var(1, keepdims=True)
        epsilon = 1e-4 if self.has("epsilon of 1e-4") else self.config.layer_norm_epsilon
        scale = self.weights[f"{path}.scale"] + self.has("scale plus one")
        return (x - mean) / np.sqrt(variance + epsilon) * scale + self.weights[f"{path}.bias"]

    def embed(self, ids):
        d_model, length = self.config.d_model, ids.shape[1]
        position = np.arange(length)[:, None] / (length if self.has("positions over the length") else 1)
        position = np.minimum(position, 511) if self.has("a table of 512 positions") else position
        base = 1000 if self.has("base of 1000") else 10000
        angles = position / base ** (np.arange(0, d_model, 2) / d_model)
        x = self.weights["source_embedding.table"][ids] * (d_model if self.has("times d_model") else math.sqrt(d_model))
        x = x + np.stack([np.sin(angles), np.cos(angles)], -1).reshape(length, d_model)
        return x * (np.random.default_rng().random(x.shape) < 0.9) if self.has("dropout on") else x

    def attend(self, x, memory, mask, path, tap):
        heads, d_k = self.config.num_heads, self.config.d_k
        query, key, value = (
            tap(f"{path}.{name}", self.linear(y, f"{path}.{name}_proj").reshape(*y.shape[:2], heads, -1).swapaxes(1, 2))
            for name, y in (("query", x), ("key", memory), ("value", memory))
        )
        scale = {"no scale": 1.0, "over sqrt(d_k + 1)": math.sqrt(d_k + 1), "over sqrt(length)": key.shape[2] ** 0.5}
        scores = query @ key.swapaxes(-1, -2) / scale.get(self.bug, math.sqrt(d_k))
        masked = np.where(mask, scores, -10.0 if self.has("mask of -10") else -1e9)
        shown = tap(f"{path}.scores", masked if self.has("scores shown behind the mask") else scores)
        if not self.has("masked after the softmax"):
            scores = np.where(mask, shown, masked)
        if self.has("bfloat16 softmax"):
            weights = softmax(scores).astype("bfloat16").astype(np.float64)
        elif self.has("masked after the softmax"):
            weights = softmax(scores) * mask
        else:
            weights = softmax(scores).astype(np.float32 if self.has("float32 softmax") else np.float64)
        weights = tap(f"{path}.weights", weights.astype(np.float64))
        context = tap(f"{path}.context", weights @ value)
        if self.has("a head twice"):
            context = context[:, [0, 1, 1]]
        return tap(f"{path}.output", self.linear(context.swapaxes(1, 2).reshape(x.shape), f"{path}.output_proj"))

    def transform(self, x, path, tap):
        inner = self.linear(x, f"{path}.inner_proj")
        inner = tap(f"{path}.inner", np.where(inner > 0, inner, 0.01 * inner if self.has("leaky ReLU") else 0.0))
        return tap(f"{path}.output", self.linear(inner, f"{path}.output_proj"))

    def add(self, x, y, path, tap):
        if self.has("norm before the sum"):
            return x + tap(f"{path}.output", self.norm(y, path))
        return tap(f"{path}.output", self.norm((1.2 if self.has("1.2 times the residual") else 1.0) * x + y, path))

    def forward(self, source_ids, target_ids, tap):
        config = self.config
        source_mask, target_mask = ((ids != config.pad_id)[:, None, None, :] for ids in (source_ids, target_ids))
        target_mask = target_mask & np.tri(target_ids.shape[1], k=int(self.has("sees one further")), dtype=bool)
        cross_mask = source_mask | self.has("no mask in cross-attention")
        x = tap("source_embedding.output", self.embed(source_ids))
        for i in range(config.num_encoder_layers):
            path = f"encoder.layers.{i}"
            attended = self.attend(x, x, source_mask, f"{path}.self_attention", tap)
            x = self.add(x, attended, f"{path}.self_attention_norm", tap)
            x = self.add(x, self.transform(x, f"{path}.feed_forward", tap), f"{path}.feed_forward_norm", tap)
            x = tap(f"{path}.output", x)
        memory = tap("encoder.output", x)
        x = tap("target_embedding.output", self.embed(target_ids))
        for i in range(config.num_decoder_layers):
            path = f"decoder.layers.{i}"
            attended = self.attend(x, x, target_mask, f"{path}.self_attention", tap)
            x = self.add(x, attended, f"{path}.self_attention_norm", tap)
            attended = self.attend(x, memory, cross_mask, f"{path}.cross_attention", tap)
            x = self.add(x, attended, f"{path}.cross_attention_norm", tap)
            x = self.add(x, self.transform(x, f"{path}.feed_forward", tap), f"{path}.feed_forward_norm", tap)
            x = tap(f"{path}.output", x)
        x = tap("decoder.output", x)
        table = self.weights["source_embedding.table"]
        if self.has("table of norm one"):
            table = table / np.linalg.norm(table, axis=-1, keepdims=True)
        return tap("logits", x @ table.T)


SCALE = "at encoder.layers.0.self_attention.scores, all values are {} times the correct ones"
NORM_FIRST = "exactly like the reference with this change: norm before the sum, in every sub-layer"
LATER, PADDING = "a later target token changes earlier logits", "of source sentence 1 changes its logits"
LENGTH, BATCH = "the logits depend on the target length", "has different logits in a separate batch"
RANDOM = "two calls on the same input differ"
OTHER_LAYER = "uses the kernel and the bias of encoder.layers.1.self_attention.query_proj"
FLOAT32, NARROW = "a value is rounded to float32", "a value is rounded to lower precision than float32"
SHOWN = "the output is correct; the port differs only in encoder.layers.0.self_attention.scores and 5 more taps"
# The first statement of the report for a port with all taps, with a few taps, and without taps. An empty string means
# that the bug remains unknown.
SAID = {
    "no scale": ("scores not scaled",) * 3,
    "over sqrt(d_k + 1)": (SCALE.format("0.942809"), "", ""),
    "over sqrt(length)": (LENGTH,) * 3,
    "times d_model": ("exactly like the reference with this change: embedding multiplied by d_model",) * 3,
    "weights of layer 0 and 1 swapped": (OTHER_LAYER, "", ""),
    "epsilon of 1e-4": ("",) * 3,
    "scale plus one": (r"exactly like the reference with this change: norm multiplied by 1 \+ scale",) * 3,
    "norm over positions": (f"normalized over the positions|{LATER}",) * 3,
    "a little of the batch's mean": (BATCH,) * 3,
    "positions over the length": (LENGTH,) * 3,
    "base of 1000": ("a base of 1000 instead of 10000",) * 2 + ("",),
    "dropout on": (RANDOM,) * 3,
    "mask of -10": ("the scores of the 351 keys that the mask forbids are set to -10$", LATER, LATER),
    "no mask in cross-attention": ("cross-attention without padding mask",) * 3,
    "masked after the softmax": (f"mask applied after the softmax|{LATER}",) * 3,
    "sees one further": ("a position (sees|attends to) the next one",) * 3,
    "float32 softmax": ("every value has only float32 precision", FLOAT32, FLOAT32),
    "bfloat16 softmax": ("every value has only bfloat16 precision", NARROW, NARROW),
    "leaky ReLU": ("exactly like the reference with this change: leaky ReLU with slope 0.01",) * 3,
    "a head twice": ("",) * 3,
    "norm before the sum": (NORM_FIRST,) * 3,
    "1.2 times the residual": ("",) * 3,
    "table of norm one": ("",) * 3,
    "scores shown behind the mask": (SHOWN, None, None),
}


@pytest.mark.parametrize("shown", first_alone(["few", "all", "none"], "wrong ports"))
@pytest.mark.parametrize("bug", SAID)
def test_bugs_are_never_identified_incorrectly(bug, shown):
    said = SAID[bug][list(TAPS).index(shown)]
    reports = reports_of(Plain, bug=bug, taps=TAPS[shown])
    if said is None:
        assert reports == []
        return
    (report,) = reports
    found = report.diagnosis
    assert re.search(said, found.sentence), found
    assert found.confidence == (UNKNOWN if not said else EXACT if "exactly" in found.sentence else LIKELY)
    if found.confidence == EXACT:
        assert found.signatures == ()
    if not said:  # without a diagnosis, a report may state only positions
        assert all(re.search(r"at .*, among \w+ 0 to \d+, only .* differs?$", words) for words in found.signatures)


class WrongWithoutTaps(Plain):
    """A port that has a bug only when it runs without taps."""

    of_fast_path = ""

    def forward(self, source_ids, target_ids, tap):
        self.bug = self.of_fast_path if tap is no_tap else ""
        return super().forward(source_ids, target_ids, tap)


def test_bug_in_the_path_without_taps_is_identified():
    (report,) = reports_of(WrongWithoutTaps, of_fast_path="no mask in cross-attention")
    assert report.diagnosis.confidence == EXACT
    assert report.diagnosis.sentence.startswith(
        "without taps, Wrong behaves exactly like the reference with this change: "
    )
    assert report.diagnosis.candidates == ("cross-attention without padding mask, without taps only",)


def test_unknown_bug_without_taps_is_reported_as_a_difference():
    (report,) = reports_of(WrongWithoutTaps, of_fast_path="1.2 times the residual")
    assert report.diagnosis.confidence == LIKELY
    assert report.diagnosis.sentence.startswith("the output without taps differs from the output with taps (error ")


def test_errors_after_a_tap_with_another_meaning_are_inherited():
    (report,) = reports_of(Plain, bug="norm before the sum")
    introduced = report.blame.introduced
    assert introduced
    assert all(name.endswith("_norm.output") for name in introduced)


# --- Search ---


def test_truncated_position_table_is_detected_in_a_long_sentence():
    (report,) = reports_of(Plain, "activations", bug="a table of 512 positions")
    assert report.case == "full/longest/of_a_thousand_tokens"
    said = " ".join(report.diagnosis.signatures)
    assert "at source_embedding.output, among positions 0 to 1029, only 512, 513," in said


class LatePosition:
    """Positional encodings that are shifted by four for all tokens except the first, as with a wrong cache."""

    def __init__(self, position):
        self.position = position

    def __call__(self, x):
        length = x.shape[1]
        shifted = np.arange(length) + 4 * (np.arange(length) > 0)
        return x + self.position.vectors(length + 4)[shifted].astype(x.dtype)


BEAMS = [
    f"decode/{name}"
    for name in ("port_beam", "many_beam", "many_narrow_beam", "many_beam_without_penalty", "many_widest_beam")
]


class Greedy(Port):
    """A port without beam search and with the given bugs."""

    dtypes = ("float64",)
    left_out = dict.fromkeys(BEAMS, "greedy only")
    bugs = ()

    def load(self, config, weights, dtype):
        self.config = config
        self.model, self.stepwise = (reference_numpy.Transformer.from_weights(config, weights, dtype) for _ in range(2))
        if "late positions" in self.bugs:
            self.stepwise.target_position = LatePosition(self.stepwise.target_position)

    def forward(self, source_ids, target_ids, tap):
        logits = self.model(source_ids, target_ids)
        return 1.25 * logits if "scaled logits" in self.bugs else logits

    def generate(self, source_ids, max_length, beam_size, length_penalty):
        config, memory = self.config, self.model.encode(source_ids)
        ids = np.full((len(source_ids), 1), config.bos_id)
        ended = np.zeros(len(ids), bool)
        while ids.shape[1] <= max_length - ("a token early" in self.bugs) and not ended.all():
            logits = self.stepwise.decode(ids, memory, source_ids)[:, -1]
            if "padding" not in self.bugs:
                logits[:, config.pad_id] = -np.inf
            self.choose(logits, ids, max_length)
            token = np.where(ended, config.pad_id, logits.argmax(-1))
            ended |= token == config.eos_id
            ids = np.concatenate([ids, token[:, None]], 1)
        return ids[:, 1:]

    def choose(self, logits, ids, max_length):
        """Change the logits of the next tokens according to the bugs."""
        n = ids.shape[1]
        for row, before in zip(logits, ids.tolist(), strict=True):
            if "trigrams" in self.bugs:
                row[[before[i + 2] for i in range(n - 2) if before[i : i + 2] == before[-2:]]] = -np.inf
            if "bigrams" in self.bugs:
                row[[before[i + 1] for i in range(n - 1) if before[i] == before[-1]]] = -np.inf
            if "penalty" in self.bugs:
                held = sorted(set(before))
                row[held] = np.where(row[held] < 0, row[held] * 1.3, row[held] / 1.3)
            if "held tokens" in self.bugs:
                row[sorted(set(before))] -= 0.4
            if "late ends" in self.bugs:
                row[self.config.eos_id] -= 0.4
            if "forced end" in self.bugs and n == max_length:
                row[np.arange(len(row)) != self.config.eos_id] = -np.inf
            if "five tokens" in self.bugs and n < 5:
                row[self.config.eos_id] = -np.inf


def said_of_search(*bugs, stages=("activations", "decode")):
    return [report.diagnosis for report in reports_of(Greedy, *stages, bugs=bugs)]


@pytest.mark.parametrize(
    ("bug", "name"),
    [
        ("padding", "padding may be generated"),
        ("a token early", "stops one token early"),
        ("trigrams", "no repeated trigrams"),
        ("bigrams", "no repeated bigrams"),
        ("penalty", "a repetition penalty of 1.3 on logits"),
        ("forced end", "EOS forced at the maximum length"),
        ("five tokens", "a minimum length of 5"),
    ],
)
def test_search_rule_is_identified_instead_of_a_cache_bug(bug, name):
    (found,) = said_of_search(bug)
    assert (found.confidence, found.candidates[0], found.signatures) == (EXACT, name, ())


@pytest.mark.parametrize("other", first_alone(["late positions", "a token early"], "two bugs"))
def test_two_bugs_are_never_diagnosed_as_exactly_one(other):
    (found,) = said_of_search("padding", other)
    assert found.confidence != EXACT or all(" and " in name for name in found.candidates), found
    assert "exactly" not in found.sentence or " and " in found.sentence


SEARCH = (
    r"agrees with the reference on the tokens that the search returned .* but the search chooses different tokens: "
)


@pytest.mark.parametrize("bugs", first_alone([("late positions",), ("padding", "late positions")], "two bugs"))
def test_search_inconsistent_with_its_own_forward_is_reported(bugs):
    (found,) = said_of_search(*bugs)
    assert found.confidence == LIKELY
    said = " ".join((found.sentence, *found.signatures))
    assert re.search(SEARCH + r"at token \d+ of sentence \d+, the search returns", said), found
    assert "no known rule" in said


PLACES = r" in (the only such place|all \d+ such places)"
FACTS = {
    "held tokens": rf"the token that `forward` prefers would repeat a token{PLACES}(;|$)",
    "late ends": rf"`forward` would end the sentence{PLACES}, but the search ends no sentence before token \d+$",
}


@pytest.mark.parametrize("bug", FACTS)
def test_tokens_of_a_search_with_an_unknown_rule_are_described(bug):
    (found,) = said_of_search(bug)
    assert found.confidence == LIKELY
    assert any(re.search(SEARCH + ".*" + FACTS[bug], said) for said in (found.sentence, *found.signatures)), found
    assert "cache" not in " ".join((found.sentence, *found.signatures))


def test_search_is_not_blamed_for_a_wrong_forward():
    (found,) = said_of_search("scaled logits", "late positions", stages=("decode",))
    said = " ".join((found.sentence, *found.signatures))
    assert "`forward` itself differs from the reference" in said, found
    assert "--stage activations" in said
    assert "chooses different tokens" not in said


# --- Training ---


class Cubic(TrainingConfig):
    """Training settings with a custom warm-up schedule."""

    def learning_rate(self, step, d_model):
        return 1e-4 * (step / 50) ** 3


class Scheduled(MyPort):
    """A small model with a custom schedule, because each candidate about the schedule requires training."""

    overrides = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    dtypes = ("float64",)
    schedule = ""

    def start_training(self, settings):
        if self.schedule == "warm-up":
            settings = replace(settings, warmup_steps=4000)
        elif self.schedule == "factor":
            settings = replace(settings, learning_rate_factor=0.37 * settings.learning_rate_factor)
        elif self.schedule == "cubic":
            settings = Cubic(**vars(settings))
        super().start_training(settings)


def said_of_schedule(schedule):
    return [report.diagnosis for report in reports_of(Scheduled, "steps", schedule=schedule)]


@pytest.mark.parametrize(
    ("schedule", "name"),
    [
        ("factor", "a learning rate multiplied by 0.37"),
        pytest.param(
            *("warm-up", "a learning rate that warms up over 4000 steps instead of 8"),
            marks=pytest.mark.extended("schedules"),
        ),
    ],
)
def test_wrong_schedule_is_identified(schedule, name):
    (found,) = said_of_schedule(schedule)
    assert found.confidence == EXACT
    assert name in found.candidates


@pytest.mark.extended("schedules")
def test_unknown_schedule_is_described_by_the_measured_learning_rates():
    (found,) = said_of_schedule("cubic")
    assert found.confidence == EXACT
    factors = [float(factor) for factor in re.findall(r"(\S+) in step \d", found.sentence)]
    # The port's rate grows with the cube of the step, and the correct rate grows linearly during warm-up.
    assert factors == pytest.approx([n**2 * factors[0] for n in range(1, 6)], rel=1e-3)
    assert found.sentence.endswith("the learning rate or a bias correction differs")


@pytest.mark.parametrize(
    ("kind", "stages"), [(Plain, ()), (Greedy, ("activations", "decode")), (Scheduled, ("steps",))]
)
def test_port_without_a_bug_gets_no_diagnosis(kind, stages):
    assert reports_of(kind, *stages) == []
