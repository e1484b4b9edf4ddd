"""The layers are Flax layers: JAX adapters, dtypes, devices, and random state either work or raise a clear error."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import assert_same_bits, random_weights, tiny_config
from native_models import BATCH, NO_DROPOUT, SETTINGS, SOURCE, TARGET, assert_close, build, run_alone

from reference_numpy import parameter_shapes

pytestmark = pytest.mark.only("jax")

CONFIG = tiny_config(num_encoder_layers=1, num_decoder_layers=1, output_bias=True)


def add_adapter(model):
    """Replace a projection with an ``nnx.LoRALinear`` that changes its result, and return the adapter."""
    from flax import nnx

    attention = model.encoder.layers[0].self_attention
    old = attention.query_proj
    lora = nnx.LoRALinear(
        *old.kernel.shape,
        lora_rank=2,
        lora_param_dtype=old.param_dtype,
        use_bias=old.use_bias,
        dtype=old.dtype,
        param_dtype=old.param_dtype,
        b_initializer=nnx.initializers.normal(1.0),
        rngs=nnx.Rngs(0),
    )
    lora.kernel, lora.bias = old.kernel, old.bias
    attention.query_proj = lora
    return lora


@pytest.mark.parametrize("tie", ["all", "none"])
@pytest.mark.parametrize("fast", [False, True])
def test_layers_have_flax_types(port, tie, fast):
    from flax import nnx

    config = CONFIG.replace(tie_embeddings=tie, position_encoding="learned")
    model = port.package.Transformer(config, fast=fast, rngs=0)
    linear = [module for _, module in nnx.iter_modules(model) if isinstance(module, nnx.Linear)]
    assert len(linear) == 4 + 2 + 8 + 2 + (tie == "none")
    assert sum(isinstance(module, nnx.Embed) for _, module in nnx.iter_modules(model)) == (3 if tie == "all" else 4)
    assert type(port.package.Linear(3, 4, bias=True, rngs=nnx.Rngs(0))) is nnx.Linear


def test_export_merges_adapters(port):
    model = build(port)
    before = port.to_numpy(model(SOURCE, TARGET))
    lora = add_adapter(model)
    found = port.to_numpy(model(SOURCE, TARGET))
    assert np.abs(found - before).max() > 1e-3
    weights = model.export_weights()
    kernel = "encoder.layers.0.self_attention.query_proj.kernel"
    update = np.asarray(lora.lora.lora_a[...]) @ np.asarray(lora.lora.lora_b[...])
    np.testing.assert_allclose(weights[kernel], np.asarray(lora.kernel[...]) + update, rtol=1e-15, atol=1e-15)
    again = port.package.Transformer.from_weights(model.config, weights, "float64")
    assert_close(port.to_numpy(again(SOURCE, TARGET)), found)
    searched = port.package.greedy_search(model, SOURCE, max_length=4)
    np.testing.assert_array_equal(searched.ids, port.package.greedy_search(again, SOURCE, max_length=4).ids)


def test_training_rejects_adapters(port):
    model = build(port)
    trainer = port.package.Trainer(model, SETTINGS)
    add_adapter(model)
    for call in (
        lambda: port.package.gradients(model, *BATCH),
        lambda: port.package.Trainer(model, SETTINGS),
        trainer.export_state,
    ):
        with pytest.raises(ValueError, match=r"self_attention\.query_proj must not be an adapter: got a LoRALinear"):
            call()


def test_unsupported_layers_and_parameters_are_rejected(port):
    """Layers that may compute something different, and parameters without a canonical name, are rejected."""
    from flax import nnx

    class Scaled(nnx.Linear):
        def __call__(self, x):
            return 2.0 * super().__call__(x)

    model = build(port)
    attention = model.encoder.layers[0].self_attention
    own = attention.value_proj
    width = own.kernel.shape
    wrapper = nnx.LoRA(width[0], 2, width[1], base_module=own, rngs=nnx.Rngs(0))
    for layer in (wrapper, Scaled(*width, rngs=nnx.Rngs(0))):
        attention.value_proj = layer
        for call in (model.export_weights, lambda: port.package.gradients(model, *BATCH)):
            with pytest.raises(ValueError, match=rf"value_proj must compute .* got a {type(layer).__name__}; .*layer"):
                call()
    attention.value_proj = own
    model.output_proj = Scaled(24, 37, rngs=nnx.Rngs(0))  # tied, so its matrix has no canonical name
    with pytest.raises(ValueError, match="output_proj must compute"):
        model.export_weights()
    model = build(port)
    model.encoder.scale = nnx.Param(np.ones(3))
    with pytest.raises(ValueError, match=r"must have canonical names: got encoder\.scale; "):
        model.export_weights()


def test_jax_dtypes_are_accepted_as_arguments(port):
    import jax
    import jax.numpy as jnp
    from flax import nnx

    weights = random_weights(CONFIG)
    for dtype in (jnp.bfloat16, jnp.dtype("bfloat16"), "bfloat16"):
        model = port.package.Transformer.from_weights(CONFIG, weights, dtype=dtype)
        assert model(SOURCE, TARGET).dtype == jnp.bfloat16
    for dtype in (jnp.float32, np.float32, np.dtype("float32"), np.dtype(np.float32)):
        assert port.package.Transformer(CONFIG, dtype, rngs=nnx.Rngs(0))(SOURCE, TARGET).dtype == np.float32
    for dtype in (jnp.int32, "float8", None, 3, jax):
        with pytest.raises(ValueError, match="dtype must be one of float64, float32, bfloat16: got"):
            port.package.Transformer.from_weights(CONFIG, weights, dtype=dtype)


def test_jax_devices_are_accepted_as_arguments(port):
    import jax

    weights = random_weights(CONFIG)
    device = jax.devices()[0]
    for given in (device, "cpu"):
        assert port.package.Transformer.from_weights(CONFIG, weights, device=given).device == device
    with pytest.raises(ValueError, match="device must be one of cpu, gpu, tpu: got 'cuda9'"):
        port.package.Transformer.from_weights(CONFIG, weights, device="cuda9")
    with pytest.raises(RuntimeError, match="no TPU is visible to jax"):
        port.package.Transformer.from_weights(CONFIG, weights, device="tpu")


WITHOUT_FLOAT64 = """
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from conftest import random_weights, tiny_config
from reference_numpy import save_weights
import transformer_jax
config = tiny_config()
weights = random_weights(config)
save_weights("{path}", config, weights)
for dtype in ("float64", jnp.float64, np.float64, np.dtype("float64")):
    for build in (
        lambda: transformer_jax.Transformer(config, dtype, rngs=nnx.Rngs(0)),
        lambda: transformer_jax.Transformer.from_weights(config, weights, dtype),
        lambda: transformer_jax.load_transformer("{path}", dtype),
    ):
        try:
            build()
        except RuntimeError as error:
            assert "jax.config.update('jax_enable_x64', True)" in str(error)
        else:
            raise AssertionError(dtype)
