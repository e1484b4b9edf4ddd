"""``parity train --parallel``: the processes of a plan train the same model as one device, and end together."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier

import numpy as np
import pytest
from conftest import assert_near
from test_train import saved_weights
from training_texts import SMALL, losses, resume, train

from reference_numpy import Plan, TrainingConfig
from transformer_parity.apps.text.dates import SHIPPED
from transformer_parity.apps.train import corpora, group
from transformer_parity.apps.train.group import Group
from transformer_parity.apps.train.learner import Learner, Where
from transformer_parity.apps.translate.trained import read_trained
from transformer_parity.cli.main import main
from transformer_parity.transformer.ports.package import LoadedPackage
from transformer_parity.transformer.ports.protocol import Placement

EXACT = ("--dtype", "float64", "--set", "num_heads=4")
IN_PROCESSES = [pytest.param(name, marks=pytest.mark.only(name)) for name in ("torch", "jax", "tf")]
TWO = {"torch": (), "jax": ("--processes", "2"), "tf": ("--processes", "2")}  # options that select two processes
PLANS = {  # plans for each framework, and the number of processes if it can be chosen
    "numpy": [("data=2,fsdp=2,tensor=2", None)],
    "torch": [("data=2", None), ("fsdp=2", None), ("tensor=2", None), ("data=2,fsdp=2", None)],
    "jax": [("data=2", None), ("fsdp=2,tensor=2", None), ("data=2,tensor=2", 2), ("data=2,fsdp=2", 4)],
    "tf": [("data=2", None), ("data=4", None), ("data=4", 4)],
}


@pytest.fixture(autouse=True)
def few_dates(monkeypatch):
    make_few(monkeypatch)


def make_few(monkeypatch):
    """Reduce the number of dates. Other processes receive them from this one."""
    monkeypatch.setattr(corpora, "DATES_TRAINED", 40)
    monkeypatch.setattr(corpora, "DATES_HELD_OUT", 6)


def final(directory):
    return saved_weights(directory / "model.safetensors")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A run on one device without dropout, because each framework draws different masks."""
    directory = tmp_path_factory.mktemp("runs") / "alone"
    with pytest.MonkeyPatch.context() as patch:
        make_few(patch)
        assert train(directory, "--backend", "numpy", "--steps", 6, "--set", "dropout=0", *EXACT) == 0
    return directory


def test_reference_run_with_a_plan_matches_one_device(alone, tmp_path, capfd):
    directory = tmp_path / "run"
    plan = "--parallel", "data=2,tensor=2"
    assert train(directory, "--backend", "numpy", "--steps", 6, "--set", "dropout=0", *EXACT, *plan) == 0
    assert "4 devices (data=2,tensor=2) in 1 process" in capfd.readouterr().err
    assert_near(final(directory), final(alone), 1e-10)
    assert {path.name for path in directory.iterdir()} == {path.name for path in alone.iterdir()}
    assert losses(directory) == pytest.approx(losses(alone), rel=1e-12)


@pytest.mark.extended("plans", "jax", "tf")
@pytest.mark.parametrize("name", IN_PROCESSES)
def test_run_is_resumed_on_other_devices_in_another_framework(name, alone, tmp_path, capfd):
    """The run starts with two processes and is resumed on one device with NumPy."""
    directory = tmp_path / "run"
    where = "--backend", name, "--parallel", "data=2", *TWO[name]
    options = "--steps", 6, "--stop-at", 3, "--set", "save_every=2", "--set", "dropout=0"
    assert train(directory, *where, *options, *EXACT) == 0
    said = capfd.readouterr().err
    assert "2 devices (data=2) in 2 processes" in said
    assert f"parity train --resume {directory} {' '.join(where)}" in said
    assert (directory / "checkpoint-0000003.safetensors").exists()
    assert resume(directory, "--backend", "numpy") == 0
    assert_near(final(directory), final(alone), 1e-10)


