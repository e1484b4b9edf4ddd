"""The PyTorch package behind the port protocol."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import ndarray

from transformer_parity.ports.package import LoadedPackage


class LoadedTorch(LoadedPackage):
    """A model of the PyTorch package, in inference mode."""

    def to_array(self, array: ndarray) -> Any:
        """Return the framework's own array."""
        import torch

        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(self.model.device)
        return torch.from_numpy(array.copy()).to(self.model.device)

    def to_numpy(self, array: Any) -> ndarray:
        """Return a NumPy array."""
        import torch

        array = array.detach().cpu()
        if array.dtype == torch.bfloat16:
            return array.contiguous().view(torch.int16).numpy().view("bfloat16")
        return array.numpy()

    def run_tapped(self, block: str, arrays: dict[str, Any], given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Run a block of the model with every tap recorded."""
        import torch

        with torch.inference_mode():
            return super().run_tapped(block, arrays, given)

    def decode_stepwise(self, source_ids: ndarray, target_ids: ndarray) -> ndarray:
        """Return the logits of each target position, decoded one after another with a cache."""
        import torch

        with torch.inference_mode():
            return super().decode_stepwise(source_ids, target_ids)

    def run_fast(self, block: str, arrays: dict[str, Any]) -> Any:
        """Run a block of the model the way a user runs it for speed."""
        import torch

        with torch.inference_mode():
            return super().run_fast(block, arrays)
