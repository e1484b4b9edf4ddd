"""The audit determines how a model uses each weight, for the reference with injected bugs and for a user's port."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

import reference_numpy
from transformer_parity.transformer.bugs.catalog import FORWARD, STRUCTURE
from transformer_parity.transformer.cases.for_ports import port_cases, port_config
from transformer_parity.transformer.cases.standard import standard_cases
from transformer_parity.transformer.diagnose.weight_audit import (
    HIDDEN,
    INITIAL,
    MISPLACED,
    OVERWRITTEN,
    RANDOM,
    REPLACED,
    TRANSPOSED,
    UNUSED,
    USED,
    as_bug,
    audit,
    summary,
)
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.ports.registry import PORTS
from transformer_parity.transformer.ports.user import PluginPort, Port, find
from transformer_parity.transformer.selftest.buggy_ports import injected

CASES = {case.name: case for case in standard_cases()}
BUGS = [bug for part in (*FORWARD.values(), STRUCTURE["weights"]) for bug in part]
ATTENTION, CROSS = "encoder.layers.0.self_attention", "decoder.layers.0.cross_attention"


def fates(bug: str) -> dict[str, tuple[str, str]]:
    """Return the verdict and the detail for each weight that a bug affects."""
    planned = next(known for known in BUGS if known.name == bug)
    found = audit(injected(planned, "numpy"), CASES[planned.case], Placement("float64"))
    return {fate.name: (fate.verdict, fate.detail) for fate in found if fate.verdict not in (USED, HIDDEN)}


@pytest.mark.parametrize(
    ("bug", "name", "verdict", "detail"),
    [
        ("W_o transposed", f"{ATTENTION}.output_proj.kernel", TRANSPOSED, f"detected at {ATTENTION}.output"),
        ("a square matrix transposed", f"{ATTENTION}.query_proj.kernel", TRANSPOSED, f"detected at {ATTENTION}.query"),
        ("value bias missing", f"{ATTENTION}.value_proj.bias", INITIAL, "the port uses zero instead"),
        ("key bias missing", f"{ATTENTION}.key_proj.bias", INITIAL, "the port uses zero instead"),
        ("output bias missing", "output_proj.bias", INITIAL, "the port uses zero instead"),
        (
            "first layer used for all layers",
            "encoder.layers.1.feed_forward.inner_proj.kernel",
            REPLACED,
            "the port uses encoder.layers.0.feed_forward.inner_proj.kernel instead",
        ),
        (
            "W_q and W_k of cross-attention swapped",
            f"{CROSS}.query_proj.kernel",
            MISPLACED,
            f"changing this weight first affects {CROSS}.key, but should first affect {CROSS}.query",
        ),
    ],
)
def test_weight_verdict_matches_the_injected_bug(bug, name, verdict, detail):
    assert fates(bug)[name] == (verdict, detail)


def test_swapped_weights_are_both_reported_as_misplaced():
    found = fates("W_q and W_k of cross-attention swapped")
    assert found.keys() == {f"{CROSS}.query_proj.kernel", f"{CROSS}.key_proj.kernel"}


def test_bug_outside_the_weights_leaves_all_weights_used():
    assert fates("epsilon 1e-3") == {}


def test_every_weight_of_the_reference_is_used():
    found = audit(PORTS["numpy"], CASES["preset/torch"], Placement("float64"))
    assert {fate.verdict for fate in found} == {USED}
    assert next(fate for fate in found if fate.name == f"{ATTENTION}.key_proj.kernel").detail == f"{ATTENTION}.key"


class Blind(Port):
    """A port that has no taps and replaces one loaded kernel with random values."""

    overrides = {"attention_bias": True}

    def load(self, config, weights, dtype):
        self.model = reference_numpy.Transformer.from_weights(config, weights, dtype)
        kernel = self.model.encoder.layers[1].feed_forward.output_proj.kernel
        kernel[...] = np.random.default_rng(0).normal(size=kernel.shape)

    def forward(self, source_ids, target_ids, tap):
        return self.model(source_ids, target_ids)


def test_audit_without_taps_finds_unused_weights_and_hidden_key_biases():
    port = PluginPort(f"{__name__}:Blind")
    found = {fate.name: fate for fate in audit(port, port_cases(port_config(port))[0], Placement("float64"))}
    hidden = {name for name, fate in found.items() if fate.verdict == HIDDEN}
    assert hidden == {name for name in found if name.endswith("key_proj.bias")} != set()
    lost = "encoder.layers.1.feed_forward.output_proj.kernel"
    assert (found[lost].verdict, found[lost].detail) == (
        UNUSED,
        "changing this weight has no effect, but should first affect output",
    )
    assert {fate.verdict for name, fate in found.items() if name not in {lost, *hidden}} == {USED}
    words = summary(found.values())
    assert (
        words
        == f"{len(found)} weights: {len(found) - 7} used, 6 hidden (without effect on any compared tensor), 1 unused"
    )


class Forgetful(Blind):
    """A port that leaves a weight uninitialized, so each load gives different values."""

    taps = ("**.output",)

    def load(self, config, weights, dtype):
        super().load(config, weights, dtype)
        self.model.encoder.layers[0].self_attention.query_proj.kernel[...] = np.random.default_rng().normal(
            size=(24, 24)
        )

    def forward(self, source_ids, target_ids, tap):
        return self.model(source_ids, target_ids, tap=tap)


class Dropping(Forgetful):
    """A port whose dropout is still active."""

    def forward(self, source_ids, target_ids, tap):
        return super().forward(source_ids, target_ids, tap) * np.random.default_rng().random()


def test_uninitialized_weights_and_active_dropout_are_reported_as_random():
    port = PluginPort(f"{__name__}:Forgetful")
    found = audit(port, port_cases(port_config(port))[0], Placement("float64"))
    assert {fate.verdict for fate in found} == {RANDOM}
    assert f"{ATTENTION}.query_proj.kernel" in {fate.name for fate in found}
    assert "detected at encoder.layers.0.self_attention.output" in found[0].detail
    port = PluginPort(f"{__name__}:Dropping")
    (fate,) = audit(port, port_cases(port_config(port))[0], Placement("float64"))
    said = "the results differ on the same input, first at output: dropout is enabled, or another operation is random"
    assert str(fate.detail) == said


def test_replaced_weight_becomes_a_hypothesis():
    planned = next(known for known in BUGS if known.name == "first layer used for all layers")
    suspect = as_bug(audit(injected(planned, "numpy"), CASES[planned.case], Placement("float64")))
    weights = CASES[planned.case].load_weights()
    changed = suspect.convert(weights)
    for name in weights:
        source = name.replace("encoder.layers.1.", "encoder.layers.0.")
        assert np.array_equal(changed[name], weights[source]), name
    assert as_bug([]) is None


class Overwriting(Blind):
    """A port that writes to its input IDs."""

    shares_memory = False  # framework tensors can bypass NumPy's write protection

    def forward(self, source_ids, target_ids, tap):
        if self.shares_memory:
            source_ids.setflags(write=True)
        source_ids[source_ids == 0] = 1
        return super().forward(source_ids, target_ids, tap)


class OverwritingUnseen(Overwriting):
    """A port that writes to its input IDs without raising an error."""

    shares_memory = True


@pytest.mark.parametrize(
    ("kind", "name"), [(Overwriting, "source_ids or target_ids"), (OverwritingUnseen, "source_ids")]
)
def test_port_that_overwrites_its_inputs_is_reported(kind, name):
    port = PluginPort(f"{__name__}:{kind.__name__}")
    case = port_cases(port_config(port))[0]
    before = {name: array.copy() for name, array in case.inputs.items()}
    found = audit(port, case, Placement("float64"))
    assert [(fate.name, fate.verdict) for fate in found] == [(name, OVERWRITTEN)]
    assert summary(found) == f"{name} overwritten by forward(), so no weight can be audited"
    assert all(np.array_equal(array, before[name]) for name, array in case.inputs.items())


@pytest.mark.parametrize(
    ("reference", "hint"),
    [
        ("package/sub/port.py:X", "use a module name, with dots and without .py: package.sub.port:X"),
        ("./port.py:X", "use a module name, with dots and without .py: port:X"),
        ("/directory/port.py:X", "use a module name and run in /directory: port:X"),
        ("no_such_module.py:X", "use a module name, with dots and without .py: no_such_module:X"),
        ("json.port:X", f"'json' was imported from {json.__file__}"),
        ("json:X", f"module 'json' has no 'X'; 'json' was imported from {json.__file__}"),
    ],
)
def test_failed_port_import_gives_a_hint(reference, hint):
    with pytest.raises(ValueError, match=f"port {reference!r} cannot be imported: .*{re.escape(hint)}"):
        find(reference)
