"""Training on multiple devices in JAX matches the reference and one device for any plan.

The number of devices is fixed when JAX starts, so all tests that need multiple devices run in separate processes.
"""

from __future__ import annotations

import time

import numpy as np
import pytest
from parallel_jax import run, started

from reference_numpy import Plan, TrainingConfig, init_weights, parameter_shapes
from transformer_parity.transformer.distributed.cases import probes

pytestmark = pytest.mark.only("jax")

PLANS = ("data=4", "fsdp=4", "tensor=4", "data=2,fsdp=2,tensor=2")
SMALL = probes()["plain"].config.replace(num_encoder_layers=1, num_decoder_layers=1)


def build(port, config=SMALL):
    return port.package.Transformer.from_weights(config, init_weights(config))


# --- Eight devices in one process ---

EIGHT = """
import jax

probe = shallow(probes()["vocabulary of 37"])
one, many = alone(probe), trainer(probe, "data=2,fsdp=2,tensor=2")
assert_divided(many)
assert_same_gradient(one, many, probe.batch(0))
with Compilations() as found:
    assert_same_steps(one, many, probe, steps=1)
    assert any("_step" in message for message in found), found
    moment = many.optimizer.first_moment["source_embedding.table"]
    found.clear()
    assert_same_steps(one, many, probe, steps=probe.steps - 1)
    assert found == [], found
assert moment.is_deleted()
assert_divided(many)
state = one.export_state()
many.load_state(type(state)(0, 7, state.second_moment, state.first_moment | {
    name: abs(array) for name, array in state.first_moment.items()}))
assert many.export_state().seed == 7
assert_same_bits(many.export_state().first_moment, state.second_moment)
array = many.optimizer.first_moment["source_embedding.table"]
assert array.addressable_shards[0].data.shape == (37, 16), array.sharding
"""


def test_eight_devices_match_the_reference():
    """Training with three kinds of sharding matches the reference, compiles only once, and updates moments in place."""
    run(EIGHT)


DROPOUT = """
import jax
import jax.numpy as jnp
from flax import nnx

# The masks of a micro-batch are those of its first rows, however many rows of padding there are behind them.
for dtype in ("float32", "float64"):
    for rows in (4, 5, 8):
        drawn = nnx.Dropout(0.4, rngs=nnx.Rngs(1))(jnp.ones((rows, 3, 7), dtype))
        np.testing.assert_array_equal(drawn[:4], nnx.Dropout(0.4, rngs=nnx.Rngs(1))(jnp.ones((4, 3, 7), dtype)))

probe = shallow(probes()["dropout"])  # two micro-batches of four rows: of three devices, one has rows of padding alone
one = alone(probe)
assert_same_gradient(one, trainer(probe, "data=3,tensor=2"), probe.batch(0))
without = trainer(shallow(probes()["accumulated"]), backend="numpy")
assert abs(one.gradient(*probe.batch(0)).loss - without.gradient(*probe.batch(0)).loss) > 1e-3
"""
LOCAL = """
probe = shallow(probes()["dropout"])
assert_same_gradient(alone(probe), trainer(probe, "data=3", dropout="local"), probe.batch(0))
"""


@pytest.mark.extended("plans")
def test_global_dropout_matches_one_device():
    run(DROPOUT)


@pytest.mark.extended("plans")
def test_local_dropout_matches_one_device():
    """Each device draws only its part of the masks, which requires no communication."""
    run(LOCAL)


# --- Multiple processes ---

TWO = """
import jax
probe = shallow(probes()["accumulated"])
one, many = alone(probe), trainer(probe, "data=2,fsdp=2")
assert (jax.process_count(), jax.local_device_count(), many.mesh.size) == (2, 2, 4)
assert not many.model.source_embedding.embedding.get_value().is_fully_addressable
assert_same_gradient(one, many, probe.batch(0))
assert_same_bits(many.model.export_weights(), probe.weights())
many.load_state(one.export_state())
assert_same_bits(many.export_state().first_moment, one.export_state().first_moment)
from transformer_jax import shards
assert {len(held) for held in shards(many).values()} == {2}
assert {shard.device // 2 for held in shards(many).values() for shard in held} == {jax.process_index()}
"""


def test_two_processes_match_the_reference():
    run(TWO, processes=2, devices=2)


STEPS = """
probe = probes()["{name}"]
one, many = follows(probe, "{plan}")
from transformer_jax import set_weights
set_weights(many.model, probe.weights())
assert_same_bits(many.model.export_weights(), probe.weights())
"""


