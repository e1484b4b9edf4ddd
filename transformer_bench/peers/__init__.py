"""Implementations based on other libraries, called peers. ``parity bench --peers`` times them with the same weights.

Each peer is written in the style of its library, using the library's building blocks. A library is imported only when
its peer is used.
"""

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
