"""Tensors that a port returns under the wrong names."""

from __future__ import annotations

import numpy as np
import pytest
from numpy import ndarray

import reference_numpy
from transformer_parity.engine.signatures import narrowed
from transformer_parity.transformer.cases.case import tiny
from transformer_parity.transformer.cases.for_ports import model_cases, port_config
from transformer_parity.transformer.cases.inputs import hard_weights
from transformer_parity.transformer.compare.comparator import compare
from transformer_parity.transformer.diagnose.evidence.exchanged import exchanged, returned_in_words
from transformer_parity.transformer.diagnose.investigate import Investigation
from transformer_parity.transformer.ports.protocol import Placements
from transformer_parity.transformer.ports.user import PluginPort, Port

RNG = np.random.default_rng(0)
A, B = "encoder.layers.0.self_attention.", "encoder.layers.1.self_attention."
RIGHT = {
    place + name: RNG.normal(size=shape)
    for place in (A, B)
    for name, shape in {
        "query_proj.kernel": (4, 4),
        "key_proj.kernel": (4, 4),
        "value_proj.bias": (4,),
        "query_proj.bias": (4,),
    }.items()
} | {f"{place}key_proj.bias": 1e-18 * RNG.normal(size=4) for place in (A, B)}


def said(changes: dict[str, ndarray]) -> str:
    """Return the statement about a port that returns some wrong tensors."""
    return exchanged({**RIGHT, **changes}, RIGHT, "gradient", lambda name: name in changes)


def swapped(*names: str) -> dict[str, ndarray]:
    return dict(zip(names, (RIGHT[name] * (1.0 + 1e-14) for name in reversed(names)), strict=True))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            swapped(f"{A}query_proj.kernel", f"{A}key_proj.kernel"),
            f"the gradients of {A}key_proj.kernel and {A}query_proj.kernel are exchanged",
        ),
        (
            swapped(f"{A}key_proj.bias", f"{A}value_proj.bias") | swapped(f"{B}key_proj.bias", f"{B}value_proj.bias"),
            f"the gradients of key_proj.bias and value_proj.bias are exchanged in {A[:-1]}, {B[:-1]}",
        ),
        (
            {f"{A}query_proj.bias": RIGHT[f"{B}query_proj.bias"]},
            "the gradient of encoder.layers.0.self_attention.query_proj.bias is the gradient of "
            "encoder.layers.1.self_attention.query_proj.bias",
        ),
        (
            {f"{A}query_proj.kernel": RIGHT[f"{A}key_proj.kernel"].T},
            f"the gradient of {A}query_proj.kernel is the transposed gradient of {A}key_proj.kernel",
        ),
        ({f"{A}query_proj.bias": RNG.normal(size=4)}, ""),
        ({f"{A}query_proj.bias": np.zeros(4)}, ""),
        (swapped(f"{A}query_proj.kernel", f"{A}key_proj.kernel") | {f"{A}query_proj.bias": np.ones(4)}, ""),
    ],
)
def test_exchanged_gradients_are_recognized(changes: dict[str, ndarray], words: str) -> None:
    """Every wrong tensor must equal a tensor with a different name; zeros and noise don't prove that."""
    assert said(changes) == words


def test_zeros_and_noise_are_not_taken_for_float32_values() -> None:
    """Zeros and this noise can also be represented exactly in float32."""
    wanted = RNG.normal(size=16)
    noise = (1e-18 * RNG.normal(size=16)).astype(np.float32).astype(np.float64)
    for nothing in (np.zeros(16), noise):
        assert narrowed(nothing, wanted) == ""
    rounded = wanted.astype(np.float32).astype(np.float64)
    assert "float32" in narrowed(rounded, wanted)


class Swaps(Port):
    """A port of the reference that exports two kernels under each other's names."""

    def load(self, config, weights, dtype):
        self.model = reference_numpy.Transformer.from_weights(config, weights, dtype)
        self.names = [f"encoder.layers.0.self_attention.{kind}_proj.kernel" for kind in ("query", "key")]

    def forward(self, source_ids, target_ids, tap):
        return self.model(source_ids, target_ids)

    def export_weights(self):
        weights = {name: np.array(array) for name, array in reference_numpy.get_weights(self.model).items()}
        return {**weights, **dict(zip(self.names, (weights[name] for name in reversed(self.names)), strict=True))}


def test_report_names_exchanged_exported_weights() -> None:
    port, kept = PluginPort(f"{__name__}:Swaps"), {}
    cases = model_cases(port_config(port))[:1]
    findings = list(compare(cases, port, Placements(("float64",)), kept=kept))
    (report,) = Investigation(port, Placements(("float64",)), port.reference).failures(findings, kept, cases)
    assert report.diagnosis is not None
    assert report.diagnosis.sentence == (
        "the exported weights of encoder.layers.0.self_attention.key_proj.kernel and "
        "encoder.layers.0.self_attention.query_proj.kernel are exchanged"
    )


def test_reshaped_or_rounded_exported_weight_is_described():
    """The exported shape is correct, but the values or the dtype aren't."""
    config = tiny(d_k=None, d_v=None)
    weights = {name: np.asarray(array, np.float64) for name, array in hard_weights(config).items()}
    name = "encoder.layers.0.feed_forward.inner_proj.kernel"
    reshaped = {**weights, name: weights[name].T.reshape(weights[name].shape)}
    found = returned_in_words(reshaped, weights, config)
    assert (
        found == f"in the exported {name}, the values are correct, but in different places, "
        "as after a reshape without a transpose"
    )
    more = {one: array / 3.0 for one, array in weights.items()}
    rounded = {one: array.astype(np.float32) for one, array in more.items()}
    assert returned_in_words(rounded, more, config) == "exported weights are in float32 instead of float64"
    assert returned_in_words(weights, weights, config) == ""
    halves = {one: array.astype(np.float16).astype(np.float64) for one, array in weights.items()}
    assert "every value has only float16 precision" in returned_in_words(halves, weights, config)
    # Correct values in a different dtype aren't a difference, so the dtype can't be the cause of one.
    narrow = {one: array.astype(np.float32) for one, array in weights.items()}
    wide = {one: array.astype(np.float64) for one, array in narrow.items()}
    assert returned_in_words({**wide, name: reshaped[name]}, narrow, config).startswith(f"in the exported {name}, ")
