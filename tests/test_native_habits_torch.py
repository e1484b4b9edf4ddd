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


def test_search_supports_a_compiled_position_module(port):
    model, expected = build(port), port.package.greedy_search(build(port), SOURCE)
    model.target_position = torch.compile(model.target_position, backend="eager")
    np.testing.assert_array_equal(port.package.greedy_search(model, SOURCE).ids, expected.ids)
    torch.compiler.reset()


# --- IDs ---


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
