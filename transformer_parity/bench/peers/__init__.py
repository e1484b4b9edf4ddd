"""Other people's Transformers with our weights in them, doing the same work: what ``parity bench --peers`` times.

Each is written the way its library's users write it, of that library's own building blocks. Nothing is imported
before it is asked for.
"""

from __future__ import annotations

from transformer_parity.bench.peers.conventions import Peer
from transformer_parity.bench.peers.flax_nnx import FlaxNNX
from transformer_parity.bench.peers.keras_hub import KerasHub
from transformer_parity.bench.peers.marian import Marian
from transformer_parity.bench.peers.torch_nn import TorchNN

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
