"""A user-defined distributed trainer as a port: it's compared with training on one device, and bugs are identified."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tiers

import reference_numpy as ref
from reference_numpy import Plan
from transformer_parity.cli.main import main
from transformer_parity.engine.findings import AGREES, SKIPPED
from transformer_parity.transformer.check.messages import CaseCompared
from transformer_parity.transformer.distributed import run as processes
from transformer_parity.transformer.distributed.cases import port_probes
from transformer_parity.transformer.distributed.check import DistributedCheck
from transformer_parity.transformer.distributed.compare import DIVIDED, REPLICAS, ROWS, DeviceRun, findings
from transformer_parity.transformer.distributed.signatures import divisions
from transformer_parity.transformer.distributed.worker import Seen, Snapshot, TrainingTask, train, train_port
from transformer_parity.transformer.ports.templates.other_port import MyPort
from transformer_parity.transformer.ports.user import PluginPort

EXAMPLE = Path(__file__).parent.parent / "docs" / "examples" / "ddp_port.py"

# --- The example: DistributedDataParallel with two processes ---

COUNT = "        dist.all_reduce(tokens)\n"
SCALE = "(total / tokens * dist.get_world_size())"
LOSS = "        dist.all_reduce(loss)\n"
CLIP = "torch.nn.utils.get_total_norm(gradient)"
WRAPPED = "self.model = DistributedDataParallel(model)"
BUGS = {  # the message, mapped to the tensor that diverges and to the edits of the example
    "each shard divided by its own token count, then averaged: a mean of means (0.9118, 1.107)": (
        "the whole gradient",
        [(COUNT, f"        own = tokens.clone()\n{COUNT}"), (SCALE, "(total / own)")],
    ),
    "later steps differ, as with this bug: norm includes every replica": (
        "step 2 loss",
        [(CLIP, f"{CLIP}.mul(dist.get_world_size() ** 0.5)")],
    ),
    "averaged over the shards after dividing by the number of tokens (0.5, 0.5)": (
        "the whole gradient",
        [(SCALE, "(total / tokens)")],
    ),
    "8 of 8 rows are read more than once: shards 0 and 1 of data=2 read row 0": (  # all values are correct
        "rows of each process",
        [("ids[dist.get_rank() :: dist.get_world_size()]", "ids")],
    ),
    "train_step of process 0 must read the same rows as gradients": (
        "rows of each process",
        [("self.trainer.train_step(*self._own_rows(batch))", "self.trainer.train_step(*map(torch.tensor, batch))")],
    ),
    "contributes: not reduced": ("the whole gradient", [(WRAPPED, "self.model = model"), (SCALE, "(total / tokens)")]),
    "all gradients: all devices train on the rows of shard 0 (1.824, 0)": (
        "the whole gradient",
        [("ids[dist.get_rank() ::", "ids[0 ::")],
    ),
    "the gradient is correct, but the loss is off by -2.264 "
    "(the contribution of shard 1 instead of the sum over all shards)": (
        "step 1 loss",
        [(LOSS, "")],
    ),
    "later steps differ, as with this bug: learning rate multiplied by the number of devices": (
        "step 2 loss",
        [('["lr"] = ', '["lr"] = dist.get_world_size() * ')],
    ),
}
CHOSEN = """
import importlib
from pathlib import Path
from ddp_port import MyPort

class Chosen(MyPort):
    def __new__(cls):  # the one that the test has named
        return importlib.import_module(Path("chosen").read_text()).MyPort()
"""


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A function that compares an edited copy of the example, running in two processes, with one device."""
    directory = tmp_path_factory.mktemp("ports")
    (directory / "chosen.py").write_text(CHOSEN)
    (directory / "ddp_port.py").write_text(EXAMPLE.read_text())
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.chdir(directory)
        group = stack.enter_context(processes.group("chosen:Chosen", 2, timeout=200))

        @cache
        def found(edits):
            text = EXAMPLE.read_text()
            for old, new in edits:
                assert text.count(old) == 1, old
                text = text.replace(old, new)
            name = f"port_{abs(hash(text))}"
            (directory / f"{name}.py").write_text(text)
            (directory / "chosen").write_text(name)
            check = DistributedCheck(ports=["chosen:Chosen"], asked=[Plan(data=2)])
            messages = check._on_plan(*check.checked_ports(), Plan(data=2), group)
            return [found for message in messages if isinstance(message, CaseCompared) for found in message.findings]

        yield found


