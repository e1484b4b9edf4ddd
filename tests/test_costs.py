"""The predicted costs of a plan match the counters of each engine and the shards of the NumPy engine."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace

import pytest
import tiers
from native_models import run_alone
from parallel_jax import run

import reference_numpy as ref
from reference_numpy import Plan, parameter_shapes
from transformer_bench.costs import Batch, Collective, collectives, held, sent
from transformer_bench.workload import TrainWork
from transformer_parity.transformer.distributed.cases import LENGTHS, SOURCE_LENGTH, probes
from transformer_spec.parallel_plan import fsdp_axis, tensor_axis

PROBE = probes()["plain"]
SIZES = Batch(len(LENGTHS), SOURCE_LENGTH, max(LENGTHS))
NUMBERS = ref.count_parameters(PROBE.config)
SHAPES = parameter_shapes(PROBE.config)
TABLE = "source_embedding.table"


def predicted(plan, probe=PROBE):
    """Return the predicted number of transferred values for each kind of collective."""
    found = Counter()
    for each in collectives(Plan.parse(plan), probe.config, SIZES):
        found[each.kind] += each.numbers
    return found


# --- Arithmetic. ---


@pytest.mark.parametrize(
    ("kind", "devices", "expected"),
    [("all-reduce", 4, 150.0), ("all-gather", 4, 75.0), ("reduce-scatter", 4, 75.0), ("all-reduce", 1, 0.0)],
)
def test_ring_collective_sends_the_expected_number_of_values(kind, devices, expected):
    assert Collective(kind, "gradient", "data", devices, 100).sent == expected


def test_fsdp_sends_50_percent_more_than_data_parallelism():
    costs = {plan: sent(Plan.parse(plan), PROBE.config, SIZES) for plan in ("data=2", "fsdp=2", "data=2,fsdp=2")}
    assert costs["data=2"] == {"data": 4 * NUMBERS, "fsdp": 0, "tensor": 0}
    assert costs["fsdp=2"] == {"data": 0, "fsdp": 6 * NUMBERS, "tensor": 0}
    assert costs["data=2,fsdp=2"] == {"data": 2 * NUMBERS, "fsdp": 6 * NUMBERS, "tensor": 0}
    assert sum(sent(Plan(), PROBE.config, SIZES).values()) == 0
    assert collectives(Plan(), PROBE.config, SIZES) == []


@pytest.mark.parametrize("plan", ["data=2", "fsdp=2", "tensor=2", "fsdp=4,tensor=2", "data=2,fsdp=2,tensor=2"])
def test_device_memory_matches_its_shards(plan):
    mesh = Plan.parse(plan)
    model = ref.Transformer.from_weights(PROBE.config, PROBE.weights(), "float32")
    parts = ref.shards(ref.Trainer(model, PROBE.settings, mesh=mesh))
    costs = held(mesh, PROBE.config, SIZES)
    for device in range(mesh.devices):
        own = sum(shard.array.nbytes for held in parts.values() for shard in held if shard.device == device)
        assert (costs["parameters"], costs["gradient"], costs["moments"]) == (own, own, 2 * own)


def test_operand_sizes_match_the_matmuls():
    """Each operand is included once, except for attention weights.

    The query, key, and value projections share one input, and all cross-attentions share the encoder memory.
    """
    work = TrainWork("tiny", batch=4, source=6, target=5)
    forward = list(super(TrainWork, work).matmuls())
    seen = {}
    for matmul in forward:
        layer, _, last = matmul.operand.rpartition(".")
        if last == "value":
            seen[matmul.operand] = math.prod(matmul.right)
        elif last == "key":
            seen[matmul.operand] = math.prod(matmul.right)
            seen[f"{layer} query"] = math.prod(matmul.left)
        else:
            shares = last == "kernel" and layer.endswith(("key_proj", "value_proj"))
            name = "memory" if "cross_attention" in layer else layer.removesuffix("key_proj").removesuffix("value_proj")
            seen[f"input of {name}" if shares else f"input of {layer.removesuffix('query_proj')}"] = math.prod(
                matmul.left
            )
    logits = work.batch * work.target * work.config.target_vocab_size
    sizes = Batch(work.batch, work.source, work.target)
    assert held(Plan(), work.config, sizes)["activations"] == 4 * (sum(seen.values()) + logits)
    halved = held(Plan(data=2), work.config, sizes)["activations"]
    assert halved == held(Plan(fsdp=2), work.config, sizes)["activations"] == 2 * (sum(seen.values()) + logits)
    # With tensor=2, each device still computes all rows.
    assert halved < held(Plan(tensor=2), work.config, sizes)["activations"] < 2 * halved


# --- Each engine's own counter. ---


def counted_by_gloo(events):
    """Return the number of values for each kind of collective, and the number of small all-reduces by size."""
    found, small = Counter(), Counter()
    for name, shapes in events:
        if name == "gloo:all_reduce":
            (shape,) = shapes
            if (len(shape) == 1 and shape[0] <= len(SHAPES)) or not shape:
                small[math.prod(shape)] += 1
            else:
                found["all-reduce"] += math.prod(shape)
        elif name == "c10d::_allgather_base_":
            found["all-gather"] += math.prod(shapes[0])
        elif name == "c10d::_reduce_scatter_base_":
            found["reduce-scatter"] += math.prod(shapes[1])
            found["all-reduce"] -= math.prod(shapes[1])  # gloo implements a reduce-scatter as an all-reduce
    return +found, small


def saved_by_torch(mesh):
    """Return the values that PyTorch doesn't send, because key and value projections share one sum of gradients."""
    config = PROBE.config
    source = (config.num_encoder_layers + config.num_decoder_layers) * SIZES.source
    target = config.num_decoder_layers * SIZES.target
    return Counter({"all-reduce": config.d_model * SIZES.rows * (source + target)} if mesh.tensor > 1 else {})


