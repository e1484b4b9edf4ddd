"""Jobs for the processes in test_parallel_torch.py: every process calls the function with its own rank."""

from __future__ import annotations

import os
import pickle
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import transformer_torch
from reference_numpy import Checkpoint, Plan, TrainingConfig, load_checkpoint, save_checkpoint
from transformer_parity.transformer.distributed.cases import probes
from transformer_torch.parallel_checkpoint import load_sharded, save_sharded
from transformer_torch.weights import copy_out, parameters


def run(directory: Path, world: int, jobs: list[tuple[str, dict[str, Any]]], seconds: float = 200) -> list[list[Any]]:
    """Let processes run a list of jobs, and return what each process returned for each job.

    If one process fails, all processes are killed, and the error is raised here.
    """
    store = meeting_place()
    context = processes.spawn(_process, (world, store.port, directory, jobs), nprocs=world, join=False)
    ends = time.monotonic() + seconds
    try:
        while not context.join(timeout=1.0, grace_period=1.0):
            assert time.monotonic() < ends, f"the processes have not ended in {seconds:g} s"
    finally:
        for process in context.processes:
            process.kill()
    return [pickle.loads((directory / f"{rank}.pickle").read_bytes()) for rank in range(world)]


def ends(
    directory: Path, world: int, ranks: list[int], job: tuple[str, dict[str, Any]], seconds: float
) -> dict[int, Any]:
    """Run a job in some processes of a group. Return each process's result, or its exit status if it returned none.

    Processes are killed only after the timeout.
    """
    store, spawn = meeting_place(), processes.get_context("spawn")
    started = [spawn.Process(target=_process, args=(rank, world, store.port, directory, [job])) for rank in ranks]
    over = time.monotonic() + seconds
    for process in started:
        process.start()
    for process in started:
        process.join(max(over - time.monotonic(), 0.0))
    for process in started:
        process.kill()
    returned = {rank: directory / f"{rank}.pickle" for rank in ranks}
    return {
        rank: pickle.loads(returned[rank].read_bytes())[0] if returned[rank].exists() else process.exitcode
        for rank, process in zip(ranks, started, strict=True)
    }


def meeting_place() -> dist.TCPStore:
    """Return a store through which processes find each other, like torchrun's, on a port that the system chooses."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """Return the environment variables that torchrun sets for a process."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
    switches = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "OMP_NUM_THREADS": "1"}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}, **switches}


def _process(rank: int, world: int, port: int, directory: Path, jobs: list[tuple[str, dict[str, Any]]]) -> None:
    torch.set_num_threads(1)
    os.environ |= environment(rank, world, port)
    found = [globals()[name](rank, **arguments) for name, arguments in jobs]
    (directory / f"{rank}.pickle").write_bytes(pickle.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


def model_of(probe: Any, dtype: str = "float64") -> transformer_torch.Transformer:
    """Return a fresh model."""
    return transformer_torch.Transformer.from_weights(probe.config, probe.weights(), dtype)


def trainer_of(probe: Any, dtype: str = "float64", **arguments: Any) -> transformer_torch.Trainer:
    """Return a trainer of a fresh model."""
    settings = arguments.pop("settings", probe.settings)
    return transformer_torch.Trainer(model_of(probe, dtype), settings, probe.seed, **arguments)


def observed(trainer: Any, probe: Any, steps: int) -> dict[str, Any]:
    """Return everything that a trainer computes: a gradient, steps, an evaluation, weights, and moments."""
    gradient = trainer.gradient(*probe.batch(0))
    results = [trainer.train_step(*probe.batch(trainer.step)) for _ in range(steps)]
    state = trainer.export_state()
    return {
        "loss": gradient.loss,
        "gradient": gradient.parameters,
        "steps": [[float(x) for x in (r.loss, r.tokens, r.gradient_norm)] for r in results],
        "evaluated": [float(x) for x in trainer.evaluate(*probe.batch(0))],
        "weights": trainer.model.export_weights(),
        "first moment": state.first_moment,
        "second moment": state.second_moment,
    }


def train(rank: int, plan: str, probe: str, steps: int, **arguments: Any) -> dict[str, Any]:
    """Train on the devices of a plan."""
    case = probes()[probe]
    trainer = trainer_of(case, mesh=transformer_torch.make_mesh(Plan.parse(plan)), **arguments)
    found = observed(trainer, case, steps)
    return {**found, "shards": transformer_torch.shards(trainer), "engine": type(trainer.shard.module).__name__}


def train_in(rank: int, plan: str, mixed: bool) -> dict[str, Any]:
    """Train on a plan in float32 or mixed bfloat16, with gradients accumulated over two micro-batches."""
    case = probes()["plain"]
    changes = {"mixed_bfloat16": mixed, "accumulation_steps": 2, "activation_checkpointing": True}
    settings = TrainingConfig(**{**case.settings.to_dict(), **changes})
    mesh = transformer_torch.make_mesh(Plan.parse(plan))
    return observed(trainer_of(case, "float32", settings=settings, mesh=mesh), case, 3)


def train_on_a_mesh_of_the_user(rank: int, axes: dict[str, int], probe: str, steps: int) -> dict[str, Any]:
    """Train on a user-defined mesh with axes in any order. Only the first process has the right initial weights."""
    case = probes()[probe]
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    model = model_of(case)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank)
    return observed(transformer_torch.Trainer(model, case.settings, case.seed, mesh=mesh), case, steps)


