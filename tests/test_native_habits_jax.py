"""Common uses of JAX and Flax NNX models either work or raise an error that suggests an alternative."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import assert_same_bits, random_weights, tiny_config
from native_models import BATCH, LABELS, NO_DROPOUT, ONE_LAYER, SETTINGS, SOURCE, TARGET, build

import reference_numpy as ref

pytestmark = pytest.mark.only("jax")

RATES = {"embedding": 0.5, "attention": 0.5, "residual": 0.5, "feed_forward": 0.5}
KERNEL = "encoder.layers.0.feed_forward.inner_proj.kernel"


def cast(model, dtype):
    import jax
    from flax import nnx

    nnx.update(model, jax.tree.map(lambda x: x.astype(dtype), nnx.state(model, nnx.Param)))


def inner_proj(model):
    return model.encoder.layers[0].feed_forward.inner_proj


# --- Dtypes and random state ---


@pytest.mark.parametrize("tie", ["all", pytest.param("none", marks=pytest.mark.extended("dtypes"))])
@pytest.mark.parametrize("positions", ["learned", pytest.param("sinusoidal", marks=pytest.mark.extended("dtypes"))])
def test_model_computes_in_the_dtype_of_its_cast_state(port, tie, positions):
    overrides = {"tie_embeddings": tie, "position_encoding": positions, "output_bias": True}
    for before, after in (("float32", "bfloat16"), ("float32", "float64"), ("float64", "float32")):
        model, expected = build(port, before, **overrides), build(port, after, **overrides)
        cast(model, after)
        if before == "float32":  # because its values are already rounded to float32
            port.package.set_weights(expected, model.export_weights())
        logits = model(SOURCE, TARGET)
        assert logits.dtype == model.encode(SOURCE).dtype == after
        np.testing.assert_array_equal(logits, expected(SOURCE, TARGET))
        found, right = (port.package.beam_search(x, SOURCE, 2, max_length=4) for x in (model, expected))
        np.testing.assert_array_equal(found.nbest_ids, right.nbest_ids)
        np.testing.assert_array_equal(found.nbest_scores, right.nbest_scores)


def test_loaded_model_without_rngs_raises_in_training_mode(port):
    """Dropout requires ``rngs``, because two models with the same implicit seed would drop the same values."""
    config = tiny_config(**ONE_LAYER, dropout=RATES)
    model = port.package.Transformer.from_weights(config, random_weights(config))
    model.train()
    with pytest.raises(ValueError, match="no `rngs` argument was provided to Dropout"):
        model(SOURCE, TARGET)
    found = port.package.greedy_search(model, SOURCE, 4), port.package.Trainer(model, SETTINGS).train_step(*BATCH)
    given = port.package.Transformer.from_weights(config, random_weights(config), rngs=0)
    expected = port.package.greedy_search(given, SOURCE, 4), port.package.Trainer(given, SETTINGS).train_step(*BATCH)
    np.testing.assert_array_equal(found[0].scores, expected[0].scores)
    assert found[1].loss == expected[1].loss


def test_rngs_accept_a_legacy_key(port):
    import jax

    config = tiny_config(**ONE_LAYER)
    old, new = (port.package.Transformer(config, rngs=key(3)) for key in (jax.random.PRNGKey, jax.random.key))
    np.testing.assert_array_equal(old.encode(SOURCE), new.encode(SOURCE))


# --- Scores ---


def test_scores_have_no_dropout_in_training_mode(port):
    model = build(port, dropout=RATES)
    expected = port.package.score(model, SOURCE, LABELS)
    model.train()
    found = port.package.score(model, SOURCE, LABELS)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    assert not model.dropout.deterministic


def test_scores_can_be_jitted_and_differentiated(port):
    """In training mode and under jit, scores match the cross-entropy without dropout and label smoothing."""
    from flax import nnx

    model = build(port, dropout=RATES, label_smoothing=0.0)
    score = port.package.score
    expected, logits = score(model, SOURCE, LABELS), model(SOURCE, np.array([[1, 3, 4], [1, 5, 2]]))
    total, _ = port.package.cross_entropy(logits, LABELS, model.config)
    np.testing.assert_allclose(expected.sequences.sum(), -total, rtol=1e-12)
    model.train()
    tokens = nnx.jit(lambda model, source, target: score(model, source, target).tokens)(model, SOURCE, LABELS)
    np.testing.assert_allclose(tokens, expected.tokens, rtol=1e-12)
    gradient = nnx.jit(nnx.grad(lambda model: -score(model, SOURCE, LABELS).sequences.sum()))(model)
    right = ref.gradients(build(Reference, dropout=RATES, label_smoothing=0.0), SOURCE, [[1, 3, 4], [1, 5, 2]], LABELS)
    found = gradient["encoder"]["layers"][0]["feed_forward"]["inner_proj"]["kernel"][...]
    np.testing.assert_allclose(found, 5 * right.parameters[KERNEL], rtol=1e-9, atol=1e-12)


class Reference:
    name, package = "numpy", ref


def test_object_of_another_type_is_rejected_as_model(port):
    from flax import nnx

    package, model = port.package, build(port)
    others = (
        *(None, SOURCE, nnx.state(model), nnx.split(model), nnx.Sequential(model), build(Reference)),
        *(package.Encoder(model.config, rngs=0), package.Decoder(model.config, rngs=0), nnx.jit(lambda model: model)),
    )
    for other in others:
        for call in (
            lambda: package.greedy_search(other, SOURCE),  # noqa: B023
            lambda: package.beam_search(other, SOURCE),  # noqa: B023
            lambda: package.sample(other, SOURCE),  # noqa: B023
            lambda: package.score(other, SOURCE, LABELS),  # noqa: B023
            lambda: package.gradients(other, *BATCH),  # noqa: B023
            lambda: package.Trainer(other, SETTINGS),  # noqa: B023
        ):
            with pytest.raises(TypeError, match=r"model must be a transformer_jax\.Transformer: got <class"):
                call()


class Tensor:
    """A framework's array type whose rows have no ``tolist`` method."""

    def __init__(self, rows):
        self.rows = np.asarray(rows)

    def __iter__(self):
        return map(Tensor, self.rows)

    def __array__(self, dtype=None, copy=None):
        return self.rows


