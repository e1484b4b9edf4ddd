"""Peers: implementations based on other libraries, which ``parity bench --peers`` times with the same weights."""

from __future__ import annotations

from transformer_bench.peers.conventions import Peer
from transformer_bench.peers.flax_nnx import FlaxNNX
from transformer_bench.peers.keras_hub import KerasHub
from transformer_bench.peers.marian import Marian
from transformer_bench.peers.torch_nn import TorchNN

PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        TorchNN(compiled=False),
        TorchNN(compiled=True),
        Marian(),
        FlaxNNX(),
        KerasHub(xla=False),
        KerasHub(xla=True),
    )
}

__all__ = ["PEERS", "FlaxNNX", "KerasHub", "Marian", "Peer", "TorchNN"]