def save(rank: int, directory: Path, plan: str, probe: str, steps: int) -> str:
    """Train on a plan, and save a sharded directory and a file. Return the error for an existing directory."""
    case = probes()[probe]
    trainer = trainer_of(case, mesh=transformer_torch.make_mesh(Plan.parse(plan)))
    observed(trainer, case, steps)
    save_sharded(directory, trainer, {"position": [3, 1]}, b"vocabulary")
    with pytest.raises(FileExistsError) as refused:
        save_sharded(directory, trainer)
    weights, state = trainer.model.export_weights(), trainer.export_state()
    if rank == 0:
        path = directory.with_suffix(".safetensors")
        save_checkpoint(path, Checkpoint(case.config, case.settings, weights, state, {"position": [3, 1]}))
    dist.barrier()
    return str(refused.value)


def go_on(rank: int, path: Path, plan: str, probe: str, steps: int) -> dict[str, Any]:
    """Resume training on a plan from a directory or from a file."""
    case = probes()[probe]
    trainer = trainer_of(case, mesh=transformer_torch.make_mesh(Plan.parse(plan)))
    if path.is_dir():
        progress = load_sharded(path, trainer)
    else:
        checkpoint = load_checkpoint(path)
        transformer_torch.set_weights(trainer.model, checkpoint.weights)
        trainer.load_state(checkpoint.state)
        progress = checkpoint.progress
    return {**observed(trainer, case, steps), "progress": progress}


REFUSED = {
    "search": "ValueError: the model must not be sharded over a mesh; to search, load its export_weights() into a "
    "model on one device",
    "gradients": "ValueError: the model must not be sharded over a mesh; call Trainer.gradient instead",
    "again": "ValueError: the model must not already be wrapped or sharded: got FSDPTransformer",
    "wrapped": "ValueError: the model must not already be wrapped or sharded: got Sequential",
    "frozen": "ValueError: the set of frozen parameters of a sharded model must not change; create a new Trainer",
    "plan": "ValueError: plan data=3 requires exactly 3 devices: got 2; "
    "start one process per device, for example with torchrun --nproc-per-node",
    "axis": "ValueError: mesh axes must be named data, fsdp, or tensor: got x",
    "no names": "ValueError: mesh axes must be named data, fsdp, or tensor: got (without a name)",
    "type": "TypeError: mesh must be a DeviceMesh: got Plan",
    "dropout": "ValueError: dropout must be one of global, local: got 'none'",
    "seed": "ValueError: all processes must have the same seed, settings, dropout, and model: process 1 differs",
    "batch": "ValueError: all processes must have the same batch: process 1 differs",
}


def refused(rank: int, plan: str, attempts: list[str]) -> dict[str, str]:
    """Return the error message for each unsupported use of a trainer on a plan."""
    case, mesh = probes()["plain"], transformer_torch.make_mesh(Plan.parse(plan))
    trainer = trainer_of(case, mesh=mesh)
    ways = {
        "search": lambda: transformer_torch.greedy_search(trainer.model, case.batch(0)[0]),
        "gradients": lambda: transformer_torch.gradients(trainer.model, *case.batch(0)),
        "again": lambda: transformer_torch.Trainer(trainer.model, case.settings, mesh=mesh),
        "wrapped": lambda: transformer_torch.Trainer(torch.nn.Sequential(trainer.model), case.settings, mesh=mesh),
        "frozen": lambda: (trainer.model.encoder.requires_grad_(False), trainer.train_step(*case.batch(0))),
        "plan": lambda: transformer_torch.make_mesh(Plan(data=3)),
        "axis": lambda: trainer_of(case, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("x",))),
        "no names": lambda: trainer_of(case, mesh=init_device_mesh("cpu", (dist.get_world_size(),))),
        "type": lambda: trainer_of(case, mesh=Plan()),
        "dropout": lambda: trainer_of(case, mesh=mesh, dropout="none"),
        "seed": lambda: transformer_torch.Trainer(model_of(case), case.settings, rank, mesh=mesh),
        "batch": lambda: trainer_of(case, mesh=mesh).train_step(*case.batch(rank)),
    }
    said = {}
    for name in attempts:
        try:
            ways[name]()
        except (TypeError, ValueError) as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def other_dropout(rank: int, plan: str) -> dict[str, float]:
    """Return the loss of a step for each kind of dropout."""
    case, mesh = probes()["dropout"], transformer_torch.make_mesh(Plan.parse(plan))
    kinds = {"global": "global", "local": "local", "local again": "local"}
    return {
        name: trainer_of(case, mesh=mesh, dropout=kind).gradient(*case.batch(0)).loss for name, kind in kinds.items()
    }


