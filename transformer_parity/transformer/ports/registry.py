"""The four packages as ports."""

from __future__ import annotations

from dataclasses import replace

from transformer_parity.transformer.ports.jax import LoadedJax
from transformer_parity.transformer.ports.package import LoadedPackage, PackagePort
from transformer_parity.transformer.ports.tensorflow import LoadedTf
from transformer_parity.transformer.ports.torch import LoadedTorch

# torch stands before tensorflow: imported the other way round, some builds of the two crash.
PORTS: dict[str, PackagePort] = {
    "numpy": PackagePort("numpy", "reference_numpy", (), LoadedPackage),
    "torch": PackagePort("torch", "transformer_torch", ("torch",), LoadedTorch),
    "jax": PackagePort("jax", "transformer_jax", ("jax", "flax"), LoadedJax),
    "tf": PackagePort("tf", "transformer_tf", ("tensorflow", "keras"), LoadedTf),
}
# The definition: formulas only, without ``fast.py``. It computes the values that ports are compared with.
DEFINITION = replace(PORTS["numpy"], fast=False)
