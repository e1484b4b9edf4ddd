"""Common uses of PyTorch modules also work with this model."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import tiers
import torch
from conftest import assert_same_bits, random_weights, tiny_config
from native_models import SETTINGS, SOURCE, TARGET, assert_close, build, losses, run_alone

import reference_numpy as ref
import transformer_torch

pytestmark = pytest.mark.only("torch")
TIES = {
    "as built": lambda model: model,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "to": lambda model: model.to(torch.float32).to(torch.float64),
    "to_empty": lambda model: _refilled(model.to_empty(device="cpu")),
}


def _refilled(model):
    """Load the weights into a model whose parameters have no values yet, and return the model."""
    transformer_torch.set_weights(model, random_weights(model.config))
    return model


@pytest.mark.parametrize("tie", ["target_output", "all"])
@pytest.mark.parametrize("way", TIES)
def test_tied_embedding_is_a_single_parameter(port, tie, way):
    model = TIES[way](build(port, tie_embeddings=tie))
    table = model.output_proj.weight
    assert table is model.target_embedding.weight
    assert sum(parameter is table for parameter in model.parameters()) == 1
    assert sum(p.numel() for p in model.parameters()) == ref.count_parameters(model.config)
    stored = ("source" if tie == "all" else "target") + "_embedding.weight"
    assert [name for name, tensor in model.state_dict().items() if tensor.data_ptr() == table.data_ptr()] == [stored]
    model(SOURCE, TARGET).sum().backward()
    assert table.grad.abs().sum() > 0


def test_new_untied_model_has_two_embeddings_and_an_output_matrix(port):
    """The model has its initial values, because loading weights would create new parameters."""
    model = port.package.Transformer(tiny_config(tie_embeddings="none"))
    assert model.output_proj.weight is not model.target_embedding.weight
    assert sum(p.numel() for p in model.parameters()) == ref.count_parameters(model.config)


def test_tied_embedding_survives_the_meta_device(port):
    """Large models are usually created without memory, then allocated, and only then filled with values."""
    with torch.device("meta"):
        model = port.package.Transformer(tiny_config(tie_embeddings="target_output"), "float64")
    model.to_empty(device="cpu")
    assert model.output_proj.weight is model.target_embedding.weight
    port.package.set_weights(model, random_weights(model.config))
    expected = port.package.Transformer.from_weights(model.config, random_weights(model.config), "float64")
    torch.testing.assert_close(model.eval()(SOURCE, TARGET), expected(SOURCE, TARGET), rtol=0, atol=0)


@pytest.mark.parametrize("way", ["as built", "deepcopy", "pickle"])
@pytest.mark.parametrize("tie", ["target_output", "all"])
def test_state_dict_can_be_assigned_to_a_model_on_the_meta_device(port, tie, way):
    """Assigning a state dict preserves ties and positional encodings, which the state dict doesn't contain."""
    expected = build(port, tie_embeddings=tie)
    with torch.device("meta"):
        model = port.package.Transformer(expected.config, "float64")
    model = TIES[way](model)
    torch.nn.ModuleList([model]).load_state_dict(torch.nn.ModuleList([expected]).state_dict(), assign=True)
    assert model.output_proj.weight is model.target_embedding.weight
    assert sum(p.numel() for p in model.parameters()) == ref.count_parameters(model.config)
    expected = build(port, tie_embeddings=tie)  # a separate model, because assigned parameters are shared
    assert losses(port.package.Trainer(model, SETTINGS)) == losses(port.package.Trainer(expected, SETTINGS))
    assert_same_bits(model.export_weights(), expected.export_weights())


# --- Positional encodings: computed and rounded once on the host ---


LENGTHS = (5, 1500)  # the second length exceeds the cached positional encodings


@pytest.fixture(params=["formula", "fast"])
def position(port, request):
    """The class that computes a model's positional encodings."""
    return port.package.SinusoidalPosition if request.param == "formula" else port.package.fast.FastSinusoidalPosition


def encoded(length, dtype="float32"):
    """Return the reference's positional encodings, rounded to a dtype."""
    rows = ref.sinusoidal_encoding(length, 24)
    return torch.from_numpy(rows).to(getattr(torch, dtype))[None]


