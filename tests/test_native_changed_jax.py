"""JAX models that a user changed: a change that the package can't follow raises an error instead of being ignored."""

from __future__ import annotations

import re

import numpy as np
import pytest
from conftest import assert_same_bits, random_weights, tiny_config
from native_models import BATCH, LABELS, NO_DROPOUT, ONE_LAYER, SETTINGS, SOURCE, TARGET, build
from test_native_layers_jax import add_adapter

import reference_numpy as ref

pytestmark = pytest.mark.only("jax")


def ensemble(port):
    from flax import nnx

    return nnx.vmap(lambda rngs: port.package.Transformer(tiny_config(**ONE_LAYER), rngs=rngs))(nnx.Rngs(0).split(3))


def without_values(port):
    from flax import nnx

    return nnx.eval_shape(lambda: port.package.Transformer(tiny_config(**ONE_LAYER), rngs=nnx.Rngs(0)))


def with_adapter(port):
    model = build(port)
    add_adapter(model)
    return model


def separated(port):
    import jax

    return jax.tree.map(lambda x: x, build(port, tie_embeddings="all"))


def with_shared_layers(port):
    model = build(port, num_encoder_layers=2)
    model.encoder.layers[1] = model.encoder.layers[0]
    return model


def calls(package, model):
    """Return one call of each function that takes a model and doesn't require a device."""
    return (
        lambda: package.greedy_search(model, SOURCE, 3),
        lambda: package.score(model, SOURCE, LABELS),
        lambda: package.gradients(model, *BATCH),
        lambda: package.Trainer(model, SETTINGS),
    )


# --- Weights ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_adapter, r"query_proj must not be an adapter: got a LoRALinear; load the exported weights into a new"),
        (separated, r"output_proj must be tied to source_embedding: got a projection with a different matrix"),
        (with_shared_layers, r"encoder\.layers\.0\.(\S+) and encoder\.layers\.1\.\1 must have the same weights"),
        (ensemble, r"source_embedding\.table of the model must have shape \[37, 24\]: got \[3, 37, 24\]; set the"),
    ],
)
def test_weights_that_would_change_the_model_are_rejected(port, change, message):
    """The exported weights already contain the adapter, and a shared parameter can't get two values."""
    model = change(port)
    before = np.asarray(model.encoder.layers[0].feed_forward.inner_proj.kernel[...])
    with pytest.raises(ValueError, match=message):
        port.package.set_weights(model, random_weights(model.config, seed=5))
    np.testing.assert_array_equal(model.encoder.layers[0].feed_forward.inner_proj.kernel[...], before)


def test_weights_of_shared_layers_can_be_set(port):
    model = with_shared_layers(port)
    weights = model.export_weights()
    port.package.set_weights(model, weights)
    assert_same_bits(model.export_weights(), weights)


def test_adapter_of_another_type_is_not_exported(port):
    """``nnx.LoRA`` has no factor alpha / rank, so users add one in a subclass."""
    from flax import nnx

    class Scaled(nnx.LoRA):
        def __call__(self, x):
            return 4.0 * super().__call__(x)

    model = build(port)
    add_adapter(model).lora = Scaled(24, 2, 24, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"query_proj\.lora must be an nnx\.LoRA: got a Scaled; merge the adapter"):
        model.export_weights()


def test_variables_without_a_canonical_name_are_rejected(port):
    from flax import nnx

    class Adapter(nnx.Variable):
        """A type that lets an optimizer train only the adapters."""

    for kind in (Adapter, nnx.Variable, nnx.BatchStat):
        model = build(port)
        model.encoder.layers[0].factor = kind(np.ones(3))
        for call in (model.export_weights, *calls(port.package, model)[2:]):
            with pytest.raises(ValueError, match=r"must have canonical names: got encoder\.layers\.0\.factor; merge"):
                call()
    model = build(port)
    model.seen, model.average = nnx.Intermediate(np.ones(3)), nnx.metrics.Average()
    model.export_weights()


def test_model_without_values_is_rejected(port):
    model = without_values(port)
    with pytest.raises(ValueError, match=r"source_embedding\.table must have values: got only a shape; call set_w"):
        model.export_weights()
    for call in calls(port.package, model):
        with pytest.raises(ValueError, match=r"model must have values: got only shapes; call set_weights\(model"):
            call()
    weights = random_weights(model.config)
    port.package.set_weights(model, weights)
    assert_same_bits(model.export_weights(), weights)


def test_ensemble_is_rejected(port):
    for call in calls(port.package, ensemble(port)):
        with pytest.raises(ValueError, match="model must be a single model: got an ensemble of 3; index its state"):
            call()


@pytest.mark.parametrize("kind", ["layer", "variable"])
def test_subclass_with_additional_variables_is_not_loaded(port, kind):
    """Loading creates only the canonical parameters, so the others would have no values."""
    import jax
    from flax import nnx

    class Extended(port.package.Transformer):
        def __init__(self, *arguments, rngs, **options):
            super().__init__(*arguments, rngs=rngs, **options)
            self.extra = nnx.Linear(2, 3, rngs=rngs) if kind == "layer" else nnx.Variable(np.ones(3))

    config = tiny_config(**ONE_LAYER)
    with pytest.raises(ValueError, match=r"only canonical parameters can be loaded: got extra.*; create the model"):
        Extended.from_weights(config, random_weights(config))
    model = Extended(config, rngs=nnx.Rngs(0))
    port.package.set_weights(model, random_weights(config))
    assert isinstance(model.source_embedding.embedding[...], jax.Array)


# --- Training ---