def test_prefix_ids_accept_arrays_of_other_frameworks(port):
    import jax.numpy as jnp

    model = build(port)
    expected = port.package.greedy_search(model, SOURCE, 5, prefix_ids=[[7], [8, 9]])
    for prefix in (jnp.array([[7, 0], [8, 9]]), Tensor([[7, 0], [8, 9]]), [Tensor([7]), jnp.array([8, 9])]):
        found = port.package.greedy_search(model, SOURCE, 5, prefix_ids=prefix)
        np.testing.assert_array_equal(found.ids, expected.ids)


def test_float64_model_is_not_rounded_to_float32(port):
    """If x64 is off, JAX replaces float64 arrays with float32 arrays, in ``jax.device_put`` without a warning."""
    import jax

    model = build(port)
    trainer = port.package.Trainer(model, SETTINGS)
    weights, state = model.export_weights(), trainer.export_state()
    with jax.enable_x64(False):
        for call in (
            lambda: port.package.set_weights(model, weights),
            lambda: trainer.load_state(state),
            lambda: port.package.Trainer(model, SETTINGS),
        ):
            with pytest.raises(RuntimeError, match=r"jax\.config\.update\('jax_enable_x64', True\)"):
                call()
    for arrays in (model.export_weights(), trainer.export_state().first_moment):
        assert {array.dtype.name for array in arrays.values()} == {"float64"}


def test_overflowing_weight_leaves_the_model_unchanged(port):
    model = build(port, "float32")
    before = model.export_weights()
    weights = {name: array.astype(np.float64) + 1 for name, array in before.items()}
    weights[list(weights)[-1]].flat[0] = 1e300
    with pytest.raises(ValueError, match="overflows float32"):
        port.package.set_weights(model, weights)
    assert_same_bits(model.export_weights(), before)


def test_step_inside_jit_leaves_the_trainer_unchanged(port):
    import jax

    found, expected = (port.package.Trainer(build(port), SETTINGS) for _ in range(2))
    with pytest.raises(TypeError, match=r"train_step must not be called inside jax\.jit"):
        jax.jit(lambda source: found.train_step(source, TARGET, LABELS).loss)(SOURCE)
    assert found.step == 0
    assert found.train_step(*BATCH).loss == expected.train_step(*BATCH).loss


def test_model_with_numpy_arrays_is_exported_and_trained(port):
    """Flax restores a state as NumPy arrays if a checkpoint format, such as msgpack, has no JAX arrays."""
    import jax
    from flax import nnx

    found, expected = build(port), build(port)
    nnx.update(found, jax.device_get(nnx.state(found)))
    assert_same_bits(found.export_weights(), expected.export_weights())
    trainers = [port.package.Trainer(model, SETTINGS) for model in (found, expected)]
    losses = [[float(trainer.train_step(*BATCH).loss) for _ in range(2)] for trainer in trainers]
    assert losses[0] == losses[1]
    nnx.update(found, jax.device_get(nnx.state(found)))
    port.package.set_weights(found, expected.export_weights())
    np.testing.assert_array_equal(found(SOURCE, TARGET), expected(SOURCE, TARGET))


def test_model_cast_after_the_trainer_was_created_is_rejected(port):
    trainer = port.package.Trainer(build(port, "float32"), SETTINGS)
    cast(trainer.model, "bfloat16")
    for call in (trainer.train_step, trainer.gradient):
        with pytest.raises(ValueError, match="training requires float32 or float64 weights: got bfloat16"):
            call(*BATCH)


def test_loss_of_nested_lists_equals_loss_of_arrays(port):
    logits = np.random.default_rng(0).normal(size=(2, 3, 37))
    found, expected = (port.package.cross_entropy(x, LABELS, tiny_config()) for x in (logits.tolist(), logits))
    assert found == expected


# --- Modified parameters ---