class Dtypes(torch.utils._python_dispatch.TorchDispatchMode):
    """Collects the dtypes of all results."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.seen = {*getattr(self, "seen", ()), getattr(result, "dtype", None)}
        return result


def test_cached_positional_encodings_are_not_recomputed(port):
    module = port.package.fast.FastSinusoidalPosition(tiny_config())
    with Dtypes() as dtypes:
        result = module(torch.zeros(1, 5, 24))
    assert torch.float64 not in dtypes.seen
    torch.testing.assert_close(result, encoded(5), rtol=0, atol=0)
    assert module.vectors(5).data_ptr() == module.table.data_ptr()


@pytest.mark.parametrize("length", LENGTHS)
def test_positions_are_exact_in_every_dtype(position, length):
    """Positional encodings are exact even after the module was converted to a coarser dtype."""
    module = position(tiny_config()).to(torch.bfloat16).to(torch.float64)
    torch.testing.assert_close(
        module(torch.zeros(1, length, 24).double()), encoded(length, "float64"), rtol=0, atol=2e-12
    )
    for dtype in ("bfloat16", "float32"):
        x = torch.zeros(1, length, 24, dtype=getattr(torch, dtype))
        torch.testing.assert_close(module.to(x.dtype)(x), encoded(length, dtype), rtol=0, atol=0)


def test_positions_are_compiled_and_exported_for_any_length(position):
    module = position(tiny_config())
    compiled = torch.compile(module, backend="eager", fullgraph=True, dynamic=True)
    dynamic = {"x": {1: torch.export.Dim("length")}}
    exported = torch.export.export(module, (torch.zeros(1, 7, 24),), dynamic_shapes=dynamic).module()
    for length in LENGTHS:
        x = torch.zeros(1, length, 24)
        for call in (compiled, exported):
            torch.testing.assert_close(call(x), encoded(length), rtol=0, atol=0)
    torch.compiler.reset()


def test_positions_work_on_meta_and_fake_tensors(position):
    """Positional encodings work on the meta device, which rejects tensors on the host, and in FakeTensorMode."""
    from torch._subclasses import FakeTensorMode

    with torch.device("meta"):
        module = position(tiny_config())
    for length in LENGTHS:
        assert module(torch.zeros(1, length, 24, device="meta")).is_meta
    torch.testing.assert_close(module.to_empty(device="cpu")(torch.zeros(1, 5, 24)), encoded(5), rtol=0, atol=0)
    with FakeTensorMode():
        module = position(tiny_config())
        assert module(torch.zeros(1, 5, 24)).shape == (1, 5, 24)


def test_position_modules_can_be_copied_and_pickled(position):
    module = position(tiny_config())
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(twin(torch.zeros(1, 5, 24)), encoded(5), rtol=0, atol=0)
    assert not module.state_dict()  # there are no parameters or buffers to save


def test_module_repr_shows_its_configuration(port):
    text = str(build(port, "float32", position_offset=2, tie_embeddings="none"))
    for line in (
        "TokenEmbedding(37, 24, multiplier=4.89898)",
        "SinusoidalPosition(24, 'interleaved', 'm', offset=2)",
        "(output_proj): Linear(in_features=24, out_features=41, bias=False)",
        "num_heads=3",
        "activation='relu'",
    ):
        assert line in text
    assert "LearnedPosition(29, 24, offset=0)" in str(build(port, position_encoding="learned"))


# Runs in a separate process, because other tests may have changed the global switches.
UNTOUCHED = """
import threading, torch, transformer_torch as port
from conftest import random_weights, tiny_config
config = tiny_config(num_encoder_layers=1, num_decoder_layers=1)
switches = lambda: (torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision)
torch.backends.cuda.matmul.fp32_precision = "tf32"
torch.backends.mkldnn.matmul.fp32_precision = "bf16"
before = switches()
port.Transformer.from_weights(config, random_weights(config))
assert switches() == before, switches()
assert port.describe()["matmuls"] == "bf16 on a CPU, tf32 on a GPU"
torch.set_float32_matmul_precision("highest")
seen, stop = set(), threading.Event()
def watch():
    while not stop.is_set():
        seen.add(switches())
