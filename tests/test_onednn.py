"""If requested, PyTorch uses oneDNN for matmuls, provided that a measurement shows enough speed and accuracy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import random_weights, tiny_config
from tiers import first_alone

import reference_numpy as ref
import transformer_torch
from transformer_bench.workload import DecodeWork
from transformer_parity.cli import info
from transformer_parity.transformer.ports import onednn
from transformer_parity.transformer.ports.onednn import Measured
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.ports.registry import PORTS
from transformer_torch import fast
from transformer_torch import onednn as layouts

FAST, EXACT, ROUNDED = 2.4, 4e-7, 3e-3


@pytest.fixture(autouse=True)
def as_before():
    switches = torch.backends.mkldnn.matmul, torch.backends.cuda.matmul
    before = [switch.fp32_precision for switch in switches]
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision("highest")
    for switch, value in zip(switches, before, strict=True):
        switch.fp32_precision = value


def tolerance(exact):
    """Return the tolerance for matmuls in oneDNN, which rounds to bfloat16 on processors with AMX."""
    return exact if onednn.measured().error < onednn.ERROR else 5e-3


def measures(monkeypatch, gain, error):
    monkeypatch.setattr(onednn, "measured", lambda: Measured(gain, error))


@pytest.mark.parametrize(
    ("gain", "error", "highest", "fast"),
    [
        (FAST, EXACT, "medium", "medium"),
        (FAST, ROUNDED, "highest", "medium"),  # like a processor with AMX
        (FAST, 2 * onednn.ERROR, "highest", "medium"),
        (1.0, EXACT, "highest", "high"),
        (1.2, ROUNDED, "highest", "high"),
    ],
)
def test_matmul_library_is_chosen_from_the_measurement(gain, error, highest, fast, monkeypatch):
    measures(monkeypatch, gain, error)
    config = tiny_config(num_encoder_layers=1, num_decoder_layers=1)
    for precision, expected in (("highest", highest), ("fast", fast), ("highest", highest)):
        PORTS["torch"].load(config, random_weights(config), Placement("float32", "cpu", precision))
        assert torch.get_float32_matmul_precision() == expected
        assert layouts.is_on() == (expected == "medium")


@pytest.mark.parametrize("where", ["a GPU", "no oneDNN"])
def test_onednn_is_not_measured_on_a_gpu_or_when_unavailable(where, monkeypatch):
    """On a GPU, "medium" would allow TF32, and without oneDNN there is nothing to choose from."""
    monkeypatch.setattr(onednn, "measured", lambda: pytest.fail("it is measured"))
    module = torch.cuda if where == "a GPU" else torch.backends.mkldnn
    monkeypatch.setattr(module, "is_available", lambda: where == "a GPU")
    for precision, expected in (("fast", "high"), ("highest", "highest")):
        transformer_torch.set_precision(precision)
        onednn.prefer(precision)
        assert torch.get_float32_matmul_precision() == expected


@pytest.mark.parametrize("switch", first_alone(["bf16", "ieee", "none"], "switches"))
def test_measurement_restores_global_settings(switch, monkeypatch):
    torch.backends.mkldnn.matmul.fp32_precision = switch
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    with torch.autocast("cpu"), torch.device("meta"):
        found = onednn.measured.__wrapped__()
    assert (torch.backends.mkldnn.matmul.fp32_precision, torch.get_num_threads()) == (switch, threads)
    assert torch.equal(torch.get_rng_state(), state)
    assert 0.1 < found.gain < 20
    assert 1e-8 < found.error < onednn.ERROR or 1e-4 < found.error < 1e-2  # either float32's or bfloat16's error
    monkeypatch.setattr(onednn.F, "linear", lambda *operands: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        onednn.measured.__wrapped__()
    assert (torch.backends.mkldnn.matmul.fp32_precision, torch.get_num_threads()) == (switch, threads)


@pytest.mark.parametrize("bits", [8, 11, 16])
def test_matmul_with_fewer_bits_is_detected(bits):
    """The measurement recognizes the precision of bfloat16, of TF32, and of sums of two bfloat16 terms."""
    rng = np.random.default_rng(0)
    left, right = rng.standard_normal((2, 64, 64)).astype(np.float32)

    class Rounding:
        """A tensor that multiplies like such a processor."""

        def __init__(self, array):
            self.array = array

        def __getitem__(self, rows):
            return Rounding(self.array[rows])

        def double(self):
            return torch.from_numpy(self.array.astype(np.float64))

        def __matmul__(self, other):
            mantissa, exponent = np.frexp(self.array)
            rounded = np.ldexp(np.round(mantissa * 2.0**bits) / 2.0**bits, exponent)
            return torch.from_numpy(rounded.astype(np.float64)) @ other.double()

    assert onednn._error(Rounding(left), torch.from_numpy(right)) > onednn.ERROR
    assert onednn._error(torch.from_numpy(left), torch.from_numpy(right)) < onednn.ERROR


def test_describe_reports_the_matmul_library(monkeypatch):
    blas = "MKL" if torch.backends.mkl.is_available() else "the BLAS"
    assert transformer_torch.describe()["matmul library on a CPU"] == blas
    measures(monkeypatch, 2.5, EXACT)
    found = info.multiplying("torch", transformer_torch)
    assert found["matmul library on a CPU"] == f"{blas}; measured: oneDNN 2.50 times as fast, error 4.0e-07"
    assert found[info.BY_ONEDNN] > 2 * found[info.RATE]
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    assert transformer_torch.describe()["matmul library on a CPU"] == "oneDNN"


@pytest.mark.parametrize("length", [9, 200])
def test_attention_over_short_inputs_avoids_the_fused_kernel(length, monkeypatch):
    rng = np.random.default_rng(1)
    query, key, value = (torch.from_numpy(x) for x in rng.standard_normal((3, 2, 2, length, 8)).astype(np.float32))
    mask = torch.from_numpy(rng.random((2, 1, length, length)) < 0.7)
    expected = fast.fused_attention(query, key, value, mask)
    fused, calls = fast.F.scaled_dot_product_attention, []
    monkeypatch.setattr(
        fast.F, "scaled_dot_product_attention", lambda *args, **options: calls.append(args) or fused(*args, **options)
    )
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    found = fast.fused_attention(query, key, value, mask)
    assert bool(calls) == (length == 200)
    torch.testing.assert_close(found, expected, rtol=tolerance(1e-5), atol=tolerance(2e-6))
    for other in (query.double(), query[:, :, :1]):  # a different dtype, and a decoding step
        calls.clear()
        fast.fused_attention(other, key.to(other.dtype), value.to(other.dtype))
        assert calls


@pytest.mark.parametrize("beam_size", first_alone([None, 3], "searches"))
def test_search_uses_the_chosen_matmul_implementation(beam_size, monkeypatch):
    allowed = tolerance(2e-6)
    measures(monkeypatch, FAST, EXACT)
    seen = []
    inner = layouts.for_few_rows

    def spy(weight, *others):
        seen.append((weight.numel(), inner(weight, *others)))
        return seen[-1][1]

    monkeypatch.setattr(layouts, "for_few_rows", spy)
    monkeypatch.setattr(layouts, "LARGE_PRODUCT", 3 * (beam_size or 1) * 128 * 512)
    work = DecodeWork("tiny", batch=3, source=7, target=6, beam_size=beam_size)
    weights = work.weights()
    model = PORTS["torch"].load(work.config, weights, Placement()).model
    found = work.search.run(transformer_torch, model, work.source_ids)
    assert {(size >= 128 * 512, multiply.func) for size, multiply in seen} == {
        (True, layouts._by_onednn),
        (False, layouts._by_mkl),
    }
    expected = work.search.run(ref, ref.Transformer.from_weights(work.config, weights, "float64"), work.source_ids)
    assert np.array_equal(found.ids, expected.ids)
    np.testing.assert_allclose(found.scores, expected.scores, rtol=allowed)


def test_onednn_computes_small_matmuls_if_mkl_is_missing(monkeypatch):
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    weight = torch.ones(4, 3)
    assert layouts.for_few_rows(weight, None, 2).func is layouts._by_mkl
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert layouts.for_few_rows(weight, None, 2).func is layouts._by_onednn
    assert layouts.for_few_rows(weight.double(), None, 2).func is layouts.F.linear
