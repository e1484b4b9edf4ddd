"""Analytical checks of dropout in a training step of each backend.

If nearly everything is dropped at one site, the result is the model without the contribution of that site, which the
reference can compute without dropout. In a second model, the taps reveal the factor by which each element was
multiplied, 0 or 1 / (1 - rate), so the masks can be counted and compared.

Each ``check_`` function takes a backend or an edited copy with a bug; ``test_mutants`` shows that it then fails.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tiers
from conftest import Backend
from numpy import ndarray

import reference_numpy
from reference_numpy import PRESETS, DropoutRates, Recorder, TrainingConfig, TransformerConfig
from transformer_parity.transformer.cases.case import tiny
from transformer_parity.transformer.cases.inputs import hard_weights
from transformer_parity.transformer.cases.standard import gradient_case
from transformer_spec.names import tap_shapes

# A step has about 10^4 elements. This rate keeps one of them in one of a thousand runs, and the seed is fixed.
NEARLY_ALL = 1.0 - 1e-7
SITES = {  # the taps at which each rate drops values
    "embedding": ("_embedding.output",),
    "attention": (".weights",),
    "residual": ("attention.output", "feed_forward.output"),
    "feed_forward": (".inner",),
    "final": ("encoder.output", "decoder.output"),
}
STILL = TrainingConfig(learning_rate_factor=1e-30)  # a learning rate so small that no weight changes
# The IDs are truncated so that there are fewer shapes to compile.
BATCH = {name: ids[:, :7] for name, ids in gradient_case("paper_base").inputs.items()}
STRICT = 1e-11


def small(norm_order: str = "post", **rates: float) -> TransformerConfig:
    """Return a config with one layer on each side and with the given dropout rates; the others are zero."""
    config = tiny(
        d_ff=24, d_v=8, num_encoder_layers=1, num_decoder_layers=1, attention_bias=True, norm_order=norm_order
    )
    return config.replace(dropout=DropoutRates(**{**dict.fromkeys(SITES, 0.0), **rates}))


def trainer(backend: Backend, config: TransformerConfig, settings: TrainingConfig = STILL, **options: Any) -> Any:
    """Return a trainer of a model, by default in float64 with the hard weights."""
    weights, dtype = options.pop("weights", None) or hard_weights(config), options.pop("dtype", "float64")
    model = backend.package.Transformer.from_weights(config, weights, dtype)
    return backend.package.Trainer(model, settings, **options)


@contextmanager
def interpreted(backend: Backend) -> Iterator[None]:
    """Run operations one at a time, because compiling a step that runs only once takes longer.

    In JAX, each operation of the backward pass would be compiled separately, so zeros replace the gradient.
    """
    if backend.name == "jax":
        import jax

        def value_and_zeros(function: Any, argnums: Any = 0, has_aux: bool = False) -> Any:
            del has_aux
            zeros = partial(jax.tree.map, jax.numpy.zeros_like)
            return lambda *inputs: (function(*inputs), jax.tree.map(lambda i: zeros(inputs[i]), argnums))

        with jax.disable_jit(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax, "value_and_grad", value_and_zeros)
            yield
    elif backend.name == "tf":
        import tensorflow as tf

        tf.config.run_functions_eagerly(True)
        try:
            yield
        finally:
            tf.config.run_functions_eagerly(False)
    else:
        yield


@contextmanager
def spied(backend: Backend) -> Iterator[dict[str, ndarray]]:
    """Yield a dict that collects the taps of each forward pass, even if the trainer doesn't observe any."""
    seen: dict[str, ndarray] = {}
    model = backend.package.Transformer
    original = {name: getattr(model, name) for name in ("_encode", "_decode")}

    def spy(run: Any) -> Any:
        def run_and_tell(self: Any, *arguments: Any) -> Any:
            (tap,) = (
                argument for argument in arguments if inspect.isfunction(argument) or isinstance(argument, Recorder)
            )

            def tell(name: str, value: Any) -> Any:
                seen[name] = backend.to_numpy(value)
                return tap(name, value)

            return run(self, *(tell if argument is tap else argument for argument in arguments))

        return run_and_tell

    for name, run in original.items():
        setattr(model, name, spy(run))
    try:
        yield seen
    finally:
        for name, run in original.items():
            setattr(model, name, run)