@pytest.mark.extended("plans")
@pytest.mark.parametrize("name", ["plain", "dropout"])
def test_two_processes_take_the_same_steps_as_one_device(name):
    run(STEPS.format(name=name, plan="data=2,tensor=2" if name == "plain" else "data=2,fsdp=2"), 2, 2)


SEARCH = """
from flax import nnx
import transformer_jax
from transformer_jax import beam_search, gradients
probe = probes()["plain"]
source, target, labels = probe.batch(0)
one, many = alone(probe), trainer(probe, "data=2,fsdp=2")
np.testing.assert_array_equal(
    beam_search(many.model, source[:3], max_length=5).ids, ref.beam_search(one.model, source[:3], max_length=5).ids
)
logits = nnx.jit(lambda model: model(source, target))(many.model)  # one program, as several processes need it
assert np.abs(transformer_jax.parallel.to_numpy(logits) - one.model(source, target)).max() < 1e-12
assert_close(gradients(many.model, source, target, labels).parameters,
             ref.gradients(one.model, source, target, labels).parameters, GRADIENTS)
"""


@pytest.mark.extended("plans")
@pytest.mark.parametrize("processes", [1, 2])
def test_sharded_model_can_be_called_differentiated_and_searched(processes):
    """A sharded model can be called, differentiated, and searched as usual. Multiple processes require jit."""
    run(SEARCH, processes, 4 // processes)


DEATH = """
import signal
import jax
probe = probes()["plain"]
many = trainer(probe, "data=2,fsdp=2")
for step in range(10**6):
    float(many.train_step(*probe.batch(0)).loss)
    if step == 3 and jax.process_index() == 1:
        print("ends", flush=True)
        {end}
"""


@pytest.mark.extended("plans")
@pytest.mark.parametrize(
    "end", ["os.kill(os.getpid(), signal.SIGKILL)", "os.kill(os.getpid(), signal.SIGTERM)", "raise ValueError('one')"]
)
def test_terminated_process_stops_the_others(end):
    with started(DEATH.format(end=end), 2, 2) as ((leader, _), (other, said)):
        assert other.wait(300) != 0
        said.seek(0)
        assert "ends" in (printed := said.read()), printed
        began = time.monotonic()
        assert leader.wait(60) != 0
        assert time.monotonic() - began < 60


@pytest.mark.extended("plans")
def test_missing_process_raises_deadline_exceeded():
    program = "import transformer_jax\ntransformer_jax.make_mesh(Plan.parse('data=3'))"
    with started(program, 3, 1) as ((first, said), (second, _), (third, _)):
        third.kill()
        assert first.wait(120) != 0
        assert second.wait(120) != 0
        said.seek(0)
        assert "DEADLINE_EXCEEDED" in said.read()


DIFFERENT = """
import jax
probe = probes()["plain"]
weights, batch, seed = probe.weights(), probe.batch(0), 0
from transformer_jax import Trainer, Transformer, make_mesh
mesh = make_mesh(Plan.parse("data=2"))
if jax.process_index() == 1:
    {change}
model = Transformer.from_weights(probe.config, weights, "float64")
try:
    Trainer(model, probe.settings, seed, mesh=mesh).gradient(*batch)
except ValueError as error:
    assert str(error) == "all processes must have the same {what}: process 1 differs", error
else:
    raise AssertionError("trained")
"""


@pytest.mark.extended("plans")
@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("weights", "weights['source_embedding.table'] += 1e-15"),
        ("seed, settings, and batch", "seed = 1"),
        ("seed, settings, and batch", "batch = probe.batch(1)"),
    ],
)
def test_processes_with_different_inputs_are_rejected(what, change):
    run(DIFFERENT.format(what=what, change=change), processes=2, devices=1)


ASYNCHRONOUS = """
import jax
from transformer_jax import make_mesh
sys.excepthook = sys.__excepthook__
jax.config.update("jax_cpu_enable_async_dispatch", True)
jax.config.update("jax_enable_preemption_service", True)
before = dict(jax.config.values)
try:
    make_mesh(Plan.parse("data=2"))
except RuntimeError as error:
    assert "jax.config.update('jax_cpu_enable_async_dispatch', False)" in str(error), error
else:
    raise AssertionError("it may wait permanently")
assert jax.process_count() == 2
assert sys.excepthook is sys.__excepthook__
changed = {name for name, value in jax.config.values.items() if value != before.get(name)}
assert not changed, changed
"""


