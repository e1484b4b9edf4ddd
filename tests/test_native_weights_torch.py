"""PyTorch weights: export only from layers that compute with them, initial values, dtypes, and devices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import assert_same_bits, random_weights, tiny_config
from modules_torch import LoRA, with_adapters
from native_models import BATCH, SETTINGS, SOURCE, TARGET, build, losses
from torch import nn
from torch.nn.utils import prune

pytestmark = pytest.mark.only("torch")
DEPRECATED = (
    "ignore:torch.ao.quantization is deprecated:DeprecationWarning",
    "ignore:torch.quantize_per_tensor.*are deprecated:UserWarning",
)
LAYER = "encoder.layers.0.self_attention.query_proj"


class Int8Tensor(torch.Tensor):
    """A tensor subclass like torchao's, which represents a quantized weight."""


class Noisy(nn.Linear):
    """A layer whose output doesn't match its weight."""

    def forward(self, x):
        return super().forward(x) * 1.5


def quantized_weight(model):
    layer = model.get_submodule(LAYER)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Int8Tensor), requires_grad=False)


def without_weight(model):
    model.encoder.layers[0].self_attention.query_proj = nn.Sequential(model.get_submodule(LAYER))


def other_block(model):
    model.encoder.layers[0].self_attention = nn.Identity()


def noisy(model):
    model.encoder.layers[0].self_attention.query_proj = Noisy(24, 24)


def dynamically_quantized(model):
    torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8, inplace=True)


CHANGES = {
    "an adapter": (with_adapters, rf"{LAYER} must compute .* only: got a modules_torch LoRA; merge adapters first"),
    "a wrapper": (without_weight, rf"{LAYER} must compute .* only: got a torch Sequential; merge"),
    "a subclass that overrides forward": (noisy, rf"{LAYER} must compute .* only: got a .*Noisy; merge"),
    "a block without projections": (other_block, r"has no encoder\.layers\.0\.self_attention\.query_proj"),
    "a quantized weight": (quantized_weight, rf"{LAYER}\.kernel must be a plain tensor: got Int8Tensor;"),
    "quantize_dynamic": (dynamically_quantized, rf"{LAYER} must compute .* only: got a torch Linear; .* before you"),
}


def exports(port, model):
    """Return functions that export the weights, gradients, or moments of a model by canonical name."""
    trainer = port.package.Trainer(model, SETTINGS)
    return (
        model.export_weights,
        trainer.export_state,
        lambda: port.package.gradients(model, *BATCH),
        lambda: trainer.gradient(*BATCH),
    )


@pytest.mark.filterwarnings(*DEPRECATED)
@pytest.mark.parametrize("change", CHANGES)
def test_exporting_a_replaced_layer_is_rejected(port, change):
    model = build(port, "float32")
    change, message = CHANGES[change]
    change(model)
    for refused in (*exports(port, model), lambda: port.package.set_weights(model, random_weights(model.config))):
        with pytest.raises(ValueError, match=message):
            refused()


def test_export_rejects_added_parameters_without_a_canonical_name(port):
    """A module that the user added would be missing in the exported weights, even if it is frozen."""
    model = build(port)
    model.encoder.adapter = nn.Linear(24, 24)
    port.package.set_weights(model, random_weights(model.config))
    trainer = port.package.Trainer(model, SETTINGS)
    message = r"must have canonical names: got encoder\.adapter\.weight; encoder\.adapter\.bias; merge"
    for refused in (model.export_weights, trainer.export_state, lambda: port.package.gradients(model, *BATCH)):
        with pytest.raises(ValueError, match=message):
            refused()
    model.encoder.adapter.requires_grad_(False)
    with pytest.raises(ValueError, match=message):
        model.export_weights()
    del model.encoder.adapter
    assert_same_bits(model.export_weights(), build(port).export_weights())


