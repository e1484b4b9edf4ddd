"""The processes that train one model together: how many there are, and which one this is."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

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