def assert_torch_sends(directory, plans):
    import parallel_torch

    job = "sends", {"plans": plans, "probe": "plain"}
    for (process,) in parallel_torch.run(directory, Plan.parse(plans[0]).devices, [job]):
        for plan in plans:
            counted, small = counted_by_gloo(process[plan])
            mesh = Plan.parse(plan)
            assert counted == predicted(plan) - saved_by_torch(mesh), plan
            kernels = {name: f"{name.rpartition('.')[0]}.kernel" for name in SHAPES}
            in_tensor = [name for name in SHAPES if mesh.tensor > 1 and tensor_axis(kernels[name]) is not None]
            divided = len(SHAPES if mesh.fsdp > 1 else in_tensor)
            assert small.pop(1) == 2  # the loss, summed along the data and fsdp axes
            assert {*small} == ({divided} if divided else set())  # one norm per parameter


@pytest.mark.extended("plans")
def test_pytorch_traffic_matches_the_prediction(tmp_path):
    assert_torch_sends(tmp_path, ["data=2", "fsdp=2", "tensor=2"])


@pytest.mark.extended("plans")
@pytest.mark.parametrize("plan", ["data=4", "data=2,fsdp=2"])
def test_traffic_of_four_pytorch_processes_matches_the_prediction(tmp_path, plan):
    assert_torch_sends(tmp_path, [plan])


def counted_by_xla(text):
    """Return the number of values for each kind of collective in a compiled program, excluding scalars."""
    found = {}
    pattern = r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
    for types, kind in re.findall(pattern, text):
        shapes = [tuple(map(int, sizes.split(","))) for sizes in re.findall(r"f64\[([\d,]+)\]", types)]
        found.setdefault(kind, []).extend(shapes)
    return {kind: sum(map(math.prod, shapes)) for kind, shapes in found.items() if shapes}


def compiled_step(plan):
    """Return the text of the program that JAX compiles for a training step."""
    from parallel_jax import trainer

    many = trainer(PROBE, plan)
    step, texts = many._compiled_step, []

    def kept(*arguments):
        texts.append(step.lower(*arguments).compile().as_text())
        return step(*arguments)

    many._compiled_step = kept
    many.train_step(*PROBE.batch(0))
    return texts[0]


def jax_sends(plan):
    """Check the number of values that the program compiled by XLA transfers.

    XLA gathers each parameter once and keeps the result. On a CPU, it sums the full gradient, and each device then
    takes its shard. If the plan also has a ``data`` axis, one sum covers both axes. A tied embedding matrix is summed
    once for each of its three uses.
    """
    mesh, counted = Plan.parse(plan), counted_by_xla(compiled_step(plan))
    if mesh.tensor > 1:
        assert counted == predicted(plan), counted
        return
    uses = 2 * math.prod(SHAPES[TABLE])
    gathered = sum(math.prod(shape) for name, shape in SHAPES.items() if fsdp_axis(name, shape, 2) is not None)
    expected = {"all-reduce": NUMBERS + uses}
    assert counted == (expected | {"all-gather": gathered} if mesh.fsdp > 1 else expected), counted
    once = predicted(plan)
    assert once["all-reduce"] == (NUMBERS // mesh.fsdp if mesh.data > 1 else 0)
    assert once["all-gather"] == (2 * NUMBERS if mesh.fsdp > 1 else 0)


@pytest.mark.parametrize("plan", tiers.first_alone(["tensor=2", "fsdp=2", "data=2", "data=2,fsdp=2"], "plans"))
def test_jax_traffic_matches_the_prediction(plan):
    run(f"import test_costs; test_costs.jax_sends({plan!r})", devices=4)


def tf_sends():
    """Check that TensorFlow sums the loss and all gradients in one tensor; the host sums integers."""
    import test_parallel_tf

    import transformer_tf

    mesh = transformer_tf.make_mesh(Plan(data=2), "cpu")
    many = test_parallel_tf.trainer(transformer_tf, replace(PROBE, steps=1), mesh)
    many.train_step(*PROBE.batch(0))
    (step,) = many._traced.values()
    sums = [op for op in step.get_concrete_function().graph.get_operations() if "Collective" in op.type]
    assert [op.type for op in sums] == ["CollectiveReduceV2"] * 2  # one per device
    sizes = Counter([1, *map(math.prod, SHAPES.values())])  # the loss, and the gradient of each parameter
    assert sizes.total() == 1 + len(SHAPES)
    assert sum(size * count for size, count in sizes.items()) == 1 + predicted("data=2")["all-reduce"]
    for op in sums:
        *parts, _ = op.inputs[0].op.inputs  # the inputs of the concatenation, without its axis
        known = Counter(part.op.inputs[0].shape.num_elements() for part in parts)
        unknown = known.pop(None, 0)  # unknown until the graph runs
        assert known <= sizes
        assert unknown == (sizes - known).total()  # one for each remaining size
        assert known


@pytest.mark.extended("plans")
def test_tensorflow_traffic_matches_the_prediction():
    run_alone("import test_costs as t; t.tf_sends()")