@pytest.mark.extended("plans")
@pytest.mark.parametrize(
    ("name", "plan", "processes"),
    [pytest.param(name, *how, marks=pytest.mark.only(name)) for name, plans in PLANS.items() for how in plans],
)
def test_every_plan_gives_the_final_weights_of_one_device(name, plan, processes, alone, tmp_path):
    options = "--backend", name, "--steps", 6, "--set", "dropout=0", *EXACT
    processes = [] if processes is None else ["--processes", processes]
    assert train(tmp_path / "run", *options, "--parallel", plan, *processes) == 0
    assert_near(final(tmp_path / "run"), final(alone), 1e-10)


# --- Translation ---

LINES = ("3 May 2024", "Freitag, 3. Mai 2024", "", "1. März 1999", "12/31/1987", "Jan 2, 2003")


@dataclass
class Summed:
    """Sums the values of processes that are simulated by threads."""

    count: int
    told: dict[int, np.ndarray] = field(default_factory=dict)

    def __post_init__(self):
        self.barrier = Barrier(self.count, timeout=60)

    def by(self, rank):
        def summed(mesh, numbers):
            self.told[rank] = np.asarray(numbers)
            self.barrier.wait()
            found = sum(self.told.values())
            self.barrier.wait()
            return found

        return summed


def learner(rank=0, count=1):
    trained, plan = read_trained(SHIPPED), Plan(data=count) if count > 1 else None
    where = Where(Placement("float32"), plan, Group(rank, count))
    return trained.vocabulary, Learner("numpy", trained.config, trained.weights, TrainingConfig(), 0, where)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_each_process_translates_a_part_and_receives_all_translations(count, monkeypatch):
    vocabulary, alone = learner()
    expected = alone.translate(LINES, vocabulary, 20)
    assert expected == ["2024-05-03", "2024-05-03", "", "1999-03-01", "1987-12-31", "2003-01-02"]
    together, searched, search = Summed(count), [], LoadedPackage.search
    monkeypatch.setattr(LoadedPackage, "search", lambda self, ids, how: searched.extend(ids) or search(self, ids, how))

    def translate(rank):
        _, one = learner(rank, count)
        one.loaded.summed = together.by(rank)
        return one.translate(LINES, vocabulary, 20)

    with ThreadPoolExecutor(count) as threads:
        assert [*threads.map(translate, range(count))] == [expected] * count
    assert len(searched) == 5  # each distinct non-empty line, once


def test_gathered_texts_support_any_script():
    texts = ["", "März", "三月三日", "mars", "🎉"]
    together = Summed(2)

    def gather(rank):
        _, one = learner(rank, 2)
        one.loaded.summed = together.by(rank)
        return one._gathered(texts[rank::2], len(texts))

    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(gather, range(2))] == [texts] * 2