def test_taps_that_are_not_called_have_no_gradient(port):
    """A fused kernel has no attention weights, so their gradient is unknown and not zero."""

    def attend(query, key, value, mask=None, dropout=None, tap=ref.no_tap, bias=None):
        return tap("context", port.package.scaled_dot_product_attention(query, key, value, mask))

    class Silent(port.package.EncoderLayer):
        def __call__(self, x, mask=None, tap=ref.no_tap, bias=None):
            return super().__call__(x, mask)

    model = build(port, dropout=NO_DROPOUT)
    object.__setattr__(model.encoder.layers[0], "__class__", Silent)
    model.decoder.layers[0].self_attention.attend = attend
    found = port.package.gradients(model, *BATCH).taps
    missing = re.compile(r"encoder\.layers\.0\..*|decoder\.layers\.0\.self_attention\.(scores|weights)")
    assert [*found] == [name for name in ref.tap_shapes(model.config, 2, 4, 3) if not missing.fullmatch(name)]
    assert all(array.any() for array in found.values())


def test_training_rejects_parameters_in_different_dtypes(port):
    import jax
    import jax.numpy as jnp
    from flax import nnx

    def cast(module, dtype):
        nnx.update(module, jax.tree.map(lambda x: x.astype(dtype), nnx.state(module, nnx.Param)))

    message = "training requires parameters in one dtype: got bfloat16 and float32; cast all parameters to float32"
    model = build(port, "float32")
    trainer = port.package.Trainer(model, SETTINGS)
    cast(model.encoder, jnp.bfloat16)
    for call in (lambda: port.package.Trainer(model, SETTINGS), lambda: trainer.train_step(*BATCH)):
        with pytest.raises(ValueError, match=message):
            call()
    assert model.encoder.layers[0].feed_forward.inner_proj.kernel.dtype == jnp.bfloat16


def test_step_of_a_loaded_state_can_be_an_array(port):
    """Orbax, NumPy, and msgpack restore a number as an array."""
    import jax.numpy as jnp

    trainer = port.package.Trainer(build(port), SETTINGS)
    state = trainer.export_state()
    for number in (np.array(3), jnp.int32(3)):
        trainer.load_state(ref.TrainingState(number, number, state.first_moment, state.second_moment))
        assert type(trainer.step) is type(trainer.seed) is int
        assert trainer.step == trainer.seed == 3


# --- Layers ---


def test_unknown_precision_is_named(port):
    model = build(port)
    model.precision = "bfloat16"  # a name that JAX accepts
    with pytest.raises(ValueError, match="precision must be one of highest, fast: got 'bfloat16'"):
        model(SOURCE, TARGET)


def test_search_requires_the_vectors_of_a_position_module(port):
    from flax import nnx

    class Identity(nnx.Module):
        def __call__(self, x):
            return x

    model = build(port)
    model.target_position = Identity()
    with pytest.raises(ValueError, match=r"target_position must be a module that .* got Identity; define its method"):
        port.package.greedy_search(model, SOURCE, 3)


def test_padding_masks_accept_lists(port):
    np.testing.assert_array_equal(port.package.padding_mask(SOURCE.tolist(), 0), SOURCE != 0)
    np.testing.assert_array_equal(port.package.target_padding_mask(TARGET.tolist(), 0), TARGET != 0)


def test_learned_positions_reject_long_inputs(port):
    """A single row would be added to all positions."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    layer = port.package.LearnedPosition(tiny_config(max_length=1), rngs=nnx.Rngs(0))
    assert layer(jnp.ones([2, 1, 24])).shape == (2, 1, 24)
    with pytest.raises(ValueError, match="length must be at most 1 for this model: got 4"):
        layer(jnp.ones([2, 4, 24]))
    (length,) = jax.export.symbolic_shape("length", constraints=["length <= 1"])
    jax.export.export(jax.jit(layer))(jax.ShapeDtypeStruct((2, length, 24), jnp.float32))


# --- Caches ---


@pytest.mark.parametrize(
    ("beam_size", "rows", "got"),
    [
        (2, [0, 1], "row 1 of sequence 0 for sequence 1"),  # drops the second sequence
        (1, np.array([1, 0]), "row 1 of sequence 1 for sequence 0"),
        (2, [0, 0, 1, 3], "row 1 of sequence 0 for sequence 1"),
    ],
)
def test_hypotheses_of_a_cache_stay_in_their_sequence(port, beam_size, rows, got):
    """The cache stores the encoder memory once per sequence, and ``reorder`` doesn't move it."""
    import jax.numpy as jnp

    cache = build(port).init_cache(SOURCE, 3, beam_size)
    message = f"rows must replace each hypothesis with a hypothesis of the same sequence: got {got}; to reorder "
    for given in (rows, jnp.asarray(rows)):
        with pytest.raises(ValueError, match=message):
            cache.reorder(given)
    with pytest.raises(ValueError, match="the same number of rows for 2 sequences: got 3"):
        cache.reorder([0, 0, 1])


def test_number_of_hypotheses_in_a_cache_can_change(port):
    model = build(port)
    _, cache = model.decode_step(TARGET[:, 0], model.init_cache(SOURCE, 3))
    cache.reorder([0, 0, 0, 1, 1, 1])
    logits, _ = model.decode_step(TARGET[:, 1].repeat(3), cache)
    expected = model(SOURCE, TARGET)[:, 1].repeat(3, 0)
    np.testing.assert_allclose(logits, expected, rtol=1e-10, atol=1e-12)


def test_decoder_layer_without_self_attention_uses_no_cache(port):
    model = build(port, num_decoder_layers=3)
    model.decoder.layers[1].self_attention = None
    cache = model.init_cache(SOURCE, 3)
    for i in range(3):
        logits, cache = model.decode_step(TARGET[:, i], cache)
    np.testing.assert_allclose(logits, model(SOURCE, TARGET)[:, 2], rtol=1e-10, atol=1e-12)
