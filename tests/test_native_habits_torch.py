"""PyTorch usage that works with other modules but used to return wrong results without an error here."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import random_weights
from native_models import BATCH, LABELS, NO_DROPOUT, SETTINGS, SOURCE, TARGET, build
from torch import nn

from transformer_torch import SinusoidalPosition

pytestmark = pytest.mark.only("torch")
HALF = dict.fromkeys(NO_DROPOUT, 0.5)


# --- Changing the dtype of parameters ---


def assigned(model):
    """Load a float32 state dict with ``assign=True``, which also changes the model's dtype."""
    model.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()}, assign=True)
    return model


def replaced(model):
    """Replace the data of each parameter, as CLIP and peft do before training."""
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    return model


@pytest.mark.parametrize("change", [assigned, replaced])
def test_positions_stay_exact_after_a_dtype_change(port, change):
    model, expected = change(build(port, "bfloat16")), build(port, "bfloat16").float()
    with torch.no_grad():
        torch.testing.assert_close(model(SOURCE, TARGET), expected(SOURCE, TARGET), rtol=0, atol=0)
        for cache in (model.init_cache(SOURCE, 4), expected.init_cache(SOURCE, 4)):
            cache.positions -= expected.target_position.table[:4]
            assert not cache.positions.any()


def test_positions_are_exact_with_parameters_of_a_functional_call(port):
    parameters = {name: parameter.double() for name, parameter in build(port, "float32").named_parameters()}
    found = torch.func.functional_call(build(port, "float32"), parameters, (SOURCE, TARGET))
    torch.testing.assert_close(found, build(port, "float32").double()(SOURCE, TARGET), rtol=0, atol=1e-12)


# --- Searches and scores ---


@pytest.mark.parametrize("names", [("first", "second"), ("teacher", "student", "third")])
def test_module_that_contains_multiple_models_is_rejected(port, names):
    """Otherwise, only the first model would be searched."""
    models = nn.ModuleDict({name: build(port) for name in names})
    with pytest.raises(TypeError, match=f"got ModuleDict with {len(names)} Transformers$"):
        port.package.greedy_search(models, SOURCE)


def test_search_works_on_a_model_that_contains_another_one(port):
    model, expected = build(port), port.package.greedy_search(build(port), SOURCE)
    model.teacher = build(port).requires_grad_(False)
    np.testing.assert_array_equal(port.package.greedy_search(model, SOURCE).ids, expected.ids)


def test_scores_have_no_dropout(port):
    """Scoring disables dropout, like searches and gradients, and preserves the training modes."""
    model = build(port, dropout=HALF).train()
    model.encoder.eval()
    found, expected = (port.package.score(x, SOURCE, LABELS) for x in (model, build(port)))
    torch.testing.assert_close(found.tokens, expected.tokens, rtol=0, atol=0)
    assert (model.training, model.encoder.training, model.decoder.training) == (True, False, True)


def test_hooks_of_position_modules_fire_in_a_search(port):
    model = build(port)
    model.target_position.register_forward_hook(lambda module, arguments, output: arguments[0])  # skips positions
    with torch.no_grad():
        step, _ = model.decode_step(TARGET, model.init_cache(SOURCE, 4))
        torch.testing.assert_close(step, model(SOURCE, TARGET), rtol=0, atol=1e-12)


class Halved(SinusoidalPosition):
    """A position module that adds half of each positional encoding."""

    def forward(self, x):
        return x + self.vectors(x.shape[1]).to(x) / 2


def test_decode_step_uses_a_subclassed_position_module(port):
    model = build(port)
    model.target_position = Halved(model.config)
    step, _ = model.decode_step(TARGET, model.init_cache(SOURCE, TARGET.shape[1]))
    torch.testing.assert_close(step, model(SOURCE, TARGET), rtol=0, atol=1e-12)


def test_search_rejects_a_replaced_position_module(port):
    model = build(port)
    model.target_position = nn.Identity()
    with pytest.raises(
        ValueError, match="target_position must be a module that adds one vector per position: got Identity"
    ):
        port.package.greedy_search(model, SOURCE)


def scaled(model):
    model.target_position = type("Scaled", (Halved,), {"forward": lambda self, x: Halved.forward(self, 0.3 * x)})(
        model.config
    )


def hooked_after(model):
    model.target_position.register_forward_hook(lambda module, arguments, output: 0.3 * output)