def test_mesh_does_not_change_process_settings():
    run(ASYNCHRONOUS, processes=2, devices=1)


# --- All plans and cases ---

CASE = """
probe = probes()["{name}"]
for plan in {plans}:
    _, many = follows(probe, plan)
    assert_divided(many)
"""


@pytest.mark.extended("plans")
@pytest.mark.parametrize("name", probes())
def test_every_plan_matches_the_reference_in_every_case(name):
    run(CASE.format(name=name, plans=PLANS), timeout=900)


OWN = """
import jax
from jax.sharding import AxisType, Mesh

probe = probes()["plain"]
one, devices = alone(probe), np.array(jax.devices())
for mesh in (
    Mesh(devices[:4].reshape(2, 2), ("tensor", "fsdp")),
    jax.make_mesh((2, 1), ("data", "fsdp")),  # whose axes are explicit
    Mesh(devices[5:6], ("tensor",)),
):
    many = trainer(probe, mesh)
    assert (many.mesh, many.plan) == (mesh, Plan(**mesh.shape))
    assert_same_gradient(one, many, probe.batch(0))
    assert_divided(many)
try:
    trainer(probe, Mesh(devices, ("tensor",)))
except ValueError as error:
    assert str(error) == "num_heads of the encoder must be divisible by tensor=8: got 4", error
else:
    raise AssertionError("eight parts of four heads")
"""


@pytest.mark.extended("plans")
def test_user_defined_mesh_with_the_axes_of_a_plan_is_accepted():
    run(OWN)


MIXED = """
import dataclasses
import transformer_jax

probe = probes()["dropout"]
settings = dataclasses.replace(probe.settings, mixed_bfloat16=True)
found = []
for plan in (None, "data=2,fsdp=2,tensor=2"):
    mesh = None if plan is None else transformer_jax.make_mesh(Plan.parse(plan))
    model = transformer_jax.Transformer.from_weights(probe.config, probe.weights())
    many = transformer_jax.Trainer(model, settings, mesh=mesh)
    found.append([float(many.train_step(*probe.batch(step)).loss) for step in range(4)])
    assert {array.dtype.name for array in many.model.export_weights().values()} == {"float32"}
np.testing.assert_allclose(*found, rtol=2e-2)
"""


@pytest.mark.extended("plans")
def test_mixed_precision_on_a_mesh_matches_one_device():
    run(MIXED)


COMMUNICATION = """
import re
from transformer_jax.compilation import parameters_of

probe = probes()["dropout"]
many = trainer(probe, "data=2,tensor=2")
batch, random_bits = many._take(*probe.batch(0))
numbers = {"random_bits": random_bits, "learning_rate": 0.1, "corrections": (0.1, 0.1)}
text = many._compiled_step.lower(parameters_of(many.model), many.optimizer, batch, numbers).compile().as_text()
moved = re.findall(r"= \\(?(\\w+)\\[([\\d,]*)\\].* (all-\\w+|reduce-scatter|collective-\\w+)\\(", text)
assert {dtype for dtype, _, _ in moved} == {"f64", "s64"}, moved  # the loss and gradients, and the number of tokens
assert {what for _, _, what in moved} == {"all-reduce"}, moved  # nothing that is divided is ever gathered
"""


@pytest.mark.extended("plans")
def test_dropout_masks_are_drawn_without_communication():
    """The masks for the full batch require no communication, because each device draws its part."""
    run(COMMUNICATION)


# --- Errors with the only available device ---


def test_plan_with_too_few_devices_is_rejected(port):
    with pytest.raises(
        ValueError, match=r"plan data=2,tensor=2 requires exactly 4 devices: got 1; .*jax_num_cpu_devices"
    ):
        port.package.make_mesh(Plan(data=2, tensor=2))


def test_trainer_rejects_invalid_meshes(port):
    import jax

    model, settings = build(port), TrainingConfig()
    with pytest.raises(TypeError, match=r"mesh must be a jax.sharding.Mesh: got Plan"):
        port.package.Trainer(model, settings, mesh=Plan())
    with pytest.raises(ValueError, match="mesh axes must be named data, fsdp, or tensor: got model"):
        port.package.Trainer(model, settings, mesh=jax.make_mesh((1, 1), ("data", "model")))
    with pytest.raises(ValueError, match="dropout must be one of global, local: got 'own'"):
        port.package.Trainer(model, settings, dropout="own")
    assert port.package.make_mesh(Plan()).axis_names == ("data",)