def without(config: TransformerConfig, batch: Mapping[str, ndarray], site: str) -> tuple[float, dict[str, ndarray]]:
    """Return the reference's loss and its taps, with all values at a dropout site replaced with zeros."""
    model = reference_numpy.Transformer.from_weights(config, hard_weights(config), "float64")
    shapes = tap_shapes(config, *batch["source_ids"].shape, batch["target_ids"].shape[1])
    zeros = {name: np.zeros(shape) for name, shape in shapes.items() if is_at(name, site)}
    seen = Recorder(replace=zeros)
    logits = model(batch["source_ids"], batch["target_ids"], tap=seen)
    total, tokens = reference_numpy.cross_entropy(logits, batch["labels"], config)
    return float(total / tokens), {name: value for name, value in seen.items() if name not in zeros}


def is_at(tap: str, site: str) -> bool:
    """Return True if a tap is at a dropout site."""
    return tap.endswith(SITES[site])


def assert_equal(name: str, got: Any, expected: Any) -> None:
    scale = max(np.abs(expected).max(), 1e-30)
    error = np.abs(np.asarray(got) - expected).max() / scale
    assert error < STRICT, f"{name} is {error:.1e} off"


def check_sites(backend: Backend, norm_order: str, site: str) -> None:
    """Drop nearly everything at one site, and check that the rest matches the model without that contribution."""
    config = small(norm_order, **{site: NEARLY_ALL})
    loss, expected = without(config, BATCH, site)
    with interpreted(backend):
        subject = trainer(backend, config)
        with spied(backend) as seen:
            result = subject.train_step(**BATCH)
        for name, value in expected.items():
            assert_equal(name, seen[name], value)
        assert all(np.any(value) for name, value in seen.items() if is_at(name, site))  # taps come before dropout
        assert_equal("loss", float(result.loss), loss)
        if backend.name == "torch":  # without taps, PyTorch uses a fused kernel
            assert_equal("loss without taps", float(trainer(backend, config).train_step(**BATCH).loss), loss)


# This model exposes every mask. It is pre-norm, so that the residual stream bypasses the norms, and each kind of
# sublayer writes to separate channels, so that its contribution to the stream can be identified.
RATES = {"embedding": 0.4, "attention": 0.5, "residual": 0.6, "feed_forward": 0.45}
OWN = {
    "embedding": slice(0, 12),
    "self_attention": slice(12, 16),
    "cross_attention": slice(16, 20),
    "feed_forward": slice(20, 24),
}
VISIBLE = 1e-6
AXES = {3: ("sentences", "positions", "channels"), 4: ("sentences", "heads", "positions", "keys")}


def transparent() -> tuple[TransformerConfig, dict[str, ndarray]]:
    """Return a config and weights with which the taps determine every dropout mask."""
    config = tiny(
        d_ff=4,  # not wider than its output, so that the inner values can be computed from it
        d_v=8,  # at least as many channels as keys, for the same reason
        num_decoder_layers=1,
        norm_order="pre",
        activation="gelu",  # almost no value is exactly zero
        position_encoding="learned",
        dropout=DropoutRates(**RATES),
    )
    weights = reference_numpy.init_weights(config, seed=0)
    for name, array in weights.items():
        sublayer = "embedding" if name.endswith("table") else name.split(".")[-3] if "output_proj" in name else ""
        if sublayer:
            mine = array[..., OWN[sublayer]].copy()
            array[...] = 0.0
            array[..., OWN[sublayer]] = mine
    return config, weights