def replaced_projection(model):
    model.encoder.layers[0].self_attention.query_proj = nn.Linear(24, 24, dtype=torch.float64)


def assigned_bias(model):
    model.get_submodule(LAYER).bias = nn.Parameter(torch.ones(24, dtype=torch.float64))


def replaced_output(model):
    model.output_proj = nn.Linear(24, 37, dtype=torch.float64)


@pytest.mark.parametrize(
    ("change", "options", "name"),
    [
        (replaced_projection, {"attention_bias": False}, rf"{LAYER}\.bias"),
        (assigned_bias, {"attention_bias": False}, rf"{LAYER}\.bias"),
        (replaced_output, {"tie_embeddings": "none"}, r"output_proj\.bias"),
        (replaced_output, {"output_bias": True}, r"output_proj\.weight"),
    ],
)
def test_export_rejects_a_bias_or_matrix_that_the_config_does_not_have(port, change, options, name):
    """Otherwise, a model with the exported weights would return different results."""
    model = build(port, **options)
    change(model)
    for refused in exports(port, model):
        with pytest.raises(ValueError, match=rf"got {name}; .* remove every bias and matrix"):
            refused()


def pruned(layer):
    prune.l1_unstructured(layer, "weight", 0.3)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("change", [pruned, torch.nn.utils.weight_norm, torch.nn.utils.spectral_norm])
def test_export_rejects_weights_that_hooks_compute(port, change):
    """Such a weight is outdated after an optimizer step, until the next forward pass."""
    model = build(port)
    change(model.get_submodule(LAYER))
    losses(port.package.Trainer(model, SETTINGS), 1)
    with pytest.raises(ValueError, match=rf"{LAYER}\.kernel must not be computed by a hook: call prune\.remove"):
        model.export_weights()


def test_merged_adapters_are_exported(port):
    model, base = build(port), build(port)
    with_adapters(model)
    expected = model(SOURCE, TARGET)
    assert (expected - base(SOURCE, TARGET)).abs().max() > 0.01
    found = port.package.greedy_search(model, SOURCE, max_length=5)
    for attention in (layer.self_attention for layer in model.encoder.layers):
        for name in ("query_proj", "value_proj"):
            setattr(attention, name, getattr(attention, name).merged())
    again = port.package.Transformer.from_weights(model.config, model.export_weights(), "float64")
    torch.testing.assert_close(again(SOURCE, TARGET), expected, rtol=1e-12, atol=1e-12)
    assert np.array_equal(port.package.greedy_search(again, SOURCE, max_length=5).ids, found.ids)


def test_adapters_are_trained_without_moments_for_frozen_parameters(port):
    model = build(port)
    before = model.export_weights()
    with_adapters(model)
    trainer = port.package.Trainer(model, SETTINGS)
    assert not trainer.optimizer.state
    first, *_, last = losses(trainer, 8)
    assert last < first
    trained = {parameter for parameter in model.parameters() if parameter.requires_grad}
    assert {*trainer.optimizer.state} == trained
    assert len(trained) == 4
    kept = model.get_submodule(LAYER).base_layer.weight.detach().numpy().T
    assert np.array_equal(kept, before[f"{LAYER}.kernel"])


def test_moments_of_frozen_parameters_are_exported_as_zeros_and_loaded_on_demand(port):
    model = build(port)
    model.encoder.requires_grad_(False)
    trainer = port.package.Trainer(model, SETTINGS)
    losses(trainer, 2)
    state = trainer.export_state()
    assert not any(moment.any() for name, moment in state.first_moment.items() if name.startswith("encoder."))
    assert len(trainer.optimizer.state) == sum(p.requires_grad for p in model.parameters())
    trainer.load_state(state)
    assert len(trainer.optimizer.state) == sum(p.requires_grad for p in model.parameters())
    full = port.package.Trainer(build(port), SETTINGS)
    losses(full, 2)
    trainer.load_state(full.export_state())
    for ours, theirs in (("first_moment",) * 2, ("second_moment",) * 2):
        assert_same_bits(getattr(trainer.export_state(), ours), getattr(full.export_state(), theirs))
    trainer.load_state(state)
    assert not any(moment.any() for name, moment in trainer.export_state().first_moment.items() if "encoder." in name)