def join(rank: int, seconds: float) -> str:
    """Wait for the other processes with a custom timeout. Return the error message if they don't join."""
    transformer_torch.parallel.JOINING = timedelta(seconds=seconds)
    with pytest.raises(RuntimeError) as refused:
        transformer_torch.make_mesh(Plan(data=2))
    return str(refused.value)


def die(rank: int, plan: str) -> str:
    """Take a step, then kill the last process. Return the error that the other processes raise in the next steps."""
    case = probes()["plain"]
    trainer = trainer_of(case, mesh=transformer_torch.make_mesh(Plan.parse(plan)))
    trainer.train_step(*case.batch(0))
    if rank == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for step in range(1, 100):
            trainer.train_step(*case.batch(step))
    except RuntimeError as error:
        return f"{type(error).__name__} {error}"
    return "nothing"


def their_own_copies(rank: int) -> dict[str, Any]:
    """Train with ``DistributedDataParallel`` on different rows per process, with our trainer and a custom loop."""
    transformer_torch.make_mesh(Plan(data=2))
    case, found = probes()["plain"], {}
    own = [ids[rank::2] for ids in case.batch(0)]
    model = model_of(case)
    wrapped = DistributedDataParallel(model)
    source, target, labels = map(torch.from_numpy, own)
    total, tokens = transformer_torch.cross_entropy(wrapped(source, target), labels, case.config)
    (total / tokens).backward()
    found["loop"] = {name: copy_out(name, parameter.grad) for name, parameter in parameters(model).items()}
    trainer = transformer_torch.Trainer(wrapped, case.settings)
    found["trainer"] = trainer.gradient(*own).parameters
    trainer.train_step(*own)
    return {**found, "weights": model.export_weights()}


def search(rank: int, plan: str) -> Any:
    """Return the results of a search with a model that is being trained on a plan and with a copy of that model."""
    case = probes()["plain"]
    trainer = trainer_of(case, mesh=transformer_torch.make_mesh(Plan.parse(plan)))
    trainer.train_step(*case.batch(0))
    own = transformer_torch.Transformer.from_weights(case.config, trainer.model.export_weights(), "float64")
    return [transformer_torch.beam_search(model, case.batch(1)[0], 3) for model in (trainer.model, own)]


class Reductions(TorchDispatchMode):
    """Counts the all-reduce operations between processes."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops._c10d_functional.all_reduce.default
        return function(*args, **(kwargs or {}))


def reductions(rank: int) -> int:
    """Return the number of all-reduce operations in a step on a tensor-parallel plan."""
    case = probes()["plain"]
    trainer = trainer_of(case, mesh=transformer_torch.make_mesh(Plan(tensor=dist.get_world_size())))
    with Reductions() as found:
        trainer.train_step(*case.batch(0))
    return found.count


def loss_of_torch(rank: int) -> float:
    """Return the relative error of torch's ``loss_parallel`` in the gradient of a handwritten smoothed loss."""
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import loss_parallel

    mesh = transformer_torch.make_mesh(Plan(tensor=dist.get_world_size()))
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(6, 8)))

    def gradient(x):
        x.requires_grad_()
        log_probabilities = x.log_softmax(-1)
        (-log_probabilities.sum()).backward()
        return x.grad

    expected = gradient(logits.clone())
    with loss_parallel():
        found = gradient(distribute_tensor(logits, mesh["tensor"], [Shard(1)]))
    return float((found.full_tensor() - expected).abs().max() / expected.abs().max())


def sends(rank: int, plans: list[str], probe: str) -> dict[str, list[tuple[str, Any]]]:
    """Return the collectives that gloo runs in the third step on each plan, with the shapes of their arrays.

    All plans share one profile, because the processes deadlock if one process profiles twice.
    """
    case = probes()[probe]
    trainers = {plan: trainer_of(case, mesh=transformer_torch.make_mesh(Plan.parse(plan))) for plan in plans}
    for trainer in trainers.values():
        for step in range(2):
            trainer.train_step(*case.batch(step))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        for plan, trainer in trainers.items():
            with torch.profiler.record_function(plan):
                trainer.train_step(*case.batch(2))
    events = profile.events()
    times = {event.name: event.time_range for event in events if event.name in plans}
    return {
        plan: [(event.name, event.input_shapes) for event in events if time.start <= event.time_range.start <= time.end]
        for plan, time in times.items()
    }
