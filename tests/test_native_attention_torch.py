"""PyTorch's fused attention is called without a mask if none is needed, so that a GPU can use flash attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from native_models import BATCH, SETTINGS, SOURCE, TARGET, assert_close, build, losses

pytestmark = pytest.mark.only("torch")
FULL = np.array([[5, 6, 7, 36], [8, 9, 4, 4]]), np.array([[1, 3, 4], [1, 5, 6]])
ALL, CAUSAL, NONE = ("no mask", False), ("no mask", True), ("a mask", False)


@pytest.fixture
def calls(port, monkeypatch):
    """The mask arguments of each fused kernel call, on a CPU that is treated like a GPU."""
    fast, found = port.package.fast, []
    kernel = fast.F.scaled_dot_product_attention

    def spy(query, key, value, mask=None, *, is_causal=False, **options):
        found.append(("no mask" if mask is None else "a mask", is_causal))
        return kernel(query, key, value, mask, is_causal=is_causal, **options)

    monkeypatch.setattr(fast.F, "scaled_dot_product_attention", spy)
    monkeypatch.setattr(fast, "FLASH_DEVICES", ("cpu",))
    return found


def seen(calls):
    """Return and clear the calls of a one-layer model: encoder, decoder, and cross-attention."""
    found = list(calls)
    calls.clear()
    return found


def test_padding_masks_are_passed_only_when_needed(port, calls):
    model, plain = build(port, position_encoding="learned"), build(port, position_encoding="learned", fast=False)
    for source, target, expected in (
        (*FULL, [ALL, CAUSAL, ALL]),
        (SOURCE, FULL[1], [NONE, CAUSAL, NONE]),
        (FULL[0], TARGET, [ALL, NONE, ALL]),
        (SOURCE, TARGET, [NONE, NONE, NONE]),
        (FULL[0], FULL[1][:, :1], [ALL, ALL, ALL]),
    ):
        logits = model(source, target)
        assert seen(calls) == expected
        assert_close(port.to_numpy(logits), port.to_numpy(plain(source, target)))
    calls.clear()
    masked = model(*FULL, SOURCE != 0, TARGET != 0)
    assert seen(calls) == [NONE, NONE, NONE]
    assert_close(port.to_numpy(masked), port.to_numpy(plain(*FULL, SOURCE != 0, TARGET != 0)))


def test_masks_are_inspected_only_on_a_gpu(port, calls, monkeypatch):
    monkeypatch.setattr(port.package.fast, "FLASH_DEVICES", ("cuda",))
    build(port)(*FULL)
    assert seen(calls) == [NONE, NONE, NONE]


def test_masks_are_inspected_once_for_all_layers(port, calls, monkeypatch):
    counts, mark = [], port.package.fast._marked
    monkeypatch.setattr(port.package.fast, "_marked", lambda x: counts.append(type(x)) or mark(x))
    build(port, num_encoder_layers=3, num_decoder_layers=3)(*FULL)
    assert calls == [ALL] * 3 + [CAUSAL, ALL] * 3
    assert counts.count(torch.Tensor) == 2 + 4  # states and masks of both stacks


def test_mask_modified_between_calls_is_inspected_again(port, calls):
    """Modified masks are detected even in inference mode, where tensors have no version counter."""
    model, plain = build(port), build(port, fast=False)
    with torch.inference_mode():
        x, mask = torch.ones(2, 4, 24, dtype=torch.float64), torch.ones(2, 1, 1, 4, dtype=torch.bool)
        x[:, 1:] *= 2.0
        for expected in (ALL, NONE):
            found, right = model.encoder(x, mask), plain.encoder(x, mask)
            assert seen(calls) == [expected]
            assert_close(found.numpy(), right.numpy())
            mask[:, :, :, 2:] = False


def test_attention_without_masks_matches_plain_attention(port, calls):
    model, plain = build(port), build(port, fast=False)
    ids = [torch.tensor(each) for each in FULL]
    for each in (model, plain):
        each(*ids).square().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-10)
    for batch in (BATCH, (*FULL, FULL[1])):
        trainers = [port.package.Trainer(build(port, fast=fast), SETTINGS) for fast in (True, False)]
        found, expected = ([float(t.train_step(*batch).loss) for _ in range(2)] for t in trainers)
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert losses(trainers[0])
    found, expected = (port.package.beam_search(each, FULL[0], max_length=6) for each in (build(port), plain))
    np.testing.assert_array_equal(found.ids, expected.ids)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch has no batching rule for this kernel
def test_compiled_and_transformed_models_keep_the_masks(port, calls):
    model = build(port)
    ids = [torch.tensor(each) for each in FULL]
    expected = model(*ids)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*ids), expected, rtol=1e-12, atol=1e-12)
    found = torch.func.vmap(lambda source, target: model(source[None], target[None])[0])(*ids)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.compiler.reset()
