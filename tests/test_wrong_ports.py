"""What is said of ports that were written without a look at the catalogue: the right name, a measured fact, or unknown.

One plain model in NumPy, with a mistake at a time, shown with all taps, with few and with none.
"""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import tiers

from transformer_parity.engine.findings import AGREES, SKIPPED
from transformer_parity.transformer.cases.for_ports import model_cases, port_config
from transformer_parity.transformer.compare.comparator import compare
from transformer_parity.transformer.diagnose import diagnosis as diagnosis_module
from transformer_parity.transformer.diagnose.diagnosis import EXACT, LIKELY, UNKNOWN
from transformer_parity.transformer.diagnose.investigate import Investigation
from transformer_parity.transformer.ports.protocol import Placements
from transformer_parity.transformer.ports.user import PluginPort, Port

SETTING = Placements(("float64",))
TAPS = {"all": ("**",), "few": ("*.output", "*.layers.*.output"), "none": ()}


def softmax(x, axis=-1):
    weights = np.exp(x - x.max(axis, keepdims=True))
    return weights / weights.sum(axis, keepdims=True)


class Plain(Port):
    """The paper's model, but for one mistake."""

    dtypes = ("float64",)
    overrides = {"attention_bias": True}
    mistake = ""

    def load(self, config, weights, dtype):
        self.config, self.weights = config, {name: array.astype(np.float64) for name, array in weights.items()}
        if self.has("weights of layer 0 and 1 swapped"):
            swapped = str.maketrans("01", "10")
            self.weights = {name: self.weights[name.translate(swapped)] for name in weights}

    def has(self, mistake):
        return self.mistake == mistake

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
        scores = query @ key.swapaxes(-1, -2) / scale.get(self.mistake, math.sqrt(d_k))
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


SCALE = "at encoder.layers.0.self_attention.scores, everything is {} times what it should be"
NORM_FIRST = "exactly like the reference with norm before the sum, in every sub-layer"
LATER, PADDING = "a later target token changes earlier logits", "of source sentence 1 changes its logits"
LENGTH, BATCH = "they depend on length", "alone gives other logits than in its batch"
RANDOM = "two calls on the same input differ"
FLOAT32, NARROW = "something is rounded in float32", "something is rounded in less than float32"
SHOWN = "the output is right: of the taps, only encoder.layers.0.self_attention.scores and 5 more of this kind differ"
# What is to be said first with all taps, with few, and with none; nothing where it is to stay unknown.
SAID = {
    "no scale": ("scores not scaled",) * 3,
    "over sqrt(d_k + 1)": (SCALE.format("0.942809"), "", ""),
    "over sqrt(length)": (LENGTH,) * 3,
    "times d_model": ("",) * 3,
    "weights of layer 0 and 1 swapped": ("",) * 3,
    "epsilon of 1e-4": ("",) * 3,
    "scale plus one": ("",) * 3,
    "norm over positions": (f"normalised over the positions|{LATER}",) * 3,
    "a little of the batch's mean": (BATCH,) * 3,
    "positions over the length": (LENGTH,) * 3,
    "base of 1000": ("",) * 3,
    "dropout on": (RANDOM,) * 3,
    "mask of -10": (LATER,) * 3,
    "no mask in cross-attention": ("cross-attention without padding mask",) * 3,
    "masked after the softmax": (f"mask applied after the softmax|{LATER}",) * 3,
    "sees one further": ("a position (sees|attends to) the next one",) * 3,
    "float32 softmax": ("every value is a number of float32", FLOAT32, FLOAT32),
    "bfloat16 softmax": ("every value is a number of bfloat16", NARROW, NARROW),
    "leaky ReLU": ("",) * 3,
    "a head twice": ("",) * 3,
    "norm before the sum": (NORM_FIRST,) * 3,
    "1.2 times the residual": ("",) * 3,
    "table of norm one": ("",) * 3,
    "scores shown behind the mask": (SHOWN, None, None),
}


def diagnosed(mistake, taps):
    """Compare as `parity check` does; return what is said, or None where everything agrees."""
    kind = type("Wrong", (Plain,), {"mistake": mistake, "taps": taps, "__module__": __name__})
    globals()["Wrong"] = kind
    port = PluginPort(f"{__name__}:Wrong")
    cases, kept = model_cases(port_config(port))[:4], {}
    findings = list(compare(cases, port, SETTING, kept=kept))
    if {finding.verdict for finding in findings} == {AGREES, SKIPPED} or mistake == "":
        return None
    (report,) = Investigation(port, SETTING, port.reference).failures(findings, kept, cases)
    return report


@pytest.mark.parametrize("shown", tiers.first_alone(["few", "all", "none"], "wrong ports"))
@pytest.mark.parametrize("mistake", SAID)
def test_no_mistake_has_a_false_name(mistake, shown, monkeypatch):
    monkeypatch.setattr(diagnosis_module, "ATTEMPTS", 30)  # of several mistakes at once, of which there is one
    said = SAID[mistake][list(TAPS).index(shown)]
    report = diagnosed(mistake, TAPS[shown])
    if said is None:
        assert report is None
        return
    found = report.diagnosis
    assert re.search(said, found.sentence), found
    assert found.confidence == (UNKNOWN if not said else EXACT if "exactly" in found.sentence else LIKELY)
    if found.confidence == EXACT:
        assert found.signatures == ()
    if not said:  # places are facts, and no cause
        assert all("are wrong, and no others" in words for words in found.signatures)


def test_the_plain_port_is_right():
    assert diagnosed("", ("**",)) is None


def test_what_follows_a_tap_of_another_meaning_is_inherited():
    introduced = diagnosed("norm before the sum", ("**",)).blame.introduced
    assert introduced
    assert all(name.endswith("_norm.output") for name in introduced)