def test_single_device_holds_full_parameters(port):
    trainer = port.package.Trainer(build(port), TrainingConfig())
    held = port.package.shards(trainer)
    assert list(held) == list(parameter_shapes(SMALL))
    for name, array in trainer.model.export_weights().items():
        (shard,) = held[name]
        assert (shard.device, shard.index) == (0, tuple(slice(0, size) for size in array.shape))
        np.testing.assert_array_equal(shard.array, array)


# --- Sharded directories ---

SAVE = """
from transformer_jax.parallel_checkpoint import load_sharded, save_sharded

probe = probes()["vocabulary of 37"]
many = trainer(probe, "{plan}")
if {steps}:
    for step in range({steps}):
        many.train_step(*probe.batch(step))
else:  # nothing is compiled: moments as after a step
    weights = many.model.export_weights()
    second = {{name: abs(array) for name, array in weights.items()}}
    many.load_state(type(many.export_state())(5, probe.seed, weights, second))
try:
    save_sharded({directory!r}, many, {{"position": [1, 2]}}, b"pieces")
except FileExistsError as error:
    assert {exists}, error
else:
    assert not {exists}
    again = trainer(probe, many.mesh)
    assert load_sharded({directory!r}, again) == {{"position": [1, 2]}}
    assert_same_state(again, many, 0)
"""
GO_ON = """
from transformer_jax.parallel_checkpoint import join_sharded, load_sharded, split_sharded

probe, directory = probes()["vocabulary of 37"], {directory!r}
one = trainer(probe, backend="numpy")
for step in range({steps}):
    one.train_step(*probe.batch(step))
whole = join_sharded(directory)
assert (whole.config, whole.settings, whole.progress, whole.vocabulary) == (
    probe.config, probe.settings, {{"position": [1, 2]}}, b"pieces")
ref.save_checkpoint(directory + ".safetensors", whole)
split_sharded(directory + "-2", ref.load_checkpoint(directory + ".safetensors"))
for place, plan in ((directory, "tensor=2"), (directory + "-2", "fsdp=4")):
    many = trainer(probe, plan)
    assert load_sharded(place, many) == whole.progress
    assert many.step == {steps}
    assert_same_state(many, one)
loaded = ref.Transformer.from_weights(whole.config, whole.weights, "float64")
again = ref.Trainer(loaded, whole.settings)
again.load_state(whole.state)
assert_same_steps(one, again, probe, 5)
one = trainer(probe, backend="numpy")
for step in range({steps}):
    one.train_step(*probe.batch(step))
assert_same_steps(one, many, probe, 5)
other = trainer(probes()["plain"], "fsdp=4")
before = other.export_state()
try:
    load_sharded(directory, other)
except ValueError as error:
    assert "must contain source_embedding.table as float64 [40, 32]: got float64 [37, 32]" in str(error), error
else:
    raise AssertionError("a directory of another model")
assert_same_bits(other.export_state().first_moment, before.first_moment)
"""


@pytest.mark.extended("plans")
def test_sharded_directory_loads_bitwise_identically(tmp_path):
    """A directory saved by eight devices is loaded by eight devices and as one checkpoint, bitwise identical."""
    directory = str(tmp_path / "run")
    run(
        SAVE.format(plan="data=2,fsdp=2,tensor=2", steps=0, directory=directory, exists=False)
        + JOIN.format(directory=directory)
    )
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


JOIN = """
from transformer_jax.parallel_checkpoint import join_sharded

assert_divided(again)
whole, state = join_sharded({directory!r}), many.export_state()
assert_same_bits(whole.weights, many.model.export_weights())
assert_same_bits(whole.state.first_moment, state.first_moment)
assert_same_bits(whole.state.second_moment, state.second_moment)
assert (whole.state.step, whole.state.seed) == (5, probe.seed)
"""


@pytest.mark.extended("plans")
def test_sharded_checkpoint_resumes_on_other_devices_and_in_numpy(tmp_path):
    directory = str(tmp_path / "run")
    run(SAVE.format(plan="data=2,fsdp=2", steps=5, directory=directory, exists=False), processes=2, devices=2)
    run(GO_ON.format(directory=directory, steps=5), devices=4)


@pytest.mark.extended("plans")
def test_existing_checkpoint_directory_is_not_overwritten(tmp_path):
    run(SAVE.format(plan="data=2", steps=0, directory=str(tmp_path), exists=True), processes=2, devices=1)
    assert list(tmp_path.iterdir()) == []