thread = threading.Thread(target=watch)
thread.start()
threads = torch.get_num_threads()
port.Transformer.from_weights(config, random_weights(config), precision="highest")
stop.set()
thread.join()
assert seen and not any("bf16" in pair for pair in seen), seen
assert switches() == ("ieee", "ieee")
assert torch.get_num_threads() == threads
"""


def test_matmul_precision_is_not_changed_implicitly():
    """Only ``precision`` sets the global switch. Changing it temporarily would affect other threads."""
    run_alone(UNTOUCHED)


LEAN = """
import sys, numpy, transformer_torch as port
from conftest import random_weights, tiny_config
config = tiny_config(num_encoder_layers=1, num_decoder_layers=1)
model = port.Transformer.from_weights(config, random_weights(config))
port.greedy_search(model, numpy.array([[5, 6]]), max_length=3)
assert not {"sympy", "torch._dynamo"} & set(sys.modules)
"""


def test_loading_weights_does_not_import_sympy():
    """Loading weights imports neither sympy nor the compiler that requires it, which saves 0.3 seconds and 35 MiB."""
    run_alone(LEAN)


# --- Unusual arrays ---


def test_arrays_with_any_strides_give_the_same_results(port):
    model, mask = build(port), SOURCE != 0
    expected = model(SOURCE, TARGET, mask)
    for turned in (lambda x: x[:, ::-1].copy()[:, ::-1], lambda x: x[::-1].copy()[::-1], np.asfortranarray):
        found = model(turned(SOURCE), turned(TARGET), turned(mask))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        memory = turned(model.encode(SOURCE, mask).detach().numpy())
        found = model.decode(TARGET, memory, SOURCE, None, mask)  # MKL's order of sums may differ
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    narrow = model(SOURCE.astype(np.uint16)[:, ::-1][:, ::-1], TARGET.astype(">i4"), mask)
    torch.testing.assert_close(narrow, expected, rtol=0, atol=0)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_decode_accepts_read_only_memory(port, dtype):
    """JAX exports read-only arrays, including bfloat16 arrays."""
    model = build(port, dtype)
    tensor = model.encode(SOURCE).detach()
    array = port.to_numpy(tensor.float()).astype(dtype) if dtype == "bfloat16" else tensor.numpy()
    array.flags.writeable = False
    found, expected = (model.decode(TARGET, memory, SOURCE) for memory in (array, tensor))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_default_device_is_respected(port):
    with torch.device("meta"):
        assert build(port).device.type == "meta"


def test_meta_model_returns_shapes(port):
    """The meta device has no values and, like a GPU, rejects tensors on the host."""
    model = build(port).to("meta")
    for source, target in ((SOURCE, TARGET), (torch.tensor(SOURCE, device="meta"), torch.tensor(TARGET))):
        logits = model(source, target, SOURCE != 0)
        assert (logits.device.type, logits.shape) == ("meta", (2, 3, 37))
    cache = model.init_cache(SOURCE, 3, 2)
    logits, cache = model.decode_step(np.ones(4, int), cache)
    cache.reorder(torch.tensor([0, 0, 2, 3], device="meta"))
    assert logits.is_meta
    with pytest.raises(RuntimeError, match="device"):
        cache.self_mask & torch.ones(4, 1, 1, 3, dtype=torch.bool)


def test_fake_tensors_are_supported(port):
    """Tools use fake tensors to infer shapes and memory use.

    Only CPU tensors are tested, because a torch build without CUDA can't index fake GPU tensors.
    """
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        model = port.package.Transformer(tiny_config())
        ids = torch.tensor(SOURCE), torch.tensor(TARGET)
        for source, target in ((SOURCE, TARGET), ids):
            logits = model(source, target, target_mask=TARGET != 0)
            assert logits.shape == (2, 3, 37)
            logits.sum().backward()
        assert model.decode(ids[1], model.encode(ids[0]), ids[0]).shape == (2, 3, 37)
        logits, _ = model.decode_step(ids[1][:, 0], model.init_cache(ids[0], 3))
        assert logits.shape == (2, 37)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch has no batching rule for this kernel
def test_per_sentence_gradients_match_separate_backward_passes(port):
    from torch.func import functional_call, grad, vmap

    model = build(port)
    parameters = dict(model.named_parameters())

    def loss(parameters, source, target):
        return functional_call(model, parameters, (source[None], target[None])).square().sum()

    source, target = torch.tensor(SOURCE), torch.tensor(TARGET)
    found = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, source, target)
    for row in range(2):
        expected = torch.autograd.grad(loss(parameters, source[row], target[row]), list(parameters.values()))
        for name, gradient in zip(parameters, expected, strict=True):
            torch.testing.assert_close(found[name][row], gradient, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # from torch
def test_functional_transforms_of_the_parameters_are_supported(port):
    """The IDs aren't arguments of the function, and a transform doesn't allow reading their memory."""
    from torch.func import functional_call, grad, jvp
    from torch.nn.attention import SDPBackend, sdpa_kernel

    model = build(port)
    parameters, ids = dict(model.named_parameters()), (torch.tensor(SOURCE), torch.tensor(TARGET))

    def loss(parameters):
        return functional_call(model, parameters, ids).square().sum()

    found = grad(loss)(parameters)
    expected = torch.autograd.grad(loss(parameters), list(parameters.values()))
    torch.testing.assert_close([*found.values()], [*expected], rtol=1e-12, atol=1e-12)
    with sdpa_kernel(SDPBackend.MATH):  # the fused CPU kernel supports neither forward-mode nor second derivatives
        _, along = jvp(loss, (parameters,), (found,))
        second = grad(lambda parameters: sum(x.square().sum() for x in grad(loss)(parameters).values()))(parameters)
    torch.testing.assert_close(along, sum(x.square().sum() for x in expected))
    assert all(x.isfinite().all() for x in second.values())


def test_values_of_functional_tensors_are_not_read(port):
    """Functional tensors look like CPU tensors, but their memory contains arbitrary values."""
    model = build(port)
    logits = torch.func.functionalize(model)(torch.tensor(SOURCE), torch.tensor(TARGET))
    torch.testing.assert_close(logits, model(SOURCE, TARGET), rtol=0, atol=1e-12)


IDS = torch.tensor(SOURCE), torch.tensor(TARGET)
SIZES = IDS, (IDS[0][:1, :3], IDS[1][:1, :2]), (IDS[1].repeat(3, 1), IDS[0].repeat(3, 1))


@pytest.mark.parametrize("strict", tiers.first_alone([False, True], "forms"))
def test_exported_program_supports_dynamic_sizes(port, strict):
    model = build(port)
    batch, source, target = (torch.export.Dim(name) for name in ("batch", "source", "target"))
    shapes = ({0: batch, 1: source}, {0: batch, 1: target})
    exported = torch.export.export(model, SIZES[0], dynamic_shapes=shapes, strict=strict).module()
    for given in SIZES:
        assert_close(port.to_numpy(exported(*given)), port.to_numpy(model(*given)))


@pytest.mark.extended("framework idioms", "torch")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # from torch
def test_inductor_compiles_the_model_to_one_graph(port):
    model = build(port)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for given in SIZES:
        assert_close(port.to_numpy(compiled(*given)), port.to_numpy(model(*given)))
    torch.compiler.reset()


@pytest.mark.extended("framework idioms", "torch")
@pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning", "ignore:# The axis name:UserWarning")
def test_onnx_model_supports_dynamic_sizes(port, tmp_path):
    import onnxruntime

    # The exporter would round the square root of d_model, a Python float, to float32.
    model, file = build(port, scale_embedding=False), tmp_path / "model.onnx"
    batch, source, target = (torch.export.Dim(name) for name in ("batch", "source", "target"))
    shapes = ({0: batch, 1: source}, {0: batch, 1: target})
    torch.onnx.export(model, SIZES[0], dynamic_shapes=shapes, dynamo=True, verbose=False).save(file)
    session = onnxruntime.InferenceSession(file)
    names = [entry.name for entry in session.get_inputs()]
    for given in SIZES:
        (logits,) = session.run(None, dict(zip(names, (ids.numpy() for ids in given), strict=True)))
        assert_close(logits, port.to_numpy(model(*given)))