# --- PyTorch's own layers ---


@pytest.mark.parametrize("tie", ["none", "target_output", "all"])
def test_layers_have_pytorch_types(port, tie):
    """Tools for quantization, adapters, and weight decay find layers by these types."""
    config = tiny_config(tie_embeddings=tie, position_encoding="learned", attention_bias=True)
    model = port.package.Transformer(config)
    kinds = {name: type(module) for name, module in model.named_modules()}
    linear = {name for name, kind in kinds.items() if kind is nn.Linear}
    assert {name for name in kinds if name.endswith("_proj")} - linear == ({"output_proj"} if tie != "none" else set())
    assert isinstance(model.source_embedding, nn.Embedding)
    assert isinstance(model.target_embedding, nn.Embedding)
    assert isinstance(model.target_position, nn.Embedding)
    types = nn.Linear, nn.Embedding, nn.LayerNorm
    weights = [m.weight for m in model.modules() if isinstance(m, types)]
    assert {*weights} == {p for name, p in model.named_parameters() if name.endswith("weight")}
    assert len(weights) == len({*weights})


@pytest.mark.filterwarnings(*DEPRECATED)
def test_quantize_dynamic_quantizes_all_linear_layers(port):
    model = build(port, "float32", tie_embeddings="none")
    expected = model(SOURCE, TARGET)
    found = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    quantized = [m for m in found.modules() if "quantized" in type(m).__module__ and hasattr(m, "in_features")]
    assert len(quantized) == sum(type(module) is nn.Linear for module in model.modules()) == 17
    torch.testing.assert_close(found(SOURCE, TARGET), expected, rtol=0.2, atol=0.2)
    assert port.package.greedy_search(found, SOURCE, max_length=4).ids.shape[0] == 2


def test_weight_decay_groups_cover_every_parameter_once(port):
    """Linear layers have weight decay, embeddings and norms don't, and every parameter is in one group."""
    model = build(port, position_encoding="learned", output_bias=True)
    decay, no_decay = set(), set()
    for module_name, module in model.named_modules():
        for name, _ in module.named_parameters():
            full = f"{module_name}.{name}" if module_name else name
            if name.endswith("bias") or isinstance(module, nn.LayerNorm | nn.Embedding):
                no_decay.add(full)
            elif isinstance(module, nn.Linear):
                decay.add(full)
    assert not decay & no_decay
    assert decay | no_decay == {name for name, _ in model.named_parameters()}


def test_user_defined_output_layer_is_used_and_not_exported(port):
    """The tied output layer has no parameter to assign to, so the layer itself must be replaced."""
    model = build(port)
    own = nn.Parameter(torch.ones(37, 24, dtype=torch.float64))
    with pytest.raises(KeyError, match="weight"):
        model.output_proj.weight = own
    model.output_proj = nn.Linear(24, 37, bias=False)
    model.output_proj.weight = own
    model.to(torch.float64)
    assert model.output_proj.weight is own
    assert (model(SOURCE, TARGET).var(-1) < 1e-20).all()
    with pytest.raises(ValueError, match=r"got output_proj\.weight;"):
        model.export_weights()


def test_user_defined_target_embedding_is_used_and_not_exported(port):
    model, plain = build(port, tie_embeddings="all"), build(port, tie_embeddings="all")
    model.target_embedding = port.package.TokenEmbedding(37, model.config, "float64")
    assert (model(SOURCE, TARGET) - plain(SOURCE, TARGET)).abs().max() > 0.01
    with pytest.raises(ValueError, match=r"got target_embedding\.weight;"):
        model.export_weights()


# --- Initial values ---


