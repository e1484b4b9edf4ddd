"""The processes that train one model together: how many there are, which one this is, and how each is told."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from reference_numpy.parallel_plan import Plan

HERE = "127.0.0.1"
VARIABLES = {"torch": ("RANK", "WORLD_SIZE"), "jax": ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES")}


@dataclass(frozen=True)
class Group:
    """The processes of a run.

    Attributes:
        rank: The number of this one; the first, 0, writes and speaks for all.
        size: How many there are.
    """

    rank: int = 0
    size: int = 1


ALONE = Group()


def found(backend: str, environment: Mapping[str, str]) -> Group | None:
    """Return which process of how many this is, if something has started several; None is a process on its own.

    Raises:
        ValueError: A variable is none that a launcher sets.
    """
    rank, size = VARIABLES.get(backend, ("", ""))
    if backend == "jax" and "JAX_COORDINATOR_ADDRESS" in environment and size not in environment:
        rank, size = "SLURM_PROCID", "SLURM_NTASKS"  # JAX asks Slurm for the rest
    try:
        if backend == "tf" and (said := environment.get("TF_CONFIG")):
            return _of_tf_config(json.loads(said))
        return Group(int(environment[rank]), int(environment[size])) if size in environment else None
    except KeyError as error:
        raise ValueError(f"the environment names a group of processes, but lacks {error}") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"the environment names a group of processes that is none: {error}") from error


def taken_from_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what torch is to find in its environment where srun has started the processes.

    Raises:
        ValueError: Nobody has said where the first process is.
    """
    if "WORLD_SIZE" in environment or int(environment.get("SLURM_NTASKS", "1")) == 1:
        return {}
    if not {"SLURM_PROCID", "SLURM_LOCALID"} <= environment.keys():  # salloc or sbatch, without srun
        return {}
    if not {"MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        how = "MASTER_ADDR=$(scontrol show hostnames | head -1) MASTER_PORT=29500"
        raise ValueError(f"under srun, say where the first process is: export {how}")
    names = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
    return {name: environment[slurm] for name, slurm in names.items()}


def number_of_processes(backend: str, plan: Plan, asked: int | None) -> int:
    """Return how many processes of this machine follow a plan; None asks for what is usual.

    Raises:
        ValueError: The framework cannot follow the plan with so many.
    """
    usual = plan.devices if backend == "torch" else 1
    count = asked or usual
    possible = {"numpy": (1,), "torch": (plan.devices,), "tf": (1, plan.devices)}
    if count not in possible.get(backend, (count,)) or plan.devices % count:
        reasons = {
            "numpy": "NumPy simulates a plan in one process",
            "torch": f"PyTorch needs one for each device of {plan}",
            "jax": f"JAX needs the {plan.devices} devices of {plan} to fall into as many equal parts",
            "tf": f"TensorFlow needs one, or one for each device of {plan}",
        }
        raise ValueError(f"--processes must fit the plan: {reasons[backend]}: got {count}")
    return count


def environments(backend: str, plan: Plan, processes: int) -> list[dict[str, str]]:
    """Return what each process of this machine is to find in its environment, before it imports the framework."""
    ports = _free_ports(processes)
    first = f"{HERE}:{ports[0]}"
    found: list[dict[str, str]] = [{} for _ in range(processes)]
    for rank, variables in enumerate(found):
        if backend == "torch":
            variables |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "MASTER_ADDR": HERE, "MASTER_PORT": f"{ports[0]}"}
            variables |= {"WORLD_SIZE": f"{processes}", "LOCAL_WORLD_SIZE": f"{processes}"}
        elif backend == "jax":
            variables["JAX_NUM_CPU_DEVICES"] = f"{plan.devices // processes}"
            if processes > 1:
                variables |= {"JAX_COORDINATOR_ADDRESS": first, "JAX_PROCESS_ID": f"{rank}"}
                variables["JAX_NUM_PROCESSES"] = f"{processes}"
        elif backend == "tf" and processes > 1:
            cluster = {"worker": [f"{HERE}:{port}" for port in ports]}
            variables["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})
    return found


def _free_ports(count: int) -> list[int]:
    """Return ports of this machine that are free now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((HERE, 0))
        return [one.getsockname()[1] for one in sockets]


def _of_tf_config(config: Mapping[str, Mapping[str, object]]) -> Group:
    """Return the group that TF_CONFIG describes: the chief, if there is one, is the first."""
    cluster, task = config["cluster"], config["task"]
    kinds = [kind for kind in ("chief", "worker") if kind in cluster]
    members = [(kind, i) for kind in kinds for i in range(len(cluster[kind]))]  # type: ignore[arg-type]
    return Group(members.index((str(task["type"]), int(str(task["index"])))), len(members))


def of_this_process(backend: str) -> Group | None:
    """Return which process this is; under srun, torch's environment is completed.

    Raises:
        ValueError: The environment contradicts itself.
    """
    if backend == "torch":
        os.environ.update(taken_from_slurm(os.environ))
    return found(backend, os.environ)
