"""The four packages as ports."""

from __future__ import annotations

from dataclasses import replace

from transformer_parity.transformer.ports.jax import LoadedJax
from transformer_parity.transformer.ports.package import LoadedPackage, PackagePort
from transformer_parity.transformer.ports.tensorflow import LoadedTf
from transformer_parity.transformer.ports.torch import LoadedTorch

# Keep torch before tf in this dict, because some builds crash if TensorFlow is imported before PyTorch.
PORTS: dict[str, PackagePort] = {
    "numpy": PackagePort("numpy", "reference_numpy", (), LoadedPackage),
    "torch": PackagePort("torch", "transformer_torch", ("torch",), LoadedTorch),
    "jax": PackagePort("jax", "transformer_jax", ("jax", "flax"), LoadedJax),
    "tf": PackagePort("tf", "transformer_tf", ("tensorflow", "keras"), LoadedTf),
}
# The reference without its optimizations in ``fast.py``. It computes each formula as written, and ports are compared
# with the resulting values.
DEFINITION = replace(PORTS["numpy"], fast=False)