def hooked_before(model):
    model.target_position.register_forward_pre_hook(lambda module, arguments: (0.3 * arguments[0],))


@pytest.mark.parametrize("change", [scaled, hooked_after, hooked_before])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_search_rejects_a_position_module_that_changes_its_input(port, change, dtype):
    """A search adds the vectors without the module."""
    model = build(port, dtype)
    change(model)
    with pytest.raises(ValueError, match=r"target_position must only add one vector .*; change target_embedding"):
        port.package.greedy_search(model, SOURCE)


@pytest.mark.parametrize("rows", [1, 2])
def test_learned_positions_beyond_the_last_one_are_rejected(port, rows):
    config = build(port).config.replace(position_encoding="learned", max_length=3, position_offset=3 - rows)
    with pytest.raises(ValueError, match=f"length must be at most {rows} for this model: got 4"):
        port.package.LearnedPosition(config)(torch.zeros(1, 4, config.d_model))


@pytest.mark.parametrize("change", [lambda ids: ids[:, ::-1], lambda ids: ids.astype(">i8"), np.uint16])
def test_score_accepts_arrays_with_any_strides_and_byte_order(port, change):
    model, ids = build(port), change(LABELS)
    found, expected = (port.package.score(model, SOURCE, x) for x in (ids, torch.tensor(ids.tolist())))
    torch.testing.assert_close(found.tokens, expected.tokens, rtol=0, atol=0)


def test_parameters_of_a_meta_model_can_be_assigned_one_by_one(port):
    expected = build(port, "float32")
    with torch.device("meta"):
        model = port.package.Transformer(expected.config)
    for name, parameter in expected.named_parameters():
        path, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(path), attribute, parameter)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(SOURCE, TARGET), expected(SOURCE, TARGET), rtol=0, atol=0)


@pytest.mark.parametrize("side", ["source", "target"])
def test_embedding_can_be_a_module_without_a_matrix(port, side):
    model = build(port, tie_embeddings="none")
    size, d_model = getattr(model, f"{side}_embedding").weight.shape
    factors = nn.Sequential(nn.Embedding(size, 2), nn.Linear(2, d_model)).double()
    setattr(model, f"{side}_embedding", factors)
    assert model(SOURCE, TARGET).isfinite().all()
    assert port.package.greedy_search(model, SOURCE, max_length=2).ids.shape[1] <= 2


def test_search_supports_a_compiled_position_module(port):
    model, expected = build(port), port.package.greedy_search(build(port), SOURCE)
    model.target_position = torch.compile(model.target_position, backend="eager")
    np.testing.assert_array_equal(port.package.greedy_search(model, SOURCE).ids, expected.ids)
    torch.compiler.reset()


# --- IDs ---


@pytest.mark.parametrize("name", ["padding_mask", "target_padding_mask"])
def test_masks_of_lists_match_masks_of_tensors(port, name):
    expected = getattr(port.package, name)(torch.tensor(TARGET), 0)
    for ids in (TARGET.tolist(), TARGET[:, ::-1].copy()[:, ::-1]):
        assert torch.equal(getattr(port.package, name)(ids, 0), expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_ids_are_rejected(port, layout):
    rows = torch.nested.nested_tensor([torch.tensor([5, 6, 7]), torch.tensor([8])], layout=layout)
    with pytest.raises(TypeError, match="source_ids must be a dense tensor"):
        build(port)(rows, TARGET)


def test_sparse_ids_are_rejected(port):
    with pytest.raises(TypeError, match="target_ids must be a dense tensor"):
        build(port)(SOURCE, torch.tensor(TARGET).to_sparse())


# --- Layers that are added, removed, or replaced ---


def added_layer(package, model):
    model.encoder.layers.append(package.EncoderLayer(model.config, "float64"))


def added_norm(package, model):
    model.encoder.final_norm = nn.LayerNorm(24, dtype=torch.float64)


def removed_layer(package, model):
    model.encoder.layers = model.encoder.layers[:0]


def other_embedding(package, model):
    model.target_embedding = package.TokenEmbedding(37, model.config, "float64")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (added_layer, r"all parameters must have canonical names: got encoder\.layers\.1"),
        (added_norm, r"all parameters must have canonical names: got encoder\.final_norm"),
        (removed_layer, r"the model has no encoder\.layers\.0"),
        (other_embedding, "output_proj must be tied to target_embedding"),
    ],
)
def test_export_rejects_added_layers_of_a_frozen_model(port, change, message):
    model = build(port, tie_embeddings="target_output")
    change(port.package, model)
    model.requires_grad_(False)(SOURCE, TARGET)
    with pytest.raises(ValueError, match=message):
        model.export_weights()


