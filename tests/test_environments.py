"""Environment variables for processes that train together on one machine, and the network ports reserved for them."""

from __future__ import annotations

import json
import socket

import pytest

from transformer_parity.apps.train import group
from transformer_parity.apps.train.group import Group
from transformer_parity.transformer.distributed.environments import environments


def ports(name, told):
    """Return the network ports in the environment variables of a framework's processes."""
    if name == "tf":
        found = [json.loads(variables["TF_CONFIG"])["cluster"]["worker"] for variables in told]
    else:
        key = {"torch": "MASTER_PORT", "jax": "JAX_COORDINATOR_ADDRESS"}[name]
        found = [[variables[key]] for variables in told]
    assert all(each == found[0] for each in found)
    return [int(address.rpartition(":")[2]) for address in found[0]]


@pytest.mark.parametrize(("name", "needed"), [("torch", 1), ("jax", 1), ("tf", 4)])
def test_environment_variables_match_the_framework(name, needed):
    with environments(name, 8 if name == "jax" else 4, 4) as told:
        assert [group.found(name, variables) for variables in told] == [Group(rank, 4) for rank in range(4)]
        assert len({*ports(name, told)}) == needed
        assert {variables.get("JAX_NUM_CPU_DEVICES") for variables in told} == {"2" if name == "jax" else None}


@pytest.mark.parametrize(("name", "told"), [("numpy", {}), ("jax", {"JAX_NUM_CPU_DEVICES": "4"}), ("tf", {})])
def test_single_process_environment_describes_a_group_of_one(name, told):
    with environments(name, 4, 1) as found:
        assert found == [told]
    with environments("torch", 1, 1) as (alone,):  # a user's own trainer may look for these variables
        assert group.found("torch", alone) == Group(0, 1)


@pytest.mark.parametrize("name", ["torch", "jax", "tf"])
def test_port_stays_reserved_for_the_assigned_process(name):
    with environments(name, 2, 2) as told:
        for port in ports(name, told):
            for address in ("127.0.0.1", "0.0.0.0"):
                with socket.socket() as another, pytest.raises(OSError, match="in use"):
                    another.bind((address, port))
                # Like the frameworks' servers, this one allows the address to be reused.
                with socket.create_server((address, port)):
                    pass
    for port in ports(name, told):
        with socket.socket() as free:
            free.bind(("127.0.0.1", port))