def test_frozen_variables_are_rejected_by_the_trainer(port):
    import optax
    from flax import nnx

    class Frozen(nnx.Variable):
        """A parameter that must not change."""

    model = build(port)
    inner_proj(model).kernel = Frozen(inner_proj(model).kernel[...])
    before = model.export_weights()
    for call in (lambda: port.package.Trainer(model, SETTINGS), lambda: port.package.gradients(model, *BATCH)):
        with pytest.raises(ValueError, match=rf"{KERNEL} must be an nnx\.Param: got Frozen; .* nnx\.Optimizer"):
            call()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    optimizer.update(model, nnx.grad(lambda model: model(SOURCE, TARGET).std())(model))
    after = model.export_weights()
    changed = [name for name in after if (after[name] != before[name]).any()]
    assert KERNEL not in changed
    assert len(changed) > 10


def test_shared_parameters_are_rejected_by_the_trainer(port):
    """If two names refer to one parameter, its gradient has no unique name. The weights can still be exported."""

    def share_a_layer(model):
        model.encoder.layers[1] = model.encoder.layers[0]

    def tie_embeddings(model):
        model.target_embedding.embedding = model.source_embedding.embedding

    for change, first, second in (
        (share_a_layer, r"encoder\.layers\.0\.(\S+)", r"encoder\.layers\.1\.\1"),
        (tie_embeddings, r"source_embedding\.table", r"target_embedding\.table"),
    ):
        model = build(port, num_encoder_layers=2, tie_embeddings="none", target_vocab_size=37)
        trainer = port.package.Trainer(model, SETTINGS)
        change(model)
        for call in (
            lambda: port.package.gradients(model, *BATCH),  # noqa: B023
            lambda: port.package.Trainer(model, SETTINGS),  # noqa: B023
            trainer.export_state,
        ):
            with pytest.raises(ValueError, match=f"{first} and {second} are the same parameter, but the config does"):
                call()
        again = port.package.Transformer.from_weights(model.config, model.export_weights(), "float64")
        np.testing.assert_allclose(again(SOURCE, TARGET), model(SOURCE, TARGET), rtol=1e-12)


@pytest.mark.parametrize("tie", ["all", "target_output"])
def test_model_that_lost_its_tie_is_rejected(port, tie):
    """``jax.tree.map`` separates tied matrices, so a weight file with only one of them would be wrong."""
    import jax
    from flax import nnx

    separated, replaced = jax.tree.map(lambda x: x, build(port, tie_embeddings=tie)), build(port, tie_embeddings=tie)
    replaced.output_proj = nnx.Linear(24, replaced.config.target_vocab_size, rngs=nnx.Rngs(0))
    owner = "source_embedding" if tie == "all" else "target_embedding"
    for model in (separated, replaced):
        for call in (model.export_weights, lambda: port.package.Trainer(model, SETTINGS)):  # noqa: B023
            with pytest.raises(ValueError, match=f"output_proj must be tied to {owner}: got"):
                call()
    model = build(port, tie_embeddings=tie)
    assert_same_bits(nnx.clone(model).export_weights(), model.export_weights())


def test_own_attention_function_is_used_on_a_mesh(port):
    from flax import nnx

    def attend(query, *inputs):
        return port.package.scaled_dot_product_attention(2 * query, *inputs)

    found = []
    for mesh in (None, port.package.make_mesh(ref.Plan())):
        model = build(port, dropout=NO_DROPOUT)
        for _, module in nnx.iter_modules(model):
            if isinstance(module, port.package.MultiHeadAttention):
                module.attend = attend
        found.append(port.package.Trainer(model, SETTINGS, mesh=mesh).train_step(*BATCH).loss)
    np.testing.assert_allclose(*found, rtol=1e-12)


def test_bias_that_the_config_lacks_is_rejected(port):
    from flax import nnx

    model = build(port, attention_bias=False)
    model.encoder.layers[0].self_attention.query_proj.bias = nnx.Param(np.ones(24))
    for call in (model.export_weights, lambda: port.package.Trainer(model, SETTINGS)):
        with pytest.raises(ValueError, match=r"must have canonical names: got encoder\..*query_proj\.bias; "):
            call()


def test_missing_parameters_are_named_in_the_error(port):
    import jax.numpy as jnp
    from flax import nnx

    def assign_an_array(model):
        inner_proj(model).kernel = jnp.ones([24, 40])

    def remove_a_bias(model):
        inner_proj(model).bias = None

    def remove_a_layer(model):
        model.encoder.layers = nnx.List([])

    for change, message in (
        (assign_an_array, rf"{KERNEL} must be an nnx\.Param: got ArrayImpl; assign an nnx\.Param"),
        (remove_a_bias, r"inner_proj\.bias must be an nnx\.Param: got NoneType"),
        (remove_a_layer, r"the model has no encoder\.layers\.0\.\S+, which its config requires"),
    ):
        model = build(port)
        change(model)
        for call in (model.export_weights, lambda: port.package.Trainer(model, SETTINGS)):  # noqa: B023
            with pytest.raises(ValueError, match=message):
                call()