def factors(seen: Mapping[str, ndarray], weights: Mapping[str, ndarray]) -> dict[str, ndarray]:
    """Return the factor by which dropout multiplied each element, by tap; NaN if it can't be determined."""
    pairs = {}  # output and input of each dropout
    for stack, side in (("encoder", "source"), ("decoder", "target")):
        own = OWN["embedding"]
        pairs[f"{side}_embedding.output"] = (
            seen[f"{stack}.output"][..., own],
            seen[f"{side}_embedding.output"][..., own],
        )
    for name, value in seen.items():
        layer, _, place = name.rpartition(".")
        layer, _, sublayer = layer.rpartition(".")
        path = f"{layer}.{sublayer}"
        own = OWN.get(sublayer)
        if place == "output" and own is not None:
            stack, _, i = layer.rpartition(".")
            before = seen[f"{stack}.{int(i) - 1}.output"][..., own] if int(i) else 0.0
            pairs[name] = seen[f"{layer}.output"][..., own] - before, value[..., own]
        elif place == "weights":
            pairs[name] = seen[f"{path}.context"] @ np.linalg.pinv(seen[f"{path}.value"]), value
        elif place == "inner":
            kernel = weights[f"{path}.output_proj.kernel"][:, own].astype(np.float64)
            pairs[name] = seen[f"{path}.output"][..., own] @ np.linalg.inv(kernel), value
    return {name: np.where(abs(x) > VISIBLE, y / np.where(x, x, 1.0), np.nan) for name, (y, x) in pairs.items()}


def rate_of(tap: str) -> float:
    return next(rate for site, rate in RATES.items() if is_at(tap, site))


def assert_unrelated(what: str, rate: float, first: ndarray, second: ndarray) -> None:
    """Fail unless two masks agree about as often as independent masks would, within five standard deviations."""
    both = ~np.isnan(first) & ~np.isnan(second)
    by_chance = rate**2 + (1.0 - rate) ** 2
    # Neighbors share mask elements, and this correlation increases the variance by a factor of at most three.
    allowed = 5.0 * np.sqrt(3.0 * by_chance * (1.0 - by_chance) / both.sum())
    agreement = ((first > 0.5) == (second > 0.5))[both].mean()
    assert abs(agreement - by_chance) < allowed, f"{what}: {agreement:.2f} agree, and by chance {by_chance:.2f} would"


def check_masks(backend: Backend) -> None:
    """Check that every mask in two training steps has the correct scale and rate, and that no two masks are related."""
    config, weights = transparent()
    rng = np.random.default_rng(0)
    batch = {name: rng.integers(3, 37, ids.shape) for name, ids in BATCH.items()}
    found = []
    with interpreted(backend):
        subject = trainer(backend, config, weights=weights)
        for _ in range(2):
            with spied(backend) as seen:
                subject.train_step(**batch)
            found.append(factors(seen, weights))
    first, second = found
    # No later tap of this model shows the masks of the final dropout. check_sites tests their place and effect.
    assert {site for site in SITES for name in first if is_at(name, site)} == {*SITES} - {"final"}
    for name, factor in first.items():
        rate, visible = rate_of(name), factor[~np.isnan(factor)]
        kept = visible > 0.5
        # If values are 0 or 1 / (1 - rate) in the expected proportions, their mean and variance are also correct.
        assert np.abs(visible - kept / (1.0 - rate)).max() < 1e-4, f"{name}: not scaled by 1 / (1 - {rate})"
        allowed = 5.0 * np.sqrt(rate * (1.0 - rate) / kept.size)
        assert abs(kept.mean() - (1.0 - rate)) < allowed, f"{name}: {kept.mean():.3f} are kept"
        for axis, along in enumerate(AXES[factor.ndim]):
            assert_unrelated(f"{along} of {name}", rate, factor, np.roll(factor, 1, axis))
        assert_unrelated(f"steps of {name}", rate, factor, second[name])
    for name in first:
        for other in first:
            if name < other and rate_of(name) == rate_of(other) and first[name].shape == first[other].shape:
                assert_unrelated(f"{name} and {other}", rate_of(name), first[name], first[other])


EVERYWHERE = dict.fromkeys(SITES, 0.3)


