"""Adapter from the PyTorch package to the port protocol."""

# ruff: noqa: D102  LoadedPackage documents the methods

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy import ndarray

from transformer_parity.transformer.ports.package import LoadedPackage
from transformer_parity.transformer.ports.protocol import Placement
from transformer_spec.training_config import Gradients


class LoadedTorch(LoadedPackage):
    """A model of the PyTorch package, in inference mode."""

    def __init__(self, package: Any, model: Any, placement: Placement) -> None:
        from transformer_parity.transformer.ports import onednn

        super().__init__(package, model, placement)
        onednn.prefer(placement.precision)

    def to_array(self, array: ndarray) -> Any:
        import torch

        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(self.model.device)
        return torch.from_numpy(array.copy()).to(self.model.device)

    def to_numpy(self, array: Any) -> ndarray:
        import torch

        array = array.detach().cpu()
        if array.dtype == torch.bfloat16:
            return array.contiguous().view(torch.int16).numpy().view("bfloat16")
        return array.numpy()

    def gradients(self, inputs: Mapping[str, ndarray]) -> Gradients:
        mode = self.model.training
        self.model.train()  # gradients() must not apply dropout even in training mode
        try:
            return super().gradients(inputs)
        finally:
            self.model.train(mode)

    def summed(self, mesh: Any, numbers: Sequence[float]) -> Any:
        import torch

        found = torch.tensor(numbers, dtype=torch.float64, device=mesh.device_type)
        torch.distributed.all_reduce(found)
        return found.tolist()

    def inference(self) -> Any:
        import torch

        return torch.inference_mode()
