"""The group of processes that train one model together, and the rank of this process in the group."""

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
        rank: Rank of this process. Only the process with rank 0 writes files and prints messages.
        size: Number of processes.
    """

    rank: int = 0
    size: int = 1


ALONE = Group()


def found(backend: str, environment: Mapping[str, str]) -> Group | None:
    """Return this process's group based on the launcher's environment variables, or None if there is no launcher.

    Raises:
        ValueError: If an environment variable is missing or has an invalid value.
    """
    rank, size = VARIABLES.get(backend, ("", ""))
    if backend == "jax" and "JAX_COORDINATOR_ADDRESS" in environment and size not in environment:
        rank, size = "SLURM_PROCID", "SLURM_NTASKS"  # JAX also reads its other settings from Slurm's variables
    try:
        if backend == "tf" and (said := environment.get("TF_CONFIG")):
            return _of_tf_config(json.loads(said))
        return Group(int(environment[rank]), int(environment[size])) if size in environment else None
    except KeyError as error:
        missing = f"TF_CONFIG must contain {error}" if backend == "tf" else f"{size} is set, but {error} is not"
        raise ValueError(missing) from error
    except (TypeError, ValueError) as error:
        invalid = "TF_CONFIG is invalid" if backend == "tf" else f"{rank} and {size} must be integers"
        raise ValueError(f"{invalid}: {error}") from error


def taken_from_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that PyTorch requires, based on Slurm's environment variables.

    The result is empty if this process was not started by ``srun`` or is the only process, or if PyTorch's variables
    are already set.

    Raises:
        ValueError: If no environment variable specifies the address of the first process.
    """
    if "WORLD_SIZE" in environment or int(environment.get("SLURM_NTASKS", "1")) == 1:
        return {}
    if not {"SLURM_PROCID", "SLURM_LOCALID"} <= environment.keys():  # started by salloc or sbatch, but not by srun
        return {}
    if not {"MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        how = "MASTER_ADDR=$(scontrol show hostnames | head -1) MASTER_PORT=29500"
        raise ValueError(f"MASTER_ADDR and MASTER_PORT must be set if srun starts the processes; run export {how}")
    names = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
    return {name: environment[slurm] for name, slurm in names.items()}


def _of_tf_config(config: Mapping[str, Mapping[str, object]]) -> Group:
    """Return the group that TF_CONFIG describes. The chief, if any, has rank 0."""
    cluster, task = config["cluster"], config["task"]
    kinds = [kind for kind in ("chief", "worker") if kind in cluster]
    members = [(kind, i) for kind in kinds for i in range(len(cluster[kind]))]  # type: ignore[arg-type]
    return Group(members.index((str(task["type"]), int(str(task["index"])))), len(members))


def of_this_process(backend: str) -> Group | None:
    """Return this process's group, or None if there is no launcher.

    If ``srun`` started this process, the function also sets the environment variables that PyTorch requires.

    Raises:
        ValueError: If the environment variables are incomplete or invalid.
    """
    if backend == "torch":
        os.environ.update(taken_from_slurm(os.environ))
    return found(backend, os.environ)