def check_inference(backend: Backend) -> None:
    """Check that dropout is inactive in gradients, in evaluation, and in the model after training."""
    config = small(**EVERYWHERE)
    ids = BATCH["source_ids"], BATCH["target_ids"]
    reference = reference_numpy.Transformer.from_weights(config, hard_weights(config), "float64")
    expected = reference_numpy.gradients(reference, **BATCH).loss
    total, _ = reference_numpy.Trainer(reference, STILL).evaluate(**BATCH)
    with interpreted(backend):
        subject = trainer(backend, config)
        for when in ("before", "after"):
            assert_equal(f"the model {when} a step", backend.to_numpy(subject.model(*ids)), reference(*ids))
            loss = backend.package.gradients(subject.model, **BATCH).loss
            assert_equal(f"loss of gradients {when} a step", loss, expected)
            assert_equal(f"evaluation {when} a step", float(subject.evaluate(**BATCH)[0]), total)
            subject.train_step(**BATCH)


def check_seed(backend: Backend) -> None:
    """Check that the dropout of a step depends only on the seed and the step number."""
    subject = trainer(backend, small(embedding=0.3), seed=7)  # only one small trainer, because it is compiled
    fresh = subject.export_state()

    def losses(count: int) -> list[float]:  # the weights don't change, so only dropout changes the loss
        return [float(subject.train_step(**BATCH).loss) for _ in range(count)]

    once = losses(3)
    assert len({*once}) == 3, "the same dropout at every step"
    subject.load_state(fresh)
    assert losses(2) == once[:2], "not reproducible"
    subject.load_state(replace(fresh, step=2))
    assert losses(1) == once[2:], "it does not depend on the number of the step alone"
    subject.load_state(replace(fresh, seed=8))
    assert not {*once} & {*losses(2)}, "the seed is ignored"


def check_micro_batches(backend: Backend) -> None:
    """Check that the micro-batches of a batch don't share dropout masks."""
    twice = {name: np.concatenate([ids, ids]) for name, ids in BATCH.items()}
    with interpreted(backend):
        alone = trainer(backend, small(**EVERYWHERE)).train_step(**BATCH)
        sliced = TrainingConfig(learning_rate_factor=1e-30, accumulation_steps=2)
        both = trainer(backend, small(**EVERYWHERE), sliced).train_step(**twice)
    assert abs(float(both.loss) - float(alone.loss)) > 1e-6, "both micro-batches have the same dropout"


def check_one_device(backend: Backend) -> None:
    """Check that global and local dropout are identical without a mesh."""
    with interpreted(backend):
        kinds = [
            trainer(backend, small(**EVERYWHERE), dropout=kind).train_step(**BATCH) for kind in ("global", "local")
        ]
    assert float(kinds[0].loss) == float(kinds[1].loss), "local dropout is another one although there is no mesh"


def draw_numbers(backend: Backend) -> list[float]:
    """Return the next random number of every generator that the caller may be using."""
    numbers = [random.random(), np.random.random()]
    if backend.name == "torch":
        import torch

        numbers.append(float(torch.rand(1)))
    if backend.name == "tf":
        import keras
        import tensorflow as tf

        numbers += [float(keras.random.uniform([])), float(tf.random.uniform([]))]
    return numbers


def check_callers_numbers(backend: Backend) -> None:
    """Check that training doesn't affect the random numbers that the caller draws afterwards."""

    def seed() -> None:
        random.seed(0)
        np.random.seed(0)
        if backend.name == "torch":
            import torch

            torch.manual_seed(0)
        if backend.name == "tf":
            import keras

            keras.utils.set_random_seed(0)

    with interpreted(backend):
        subject = trainer(backend, small(**EVERYWHERE))
        seed()
        expected = draw_numbers(backend)
        seed()
        subject.train_step(**BATCH)
        subject.evaluate(**BATCH)
        backend.package.gradients(subject.model, **BATCH)
        assert draw_numbers(backend) == expected, "the caller's random numbers are not what they were"