@pytest.mark.only("torch")
def test_example_agrees_with_the_reference(compared):
    found = compared(())
    assert {finding.verdict for finding in found} == {AGREES}
    assert {finding.case for finding in found} == {"distributed/data=2/plain", "distributed/data=2/uneven"}
    taps = {finding.tap for finding in found}
    assert {"the whole gradient", "step 20 loss", REPLICAS} <= taps
    assert "step 20 weight encoder.layers.1.feed_forward.inner_proj.kernel" in taps


@pytest.mark.only("torch")
@pytest.mark.parametrize("said", tiers.first_alone(BUGS, "bugs"))
def test_bug_in_the_example_is_identified(compared, said):
    at, edits = BUGS[said]
    first = next(finding for finding in compared(tuple(edits)) if finding.verdict != AGREES)
    assert (first.case, first.tap) == ("distributed/data=2/plain", at)
    assert said in first.detail


# --- A process that runs a port ---


class Objects(MyPort):
    """A port that returns arrays of Python objects as gradients and weights."""

    place = "gradients"

    def distribute(self, plan):
        pass

    def gradients(self, *batch):
        found = super().gradients(*batch)
        change = as_objects if self.place == "gradients" else dict
        return replace(found, parameters=change(found.parameters))

    def export_weights(self):
        return as_objects(super().export_weights())


class Weights(Objects):
    """A port that returns arrays of Python objects only as weights."""

    place = "weights"


def as_objects(arrays):
    return {name: array.astype(object) for name, array in arrays.items()}