# A run with few dates, in a process that handles signals like the command.
PROGRAM = """
import sys
from transformer_parity.cli.main import main
from transformer_parity.apps.train import corpora
corpora.DATES_TRAINED, corpora.DATES_HELD_OUT = 40, 6
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.only("torch")
@pytest.mark.extended("signals")
def test_torchrun_environment_determines_the_process_group(alone, tmp_path):
    """torchrun starts two processes, but only the first one writes files and prints output."""
    directory = tmp_path / "run"
    options = ["--out", directory, *SMALL, *EXACT, "--backend", "torch", "--steps", 6, "--set", "dropout=0"]
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    command = [*launcher, "train", "--task", "dates", *map(str, options), "--parallel", "fsdp=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_near(final(directory), final(alone), 1e-10)
    assert done.stdout.count("held-out loss") == 1
    assert done.stderr.count("2 devices (fsdp=2) in 2 processes") == 1


# --- Errors, and the source of the process group ---

REFUSED = {
    "no plan": (["--parallel", "data"], "a plan must have the form data=2,fsdp=2,tensor=2: got 'data'"),
    "processes without a plan": (["--processes", "2"], "--processes requires a parallelism plan"),
    "lockstep": (["--parallel", "data=2", "--backend", "numpy,torch"], "--parallel requires exactly one backend"),
    "NumPy in two": (["--parallel", "data=2", "--processes", "2"], "NumPy simulates a plan in one process): got 2"),
    "heads": (["--parallel", "tensor=3"], "num_heads of the encoder must be divisible by tensor=3: got 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_parallel_options_are_rejected(case, tmp_path, capfd):
    options, message = REFUSED[case]
    assert train(tmp_path / "run", "--backend", "numpy", "--steps", 1, *options) == 3
    assert message in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "environment", "expected"),
    [
        ("torch", {}, None),
        ("torch", {"RANK": "1", "WORLD_SIZE": "4"}, Group(1, 4)),
        ("jax", {"JAX_COORDINATOR_ADDRESS": "a:1", "SLURM_PROCID": "2", "SLURM_NTASKS": "8"}, Group(2, 8)),
        ("jax", {"RANK": "1", "WORLD_SIZE": "4"}, None),
        ("tf", {"TF_CONFIG": json.dumps({"cluster": {"chief": ["a:1"], "worker": ["b:1", "c:1"]},
                                         "task": {"type": "worker", "index": 1}})}, Group(2, 3)),
        ("numpy", {"WORLD_SIZE": "4"}, None),
    ],
)  # fmt: skip
def test_process_group_is_read_from_the_environment(name, environment, expected):
    assert group.found(name, environment) == expected


@pytest.mark.parametrize(
    ("name", "environment", "message"),
    [
        ("torch", {"WORLD_SIZE": "2"}, "WORLD_SIZE is set, but 'RANK' is not"),
        ("torch", {"WORLD_SIZE": "2", "RANK": "first"}, "RANK and WORLD_SIZE must be integers: invalid literal"),
        ("tf", {"TF_CONFIG": "{}"}, "TF_CONFIG must contain 'cluster'"),
        ("tf", {"TF_CONFIG": "{"}, "TF_CONFIG is invalid: "),
    ],
)
def test_invalid_process_group_environment_raises_value_error(name, environment, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        group.found(name, environment)


def test_slurm_variables_are_translated_for_torch():
    srun = {"SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
    with pytest.raises(
        ValueError,
        match=r"^MASTER_ADDR and MASTER_PORT must be set if srun starts the processes; run export MASTER_ADDR=",
    ):
        group.taken_from_slurm(srun)
    found = group.taken_from_slurm({**srun, "MASTER_ADDR": "a", "MASTER_PORT": "1"})
    assert found == {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}


# --- A single checkpoint file, and the frameworks' sharded directories ---


@pytest.mark.parametrize("name", IN_PROCESSES)
def test_checkpoint_is_sharded_and_merged_bit_exactly(name, alone, tmp_path, capfd):
    path, directory, again = (
        alone / "checkpoint-0000006.safetensors",
        tmp_path / "parts",
        tmp_path / "again.safetensors",
    )
    assert main(["checkpoint", str(path), "--backend", name, "--out", str(directory)]) == 0
    assert main(["checkpoint", str(directory), "--out", str(again)]) == 0
    assert capfd.readouterr().out.splitlines() == [
        f"{directory}: step 6, as a sharded {name} checkpoint",
        f"{again}: step 6, converted from a sharded {name} checkpoint",
    ]
    assert again.read_bytes() == path.read_bytes()
    for command, message in (
        ([str(directory), "--out", str(again)], f"{again} already exists"),
        ([str(tmp_path / "none"), "--out", str(tmp_path / "x")], "no such file or directory"),
        (
            [str(path), "--backend", name, "--out", str(directory)],
            f"{directory} already exists; choose a different directory",
        ),
        ([str(alone / "model.safetensors"), "--backend", name, "--out", str(tmp_path / "x")], "contains weights"),
    ):
        assert main(["checkpoint", *command]) == 3
        assert message in capfd.readouterr().err
    assert {one.name for one in tmp_path.iterdir()} == {"parts", "again.safetensors"}