@pytest.mark.parametrize("tie", ["none", "all"])
@pytest.mark.parametrize("whole", [True, False], ids=["the whole model", "each module"])
def test_meta_device_then_reset_parameters_initializes_every_parameter(port, tie, whole):
    """torchtitan and FSDP reset each module separately. For linear layers, this uses PyTorch's own initialization."""
    config = tiny_config(tie_embeddings=tie, position_encoding="learned", output_bias=True)
    model = port.package.Transformer(config, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    for module in [model] if whole else model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert not [name for name, parameter in model.named_parameters() if (parameter == 7.0).any()]
    fresh = dict(port.package.Transformer(config).named_parameters())
    for name, parameter in model.named_parameters() if whole else ():
        spread = fresh[name].std().item()
        assert abs(parameter.std().item() - spread) <= 0.2 * spread, name
        assert spread > 0 or torch.equal(parameter, fresh[name]), name


def test_initial_values_are_xavier_and_zero(port):
    layer = port.package.Linear(300, 200, bias=True, dtype=torch.float64, device="cpu")
    bound = (6 / 500) ** 0.5
    assert 0.99 * bound < layer.weight.abs().max() <= bound
    assert not layer.bias.any()
    assert port.package.Linear(3, 2, bias=False, device="meta").weight.is_meta
    embedding = port.package.TokenEmbedding(500, tiny_config(d_model=64, num_heads=4))
    assert abs(embedding.weight.std().item() * 8 - 1) < 0.05
    assert embedding.embed_scale == embedding.multiplier == 8.0  # peft scales an adapter's output by embed_scale


# --- Dtypes, devices, and wrong types ---


@pytest.mark.parametrize("dtype", [torch.float64, "float64", "torch.float64", np.float64, np.dtype("float64")])
def test_dtypes_can_be_pytorch_or_numpy_dtypes_or_names(port, dtype):
    config = tiny_config()
    weights = random_weights(config)
    for model in (
        port.package.Transformer(config, dtype),
        port.package.Transformer(config, dtype=dtype, device=torch.device("cpu")),
        port.package.Transformer.from_weights(config, weights, dtype=dtype, device=torch.device("cpu")),
        port.package.Encoder.from_weights(config, weights, dtype, "cpu"),
    ):
        assert model.dtype == torch.float64
        assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert port.package.EncoderLayer(config, dtype).feed_forward.inner_proj.weight.dtype == torch.float64


def test_unknown_dtypes_and_devices_are_rejected(port):
    for dtype in (torch.float16, torch.int64, "float", np.int8, None, 3):
        with pytest.raises(ValueError, match=r"^dtype must be one of float64, float32, bfloat16: got "):
            port.package.Transformer(tiny_config(), dtype)
    for device in ("tpu", "gpu:1:2", 1.5):
        with pytest.raises(ValueError, match=r"^device must be one of cpu, gpu: got "):
            port.package.Transformer(tiny_config(), device=device)
    count = torch.cuda.device_count()
    with pytest.raises(RuntimeError, match=rf"^no cuda:{count} is visible to torch"):
        port.package.Transformer(tiny_config(), device=f"cuda:{count}")


def test_non_transformer_objects_raise_type_error(port):
    encoder = port.package.Encoder(tiny_config())
    for model, kind in ((nn.Linear(2, 2), "Linear"), (encoder, "Encoder"), (None, "NoneType")):
        for call in (
            lambda model=model: port.package.Trainer(model, SETTINGS),
            lambda model=model: port.package.gradients(model, *BATCH),
            lambda model=model: port.package.greedy_search(model, SOURCE),
            lambda model=model: port.package.beam_search(model, SOURCE),
        ):
            with pytest.raises(TypeError, match=rf"a Transformer, or a module that wraps one: got {kind}"):
                call()
    assert isinstance(LoRA(nn.Linear(2, 2)).merged(), nn.Linear)