assert not jax.config.jax_enable_x64
device = jax.devices()[1]
model = transformer_jax.Transformer.from_weights(config, weights, device=device)
assert model.device == device and model(np.array([[5]]), np.array([[1]])).devices() == {{device}}
"""


def test_loading_never_enables_float64(tmp_path):
    flags = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
    run_alone(WITHOUT_FLOAT64.format(path=tmp_path / "model.safetensors"), JAX_ENABLE_X64="0", XLA_FLAGS=flags)


def test_rngs_can_be_streams_a_key_or_a_seed(port):
    import jax
    from flax import nnx

    expected = port.package.Transformer(CONFIG, rngs=nnx.Rngs(3)).export_weights()
    for rngs in (3, np.int64(3), jax.random.key(3)):
        assert_same_bits(port.package.Transformer(CONFIG, rngs=rngs).export_weights(), expected)
    for rngs in (None, "3", 3.0, True, np.ones(2)):
        with pytest.raises(TypeError, match=r"rngs must be an nnx\.Rngs, a key, or a seed: got"):
            port.package.Transformer(CONFIG, rngs=rngs)


def test_dropout_of_loaded_models_depends_on_the_seed(port):
    from flax import nnx

    config, found = CONFIG.replace(dropout={**NO_DROPOUT, "residual": 0.5}), []
    for rngs in (0, 7, nnx.Rngs(7), nnx.Rngs(dropout=8)):
        model = port.package.Transformer.from_weights(config, random_weights(config), rngs=rngs)
        model.train()
        found.append(port.to_numpy(model(SOURCE, TARGET)))
    zero, seven, same, eight = found
    np.testing.assert_array_equal(seven, same)
    assert min(np.abs(a - b).max() for a, b in ((zero, seven), (zero, eight), (seven, eight))) > 1e-3


def test_wrong_types_are_named_in_the_error(port):
    model = build(port)
    for call, message in (
        (lambda: port.package.Transformer({}, rngs=0), "config must be a TransformerConfig: got dict"),
        (lambda: port.package.Transformer.from_weights({}, {}), "config must be a TransformerConfig: got dict"),
        (lambda: port.package.Trainer(model, {}), "settings must be a TrainingConfig: got dict"),
        (
            lambda: port.package.Trainer(model.encoder, SETTINGS),
            r"model must be a transformer_jax\.Transformer: got .*EncoderStack",
        ),
        (
            lambda: port.package.gradients(model.encoder, *BATCH),
            r"model must be a transformer_jax\.Transformer: got .*EncoderStack",
        ),
    ):
        with pytest.raises(TypeError, match=message):
            call()


def test_search_inside_jit_is_rejected(port):
    import jax
    from flax import nnx

    model = build(port)
    for search in (port.package.greedy_search, port.package.beam_search):
        with pytest.raises(TypeError, match=r"inside jax\.jit .* init_cache and decode_step"):
            jax.jit(lambda ids, search=search: search(model, ids).ids)(SOURCE)
        with pytest.raises(TypeError, match=r"inside jax\.jit"):
            nnx.jit(lambda model, search=search: search(model, SOURCE).ids)(model)


def test_exported_names_do_not_depend_on_flax_names(port):
    """Canonical names don't depend on Flax's parameter names."""
    config = CONFIG.replace(tie_embeddings="none", position_encoding="learned")
    model = port.package.Transformer.from_weights(config, random_weights(config))
    assert list(model.export_weights()) == list(parameter_shapes(config))
    assert_same_bits(model.export_weights(), random_weights(config))


def test_gpu_export_has_no_loops(port):
    """Only CPU exports process queries in blocks, regardless of the machine that exports the model."""
    import jax

    config = tiny_config(num_encoder_layers=1)
    encoder = port.package.Encoder(config, rngs=0)
    encoder.eval()
    ids = jax.ShapeDtypeStruct((1, 300), "int32")
    loops = {
        platform: jax.export.export(jax.jit(encoder), platforms=[platform])(ids).mlir_module().count("stablehlo.while")
        for platform in ("cpu", "cuda")
    }
    assert loops["cuda"] == 0 < loops["cpu"]
