"""What the processes of one machine find in their environments, to train one model together.

Their ports are chosen here, before there is a process that could listen at them, and held until all is over: a socket
has each, bound and never listening. No other program is then given such a port, and on Linux the server of a framework
gets it all the same, since both allow the address to be used again (SO_REUSEADDR). So the process that starts the
others need not be the one that listens, and imports no framework.
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
    """Return how many processes of this machine follow a plan; None asks for what is usual.

    Raises:
        ValueError: The framework cannot follow the plan with so many.
    """
    possible = {"numpy": (1,), "jax": (1, asked or 1), "tf": (1, plan.devices)}.get(backend, (plan.devices,))
    count = asked or possible[0]
    if count not in possible or plan.devices % count:
        reasons = {
            "numpy": "NumPy simulates a plan in one process",
            "torch": f"PyTorch needs one for each device of {plan}",
            "jax": f"JAX needs the {plan.devices} devices of {plan} to fall into as many equal parts",
            "tf": f"TensorFlow needs one, or one for each device of {plan}",
        }
        reason = reasons.get(backend, f"{backend} is given one for each device of {plan}")
        raise ValueError(f"--processes must fit the plan: {reason}: got {count}")
    return count


@contextmanager
def environments(backend: str, devices: int, processes: int) -> Iterator[list[dict[str, str]]]:
    """Yield what each process finds in its environment before it imports the framework; the block holds their ports.

    Args:
        backend: A name of ``PORTS``, or a port of the user's own, which finds what torchrun would set.
        devices: How many devices all processes have together.
        processes: How many there are, with as many devices each.
    """
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(processes)]
        ports = [_bound(one) for one in sockets]
        if sys.platform != "linux":  # where a port has one socket, whoever allows a second
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
    """Return a port that nothing else is given from now on, at any address of this machine."""
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