def test_set_weights_that_overflow_leave_the_model_unchanged(port):
    model, before = build(port, "float32"), build(port, "float32").export_weights()
    weights = {name: array.astype(np.float64) + 1.0 for name, array in before.items()}
    weights[[*weights][-1]][:] = 1e300
    with pytest.raises(ValueError, match="overflows float32"):
        port.package.set_weights(model, weights)
    for name, array in model.export_weights().items():
        np.testing.assert_array_equal(array, before[name])


def test_embed_scale_equals_the_multiplier(port):
    embedding = build(port).source_embedding
    embedding.multiplier = 3.0
    assert embedding.embed_scale == 3.0
    with pytest.raises(AttributeError, match="embed_scale"):
        embedding.embed_scale = 1.0


@pytest.mark.parametrize(("tie", "side"), [("all", "source"), ("target_output", "target")])
def test_replaced_tied_embedding_requires_a_new_output_projection(port, tie, side):
    """Otherwise, the output matrix would be neither trained nor saved."""
    package, model = port.package, build(port, tie_embeddings=tie)
    embedding = package.TokenEmbedding(len(model.target_embedding.weight), model.config, "float64")
    setattr(model, f"{side}_embedding", embedding)
    trainer = package.Trainer(model, SETTINGS)
    for refused in (model.state_dict, lambda: trainer.train_step(*BATCH), lambda: package.gradients(model, *BATCH)):
        with pytest.raises(ValueError, match=r"output_proj must be tied to .* replace it with OutputProjection\("):
            refused()
    model.output_proj = package.OutputProjection(model.config, model.target_embedding, "float64")
    again = build(port, tie_embeddings=tie)
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again(SOURCE, TARGET), model(SOURCE, TARGET), rtol=0, atol=0)
    assert np.isfinite(float(package.Trainer(model, SETTINGS).train_step(*BATCH).loss))


def test_separate_target_embedding_of_a_tied_model_requires_a_new_output_projection(port):
    model = build(port, tie_embeddings="all")
    model.target_embedding = port.package.TokenEmbedding(model.config.target_vocab_size, model.config, "float64")
    trainer = port.package.Trainer(model, SETTINGS)
    for refused in (model.state_dict, lambda: trainer.train_step(*BATCH)):
        with pytest.raises(ValueError, match=r"output_proj must be tied to .* replace it with OutputProjection\("):
            refused()
    model.output_proj = port.package.OutputProjection(model.config, model.target_embedding, "float64")
    assert {"source_embedding.weight", "target_embedding.weight"} <= model.state_dict().keys()
    port.package.Trainer(model, SETTINGS).train_step(*BATCH)


def test_added_frozen_layers_have_no_gradients(port):
    model = build(port)
    added_norm(port.package, model)
    model.encoder.final_norm.requires_grad_(False)
    assert port.package.gradients(model, *BATCH).parameters.keys() == random_weights(model.config).keys()


# --- Training ---


def assigned_parameters(model):
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)


def replaced_layer(model):
    model.encoder.layers[0].feed_forward.inner_proj = nn.Linear(24, 40, dtype=torch.float64)


@pytest.mark.parametrize("change", [assigned_parameters, replaced_layer])
@pytest.mark.parametrize("method", ["train_step", "gradient"])
def test_replaced_parameters_require_a_new_trainer(port, change, method):
    """The old trainer wouldn't update the new parameters."""
    model = build(port)
    trainer = port.package.Trainer(model, SETTINGS)
    change(model)
    with pytest.raises(ValueError, match=r"the optimizer must contain .*missing .*weight"):
        getattr(trainer, method)(*BATCH)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*:UserWarning")
def test_training_a_quantized_model_raises_value_error(port):
    """Layers that quantize their inputs block gradients, so the norms before them wouldn't be trained."""
    model = build(port, "float32")
    model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    trainer = port.package.Trainer(model, SETTINGS)
    with pytest.raises(ValueError, match=r"the trainable parameters that do not affect the loss: encoder\.\S+norm"):
        trainer.train_step(SOURCE, TARGET, LABELS)