@pytest.mark.parametrize("kind", [Objects, Weights])
def test_object_arrays_raise_type_error(kind, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    probe = replace(port_probes()[0], steps=2)
    with pytest.raises(TypeError, match=r"^\S+ must contain numbers: got dtype object$"):
        train_port(PluginPort(f"{__name__}:{kind.__name__}"), TrainingTask(probe, Plan(data=2)))


# --- The command, with ports that require no framework ---

PORTS = """
import os
import reference_numpy as ref
from transformer_parity.plugin import Port

class Reference(Port):
    one_process = True

    def load(self, config, weights, dtype):
        self.model = ref.Transformer.from_weights(config, weights, dtype)

    def forward(self, source_ids, target_ids, tap):
        return self.model(source_ids, target_ids, tap=tap)

    def export_weights(self):
        return self.model.export_weights()

    def distribute(self, plan):
        if plan.fsdp > 1:
            raise ValueError("no parts of parameters")
        self.mesh = plan

    def start_training(self, settings):
        self.trainer = ref.Trainer(self.model, settings, mesh=self.mesh)

    def gradients(self, *batch):
        return self.trainer.gradient(*batch)

    def train_step(self, *batch):
        return float(self.trainer.train_step(*batch).loss)

    def parameters_per_device(self):
        parts = [part for of_parameter in ref.shards(self.trainer).values() for part in of_parameter]
        return [sum(p.array.size for p in parts if p.device == device) for device in range(self.mesh.devices)]

class OneDevice(Reference):
    def parameters_per_device(self):
        return super().parameters_per_device()[:1]

class Uncounted(Reference):
    parameters_per_device = Port.parameters_per_device

class Nothing(Reference):
    one_process = False

    def distribute(self, plan):
        self.mesh = None

    def parameters_per_device(self):
        return [sum(array.size for array in self.export_weights().values())]

class Alone(Port):
    load, forward = Reference.load, Reference.forward

class Apart(Reference):
    one_process = False

    def export_weights(self):
        return {name: array + 1e-13 * int(os.environ["RANK"]) for name, array in super().export_weights().items()}
"""


SHARDED = """
import ddp_port
from torch.distributed.fsdp import fully_shard
from transformer_parity.plugin import Gradients
from transformer_torch.weights import copy_out, parameters

class Sharded(ddp_port.MyPort):
    def start_training(self, settings):
        ddp_port.DistributedDataParallel = lambda model: model
        fully_shard(self.model)
        super().start_training(settings)

    def export_weights(self):
        return {name: copy_out(name, p.full_tensor()) for name, p in parameters(self.model).items()}

    def gradients(self, *batch):
        loss = self.trainer.backward(*self._own_rows(batch))
        found = {name: copy_out(name, p.grad.full_tensor()) for name, p in parameters(self.model).items()}
        return Gradients(loss.item(), found)

    def parameters_per_device(self):
        return [sum(p.to_local().numel() for p in self.model.parameters())]

class Replicated(ddp_port.MyPort):
    def parameters_per_device(self):
        return [sum(p.numel() for p in self.model.parameters())]
"""


@pytest.mark.extended("ports")
@pytest.mark.only("torch")
def test_sharded_parameters_agree_and_full_copies_diverge(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("ddp_port.py").write_text(EXAMPLE.read_text())
    Path("sharded.py").write_text(SHARDED)
    assert failing("sharded:Sharded", "fsdp=2") == {}
    said = "a device must store about 50% of all parameter elements: a device stores 100%"
    assert failing("sharded:Replicated", "fsdp=2") == {"plain sharding": said, "uneven sharding": said}
    said = "the port does not define parameters_per_device()"
    assert failing("ddp_port:MyPort", "fsdp=2") == {"plain ": said, "uneven ": said}


def failing(name, plan):
    """Return the details of the findings that don't agree for a port on a plan, by case and tap."""
    check = DistributedCheck(ports=[name], asked=[Plan.parse(plan)])
    (port,) = check.checked_ports()
    for _ in check.run([port]):
        pass
    wrong = [finding for finding in port.findings if finding.verdict not in (AGREES, SKIPPED)]
    assert {finding.backend for finding in port.findings} == {name.partition(":")[2]}
    return {f"{finding.case.rpartition('/')[2]} {finding.tap}": finding.detail for finding in wrong}


def test_command_reports_verdict_and_cases(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("devices.py").write_text(PORTS)
    command = ["check-distributed", "--json", "result.json", "--port"]
    assert main([*command, "devices:Reference", "--parallel", "data=2"]) == 0
    assert "AGREE  1 port, 2 cases" in capsys.readouterr().out
    result = json.loads(Path("result.json").read_text())["result"]
    assert {row["case"] for row in result["cases"]} == {"distributed/data=2/plain", "distributed/data=2/uneven"}


@pytest.mark.extended("ports")
@pytest.mark.parametrize(
    ("kind", "plan", "at", "said"),
    [
        ("Alone", "data=2", "", "the port does not define gradients()"),
        ("Reference", "fsdp=2", "", "no parts of parameters"),
        ("Apart", "data=2", REPLICAS, "parameters differ between their replicas"),
        ("Nothing", "data=2", ROWS, "process 0 trains independently: its gradient contains no rows of other processes"),
        ("Nothing", "fsdp=2,tensor=2", ROWS, "process 0 trains independently"),
        (
            "Nothing",
            "fsdp=2,tensor=2",
            DIVIDED,
            "a device must store about 27% of all parameter elements: a device stores 100%",
        ),
        (
            "Nothing",
            "tensor=2",
            DIVIDED,
            "a device must store about 53% of all parameter elements: a device stores 100%",
        ),
        ("OneDevice", "data=2", DIVIDED, "must return 2 numbers over all processes: got 1"),
        ("Uncounted", "data=2", "", "the port does not define parameters_per_device()"),
    ],
)
def test_ports_without_distributed_training_fail(monkeypatch, tmp_path, kind, plan, at, said):
    monkeypatch.chdir(tmp_path)
    Path("devices.py").write_text(PORTS)
    found = failing(f"devices:{kind}", plan)
    assert said in found[f"plain {at}"]
    assert said in found[f"uneven {at}"]


# --- Different ways to divide rows ---


@pytest.mark.parametrize("way", range(3))
def test_mean_of_shard_means_is_recognized_for_any_division_of_rows(way):
    """A mean of the shards' means is recognized for any assignment of rows to shards."""
    probe = replace(port_probes()[1], lengths=(7, 6, 5, 4, 3, 2, 1, 1))
    rows = divisions(8, 2, 2)[way]
    assert sorted(rows.ravel()) == [*range(8)]
    model = ref.Transformer.from_weights(probe.config, probe.weights(), "float64")
    expected = train(ref, TrainingTask(replace(probe, config=model.config)))
    of_shards = [[ref.gradients(model, *(ids[own] for ids in probe.batch(0))) for own in part] for part in rows]
    mean = {
        name: np.mean([[own.parameters[name] for own in part] for part in of_shards], (0, 1))
        for name in expected.gradient
    }
    loss = np.mean([[own.loss for own in part] for part in of_shards])
    seen = Seen(losses=[loss, *expected.losses[1:]], gradient=mean, config=model.config, snapshots=expected.snapshots)
    seen.snapshots = {step: Snapshot(one.weights, None) for step, one in expected.snapshots.items()}
    wanted = replace(expected, tokens=[], norms=[], snapshots=seen.snapshots)
    found = findings("mine", DeviceRun(replace(probe, config=model.config), Plan(data=2)), [seen], wanted)
    first = next(finding for finding in found if finding.verdict != AGREES)
    assert "each shard divided by its own token count, then averaged: a mean of means" in first.detail