def check_mixed_precision(backend: Backend) -> None:
    """Check that weights and moments are stored in float32 and have more significant digits than bfloat16."""
    settings = TrainingConfig(learning_rate_factor=1e-3, warmup_steps=1, mixed_bfloat16=True)
    subject = trainer(backend, small(), settings, dtype="float32")
    subject.train_step(**BATCH)
    state = subject.export_state()
    kept = {"weight": subject.model.export_weights(), "first": state.first_moment, "second": state.second_moment}
    for what, arrays in kept.items():
        values = np.concatenate([array.ravel() for array in arrays.values()])
        assert values.dtype == np.float32, f"{what}: {values.dtype}"
        values = values[values != 0.0]
        rounded = (values == values.astype(ml_dtypes.bfloat16)).mean()
        assert rounded < 0.5, f"{what}: {rounded:.0%} of the values fit in bfloat16"


@pytest.mark.parametrize(
    "place",
    tiers.first_alone([*(("post", site) for site in SITES), ("pre", "residual")], "sites", "jax", "tf"),
    ids="-".join,
)
def test_each_site_matches_the_dropout_config(backend, place):
    check_sites(backend, *place)


def test_masks_have_the_expected_scale_and_rate_and_are_independent(backend):
    check_masks(backend)


def test_dropout_is_disabled_outside_training_steps(backend):
    check_inference(backend)


def test_dropout_depends_only_on_seed_and_step(backend):
    check_seed(backend)


def test_micro_batches_have_independent_dropout_masks(backend):
    check_micro_batches(backend)


def test_both_kinds_of_dropout_are_identical_without_a_mesh(backend):
    check_one_device(backend)


def test_training_does_not_change_the_random_state_of_the_caller(backend):
    check_callers_numbers(backend)


@pytest.mark.extended("training", "jax", "tf")
def test_mixed_precision_keeps_weights_and_moments_in_float32(port):
    check_mixed_precision(port)


@pytest.mark.only("torch")
def test_fused_attention_drops_the_same_fraction_of_weights(backend, monkeypatch):
    """Without taps, PyTorch's kernel applies its own dropout. One-hot values reveal its masks."""
    import torch
    import torch.nn.functional as F  # noqa: N812  the usual name

    rate, heads, length = 0.25, 3, 32
    dropout = backend.package.Dropout(rate)
    query = torch.zeros(8, heads, length, length, dtype=torch.float64)  # every key has the same weight
    one_hot = torch.eye(length, dtype=torch.float64).expand_as(query).contiguous()
    fused, calls = F.scaled_dot_product_attention, []
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *args, **rest: calls.append(args) or fused(*args, **rest)
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        weights = backend.package.fast.fused_attention(query, query, one_hot, None, dropout).numpy()
    assert len(calls) == 1
    factor = weights * length
    kept = factor > 0.5
    assert np.abs(factor - kept / (1.0 - rate)).max() < STRICT
    assert abs(kept.mean() - (1.0 - rate)) < 5.0 * np.sqrt(rate * (1.0 - rate) / kept.size)
    for axis, along in enumerate(AXES[4]):
        assert_unrelated(along, rate, factor, np.roll(factor, 1, axis))


def test_presets_apply_dropout_at_the_listed_sites():
    """The paper applies dropout to embeddings and residuals; this test lists the presets with other sites."""
    everywhere, paper = {*SITES} - {"final"}, {"embedding", "residual"}
    others = {
        "paper_dropout_0.0": set(),
        "annotated": everywhere,
        "torch": everywhere,
        "flax_wmt": everywhere,
        "bart": everywhere,
        "plbart": {*paper, "attention"},
        "m2m_100": {*paper, "attention"},
        "pegasus": everywhere,
        "keras_hub": {"attention", "residual"},
        **dict.fromkeys(("t5", "t5_v1_1", "mt5", "byt5"), tuple(SITES)),
    }
    for preset in PRESETS:
        rates = TransformerConfig.preset(preset, source_vocab_size=9, target_vocab_size=9).dropout
        assert {site for site in SITES if getattr(rates, site)} == {*others.get(preset, paper)}, preset
