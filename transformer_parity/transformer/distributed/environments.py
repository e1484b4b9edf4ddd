"""Environment variables for processes that train one model together on one machine.

The parent process chooses the network ports before the workers start, and reserves these ports until the run ends. To
reserve a port, it binds a socket to the port without listening, so the operating system doesn't assign the port to
other programs. On Linux, the framework's server can still bind to the port, because both sockets set SO_REUSEADDR. The
parent process therefore doesn't need to run the server or import the framework.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from transformer_spec.parallel_plan import Plan

HERE = "127.0.0.1"


def number_of_processes(backend: str, plan: Plan, asked: int | None) -> int:
    """Return the number of processes for a plan.

    Args:
        backend: Name of the backend or of a user's port.
        plan: The parallelism plan.
        asked: Requested number of processes; None for the default.

    Raises:
        ValueError: If the framework doesn't support the plan with the requested number of processes.
    """
    possible = {"numpy": (1,), "jax": (1, asked or 1), "tf": (1, plan.devices)}.get(backend, (plan.devices,))
    count = asked or possible[0]
    if count not in possible or plan.devices % count:
        reasons = {
            "numpy": "NumPy simulates a plan in one process",
            "torch": f"PyTorch requires one process per device of {plan}",
            "jax": f"JAX requires a number that divides the {plan.devices} devices of {plan}",
            "tf": f"TensorFlow requires one process, or one process per device of {plan}",
        }
        reason = reasons.get(backend, f"{backend} requires one process per device of {plan}")
        raise ValueError(f"--processes must match the plan ({reason}): got {count}")
    return count


@contextmanager
def environments(backend: str, devices: int, processes: int) -> Iterator[list[dict[str, str]]]:
    """Yield the environment variables for each process, and reserve the network ports until the ``with`` block ends.

    Args:
        backend: A name in ``PORTS``, or a user's port. User ports get the variables that torchrun sets.
        devices: Total number of devices across all processes.
        processes: Number of processes, among which the devices are divided evenly.
    """
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(processes)]
        ports = [_bound(one) for one in sockets]
        if sys.platform != "linux":  # other systems don't allow a second socket to bind to the port
            stack.close()
        if backend == "jax":
            yield _of_jax(devices // processes, processes, ports)
        elif backend == "tf" and processes > 1:
            yield _of_tf(ports)
        elif backend in ("numpy", "tf"):
            yield [{}]
        else:
            yield _of_torch(processes, ports)


def _bound(one: socket.socket) -> int:
    """Bind a socket to a free network port on all addresses of this machine, and return the port number."""
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.bind(("", 0))
    return one.getsockname()[1]


def _of_torch(processes: int, ports: list[int]) -> list[dict[str, str]]:
    common = {"MASTER_ADDR": HERE, "MASTER_PORT": f"{ports[0]}", "WORLD_SIZE": f"{processes}"}
    common["LOCAL_WORLD_SIZE"] = f"{processes}"
    return [{**common, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"} for rank in range(processes)]


def _of_jax(devices: int, processes: int, ports: list[int]) -> list[dict[str, str]]:
    common = {"JAX_NUM_CPU_DEVICES": f"{devices}"}
    if processes == 1:
        return [common]
    common |= {"JAX_COORDINATOR_ADDRESS": f"{HERE}:{ports[0]}", "JAX_NUM_PROCESSES": f"{processes}"}
    return [{**common, "JAX_PROCESS_ID": f"{rank}"} for rank in range(processes)]


def _of_tf(ports: list[int]) -> list[dict[str, str]]:
    cluster = {"worker": [f"{HERE}:{port}" for port in ports]}
    tasks = [{"type": "worker", "index": index} for index in range(len(ports))]
    return [{"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})} for task in tasks]
